"""Two drafters in one: lookup first, a head where lookup knows nothing.

Both follow the true text every round, whichever of them drafted, so that the second never has to catch up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UserError
from ..heads.backbone import Features
from .drafter import Drafter
from .tree import Tree


@dataclass(frozen=True)
class Hybrid:
    """What a `Generator` takes as drafter for two in one.

    Each of them is whatever a `Generator` takes: a name, a head, a draft backbone, a drafter.
    """

    first: Any
    """Asked first; for example "ngram" or "suffix"."""
    second: Any
    """Asked where the first has no draft, or none that is founded well enough."""
    least: int = 3
    """Tokens that a lookup has to find again, at least, for its draft to be taken."""
    joined: bool = False
    """Verify both drafts in one tree where the first has one."""


class HybridDrafter:
    """Asks `first`, and `second` where that has too little to go by.

    Raises:
        UserError: both read hidden states of the backbone, and not the same.
    """

    def __init__(self, first: Drafter, second: Drafter, least: int = 3, joined: bool = False) -> None:
        if first.taps and second.taps and first.taps != second.taps:
            raise UserError(f"hybrid: both read hidden states, {first.taps} and {second.taps}; one of them may")
        self.first, self.second, self.least, self.joined = first, second, least, joined
        self.taps = first.taps or second.taps

    def start(self, prompt: Sequence[int]) -> None:
        self.first.start(prompt)
        self.second.start(prompt)

    def advance(self, features: Features, next_ids: Sequence[int]) -> None:
        self.first.advance(features, next_ids)
        self.second.advance(features, next_ids)

    def draft(self, budget: int) -> Tree:
        tree = self.first.draft(budget)
        founded = len(tree) > 1 and getattr(self.first, "matched", self.least) >= self.least
        if not founded:
            return self.second.draft(budget)
        return merged(tree, self.second.draft(budget)) if self.joined else tree


def merged(one: Tree, other: Tree) -> Tree:
    """Both trees in one, what they share only once.

    Args:
        other: with the same root.
    """
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
    return Tree(tokens, parents)
