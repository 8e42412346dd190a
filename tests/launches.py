"""The shipped launch scripts, started as a user starts them, on the processor and on loopback.

Every process that is started here is ended here, by its id, and nothing runs longer than `LIMIT` seconds, which
`HEADSTART_TEST_LIMIT` sets otherwise.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import runs
import torch

import zoo
from headstart.settings import dump_text
from headstart.training.loop import train

ROOT = Path(__file__).resolve().parent.parent
LIMIT = float(os.environ.get("HEADSTART_TEST_LIMIT", "900"))  # of a busy machine; DeepSpeed compiles at first use

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: pip install headstart[deepspeed]"
)
needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "c++")) is None and shutil.which("g++") is None,
    reason="DeepSpeed compiles a part at first use, and no C++ compiler is there",
)


def backbone(folder: Path, **changes: Any) -> Path:
    """A tiny backbone of four layers on disk."""
    zoo.model(**changes).save_pretrained(folder)
    zoo.tokenizer().save_pretrained(folder)
    return folder


def recipe(folder: Path, rows: Path, method: str, **changes: Any) -> Path:
    """Ten rows in steps of three and one: a process has two rows, one, or none, and a forward for each."""
    settled = {"backbone": str(folder / "backbone"), "batch__rows": 3, "batch__forward_rows": 1, "optim__lr": 1e-3}
    made = runs.recipe(folder / "run", rows, method, **{**settled, "evaluate__prompts": 3, **changes})
    path = folder / f"{method}.yaml"
    path.write_text(dump_text(made))
    return path


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE", "SLURM", "FSDP"))}
    accelerate = str(Path(sys.executable).with_name("accelerate"))
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"
    return {**kept, "PATH": path, "OMP_NUM_THREADS": "1", "ACCELERATE": accelerate, **more}


class Launch:
    """A script that runs."""

    def __init__(self, folder: Path, script: str | Sequence[object], *arguments: object, **more: str) -> None:
        begin = ["bash", ROOT / "scripts" / script] if isinstance(script, str) else script
        command = [str(word) for word in (*begin, *arguments)]
        self.log = folder / f"{time.monotonic_ns()}.log"
        with open(self.log, "w") as file:
            own = environment(**more)
            command[0] = shutil.which(command[0], path=own["PATH"]) or command[0]
            self.process = subprocess.Popen(command, cwd=folder, env=own, stdout=file, stderr=file)
        self.until = time.monotonic() + LIMIT

    def wait(self) -> int:
        """Its exit code; fails with what it said where that takes too long."""
        self.wait_for(lambda: self.process.poll() is not None)
        return int(self.process.returncode)

    def wait_for(self, done: Callable[[], bool]) -> None:
        while not done():
            if time.monotonic() > self.until:
                self.kill()
                pytest.fail(f"not done in {LIMIT:.0f} s:\n{self.said[-4000:]}")
            time.sleep(0.02)

    def succeed(self) -> str:
        """Wait; what it said."""
        code = self.wait()
        assert code == 0, f"exit code {code}:\n{self.said[-6000:]}"
        return self.said

    @property
    def said(self) -> str:
        return self.log.read_text()

    def kill(self) -> None:
        """End it at once, with all that it started."""
        with suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.process.pid)
            for one in [parent, *parent.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
        self.process.wait()

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def alone(path: Path, run: Path, overrides: Mapping[str, Any] | None = None) -> Path:
    """The same recipe in this process alone."""
    train(path, {**(overrides or {}), "run": str(run)})
    return run


def assert_same(run: Path, expected: Path, tolerance: float = 1e-5) -> None:
    """Weights, rows of each step, and figures of two runs."""
    found, wanted = runs.weights(run), runs.weights(expected)
    assert {name: tensor.shape for name, tensor in found.items()} == {n: t.shape for n, t in wanted.items()}
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")
    assert runs.lines(run, "rows.jsonl") == runs.lines(expected, "rows.jsonl")
    for one, other in zip(runs.lines(run), runs.lines(expected), strict=True):
        one, other = one.get("held_out", one), other.get("held_out", other)
        names = ("step", "lr", "loss", "accuracy", "gradient_norm", "tokens", "estimated_acceptance_length",
                 "acceptance_length")  # fmt: skip
        for name in names:
            assert (name in one) == (name in other), name
            assert name not in one or one[name] == pytest.approx(other[name], rel=1e-4), name
