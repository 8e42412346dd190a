"""Plain batched decoding against transformers' generate and against single rows."""

from __future__ import annotations

import pytest
import torch
from transformers import TopPLogitsWarper

import zoo
from headstart.errors import UserError
from headstart.inference import nucleus
from headstart.inference.generator import Generator
from headstart.inference.nucleus import Nucleus
from headstart.inference.plain import decode_group

PROMPTS = [[5, 6, 7], list(range(10, 31)), [40, 41, 42, 43, 44, 45, 46], [9]]


def alone(backbone, prompt: list[int], count: int) -> list[int]:
    made = backbone.model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
    return made[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", list(zoo.FAMILIES))
def test_greedy_rows_equal_generate(family: str) -> None:
    backbone = zoo.backbone(family)
    found = decode_group(backbone, PROMPTS, max_new_tokens=24)
    assert found == [alone(backbone, prompt, 24) for prompt in PROMPTS]


def test_rows_end_at_their_own_end_token_and_limit() -> None:
    backbone = zoo.backbone()
    free = decode_group(backbone, PROMPTS, max_new_tokens=24, eos=frozenset())
    stop = free[1][5]
    found = decode_group(backbone, PROMPTS, max_new_tokens=[3, 24, 24, 1], eos=frozenset({stop}))
    for row, (full, limit) in enumerate(zip(free, [3, 24, 24, 1], strict=True)):
        end = full.index(stop) + 1 if stop in full[:limit] else limit
        assert found[row] == full[:end]


def test_sampled_rows_do_not_depend_on_their_neighbours() -> None:
    backbone = zoo.backbone()
    options = {"max_new_tokens": 12, "temperature": 0.9, "top_p": 0.8, "top_k": 20, "seed": 7}
    together = decode_group(backbone, PROMPTS, **options)
    for row, prompt in enumerate(PROMPTS):
        assert decode_group(backbone, [prompt], samples=[row], **options) == [together[row]]
    assert decode_group(backbone, [PROMPTS[0]], samples=[9], **options) != [together[0]]


def test_long_prompts_are_prefilled_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = zoo.backbone()
    expected = decode_group(backbone, PROMPTS, max_new_tokens=8)
    monkeypatch.setattr("headstart.inference.plain.PREFILL", 20)  # five positions a row at a time
    assert decode_group(backbone, PROMPTS, max_new_tokens=8) == expected


def test_repetition_penalty_equals_generate() -> None:
    backbone = zoo.backbone()
    found = decode_group(backbone, PROMPTS, max_new_tokens=16, repetition_penalty=1.5)
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        expected = backbone.model.generate(
            torch.tensor([prompt]), max_new_tokens=16, do_sample=False, repetition_penalty=1.5
        )
        assert tokens == expected[0, len(prompt) :].tolist()


def test_prompts_that_do_not_fit_are_named() -> None:
    backbone = zoo.backbone()
    with pytest.raises(UserError, match="prompt 1 is empty"):
        decode_group(backbone, [[4], []], max_new_tokens=1)
    with pytest.raises(UserError, match="prompt 0 has 256 tokens"):
        decode_group(backbone, [[4] * 256], max_new_tokens=1)
    assert len(decode_group(backbone, [[4] * 254], max_new_tokens=9, eos=frozenset())[0]) == 2


@pytest.mark.parametrize("looked_at", [1024, 7])
def test_the_nucleus_is_that_of_transformers(looked_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nucleus, "LIKELIEST", looked_at)
    for trial in range(60):
        chance = torch.Generator().manual_seed(trial)
        scores = torch.randn(1, 300, generator=chance) * [0.1, 2.0, 8.0][trial % 3]
        if trial % 4 == 0:
            scores = scores.masked_fill(scores < scores.topk(20).values.min(), -torch.inf)  # top_k before it
        for top_p in (0.05, 0.5, 0.9, 0.999):
            found, expected = Nucleus(top_p)(None, scores), TopPLogitsWarper(top_p)(None, scores)
            assert torch.equal(found, expected), (trial, top_p)


def test_the_law_is_that_of_generate_options() -> None:
    """Warpers by hand are those that the options of `generate` ask for."""
    backbone = zoo.backbone()
    options = {"max_new_tokens": 12, "temperature": 1.3, "top_p": 0.7, "top_k": 30, "repetition_penalty": 1.2}
    rows = decode_group(backbone, PROMPTS, samples=[0] * len(PROMPTS), seed=4, **options)
    assert rows == [Generator(backbone).generate(prompt, seed=4, **options).tokens for prompt in PROMPTS]


def test_a_row_that_overflows_is_empty_and_hurts_no_other() -> None:
    backbone = zoo.backbone()
    expected = decode_group(backbone, PROMPTS, max_new_tokens=8, eos=frozenset())
    with torch.no_grad():
        backbone.model.get_input_embeddings().weight[46] = torch.nan  # a token of the third prompt alone
    assert not any(46 in tokens for tokens in expected)
    with pytest.warns(UserWarning, match="row 2, prefill: the scores hold NaN"):
        found = decode_group(backbone, PROMPTS, max_new_tokens=8, eos=frozenset())
    assert found == [*expected[:2], [], expected[3]]
    with pytest.raises(UserError, match="the scores hold NaN"):
        decode_group(backbone, [PROMPTS[2]], max_new_tokens=8)


def test_a_row_that_is_given_up_ends_at_that_token() -> None:
    backbone, seen = zoo.backbone(), []

    def give_up(place: int, tokens: list[int]) -> bool:
        seen.append((place, tokens))
        return place == 1 and len(tokens) == 3

    found = decode_group(backbone, PROMPTS, max_new_tokens=5, eos=frozenset(), give_up=give_up)
    free = decode_group(backbone, PROMPTS, max_new_tokens=5, eos=frozenset())
    assert found == [free[0], free[1][:3], *free[2:]]
    asked = [(place, row[:end]) for place, row in enumerate(found) for end in range(1, len(row) + 1)]
    assert sorted(seen) == asked
