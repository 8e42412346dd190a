"""The best static tree: the dynamic program against every tree there is."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from headstart.errors import UserError
from headstart.inference.best_static import best_static, expected_tokens
from headstart.inference.tree import Static

Path = tuple[int, ...]


def every_tree(rates: list[list[float]], nodes: int) -> Iterator[frozenset[Path]]:
    """All sets of at most `nodes` paths in which every path has its parent."""
    seen = {frozenset[Path]()}
    level = set(seen)
    for _ in range(nodes):
        grown = set()
        for tree in level:
            for parent in [(), *tree]:
                if len(parent) < len(rates):
                    grown |= {tree | {(*parent, rank)} for rank in range(len(rates[len(parent)]))}
        level = {tree for tree in grown if len(tree) > 0} - seen
        seen |= level
    yield from seen


def random_rates(generator: random.Random, depths: int, ranks: int) -> list[list[float]]:
    """Not even sorted: a second draft may be right more often than the first."""
    rates = []
    for _ in range(depths):
        level = [generator.random() for _ in range(ranks)]
        scale = generator.random() / sum(level)
        rates.append([scale * rate for rate in level])
    return rates


def value(paths: frozenset[Path], rates: list[list[float]]) -> float:
    total = 1.0
    for path in paths:
        product = 1.0
        for depth, rank in enumerate(path):
            product *= rates[depth][rank]
        total += product
    return total


@pytest.mark.parametrize(("depths", "ranks", "nodes"), [(1, 4, 3), (2, 3, 4), (3, 2, 5), (3, 3, 4), (4, 1, 3)])
def test_no_tree_is_better(depths: int, ranks: int, nodes: int) -> None:
    generator = random.Random(depths * ranks)
    for _ in range(8):
        rates = random_rates(generator, depths, ranks)
        found = best_static(rates, nodes)
        assert len(found.paths) <= nodes
        best = max(value(tree, rates) for tree in every_tree(rates, nodes))
        assert expected_tokens(found, rates) == pytest.approx(best)
        assert value(frozenset(found.paths), rates) == pytest.approx(best)


def test_large_trees_equal_the_greedy_choice() -> None:
    """A path is worth no more than its beginning, so the likeliest nodes make a tree: a second way to the same."""
    rates = random_rates(random.Random(0), 5, 6)
    products: dict[Path, float] = {(): 1.0}
    for level in rates:
        deepest = max(map(len, products))
        products |= {
            (*path, rank): products[path] * rate
            for path in [path for path in products if len(path) == deepest]
            for rank, rate in enumerate(level)
        }
    del products[()]
    best = 1 + sum(sorted(products.values(), reverse=True)[:40])
    assert expected_tokens(best_static(rates, 40), rates) == pytest.approx(best)


def test_depth_is_kept_and_worthless_nodes_are_left_out() -> None:
    rates = [[0.9, 0.0], [0.9, 0.05], [0.9]]
    assert best_static(rates, 5, depth=1) == Static(((0,),))
    assert best_static(rates, 3) == Static(((0,), (0, 0), (0, 0, 0)))
    assert len(best_static(rates, 50).paths) == 5  # with (0, 1) and what hangs below it


def test_what_is_no_rate_is_refused() -> None:
    for rates, words in (
        ([[0.5], [1.2]], "depth 1, rank 0: 1.2 is no probability"),
        ([[0.7, 0.7]], "depth 0: add up to 1.4"),
        ([[float("nan")]], "depth 0, rank 0"),
        ([], "one depth at least"),
        ([[0.0, 0.0]], "no draft was ever right"),
    ):
        with pytest.raises(UserError, match=words):
            best_static(rates, 3)
    with pytest.raises(UserError, match="nodes of 1 or more, not 0"):
        best_static([[0.5]], 0)
    with pytest.raises(UserError, match=r"path \[0, 1\]: there is no rate"):
        expected_tokens(Static(((0,), (0, 1))), [[0.5], [0.5]])
