"""Runs that are killed at random moments, some of them in a save, and gone on with; and one of many steps.

A process that has loaded everything forks one that trains, and kills it: each sitting is a new process, without the
seconds that imports take.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import runs

SCRIPT = """
import os, random, signal, sys, time
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
import runs, zoo
from pathlib import Path
from headstart import files
from headstart.training import checkpoints
from headstart.training.loop import train

folder, rows, kills, steps = Path({folder!r}), Path({rows!r}), {kills}, {steps}
chance = random.Random({seed})


def child(name, deadly=0):
    # A sitting; with `deadly`, it kills itself when it touches the disk for the so-manieth time.
    pid = os.fork()
    if pid:
        return pid
    if deadly:
        left = [deadly]

        def counted(function):
            def call(*arguments, **options):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments, **options)

            return call

        for place, what in ((os, "replace"), (os, "fsync"), (checkpoints, "write_tensors"), (torch, "save"),
                            (checkpoints, "check_written"), (checkpoints.shutil, "rmtree")):
            setattr(place, what, counted(getattr(place, what)))
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1), os.dup2(silent, 2)
    recipe = runs.recipe(folder / name, rows, {method!r}, optim__max_steps=steps, save__every=1, save__keep=1)
    train(recipe, backbone=zoo.backbone())
    os._exit(0)


def ended(pid):
    return os.waitpid(pid, 0)[1]


def taken():
    path = folder / "killed" / "rows.jsonl"
    return len(path.read_bytes().splitlines()) if path.exists() else 0


assert ended(child("undisturbed")) == 0
done = saves = 0
while done < kills:
    if done % 2:
        status = ended(child("killed", deadly=chance.randint(1, 12)))
    else:
        aim = min(steps - 1, taken() + chance.randint(0, steps // kills))  # in steps, whatever seconds are worth
        pid = child("killed")
        while taken() < aim:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.05))
        os.kill(pid, signal.SIGKILL)
        status = ended(pid)
    assert status == signal.SIGKILL, f"the run ended before its {{kills}} kills: {{status}} behind {{done}}"
    done += 1
assert ended(child("killed")) == 0
print(done)
"""


def killed(tmp_path, method, kills, steps, seed):
    rows, tests = str(runs.prepared(tmp_path)), str(Path(__file__).parent)
    text = SCRIPT.format(
        tests=tests, folder=str(tmp_path), rows=rows, method=method, kills=kills, steps=steps, seed=seed
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(kills)
    assert runs.same_bits(runs.weights(tmp_path / "killed"), runs.weights(tmp_path / "undisturbed"))
    for name in ("rows.jsonl", "metrics.jsonl"):
        ours, theirs = (runs.lines(tmp_path / run, name) for run in ("killed", "undisturbed"))
        assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    assert runs.lines(tmp_path / "killed", "rows.jsonl") == runs.lines(tmp_path / "undisturbed", "rows.jsonl")
    assert not list((tmp_path / "killed").rglob(".*.part"))


def test_three_kills_cost_nothing(tmp_path):
    """G05."""
    killed(tmp_path, "medusa", kills=3, steps=12, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "seed"), [("medusa", 2), ("eagle3", 3)])
def test_twenty_kills_cost_nothing(method, seed, tmp_path):
    killed(tmp_path, method, kills=20, steps=80, seed=seed)


LONG = """
import re, sys
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
import runs, zoo
from pathlib import Path
from headstart.training.loop import Run, train

# the table of interned strings, where dead ones count until it is made anew: once in some hundred steps, with 4 MB more
for number in range(400_000):
    sys.intern(f"none of {{number}}")
plain, held, leaked = Run.step, {{}}, []


def step(self, *arguments):
    plain(self, *arguments)
    leaked.append(b"x" * {leak})
    with open("/proc/self/status") as file:
        held[self.state.step] = 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", file.read())[1])


Run.step = step
changes = dict(optim__max_steps={steps}, evaluate__every=20, save__every=20)
train(runs.recipe(Path({run!r}), Path({rows!r}), "eagle3", **changes), backbone=zoo.backbone())
print((held[{steps}] - held[50]) / ({steps} - 50))
"""


def grown(tmp_path, steps, leak=0):
    """Bytes a step by which the memory of a run grew behind its first 50, evaluated and saved as it went."""
    rows, tests = str(runs.prepared(tmp_path)), str(Path(__file__).parent)
    text = LONG.format(tests=tests, run=str(tmp_path / "run"), rows=rows, steps=steps, leak=leak)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_a_thousand_steps_do_not_grow(tmp_path):
    assert grown(tmp_path, 1000) < 3000


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_a_leak_would_be_seen(tmp_path):
    assert grown(tmp_path, 300, leak=8000) > 6000
