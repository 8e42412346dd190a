"""What a round costs: seconds of verification by nodes, seconds of drafting by depth."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import UserError

Points = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Costs:
    """Measured seconds, or any other unit that both tables share; between the points, straight lines.

    Raises:
        UserError: a table is empty, or a point is no cost.
    """

    verify: Mapping[int, float] | Sequence[tuple[int, float]]
    """Nodes of a tree, the root included, to what one forward of the backbone over them takes."""
    draft: Mapping[int, float] | Sequence[tuple[int, float]]
    """Depth of a draft to what the drafter takes for it, all depths above it included."""

    def __post_init__(self) -> None:
        for name in ("verify", "draft"):
            table = getattr(self, name)
            points = tuple(sorted(dict(table).items()))
            if not points:
                raise UserError(f"costs: the table {name} is empty")
            for at, seconds in points:
                if not (at >= 0 and 0 <= seconds < float("inf")):
                    raise UserError(f"costs: {name} of {at} is {seconds}; a cost is a number of 0 or more")
            object.__setattr__(self, name, points)

    def of(self, nodes: float, depth: float) -> float:
        """A round with a tree of so many nodes, the root included, drafted so deep; or the mean of rounds."""
        drafting = read(self.draft, depth) if depth else 0.0  # type: ignore[arg-type]
        return read(self.verify, nodes) + drafting  # type: ignore[arg-type]


@dataclass(frozen=True)
class CostModel:
    """Measured seconds of rounds in which so many rows share a forward: the cost of a round is
    T_verify(rows, nodes) + T_draft(rows, depth)."""

    by_rows: Mapping[int, Costs]
    read: float = 0.0
    """What the drafter takes for a token that it reads without drafting behind it."""
    _between: dict[int, Costs] = field(default_factory=dict, compare=False, repr=False)

    def at(self, rows: int) -> Costs:
        """The costs for so many rows; between those measured, and beyond them, on straight lines."""
        if rows in self.by_rows:
            return self.by_rows[rows]
        if rows not in self._between:
            self._between[rows] = Costs(*(self._line(rows, name) for name in ("verify", "draft")))
        return self._between[rows]

    def _line(self, rows: int, name: str) -> dict[int, float]:
        tables = [(at, getattr(costs, name)) for at, costs in sorted(self.by_rows.items())]
        places = sorted({place for _, table in tables for place, _ in table})
        return {place: read([(at, read(table, place)) for at, table in tables], rows) for place in places}

    def with_rows(self, other: CostModel) -> CostModel:
        """These costs, and those that the other has for further rows."""
        return CostModel({**other.by_rows, **self.by_rows}, self.read)

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        rows = {str(at): {"verify": dict(c.verify), "draft": dict(c.draft)} for at, c in sorted(self.by_rows.items())}
        return {"rows": rows, "read": self.read}

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> CostModel:
        """What `as_dict` gave.

        Raises:
            UserError, KeyError, ValueError, TypeError: it is none.
        """

        def table(raw: Mapping[str, float]) -> dict[int, float]:
            return {int(at): float(seconds) for at, seconds in raw.items()}

        by_rows = {int(at): Costs(table(c["verify"]), table(c["draft"])) for at, c in stored["rows"].items()}
        if not by_rows:
            raise UserError("costs: there are none")
        return cls(by_rows, float(stored["read"]))


def read(points: Sequence[tuple[int, float]], at: float) -> float:
    """The value there, on straight lines through the points; the outermost lines go on, and never below 0."""
    if len(points) == 1:
        return points[0][1]
    right = min(max(bisect_left(points, (at, float("-inf"))), 1), len(points) - 1)
    (x, y), (x2, y2) = points[right - 1], points[right]
    return max(0.0, y + (at - x) * (y2 - y) / (x2 - x))


DEFAULT_COSTS = Costs(
    verify={1: 1.0, 4: 1.05, 8: 1.14, 16: 1.36, 32: 1.76, 64: 2.83},
    draft={1: 0.15, 2: 0.3},
)
"""Relative ones. Verification as measured with SmolLM2-135M in bf16 behind 256 tokens on two CPU cores; a depth of
drafts by the share of weights that a head of one layer with the whole vocabulary reads, which is no measurement."""
