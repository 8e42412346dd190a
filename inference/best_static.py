"""The static tree that accepts most, by how often drafts of each rank and depth were right.

Letters: N nodes without the root, D depths, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import UserError
from .tree import Static

Path = tuple[int, ...]
Rates = Sequence[Sequence[float]]
Best = tuple[float, tuple[Path, ...]]  # expected accepted drafts, and their paths


def best_static(rates: Rates, nodes: int, depth: int | None = None) -> Static:
    """The tree of at most `nodes` drafts with the most expected accepted ones, by an exact dynamic program.

    Sequoia (Chen et al. 2024, section 3.2) with rates that depend on the depth, too; Medusa (Cai et al. 2024, section
    2.3.1) chooses among the same trees. Takes D * R * N^2 steps.

    Args:
        rates: `rates[d][r]`: how often the draft of rank r at depth d is right, given that those before it were.
        depth: deepest draft allowed; by default as many as there are rates.

    Raises:
        UserError: a rate is no probability, those of a depth add up to more than 1, or nothing is worth drafting.
    """
    levels = [list(level) for level in rates[:depth]]
    _check(levels, nodes)
    below: list[Best] = [(0.0, ())] * (nodes + 1)  # by nodes: what hangs below a node
    for level in reversed(levels):
        below = _level(level, below, nodes)
    paths = below[nodes][1]
    if not paths:
        raise UserError("best_static: no draft was ever right by these rates, so that no tree is worth its nodes")
    return Static(paths)


def expected_tokens(shape: Static, rates: Rates) -> float:
    """Tokens a round that a static tree gives by these rates: one, and each draft that is accepted.

    Raises:
        UserError: the tree has a path without a rate.
    """
    value: dict[Path, float] = {(): 1.0}
    for path in shape.paths:
        if len(path) > len(rates) or path[-1] >= len(rates[len(path) - 1]):
            raise UserError(f"static tree, path {list(path)}: there is no rate for its rank and depth")
        value[path] = value[path[:-1]] * rates[len(path) - 1][path[-1]]
    return sum(value.values())


def _level(rates: list[float], below: list[Best], nodes: int) -> list[Best]:
    """By number of nodes, the best that can hang below one node, given what can hang below each of its children."""
    best: list[Best] = [(0.0, ())] * (nodes + 1)
    for rank, rate in enumerate(rates):
        wider = list(best)
        for total in range(1, nodes + 1):
            for size in range(1, total + 1):  # of the child of this rank and what hangs below it
                value = best[total - size][0] + rate * (1 + below[size - 1][0])
                if value > wider[total][0] + 1e-12:
                    child = ((rank,), *((rank, *path) for path in below[size - 1][1]))
                    wider[total] = value, best[total - size][1] + child
        best = wider
    return best


def _check(levels: list[list[float]], nodes: int) -> None:
    if nodes < 1 or not levels:
        raise UserError(f"best_static: needs rates of one depth at least and nodes of 1 or more, not {nodes}")
    for depth, level in enumerate(levels):
        for rank, rate in enumerate(level):
            if not 0 <= rate <= 1:
                raise UserError(f"rates, depth {depth}, rank {rank}: {rate} is no probability")
        if sum(level) > 1 + 1e-6:
            raise UserError(f"rates, depth {depth}: add up to {sum(level):.4g}; one token is right, so at most to 1")
