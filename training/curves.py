"""What runs wrote down on their way, read back: curves to draw, and a table to compare runs by.

Letters: D depths.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..progress import duration

METRICS = "metrics.jsonl"

Points = list[tuple[int, Any]]  # step and value


@dataclass
class Curves:
    """One run."""

    name: str
    steps: list[dict[str, Any]] = field(default_factory=list)
    """Lines of training."""
    held_out: list[dict[str, Any]] = field(default_factory=list)
    """Evaluations, each with its step."""

    def points(self, name: str, *, held_out: bool = False) -> Points:
        """A figure by step, where it is there."""
        lines = self.held_out if held_out else self.steps
        return [(line["step"], line[name]) for line in lines if line.get(name) is not None]

    def by_depth(self, name: str, *, held_out: bool = False) -> list[Points]:
        """The same of a figure that is a list, D of them."""
        points = self.points(name, held_out=held_out)
        depths = max((len(values) for _, values in points), default=0)
        return [[(step, values[d]) for step, values in points if d < len(values)] for d in range(depths)]


def read_curves(runs: Sequence[str | Path]) -> list[Curves]:
    """The curves of runs, under the shortest names that tell them apart.

    Raises:
        UserError: a folder is no run's, a line cannot be read, or nothing was written yet.
    """
    folders = [Path(run) for run in runs]
    made = []
    for name, folder in zip(_names(folders), folders, strict=True):
        curves = Curves(name)
        for line in _lines(folder / METRICS):
            if "held_out" in line:
                curves.held_out.append({"step": line["step"], **line["held_out"]})
            else:
                curves.steps.append(line)
        if not curves.steps and not curves.held_out:
            raise UserError(f"{folder / METRICS}: is empty; the run has written no line yet (log.every)")
        made.append(curves)
    return made


def table(curves: Sequence[Curves]) -> str:
    """Runs side by side, a line each, with what they came to last."""
    heads = [name for name, _ in COLUMNS]
    rows = [[_cell(find, one) for _, find in COLUMNS] for one in curves]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (heads, *rows)
    )


def best(curves: Curves) -> tuple[int, float] | None:
    """Step and value of the longest acceptance that was measured; of equal ones the first."""
    points = curves.points("acceptance_length", held_out=True)
    return max(points, key=lambda point: point[1]) if points else None


Find = Callable[[Curves], Any]


def _last(name: str, held_out: bool, told: Callable[[Any], str]) -> Find:
    def find(curves: Curves) -> Any:
        points = curves.points(name, held_out=held_out)
        return told(points[-1][1]) if points else None

    return find


def _best(curves: Curves) -> Any:
    found = best(curves)
    return found and f"{found[1]:.2f} at {found[0]:,}"


def _speed(curves: Curves) -> Any:
    """Tokens a second of all steps together."""
    last = curves.steps[-1] if curves.steps else {}
    return f"{last['tokens'] / last['seconds']:,.0f}" if last.get("tokens") and last.get("seconds") else None


def rates(values: Sequence[float]) -> str:
    """`0.61/0.42/0.30`, by depth."""
    return "/".join(f"{value:.2f}" for value in values)


COLUMNS: Sequence[tuple[str, Find]] = (
    ("run", lambda curves: curves.name),
    ("steps", _last("step", False, "{:,}".format)),
    ("loss", _last("loss", False, "{:.3f}".format)),
    ("held-out loss", _last("loss", True, "{:.3f}".format)),
    ("accuracy", _last("accuracy", True, rates)),
    ("acceptance", _last("acceptance", True, rates)),
    ("estimated", _last("estimated_acceptance_length", True, "{:.2f}".format)),
    ("measured", _last("acceptance_length", True, "{:.2f}".format)),
    ("best measured", _best),
    ("tokens/s", _speed),
    ("time", _last("seconds", False, duration)),
)


def _cell(find: Find, curves: Curves) -> str:
    return find(curves) or "-"


def _names(folders: Sequence[Path]) -> list[str]:
    """The last parts of paths, as many as it takes to tell them apart."""
    for parts in range(1, max((len(folder.parts) for folder in folders), default=0) + 1):
        names = ["/".join(folder.parts[-parts:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    raise UserError(f"{folders[0]}: no runs were named, or one twice")


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file; a last one that a run is just writing, or was killed in, is left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); give the folders of training runs") from None
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
            step = int(line["step"])
        except (ValueError, KeyError, TypeError):
            if number == len(lines):
                return
            raise UserError(f"{path}, line {number}: is no line of metrics; remove it") from None
        yield {**line, "step": step}
