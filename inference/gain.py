"""Growing a tree by what its nodes are expected to gain against what they cost.

Letters: K nodes of one depth, Vd draft vocabulary. q is the drafter's probability, as an estimate that a draft is
accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .tree import Gain, Tree

Step = Callable[[Tensor, Tensor], Tensor]


class Belief(Protocol):
    """What is known of how far the drafter's q can be trusted, by depth from 1."""

    def factor(self, depth: int) -> float:
        """What q of this depth is to be multiplied by."""

    def further(self, depth: int, more: int) -> list[float]:
        """Expected tokens of 1 to `more` further depths, for a draft of this depth that is accepted."""


class _Node(NamedTuple):
    p: float  # probability that it is accepted: product along the path
    q: float  # the same of the drafter's own
    token: int
    parent: int  # place in the pool, -1: the root


class _Worth(NamedTuple):
    rate: float  # expected tokens for their cost
    nodes: int  # that give it
    expected: float  # tokens


def grow(
    shape: Gain,
    root: int,
    logits: Tensor,
    step: Step,
    to_target: Callable[[Tensor], Tensor],
    belief: Belief | None = None,
) -> Tree:
    """The tree with the most expected tokens for its cost, among those a dynamic tree would choose from.

    A depth is drafted as long as it could still improve on that, were all of its drafts right; then the nodes are taken
    in the order of their q product, up to the number at which tokens per cost is highest (as in OPT-Tree, Wang et al.
    2024, and Sequoia, Chen et al. 2024, section 3.2, with a measured cost in place of a fixed number of nodes).

    Args:
        logits: (1, Vd) at the root.
        step: (K,) target ids and numbers of their parents, as `DraftHead.step` counts them, to (K, Vd) logits.
        to_target: draft ids to target ids.
        belief: None: q is taken as it is, and a further depth might have all its drafts right.
    """
    pool, frontier, handed, depth = list[_Node](), [(1.0, 1.0, -1, -1)], 0, 0  # frontier: p, q, place, number
    while True:
        best = logits.log_softmax(-1, dtype=torch.float32).topk(min(shape.top_k, logits.shape[-1]))
        shares, tokens = best.values.clamp(max=0).exp().nan_to_num(0.0).tolist(), to_target(best.indices).tolist()
        factor = 1.0 if belief is None else belief.factor(depth + 1)
        level = [
            _Node(p * min(1.0, factor * share), q * share, token, place)
            for (p, q, place, _), row, ids in zip(frontier, shares, tokens, strict=True)
            for share, token in zip(row, ids, strict=True)
        ]
        numbers = [number for *_, number in frontier for _ in range(len(shares[0]))]
        first, depth = len(pool), depth + 1
        pool += level
        chosen = sorted(range(len(level)), key=lambda i: -level[i].p)[: shape.top_k]
        worth = _worth(shape, pool, depth)
        if not _promising(shape, worth, sum(level[i].p for i in chosen), depth, belief):
            break
        device = logits.device
        ids = torch.tensor([level[i].token for i in chosen], device=device)
        logits = step(ids, torch.tensor([numbers[i] for i in chosen], device=device))
        frontier = [(level[i].p, level[i].q, first + i, handed + n) for n, i in enumerate(chosen)]
        handed += len(chosen)
    return _cut(pool, root, worth.nodes)


def _worth(shape: Gain, pool: list[_Node], depth: int) -> _Worth:
    """What the number of nodes gives that has the highest rate of expected tokens for their cost."""
    expected, best = 1.0, _Worth(1.0 / max(shape.costs.of(1, depth), 1e-12), 0, 1.0)
    for number, p in enumerate(sorted((node.p for node in pool), reverse=True)[: shape.nodes], 1):
        expected += p
        rate = expected / max(shape.costs.of(number + 1, depth), 1e-12)
        if rate > best.rate:
            best = _Worth(rate, number, expected)
    return best


def _promising(shape: Gain, worth: _Worth, mass: float, depth: int, belief: Belief | None) -> bool:
    """Whether drafting deeper could pay: each depth gains `mass` tokens at most, with one more node at least."""
    more = range(1, shape.depth - depth + 1)
    gains = [float(one) for one in more] if belief is None else belief.further(depth, len(more))
    return any(
        worth.expected + gain * mass > worth.rate * shape.costs.of(worth.nodes + one + 1, depth + one)
        for one, gain in zip(more, gains, strict=True)
    )


def _cut(pool: list[_Node], root: int, count: int) -> Tree:
    """The `count` most probable nodes as a tree; a parent is at least as probable as its child and comes before it."""
    kept = sorted(sorted(range(len(pool)), key=lambda place: -pool[place].p)[:count])
    number = {place: node for node, place in enumerate([-1, *kept])}
    nodes = [pool[place] for place in kept]
    parents = [-1, *(number[node.parent] for node in nodes)]
    return Tree([root, *(node.token for node in nodes)], parents, shares=[1.0, *(node.q for node in nodes)])
