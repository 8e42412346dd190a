"""States of a run that appear whole or not at all, rotate, and are gone on from.

A run folder holds

    recipe.yaml              the settings it was begun with
    metrics.jsonl            a line every few steps, and one for each evaluation
    checkpoints/step-000200/ head.safetensors (fp32), optimizer.pt, state.json
    best/                    the head that was accepted longest so far, as measured
    stopped/                 the head as it was before a step that went wrong
    head/                    the trained head in its own format, once the run is finished

The order of rows, the learning rate and the random numbers of a step follow from its number, so that a checkpoint needs
to hold none of them.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from safetensors.torch import load_file
from torch import Tensor

from ..errors import UserError
from ..files import whole_folder, write_whole
from ..heads.weights import write_tensors
from ..settings import dump_text
from .processes import same_on_all
from .recipe import Recipe, differences, load_recipe

if TYPE_CHECKING:
    from .setup import Setup

RECIPE, HEAD, BEST, STOPPED = "recipe.yaml", "head", "best", "stopped"


@dataclass
class State:
    """Where a run stands."""

    step: int = 0
    """Optimizer steps taken."""
    tokens: int = 0
    """True tokens seen, over all processes."""
    seconds: float = 0.0
    """Wall time of the run, over all its sittings."""
    finished: bool = False
    held_out: dict[str, Any] = field(default_factory=dict)
    """The last evaluation."""
    evaluated: int = -1
    """Its step."""
    best: dict[str, Any] = field(default_factory=dict)
    """Step and acceptance length of the head that was accepted longest, by measurement; it lies in `best/`."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What the run depends on besides its recipe."""
    processes: int = 1
    layout: str = ""
    """Of the last sitting; another one may go on."""


def open_run(recipe: Recipe, *, write: bool = True) -> None:
    """Begin the run's folder, or check that the one there was begun with the same settings.

    Raises:
        UserError: it was begun with others (each key, and both values), is no run's, or cannot be written.
    """
    path = recipe.run / RECIPE
    if path.exists():
        changed = list(differences(load_recipe(path), recipe))
        if changed:
            lines = "".join(f"\n  {key} was {old}, is now {new}" for key, old, new in changed)
            raise UserError(
                f"{recipe.run}: this run was begun with other settings:{lines}\nRepeat them to go on with it, or "
                "choose another folder (run=...)"
            )
        return
    if recipe.run.exists() and not recipe.run.is_dir():
        raise UserError(f"{recipe.run}: is no folder; choose another one (run=...)")
    strange = sorted(one.name for one in recipe.run.glob("*") if not one.name.endswith(".part"))
    if strange:
        raise UserError(f"{recipe.run}: holds {strange[0]} and no run; choose a folder for the run alone (run=...)")
    if write:
        write_whole(path, dump_text(recipe))


@contextmanager
def alone(run: Path) -> Iterator[None]:
    """Hold the folder of a run, which is made if need be; a killed process holds nothing.

    Raises:
        UserError: another process holds it, or it cannot be made.
    """
    try:
        run.mkdir(parents=True, exist_ok=True)
        handle = os.open(run, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"{run}: cannot be written ({error.strerror}); choose another folder (run=...)") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise UserError(
            f"{run}: another process trains in this folder; wait for it, or choose another folder (run=...)"
        ) from None
    except OSError:  # a file system without locks
        pass
    try:
        yield
    finally:
        os.close(handle)


def save(run: Path, state: State, weights: Mapping[str, Tensor], moments: Mapping[str, Any], keep: int) -> Path:
    """Write a checkpoint, then remove all but the newest `keep`.

    Args:
        weights: the head's tensors, whole; they are read back before the checkpoint counts.
        moments: the optimizer's state.

    Raises:
        UserError: the folder cannot be written; the checkpoints before stay as they are.
    """
    folder, told = run / "checkpoints" / f"step-{state.step:06d}", json.dumps(asdict(state), indent=1) + "\n"
    if folder in checkpoints(run):  # a step has one set of weights: only what is said of it can be new
        write_whole(folder / "state.json", told)
        return folder
    with whole_folder(folder) as part:
        try:
            write_tensors(part / "head.safetensors", {name: tensor.contiguous() for name, tensor in weights.items()})
            torch.save(moments, part / "optimizer.pt")
        except RuntimeError as error:  # torch hides the system's own error, a full disk say
            reason = str(error).splitlines()[0]
            raise UserError(f"{folder}: cannot be written, is the disk full? ({reason})") from error
        check_written(folder, load_file(part / "head.safetensors"), weights)
        (part / "state.json").write_text(told)
    for old in checkpoints(run)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def check_written(folder: Path, found: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """What was read back has to be what was written.

    Raises:
        UserError: a tensor is missing, left over, of another shape, or of other values.
    """
    for name in sorted(found.keys() | weights.keys()):
        one, other = found.get(name), weights.get(name)
        if one is None or other is None or one.shape != other.shape or not _same(one, other):
            shapes = [None if tensor is None else tuple(tensor.shape) for tensor in (other, one)]
            raise UserError(
                f"{folder}: {name} was written with shape {shapes[0]} and is read back otherwise ({shapes[1]})"
            )


def _same(one: Tensor, other: Tensor) -> bool:
    """In every bit, so that NaN is NaN."""
    return (
        torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
        if one.ndim
        else bool(torch.equal(one, other))
    )


def checkpoints(run: Path) -> list[Path]:
    """Checkpoints of a run, oldest first."""
    found = (run / "checkpoints").glob("step-*")
    return sorted((path for path in found if (path / "state.json").exists()), key=lambda path: int(path.name[5:]))


def finished(run: Path) -> bool:
    """Is there nothing left to do in this run?"""
    found = checkpoints(run)
    return bool(found) and (run / HEAD / "config.json").exists() and _state(found[-1]).finished


def _state(folder: Path) -> State:
    return State(**json.loads((folder / "state.json").read_text()))


def resume(run: Path, setup: Setup) -> State:
    """Load the newest checkpoint into head and optimizer; a fresh state if there is none. On all processes.

    The number of processes and their layout may be others than before: rows, their order and the weight of each stay.

    Raises:
        UserError: backbone or rows are not those of the checkpoint, it cannot be read, or a process sees another one.
    """
    found, facts = checkpoints(run), setup.facts()
    same_on_all(setup.accelerator, {f"the newest checkpoint in {run}": found[-1].name if found else "none"})
    if not found:
        return State(facts=facts, **_laid_out(setup))
    folder = found[-1]
    try:
        state = _state(folder)
        tensors = load_file(folder / "head.safetensors")
        moments = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(
            f"{folder}: cannot be read ({error}); remove it to go on from the checkpoint before, if there is one"
        ) from error
    for name, now in facts.items():
        if state.facts.get(name) != now:
            raise UserError(
                f"{folder}: {name} changed since: was {state.facts.get(name)}, is now {now}. Give the run what it was "
                "begun with, or choose another folder (run=...)"
            )
    setup.layout.load_weights(setup.objective, tensors)
    setup.layout.load_moments(moments)
    for name, now in _laid_out(setup).items():
        before = getattr(state, name)
        if before != now and setup.accelerator.is_main_process:
            what = "rows and their order stay, sums may differ in the last digits"
            print(f"{run}: {name} was {before}, is now {now}; {what}", file=sys.stderr)
        setattr(state, name, now)
    return state


def _laid_out(setup: Setup) -> dict[str, Any]:
    return {"processes": setup.accelerator.num_processes, "layout": setup.layout.name}


def remove_leftovers(run: Path) -> None:
    """What a killed run left half-written."""
    for path in (*run.glob(".*.part"), *(run / "checkpoints").glob(".*.part"), *(run / "checkpoints").glob(".*.old")):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


class Interrupts:
    """While it is open, the first Ctrl-C or SIGTERM is noted instead of ending the process; the second one ends it.

    Args:
        patience: seconds in which a second one is taken for the first, which a launcher hands on to its processes.
    """

    def __init__(self, patience: float = 0.0) -> None:
        self.signal: int | None = None
        self.patience, self.until = patience, 0.0
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self.before[number] = signal.signal(number, self._note)
            except ValueError:  # not the main thread: signals are somebody else's
                break
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self.until = number, time.monotonic() + self.patience
            if not self.patience:
                self._restore()
        elif time.monotonic() > self.until:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.before = {}
