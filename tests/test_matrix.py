"""The matrix: every drafter and head x {chain, static, dynamic} x {greedy, seeded} x every option of `generate`.

Greedily the tokens have to be those of `model.generate` with the same arguments; drawn, those of our own plain decoding
with the same seed. Heads join by `METHODS`, drafters by the table of their names: whoever adds one adds nothing here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

import zoo
from headstart.heads.backbone import Backbone
from headstart.heads.methods import METHODS
from headstart.inference import drafters
from headstart.inference.generator import Generator
from headstart.inference.hybrid import Hybrid
from headstart.inference.penalties import CountPenalty

pytestmark = pytest.mark.filterwarnings("ignore:.*deeper than the head")
NEW = 9
PROMPT = [5, 6, 7, 8, 5, 6]
SHAPES = {"chain": "chain:4", "static": "static:0,1,2,0.0,0.1,1.0,0.0.0,0.0.0.0", "dynamic": "dynamic:4x3x8"}
CHAINS = ("ngram", "hybrid:ngram")  # these draft nothing but chains
NOT_STATIC = ("suffix",)
MORE = {"exit": "exit:1", "hybrid": "hybrid:exit:1"}  # names that go on behind a colon


class Stateful(transformers.LogitsProcessor):
    """Forbids tokens by how often it was called and by the last one; wrong after a call too many or too few."""

    calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        banned = torch.tensor([[self.calls % zoo.VOCAB, (7 * self.calls) % zoo.VOCAB, int(input_ids[0, -1])]])
        return scores.scatter(1, banned, -torch.inf)


Options = Callable[[], dict[str, Any]]
PROCESSORS: dict[str, Options] = {
    "repetition penalty": lambda: {"repetition_penalty": 1.4},
    "no_repeat_ngram": lambda: {"no_repeat_ngram_size": 2},
    "bad words": lambda: {"bad_words_ids": [[end()], [6, 7]]},
    "suppress_tokens": lambda: {"suppress_tokens": [end(), 9]},
    "begin_suppress": lambda: {"begin_suppress_tokens": [end(0), 9]},
    "min_new_tokens": lambda: {"min_new_tokens": 7, "eos_token_id": [end(), 95]},
    "min_length": lambda: {"min_length": 13, "eos_token_id": [end(), 95]},
    "forced eos": lambda: {"forced_eos_token_id": 4},
    "sequence_bias": lambda: {"sequence_bias": {(13,): 4.0, (6, 14): -4.0}},
    "prefix": lambda: {"prefix_allowed_tokens_fn": lambda row, ids: list(range(3 + len(ids) % 5, 90))},
    "decay": lambda: {"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": [end(), 95]},
    "renormalize": lambda: {"renormalize_logits": True},
    "stateful": lambda: {"logits_processor": [Stateful()]},
}
WARPERS: dict[str, Options] = {
    "temperature": lambda: {"temperature": 0.7}, "top_k": lambda: {"top_k": 12}, "top_p": lambda: {"top_p": 0.8},
    "min_p": lambda: {"min_p": 0.05}, "typical_p": lambda: {"typical_p": 0.8}, "top_h": lambda: {"top_h": 0.7},
    "epsilon_cutoff": lambda: {"epsilon_cutoff": 0.01}, "eta_cutoff": lambda: {"eta_cutoff": 0.02},
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "frequency_penalty": {"frequency_penalty": 0.9}, "presence_penalty": {"presence_penalty": 1.1}
}  # fmt: skip


@functools.cache
def backbone() -> Backbone:
    return zoo.backbone(num_hidden_layers=2)


@functools.cache
def end(place: int = 4) -> int:
    """A token of the plain greedy answer, as an end or something forbidden."""
    return own({})[place]


def own(options: dict[str, Any], prompt: list[int] = PROMPT) -> list[int]:
    """The greedy answer of transformers."""
    ids = torch.tensor([prompt])
    settings = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": -1, **options}
    found: list[int] = backbone().model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0].tolist()
    return found[len(prompt) :]


def together(kinds: dict[str, Options]) -> dict[str, Any]:
    """All of them, but for the decay, which 5.17 multiplies with the -inf that min_new_tokens gives: NaN."""
    return {name: value for kind, make in kinds.items() if kind != "decay" for name, value in make().items()}


def greedy_cases() -> dict[str, Options]:
    return {"nothing": dict, **PROCESSORS, "all processors": lambda: together(PROCESSORS)}


def drawn_cases() -> dict[str, Options]:
    mine = {name: (lambda given=given: dict(given)) for name, given in OWN.items()}
    every = {**PROCESSORS, **WARPERS, **mine}
    return {"nothing": dict, **every, "all together": lambda: together(every)}


@functools.cache
def expected(kind: str, name: str) -> list[int]:
    if kind == "greedy":
        return own(greedy_cases()[name]())
    return drawn(Generator(backbone()), drawn_cases()[name]())


def drawn(generator: Generator, options: dict[str, Any]) -> list[int]:
    settings = {"do_sample": True, "seed": 3, "max_new_tokens": NEW, "eos_token_id": -1, "top_k": 0, **options}
    tokens: list[int] = generator.generate(PROMPT, **settings).tokens
    return tokens


@functools.cache
def made(name: str) -> Any:
    """What `Generator` takes as drafter."""
    torch.manual_seed(3)
    if name in METHODS:
        return METHODS[name].build(backbone())
    if name == "draft model":
        return zoo.backbone(num_hidden_layers=1, seed=4)
    if name == "hybrid of a head":
        return Hybrid("suffix", METHODS["eagle3"].build(backbone()))
    return name


NAMES = [MORE.get(name, name) for name in drafters._NAMES]
DRAFTERS = [*METHODS, *NAMES, "hybrid:ngram", "draft model", "hybrid of a head"]


def generator(drafter: str, shape: str) -> Generator:
    return Generator(backbone(), made(drafter), tree=SHAPES[shape])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_no_option_is_wrong_with_any_drafter_in_any_tree(drafter: str, shape: str) -> None:
    if (drafter in CHAINS and shape != "chain") or (drafter in NOT_STATIC and shape == "static"):
        with pytest.raises(drafters.UserError, match="drafts chains"):
            generator(drafter, shape)
        return
    tried = generator(drafter, shape)
    for name, make in greedy_cases().items():
        settings = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": -1, **make()}
        assert tried.generate(PROMPT, **settings).tokens == expected("greedy", name), f"greedy, {name}"
    for name, make in drawn_cases().items():
        assert drawn(tried, make()) == expected("drawn", name), f"drawn, {name}"


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_forced_beginning(drafter: str) -> None:
    """Which transformers forces behind a single token only."""
    options = {"forced_bos_token_id": 9, "max_new_tokens": NEW, "eos_token_id": -1}
    output = generator(drafter, "chain").generate([5], do_sample=False, **options)
    assert output.tokens == own(options, [5])
    assert output.tokens[0] == 9


def test_own_penalties_are_a_processor_before_the_warpers() -> None:
    for penalties in (*OWN.values(), {"frequency_penalty": 0.9, "presence_penalty": 1.1}):
        values = [penalties.get(f"{name}_penalty", 0.0) for name in ("frequency", "presence")]
        theirs = own({"logits_processor": [CountPenalty(len(PROMPT), *values)]})
        for drafter in METHODS:
            settings = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": -1, **penalties}
            assert generator(drafter, "dynamic").generate(PROMPT, **settings).tokens == theirs


def test_the_options_matter_and_drafts_are_accepted() -> None:
    """Cases that change nothing, or drafters that are never right, would prove nothing."""
    same = [name for name in greedy_cases() if expected("greedy", name) == expected("greedy", "nothing")]
    assert set(same) <= {"nothing", "renormalize"}
    same = [name for name in drawn_cases() if expected("drawn", name) == expected("drawn", "nothing")]
    assert len(same) <= 10, same  # some warpers happen to leave this draw as it is
    assert len(expected("greedy", "all processors")) >= 7
    assert len(expected("drawn", "all together")) >= 7
    accepted = generator("int8", "chain").generate(PROMPT, do_sample=False, max_new_tokens=NEW, eos_token_id=-1).stats
    assert sum(accepted.accepted) > 0
