"""Trackers through accelerate, none of which needs the network; and a metrics file that cannot be written."""

from __future__ import annotations

import os

import pytest
import runs

import zoo
from headstart.training import log
from headstart.training.loop import train


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return runs.prepared(tmp_path_factory.mktemp("data"))


def tracked(run, rows, name):
    """A run of two steps with a tracker, and its lines of metrics."""
    train(runs.recipe(run, rows, log__trackers=[name], optim__max_steps=2), backbone=zoo.backbone())
    return runs.lines(run)


def test_tensorboard_is_told_every_figure(rows, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    lines = tracked(tmp_path / "run", rows, "tensorboard")
    found = [EventAccumulator(str(path)).Reload() for path in (tmp_path / "run").rglob("events.out*")]
    (seen,) = [one for one in found if "loss" in one.Tags()["scalars"]]  # the other one holds the settings
    losses = [(one.step, one.value) for one in seen.Scalars("loss")]
    assert losses == [(line["step"], pytest.approx(line["loss"])) for line in lines if "loss" in line]
    assert seen.Scalars("held_out/acceptance_length")[-1].value == pytest.approx(
        lines[-1]["held_out"]["acceptance_length"]
    )


def test_wandb_stays_on_this_machine(rows, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracked(tmp_path / "run", rows, "wandb")
    wandb.teardown()
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    assert b"tokens_per_second" in file.read_bytes()


def test_trackio_keeps_its_own_files(rows, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    tracked(tmp_path / "run", rows, "trackio")
    assert any(path.is_file() and path.stat().st_size for path in (tmp_path / "trackio").rglob("*"))


class Full:
    """A file on a disk that is full for a while; what a flush could not write waits for the next."""

    def __init__(self, file, failures):
        self.file, self.failures = file, failures

    def __getattr__(self, name):
        return getattr(self.file, name)

    def flush(self):
        if self.failures:
            self.failures -= 1
            raise OSError(28, os.strerror(28))
        self.file.flush()

    def close(self):
        self.flush()
        self.file.close()


@pytest.mark.parametrize("failures", [1, 1000])
def test_a_full_disk_costs_lines_at_most(failures, rows, tmp_path, monkeypatch, capsys):
    def opened(*options, **more):
        return Full(open(*options, **more), failures)

    monkeypatch.setattr(log, "open", opened, raising=False)
    recipe = runs.recipe(tmp_path / "run", rows, optim__max_steps=4, log__rows=False)
    assert train(recipe, backbone=zoo.backbone()).exists()
    said = capsys.readouterr().err
    assert said.count("metrics.jsonl: cannot be written (No space left on device); training goes on") == 1
    if failures == 1:
        assert [line["step"] for line in runs.lines(recipe.run)] == [1, 2, 3, 4, 4]
