"""Two drafters in one: a lookup, which costs next to nothing, and a head.

Both read the true text, whichever of them drafted; the second, which has something to compute, only before it is asked,
and then all at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UserError
from ..heads.backbone import Features
from .costs import DEFAULT_COSTS, Costs
from .drafter import Drafter, HeadDrafter
from .held import joined as pieces
from .tree import Dynamic, Gain, Tree
from .worth import Worth


@dataclass(frozen=True)
class Hybrid:
    """What a `Generator` takes as drafter for two in one.

    Each of them is whatever a `Generator` takes: a name, a head, a draft backbone, a drafter. Without `least` and
    `joined`, drafts of both share a tree, as far as they are expected to pay by what was accepted before, and the
    second is asked where it is expected to add enough (worth.py); a dynamic form of a head is then the largest that it
    drafts.
    """

    first: Any
    """Asked first; for example "ngram" or "suffix"."""
    second: Any
    """Asked where the first has no draft, or none that is founded well enough."""
    least: int | None = None
    """Take the first one's draft, alone, where it found so many tokens again, and the second one's elsewhere."""
    joined: bool = False
    """Verify both drafts in one tree, whole, where the first found `least` tokens again (3 if that is None)."""
    costs: Costs = DEFAULT_COSTS
    """Of a round, for what is to be expected; tree="auto" measures them."""
    read: float | None = None
    """What the second takes for each token of a text, in the same unit."""

    @property
    def learned(self) -> bool:
        """Whether it is learned what pays."""
        return self.least is None and not self.joined


class HybridDrafter:
    """Asks `first`, and `second` where that has too little to go by.

    Args:
        least: by a fixed rule; None: by `worth`.
        worth: shared by all requests.

    Raises:
        UserError: both read hidden states of the backbone, and not the same.
    """

    def __init__(
        self,
        first: Drafter,
        second: Drafter,
        least: int | None = None,
        joined: bool = False,
        worth: Worth | None = None,
    ) -> None:
        if first.taps and second.taps and first.taps != second.taps:
            raise UserError(f"hybrid: both read hidden states, {first.taps} and {second.taps}; one of them may")
        self.first, self.second, self.joined, self.worth = first, second, joined, worth or Worth()
        self.least = 3 if least is None and joined else least
        self.taps = first.taps or second.taps
        if self.least is None and isinstance(second, HeadDrafter) and isinstance(second.shape, Dynamic):
            shape = second.shape
            second.shape, second.belief = (
                Gain(shape.depth, shape.top_k, self.worth.costs, shape.nodes),
                self.worth.second,
            )
        self._held: list[tuple[Features, Sequence[int]]] = []
        self._round: tuple[Tree, Tree | None, int] | None = None  # what each drafted, and nodes of both

    def start(self, prompt: Sequence[int]) -> None:
        self.first.start(prompt)
        self.second.start(prompt)
        self._held, self._round = [], None

    def advance(self, features: Features, next_ids: Sequence[int]) -> None:
        if self._round is not None:
            self._learn(*self._round, next_ids)
        self._round = None
        self.first.advance(features, next_ids)
        self._held.append((features, next_ids))

    def draft(self, budget: int) -> Tree:
        tree = self.first.draft(budget)
        if self.least is None:
            return self._worthy(tree, budget)
        founded = len(tree) > 1 and self._matched >= self.least
        if not founded:
            return self._asked(budget)
        return merged(tree, self._asked(budget)) if self.joined else tree

    @property
    def _matched(self) -> int:
        """Tokens that the first found again; of one that does not say so, enough."""
        return int(getattr(self.first, "matched", 3 if self.least is None else self.least))

    def _asked(self, budget: int) -> Tree:
        held, self._held = self._held, []
        for features, ids in pieces(held):
            self.second.advance(features, ids)
        return self.second.draft(budget)

    def _worthy(self, looked: Tree, budget: int) -> Tree:
        worth = self.worth
        tree, other, chances = looked, None, worth.first(self._matched).chances(looked)
        if budget and worth.asks(looked, chances, sum(len(ids) for _, ids in self._held), budget):
            other = self._asked(budget)
            tree, places = united(looked, other)
            chances = [*chances, *[0.0] * (len(tree) - len(chances))]
            for chance, node in zip(worth.second.chances(other), places, strict=True):
                chances[node] = max(chances[node], chance)
        tree = worth.kept(tree, chances)
        self._round = looked, other, len(tree)
        return tree

    def _learn(self, looked: Tree, other: Tree | None, nodes: int, tokens: Sequence[int]) -> None:
        self.worth.first(self._matched).note(looked, tokens)
        if other is not None:
            self.worth.drafted(other, tokens)
        self.worth.ended(nodes, 0 if other is None else other.depth, len(tokens))


def merged(one: Tree, other: Tree) -> Tree:
    """Both trees in one, the first as it is, what they share only once."""
    return united(one, other)[0]


def united(one: Tree, other: Tree) -> tuple[Tree, list[int]]:
    """The same, and by node of `other`, which has the same root, its node there."""
    assert one.tokens[0] == other.tokens[0], "trees of different texts"
    tokens, parents = list(one.tokens), list(one.parents)
    place = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    new = [0]  # by node of `other`
    for token, parent in list(zip(other.tokens, other.parents, strict=True))[1:]:
        key = new[parent], token
        if key not in place:
            place[key] = len(tokens)
            tokens.append(token)
            parents.append(new[parent])
        new.append(place[key])
    return Tree(tokens, parents), new
