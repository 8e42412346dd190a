"""The rules of `rules.py` as rules of the loop: p is made from logits, coins from seed and position.

p at a node is the softmax of its scores after every processor, each called with that node's own prefix. Rules that
descend ask for the nodes they come to, once each and in order, so that processors may keep a state; the others (block,
traversal, typical) look ahead at nodes that may not be emitted, and stateful processors would see them.

Letters: N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import UserError, nearest
from .chance import JUDGING
from .rules import RULES, Law
from .sampler import NoToken, Sampler, finite
from .tree import Tree
from .verify import Rule, Walk, match

MATCH = "match"


def law_of(rule: str) -> Law | None:
    """What a rule by this name asks of drafts; None for `match`, which asks nothing.

    Raises:
        UserError: there is no such rule.
    """
    if rule == MATCH:
        return None
    if rule not in RULES:
        meant = nearest(str(rule), [MATCH, *RULES])
        hint = f"did you mean {meant}?" if meant else f"there are {', '.join([MATCH, *RULES])}"
        raise UserError(f"rule {rule!r} is not known; {hint}")
    return RULES[rule]


class Ruling(NamedTuple):
    """What a rule's name means for one request."""

    verify: Rule
    drawn: bool
    """Whether its drafts have to be drawn at random."""
    lossless: bool


def ruling_of(rule: str, sampler: Sampler) -> Ruling:
    """The rule by this name, for what this sampler asks."""
    law = law_of(rule)
    if law is None:
        return Ruling(match, drawn=False, lossless=True)
    return Ruling(judged(law), law.sampled and not sampler.greedy, law.lossless)


def judged(law: Law) -> Rule:
    """The rule of the loop that decides by this law.

    Greedy decoding needs none: all p lies on one token, and `match` emits it.
    """

    def rule(tree: Tree, logits: Tensor, sampler: Sampler, prefix: Sequence[int], limit: int) -> Walk:
        if sampler.greedy:
            return match(tree, logits, sampler, prefix, limit)
        _check(tree, law, logits.shape[-1])
        p = _Targets(tree, logits, sampler, prefix)
        chance = sampler.chance(len(prefix), JUDGING)
        return law.judge(tree, p, (tree.laws or {}) if law.sampled else None, chance, _Ends(p), limit)

    return rule


class _Targets:
    """(N, V) rows of p, each made when it is first asked for."""

    def __init__(self, tree: Tree, logits: Tensor, sampler: Sampler, prefix: Sequence[int]) -> None:
        self.tree, self.logits, self.sampler, self.prefix = tree, logits, sampler, prefix
        self.scores: dict[int, Tensor] = {}  # by node, (V,) fp32
        self.rows: dict[int, Tensor] = {}  # by node, (V,) float64

    def __getitem__(self, node: int, /) -> Tensor:
        if node not in self.rows:
            scores = self.sampler.scored(self.logits[node], [*self.prefix, *self._path(node)])
            row = scores.double().cpu()
            try:
                finite(0, float(row.max()))
            except NoToken as error:
                raise NoToken(f"node {node} of the tree: {error}") from error
            self.scores[node], self.rows[node] = scores, row.softmax(-1)
        return self.rows[node]

    def _path(self, node: int) -> list[int]:
        """The tokens from the root's child down to a node."""
        tokens: list[int] = []
        while node > 0:
            tokens.insert(0, self.tree.tokens[node])
            node = self.tree.parents[node]
        return tokens


class _Ends:
    """The sampler's ends, as the set that rules ask; keeps what is to be kept of each token."""

    def __init__(self, targets: _Targets) -> None:
        self.targets, self.sampler, self.text = targets, targets.sampler, list(targets.prefix)
        self.node: int | None = 0  # where the next token comes from

    def __contains__(self, token: object) -> bool:
        assert isinstance(token, int), "a token is an int"
        assert self.node is not None, "a token behind one that was not drafted"
        if self.sampler.record is not None:
            self.targets[self.node]  # some rules never ask for the rows they emit from
            self.sampler.record.add(self.targets.logits[self.node], self.targets.scores[self.node], token)
        self.text.append(token)
        self.node = self.targets.tree.child(self.node, token)
        return self.sampler.ended(self.text)


def _check(tree: Tree, law: Law, size: int) -> None:
    if law.chain and tree.depth != len(tree) - 1:
        raise UserError("this rule judges chains, and the drafter gave a tree; use rule=siblings or rule=traversal")
    if law.sampled:
        missing = [node for node, below in enumerate(tree.children) if below and node not in (tree.laws or {})]
        if missing:
            raise UserError(f"node {missing[0]}: the drafter does not say which law its children were drawn from")
        for node, row in (tree.laws or {}).items():
            if tree.children[node]:
                _check_law(tree, node, torch.as_tensor(row), size)


def _check_law(tree: Tree, node: int, row: Tensor, size: int) -> None:
    if row.shape != (size,):
        raise UserError(f"node {node}: the law of its children has the shape {tuple(row.shape)}, not ({size},)")
    if not bool((row >= 0).all() & row.isfinite().all()):
        raise UserError(f"node {node}: the law of its children holds a NaN, an infinity or a number below 0")
    for child in tree.children[node]:
        token = tree.tokens[child]
        if float(row[token]) <= 0:
            raise UserError(f"node {child}: token {token} was drafted, and its law gives it {float(row[token])}")
