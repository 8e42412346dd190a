"""A drafter without weights: what followed the last few tokens when they stood in the text before.

Prompt lookup (Saxena 2023), with an index that grows by one entry a token, and copies that may run into themselves, so
that a text which repeats with period p is continued with period p however short it still is.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import UserError
from ..heads.backbone import Features
from .tree import Tree


class LookupDrafter:
    """Drafts a chain: the continuation of the most recent earlier occurrence of the longest known suffix.

    Args:
        depth: drafted tokens a round, at most.
        longest, shortest: lengths of the suffixes that are looked for, longest first.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, depth: int = 5, longest: int = 3, shortest: int = 1) -> None:
        if not 1 <= shortest <= longest or depth < 1:
            raise UserError(f"lookup needs 1 <= shortest <= longest and depth >= 1, not {shortest}, {longest}, {depth}")
        self.depth, self.longest, self.shortest = depth, longest, shortest
        self.text: list[int] = []
        self.index: dict[tuple[int, ...], int] = {}  # n-gram -> where its latest continuation stands
        self.matched = 0
        """Length of the suffix behind the last draft."""

    def start(self, prompt: Sequence[int]) -> None:
        """A new request. The rest of the prompt comes through `advance`, like all that follows."""
        self.text, self.index = [prompt[0]], {}

    def advance(self, features: Features | None, next_ids: Sequence[int]) -> None:
        """The text goes on with `next_ids`; features are not looked at."""
        for token in next_ids:
            here = len(self.text)
            for n in range(self.shortest, min(self.longest, here) + 1):
                self.index[tuple(self.text[here - n :])] = here
            self.text.append(token)

    def draft(self, budget: int) -> Tree:
        """A chain of at most `budget` drafts; none where no suffix is known."""
        start, copied = self._continuation(), self.text[-1:]
        if start is not None:
            period = len(self.text) - start
            for k in range(min(self.depth, budget)):
                copied.append(self.text[start + k] if k < period else copied[1 + k - period])
        return Tree.chain(copied)

    def _continuation(self) -> int | None:
        """Where the continuation of the longest known suffix stands."""
        for n in range(min(self.longest, len(self.text)), self.shortest - 1, -1):
            start = self.index.get(tuple(self.text[-n:]))
            if start is not None:
                self.matched = n
                return start
        self.matched = 0
        return None
