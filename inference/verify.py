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

from .sampler import NoToken, Sampler, finite, largest
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

    Stops where the sampler says that the text has ended, and after `limit` tokens. The sampler is asked at visited
    nodes only, once each and with the true prefix.

    Args:
        logits: (N, V) raw logits of the backbone behind each node.
        prefix: all tokens up to the root, which is its last.
        limit: how many tokens may be emitted, at least 1.

    Raises:
        NoToken: the logits behind a visited node leave no token to choose; names the node.
    """
    best = largest(logits) if sampler.plain else None  # one transfer for all nodes
    text = list(prefix) if sampler.reads else []
    path, tokens = [0], list[int]()
    while True:
        node = path[-1]
        try:
            token = sampler.token(logits[node], text) if best is None else finite(*best[node])
        except NoToken as error:
            raise NoToken(f"node {node} of the tree: {error}") from error
        tokens.append(token)
        text.append(token)
        child = tree.child(node, token)
        if sampler.ended(text) or child is None or len(tokens) >= limit:
            return Walk(path, tokens)
        path.append(child)
