"""What rounds cost on this machine: measured, in a bounded time.

Letters: B rows, N tree nodes, T positions, d depth of drafts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

import torch

from ..heads.backbone import Backbone, Features
from .costs import CostModel, Costs
from .drafter import Drafter, HeadDrafter
from .growth import grown
from .tree import Dynamic, Tree, limited

NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
DEPTHS = (1, 2, 3, 4, 6, 8)
WIDEST = 128  # positions of a forward that is timed, at most
CONTEXT = 128  # tokens behind which one row is timed
SEVERAL = 32  # and each of several
REPEATS = 9
SECONDS = 12.0  # for each number of rows

Point = tuple[str, int]


def now(device: torch.device) -> float:
    """The time in seconds, behind all that was asked of a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@torch.inference_mode()
def measured(
    backbone: Backbone, drafter: Drafter, shape: Dynamic, rows: Sequence[int] = (1,), seconds: float = SECONDS
) -> CostModel:
    """Seconds of verification by nodes and of drafting by depth, for these numbers of rows.

    All points are timed in turn, so that whatever else the machine does falls on all of them alike; the median of up to
    nine times counts. What takes longer than its share of the time is timed once.

    Args:
        drafter: a new one; a head's is timed for several rows at once, any other row by row.
        shape: of the trees that a head grows, as deep and wide as they get.
        seconds: for each number of rows; a round that is under way is finished.
    """
    timings = [_Timing(backbone, drafter, shape, count) for count in rows]
    found = {timing.rows: timing.run(seconds) for timing in timings}
    return CostModel(found, timings[0].reading())


class _Timing:
    """Rounds of B rows behind a text of random tokens."""

    def __init__(self, backbone: Backbone, drafter: Drafter, shape: Dynamic, rows: int) -> None:
        self.backbone, self.drafter, self.shape, self.rows = backbone, drafter, shape, rows
        self.context = min(CONTEXT if rows == 1 else SEVERAL, max(2, backbone.max_positions // 4))
        self.ids = torch.randint(backbone.vocab_size, (rows, self.context), generator=torch.Generator().manual_seed(0))
        self.cache = backbone.new_cache(rows=rows, capacity=self.context + max(NODES) + 1)
        self.features = backbone.forward(self._moved(self.ids), cache=self.cache, taps=drafter.taps)
        self.cache.commit([range(self.context)] * rows)
        self.drafts = self._batched() if type(drafter) is HeadDrafter else self._single()

    def run(self, seconds: float) -> Costs:
        taken: dict[Point, list[float]] = {}
        end = time.perf_counter() + seconds
        self._verify(1)  # warms up
        for repeat in range(REPEATS + 1):
            for point in self._points():
                if repeat and time.perf_counter() > end:
                    break
                taken.setdefault(point, []).append(self._timed(point))
        middle = {point: median(times[1:] or times) for point, times in taken.items()}
        return Costs(*({at: middle[kind, at] for kind, at in middle if kind == name} for name in ("verify", "draft")))

    def reading(self, tokens: int = 64) -> float:
        """Seconds a token that the drafter takes in."""
        count = min(tokens, self.context - 1)
        features, following = self._taken(count), self.ids[0, 1 : count + 1].tolist()
        self.drafter.start(self.ids[0].tolist())
        self.drafter.advance(features, following)
        begun = now(self.backbone.device)
        self.drafter.advance(features, following)
        return (now(self.backbone.device) - begun) / count

    def _points(self) -> Iterable[Point]:
        room = min(WIDEST // self.rows, self.backbone.max_positions - self.context)
        yield from (("verify", nodes) for nodes in NODES if nodes == 1 or nodes <= room)
        yield from (("draft", depth) for depth in DEPTHS if depth == 1 or depth <= self.shape.depth)

    def _timed(self, point: Point) -> float:
        kind, at = point
        begun = now(self.backbone.device)
        self._verify(at) if kind == "verify" else self.drafts(at)
        return now(self.backbone.device) - begun

    def _verify(self, nodes: int) -> None:
        """One forward over a tree with some branches, and what becomes of it."""
        tree = Tree([0] * nodes, [-1, *(max(0, node - 2) for node in range(1, nodes))])
        ids = torch.tensor([tree.tokens] * self.rows, device=self.backbone.device)
        ancestors = None if tree.depth == nodes - 1 else tree.ancestors.to(self.backbone.device)
        features = self.backbone.forward(ids, cache=self.cache, ancestors=ancestors, taps=self.drafter.taps)
        self.backbone.logits(features.last).max(-1).indices.tolist()
        self.cache.commit([[]] * self.rows)

    def _batched(self) -> Callable[[int], Any]:
        """A head, for all rows at once: the anchor taken in, and a tree grown."""
        assert isinstance(self.drafter, HeadDrafter), "another drafter has no state of several rows"
        head, state = self.drafter.head, self.drafter.head.start(self.rows)
        anchor = self._taken(1, self.rows)
        head.extend(state, self.features, self._moved(self.ids))

        def draft(depth: int) -> list[Tree]:
            step = head.extend(state, anchor, self._moved(self.ids[:, :1]))
            shape = limited(self.shape, depth)
            assert isinstance(shape, Dynamic), "a shape stays one of its kind"
            return grown(
                shape, [0] * self.rows, step.logits, lambda i, p: head.step(state, i, p).logits, head.vocab.to_target
            )

        return draft

    def _single(self) -> Callable[[int], Any]:
        """Any drafter: one row, as often as there are rows."""
        anchor, token = self._taken(1), self.ids[0, :1].tolist()
        self.drafter.start(self.ids[0].tolist())
        self.drafter.advance(self._taken(self.context - 1), self.ids[0, 1:].tolist())

        def draft(depth: int) -> None:
            for _ in range(self.rows):
                self.drafter.advance(anchor, token)
                self.drafter.draft(depth)

        return draft

    def _taken(self, count: int, rows: int = 1) -> Features:
        last, taps = self.features.last, self.features.taps
        return Features(last[:rows, :count], None if taps is None else taps[:rows, :count])

    def _moved(self, ids: torch.Tensor) -> torch.Tensor:
        return ids.to(self.backbone.device)
