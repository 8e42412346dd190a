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


def totals(results: Sequence[Result], accelerator: Any) -> Tensor:
    """(3, D) what the forwards of a step came to, on the CPU: losses, hits, divergence. On all processes, of all."""
    parts = []
    for one in results:
        distance = torch.zeros_like(one.losses) if one.distance is None else one.distance.expand_as(one.losses)
        parts.append(torch.stack((one.losses, one.hits.to(one.losses), distance)))
    found: Tensor = accelerator.reduce(torch.stack(parts).sum(0), "sum").cpu()
    return found


class Window:
    """Sums since the last line of metrics, over all processes.

    Args:
        weights: (D,) of the depths, 1 in all.
    """

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights
        self.loss = self.step_seconds = 0.0
        """Of the last step."""
        self._clear()

    def _clear(self) -> None:
        self.sums, self.counts = torch.zeros(3, len(self.weights)), torch.zeros_like(self.weights)
        self.tokens, self.seconds, self.apart = 0, 0.0, 0.0

    def add(self, sums: Tensor, counts: Tensor, tokens: int, seconds: float) -> None:
        """A step: its `totals`, its positions by depth (D,) and of other sums, its tokens, its time."""
        counts, others = counts[: len(self.weights)], counts[len(self.weights) :]
        self.loss = self._loss(sums, counts)
        self.sums, self.counts = self.sums + sums, self.counts + counts
        self.apart += float(others.sum())
        self.tokens, self.seconds, self.step_seconds = self.tokens + tokens, self.seconds + seconds, seconds

    @property
    def accuracy(self) -> list[float]:
        """By depth: first choices that are the ones taught."""
        found: list[float] = (self.sums[1] / self.counts.clamp(min=1)).tolist()
        return found

    @property
    def rate(self) -> float:
        """True tokens a second, of steps alone."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def figures(self) -> dict[str, Any]:
        """What is reported of the window; the next one begins."""
        figures = {
            "loss": self._loss(self.sums, self.counts),
            "loss_by_depth": (self.sums[0] / self.counts.clamp(min=1)).tolist(),
            "accuracy": self.accuracy,
            "tokens_per_second": self.rate,
            **({"divergence": float(self.sums[2, 0]) / self.apart} if self.apart else {}),
        }
        self._clear()
        return figures

    def _loss(self, sums: Tensor, counts: Tensor) -> float:
        return float((sums[0] / counts.clamp(min=1) * self.weights).sum())


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
