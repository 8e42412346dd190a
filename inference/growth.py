"""Trees grown with a head, for any number of rows at once: each row gets the tree that it would get alone.

Nothing is moved to the host before all trees are complete.

Letters: B rows, K nodes of one depth, n nodes of a level, Vd draft vocabulary. A head numbers the nodes of a round in
the order in which `step` was given them; -1 is the anchor, whose child is every draft of depth 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .tree import Chain, Dynamic, Static, Tree

Step = Callable[[Tensor, Tensor], Tensor]
"""(B, K) target ids and the head's numbers of their parents to (B, K, Vd) logits behind them."""


def grown(
    shape: Chain | Static | Dynamic,
    roots: Sequence[int],
    logits: Tensor,
    step: Step,
    to_target: Callable[[Tensor], Tensor],
) -> list[Tree]:
    """A tree of this shape for each of B rows.

    Args:
        roots: the last token of each row.
        logits: (B, 1, Vd) at the anchors.
        to_target: draft ids to target ids.
    """
    grow = _dynamic if isinstance(shape, Dynamic) else _static
    return grow(shape, roots, logits, step, to_target)  # type: ignore[arg-type]


def trimmed(tree: Tree, depth: int, nodes: int) -> Tree:
    """The tree without what lies deeper than `depth`, and without all behind its first `nodes` nodes."""
    if tree.depth <= depth and len(tree) <= nodes:
        return tree
    return tree.part([node for node, at in enumerate(tree.depths) if 0 < at <= depth][: nodes - 1])


def _static(
    shape: Chain | Static, roots: Sequence[int], logits: Tensor, step: Step, to_target: Callable[[Tensor], Tensor]
) -> list[Tree]:
    levels, parents = _plan(shape, logits.device)
    found = []
    for level in levels:
        best = _best(logits, level.width).indices[:, level.rows, level.ranks]  # (B, n) draft ids
        found.append(to_target(best))
        if len(level.expanded):
            logits = step(found[-1][:, level.expanded], level.parents.expand(len(roots), -1))
    return [Tree([root, *ids], parents) for root, ids in zip(roots, torch.cat(found, 1).tolist(), strict=True)]


def _dynamic(
    shape: Dynamic, roots: Sequence[int], logits: Tensor, step: Step, to_target: Callable[[Tensor], Tensor]
) -> list[Tree]:
    rows, top_k = len(roots), min(shape.top_k, logits.shape[-1])
    reached = logits.new_zeros(rows, 1, dtype=torch.float32)  # (B, K) log q of the paths to the nodes of `logits`
    places = torch.full((rows, 1), -1, device=logits.device)  # (B, K) their numbers in the pool
    handed, size = 0, 0  # nodes given to the head, nodes in the pool
    pool = _Pool([], [], [])
    numbers = places  # (B, K) the head's numbers of these nodes
    for depth in range(shape.depth):
        best = _best(logits.log_softmax(-1, dtype=torch.float32), top_k)
        scores = (reached[..., None] + best.values.clamp(max=0)).flatten(1)  # (B, K * top_k)
        ids = to_target(best.indices.flatten(1))
        pool.add(scores, ids, places.repeat_interleave(top_k, 1))
        if depth + 1 == shape.depth:
            break
        reached, chosen = scores.topk(min(top_k, scores.shape[1]))
        logits = step(ids.gather(1, chosen), numbers.gather(1, chosen // top_k))
        places, size = chosen + size, size + scores.shape[1]
        numbers = torch.arange(handed, handed + chosen.shape[1], device=logits.device).expand(rows, -1)
        handed += chosen.shape[1]
    return pool.best(shape.nodes, roots)


class _Pool(NamedTuple):
    """All nodes that dynamic trees have seen, depth by depth, (B, n) each."""

    scores: list[Tensor]  # log q of the path to each node
    ids: list[Tensor]
    parents: list[Tensor]  # numbers in the pool, -1: the root

    def add(self, scores: Tensor, ids: Tensor, parents: Tensor) -> None:
        self.scores.append(scores)
        self.ids.append(ids)
        self.parents.append(parents)

    def best(self, nodes: int, roots: Sequence[int]) -> list[Tree]:
        """The most probable nodes of each row as a tree.

        A path is at most as probable as its beginning and stands behind it in the pool, hence the stable sort keeps the
        parents of all that it keeps.
        """
        scores = torch.cat(self.scores, 1).nan_to_num(nan=-torch.inf)
        kept = scores.sort(descending=True, stable=True).indices[:, :nodes].sort().values
        chosen = torch.stack([kept, torch.cat(self.ids, 1).gather(1, kept), torch.cat(self.parents, 1).gather(1, kept)])
        trees = []
        q = scores.gather(1, kept).exp().tolist()
        for root, shares, numbers, ids, parents in zip(roots, q, *chosen.tolist(), strict=True):
            place = {number: node for node, number in enumerate([-1, *numbers])}
            above = [-1, *(place[parent] for parent in parents)]
            trees.append(Tree([root, *ids], above, shares=[1.0, *shares]))
        return trees


class _Level(NamedTuple):
    """One depth of a static tree: n nodes, K of which have children."""

    width: int  # how many of the best tokens are needed
    rows: Tensor  # (n,) the row of the last logits that a node hangs below
    ranks: Tensor  # (n,) which of its best tokens the node is
    expanded: Tensor  # (K,) the nodes handed to the head
    parents: Tensor  # (K,) the head's numbers of their parents


@lru_cache(maxsize=64)
def _plan(shape: Chain | Static, device: torch.device) -> tuple[list[_Level], list[int]]:
    """How to grow a static tree, depth by depth, and the parents of its nodes."""
    paths: list[tuple[int, ...]] = [(), *shape.paths]
    parents = [-1, *(paths.index(path[:-1]) for path in shape.paths)]
    inner = {path[:-1] for path in shape.paths}
    given = [path for path in shape.paths if path in inner]  # in the order in which the head is given them
    levels, above = [], paths[:1]
    for depth in range(1, shape.depth + 1):
        here = [path for path in shape.paths if len(path) == depth]
        expanded = [path for path in here if path in inner]
        columns = (
            [above.index(path[:-1]) for path in here],
            [path[-1] for path in here],
            [here.index(path) for path in expanded],
            [given.index(path[:-1]) if depth > 1 else -1 for path in expanded],
        )
        tensors = (torch.tensor(column, dtype=torch.long, device=device) for column in columns)
        levels.append(_Level(1 + max(columns[1]), *tensors))
        above = expanded
    return levels, parents


def _best(logits: Tensor, count: int) -> Any:
    """Values and indices (.., count) of the largest logits; for one, max is the quicker way."""
    return logits.max(-1, keepdim=True) if count == 1 else logits.topk(count)
