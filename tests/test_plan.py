"""What a run will take, against what runs took."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import runs
import torch

import zoo
from headstart import cli
from headstart.errors import UserError
from headstart.files import cache_folder
from headstart.heads.methods import TRAINABLE
from headstart.training import memory
from headstart.training.loop import train
from headstart.training.memory import Shape, parts
from headstart.training.plan import GIB, plan
from headstart.training.setup import set_up


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return runs.prepared(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny backbone on disk."""
    path = tmp_path_factory.mktemp("backbone")
    zoo.model(max_position_embeddings=1024).save_pretrained(path)
    zoo.tokenizer().save_pretrained(path)
    return path


@pytest.mark.parametrize("method", TRAINABLE)
def test_a_plan_counts_what_a_run_has(method, rows, tmp_path):
    """Steps, rows and parameters, without the weights of anything."""
    recipe = runs.recipe(tmp_path / "run", rows, method, draft_vocab=40, batch__rows=3)
    made, setup = plan(recipe, backbone=zoo.backbone()), set_up(recipe, zoo.backbone())
    assert made.steps == setup.schedule.steps
    assert (made.rows, made.tokens) == (len(setup.rows), int(setup.rows.lengths.sum()))
    trained = sum(one.numel() for one in setup.parameters)
    assert made.facts["trainable parameters"] == f"{trained:,}"
    assert not (tmp_path / "run").exists()


def test_disk_is_what_a_run_leaves(rows, tmp_path, monkeypatch):
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    recipe = runs.recipe(tmp_path / "run", rows, "eagle3", data__cache="auto", save__every=1, save__keep=2)
    made = plan(recipe, backbone=zoo.backbone())
    train(recipe, backbone=zoo.backbone())

    def size(place):
        return sum(path.stat().st_size for path in place.rglob("*") if path.is_file())

    kept = made.disk["checkpoints"] * 2 / 3  # the third is there while it is written
    assert kept == pytest.approx(size(tmp_path / "run" / "checkpoints"), rel=0.1)
    assert made.disk["cached features"] == pytest.approx(size(tmp_path / "cache" / "features"), rel=0.1)
    heads = sum(size(tmp_path / "run" / name) for name in ("head", "best"))
    assert made.disk["head and best head"] == pytest.approx(heads, rel=0.2)


def shape_of(method="eagle3", processes=1, layout="whole", **changes):
    recipe = runs.recipe(Path("run"), Path("rows"), method, **changes)
    backbone = zoo.backbone()
    head = TRAINABLE[method].build(backbone)
    return Shape(recipe, backbone, head, torch.float32, False, "cpu", 512, [400, 380, 360], processes, layout)


def test_each_layout_shards_what_it_is_said_to():
    whole = parts(shape_of())
    found = {name: parts(shape_of(processes=4, layout=name)) for name in ("zero1", "zero2", "zero3", "fsdp")}
    for name, made in found.items():
        assert made["optimizer"] == pytest.approx(whole["optimizer"] / 4)
        assert (made["gradients"] < whole["gradients"]) == (name != "zero1")
        assert (made["backbone"] < whole["backbone"]) == (name in ("zero3", "fsdp"))
        assert (made["head"] < whole["head"]) == (name == "fsdp")
    assert parts(shape_of(processes=4)) == whole


def test_muon_has_one_average_of_what_it_moves():
    adamw, muon = (memory.moment_bytes(shape_of(optim__name=name)) for name in ("adamw", "muon"))
    assert 0.5 < muon / adamw < 1


def test_checkpointing_is_said_to_take_less():
    again, kept = (sum(parts(shape_of(batch__checkpointing=one)).values()) for one in (True, False))
    assert again < kept


def test_a_run_that_does_not_fit_is_told_what_to_change(rows, tmp_path):
    recipe = runs.recipe(tmp_path / "run", rows, "eagle3", batch__rows=8, batch__forward_rows=8)
    made = plan(recipe, backbone=zoo.backbone())
    needed = sum(made.memory.values())
    smaller = plan(recipe, {"batch.forward_tokens": 100}, backbone=zoo.backbone())
    room = (needed + sum(smaller.memory.values())) / 2
    tight = plan(recipe, backbone=zoo.backbone(), memory=room / GIB)
    assert tight.short
    with pytest.raises(UserError, match=r"memory: needs .* GiB, and .* set batch\.forward_tokens=\d+"):
        tight.check()
    followed = dict(one.split("=") for one in tight.change.split())
    assert not plan(recipe, followed, backbone=zoo.backbone(), memory=room / GIB).short
    with pytest.raises(UserError, match="no setting alone makes it fit"):
        plan(recipe, backbone=zoo.backbone(), memory=0.01).check()
    with pytest.raises(UserError, match="disk: needs .* set save.keep=1"):
        disk = sum(made.disk.values())
        plan(recipe, backbone=zoo.backbone(), disk=(disk - 1000) / GIB).check()


def test_calibration_takes_steps_and_leaves_nothing(rows, tmp_path):
    recipe = runs.recipe(tmp_path / "run", rows, "eagle3")
    made = plan(recipe, backbone=zoo.backbone(), calibrate=True)
    assert made.measured > 0
    assert made.seconds == pytest.approx(made.steps * made.step_seconds)
    assert "measured" in made.lines()["time"]
    assert not (tmp_path / "run").exists()


def test_the_clock_of_a_recipe_bounds_the_time(rows, tmp_path):
    recipe = runs.recipe(tmp_path / "run", rows, optim__max_minutes=1e-6)
    assert plan(recipe, backbone=zoo.backbone()).seconds == pytest.approx(6e-5)


def test_the_verb_reads_no_weights(folder, rows, tmp_path, capsys):
    weights = folder / "model.safetensors"
    aside = weights.rename(weights.with_name("aside"))
    try:
        (tmp_path / "r.yaml").write_text(f"backbone: {folder}\nrun: {tmp_path / 'run'}\nmethod: medusa\n")
        arguments = ["plan", str(tmp_path / "r.yaml"), f"data.train={rows}", "data.held_out=0.2"]
        assert cli.main(arguments) == 0
        told = capsys.readouterr().out
        for word in ("method", "rows", "steps", "memory", "disk", "time", "libraries"):
            assert word in told
        assert cli.main([*arguments, "--memory", "0.01"]) == 2
        assert "memory: needs" in capsys.readouterr().err
        assert cli.main([*arguments, "--calibrate"]) == 2  # in a process of its own, which finds no weights
        assert "the steps to be measured ended with exit code 1" in capsys.readouterr().err
        assert cli.main([*arguments, "optim.lrr=1"]) == 2
        assert "did you mean optim.lr?" in capsys.readouterr().err
    finally:
        aside.rename(weights)
    assert cli.main([*arguments, "--calibrate"]) == 0
    assert "GiB, measured" in capsys.readouterr().out


def peak_and_plan(recipe, *changes):
    """GiB that a run really took at its peak, and that its plan says."""
    common = [*changes, "evaluate.prompts=0", "log.every=1"]
    run = next(one.split("=", 1)[1] for one in changes if one.startswith("run="))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for verb in ("plan", "train"):
        done = subprocess.run(
            [sys.executable, "-m", "headstart", verb, str(recipe), *common],
            capture_output=True, text=True, env=environment,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        if verb == "plan":
            line = next(line for line in done.stdout.splitlines() if line.startswith("memory"))
    with open(os.path.join(run, "metrics.jsonl")) as file:
        taken = max(json.loads(one).get("memory_gib", 0) for one in file)
    return taken, float(line.split()[1])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["medusa", "eagle3", "eagle1", "hydra"])
def test_memory_of_a_tiny_run_is_within_a_fifth(method, folder, rows, tmp_path):
    (tmp_path / "r.yaml").write_text(f"backbone: {folder}\nrun: {tmp_path / 'run'}\nmethod: {method}\n")
    changes = (f"data.train={rows}", "data.held_out=0.2", f"run={tmp_path / 'run'}", "precision.autocast=no")
    taken, said = peak_and_plan(tmp_path / "r.yaml", *changes)
    assert said == pytest.approx(taken, rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quickstart", "smollm2-eagle3", "smollm2-medusa", "smollm2-hydra", "smollm2-eagle1"])
def test_memory_of_shipped_recipes_is_within_a_fifth(name, tmp_path):
    if not (cache_folder() / "backbones" / "smollm2-135m").exists():
        pytest.skip("smollm2-135m is not in the cache: headstart fetch smollm2-135m")
    path = Path(__file__).parents[1] / "configs" / f"{name}.yaml"
    changes = (f"run={tmp_path / 'run'}", "optim.max_steps=8", "optim.max_minutes=null", "evaluate.rows=0")
    taken, said = peak_and_plan(path, *changes)
    assert said == pytest.approx(taken, rel=0.2)
