"""`HeadRows`: one head that drafts for all rows of an engine at once.

All that a head keeps of a text between rounds are entries in a cache, so a row that joins or leaves is a line of slots
that is taken or given back. Everything else is made anew in each round, for the rows that are there.

Letters: B rows, T positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..heads.backbone import Features
from ..heads.base import Step
from ..heads.cache import Cache
from ..heads.slots import Slots
from .drafter import HeadDrafter
from .growth import grown, trimmed
from .policy import Case
from .row import Row
from .tree import Chain, Dynamic, Static, Tree, limited


class HeadRows:
    """A head and the lines of its cache.

    Args:
        drafter: what would draft for one row.
        probe: features of one position, which say how large a line is.
        tokens: slots in all.
    """

    def __init__(self, drafter: HeadDrafter, probe: Features, tokens: int) -> None:
        self.drafter, self.head, self.shape, self.device = drafter, drafter.head, drafter.shape, probe.last.device
        state = self.head.start()
        self.head.extend(state, probe, torch.zeros(1, 1, dtype=torch.long, device=self.device))
        self.slots = Slots(tokens, getattr(state, "cache", Cache()))

    @property
    def bytes(self) -> int:
        """Memory that it takes at most."""
        return self.slots.bytes

    def room(self, length: int) -> int:
        """How deep may be drafted behind a text of so many tokens; below 0, the head is to read no more of it."""
        return self.drafter.room(length)

    def read(self, begin: int, features: Features, next_ids: Sequence[Sequence[int]]) -> None:
        """True text of rows from `begin` on: (B, T, .) features and, of each row, the tokens behind the first of its
        positions; the others are not taken in."""
        if any(next_ids):
            width = max(map(len, next_ids))
            self._extend(begin, features[:, :width], next_ids)

    def begin(self) -> Case | None:
        """What is to be known of a new row, where a policy decides what is drafted."""
        return None

    def took(self, seconds: float, trees: Sequence[Tree]) -> None:
        """What a round of all rows took, and its trees."""

    def drafts(self, rows: Sequence[Row], headed: Sequence[bool]) -> list[Tree]:
        """A tree for each of the first rows, for those of them that are drafted for."""
        return self.trees(
            [row.features for row in rows if row.features is not None],
            [row.following if drafted else [] for row, drafted in zip(rows, headed, strict=True)],
            [min(row.budget, self.room(len(row.text))) if on else 0 for row, on in zip(rows, headed, strict=True)],
        )

    def trees(
        self, features: Sequence[Features], next_ids: Sequence[Sequence[int]], budgets: Sequence[int]
    ) -> list[Tree]:
        """Take in the last tokens of the first rows, and draft behind them.

        Args:
            features: of each row, (1, T, .).
            next_ids: of each row, the tokens behind these positions; none for a row that is not drafted for.
            budgets: how deep may be drafted in each row.
        """
        state, step = self._extend(0, _padded(features), next_ids)
        roots = [ids[-1] if ids else 0 for ids in next_ids]
        depth = min(max(budgets), self.drafter.depth)
        if depth < 1:
            return [Tree.chain([root]) for root in roots]
        shape = limited(self.shape, depth)
        assert isinstance(shape, Chain | Static | Dynamic)
        vocab = self.head.vocab
        trees = grown(shape, roots, step.logits, lambda ids, above: self._step(state, ids, above), vocab.to_target)
        return [trimmed(tree, budget, len(tree)) for tree, budget in zip(trees, budgets, strict=True)]

    def _extend(self, begin: int, features: Features, next_ids: Sequence[Sequence[int]]) -> tuple[Any, Step]:
        rows, width = features.last.shape[:2]
        ids = torch.zeros(rows, width, dtype=torch.long)
        for row, tokens in enumerate(next_ids):
            ids[row, : len(tokens)] = torch.tensor(tokens)
        lengths = list(map(len, next_ids))
        state = self.head.start(rows)
        cache = self.slots.lend(begin, begin + rows)
        if hasattr(state, "cache"):
            state.cache = cache
        ragged = None if min(lengths) == width else lengths
        step = self.head.extend(state, features, ids.to(self.device), ragged)
        self.slots.take(cache, begin)
        return state, step

    def _step(self, state: Any, ids: Tensor, parents: Tensor) -> Tensor:
        return self.head.step(state, ids, parents).logits


def _padded(features: Sequence[Features]) -> Features:
    """(1, T, .) each to (B, T, .)."""
    if len(features) == 1:
        return features[0]
    last = pad_sequence([row.last[0] for row in features], batch_first=True)
    taps = [row.taps[0] for row in features if row.taps is not None]
    return Features(last, pad_sequence(taps, batch_first=True) if taps else None)
