"""What a round costs: seconds of verification by nodes, seconds of drafting by depth."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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

    def of(self, nodes: int, depth: int) -> float:
        """A round with a tree of so many nodes, the root included, drafted so deep."""
        drafting = read(self.draft, depth) if depth else 0.0  # type: ignore[arg-type]
        return read(self.verify, nodes) + drafting  # type: ignore[arg-type]


def read(points: Points, at: int) -> float:
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
