"""Two drafters in one: who is asked, that both follow the text, and trees joined without twins."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import zoo
from headstart.errors import UserError
from headstart.heads.backbone import Features
from headstart.heads.methods import METHODS
from headstart.inference.costs import Costs
from headstart.inference.drafter import HeadDrafter
from headstart.inference.generator import Generator
from headstart.inference.hybrid import Hybrid, HybridDrafter, merged
from headstart.inference.tree import Chain, Tree
from headstart.inference.worth import SELDOM, Trust, Worth

NO_END = {"eos_token_id": -1}


class Says:
    """Drafts what it is told to, and notes what it is told."""

    def __init__(self, tokens: Sequence[int], matched: int | None = None, taps: tuple[int, ...] = ()) -> None:
        self.tokens, self.taps, self.asked, self.text = list(tokens), taps, 0, list[int]()
        if matched is not None:
            self.matched = matched

    def start(self, prompt: Sequence[int]) -> None:
        self.text = [prompt[0]]

    def advance(self, features: Any, next_ids: Sequence[int]) -> None:
        self.text += next_ids

    def draft(self, budget: int) -> Tree:
        self.asked += 1
        return Tree.chain([self.text[-1], *self.tokens[:budget]])


def asked(first: Says, second: Says, **options: Any) -> Tree:
    drafter = HybridDrafter(first, second, **options)
    drafter.start([1])
    drafter.advance(None, [2, 3])  # type: ignore[arg-type]
    tree = drafter.draft(9)
    assert first.text == [1, 2, 3]
    assert second.text == [1, 2, 3][: 3 if second.asked else 1], "the second reads before it drafts, and not in vain"
    return tree


def test_the_second_is_asked_where_the_first_has_too_little() -> None:
    assert asked(Says([7, 8], matched=3), Says([9]), least=3).tokens == [3, 7, 8]
    assert asked(Says([7, 8], matched=2), Says([9]), least=3).tokens == [3, 9]
    assert asked(Says([7, 8], matched=2), Says([9]), least=2).tokens == [3, 7, 8]
    assert asked(Says([], matched=9), Says([9]), least=3).tokens == [3, 9]
    assert asked(Says([7]), Says([9]), least=3).tokens == [3, 7], "one that knows no matches is trusted where it drafts"
    second = Says([9])
    asked(Says([7], matched=3), second, least=3)
    assert second.asked == 0, "a head that is not needed computes nothing"


def test_joined_trees_hold_both_and_no_twins() -> None:
    tree = asked(Says([7, 8, 4], matched=3), Says([7, 9]), joined=True)
    assert tree == Tree([3, 7, 8, 4, 9], [-1, 0, 1, 2, 1])
    generator = random.Random(0)

    def tree_of() -> Tree:
        paths = {tuple(generator.randrange(3) for _ in range(generator.randint(1, 4))) for _ in range(4)}
        every = sorted({path[:n] for path in paths for n in range(len(path) + 1)}, key=len)
        place = {path: node for node, path in enumerate(every)}
        return Tree([5, *(p[-1] for p in every[1:])], [-1, *(place[p[:-1]] for p in every[1:])])

    def paths_of(tree: Tree) -> set[tuple[int, ...]]:
        found: list[tuple[int, ...]] = [()]
        for node in range(1, len(tree)):
            found.append((*found[tree.parents[node]], tree.tokens[node]))
        assert len(set(found)) == len(found)
        return set(found)

    for _ in range(50):
        one, other = tree_of(), tree_of()
        assert paths_of(merged(one, other)) == paths_of(one) | paths_of(other)
        merged(one, other).check(5, 6, 4)


def rounds(first: list[int], second: list[int], count: int = 400) -> tuple[HybridDrafter, Says, list[Tree]]:
    """A text that goes on 7, 8, 9, where the drafters say what they say."""
    one, other, trees = Says(first, matched=4), Says(second), []
    costs = Costs(verify={1: 1.0, 11: 2.0}, draft={1: 0.1})
    drafter = HybridDrafter(one, other, worth=Worth(costs))
    drafter.start([7])
    features = Features(torch.zeros(1, 1, 2), None)
    drafter.advance(features, [8, 9])
    for _ in range(count):
        tree = drafter.draft(5)
        trees.append(tree)
        node, run = 0, list[int]()
        while True:  # as a walk: what is drafted and right, and one token more
            run.append((one.text[-1] - 7 + len(run) + 1) % 3 + 7)
            child = tree.child(node, run[-1])
            if child is None:
                break
            node = child
        drafter.advance(features, run)
    return drafter, other, trees


def test_what_is_never_right_is_dropped_and_tried_again_now_and_then() -> None:
    drafter, other, trees = rounds([3, 4], [5])
    assert sum(len(tree) == 1 for tree in trees[-50:]) > 40, "nothing of it pays"
    assert 400 // SELDOM <= other.asked < 80
    before = other.asked
    drafter.start([7])
    for _ in range(2 * SELDOM):
        drafter.advance(Features(torch.zeros(1, 1, 2), None), [8])
        drafter.draft(5)
    assert before + 2 <= other.asked < before + 30, "a new request gets another try"


def test_a_lookup_that_is_right_is_left_alone() -> None:
    class Right(Says):
        def draft(self, budget: int) -> Tree:
            self.asked += 1
            last = self.text[-1] - 7
            return Tree.chain([self.text[-1], *((last + n) % 3 + 7 for n in range(1, budget + 1))])

    one, other = Right([], matched=4), Says([5])
    drafter = HybridDrafter(one, other)
    drafter.start([7])
    drafter.advance(Features(torch.zeros(1, 1, 2), None), [8, 9])
    for _ in range(100):
        tree = drafter.draft(5)
        drafter.advance(Features(torch.zeros(1, 1, 2), None), [*tree.tokens[1:], (tree.tokens[-1] - 6) % 3 + 7])
    assert len(tree) == 6, "all of it pays"
    assert other.asked <= 20


def test_trust_is_the_share_of_what_was_said_that_came_true() -> None:
    trust = Trust(weight=2.0, keep=1.0)
    tree = Tree([0, 5, 6, 7], [-1, 0, 0, 1], shares=[1.0, 0.5, 0.25, 0.4])
    assert trust.chances(tree) == [1.0, 0.5, 0.25, 0.4]
    trust.note(tree, [5, 9])
    assert trust.factor(1) == pytest.approx((1 + 2) / (0.75 + 2))
    assert trust.factor(2) == pytest.approx(2 / (0.8 + 2)), "0.4 of 0.5 was said, and it did not come"
    trust.note(tree, [5])
    assert trust.factor(2) == pytest.approx(2 / (0.8 + 2)), "what would have come is not known"
    assert trust.chances(tree)[2] == pytest.approx(0.25 * trust.factor(1))
    unsaid = Tree([0, 5, 6], [-1, 0, 0])
    assert Trust().chances(unsaid) == [1.0, 0.5, 0.5]
    assert all(0 <= one <= 1 for one in Trust(guess=9.0).chances(tree))


def test_nodes_are_kept_while_they_are_worth_what_they_cost() -> None:
    costs = Costs(verify={1: 1.0, 11: 2.0}, draft={1: 0.1})
    worth = Worth(costs)  # two tokens for a plain step: a node has to be right in 0.2 of all rounds
    tree = Tree([0, 1, 2, 3, 4, 5], [-1, 0, 1, 0, 2, 3])
    chances = [1.0, 0.9, 0.5, 0.21, 0.19, 0.1]
    assert worth.kept(tree, chances) == Tree([0, 1, 2, 3], [-1, 0, 1, 0])
    for _ in range(400):
        worth.ended(2, 0, 1)  # less than a token for a step
    assert worth.kept(tree, chances) == Tree([0, 1, 2, 3, 4, 5], [-1, 0, 1, 0, 2, 3])
    for _ in range(400):
        worth.ended(2, 0, 5)
    assert worth.kept(tree, chances) == Tree([0, 1, 2], [-1, 0, 1])
    assert worth.kept(Tree.chain([3]), [1.0]) == Tree.chain([3])


def test_what_reading_costs_is_weighed_too() -> None:
    worth = Worth(Costs(verify={1: 1.0, 11: 1.2}, draft={1: 0.1}), read=0.1)
    nothing = Tree.chain([3])
    assert worth.asks(nothing, [1.0], 1, 50)
    assert not worth.asks(nothing, [1.0], 2000, 50)
    assert worth.asks(nothing, [1.0], 100, 50)
    assert not worth.asks(nothing, [1.0], 100, 2), "an answer that ends soon"


def test_taps_are_those_of_whoever_reads_hidden_states() -> None:
    assert HybridDrafter(Says([]), Says([], taps=(1, 2))).taps == (1, 2)
    with pytest.raises(UserError, match=r"hybrid: both read hidden states, \(1,\) and \(2,\)"):
        HybridDrafter(Says([], taps=(1,)), Says([], taps=(2,)))


@pytest.mark.parametrize("method", METHODS)
def test_the_head_is_where_it_would_be_alone_whoever_drafted(method: str) -> None:
    backbone = zoo.backbone()
    torch.manual_seed(1)
    head = METHODS[method].build(backbone)
    prompt = [5, 17, 40, 8, 5, 17, 40]
    plain = Generator(backbone).generate(prompt, max_new_tokens=24, **NO_END)
    logits: dict[str, dict[int, torch.Tensor]] = {"alone": {}, "hybrid": {}}

    class Noted(HeadDrafter):
        def __init__(self, name: str) -> None:
            super().__init__(head, Chain(2), torch.device("cpu"))
            self.name, self.length = name, 1

        def start(self, prompt: Sequence[int]) -> None:
            super().start(prompt)
            self.length = 1

        def advance(self, features: Any, next_ids: Sequence[int]) -> None:
            super().advance(features, next_ids)
            self.length += len(next_ids)
            assert self.anchored is not None
            logits[self.name][self.length] = self.anchored.logits[0, -1].clone()

    class Half(Says):
        """Right now and then, so that lookup and head take turns."""

        def draft(self, budget: int) -> Tree:
            true = (prompt + plain.tokens)[len(self.text) :]
            self.matched = 3 if len(self.text) % 2 else 0
            return Tree.chain([self.text[-1], *true[: min(budget, 2)]])

    for drafter in (Noted("alone"), Hybrid(Half([]), Noted("hybrid"), least=3)):
        assert Generator(backbone, drafter).generate(prompt, max_new_tokens=24, **NO_END).tokens == plain.tokens
    shared = logits["alone"].keys() & logits["hybrid"].keys()
    assert len(shared) > 3
    for length in shared:
        torch.testing.assert_close(logits["alone"][length], logits["hybrid"][length], atol=1e-4, rtol=1e-3)
