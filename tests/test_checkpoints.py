"""Checkpoints: a run that is stopped anywhere and gone on with is the run that was never stopped."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import runs
import torch
from runs import Crash, crash, crash_at, stop_at

import zoo
from headstart.errors import UserError
from headstart.heads.format import load_head
from headstart.heads.methods import METHODS
from headstart.training import checkpoints, loop
from headstart.training.checkpoints import Interrupts
from headstart.training.loop import train


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return runs.prepared(tmp_path_factory.mktemp("data"))


def recipe_of(run, rows, method, **changes):
    """Medusa heads with AdamW, EAGLE-3 with Muon where torch has it."""
    name = "muon" if method == "eagle3" and hasattr(torch.optim, "Muon") else "adamw"
    return runs.recipe(run, rows, method, optim__name=name, **changes)


@pytest.fixture(scope="module", params=["medusa", "eagle3"])
def undisturbed(request, rows, tmp_path_factory):
    """A run that nobody stopped: six steps, two epochs of three, the last one of each short."""
    run = tmp_path_factory.mktemp("runs") / "undisturbed"
    train(recipe_of(run, rows, request.param), backbone=zoo.backbone())
    assert [len(line["rows"]) for line in runs.lines(run, "rows.jsonl")] == [4, 4, 2] * 2
    return request.param, run


def assert_equal_runs(run, expected):
    assert runs.same_bits(runs.weights(run), runs.weights(expected))
    assert runs.lines(run, "rows.jsonl") == runs.lines(expected, "rows.jsonl")
    figures = ("step", "epoch", "lr", "loss", "accuracy", "gradient_norm", "tokens")
    for one, other in zip(runs.lines(run), runs.lines(expected), strict=True):
        assert {name: one.get(name) for name in figures} == {name: other.get(name) for name in figures}


@pytest.mark.parametrize("step", [1, 2, 4, 6])
def test_a_crash_in_any_step_changes_nothing(step, undisturbed, rows, tmp_path):
    """B037, B038, B041, B166: checkpoints at every other step, in the middle of epochs and at their ends."""
    method, expected = undisturbed
    recipe = recipe_of(tmp_path / "run", rows, method, save__every=2)
    crash_at(recipe, step)
    assert not (recipe.run / "head").exists()
    train(recipe, backbone=zoo.backbone())
    assert_equal_runs(recipe.run, expected)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_at_once_and_ends_cleanly(number, undisturbed, rows, tmp_path, monkeypatch, capsys):
    method, expected = undisturbed
    recipe = recipe_of(tmp_path / "run", rows, method, save__every=100)
    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        stop_at(patch, 4, lambda: os.kill(os.getpid(), number))
        with pytest.raises(SystemExit) as ended:
            train(recipe, backbone=zoo.backbone())
    assert ended.value.code == 128 + number
    assert signal.getsignal(number) is before
    assert [path.name for path in checkpoints.checkpoints(recipe.run)] == ["step-000004"]
    assert "saved at step 4; the same command goes on from there" in capsys.readouterr().err
    train(recipe, backbone=zoo.backbone())
    assert "going on behind step 4, step 1 of epoch 2" in capsys.readouterr().err
    assert_equal_runs(recipe.run, expected)


def test_a_signal_in_a_save_is_heeded_behind_it(undisturbed, rows, tmp_path, monkeypatch, capsys):
    """The checkpoint is whole, and the run ends with it."""
    method, expected = undisturbed
    recipe = recipe_of(tmp_path / "run", rows, method, save__every=2)
    plain = checkpoints.write_tensors
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "write_tensors", lambda *given: (signal.raise_signal(signal.SIGTERM), plain(*given)))
        with pytest.raises(SystemExit) as ended:
            train(recipe, backbone=zoo.backbone())
    assert ended.value.code == 128 + signal.SIGTERM
    assert [path.name for path in checkpoints.checkpoints(recipe.run)] == ["step-000002"]
    assert not list(recipe.run.rglob("*.part"))
    train(recipe, backbone=zoo.backbone())
    assert_equal_runs(recipe.run, expected)


def test_the_second_signal_is_not_held_back():
    """Raised in this thread: one that is sent to the process may arrive in another, and be noted a moment later."""
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        assert interrupts.signal == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import runs, torch, zoo
from pathlib import Path
from headstart.training.loop import train
torch.set_num_threads(1)
print("ready", flush=True)
train(runs.recipe(Path({run!r}), Path({rows!r}), {method!r}, save__every=1), backbone=zoo.backbone())
"""


def test_a_killed_process_is_gone_on_with_by_another_one(undisturbed, rows, tmp_path):
    """kill -9 at whatever moment comes, a save included."""
    method, expected = undisturbed
    if method != "medusa":
        pytest.skip("one method is enough for a real process")
    run = tmp_path / "run"
    text = SCRIPT.format(tests=str(Path(__file__).parent), run=str(run), rows=str(rows), method=method)
    process = subprocess.Popen([sys.executable, "-c", text], stderr=subprocess.DEVNULL, stdout=subprocess.PIPE)
    while not (run / "checkpoints").exists() and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    train(recipe_of(run, rows, method, save__every=1), backbone=zoo.backbone())
    assert_equal_runs(run, expected)
    assert not list(run.rglob(".*.part"))


def test_checkpoints_rotate_and_hold_no_pickled_objects(rows, tmp_path):
    run = tmp_path / "run"
    train(runs.recipe(run, rows, save__every=1, save__keep=2), backbone=zoo.backbone())
    found = checkpoints.checkpoints(run)
    assert [path.name for path in found] == ["step-000005", "step-000006"]
    for path in found:
        assert {one.name for one in path.iterdir()} == {"head.safetensors", "optimizer.pt", "state.json"}
        moments = torch.load(path / "optimizer.pt", weights_only=True)
        assert all(one["exp_avg"].dtype == torch.float32 for one in moments["state"].values())


def test_a_finished_run_is_left_alone(rows, tmp_path, monkeypatch, capsys):
    recipe = runs.recipe(tmp_path / "run", rows)
    made = train(recipe, backbone=zoo.backbone())
    before = {path: path.stat().st_mtime_ns for path in recipe.run.rglob("*")}
    monkeypatch.setattr(loop, "set_up", lambda *_: pytest.fail("a finished run was set up again"))
    assert train(recipe) == made
    assert "this run is finished" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in recipe.run.rglob("*")} == before


def test_a_head_that_was_not_written_any_more_is_written_now(undisturbed, rows, tmp_path, monkeypatch):
    method, expected = undisturbed
    recipe = recipe_of(tmp_path / "run", rows, method)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "save_head", lambda *_, **__: crash())
        with pytest.raises(Crash):
            train(recipe, backbone=zoo.backbone())
    train(recipe, backbone=zoo.backbone())
    assert_equal_runs(recipe.run, expected)


def begun(rows, run):
    """A run of which one step was saved."""
    recipe = runs.recipe(run, rows, save__every=1)
    crash_at(recipe, 2)
    return recipe


def test_other_settings_are_refused_with_key_and_both_values(rows, tmp_path):
    recipe = begun(rows, tmp_path / "run")
    changes = {"optim.lr": 1e-4, "head.num_heads": 3, "log.every": 7, "evaluate.rows": 1}
    with pytest.raises(UserError) as error:
        train(recipe, changes, backbone=zoo.backbone())
    told = str(error.value)
    assert "optim.lr was 0.003, is now 0.0001" in told
    assert "head.num_heads was 2, is now 3" in told
    assert "log.every" not in told
    assert "evaluate.rows" not in told


def test_another_backbone_or_other_rows_are_refused(rows, tmp_path, tmp_path_factory):
    recipe = begun(rows, tmp_path / "run")
    with pytest.raises(UserError, match="the backbone's weights changed since: was .*, is now"):
        train(recipe, backbone=zoo.backbone(seed=1))
    (rows_moved := tmp_path / "moved").mkdir()
    other = runs.prepared(rows_moved, count=13)
    aside = rows.rename(rows.with_name("aside"))
    try:
        other.rename(rows)
        with pytest.raises(UserError, match="the rows trained on changed since"):
            train(recipe, backbone=zoo.backbone())
    finally:
        rows.rename(other)
        aside.rename(rows)


def test_a_damaged_checkpoint_is_named_and_the_one_before_serves(undisturbed, rows, tmp_path):
    method, expected = undisturbed
    recipe = recipe_of(tmp_path / "run", rows, method, save__every=1)
    crash_at(recipe, 4)
    newest = checkpoints.checkpoints(recipe.run)[-1]
    (newest / "head.safetensors").write_bytes(b"cut short")
    with pytest.raises(UserError, match=f"{newest}: cannot be read"):
        train(recipe, backbone=zoo.backbone())
    for path in newest.iterdir():
        path.unlink()
    newest.rmdir()
    train(recipe, backbone=zoo.backbone())
    assert_equal_runs(recipe.run, expected)


class Payload:
    def __reduce__(self):
        return (os.system, ("touch /tmp/never",))


def test_a_checkpoint_that_would_run_code_is_refused(rows, tmp_path):
    recipe = begun(rows, tmp_path / "run")
    newest = checkpoints.checkpoints(recipe.run)[-1]
    with open(newest / "optimizer.pt", "wb") as file:
        pickle.dump(Payload(), file)
    with pytest.raises(UserError, match="cannot be read"):
        train(recipe, backbone=zoo.backbone())


def test_a_save_that_fails_loses_nothing(undisturbed, rows, tmp_path, monkeypatch, capsys):
    """B059: the run goes on, and the next save is tried."""
    method, expected = undisturbed
    recipe = recipe_of(tmp_path / "run", rows, method, save__every=1)
    plain, tried = checkpoints.save, []

    def save(run, state, *rest):
        tried.append(state.step)
        if state.step == 2:
            raise UserError(f"{run}: cannot be written (No space left on device)")
        return plain(run, state, *rest)

    monkeypatch.setattr(checkpoints, "save", save)
    train(recipe, backbone=zoo.backbone())
    assert tried == [1, 2, 3, 4, 5, 6, 6]
    assert "the checkpoint of step 2 was not written" in capsys.readouterr().err
    assert_equal_runs(recipe.run, expected)


def test_what_a_kill_left_half_written_is_removed_and_lines_are_taken_back(undisturbed, rows, tmp_path):
    method, expected = undisturbed
    recipe = recipe_of(tmp_path / "run", rows, method, save__every=2)
    crash_at(recipe, 4)
    (recipe.run / "checkpoints" / ".step-000004.abc.part").mkdir()
    (recipe.run / "checkpoints" / "step-000009").mkdir()  # no state: not one of ours
    with open(recipe.run / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')
    assert [line["step"] for line in runs.lines(recipe.run, "rows.jsonl")] == [1, 2, 3]
    train(recipe, backbone=zoo.backbone())
    assert not (recipe.run / "checkpoints" / ".step-000004.abc.part").exists()
    assert_equal_runs(recipe.run, expected)


def test_a_folder_of_something_else_is_left_alone(rows, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(UserError, match="mine: holds letter.txt and no run"):
        train(runs.recipe(tmp_path / "mine", rows), backbone=zoo.backbone())
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["letter.txt"]
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / ".recipe.yaml.1.part").write_text("back")  # killed before it had begun
    train(runs.recipe(tmp_path / "half", rows, optim__max_steps=1), backbone=zoo.backbone())
    assert not (tmp_path / "half" / ".recipe.yaml.1.part").exists()


def test_two_runs_in_one_folder_are_told_apart(undisturbed, rows, tmp_path):
    """While the first one lives; the second one changes nothing of it."""
    method, expected = undisturbed
    recipe = recipe_of(tmp_path / "run", rows, method, save__every=2)
    crash_at(recipe, 4)
    part = recipe.run / "checkpoints" / ".step-000004.abc.part"
    part.mkdir()
    before = (recipe.run / "metrics.jsonl").read_text()
    with (
        checkpoints.alone(recipe.run),
        pytest.raises(UserError, match="run: another process trains in this folder; wait for it, or choose another"),
    ):
        train(recipe, backbone=zoo.backbone())
    assert part.exists()
    assert (recipe.run / "metrics.jsonl").read_text() == before
    train(recipe, backbone=zoo.backbone())
    assert_equal_runs(recipe.run, expected)


def test_a_run_folder_that_is_a_file_or_cannot_be_written_is_said(rows, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="file: is no folder"):
        train(runs.recipe(tmp_path / "file", rows), backbone=zoo.backbone())
    with pytest.raises(UserError, match="cannot be written"):
        train(runs.recipe(tmp_path / "file" / "run", rows), backbone=zoo.backbone())


def test_a_checkpoint_says_where_the_run_stands(rows, tmp_path):
    recipe = begun(rows, tmp_path / "run")
    state = json.loads((checkpoints.checkpoints(recipe.run)[-1] / "state.json").read_text())
    assert (state["step"], state["finished"]) == (1, False)
    assert state["tokens"] == runs.lines(recipe.run)[0]["tokens"]
    assert (state["processes"], state["layout"]) == (1, "whole on each process")


def test_a_full_disk_is_told_whatever_the_library_calls_it(tmp_path, monkeypatch):
    """torch raises a RuntimeError of its zip writer there, which is no error of a step."""
    head = METHODS["medusa"].build(zoo.backbone())

    def full(*_):
        raise RuntimeError("unexpected pos 45248 vs 45140")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(UserError, match="step-000003: cannot be written, is the disk full"):
        checkpoints.save(tmp_path, checkpoints.State(step=3), head.state_dict(), {}, 1)
    assert not checkpoints.checkpoints(tmp_path)


def test_the_head_that_was_accepted_longest_is_kept(rows, tmp_path, monkeypatch, capsys):
    """By measurement, over a crash; and it is the head of that step."""
    lengths = {1: 1.2, 2: 1.9, 3: 1.4, 4: 1.9, 5: 1.1, 6: 1.3}
    plain, weights = loop.evaluate, {}

    def measured(setup):
        step = next(place for place in range(1, 7) if place not in weights)
        weights[step] = {name: one.clone() for name, one in setup.head.state_dict().items()}
        return {**plain(setup), "acceptance_length": lengths[step]}

    monkeypatch.setattr(loop, "evaluate", measured)
    recipe = runs.recipe(tmp_path / "run", rows, evaluate__every=1, save__every=1)
    crash_at(recipe, 4)
    train(recipe, backbone=zoo.backbone())
    best = load_head(recipe.run / "best")
    assert runs.same_bits(best.state_dict(), weights[2])
    assert json.loads((recipe.run / "best" / "config.json").read_text())["provenance"]["steps"] == 2
    assert not runs.same_bits(best.state_dict(), runs.weights(recipe.run))
    assert f"the best head, of step 2 (1.90 measured), is {recipe.run / 'best'}" in capsys.readouterr().err


def test_a_best_head_that_cannot_be_written_costs_nothing_else(rows, tmp_path, monkeypatch, capsys):
    plain = loop.save_head

    def save(head, folder, **rest):
        if folder.name == "best":
            raise UserError(f"{folder}: cannot be written (No space left on device)")
        return plain(head, folder, **rest)

    monkeypatch.setattr(loop, "save_head", save)
    recipe = runs.recipe(tmp_path / "run", rows, optim__max_steps=1)
    assert train(recipe, backbone=zoo.backbone()).exists()
    assert "the best head so far was not written" in capsys.readouterr().err
