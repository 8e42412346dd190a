"""Rules by name through the whole loop: by enumeration of all chance on a made-up backbone, and with real heads."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from test_generator import NEW, NO_END, Scripted, backbone, head, own, prompt_of
from test_rules import Script, Text, law_of, tv
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import zoo
from headstart.errors import UserError
from headstart.heads.backbone import Features
from headstart.heads.base import Step
from headstart.heads.methods import METHODS
from headstart.heads.vocab import DraftVocab
from headstart.inference.chance import DRAFTING, JUDGING
from headstart.inference.drafter import HeadDrafter
from headstart.inference.generator import Generator, decode
from headstart.inference.rules import RULES
from headstart.inference.ruling import law_of as rule_law
from headstart.inference.sampler import Sampler
from headstart.inference.stats import Stats
from headstart.inference.tree import Chain, Dynamic, Shape, Static, Tree

V = 5
LOSSLESS = [name for name, law in RULES.items() if law.lossless]
CPU = torch.device("cpu")


# -- a backbone and a head that are tables ---------------------------------------------------------------------------


@functools.cache
def table(seed: int, text: Text) -> Tensor:
    """(V,) logits behind a text."""
    generator = random.Random(f"{seed} {text}")
    return torch.tensor([generator.uniform(-1.5, 1.5) for _ in range(V)])


class Slots:
    """What a cache has to do, on tokens."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self.pending: list[int] = []

    @property
    def lengths(self) -> list[int]:
        return [len(self.text)]

    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        self.text += [self.pending[node] for node in kept[0]]
        self.pending = []

    def commit_all(self) -> None:
        self.commit([range(len(self.pending))])


class Made:
    """A backbone whose hidden state is the number of the text that it has seen."""

    vocab_size, max_positions, device, name, unmasked = V, 99, CPU, "made", False

    def __init__(self, seed: int = 1) -> None:
        self.seed, self.texts = seed, list[Text]()

    def new_cache(self, capacity: int) -> Slots:
        return Slots()

    def together(self, length: int) -> int:
        return self.max_positions

    def forward(self, ids: Tensor, *, cache: Slots, ancestors: Tensor | None = None, taps: Any = ()) -> Features:
        [tokens] = ids.tolist()
        cache.pending = tokens
        seen = torch.ones(len(tokens), len(tokens)).tril() if ancestors is None else ancestors
        for row in seen:
            path = [token for token, visible in zip(tokens, row, strict=True) if visible]
            self.texts.append((*cache.text, *path))
        numbers = range(len(self.texts) - len(tokens), len(self.texts))
        return Features(torch.tensor([[[float(number)] for number in numbers]]), None)

    def logits(self, hidden: Tensor) -> Tensor:
        rows = [table(self.seed, self.texts[int(number)]) for number in hidden.flatten()]
        return torch.stack(rows).reshape(*hidden.shape[:-1], V)


@dataclass
class Head:
    """A head whose guesses are a table of the text, over a part of the vocabulary."""

    seed: int
    vocab: DraftVocab
    max_depth = None
    taps = ()

    def start(self) -> list[Any]:
        return [(), []]  # the true text, the texts of the nodes

    def extend(self, state: list[Any], features: Features, next_ids: Tensor) -> Step:
        state[:] = [(*state[0], *next_ids[0].tolist()), []]
        return self._said([state[0]])

    def step(self, state: list[Any], ids: Tensor, parents: Tensor) -> Step:
        texts = [
            (*(state[1][parent] if parent >= 0 else state[0]), token)
            for token, parent in zip(ids[0].tolist(), parents[0].tolist(), strict=True)
        ]
        state[1] += texts
        return self._said(texts)

    def _said(self, texts: Sequence[Text]) -> Step:
        rows = torch.stack([table(self.seed, text)[self.vocab.ids] for text in texts])
        return Step(rows[None], None)


class Enumerated(Sampler):
    """All its chance comes from a script."""

    script: Script

    def chance(self, position: int, purpose: int) -> Any:
        return self.script

    def token(self, logits: Tensor, prefix: Sequence[int]) -> int:
        return self.script.draw(self.scored(logits, prefix).double().softmax(-1))


PROCESSORS: dict[str, Callable[[], list[Any]]] = {
    "top_k": lambda: [TopKLogitsWarper(2)],
    "nucleus": lambda: [TemperatureLogitsWarper(0.2), TopKLogitsWarper(2), TopPLogitsWarper(0.5)],
    "all": lambda: [RepetitionPenaltyLogitsProcessor(1.6), TemperatureLogitsWarper(0.7), TopKLogitsWarper(2)],
}
SHAPES: dict[str, Shape] = {
    "chain": Chain(2), "static": Static(((0,), (2,), (2, 0))), "dynamic": Dynamic(2, 2, 3)
}  # fmt: skip
VOCABS = {"whole": DraftVocab(None, V), "part": DraftVocab([0, 2, 3], V)}
PROMPT = [3, 1]


def drafter(shape: Shape, vocab: str = "whole", seed: int = 2) -> HeadDrafter:
    return HeadDrafter(Head(seed, VOCABS[vocab]), shape, CPU)  # type: ignore[arg-type]


def generated(
    rule: str, make: Callable[[], Any], processors: str, limit: int, eos: frozenset[int]
) -> dict[Text, float]:
    """The law of the whole answer, prefill and all rounds."""

    def run(script: Script) -> Text:
        made = LogitsProcessorList(PROCESSORS[processors]())
        sampler = Enumerated(made, greedy=False, max_new_tokens=limit, eos=eos)
        sampler.script = script
        stats = Stats()
        tokens = [token for run in decode(Made(), make(), sampler, PROMPT, stats, rule) for token in run]  # type: ignore[arg-type]
        assert stats.tokens == len(tokens) == 1 + stats.rounds + sum(stats.accepted)
        return tuple(tokens)

    return law_of(run)


@functools.cache
def by_definition(processors: str, limit: int, eos: frozenset[int]) -> dict[Text, float]:
    law: dict[Text, float] = defaultdict(float)

    def go_on(tokens: Text, weight: float) -> None:
        if len(tokens) == limit or (tokens and tokens[-1] in eos):
            law[tokens] += weight
            return
        ids = torch.tensor([[*PROMPT, *tokens]])
        scores = LogitsProcessorList(PROCESSORS[processors]())(ids, table(1, (*PROMPT, *tokens)).clone()[None])
        for token, share in enumerate(scores[0].double().softmax(-1).tolist()):
            if share:
                go_on((*tokens, token), weight * share)

    go_on((), 1.0)
    return law


def cases() -> list[Any]:
    shapes = [(rule, shape) for rule in LOSSLESS for shape in SHAPES if shape == "chain" or not RULES[rule].chain]
    picked = [
        pytest.param(rule, shape, processors, vocab, id=f"{rule}-{shape}-{processors}-{vocab}")
        for (rule, shape), (processors, vocab) in itertools.product(
            shapes, [("top_k", "part"), ("all", "whole"), ("nucleus", "part")]
        )
    ]
    return [*picked, pytest.param("match", "dynamic", "all", "whole", id="match")]


@pytest.mark.parametrize(("rule", "shape", "processors", "vocab"), cases())
def test_the_answer_has_the_law_of_the_backbone(rule: str, shape: str, processors: str, vocab: str) -> None:
    for limit, eos in ((4, frozenset([2])), (3, frozenset())):
        law = generated(rule, lambda: drafter(SHAPES[shape], vocab), processors, limit, eos)
        assert tv(law, by_definition(processors, limit, eos)) < 1e-9


def test_a_law_that_drafts_were_not_drawn_from_fails() -> None:
    class Lying(HeadDrafter):
        def sample(self, *arguments: Any) -> Tree:
            tree = super().sample(*arguments)
            flat = {node: (law > 0) / (law > 0).sum() for node, law in (tree.laws or {}).items()}
            return Tree(tree.tokens, tree.parents, flat)

    for rule in ("chain", "siblings", "block", "traversal"):
        law = generated(rule, lambda: Lying(Head(2, VOCABS["whole"]), Chain(2), CPU), "all", 3, frozenset())  # type: ignore[arg-type]
        assert tv(law, by_definition("all", 3, frozenset())) > 1e-3


def test_typical_acceptance_is_not_lossless_and_says_so() -> None:
    law = generated("typical", lambda: drafter(Chain(2), seed=1), "all", 3, frozenset())
    assert tv(law, by_definition("all", 3, frozenset())) > 0.05
    output = Generator(backbone(), "ngram", rule="typical").generate([5, 6], temperature=1.0, seed=1)
    assert output.stats.lossless is False
    assert str(output.stats).endswith("not lossless")
    assert Generator(backbone(), "ngram").generate([5, 6]).stats.lossless is True


def test_the_drafter_of_the_target_itself_is_always_right() -> None:
    """q = p: every draft is accepted, also behind warpers."""
    for rule in ("chain", "block", "siblings", "traversal"):
        stats = Stats()
        sampler = Sampler(LogitsProcessorList(PROCESSORS["top_k"]()), greedy=False, seed=4, max_new_tokens=25)
        helper = drafter(Chain(3), seed=1)
        helper.start(PROMPT)
        helper.head.start = lambda: [(3,), []]  # type: ignore[method-assign, assignment, misc]
        list(decode(Made(), helper, sampler, PROMPT, stats, rule))  # type: ignore[arg-type]
        assert stats.rounds == 6


def test_real_chance_has_the_law_too() -> None:
    """With coins and draws by key, many samples of one seed: what rounds share would show in pairs of tokens."""
    expected = by_definition("top_k", 4, frozenset())
    for rule, shape in (("block", "chain"), ("siblings", "dynamic")):
        counts: Counter[Text] = Counter()
        for sample in range(400):
            processors = LogitsProcessorList(PROCESSORS["top_k"]())
            sampler = Sampler(processors, greedy=False, seed=7, sample=sample, max_new_tokens=4)
            runs = decode(Made(), drafter(SHAPES[shape]), sampler, PROMPT, Stats(), rule)  # type: ignore[arg-type]
            counts[tuple(token for run in runs for token in run)] += 1
        assert set(counts) <= set(expected)
        pairs = [(counts[text], 400 * share) for text, share in expected.items()]
        chi_square = sum((found - wanted) ** 2 / wanted for found, wanted in pairs)
        assert chi_square < len(pairs) - 1 + 4 * math.sqrt(2 * len(pairs))


def test_no_two_rounds_and_no_two_purposes_share_chance() -> None:
    asked: list[tuple[int, int]] = []

    class Noted(Sampler):
        def chance(self, position: int, purpose: int) -> Any:
            asked.append((position, purpose))
            return super().chance(position, purpose)

    for rule in ("siblings", "block"):
        asked.clear()
        stats = Stats()
        list(decode(Made(), drafter(Chain(2)), Noted(greedy=False, max_new_tokens=20), PROMPT, stats, rule))  # type: ignore[arg-type]
        assert len(set(asked)) == len(asked) == 2 * stats.rounds
        assert {purpose for _, purpose in asked} == {DRAFTING, JUDGING}


# -- with real heads -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("method", METHODS)
def test_at_temperature_0_every_rule_is_greedy(method: str, rule: str) -> None:
    expected = own(backbone(), prompt_of(13), max_new_tokens=NEW, **NO_END)
    generator = Generator(backbone(), head("llama", method), rule=rule)
    assert generator.generate(prompt_of(13), max_new_tokens=NEW, **NO_END).tokens == expected
    assert generator.generate(prompt_of(13), max_new_tokens=NEW, temperature=0, **NO_END).tokens == expected


@pytest.mark.parametrize("rule", RULES)
def test_a_law_on_one_token_is_greedy_too(rule: str) -> None:
    expected = own(backbone(), prompt_of(13), max_new_tokens=NEW, **NO_END)
    generator = Generator(backbone(), head("llama", "eagle3"), rule=rule)
    options = {"temperature": 1.0, "top_k": 1, "max_new_tokens": NEW, **NO_END}
    assert generator.generate(prompt_of(13), **options).tokens == expected


def test_a_broken_head_is_told() -> None:
    broken = METHODS["medusa"].build(backbone())
    with torch.no_grad():
        for weight in broken.parameters():
            weight.fill_(math.nan)
    with pytest.raises(UserError, match="the drafter's logits hold NaN"):
        Generator(backbone(), broken, rule="siblings").generate([5], temperature=1.0)
    expected = own(backbone(), [5], max_new_tokens=5, **NO_END)
    assert Generator(backbone(), broken).generate([5], max_new_tokens=5, **NO_END).tokens == expected


SAMPLED: dict[str, Any] = {
    "temperature": 0.8,
    "top_p": 0.95,
    "repetition_penalty": 1.2,
    "seed": 3,
    "max_new_tokens": NEW,
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("method", METHODS)
def test_a_seed_repeats_and_ends_and_scores_are_right(method: str, rule: str) -> None:
    generator, prompt = Generator(backbone(), head("llama", method), rule=rule), prompt_of(13)
    kept = {"output_scores": True, "output_logits": True, "output_logprobs": True}
    whole = generator.generate(prompt, **SAMPLED, **NO_END)
    again = generator.generate(prompt, **SAMPLED, **kept, **NO_END)
    assert whole.tokens == again.tokens
    assert whole.tokens != generator.generate(prompt, **{**SAMPLED, "seed": 4}, **NO_END).tokens
    assert again.stats.tokens == 1 + again.stats.rounds + sum(again.stats.accepted) == NEW
    with torch.no_grad():
        text = torch.tensor([[*prompt, *whole.tokens]])
        logits = backbone().model(text).logits[0, len(prompt) - 1 : -1].float()
    torch.testing.assert_close(again.logits, logits, rtol=1e-4, atol=1e-4)
    processors = Sampler.from_options(backbone(), prompt, **SAMPLED).processors
    for place, token in enumerate(whole.tokens):
        scores = processors(text[:, : len(prompt) + place], logits[place : place + 1].clone())
        torch.testing.assert_close(again.scores[place : place + 1], scores, rtol=1e-4, atol=1e-4)
        assert again.logprobs[place] == pytest.approx(float(scores.log_softmax(-1)[0, token]), abs=1e-3)
    for place in (0, 8):
        ends = {"eos_token_id": whole.tokens[place]}
        cut = generator.generate(prompt, **SAMPLED, **ends)
        assert cut.tokens == whole.tokens[: whole.tokens.index(whole.tokens[place]) + 1]
        calls: list[list[int]] = []

        def stop(ids: Tensor, scores: Any, calls: list[list[int]] = calls, place: int = place) -> bool:
            calls.append(ids[0, len(prompt) :].tolist())
            return len(calls) > place

        stopped = generator.generate(prompt, stopping_criteria=[stop], **SAMPLED, **NO_END)
        assert stopped.tokens == whole.tokens[: place + 1]
        assert calls == [whole.tokens[: n + 1] for n in range(place + 1)]
        assert stopped.stats.tokens == 1 + stopped.stats.rounds + sum(stopped.stats.accepted)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rule", RULES)
def test_processors_with_a_state_are_called_in_order_or_refused(rule: str, method: str) -> None:
    generator, calls = Generator(backbone(), head("llama", method), rule=rule), list[list[int]]()

    def stateful(ids: Tensor, scores: Tensor) -> Tensor:
        calls.append(ids[0].tolist())
        return scores.scatter(1, torch.tensor([[len(calls) % zoo.VOCAB]]), -math.inf)

    options = {"logits_processor": [stateful], "temperature": 1.0, "seed": 1, "max_new_tokens": NEW, **NO_END}
    if not RULES[rule].lazy:
        with pytest.raises(UserError, match=f"rule={rule} looks ahead"):
            generator.generate([5, 6], **options)
        return
    output = generator.generate([5, 6], **options)
    assert calls == [[5, 6, *output.tokens[:n]] for n in range(NEW)]


def test_shapes_of_drawn_trees() -> None:
    """Ranks that skip are places in draw order; a dynamic tree spends all of its nodes."""
    for shape, parents in (
        (Chain(3), [-1, 0, 1, 2]),
        (Static(((0,), (2,), (2, 1), (2, 4))), [-1, 0, 0, 2, 2]),
        (Dynamic(2, 2, 3), None),
        (Dynamic(3, 2, 7), None),
    ):
        helper = drafter(shape)
        helper.start(PROMPT)
        helper.advance(Features(torch.zeros(1, 1, 1), None), [1])
        sampler = Sampler(greedy=False)
        tree = helper.sample(9, sampler.chance(2, DRAFTING), sampler.drafted)
        assert parents is None or list(tree.parents) == parents
        assert tree.depth == shape.depth
        assert not isinstance(shape, Dynamic) or len(tree) == shape.nodes + 1
        assert set(tree.laws or ()) == {parent for parent in tree.parents if parent >= 0}
        assert helper.sample(0, sampler.chance(2, DRAFTING), sampler.drafted) == Tree([1], [-1])
        assert helper.sample(1, sampler.chance(2, DRAFTING), sampler.drafted).depth == 1


def test_what_does_not_go_together_is_refused() -> None:
    medusa = head("llama", "medusa")
    with pytest.raises(UserError, match="rule 'blok' is not known; did you mean block"):
        Generator(backbone(), medusa, rule="blok")
    with pytest.raises(UserError, match="rule 'x' is not known; there are match, chain, siblings, fixed, block"):
        Generator(backbone()).generate([5], rule="x")
    for rule in ("chain", "block", "siblings", "traversal"):
        with pytest.raises(UserError, match=f"rule={rule} judges drafts by the law .* drafter ngram draws none"):
            Generator(backbone(), "ngram", rule=rule)
        with pytest.raises(UserError, match="drafter Scripted draws none"):
            Generator(backbone(), Scripted([], None, list)).generate([5], rule=rule)
        assert Generator(backbone(), rule=rule).generate([5, 6], temperature=1.0, max_new_tokens=4).stats.rounds == 3
    for tree in ("dynamic:2x2x3", "static:0,1"):
        with pytest.raises(UserError, match="rule=chain judges chains, as in tree=chain:4"):
            Generator(backbone(), medusa, tree=tree, rule="chain")
        with pytest.raises(UserError, match="rule=block judges chains"):
            Generator(backbone(), medusa, tree=tree).generate([5], rule="block")
    with pytest.raises(UserError, match="rank 9; the head has 9"):
        narrow = METHODS["medusa"].build(backbone(), vocab=DraftVocab(range(3, 96, 11), zoo.VOCAB))
        Generator(backbone(), narrow, tree="static:0,9").generate([5])
    assert Generator(backbone(), medusa, tree="static:0,0.0", rule="chain").generate([5], temperature=1.0).tokens


def test_a_drafter_that_breaks_its_word_is_told() -> None:
    class Silent(Scripted):
        def sample(self, budget: int, chance: Any, law: Any) -> Tree:
            return Tree([self.text[-1], 5, 6], [-1, 0, 0]) if budget else Tree.chain(self.text[-1:])

    options = {"temperature": 1.0, "max_new_tokens": 5}
    with pytest.raises(UserError, match="node 0: the drafter does not say which law"):
        Generator(backbone(), Silent([], None, list), rule="siblings").generate([5], **options)
    with pytest.raises(UserError, match="judges chains, and the drafter gave a tree"):
        Generator(backbone(), Silent([], None, list), rule="block").generate([5], **options)


@pytest.mark.parametrize("rule", ["chain", "siblings", "block", "traversal"])
@pytest.mark.parametrize(
    ("law", "words"),
    [
        (torch.ones(96).index_fill(0, torch.tensor(5), 0.0), "node 1: token 5 was drafted, and its law gives it 0.0"),
        (torch.full((96,), math.nan), "node 0: the law of its children holds"),
        (torch.ones(96).index_fill(0, torch.tensor(7), -1.0), "node 0: the law of its children holds"),
        (torch.ones(50), "node 0: the law of its children has the shape"),
        ([1.0] * 95, "node 0: the law of its children has the shape"),
    ],
)
def test_laws_that_are_none_are_told_by_node(law: Any, words: str, rule: str) -> None:
    class Wrong(Scripted):
        def sample(self, budget: int, chance: Any, make: Any) -> Tree:
            return Tree([self.text[-1], 5], [-1, 0], {0: law}) if budget else Tree.chain(self.text[-1:])

    with pytest.raises(UserError, match=words):
        Generator(backbone(), Wrong([], None, list), rule=rule).generate([5], temperature=1.0, max_new_tokens=5)


def test_laws_of_rules_are_looked_up_by_name() -> None:
    assert rule_law("match") is None
    assert rule_law("block") is RULES["block"]
    assert [name for name, law in RULES.items() if law.lazy] == ["chain", "siblings", "fixed"]
