"""Several processes train the head of one: through the shipped scripts and the real accelerate launch."""

from __future__ import annotations

import json
from pathlib import Path

import launches
import pytest
import runs
from launches import Launch, needs_compiler, needs_deepspeed

from headstart.heads.methods import METHODS
from headstart.training import checkpoints

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


@pytest.fixture(scope="module", params=[name for name in METHODS if name in ("medusa", "eagle3")])
def expected(request, rows, tmp_path_factory):
    """A recipe, its folder, and the run of one process."""
    folder = tmp_path_factory.mktemp(request.param)
    launches.backbone(folder / "backbone")
    path = launches.recipe(folder, rows, request.param, save__every=3, optim__max_steps=16, evaluate__every=5)
    return path, launches.alone(path, folder / "alone")


def state(run: Path) -> dict:
    return json.loads((checkpoints.checkpoints(run)[-1] / "state.json").read_text())


def method(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize(("config", "name"), [("gpus", "eagle3"), pytest.param("zero3", "medusa", marks=deepspeed)])
def test_two_processes_train_the_head_of_one(config, name, expected, tmp_path):
    """B056, B061, B064, G03."""
    path, alone = expected
    if method(path) != name:
        pytest.skip("of the other method the slow tests")
    with Launch(tmp_path, "launch_node.sh", "--cpu", "--config", config, path, f"run={tmp_path / 'run'}") as launch:
        launch.succeed()
    launches.assert_same(tmp_path / "run", alone)
    assert (state(tmp_path / "run")["layout"], state(tmp_path / "run")["processes"]) == (LAYOUTS[config], 2)


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
