"""Verification rules, by enumeration of every outcome of their coins and draws, against sampling from the target.

The same check runs over rules known to be wrong, which have to fail it by the amount that is known.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.inference import rules
from headstart.inference.chance import DRAFTING, JUDGING, Keyed, Row, without_replacement
from headstart.inference.rules import RULES, Judge, Rows
from headstart.inference.sampler import Sampler
from headstart.inference.tree import Tree
from headstart.inference.verify import Walk, match

Text = tuple[int, ...]
NONE: frozenset[int] = frozenset()
EXACT = 1e-12


# -- enumeration -----------------------------------------------------------------------------------------------------


class Script:
    """Chance that follows given choices, takes the first possible one behind them, and notes the others."""

    def __init__(self, choices: Text) -> None:
        self.choices, self.taken, self.weight = choices, (), 1.0
        self.others: list[Text] = []

    def accept(self, probability: float) -> bool:
        assert 0 <= probability <= 1
        return bool(self._choose([1 - probability, probability]))

    def draw(self, weights: Tensor) -> int:
        assert float(weights.min()) >= 0
        return self._choose((weights / weights.sum()).tolist())

    def _choose(self, weights: Sequence[float]) -> int:
        place = len(self.taken)
        possible = [choice for choice, weight in enumerate(weights) if weight > 0]
        if place < len(self.choices):
            choice = self.choices[place]
        else:
            choice = possible[0]
            self.others += [(*self.taken, other) for other in possible[1:]]
        self.taken = (*self.taken, choice)
        self.weight *= weights[choice]
        return choice


def law_of(run: Callable[[Script], Text]) -> dict[Text, float]:
    """The probability of each result of a function of chance."""
    law: dict[Text, float] = defaultdict(float)
    open_: list[Text] = [()]
    while open_:
        script = Script(open_.pop())
        law[run(script)] += script.weight
        open_ += script.others
    assert sum(law.values()) == pytest.approx(1, abs=EXACT)
    return law


def tv(one: dict[Text, float], other: dict[Text, float]) -> float:
    return sum(abs(one.get(text, 0) - other.get(text, 0)) for text in {*one, *other}) / 2


# -- worlds ----------------------------------------------------------------------------------------------------------


class World:
    """A target p and a drafter q over a few tokens, as functions of the text."""

    def __init__(self, p: Callable[[Text], list[float]], q: Callable[[Text], list[float]]) -> None:
        self.p, self.q = p, q

    def complete(self, law: dict[Text, float], length: int, eos: frozenset[int]) -> dict[Text, float]:
        """Texts go on by the target up to their end or `length`, so that laws over different lengths compare."""
        whole: dict[Text, float] = defaultdict(float)

        def go_on(text: Text, weight: float) -> None:
            if len(text) >= length or (text and text[-1] in eos):
                whole[text[:length]] += weight
                return
            for token, share in enumerate(self.p(text)):
                go_on((*text, token), weight * share)

        for text, weight in law.items():
            go_on(text, weight)
        return whole


def normed(weights: Iterable[float]) -> list[float]:
    weights = list(weights)
    return [weight / sum(weights) for weight in weights]


def table(seed: int, size: int = 3, low: int = 1) -> Callable[[Text], list[float]]:
    """A law for each text of up to 5 tokens: small integers in a fixed order, normed."""
    generator = random.Random(seed)
    texts = (text for length in range(6) for text in itertools.product(range(size), repeat=length))
    laws = {text: normed([generator.randint(low, 9) for _ in range(size)]) for text in texts}
    return laws.__getitem__


TOY = World(lambda _: [0.25, 0.45, 0.2, 0.1], lambda _: [0.4, 0.15, 0.4, 0.05])
DEEP = World(table(1), table(2))
SPARSE = World(lambda text: normed([0, 3, 2, 5] if sum(text) % 2 else [4, 0, 1, 1]), table(7, size=4, low=1))
TWIN = World(table(3), table(3))  # the drafter is the target: no residual has any mass
NARROW = World(table(4), lambda text: [0.6, 0, 0.4] if len(text) % 2 else [0, 0.3, 0.7])  # knows part of the tokens
WORLDS = {"deep": DEEP, "sparse": SPARSE, "twin": TWIN, "narrow": NARROW}


# -- drafts ----------------------------------------------------------------------------------------------------------

Draft = Callable[[World, Text, Any], tuple[Tree, list[Text]]]
"""The tree, and the text behind each node."""
Form = dict[Text, int]
"""How many children stand at a node, which is named by the ranks that lead to it."""

CHAINS: list[Form] = [{(0,) * depth: 1 for depth in range(size)} for size in range(4)]
TWO_ONE: Form = {(): 2, (0,): 1}
TREES: dict[str, Form] = {"2-11": {(): 2, (0,): 1, (1,): 1}, "2-21": {(): 2, (0,): 2, (1,): 1}, "3": {(): 3}}

Pick = Callable[[World, Text, int, Any], list[int]]


def drawn(world: World, text: Text, count: int, chance: Any) -> list[int]:
    return without_replacement(world.q(text), count, chance)


def best(world: World, text: Text, count: int, chance: Any) -> list[int]:
    row = world.q(text)
    return sorted(range(len(row)), key=lambda token: -row[token])[:count]


def grown(form: Form, pick: Pick) -> Draft:
    def draft(world: World, text: Text, chance: Any) -> tuple[Tree, list[Text]]:
        tokens, parents, texts, ranks = [text[-1] if text else 0], [-1], [text], [()]
        for node in itertools.count():
            if node == len(tokens):
                return Tree(tokens, parents), texts
            for rank, token in enumerate(pick(world, texts[node], form.get(ranks[node], 0), chance)):
                tokens.append(token)
                parents.append(node)
                texts.append((*texts[node], token))
                ranks.append((*ranks[node], rank))
        raise AssertionError

    return draft


# -- rounds ----------------------------------------------------------------------------------------------------------


def one_round(
    world: World, judge: Judge, draft: Draft, text: Text, chance: Any, eos: frozenset[int], limit: int
) -> Text:
    tree, texts = draft(world, text, chance)
    p, q = [world.p(behind) for behind in texts], [world.q(behind) for behind in texts]
    walk = judge(tree, p, q, chance, eos, limit)
    # what the cache and the drafter rely on
    assert len(walk.path) == len(walk.tokens) <= limit
    assert walk.path[0] == 0
    assert [tree.parents[node] for node in walk.path[1:]] == walk.path[:-1]
    assert [tree.tokens[node] for node in walk.path[1:]] == walk.tokens[:-1]
    assert not eos & {*walk.tokens[:-1]}
    return (*text, *walk.tokens)


def rounds_law(
    world: World, judge: Judge, draft: Draft, rounds: int, length: int, eos: frozenset[int] = NONE, stride: int = 9
) -> dict[Text, float]:
    """The law of the text after so many rounds, each at most `stride` long; rounds do not share chance."""
    law: dict[Text, float] = {(): 1.0}
    for _ in range(rounds):
        after: dict[Text, float] = defaultdict(float)
        for text, weight in law.items():
            if len(text) == length or (text and text[-1] in eos):
                after[text] += weight
                continue
            one = partial(one_round, world, judge, draft, text, eos=eos, limit=min(stride, length - len(text)))
            for longer, share in law_of(one).items():
                after[longer] += weight * share
        law = after
    return law


def distance(
    world: World, judge: Judge, draft: Draft, *, rounds: int, length: int, eos: frozenset[int] = NONE, stride: int = 9
) -> float:
    """How far rounds of a rule, gone on with by the target, are from the target alone."""
    law = rounds_law(world, judge, draft, rounds, length, eos, stride)
    return tv(world.complete(law, length, eos), world.complete({(): 1.0}, length, eos))


def expected_tokens(world: World, judge: Judge, draft: Draft) -> float:
    return sum(weight * len(text) for text, weight in rounds_law(world, judge, draft, 1, 9).items())


# -- what is right ---------------------------------------------------------------------------------------------------


def cases() -> list[Any]:
    """Each rule with drafts of its kind: deep trees for one round, smaller ones for several."""
    found = []
    for name, law in RULES.items():
        if not law.lossless:
            continue
        pick = drawn if law.sampled else best
        forms = [(f"chain{n}", CHAINS[n], rounds) for n, rounds in ((0, 2), (1, 3), (2, 2), (3, 1))]
        if not law.chain:
            forms += [("2-1", TWO_ONE, 2), *((form, TREES[form], 1) for form in TREES)]
        for world, (label, form, rounds) in itertools.product(WORLDS, forms):
            if world == "deep" or label not in ("2-11", "2-21"):  # those take long
                case = (WORLDS[world], law.judge, grown(form, pick), rounds)
                found.append(pytest.param(*case, id=f"{world}-{name}-{label}"))
    return found


@pytest.mark.parametrize(("world", "judge", "draft", "rounds"), cases())
def test_lossless_rules_give_the_law_of_the_target(world: World, judge: Judge, draft: Draft, rounds: int) -> None:
    length = 4 if rounds == 1 else 3
    for eos in (NONE, frozenset([1])):  # and the limit cuts into runs, too
        assert distance(world, judge, draft, rounds=rounds, length=length, eos=eos) < EXACT


@pytest.mark.parametrize("limit", [1, 2, 3, 4])
@pytest.mark.parametrize("name", [name for name in RULES if RULES[name].lossless])
def test_ends_and_limits_fall_at_every_place_of_a_run(name: str, limit: int) -> None:
    draft = grown(CHAINS[3], drawn if RULES[name].sampled else best)
    for eos in (NONE, frozenset([0]), frozenset([1, 2])):
        assert distance(DEEP, RULES[name].judge, draft, rounds=1, length=limit, eos=eos) < EXACT


def test_rounds_in_one_run_equal_rounds_put_together() -> None:
    draft = grown(CHAINS[1], drawn)

    def run(chance: Script) -> Text:
        text: Text = ()
        while len(text) < 3 and (not text or text[-1] != 2):
            text = one_round(DEEP, rules.block, draft, text, chance, frozenset([2]), 3 - len(text))
        return text

    assert tv(law_of(run), rounds_law(DEEP, rules.block, draft, 3, 3, frozenset([2]))) < EXACT
    assert tv(law_of(run), DEEP.complete({(): 1.0}, 3, frozenset([2]))) < EXACT


@pytest.mark.parametrize(
    ("judge", "form", "tokens"),
    [
        (rules.chain, CHAINS[1], 1.8),
        (rules.chain, CHAINS[2], 2.3861),
        (rules.chain, CHAINS[3], 2.8062),
        (rules.block, CHAINS[1], 1.8),
        (rules.block, CHAINS[2], 2.4061),
        (rules.block, CHAINS[3], 2.9161),
        (rules.traversal, CHAINS[2], 2.4061),
        (rules.traversal, CHAINS[3], 2.9161),
        (rules.siblings, TREES["2-11"], 2.6661),
        (rules.traversal, TREES["2-11"], 2.7004),
        (rules.siblings, TREES["2-21"], 2.8036),
        (rules.traversal, TREES["2-21"], 2.8358),
        (rules.siblings, TREES["3"], 2.0),
        (rules.traversal, TREES["3"], 2.0),
    ],
)
def test_tokens_a_round_are_those_of_the_papers_rules(judge: Judge, form: Form, tokens: float) -> None:
    assert expected_tokens(DEEP, judge, grown(form, drawn)) == pytest.approx(tokens, abs=5e-5)


@pytest.mark.parametrize(
    ("judge", "pick", "accepted"),
    [(rules.siblings, drawn, (0.65, 0.7667, 0.9625)), (rules.fixed, best, (0.25, 0.45, 0.90))],
)
def test_more_children_are_accepted_more_often(judge: Judge, pick: Pick, accepted: tuple[float, ...]) -> None:
    for count, share in enumerate(accepted, 1):
        assert expected_tokens(TOY, judge, grown({(): count}, pick)) == pytest.approx(1 + share, abs=5e-5)


def test_a_draft_may_depend_on_earlier_siblings_and_on_which_of_them_is_expanded() -> None:
    def sometimes_one(world: World, text: Text, count: int, chance: Any) -> list[int]:
        first = drawn(world, text, count, chance)
        return first[:1] if first and world.q(text)[first[0]] >= 1 / 3 else first

    def expand_larger(world: World, text: Text, chance: Any) -> tuple[Tree, list[Text]]:
        pair = drawn(world, text, 2, chance)
        larger = max(pair, key=lambda token: world.q(text)[token])
        [below] = drawn(world, (*text, larger), 1, chance)
        texts = [text, *((*text, token) for token in pair), (*text, larger, below)]
        return Tree([0, *pair, below], [-1, 0, 0, 1 + pair.index(larger)]), texts

    for judge in (rules.siblings, rules.traversal):
        for draft in (grown(TWO_ONE, sometimes_one), expand_larger):
            assert distance(DEEP, judge, draft, rounds=1, length=3) < EXACT


def test_fixed_children_with_duplicates_or_without_a_chance() -> None:
    def any_three(world: World, text: Text, chance: Any) -> tuple[Tree, list[Text]]:
        return Tree([0, 1, 1, 0], [-1, 0, 0, 0]), [text, (*text, 1), (*text, 1), (*text, 0)]

    assert distance(SPARSE, rules.fixed, any_three, rounds=2, length=2) < EXACT


# -- what is wrong ---------------------------------------------------------------------------------------------------

Step = Callable[[Tensor, Tensor, list[int], Any], tuple[int | None, Tensor]]


def exact(row: Row) -> Tensor:
    return torch.as_tensor(row, dtype=torch.float64)


def positive(row: Tensor) -> Tensor:
    row = row.clamp(min=0)
    return row / row.sum() if row.sum() > 0 else row


def without(row: Tensor, token: int) -> Tensor:
    row = row.clone()
    row[token] = 0
    return positive(row)


def flat(step: Step) -> Judge:
    """A rule over the root's children alone, by another step at the node."""

    def judge(tree: Tree, p: Rows, q: Rows | None, chance: Any, eos: frozenset[int], limit: int) -> Walk:
        assert q is not None
        children = list(tree.children[0])
        rows = [exact(row[0]) for row in (p, q)]
        place, law = step(*rows, [tree.tokens[child] for child in children], chance)
        token = chance.draw(law) if place is None else tree.tokens[children[place]]
        if place is None or limit == 1:
            return Walk([0], [token])
        after = chance.draw(exact(p[children[place]]))
        return Walk([0, children[place]], [token, after])

    return judge


def resample(p: Tensor, q: Tensor, tokens: list[int], chance: Any) -> tuple[int | None, Tensor]:
    return (0 if chance.accept(min(1, float(p[tokens[0]] / q[tokens[0]]))) else None), p


def difference(p: Tensor, q: Tensor, tokens: list[int], chance: Any) -> tuple[int | None, Tensor]:
    [token] = tokens
    return (0 if chance.accept(max(0, float((p[token] - q[token]) / p[token]))) else None), positive(p - q)


def zeroed(p: Tensor, q: Tensor, tokens: list[int], chance: Any) -> tuple[int | None, Tensor]:
    [token] = tokens
    return (0 if chance.accept(min(1, float(p[token] / q[token]))) else None), without(p, token)


def unchanged_q(p: Tensor, q: Tensor, tokens: list[int], chance: Any) -> tuple[int | None, Tensor]:
    """Right for children drawn independently; wrong without replacement, and for fixed ones."""
    for place, token in enumerate(tokens):
        if chance.accept(min(1, float(p[token] / q[token]))):
            return place, p
        left = positive(p - q)
        p = left if left.sum() > 0 else p
    return None, p


def twice(world: World, text: Text, count: int, chance: Any) -> list[int]:
    return [chance.draw(exact(world.q(text))) for _ in range(count)]


def merged(world: World, text: Text, count: int, chance: Any) -> list[int]:
    return list(dict.fromkeys(twice(world, text, count, chance)))


def dropped(world: World, text: Text, count: int, chance: Any) -> list[int]:
    return [token for token in drawn(world, text, count, chance) if world.q(text)[token] >= 0.2]


def by_q(world: World, text: Text, count: int, chance: Any) -> list[int]:
    return sorted(drawn(world, text, count, chance), key=lambda token: -world.q(text)[token])


def larger(world: World, text: Text, count: int, chance: Any) -> list[int]:
    return by_q(world, text, count, chance)[:1]


@pytest.mark.parametrize(
    ("world", "judge", "count", "pick", "known"),
    [
        pytest.param(TOY, flat(resample), 1, drawn, 0.1575, id="resample from p"),
        pytest.param(TOY, flat(difference), 1, drawn, 0.45, id="accept with (p - q) / p"),
        pytest.param(TOY, flat(zeroed), 1, drawn, 0.1025, id="zero the rejected token of a sampled draft"),
        pytest.param(TOY, flat(unchanged_q), 2, drawn, 0.00625, id="without replacement, q not renormalised"),
        pytest.param(TOY, flat(unchanged_q), 2, merged, 0.00375, id="independent duplicates merged"),
        pytest.param(TOY, flat(unchanged_q), 2, best, 0.375, id="the ratio rule for fixed children"),
        pytest.param(TOY, rules.chain, 1, dropped, 0.09, id="drop a draft by its own q"),
        pytest.param(DEEP, rules.siblings, 2, by_q, 0.15, id="sampled siblings sorted by q"),
        pytest.param(DEEP, rules.siblings, 2, larger, 0.175, id="the larger q of two sampled siblings"),
    ],
)
def test_wrong_rules_fail_by_what_is_known(world: World, judge: Judge, count: int, pick: Pick, known: float) -> None:
    draft = grown({(): count}, pick)
    assert distance(world, judge, draft, rounds=1, length=1) == pytest.approx(known, abs=1e-6)
    assert distance(world, judge, draft, rounds=2, length=3) > known / 2, "over several rounds, too"


def test_the_frame_of_the_wrong_rules_passes_with_a_right_step() -> None:
    assert distance(DEEP, flat(rules.choose), grown({(): 2}, drawn), rounds=2, length=3) < EXACT
    assert distance(TOY, flat(unchanged_q), grown({(): 2}, twice), rounds=2, length=2) < EXACT
    assert expected_tokens(TOY, flat(unchanged_q), grown({(): 2}, twice)) == pytest.approx(1.72)


def test_sampled_rules_over_fixed_children_fail_where_the_fixed_rule_takes_any() -> None:
    for judge in (rules.siblings, rules.traversal, rules.block, rules.chain):
        assert distance(TOY, judge, grown(CHAINS[1], best), rounds=1, length=1) > 0.1
    for pick in (drawn, twice, by_q, larger, best):  # any choice that was made before the coins
        assert distance(DEEP, rules.fixed, grown(TWO_ONE, pick), rounds=1, length=3) < EXACT


def test_drafts_that_share_their_noise_between_rounds_fail() -> None:
    """Each round alone has the right law; both together do not."""
    world = World(lambda _: [0.7, 0.3], lambda _: [0.5, 0.5])

    def two_rounds(shared: bool) -> dict[Text, float]:
        def run(chance: Script) -> Text:
            kept: list[int] = []

            def pick(world: World, text: Text, count: int, chance: Any) -> list[int]:
                if count and not (shared and kept):
                    kept[:] = drawn(world, text, count, chance)
                return kept[:count]

            text: Text = ()
            for _ in range(2):
                text = one_round(world, rules.chain, grown(CHAINS[1], pick), text, chance, NONE, 1)
            return text

        return law_of(run)

    plain = world.complete({(): 1.0}, 2, NONE)
    assert tv(two_rounds(shared=False), plain) < EXACT
    shared = two_rounds(shared=True)
    assert plain[0, 0] == pytest.approx(0.49)
    assert shared[0, 0] == pytest.approx(0.58)
    assert tv(shared, plain) > 0.1


def test_block_with_the_residual_of_a_single_token_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rules.residual
    monkeypatch.setattr(rules, "residual", lambda p, q, share=1.0: (whole(p, q, share)[0], whole(p, q)[1]))
    for judge in (rules.block, rules.traversal):
        assert distance(SPARSE, judge, grown(CHAINS[2], drawn), rounds=1, length=3) > 1e-4


def test_typical_acceptance_is_marked_and_fails() -> None:
    assert [name for name, law in RULES.items() if not law.lossless] == ["typical"]
    for pick in (drawn, best):
        assert distance(DEEP, rules.typical, grown(CHAINS[2], pick), rounds=1, length=3) > 0.05


def test_typical_acceptance_takes_the_longest_path_of_likely_tokens() -> None:
    sure, even = [0.02, 0.97, 0.01], [0.3, 0.3, 0.4]
    tree = Tree([0, 0, 1, 2, 0, 2], [-1, 0, 0, 2, 2, 3])
    p = [sure, even, even, sure, even, [0.0, 0.0, 1.0]]
    # 0 behind the root is too unlikely; below 1 both are likely enough, 2 the more; 2 behind that is not
    walk = rules.typical(tree, p, None, Keyed(0, 0, 0, JUDGING), NONE, 9)
    assert walk.path == [0, 2, 3]
    assert walk.tokens[:2] == [1, 2]


# -- edges -----------------------------------------------------------------------------------------------------------


class Given:
    """Chance with a given coin; a draw takes the heaviest."""

    def __init__(self, coin: float) -> None:
        self.coin = coin

    def accept(self, probability: float) -> bool:
        return self.coin < probability

    def draw(self, weights: Tensor) -> int:
        assert float(weights.sum()) > 0
        assert not weights.isnan().any()
        return int(weights.argmax())


def test_a_token_of_no_probability_is_never_accepted_even_by_a_coin_of_zero() -> None:
    p, q = [[0.0, 1.0], [0.5, 0.5]], [[1.0, 0.0], [0.5, 0.5]]
    for name in ("chain", "siblings", "fixed", "block", "traversal"):
        assert RULES[name].judge(Tree.chain([0, 0]), p, q, Given(0.0), NONE, 5) == Walk([0], [1])


def test_an_unlucky_coin_where_nothing_is_left_falls_back_to_the_target() -> None:
    """p = q up to rounding: rejection has no probability, and a coin of almost 1 must not divide by nothing."""
    row = normed([0.1, 0.2, 0.3])
    nearly = [value * (1 + 1e-16 * sign) for value, sign in zip(row, (1, -1, 1), strict=True)]
    for name in ("chain", "siblings", "block", "traversal"):
        walk = RULES[name].judge(Tree.chain([0, 2, 1]), [row] * 3, [nearly] * 3, Given(1.0), NONE, 5)
        assert walk.tokens[-1] == 2
    sure = [[0.0, 1.0, 0.0]] * 4
    walk = rules.fixed(Tree([0, 1, 1, 0], [-1, 0, 0, 0]), sure, None, Given(1.0), NONE, 5)
    assert walk == Walk([0], [1])


def test_rules_that_descend_ask_for_the_rows_of_visited_nodes_only() -> None:
    class Asked(Sequence[Row]):
        asked: list[int] = []

        def __getitem__(self, node: Any) -> Any:
            self.asked.append(node)
            return DEEP.p(())

        def __len__(self) -> int:
            return 9

    tree = Tree([0, 0, 1, 2, 0], [-1, 0, 0, 1, 3])
    for judge in (rules.siblings, rules.fixed):
        for coin, path in ((0.0, [0, 1, 3, 4]), (1.0, [0])):
            rows = Asked()
            rows.asked = []
            assert judge(tree, rows, [DEEP.q(())] * 5, Given(coin), NONE, 9).path == path
            assert rows.asked == path
        rows.asked = []
        judge(tree, rows, [DEEP.q(())] * 5, Given(0.0), frozenset([2]), 9)
        assert rows.asked == [0, 1], "nothing is asked behind an end of sequence"


def test_laws_may_be_tensors_of_any_dtype_and_need_not_sum_to_one() -> None:
    p = torch.tensor([[1, 2, 1], [3, 1, 4]])
    q = torch.tensor([[2.0, 1.0, 1.0], [1.0, 1.0, 1.0]], dtype=torch.float16)

    def run(p: Rows, q: Rows) -> dict[Text, float]:
        return law_of(lambda chance: tuple(rules.block(Tree.chain([0, 0]), p, q, chance, NONE, 9).tokens))

    assert tv(run(p, q), run([[0.25, 0.5, 0.25], [0.375, 0.125, 0.5]], [[0.5, 0.25, 0.25], [1 / 3] * 3])) < EXACT


def test_what_a_rule_cannot_judge_is_an_assertion() -> None:
    rows = [[0.5, 0.5]] * 3
    fork = Tree([0, 0, 1], [-1, 0, 0])
    for judge in (rules.chain, rules.block):
        with pytest.raises(AssertionError, match="more than one child"):
            judge(fork, rows, rows, Given(0.5), NONE, 5)
    for judge in (rules.siblings, rules.traversal):
        with pytest.raises(AssertionError, match="drawn from"):
            judge(fork, rows, None, Given(0.5), NONE, 5)
        with pytest.raises(AssertionError, match="no probability under q"):
            judge(fork, rows, [[0.0, 1.0]] * 3, Given(0.5), NONE, 5)
        with pytest.raises(AssertionError, match="sums to nan"):
            judge(fork, [[float("nan"), 1.0]] * 3, rows, Given(0.5), NONE, 5)


def test_a_target_without_doubt_walks_as_match_does() -> None:
    generator = random.Random(5)
    longest = 0
    for seed in range(100):
        size = generator.randint(1, 10)
        parents = [-1, *(generator.randrange(node) for node in range(1, size))]
        tree = Tree([generator.randrange(4) for _ in range(size)], parents)
        logits = torch.randn(size, 4, generator=torch.Generator().manual_seed(seed))
        p = torch.nn.functional.one_hot(logits.argmax(-1), 4)
        eos, limit = frozenset([3]), generator.randint(1, 4)
        expected = match(tree, logits, Sampler(eos=eos), [tree.tokens[0]], limit)
        assert rules.fixed(tree, p, None, Keyed(seed, 0, 0, JUDGING), eos, limit) == expected
        longest = max(longest, len(expected.tokens))
    assert longest >= 3


# -- chance ----------------------------------------------------------------------------------------------------------


def test_keyed_chance_is_the_same_for_the_same_key_alone() -> None:
    def bits(*key: int) -> list[bool]:
        chance = Keyed(*key)
        return [chance.accept(0.5) for _ in range(64)]

    keys = [(7, 0, 5, JUDGING), (8, 0, 5, JUDGING), (7, 1, 5, JUDGING), (7, 0, 6, JUDGING), (7, 0, 5, DRAFTING)]
    assert len({tuple(bits(*key)) for key in keys}) == len(keys)
    assert bits(*keys[0]) == bits(*keys[0])
    assert len(bits(-1, 0, 0, JUDGING)) == 64, "any integer is a seed"


def test_keyed_chance_has_its_probabilities() -> None:
    chance, count = Keyed(3, 0, 0, JUDGING), 10_000
    assert sum(chance.accept(0.3) for _ in range(count)) / count == pytest.approx(0.3, abs=0.015)
    weights = torch.tensor([0.0, 1.0, 0.0, 3.0, 4.0, 0.0])
    counts = Counter(chance.draw(weights) for _ in range(count))
    assert set(counts) == {1, 3, 4}
    for token in counts:
        assert counts[token] / count == pytest.approx(float(weights[token]) / 8, abs=0.015)
    assert not any(chance.accept(0.0) for _ in range(100))
    assert all(chance.accept(1.0) for _ in range(100))


def test_the_lowest_and_the_highest_number_give_nothing_that_has_no_probability() -> None:
    chance = Keyed(0, 0, 0, JUDGING)
    for number, token in ((0.0, 1), (1.0, 2)):
        chance._generator = type("Given", (), {"random": lambda self, number=number: number})()  # type: ignore[assignment]
        assert not chance.accept(0.0)
        assert chance.draw(torch.tensor([0.0, 0.5, 0.5, 0.0])) == token


def test_without_replacement_draws_what_there_is() -> None:
    assert sorted(without_replacement([0.0, 0.5, 0.0, 0.5], 4, Keyed(0, 0, 0, DRAFTING))) == [1, 3]
    law = law_of(lambda chance: tuple(without_replacement(TOY.q(()), 2, chance)))
    assert law[0, 1] == pytest.approx(0.4 * 0.15 / 0.6)
    assert len(law) == 12
