"""Two drafters in one: who is asked, that both follow the text, and trees joined without twins."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import zoo
from headstart.errors import UserError
from headstart.heads.methods import METHODS
from headstart.inference.drafter import HeadDrafter
from headstart.inference.generator import Generator
from headstart.inference.hybrid import Hybrid, HybridDrafter, merged
from headstart.inference.tree import Chain, Tree

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
    assert first.text == second.text == [1, 2, 3]
    return drafter.draft(9)


def test_the_second_is_asked_where_the_first_has_too_little() -> None:
    assert asked(Says([7, 8], matched=3), Says([9])).tokens == [3, 7, 8]
    assert asked(Says([7, 8], matched=2), Says([9])).tokens == [3, 9]
    assert asked(Says([7, 8], matched=2), Says([9]), least=2).tokens == [3, 7, 8]
    assert asked(Says([], matched=9), Says([9])).tokens == [3, 9]
    assert asked(Says([7]), Says([9])).tokens == [3, 7], "one that knows no matches is trusted where it drafts"
    second = Says([9])
    asked(Says([7], matched=3), second)
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

    for drafter in (Noted("alone"), Hybrid(Half([]), Noted("hybrid"))):
        assert Generator(backbone, drafter).generate(prompt, max_new_tokens=24, **NO_END).tokens == plain.tokens
    shared = logits["alone"].keys() & logits["hybrid"].keys()
    assert len(shared) > 3
    for length in shared:
        torch.testing.assert_close(logits["alone"][length], logits["hybrid"][length], atol=1e-4, rtol=1e-3)
