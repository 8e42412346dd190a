"""What a run says: metrics.jsonl, trackers through accelerate, and the status line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from .. import settings
from ..files import text_hash, write_whole
from ..progress import Progress
from .curves import METRICS, rates
from .objective import Result
from .recipe import Recipe


class Log:
    """Writes the lines of one run; on all processes but the first it is silent.

    Args:
        step: where the run goes on; lines of later steps, which an interruption lost, are taken back.
        evaluated: the step of its last evaluation; later ones are taken back, too.
    """

    def __init__(self, recipe: Recipe, accelerator: Any, step: int, evaluated: int, steps: int) -> None:
        self.accelerator, self.main = accelerator, bool(accelerator.is_main_process)
        self.progress = Progress(steps, "steps", "train", done=step, enabled=self.main)
        self.files: dict[str, TextIO] = {}
        self.failed: set[str] = set()
        if self.main:
            for name in (METRICS, *(["rows.jsonl"] if recipe.log.rows else [])):
                _take_back(recipe.run / name, step, evaluated)
                self.files[name] = open(recipe.run / name, "a", encoding="utf-8")  # noqa: SIM115
        if recipe.log.trackers:
            _start_trackers(recipe, accelerator)

    def write(self, step: int, values: Mapping[str, Any], name: str = METRICS) -> None:
        """A line of a file; metrics go to the trackers, too."""
        if self.main:
            self.files[name].write(json.dumps({"step": step, **values}) + "\n")
            self._attempt(name, self.files[name].flush)
        if name == METRICS:
            self.accelerator.log(dict(_flat(values)), step=step)

    def status(self, steps: int, window: Window) -> None:
        """One step more, of so many, on the status line."""
        self.progress.total = steps
        self.progress.note(loss=window.loss, accuracy=rates(window.accuracy), **{"tokens/s": f"{window.rate:,.0f}"})
        self.progress.advance()

    def say(self, line: str) -> None:
        self.progress.say(line)

    def close(self) -> None:
        self.progress.close()
        for name, file in self.files.items():
            self._attempt(name, file.close)
        self.accelerator.end_training()

    def _attempt(self, name: str, write: Callable[[], None]) -> None:
        """A full disk does not end a run: what could not be written waits in memory for the next line."""
        try:
            write()
        except OSError as error:
            if name not in self.failed:
                self.failed.add(name)
                self.say(f"{self.files[name].name}: cannot be written ({error.strerror}); training goes on")


class Window:
    """Sums since the last line of metrics.

    Args:
        weights: (D,) of the depths, 1 in all.
        world: number of processes. Until `figures`, sums are those of this one, and count for all.
    """

    def __init__(self, weights: Tensor, world: int) -> None:
        self.weights, self.world = weights, world
        self.loss = self.step_seconds = 0.0
        """Of the last step."""
        self._clear()

    def _clear(self) -> None:
        self.losses, self.hits, self.counts = (torch.zeros_like(self.weights) for _ in range(3))
        self.tokens, self.seconds = 0, 0.0
        self.distance, self.apart = torch.zeros(()), 0.0

    def add(self, results: Sequence[Result], counts: Tensor, tokens: int, seconds: float) -> None:
        """A step: what its forwards came to, its positions by depth (D,) and of other sums, its tokens, its time."""
        counts, others = counts[: len(self.weights)], counts[len(self.weights) :]
        self.apart += float(others.sum())
        self.distance = self.distance + sum(one.distance.cpu() for one in results if one.distance is not None)
        losses = torch.stack([one.losses.cpu() for one in results]).sum(0)
        self.loss = self._loss(losses * self.world, counts)
        self.losses += losses
        self.hits += torch.stack([one.hits.cpu() for one in results]).sum(0)
        self.counts += counts
        self.tokens += tokens
        self.seconds += seconds
        self.step_seconds = seconds

    @property
    def accuracy(self) -> list[float]:
        """By depth: first choices that are the ones taught."""
        found: list[float] = (self.hits * self.world / self.counts.clamp(min=1)).tolist()
        return found

    @property
    def rate(self) -> float:
        """True tokens a second, of steps alone."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def figures(self, accelerator: Any) -> dict[str, Any]:
        """What is reported of the window, over all processes; the next one begins."""
        own = torch.stack((self.losses, self.hits, self.distance.expand_as(self.losses)))
        sums = accelerator.reduce(own.to(accelerator.device), "sum").cpu()
        each = sums[:2] / self.counts.clamp(min=1)  # (2, D)
        figures = {
            "loss": self._loss(sums[0], self.counts),
            "loss_by_depth": each[0].tolist(),
            "accuracy": each[1].tolist(),
            "tokens_per_second": self.rate,
            **({"divergence": float(sums[2, 0]) / self.apart} if self.apart else {}),
        }
        self._clear()
        return figures

    def _loss(self, losses: Tensor, counts: Tensor) -> float:
        return float((losses / counts.clamp(min=1) * self.weights).sum())


def told(figures: Mapping[str, Any]) -> str:
    """An evaluation in a line."""
    parts = []
    if "loss" in figures:
        parts += [f"held-out loss {figures['loss']:.3f}", f"accuracy {rates(figures['accuracy'])}"]
        parts += [f"estimated acceptance length {figures['estimated_acceptance_length']:.2f}"]
    if "divergence" in figures:
        parts += [f"divergence from the original {figures['divergence']:.4f}"]
    if "acceptance_length" in figures:
        parts += [f"measured {figures['acceptance_length']:.2f} ({figures['tree']})"]
    return ", ".join(parts)


def memory(device: torch.device) -> float:
    """The most memory that this process has held so far, in GiB; on a GPU, of that GPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device)) / 2**30
    status = Path("/proc/self/status")
    if status.exists():  # what `getrusage` knows may be that of the process which started this one
        peak = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(peak.split()[1]) / 2**20
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def _take_back(path: Path, step: int, evaluated: int) -> None:
    """Keep the lines up to these steps; a last line that was cut off goes, too."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if _step_of(line) <= (evaluated if '"held_out"' in line else step)]
    if kept != lines:
        write_whole(path, "".join(line + "\n" for line in kept))


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _start_trackers(recipe: Recipe, accelerator: Any) -> None:
    """Trackers as accelerate starts them; a run that goes on stays one run in wandb."""
    name = recipe.run.name
    wandb = {"name": name, "dir": str(recipe.run), "id": text_hash(str(recipe.run.resolve()))[:16], "resume": "allow"}
    config = {
        key: value if isinstance(value, (int, float, str, bool)) else str(value)
        for key, value in _flat(settings.dump(recipe))
    }
    accelerator.init_trackers(recipe.log.project, config=config, init_kwargs={"wandb": wandb})


def _flat(values: Mapping[str, Any], prefix: str = "") -> Any:
    """Nested values under names with slashes; a list by its places."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}/")
        elif isinstance(value, (list, tuple)) and all(isinstance(one, (int, float)) for one in value):
            yield from ((f"{prefix}{key}/{place}", one) for place, one in enumerate(value))
        else:
            yield prefix + key, value
