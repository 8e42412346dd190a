"""`AutoDrafter`: any drafter that headstart grows, asked for as much as the policy expects to pay.

What the drafter is to read waits until drafts are asked for, so that a request that is decoded plainly costs what it
costs without a drafter.

Letters: T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from torch import Tensor

from ..heads.backbone import Backbone, Features
from ..heads.base import DraftHead
from .chance import Chance
from .draft_model import same_tokens
from .drafter import Drafter, HeadDrafter, NoDrafter, SamplingDrafter
from .drafters import Factory, drafter_factory
from .held import joined
from .hybrid import Hybrid
from .policy import Policy
from .tree import Auto, Chain, Dynamic, Gain, Shape, Tree
from .tuned import costs_of, entry


def auto_factory(backbone: Backbone, drafter: Any, shape: Auto) -> Factory:
    """What makes the drafter of a new request, all under one policy; what its rounds cost is measured where that was
    not done before.

    Raises:
        UserError: as `drafter_factory`.
    """
    if isinstance(drafter, Hybrid) and isinstance(drafter.second, DraftHead) and drafter.learned:
        return _measured(backbone, drafter, shape)
    make = drafter_factory(backbone, drafter, _largest(backbone, drafter, shape))
    first = make()
    if isinstance(first, NoDrafter):
        return make
    if isinstance(first, HeadDrafter):
        shape = Auto(min(shape.depth, first.depth), shape.top_k, shape.nodes)
    timed = Dynamic(shape.depth, shape.top_k, shape.nodes)
    costs = costs_of(backbone, drafter, first, timed, rows=[1])
    policy = Policy(costs, shape, entry(backbone, drafter).get("survival", ()))
    policy.measure = lambda rows: costs_of(backbone, drafter, make(), timed, rows)
    return lambda: AutoDrafter(make(), policy)


def _measured(backbone: Backbone, hybrid: Hybrid, shape: Auto) -> Factory:
    """A hybrid, which has a policy of its own, by the costs of its head on this machine."""
    most = _largest(backbone, hybrid.second, shape)
    assert isinstance(most, Dynamic), "as heads have it"
    head = drafter_factory(backbone, hybrid.second, most)()
    costs = costs_of(backbone, hybrid.second, head, most, rows=[1])
    return drafter_factory(backbone, replace(hybrid, costs=costs.at(1), read=costs.read), most)


def _largest(backbone: Backbone, drafter: Any, shape: Auto) -> Shape | None:
    """What the drafter grows at most; None leaves it to a drafter that knows no such forms."""
    if isinstance(drafter, DraftHead):
        depth = min(shape.depth, drafter.max_depth or shape.depth)
        return Dynamic(depth, shape.top_k, shape.nodes)
    kind = str(drafter).partition(":")[0]
    if isinstance(drafter, Backbone) and not same_tokens(backbone.tokenizer, drafter.tokenizer):
        return Chain(shape.depth)
    if isinstance(drafter, Backbone) or kind in ("exit", "int8", "suffix"):
        return Dynamic(shape.depth, shape.top_k, shape.nodes)
    return Chain(shape.depth) if kind == "ngram" else None


class AutoDrafter:
    """See `Drafter`.

    Args:
        inner: a new one, for trees of any size that the policy allows.
    """

    def __init__(self, inner: Drafter, policy: Policy) -> None:
        self.inner, self.policy, self.taps = inner, policy, inner.taps
        self.root, self._spent = -1, 0.0
        self._form: tuple[int, int] | None = None  # nodes and depth of the round, where its time tells something
        self._held: list[tuple[Features, Sequence[int]]] = []

    def start(self, prompt: Sequence[int]) -> None:
        self.case, self._held = self.policy.begin(), []
        self.inner.start(prompt)

    def advance(self, features: Features, next_ids: Sequence[int]) -> None:
        self.case.ended(next_ids)
        self.root = next_ids[-1]
        self._held.append((features, next_ids))
        self.case.held += len(next_ids)

    def draft(self, budget: int) -> Tree:
        return self._round(budget, self._grown)

    def sample(self, budget: int, chance: Chance, law: Callable[[Tensor], Tensor]) -> Tree:
        def drawn(budget: int, depth: int) -> Tree:
            assert isinstance(self.inner, SamplingDrafter), "the rule asks for drafts that are drawn"
            if isinstance(self.inner, HeadDrafter):
                top_k = self.policy.shape.top_k
                self.inner.shape = Dynamic(depth, top_k, min(self.policy.shape.nodes, depth * min(2, top_k)))
            return self.inner.sample(min(budget, depth), chance, law)

        return self._round(budget, drawn)

    def timed(self, seconds: float) -> None:
        """What verification of the last tree took, and all else of that round."""
        if self._form is not None:
            self.policy.took(self._spent + seconds, *self._form)

    def _round(self, budget: int, grown: Callable[[int, int], Tree]) -> Tree:
        begun, free = perf_counter(), isinstance(self.inner, HeadDrafter) and grown == self._grown
        depth = 0 if isinstance(self.inner, NoDrafter) else self.policy.depth([self.case], budget, free)
        tree, reads = Tree.chain([self.root]), self.case.held
        if depth:
            self._catch_up()
            tree = grown(budget, depth)
        self.case.drafted(
            tree if depth else None, min(self.policy.shape.depth if free else depth, budget), max(1, tree.depth)
        )
        telling = not depth or (
            tree.depth and reads <= self.policy.shape.depth + 1
        )  # reading more is no cost of a round
        self._form = (len(tree), tree.depth) if telling else None
        self._spent = perf_counter() - begun
        return tree

    def _grown(self, budget: int, depth: int) -> Tree:
        policy, inner = self.policy, self.inner
        if isinstance(inner, HeadDrafter):
            inner.shape = Gain(policy.shape.depth, policy.shape.top_k, policy.at(), policy.shape.nodes)
            inner.belief = self.case.survival
            return inner.draft(budget)
        return inner.draft(min(budget, depth))

    def _catch_up(self) -> None:
        held, self._held, self.case.held = self._held, [], 0
        for features, ids in joined(held):
            self.inner.advance(features, ids)
