"""A causal LM as drafter: its cache is that of the true text after every round, at no more forwards than needed."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from typing import Any

import families
import pytest
import torch

import zoo
from headstart.heads.backbone import Backbone
from headstart.heads.base import Step
from headstart.inference.draft_model import DraftModel, ModelDrafter, same_tokens
from headstart.inference.generator import Generator
from headstart.inference.tree import Chain, Dynamic, Gain, Shape, Static, Tree

STATIC = Static(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0)))
SHAPES: list[Shape] = [Chain(1), Chain(4), STATIC, Dynamic(4, 3, 8), Gain(4, 3)]
PROMPT = [5, 17, 40, 8, 60, 33, 21]
NO_END = {"eos_token_id": -1}


def small(family: str = "llama", seed: int = 9, **changes: Any) -> Backbone:
    return zoo.backbone(family, seed=seed, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, **changes)


def twin(backbone: Backbone) -> Backbone:
    """The same model once more, so that its forwards can be told apart."""
    return Backbone(backbone.model, backbone.tokenizer)


class Watched(ModelDrafter):
    """Compares its cache with a fresh prefill after each draft, and may be told what to draft."""

    def __init__(self, model: DraftModel, shape: Shape, right: float, reference: Sequence[int]) -> None:
        super().__init__(model, shape)
        self.right, self.reference, self.random = right, list(reference), random.Random(3)
        self.fed: list[int] = []  # tokens of each forward of this round
        self.rounds: list[list[int]] = []
        self.accepted: list[int] = []  # new true tokens of each round
        forward = model.backbone.forward

        def counted(ids: torch.Tensor, **options: Any) -> Any:
            if options.get("cache") is not None:
                self.fed.append(ids.shape[1])
            return forward(ids, **options)

        self.model.backbone.forward = counted  # type: ignore[method-assign]
        self.plain = forward

    def advance(self, features: Any, next_ids: Sequence[int]) -> None:
        super().advance(features, next_ids)
        self.accepted.append(len(next_ids))

    def draft(self, budget: int) -> Tree:
        self.fed = []
        if self.random.random() < self.right and budget:
            self.steer()
        tree = super().draft(budget)
        if budget:
            self.rounds.append(self.fed)
            self.compare()
        return tree

    def steer(self) -> None:
        """Let the model's next guesses be the true tokens."""
        guesses, backbone = self.reference[len(self.text) :], self.model.backbone

        def steered(hidden: torch.Tensor) -> Step:
            logits = backbone.logits(hidden)
            if guesses:
                logits[..., guesses.pop(0)] = logits.max() + 5
            return Step(logits, None)

        self.model._step = steered  # type: ignore[method-assign]

    def compare(self) -> None:
        known = self.state
        assert known.ids == self.text, "all true tokens, and nothing else, are committed"
        fresh = self.model.backbone.new_cache()
        self.plain(torch.tensor([self.text]), cache=fresh)
        for ours, true in zip((*known.cache.keys, *known.cache.values), (*fresh.keys, *fresh.values), strict=True):
            width = len(self.text)
            assert known.cache.lengths == [width]
            torch.testing.assert_close(ours[:, :, :width], true[:, :, :width], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("right", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_cache_is_that_of_the_true_text_after_every_round(shape: Shape, right: float) -> None:
    backbone = zoo.backbone()
    plain = Generator(backbone).generate(PROMPT, max_new_tokens=30, **NO_END)
    model = DraftModel(small(), backbone.vocab_size)
    drafter = Watched(model, shape, right, PROMPT + plain.tokens)
    found = Generator(backbone, drafter).generate(PROMPT, max_new_tokens=30, **NO_END)
    assert found.tokens == plain.tokens
    assert len(drafter.rounds) >= found.stats.rounds - 1
    if right == 1.0:
        assert sum(found.stats.accepted) > 0


@pytest.mark.parametrize("window", ["llama", "mistral"])
def test_full_acceptance_leaves_no_hole_and_costs_no_forward(window: str) -> None:
    """The backbone drafts for itself: each round feeds the last draft, never fed before, and the token behind it."""
    backbone = zoo.backbone(window)
    plain = Generator(backbone).generate(PROMPT, max_new_tokens=31, **NO_END)
    drafter = Watched(DraftModel(twin(backbone), backbone.vocab_size), Chain(4), 0.0, [])
    found = Generator(backbone, drafter).generate(PROMPT, max_new_tokens=31, **NO_END)
    assert found.tokens == plain.tokens
    assert found.stats.accepted == found.stats.offered
    assert found.stats.rounds == 6  # 30 tokens behind the first, five a round
    assert drafter.rounds[0] == [len(PROMPT) + 1, 1, 1, 1]
    assert all(fed == [2, 1, 1, 1] for fed in drafter.rounds[1:])


def test_after_a_rejection_only_the_new_token_is_fed() -> None:
    backbone = zoo.backbone()
    drafter = Watched(DraftModel(small(), backbone.vocab_size), Chain(3), 0.0, [])
    found = Generator(backbone, drafter).generate(PROMPT, max_new_tokens=30, **NO_END)
    assert sum(found.stats.accepted) < found.stats.rounds  # a random model is mostly wrong
    for fed, new in zip(drafter.rounds[1:], drafter.accepted[1:], strict=False):
        assert fed[0] == (2 if new == 4 else 1)  # new: accepted drafts and the token behind them


@pytest.mark.parametrize(
    ("family", "shape"), [("qwen3", Chain(4)), ("gemma", STATIC), ("mistral", Dynamic(4, 3, 8)), ("llama", Gain(4, 3))]
)
def test_sampled_and_greedy_answers_are_those_of_plain_decoding(family: str, shape: Shape) -> None:
    backbone = zoo.backbone(family)
    plain, drafted = Generator(backbone), Generator(backbone, small("qwen2"), tree=shape)
    for seed, options in enumerate([{}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}]):
        for prompt in ([7], PROMPT):
            for limit in (1, 2, 14):
                wanted = plain.generate(prompt, max_new_tokens=limit, seed=seed, **options)
                assert drafted.generate(prompt, max_new_tokens=limit, seed=seed, **options).tokens == wanted.tokens


@pytest.mark.parametrize("size", [80, 96, 128])
def test_paddings_of_the_vocabulary_may_differ(size: int) -> None:
    backbone = zoo.backbone()
    generator = Generator(backbone, small(vocab_size=size), tree="dynamic:4x60x60")
    wanted = Generator(backbone).generate([90, 95, 4], max_new_tokens=20, **NO_END)
    assert generator.generate([90, 95, 4], max_new_tokens=20, **NO_END).tokens == wanted.tokens


def test_a_model_that_is_too_short_drafts_as_far_as_it_goes() -> None:
    backbone = zoo.backbone()
    generator = Generator(backbone, small(max_position_embeddings=16), tree="chain:4")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length in (3, 20):
            prompt = list(range(3, 3 + length))
            wanted = Generator(backbone).generate(prompt, max_new_tokens=30, **NO_END)
            found = generator.generate(prompt, max_new_tokens=30, **NO_END)
            assert found.tokens == wanted.tokens
            assert (sum(found.stats.offered) > 0) == (length == 3)
    notes = [str(entry.message) for entry in caught if "drafts nothing" in str(entry.message)]
    assert len(notes) == 1
    assert "texts of 16 tokens" in notes[0]


def test_a_short_model_is_never_asked_beyond_its_end() -> None:
    backbone, model = zoo.backbone(), small(max_position_embeddings=16)
    forward, most = model.forward, 0

    def watched(ids: torch.Tensor, **options: Any) -> Any:
        nonlocal most
        if "cache" in options:
            most = max(most, options["cache"].lengths[0] + options["cache"].pending + ids.shape[1])
        return forward(ids, **options)

    model.forward = watched  # type: ignore[method-assign]
    Generator(backbone, model, tree="chain:4").generate([4, 5], max_new_tokens=40, **NO_END)
    assert most == 16


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["phi3-longrope", "llama-longrope"])
def test_drafts_beside_the_place_where_rotary_factors_change(name: str, shape: Shape) -> None:
    """At position 20, in the midst of what is drafted; one of the two models then computes its whole text anew."""
    backbone = families.backbone(name)
    for drafter in ("exit:2", Backbone(backbone.model, zoo.tokenizer())):
        generator = Generator(backbone, drafter, tree=shape)
        for length in (3, 17, 20, 21):
            prompt = list(range(3, 3 + length))
            wanted = Generator(backbone).generate(prompt, max_new_tokens=26, **NO_END)
            found = generator.generate(prompt, max_new_tokens=26, **NO_END)
            assert found.tokens == wanted.tokens
            if drafter != "exit:2" and name == "phi3-longrope":  # the other keeps old factors for part of its cache
                assert found.stats.rounds < 18, "it knows its own tokens on both sides"


def test_which_tokenizers_count_as_the_same() -> None:
    class Known:
        def __init__(self, trained: str, **added: int) -> None:
            self.trained, self.added = {token: place for place, token in enumerate(trained)}, added

        def get_vocab(self) -> dict[str, int]:
            return self.trained | self.added

        def get_added_vocab(self) -> dict[str, int]:
            return self.added

    assert same_tokens(None, Known("ab"))
    assert same_tokens(Known("ab", end=2), Known("ab", end=2, start=3))
    assert not same_tokens(Known("ab", end=2), Known("ab", end=3))
    assert not same_tokens(Known("ab"), Known("ba"))
    assert not same_tokens(Known("ab"), Known("abc")), "ids that the smaller model has never seen"
