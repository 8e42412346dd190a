"""Trees by gain against cost: tokens per second is the highest that any choice among the drafts would give."""

from __future__ import annotations

import itertools

import pytest
import torch
from test_drafter import TableHead, drafted, paths_of

from headstart.errors import UserError
from headstart.inference.costs import Costs
from headstart.inference.tree import Gain, Tree

FREE = {1: 0.0, 9: 0.0}


def probability(head: TableHead, path: tuple[int, ...]) -> float:
    q = 1.0
    for depth, token in enumerate(path):
        q *= float(head.logits(path[:depth]).softmax(-1)[token])
    return q


def rate(head: TableHead, tree: Tree, costs: Costs, depth: int) -> float:
    return (1 + sum(probability(head, path) for path in paths_of(tree))) / costs.of(len(tree), depth)


@pytest.mark.parametrize("slope", [0.01, 0.1, 0.3, 0.9])
def test_the_rate_is_the_best_of_all_subtrees(slope: float) -> None:
    """Of one depth of drafts, by trying every subset; drafting costs nothing, so the depth is not in question."""
    costs = Costs({1: 1.0, 2: 1.0 + slope}, FREE)
    for seed in range(6):
        head = TableHead(seed=seed)
        tree = drafted(head, Gain(1, 4, costs))
        order = sorted(range(7), key=lambda token: -probability(head, (token,)))[:4]
        subsets = itertools.chain.from_iterable(itertools.combinations(order, n) for n in range(5))
        best = max(rate(head, Tree([3, *s], [-1] + [0] * len(s)), costs, 1) for s in subsets)
        assert rate(head, tree, costs, 1) == pytest.approx(best)


@pytest.mark.parametrize("slope", [0.01, 0.05, 0.2])
def test_deeper_trees_take_the_likeliest_nodes_as_far_as_they_pay(slope: float) -> None:
    costs = Costs({1: 1.0, 2: 1.0 + slope}, FREE)
    for seed in range(6):
        head = TableHead(seed=seed)
        whole = drafted(head, Gain(3, 3, Costs({1: 1.0}, FREE)))  # nodes cost nothing: all are taken
        tree = drafted(head, Gain(3, 3, costs))
        products = sorted((probability(head, path) for path in paths_of(whole)), reverse=True)
        rates = [(1 + sum(products[:n])) / costs.of(n + 1, 3) for n in range(len(products) + 1)]
        assert rate(head, tree, costs, 3) == pytest.approx(max(rates))
        tree.check(3, 7, 3)


def test_costs_decide_how_much_is_drafted() -> None:
    head = TableHead()
    cheap, dear = Costs({1: 1.0, 2: 1.0}, FREE), Costs({1: 1.0, 2: 100.0}, FREE)
    assert len(drafted(head, Gain(3, 3, cheap))) == 1 + 3 + 9 + 9
    assert len(drafted(head, Gain(3, 3, dear))) == 1
    head.calls = 0
    slow = Costs({1: 1.0, 2: 1.01}, {1: 0.0, 2: 50.0})
    assert drafted(head, Gain(5, 3, slow)).depth == 1
    assert head.calls == 0, "a depth that cannot pay is not drafted"


def test_budget_and_broken_heads() -> None:
    head = TableHead()
    for budget in range(4):
        assert drafted(head, Gain(5, 3, Costs({1: 1.0}, FREE)), budget).depth == budget
    head.logits = lambda path: torch.full((7,), float("nan"))  # type: ignore[method-assign]
    assert drafted(head, Gain(3, 3)).tokens == [3], "a draft worth nothing is no draft"


def test_costs_are_read_between_their_points() -> None:
    costs = Costs({8: 3.0, 1: 1.0, 4: 2.0}, [(1, 0.5), (3, 1.5)])
    assert costs.of(1, 0) == 1.0
    assert costs.of(4, 1) == pytest.approx(2.5)
    assert costs.of(6, 2) == pytest.approx(2.5 + 1.0)
    assert costs.of(12, 4) == pytest.approx(4.0 + 2.0)  # beyond the last, its line goes on
    assert hash(costs) == hash(Costs({1: 1.0, 4: 2.0, 8: 3.0}, {1: 0.5, 3: 1.5}))
    for tables, words in ((({}, {1: 1.0}), "verify is empty"), (({1: -1.0}, {1: 1.0}), "verify of 1 is -1.0")):
        with pytest.raises(UserError, match=words):
            Costs(*tables)
