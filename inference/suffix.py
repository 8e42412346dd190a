"""A drafter without weights: what followed the longest known suffix of the text, in it or in earlier outputs.

SuffixDecoding (Oliaro et al. 2024) and SAM-Decoding (Hu et al. 2024), on a suffix automaton: the longest suffix of up
to `reach` tokens that occurred before, and the most frequent continuation of it, as a chain; or those continuations
that are most frequent together, as a small tree.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from ..errors import UserError
from ..heads.backbone import Features
from .automaton import Place, SuffixAutomaton, Writer
from .tree import Chain, Dynamic, Tree

REACH = 32


class SuffixStore:
    """Past outputs, shared between requests; at most about `tokens` of them.

    It consists of two halves: when the newer one is full, the older one is forgotten and a new one begun.
    """

    def __init__(self, tokens: int = 200_000, reach: int = REACH) -> None:
        if tokens < 2:
            raise UserError(f"a store of past outputs needs room for 2 tokens or more, not {tokens}")
        self.limit, self.reach = tokens // 2, reach
        self.halves = [SuffixAutomaton(reach)]

    @property
    def tokens(self) -> int:
        """How many it holds."""
        return sum(half.tokens for half in self.halves)

    def add(self, tokens: Sequence[int]) -> None:
        """A whole text."""
        entry = Entry(self)
        for token in tokens:
            entry.write(token)


class Entry:
    """One text on its way into a store, and where it stands in what the store held before."""

    def __init__(self, store: SuffixStore) -> None:
        self.store = store
        self.target, self.writer = store.halves[-1], Writer()
        self.places: list[tuple[SuffixAutomaton, Place]] = []

    def follow(self, token: int) -> None:
        """The text goes on: look on in each half."""
        known = {id(half): place for half, place in self.places}
        halves = self.store.halves
        self.places = [(half, half.follow(known.get(id(half), Place()), token)) for half in halves]

    def write(self, token: int) -> None:
        """Keep this token for later texts."""
        if self.store.halves[-1].tokens >= self.store.limit:
            self.store.halves = [self.store.halves[-1], SuffixAutomaton(self.store.reach)]
        if self.target is not self.store.halves[-1]:
            self.target, self.writer = self.store.halves[-1], Writer()
        self.target.write(self.writer, token)


class SuffixDrafter:
    """Drafts what followed the longest known suffix of prompt and output, or of outputs in a store.

    Args:
        shape: a `Chain`, or a `Dynamic`, whose nodes are those of the largest product of shares along their path.
        store: past outputs; what this request puts out goes there, too. None: prompt and output alone.
        reach: the longest suffix that is looked for.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, shape: Chain | Dynamic, store: SuffixStore | None = None, reach: int = REACH) -> None:
        self.shape, self.store, self.reach = shape, store, reach
        self.matched = 0
        """Length of the suffix behind the last draft."""

    def start(self, prompt: Sequence[int]) -> None:
        self.own, self.writer, self.place = SuffixAutomaton(self.reach), Writer(), Place()
        self.entry = None if self.store is None else Entry(self.store)
        self.prompt, self.read = len(prompt), 0
        self._take(prompt[0])

    def advance(self, features: Features | None, next_ids: Sequence[int]) -> None:
        """The text goes on with `next_ids`; features are not looked at."""
        for token in next_ids:
            self._take(token)

    def draft(self, budget: int) -> Tree:
        """A tree of at most `budget` depths; the root alone where no suffix is known."""
        places = [(self.own, self.place), *(self.entry.places if self.entry else ())]
        book, place = max(places, key=lambda pair: pair[1].length)  # of equals, the request's own
        self.matched = place.length
        depth = min(self.shape.depth, budget)
        if isinstance(self.shape, Chain):
            return grown(self.root, book, place, depth, 1, depth)
        return grown(self.root, book, place, depth, self.shape.top_k, self.shape.nodes)

    def _take(self, token: int) -> None:
        self.root = token
        self.place = self.own.follow(self.place, token)  # among what came before
        self.own.write(self.writer, token)
        self.read += 1
        if self.entry is not None:
            self.entry.follow(token)
            if self.read > self.prompt:
                self.entry.write(token)


def grown(root: int, book: SuffixAutomaton, place: Place, depth: int, top_k: int, nodes: int) -> Tree:
    """The tree of the `nodes` most probable continuations by the automaton's counts, best first."""
    tokens, parents, shares = [root], [-1], [1.0]
    order = 0
    heap: list[tuple[float, int, int, int, int, Place]] = []  # -share, order, parent, depth, token, place

    def push(parent: int, level: int, share: float, here: Place) -> None:
        nonlocal order
        for token, part, after in book.continuations(here, top_k) if level < depth else ():
            order += 1
            heapq.heappush(heap, (-share * part, order, parent, level + 1, token, after))

    push(0, 0, 1.0, place)
    while heap and len(tokens) <= nodes:
        share, _, parent, level, token, after = heapq.heappop(heap)
        tokens.append(token)
        parents.append(parent)
        shares.append(-share)
        push(len(tokens) - 1, level, -share, after)
    return Tree(tokens, parents, shares=shares)
