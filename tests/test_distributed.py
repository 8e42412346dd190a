"""Several processes train the head of one: through the shipped scripts and the real accelerate launch."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import launches
import pytest
import runs
import torch
from accelerate import disk_offload
from launches import Launch, needs_compiler, needs_deepspeed
from safetensors.torch import load_file

import zoo
from headstart.errors import UserError
from headstart.heads.backbone import Backbone
from headstart.training import checkpoints, zero
from headstart.training.layout import Layout
from headstart.training.loop import train
from headstart.training.recipe import load_recipe
from headstart.training.setup import cache_features

LAYOUTS = {
    "gpus": "whole on each process",
    "zero1": "DeepSpeed ZeRO, stage 1",
    "zero2": "DeepSpeed ZeRO, stage 2",
    "zero3": "DeepSpeed ZeRO, stage 3",
    "fsdp": "FSDP",
}
deepspeed = [needs_deepspeed, needs_compiler]
sharded = [pytest.param(name, marks=deepspeed if name.startswith("zero") else []) for name in LAYOUTS]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return runs.prepared(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module", params=["medusa", "eagle3"])
def expected(request, rows, tmp_path_factory):
    """A recipe of forwards of one row, and the run of one process with a forward a step; the draft vocabulary is
    counted, and has to be the same on every process."""
    folder = tmp_path_factory.mktemp(request.param)
    launches.backbone(folder / "backbone")
    changes = {"save__every": 3, "optim__max_steps": 16, "evaluate__every": 5, "draft_vocab": 40}
    path = launches.recipe(folder, rows, request.param, **changes)
    return path, launches.alone(path, folder / "alone", {"batch.forward_rows": "null"})


def state(run: Path) -> dict:
    return json.loads((checkpoints.checkpoints(run)[-1] / "state.json").read_text())


def method(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize(
    ("config", "name"),
    [
        pytest.param("gpus", "eagle3", marks=pytest.mark.slow),  # in the default suite there is the step of eight rows
        pytest.param("zero3", "medusa", marks=deepspeed),
    ],
)
def test_two_processes_train_the_head_of_one(config, name, expected, tmp_path):
    """B056, B061, B064, G03."""
    path, alone = expected
    if method(path) != name:
        pytest.skip("of the other method the slow tests")
    with Launch(tmp_path, "launch_node.sh", "--cpu", "--config", config, path, f"run={tmp_path / 'run'}") as launch:
        launch.succeed()
    launches.assert_same(tmp_path / "run", alone)
    assert (state(tmp_path / "run")["layout"], state(tmp_path / "run")["processes"]) == (LAYOUTS[config], 2)


@pytest.mark.parametrize("name", [pytest.param("medusa", marks=pytest.mark.slow), "eagle3"])
def test_eight_rows_four_times_two_and_two_ranks_of_four_are_one_step(name, tmp_path):
    """G03: weights within 1e-5 in fp32, also of an epoch's short last step, three rows in uneven shards."""
    launches.backbone(tmp_path / "backbone")
    changes = {"batch__rows": 8, "batch__forward_rows": None, "optim__epochs": 2, "data__held_out": 0.1}
    path = launches.recipe(tmp_path, runs.prepared(tmp_path, 13), name, **changes)
    whole = launches.alone(path, tmp_path / "whole")
    assert [len(line["rows"]) for line in runs.lines(whole, "rows.jsonl")] == [8, 3, 8, 3]
    accumulated = launches.alone(path, tmp_path / "accumulated", {"batch.forward_rows": 2})
    with Launch(tmp_path, "launch_node.sh", "--cpu", path, f"run={tmp_path / 'ranks'}") as launch:
        launch.succeed()
    assert state(tmp_path / "ranks")["processes"] == 2
    for run in (accumulated, tmp_path / "ranks"):
        launches.assert_same(run, whole)


@pytest.mark.slow
def test_more_processes_than_rows(rows, tmp_path):
    """A process that never has a row of its own is told the loss of all, and does not take it for one that stands."""
    launches.backbone(tmp_path / "backbone")
    path = launches.recipe(tmp_path, rows, "eagle3", batch__rows=1, optim__max_steps=12)
    alone = launches.alone(path, tmp_path / "alone")
    with Launch(tmp_path, "launch_node.sh", "--cpu", path) as launch:
        launch.succeed()
    launches.assert_same(tmp_path / "run", alone)


@pytest.mark.slow
@pytest.mark.parametrize("config", ["gpus", pytest.param("zero3", marks=deepspeed), "fsdp"])
def test_a_row_that_is_not_finite_is_named_by_all(config, tmp_path):
    """B047: each process looks at other rows, in step where the backbone is sharded, and none waits for ever."""
    chats = zoo.chats(12)
    chats[4][0]["content"] += "Z"
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    broken = zoo.model()
    with torch.no_grad():
        broken.get_input_embeddings().weight[zoo.tokenizer()("Z").input_ids] = torch.nan
    broken.save_pretrained(tmp_path / "backbone")
    zoo.tokenizer().save_pretrained(tmp_path / "backbone")
    path = launches.recipe(tmp_path, tmp_path / "chats.jsonl", "eagle3", batch__forward_rows=None)
    more = {"HEADSTART_CACHE": str(tmp_path / "cache")}
    with Launch(tmp_path, "launch_node.sh", "--cpu", "--config", config, path, **more) as launch:
        assert launch.wait() != 0
    said = "the backbone's last hidden state, from position 0 on, is not finite in .*chats.jsonl, row 5. The head keeps"
    assert len(re.findall(said, launch.said)) == 2, launch.said


@pytest.mark.slow
@pytest.mark.parametrize("config", sharded)
def test_killed_and_gone_on_with(config, expected, tmp_path):
    """B041, B052, B053: weights and the optimizer's state are whole in every checkpoint, and only those of the head."""
    path, alone = expected
    run = tmp_path / "run"
    arguments = ("launch_node.sh", "--cpu", "--config", config, path, f"run={run}")
    with Launch(tmp_path, *arguments) as launch:
        launch.wait_for(lambda: bool(checkpoints.checkpoints(run)) or launch.process.poll() is not None)
        launch.kill()
    assert not checkpoints.finished(run), launch.said
    with Launch(tmp_path, *arguments) as launch:
        assert "going on behind step" in launch.succeed()
    launches.assert_same(run, alone)
    assert state(run)["layout"] == LAYOUTS[config]


@pytest.mark.slow
@pytest.mark.parametrize("config", ["gpus", pytest.param("zero3", marks=deepspeed)])
def test_two_launchers_on_loopback_are_two_machines(config, expected, tmp_path):
    path, alone = expected
    run, port = tmp_path / "run", launches.free_port()
    config = "nodes" if config == "gpus" else config
    ask = ("launch_nodes.sh", "--cpu", "--config", config, "--port", port, path, f"run={run}")
    with Launch(tmp_path, *ask, SLURM_NODEID="0") as first, Launch(tmp_path, *ask, SLURM_NODEID="1") as second:
        first.succeed()
        second.succeed()
    launches.assert_same(run, alone)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_saves_at_once(number, expected, tmp_path):
    """The launcher hands it on, more than once."""
    path, alone = expected
    run = tmp_path / "run"
    ask = ("launch_node.sh", "--cpu", path, f"run={run}", "save.every=1000", "log.every=1")
    with Launch(tmp_path, *ask) as launch:
        launch.wait_for(lambda: (run / "rows.jsonl").exists() and len(runs.lines(run, "rows.jsonl")) > 2)
        launch.process.send_signal(number)
        assert launch.wait() != 0
        assert "the same command goes on from there" in launch.said
    assert checkpoints.checkpoints(run)
    train(path, {"run": str(run)})
    launches.assert_same(run, alone)


@pytest.mark.slow
@pytest.mark.parametrize("config", sharded)
def test_another_layout_and_another_number_of_processes_go_on(config, expected, tmp_path, capsys):
    """From one process to two in shards, and back; said aloud, with rows and order as they were."""
    path, alone = expected
    run = tmp_path / "run"
    stop = {"run": str(run), "save.every": 5, "optim.max_steps": 16}

    class Stop(Exception):
        pass

    def stopping(*_: object) -> None:
        raise Stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headstart.training.loop.Run.report", lambda self: stopping() if self.state.step == 7 else None)
        with pytest.raises(Stop):
            train(path, stop)
    assert [one.name for one in checkpoints.checkpoints(run)] == ["step-000005"]
    ask = ("launch_node.sh", "--cpu", "--config", config, path, f"run={run}", "save.every=3")
    with Launch(tmp_path, *ask) as launch:
        launch.wait_for(lambda: len(checkpoints.checkpoints(run)) > 1 or launch.process.poll() is not None)
        launch.kill()
    assert "processes was 1, is now 2; rows and their order stay" in launch.said
    train(path, {"run": str(run)})
    assert "processes was 2, is now 1; rows and their order stay" in capsys.readouterr().err
    torch.testing.assert_close(runs.weights(run), runs.weights(alone), rtol=0, atol=1e-5)
    assert runs.lines(run, "rows.jsonl") == runs.lines(alone, "rows.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("config", [pytest.param("zero3", marks=deepspeed), "fsdp"])
def test_a_sharded_backbone_is_whole_where_it_has_to_be_and_nobody_waits(config, expected, tmp_path):
    path, _ = expected
    file = launches.ROOT / "configs" / f"accelerate-{config}.json"
    command = ["accelerate", "launch", "--config_file", file, "--num_processes", "2", "--main_process_port", "0"]
    more = {"DS_ACCELERATOR": "cpu"} if config == "zero3" else {"ACCELERATE_USE_CPU": "true"}
    script = Path(__file__).with_name("shards.py")
    with Launch(tmp_path, [*command, script, path, f"run={tmp_path / 'run'}"], **more) as launch:
        assert launch.succeed().count("all well") == 2


@pytest.mark.slow
def test_a_sharded_backbone_is_not_asked_where_features_are_cached(rows, tmp_path):
    """Forwards that fill up a step are no exception: the others would read, and not join in."""
    launches.backbone(tmp_path / "backbone")
    cached = {"data__cache": str(tmp_path / "features"), "optim__max_steps": 6, "evaluate__every": None}
    path = launches.recipe(tmp_path, rows, "eagle3", **cached)
    cache_features(load_recipe(path))
    alone = launches.alone(path, tmp_path / "alone", {})
    with Launch(tmp_path, "launch_node.sh", "--cpu", "--config", "fsdp", path) as launch:
        launch.succeed()
    launches.assert_same(tmp_path / "run", alone)


@pytest.mark.slow
def test_a_short_time_out_does_not_end_a_long_preparation(tmp_path):
    """B062: the others wait in a group of their own, and the work is done once."""
    script = tmp_path / "wait.py"
    script.write_text(
        "import time; from datetime import timedelta; from accelerate import Accelerator, InitProcessGroupKwargs\n"
        "from headstart.training.processes import in_turns\n"
        "world = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=2))])\n"
        "in_turns(world, lambda: world.is_main_process and (time.sleep(6), print('worked')))\n"
        "world.wait_for_everyone()\n"
    )
    command = ["accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0", script]
    with Launch(tmp_path, command, ACCELERATE_USE_CPU="true") as launch:
        assert launch.succeed().count("worked") == 1


def test_a_lock_of_a_process_that_was_killed_is_not_waited_for(tmp_path, monkeypatch, capsys):
    """DeepSpeed's, at its first use; one that is new or held is told."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    dead, new, held = (tmp_path / name / "lock" for name in ("dead", "new", "held"))
    for lock in (dead, new, held):
        lock.parent.mkdir()
        lock.touch()
    for lock in (dead, held):
        os.utime(lock, (0, 0))
    with open(held):
        zero.drop_dead_locks()
    assert [lock.exists() for lock in (dead, new, held)] == [False, True, True]
    said = capsys.readouterr().err
    assert all(f"{lock}: waiting for a process that compiles" in said for lock in (new, held))


@pytest.mark.parametrize("script", ["launch_node.sh", "launch_nodes.sh", "launch_slurm.sh"])
def test_scripts_tell_what_they_take(script, tmp_path):
    with Launch(tmp_path, script, "--help") as launch:
        said = launch.succeed()
    source = (launches.ROOT / "scripts" / script).read_text()
    (taken,) = re.findall(r"^read_options '(.*)' '(.*)' ", source, re.MULTILINE)
    for option in ("dry-run", *" ".join(taken).split()):
        assert f"--{option} " in said, option
    with Launch(tmp_path, script, "--processes", "2", "--dry-run") as launch:
        assert (launch.wait(), "a recipe is missing" in launch.said) == (2, True)
    with Launch(tmp_path, script, "--nods", "2") as launch:
        assert (launch.wait(), "unknown option --nods" in launch.said) == (2, True)


def dry(folder: Path, *arguments: object, **more: str) -> str:
    with Launch(folder, *arguments, "--dry-run", "a b.yaml", "optim.lr=1e-3", **more) as launch:
        return launch.succeed()


@pytest.mark.parametrize("config", [*LAYOUTS, "gpu"])
def test_a_dry_run_prints_the_command_of_one_machine(config, tmp_path):
    said = dry(tmp_path, "launch_node.sh", "--processes", "4", "--config", config)
    assert f"accelerate launch --config_file {launches.ROOT}/configs/accelerate-{config}.json" in said
    assert "--num_processes 4" in said
    assert said.strip().endswith("-m headstart train a\\ b.yaml optim.lr=1e-3")
    kind = json.loads((launches.ROOT / "configs" / f"accelerate-{config}.json").read_text())["distributed_type"]
    assert kind == {"gpu": "NO", "gpus": "MULTI_GPU", "fsdp": "FSDP"}.get(config, "DEEPSPEED")


def test_a_dry_run_prints_the_command_of_each_of_several_machines(tmp_path):
    ask = ("launch_nodes.sh", "--nodes", "3", "--processes", "8", "--address", "first", "--rank", "2")
    said = dry(tmp_path, *ask)
    for words in ("--num_machines 3", "--machine_rank 2", "--main_process_ip first", "--num_processes 24"):
        assert words in said
    with Launch(tmp_path, "launch_nodes.sh", "--nodes", "2", "--rank", "2", "r.yaml") as launch:
        assert (launch.wait(), "--rank is 2; 0 to 1 of 2 machines" in launch.said) == (2, True)


def test_a_job_of_slurm_starts_the_script_on_each_machine(tmp_path):
    """With stand-ins for sbatch, srun and scontrol, as no Slurm is here."""
    tools = {
        "sbatch": 'export SLURM_JOB_NODELIST="n[1-2]"; for one; do :; done; bash -c "${one#--wrap=}"',
        "srun": 'while [[ $1 == --* ]]; do shift; done; for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done',
        "scontrol": "printf 'n1\\nn2\\n'",
        "accelerate": 'echo "accelerate $*"',
    }
    for name, body in tools.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    assert dry(tmp_path, "launch_slurm.sh", "--nodes", "2", "--sbatch", "--partition=x").startswith("sbatch ")
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    ask = ("launch_slurm.sh", "--nodes", "2", "--processes", "4", "--config", "zero3", "a b.yaml", "optim.lr=1e-3")
    with Launch(tmp_path, *ask, PATH=path, ACCELERATE=str(tmp_path / "accelerate")) as launch:
        lines = launch.succeed().splitlines()
    assert len(lines) == 2
    for rank, line in enumerate(lines):
        assert f"--machine_rank {rank} --main_process_ip n1" in line
        assert "accelerate-zero3.json" in line
        assert line.endswith("train a b.yaml optim.lr=1e-3")


def test_one_process_spreads_a_backbone_and_several_do_not(tmp_path, rows, monkeypatch):
    """`device_map`, as far as a machine without GPUs goes: all of it on the one device that there is; and a backbone of
    which that device holds a layer at a time, as where all GPUs together are too small."""
    launches.backbone(tmp_path / "backbone")
    path = launches.recipe(tmp_path, rows, "eagle3", optim__max_steps=2)
    for name, given in (("spread", {"device_map": "auto"}), ("plain", {})):
        launches.alone(path, tmp_path / name, given)
    elsewhere = Backbone(disk_offload(zoo.model(), tmp_path / "weights", torch.device("cpu")), zoo.tokenizer())
    train(path, {"run": str(tmp_path / "elsewhere")}, backbone=elsewhere)
    assert next(elsewhere.layers[0].parameters()).is_meta
    for name in ("spread", "elsewhere"):
        assert runs.same_bits(runs.weights(tmp_path / name), runs.weights(tmp_path / "plain"))
    many = SimpleNamespace(num_processes=2, distributed_type="MULTI_GPU")
    with pytest.raises(UserError, match="device_map is auto: one process spreads the backbone"):
        Layout(many).check(load_recipe(path, {"device_map": "auto"}))


@pytest.mark.slow
def test_two_processes_train_an_adapter_beside_heads(rows, tmp_path):
    """Medusa-2: both parts are averaged, also where a process has no row of its own."""
    pytest.importorskip("peft")
    launches.backbone(tmp_path / "backbone")
    changes = {"save__every": 3, "optim__max_steps": 8, "adapter__rank": 4, "adapter__alone": 2, "adapter__heads": 0.2}
    path = launches.recipe(tmp_path, rows, "medusa", **changes)
    alone = launches.alone(path, tmp_path / "alone", {"batch.forward_rows": "null"})
    run = tmp_path / "run"
    with Launch(tmp_path, "launch_node.sh", "--cpu", "--config", "gpus", path, f"run={run}") as launch:
        launch.succeed()
    launches.assert_same(run, alone)
    found, wanted = (load_file(one / "head" / "adapter" / "adapter_model.safetensors") for one in (run, alone))
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5)
    divergence = [[line["divergence"] for line in runs.lines(one) if "divergence" in line] for one in (run, alone)]
    assert divergence[0] == pytest.approx(divergence[1], rel=1e-3, abs=1e-6)
    with Launch(tmp_path, "launch_node.sh", "--cpu", "--config", "fsdp", path, f"run={tmp_path / 'no'}") as launch:
        assert launch.wait() != 0
        assert "adapter.rank is set, and FSDP" in launch.said
