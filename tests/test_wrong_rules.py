"""Rules that systems in the field had and that are wrong: the check of the right ones fails each, at its end of
sequence and its limits, too.

`test_rules.py` has those that change a step at one node; here are those that go wrong over a tree or a whole text.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_rules import (
    CHAINS,
    DEEP,
    NONE,
    TWO_ONE,
    Draft,
    Script,
    Text,
    World,
    best,
    distance,
    drawn,
    exact,
    grown,
    law_of,
    one_round,
    positive,
    tv,
)
from torch import Tensor

from headstart.inference import rules
from headstart.inference.rules import Judge, Rows
from headstart.inference.tree import Tree
from headstart.inference.verify import Walk

FAR = 2e-3
Step = Callable[[Tensor, list[int], Any], tuple[int | None, Tensor]]


def walked(tree: Tree, path: list[int], token: int, eos: frozenset[int], limit: int) -> Walk:
    """The walk along a path and to one token more, cut where a text is cut."""
    tokens = [*(tree.tokens[node] for node in path[1:]), token][:limit]
    count = next((place for place, token in enumerate(tokens, 1) if token in eos), len(tokens))
    return Walk(path[:count], tokens[:count])


def descended(step: Step, last: Callable[[Tensor], Tensor]) -> Judge:
    """From the root down by a step at each node; the token behind a leaf is drawn from what `last` makes of p."""

    def judge(tree: Tree, p: Rows, q: Rows | None, chance: Any, eos: frozenset[int], limit: int) -> Walk:
        path = [0]
        while True:
            children = tree.children[path[-1]]
            if not children:
                return walked(tree, path, chance.draw(last(exact(p[path[-1]]))), eos, limit)
            place, law = step(exact(p[path[-1]]), [tree.tokens[child] for child in children], chance)
            if place is None:
                return walked(tree, path, chance.draw(law), eos, limit)
            path.append(children[place])

    return judge


def same(law: Tensor) -> Tensor:
    return law


def unprocessed(law: Tensor) -> Tensor:
    """p at another temperature than the rest: what the raw logits say."""
    return positive(law.sqrt())


def right_step(p: Tensor, tokens: list[int], chance: Any) -> tuple[int | None, Tensor]:
    return rules.choose(p, None, tokens, chance)


def lenient_step(p: Tensor, tokens: list[int], chance: Any) -> tuple[int | None, Tensor]:
    """Acceptance with p / 0.8."""
    for place, token in enumerate(tokens):
        if chance.accept(min(1.0, float(p[token]) / 0.8)):
            return place, p
        left = p.clone()
        left[token] = 0
        p = positive(left)
    return None, p


def without_zero_step(p: Tensor, tokens: list[int], chance: Any) -> tuple[int | None, Tensor]:
    """Token 0 counts as padding: it is never tried, and leaves the law all the same."""
    left = p.clone()
    left[0] = 0
    place, law = rules.choose(p, None, [token for token in tokens if token], chance)
    kept = [place for place, token in enumerate(tokens) if token]
    return (kept[place], law) if place is not None else (None, positive(left) if 0 in tokens else law)


def by_rows_of_paths(tree: Tree, p: Rows, q: Rows | None, chance: Any, eos: frozenset[int], limit: int) -> Walk:
    """A draw from p for each node of each path, and the longest match: a node on several paths has several tries."""
    best: tuple[list[int], int] = ([], -1)
    for leaf in [node for node in range(len(tree)) if not tree.children[node]]:
        path = [leaf]
        while path[0]:
            path.insert(0, tree.parents[path[0]])
        matched = [0]
        for token in (chance.draw(exact(p[node])) for node in path):
            below = path[len(matched)] if len(matched) < len(path) else None
            if below is None or tree.tokens[below] != token:
                break
            matched.append(below)
        if len(matched) > len(best[0]):
            best = matched, token
    return walked(tree, *best, eos, limit)


def uncut(tree: Tree, p: Rows, q: Rows | None, chance: Any, eos: frozenset[int], limit: int) -> Walk:
    """An end of sequence in the midst of a run is not seen."""
    return rules.fixed(tree, p, q, chance, NONE, limit)


def of_the_root(tree: Tree, p: Rows, q: Rows | None, chance: Any, eos: frozenset[int], limit: int) -> Walk:
    """The penalties of the round's beginning for all of its nodes: here, every node has the root's law."""
    return rules.fixed(tree, [p[0]] * len(tree), q, chance, eos, limit)


def reranked(world: World, text: Text, chance: Any) -> tuple[Tree, list[Text]]:
    """The three likeliest of four drawn nodes, as EAGLE-2 chooses among fixed ones."""
    tree, texts = grown({(): 2, (0,): 1, (1,): 1}, drawn)(world, text, chance)
    scores = [1.0]
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        scores.append(scores[parent] * world.q(texts[parent])[tree.tokens[node]])
    kept = sorted(sorted(range(len(tree)), key=lambda node: (-scores[node], node))[:4])
    parents = [-1, *(kept.index(tree.parents[node]) for node in kept[1:])]
    return Tree([tree.tokens[node] for node in kept], parents), [texts[node] for node in kept]


def stopped(world: World, text: Text, count: int, chance: Any) -> list[int]:
    """A draft that is unsure is dropped, and the drafting ends there."""
    return [token for token in drawn(world, text, count, chance) if world.q(text)[token] > 0.35]


FIXED = grown({(): 2, (0,): 1, (1,): 1}, best)
WRONG: dict[str, tuple[Judge, Draft]] = {
    "the token behind a run from raw logits": (descended(right_step, unprocessed), FIXED),
    "a threshold below 1": (descended(lenient_step, same), FIXED),
    "token 0 skipped": (descended(without_zero_step, same), grown({(): 3}, best)),
    "draws by rows of paths": (by_rows_of_paths, FIXED),
    "one law for all nodes": (of_the_root, FIXED),
    "drawn nodes reranked by q": (rules.siblings, reranked),
    "unsure drafts dropped": (rules.chain, grown(CHAINS[2], stopped)),
}


@pytest.mark.parametrize("name", WRONG)
def test_rules_that_are_wrong_over_a_tree_fail(name: str) -> None:
    judge, draft = WRONG[name]
    for rounds, eos in itertools.product((1, 2), (NONE, frozenset([0]))):
        assert distance(DEEP, judge, draft, rounds=rounds, length=3, eos=eos) > FAR


def test_the_frame_passes_with_the_right_step() -> None:
    for eos in (NONE, frozenset([1])):
        assert distance(DEEP, descended(right_step, same), FIXED, rounds=2, length=3, eos=eos) < 1e-12


def test_an_end_in_the_midst_of_a_run_that_is_not_seen_fails() -> None:
    draft = grown(CHAINS[2], best)
    assert distance(DEEP, uncut, draft, rounds=1, length=3) < 1e-12
    with pytest.raises(AssertionError):  # the text goes on behind its end
        distance(DEEP, uncut, draft, rounds=1, length=3, eos=frozenset([0, 1]))


def test_drafts_and_coins_that_share_their_noise_fail() -> None:
    """One number draws the draft by inverse of the cumulative sum, and judges it, too."""
    world = World(lambda _: [0.1, 0.6, 0.3], lambda _: [0.2, 0.3, 0.5])
    steps = 1000
    found: list[float] = [0.0] * 3
    for step in range(steps):
        number = (step + 0.5) / steps
        draft = int((torch.tensor(world.q(())).cumsum(0) <= number).sum())
        p, q = exact(world.p(())), exact(world.q(()))
        if number * q[draft] < p[draft]:
            found[draft] += 1 / steps
        else:
            for token, share in enumerate(positive(p - q).tolist()):
                found[token] += share / steps
    assert max(abs(a - b) for a, b in zip(found, world.p(()), strict=True)) > 0.03


def test_wrong_rules_of_single_nodes_fail_with_an_end_of_sequence_too() -> None:
    for judge, draft in ((rules.siblings, grown(TWO_ONE, best)), (rules.block, grown(CHAINS[2], best))):
        assert distance(DEEP, judge, draft, rounds=2, length=3, eos=frozenset([1])) > FAR


def test_a_bonus_token_that_is_dropped_or_doubled_fails() -> None:
    def last_one(change: Callable[[Text], Text]) -> Callable[[Script], Text]:
        return lambda script: change(one_round(DEEP, rules.fixed, grown(CHAINS[1], best), (), script, NONE, 3))

    plain = DEEP.complete({(): 1.0}, 3, NONE)
    assert tv(DEEP.complete(law_of(last_one(lambda text: text)), 3, NONE), plain) < 1e-12
    assert tv(DEEP.complete(law_of(last_one(lambda text: (*text, text[-1]))), 3, NONE), plain) > FAR
    # dropped where a draft was accepted, and only there, what stays is right; where none was, nothing is emitted
    rejected = law_of(last_one(lambda text: text if len(text) > 1 else (*text, *text)))
    assert tv(DEEP.complete(rejected, 3, NONE), plain) > FAR
