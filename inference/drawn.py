"""Drafts drawn at random by a head, for the rules that judge drafts by the law they were drawn from.

Children of a node are drawn without replacement and stay in draw order. What a tree looks like may depend on q, on
costs, and on tokens already drawn, but never on whether a token itself was likely: no drawn token is left out again.
(EAGLE-2's choice of the best nodes at the end would do that, and bias the text.) So a dynamic tree spends its nodes
depth by depth, below the likeliest nodes drawn so far.

Letters: K nodes of one depth, V vocabulary, Vd draft vocabulary. q is the drafter's probability.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from .chance import Chance, without_replacement
from .tree import Auto, Chain, Dynamic, Gain, Shape, Static, Tree

Ranks = tuple[int, ...]
Expand = Callable[[Sequence[int], Sequence[int], Sequence[int]], Tensor]
"""(K target ids, their nodes, the nodes of their parents) -> (K, V) logits behind them."""


def drawn(
    shape: Shape, root: int, logits: Tensor, expand: Expand, chance: Chance, law: Callable[[Tensor], Tensor]
) -> Tree:
    """Draw a tree of this shape.

    Args:
        shape: a chain or static tree by how many children its nodes have; a rank is a place in draw order.
        logits: (1, V) behind the root; -inf for what cannot be drafted.
        law: (K, V) logits to (K, V) float64 q on the CPU.
    """
    tokens, parents, laws = [root], [-1], dict[int, Tensor]()
    ranks: list[Ranks] = [()]
    reached = [0.0]  # log q of the path to each node
    level = [0]
    for depth in range(shape.depth):
        levels_left = shape.depth - depth
        budget = -(-(shape.nodes - len(tokens) + 1) // levels_left) if isinstance(shape, Dynamic) else 0
        counts = _counts(shape, budget, [ranks[node] for node in level], [reached[node] for node in level])
        expanded = [(node, count) for node, count in zip(level, counts, strict=True) if count]
        if not expanded:
            break
        if depth:
            nodes = [node for node, _ in expanded]
            logits = expand([tokens[node] for node in nodes], nodes, [parents[node] for node in nodes])
        rows = law(logits)  # (K, V)
        level = []
        for (node, count), row in zip(expanded, rows, strict=True):
            laws[node] = row
            for rank, token in enumerate(without_replacement(row, count, chance)):
                level.append(len(tokens))
                tokens.append(token)
                parents.append(node)
                ranks.append((*ranks[node], rank))
                reached.append(reached[node] + math.log(float(row[token])))
    return Tree(tokens, parents, laws)


def _counts(shape: Shape, budget: int, ranks: Sequence[Ranks], reached: Sequence[float]) -> list[int]:
    """How many children each node of a depth gets; a dynamic tree has so many for all of them."""
    if isinstance(shape, Chain | Static):
        form = _form(shape.paths)
        return [form.get(rank, 0) for rank in ranks]
    assert not isinstance(shape, Gain | Auto), "a tree by gain is no tree for drawn drafts"
    left, counts = budget, [0] * len(ranks)
    for place in sorted(range(len(ranks)), key=lambda place: -reached[place]):
        counts[place] = min(shape.top_k, left)
        left -= counts[place]
    return counts


@lru_cache(maxsize=64)
def _form(paths: tuple[Ranks, ...]) -> dict[Ranks, int]:
    """How many children stand at each node, named by places in draw order: ranks may skip, draws may not."""
    names: dict[Ranks, Ranks] = {(): ()}
    counts: dict[Ranks, int] = {}
    for path in paths:
        parent = names[path[:-1]]
        counts[parent] = counts.get(parent, 0) + 1
        names[path] = (*parent, counts[parent] - 1)
    return counts


def spread(logits: Tensor, ids: Tensor | None, size: int) -> Tensor:
    """(K, Vd) logits of a draft vocabulary to (K, V) of the whole one, -inf elsewhere. ids: (Vd,); None: all."""
    if ids is None:
        return logits
    whole = torch.full((len(logits), size), -torch.inf, dtype=logits.dtype, device=logits.device)
    return whole.index_copy_(1, ids.to(logits.device), logits)
