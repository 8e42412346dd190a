"""Verification: from the backbone's logits at every node of a tree to the tokens that are emitted.

A rule is a pure function `(tree, logits, sampler, prefix, limit) -> Walk`. The one here is exact for any drafts:
`match` takes the backbone's own token at each node it comes to and goes on below the child that carries it. Greedy,
that is plain greedy decoding; sampled, the token at a position is drawn with the noise of this position alone, so that
drafts change how soon it is known, and never what it is.

Letters: N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from .sampler import Sampler
from .tree import Tree


@dataclass(frozen=True)
class Walk:
    """What one round accepted."""

    path: list[int]
    """The nodes gone through, from the root: those whose keys and values stay."""
    tokens: list[int]
    """The tokens emitted, one behind each node of the path; all but the last are accepted drafts."""


Rule = Callable[[Tree, Tensor, Sampler, Sequence[int], int], Walk]


def match(tree: Tree, logits: Tensor, sampler: Sampler, prefix: Sequence[int], limit: int) -> Walk:
    """Emit the backbone's own token at each node, from the root down, as long as a child carries it.

    Stops at an end of sequence, and after `limit` tokens. The sampler is asked at visited nodes only, once each and
    with the true prefix.

    Args:
        logits: (N, V) raw logits of the backbone behind each node.
        prefix: all tokens up to the root, which is its last.
        limit: how many tokens may be emitted, at least 1.
    """
    # as model.generate does it: in fp32, the first of equals; one transfer for all nodes
    best = logits.float().argmax(-1).tolist() if sampler.plain else None
    text = list(prefix) if best is None else []
    path, tokens = [0], list[int]()
    while True:
        token = sampler.token(logits[path[-1]], text) if best is None else best[path[-1]]
        tokens.append(token)
        child = tree.child(path[-1], token)
        if child is None or token in sampler.eos or len(tokens) >= limit:
            return Walk(path, tokens)
        path.append(child)
        text.append(token)
