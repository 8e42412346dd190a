"""Verification rules for drafts that were drawn at random, and for fixed ones, as pure functions behind one interface.

A rule is `(tree, p, q, chance, eos, limit) -> Walk`: the laws of target and drafter behind each node, and where its
randomness comes from. Nothing else goes in, so a test can enumerate every outcome of it. `RULES` names them and says
what each asks of the drafts; `ruling` wires them to generation, whose default is `verify.match`.

All lossless rules but two rest on one lemma. Let x be drawn from q. Accept it with probability min(1, p(x) / q(x)),
else go on with the law norm((p - q)+): what comes out has the law p, whether q is spread out or all on one token. It
holds while q is the law that x was truly drawn from, given its earlier siblings; so children are tried in the order in
which they were drawn, and whether a child is in the tree must not depend on its own token.

Block and traversal verification judge several tokens at once, and accept more.

Letters: N nodes, V vocabulary. p is the target's probability after all processors, q the drafter's after its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor

from .chance import Chance, normed
from .tree import Tree
from .verify import Walk

TINY = 1e-14
"""A mass below this is rounding: what it would be divided for has no probability."""


class Rows(Protocol):
    """(N, V) by node: a tensor, a list or a dict of rows, or what makes a row when it is first asked for."""

    def __getitem__(self, node: int, /) -> Any: ...


class Ends(Protocol):
    """The tokens that end a text, as a set."""

    def __contains__(self, token: object, /) -> bool:
        """Asked once for each emitted token, in order, and no more behind an end; so it may look at the whole text."""
        ...


# -- one node --------------------------------------------------------------------------------------------------------


def residual(p: Tensor, q: Tensor, share: float = 1.0) -> tuple[float, Tensor]:
    """The mass of (share * p - q)+, and its law (V,).

    Where there is no mass it is never needed, but for rounding: then (0, p).
    """
    left = (share * p - q).clamp(min=0)
    mass = float(left.sum())
    return (mass, left / mass) if mass > TINY else (0.0, p)


def choose(p: Tensor, q: Tensor | None, tokens: Sequence[int], chance: Chance) -> tuple[int | None, Tensor]:
    """Which of a node's children is accepted, tried in the order given (Jeon et al. 2024, arXiv 2402.14160, section 3).

    Args:
        p: (V,) law of the target.
        q: (V,) law of the first child; each further one was drawn from it without those before. None: the children
            are a fixed choice, so that each one's law is all on its token.

    Returns:
        The place of the accepted child, and p; or None, and the law (V,) of the token to be emitted instead.
    """
    for place, token in enumerate(tokens):
        if chance.accept(_odds(p, q, token)):
            return place, p
        if q is None:
            p = _without(p, token)
        else:
            p, q = residual(p, q)[1], _without(q, token)
    return None, p


def _odds(p: Tensor, q: Tensor | None, token: int, before: float = 1.0) -> float:
    """min(1, before * p(token) / q(token))."""
    drafted = 1.0 if q is None else float(q[token])
    assert drafted > 0, f"token {token} was drafted, and has no probability under q"
    return min(1.0, before * float(p[token]) / drafted)


def _without(law: Tensor, token: int) -> Tensor:
    """The law (V,) without a token; unchanged where nothing else has mass."""
    left = law.clone()
    left[token] = 0
    mass = float(left.sum())
    return left / mass if mass > TINY else law


# -- rules -----------------------------------------------------------------------------------------------------------


def chain(tree: Tree, p: Rows, q: Rows | None, chance: Chance, eos: Ends, limit: int) -> Walk:
    """One sampled child a node (Leviathan et al. 2023, algorithm 1). Reads p at visited nodes only."""
    _check_chain(tree)
    return siblings(tree, p, q, chance, eos, limit)


def siblings(tree: Tree, p: Rows, q: Rows | None, chance: Chance, eos: Ends, limit: int) -> Walk:
    """Children drawn without replacement, in draw order (Jeon et al. 2024, arXiv 2402.14160).

    Reads p at visited nodes only, once each and from the root down.
    """
    assert q is not None, "sampled drafts are judged by the law they were drawn from"
    return _descend(tree, p, q, chance, eos, limit)


def fixed(tree: Tree, p: Rows, q: Rows | None, chance: Chance, eos: Ends, limit: int) -> Walk:
    """Any children, however they were chosen before the coins: each is accepted with its own p, else leaves the law.

    Exact for drafts drawn from q, too, but q is not looked at, and by q they would be accepted more often. The same
    law as `verify.match`, with coins in place of noise keyed by position. Reads p as `siblings` does.
    """
    return _descend(tree, p, None, chance, eos, limit)


def _descend(tree: Tree, p: Rows, q: Rows | None, chance: Chance, eos: Ends, limit: int) -> Walk:
    path, tokens = [0], list[int]()
    while True:
        node = path[-1]
        children = tree.children[node]
        drafted = normed(q[node]) if q is not None and children else None
        place, law = choose(normed(p[node]), drafted, [tree.tokens[child] for child in children], chance)
        tokens.append(chance.draw(law) if place is None else tree.tokens[children[place]])
        if tokens[-1] in eos or place is None or len(tokens) >= limit:
            return Walk(path, tokens)
        path.append(children[place])


def block(tree: Tree, p: Rows, q: Rows | None, chance: Chance, eos: Ends, limit: int) -> Walk:
    """A sampled chain judged as a whole (Sun et al. 2024, arXiv 2403.10444, algorithm 2).

    Node n stands with P_n = min(1, P_(n-1) p(x_n) / q(x_n)), a bound on how much of the drafter's mass there may stay.
    From the end back, n is accepted with S / (S + 1 - P_n), where S is the mass of (P_n p - q)+ behind it.
    """
    _check_chain(tree)
    assert q is not None, "sampled drafts are judged by the law they were drawn from"
    last = len(tree) - 1
    targets, drafts = [normed(p[node]) for node in range(last + 1)], [normed(q[node]) for node in range(last)]
    shares = [1.0]
    for node in range(last):
        shares.append(_odds(targets[node], drafts[node], tree.tokens[node + 1], shares[-1]))
    law = targets[last]
    odds = shares[last]
    node = last
    while node > 0 and not chance.accept(odds):
        node -= 1
        mass, law = residual(targets[node], drafts[node], shares[node])
        odds = _kept(mass, shares[node])
    return _cut(tree, list(range(node + 1)), chance.draw(law), eos, limit)


def traversal(tree: Tree, p: Rows, q: Rows | None, chance: Chance, eos: Ends, limit: int) -> Walk:
    """Children drawn without replacement, judged from the leaves up (Traversal Verification, arXiv 2505.12398).

    On a chain it is `block`. A rejected leaf goes, and what it leaves changes its parent's share and laws; a parent
    without children is a leaf. Reads all rows of p, and those of q that have children: 8 bytes x N x V each.
    """
    assert q is not None, "sampled drafts are judged by the law they were drawn from"
    alive = [list(children) for children in tree.children]
    targets = [normed(p[node]) for node in range(len(tree))]
    drafts = {node: normed(q[node]) for node in range(len(tree)) if alive[node]}
    shares = {0: 1.0}
    while True:
        path = [0]
        while alive[path[-1]]:
            parent, node = path[-1], alive[path[-1]][0]
            if node not in shares:
                shares[node] = _odds(targets[parent], drafts[parent], tree.tokens[node], shares[parent])
            path.append(node)
        leaf = path[-1]
        if leaf == 0 or chance.accept(shares[leaf]):
            return _cut(tree, path, chance.draw(targets[leaf]), eos, limit)
        parent = path[-2]
        alive[parent].remove(leaf)
        mass, targets[parent] = residual(targets[parent], drafts[parent], shares[parent])
        shares[parent] = _kept(mass, shares[parent])
        drafts[parent] = _without(drafts[parent], tree.tokens[leaf])


def typical(tree: Tree, p: Rows, q: Rows | None, chance: Chance, eos: Ends, limit: int) -> Walk:
    """NOT lossless: the longest path of tokens that are likely enough (Medusa, Cai et al. 2024, section 2.3.1).

    Enough is p(x) > min(0.09, 0.3 exp(-H(p))). Of paths of one length the most probable; the token behind it is drawn
    from p. Reads p at nodes that are likely enough, none of q.
    """
    best = (0, 0.0, 0)  # depth, log-probability of the path, node
    scores = {0: 0.0}
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        if parent not in scores:
            continue
        law = normed(p[parent])
        entropy = -float(torch.xlogy(law, law).sum())  # nats
        probability = law[tree.tokens[node]]
        if float(probability) > min(0.09, 0.3 * float(numpy.exp(-entropy))):
            scores[node] = scores[parent] + float(probability.log())
            best = max(best, (tree.depths[node], scores[node], node), key=lambda found: found[:2])
    path = [best[2]]
    while path[0]:
        path.insert(0, tree.parents[path[0]])
    return _cut(tree, path, chance.draw(normed(p[path[-1]])), eos, limit)


def _kept(mass: float, share: float) -> float:
    """The share of a node whose following draft was rejected, of which `mass` is left."""
    whole = mass + (1 - share)  # in this order 1 where the share is
    return mass / whole if whole > TINY else 1.0


def _cut(tree: Tree, path: list[int], token: int, eos: Ends, limit: int) -> Walk:
    """The walk along a path and to one token more, up to an end of sequence or the limit.

    Exact: the rule's tokens have the law of a text that goes on behind its end, and this is a function of that text.
    """
    tokens = [*(tree.tokens[node] for node in path[1:]), token][:limit]
    count = next((place for place, token in enumerate(tokens, 1) if token in eos), len(tokens))
    return Walk(path[:count], tokens[:count])


def _check_chain(tree: Tree) -> None:
    assert tree.depth == len(tree) - 1, "this rule judges a chain: a node here has more than one child"


Judge = Callable[[Tree, Rows, Rows | None, Chance, Ends, int], Walk]


@dataclass(frozen=True)
class Law:
    """A rule, and what it promises and asks."""

    judge: Judge
    """`(tree, p, q, chance, eos, limit)`; p and q hold a row for each node (q only where it has children)."""
    lossless: bool = True
    """Whether the text has the law of sampling from p."""
    sampled: bool = True
    """Whether children must have been drawn from q, without replacement and in order; else any choice will do."""
    chain: bool = False
    """Whether a node may have one child only."""
    lazy: bool = True
    """Whether p is read behind emitted tokens only, once each and in order, as in token-by-token decoding."""


RULES = {
    "chain": Law(chain, chain=True),
    "siblings": Law(siblings),
    "fixed": Law(fixed, sampled=False),
    "block": Law(block, chain=True, lazy=False),
    "traversal": Law(traversal, lazy=False),
    "typical": Law(typical, lossless=False, sampled=False, lazy=False),
}
"""All rules by name; `typical` is used where it is asked for by this name, and nowhere else."""
