"""The sampler: processors in transformers' order, noise keyed by position, options read as generate reads them."""

from __future__ import annotations

import math

import pytest
import torch
import transformers

import zoo
from headstart.errors import UserError
from headstart.inference.sampler import NoToken, Sampler, gumbel_noise, largest


def test_noise_depends_on_seed_sample_and_position_alone() -> None:
    first = gumbel_noise(3, 0, 17, 50)
    assert torch.equal(first, gumbel_noise(3, 0, 17, 50))
    for other in (gumbel_noise(4, 0, 17, 50), gumbel_noise(3, 1, 17, 50), gumbel_noise(3, 0, 18, 50)):
        assert not torch.equal(first, other)


def test_seeds_of_64_bits_are_told_apart() -> None:
    assert not torch.equal(gumbel_noise(-1, 0, 17, 50), gumbel_noise(-2, 0, 17, 50))


def test_noise_of_neighbouring_positions_does_not_overlap() -> None:
    drawn = torch.cat([gumbel_noise(1, 0, position, 1000) for position in range(20)])
    assert drawn.unique().numel() == drawn.numel()


def test_noise_is_standard_gumbel() -> None:
    drawn = torch.cat([gumbel_noise(0, sample, 5, 5000) for sample in range(20)])
    assert abs(drawn.mean().item() - 0.5772) < 0.02
    assert abs(drawn.var().item() - math.pi**2 / 6) < 0.05


def test_draws_have_the_law_of_the_processed_logits() -> None:
    sampler = Sampler.from_options(zoo.backbone(), [5], temperature=0.7, top_k=4, seed=1, max_new_tokens=4)
    logits = torch.full((zoo.VOCAB,), -5.0)
    logits[:6] = torch.tensor([1.0, 0.5, 0.2, 0.0, -0.2, -1.0])
    p = torch.softmax(logits[:4] / 0.7, -1)
    counts = torch.zeros(zoo.VOCAB)
    for position in range(4000):
        counts[sampler.token(logits, [5] * (position + 1))] += 1
    assert counts[4:].sum() == 0
    chi_square = ((counts[:4] - 4000 * p) ** 2 / (4000 * p)).sum().item()
    assert chi_square < 16.3  # 3 degrees of freedom, 0.1%


def test_processors_see_the_true_prefix_once() -> None:
    seen: list[list[int]] = []

    def spy(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(ids[0].tolist())
        return scores

    sampler = Sampler.from_options(zoo.backbone(), [5, 6], logits_processor=[spy], max_new_tokens=4)
    assert not sampler.plain
    sampler.token(torch.randn(zoo.VOCAB), [5, 6, 7])
    assert seen == [[5, 6, 7]]


def test_options_are_read_as_generate_reads_them() -> None:
    backbone = zoo.backbone()
    assert Sampler.from_options(backbone, [5]).max_new_tokens == 20
    assert Sampler.from_options(backbone, [5], max_length=9).max_new_tokens == 8
    assert Sampler.from_options(backbone, [5], max_length=9, max_new_tokens=3).max_new_tokens == 3
    assert Sampler.from_options(backbone, [5]).plain
    assert Sampler.from_options(backbone, [5], temperature=0, top_p=0.5).plain
    assert not Sampler.from_options(backbone, [5], top_p=0.5).greedy
    assert not Sampler.from_options(backbone, [5], repetition_penalty=1.2).plain
    assert Sampler.from_options(backbone, [5], eos_token_id=[4, 7]).eos == {4, 7}
    backbone.model.generation_config.do_sample = True
    backbone.model.generation_config.max_length = 11
    assert not Sampler.from_options(backbone, [5]).greedy
    assert Sampler.from_options(backbone, [5]).max_new_tokens == 10
    assert Sampler.from_options(backbone, [5], do_sample=False).greedy


def test_an_unseeded_draw_follows_torchs_generator() -> None:
    backbone = zoo.backbone()
    torch.manual_seed(3)
    first = Sampler.from_options(backbone, [5], temperature=1.0).seed
    assert Sampler.from_options(backbone, [5], temperature=1.0).seed != first
    torch.manual_seed(3)
    Sampler.from_options(backbone, [5])  # greedy: nothing is drawn
    assert Sampler.from_options(backbone, [5], temperature=1.0).seed == first


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_beams": 2}, "num_beams=2 is not supported"),
        ({"num_beam_groups": 2, "num_beams": 4}, "num_beam"),
        ({"guidance_scale": 2.0}, "guidance_scale"),
        ({"num_return_sequences": 2}, "num_return_sequences"),  # greedy answers would all be the same
        ({"watermarking_config": transformers.WatermarkingConfig()}, "watermarking_config"),
        ({"output_attentions": True}, "output_attentions"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({"dola_layers": "high"}, "dola_layers"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha"),
        ({"constraints": [object()]}, "constraints"),
        ({"force_words_ids": [[3]]}, "force_words_ids"),
        ({"token_healing": True}, "token_healing"),
        ({"assistant_model": object()}, "assistant_model is not supported: the drafter is an argument of Generator"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3"),
        ({"negative_prompt_ids": [3]}, "negative_prompt_ids"),
        ({"inputs_embeds": torch.zeros(1, 1, 32)}, "inputs_embeds"),
        ({"past_key_values": object()}, "past_key_values"),
        ({"synced_gpus": True}, "synced_gpus"),
        ({"generation_config": transformers.GenerationConfig(num_beams=3)}, "num_beams=3"),
        ({"generation_config": {"num_beams": 3}}, "generation_config is a dict"),
        ({"no_such_option": 1}, "no_such_option is not known"),
        ({"max_new_token": 3}, "did you mean max_new_tokens"),
        ({"temprature": 0.3}, "did you mean temperature"),
        ({"frequence_penalty": 0.3}, "did you mean frequency_penalty"),
        ({"logprobs": True}, "did you mean output_logprobs"),
        ({"stop_string": "a"}, "did you mean stop_strings"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_length": 1}, "the prompt alone has 1"),
        ({"temperature": -1.0}, "0 .greedy. or above"),
        ({"top_k": -1}, "top_k"),
        ({"frequency_penalty": math.nan}, "frequency_penalty is nan"),
        ({"presence_penalty": "high"}, "presence_penalty is 'high'"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"logits_processor": 3}, "logits_processor is int"),
        ({"stopping_criteria": lambda ids, scores: False}, "stopping_criteria is function"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_what_is_not_supported_is_refused_by_name(options: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Sampler.from_options(zoo.backbone(), [5], **options)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "guidance_scale": 1.0, "constraints": None},
        {"assistant_model": None, "negative_prompt_ids": None, "synced_gpus": False, "output_attentions": False},
        {"use_cache": True, "return_dict_in_generate": True, "pad_token_id": 2, "bos_token_id": 1, "max_time": None},
    ],
)
def test_options_that_ask_for_nothing_are_taken(options: dict) -> None:
    assert Sampler.from_options(zoo.backbone(), [5], **options).plain


def test_a_generation_config_may_hold_everything() -> None:
    config = transformers.GenerationConfig(
        do_sample=True, temperature=0.7, top_k=5, max_new_tokens=7, eos_token_id=[3, 4], stop_strings=["ab"],
        repetition_penalty=1.1, output_scores=True, num_return_sequences=3, max_time=9.0, frequency_penalty=0.5,
    )  # fmt: skip
    sampler = Sampler.from_options(zoo.backbone(), [5], generation_config=config)
    assert (sampler.greedy, sampler.max_new_tokens, sampler.eos, sampler.returned) == (False, 7, {3, 4}, 3)
    names = [type(processor).__name__ for processor in sampler.processors]
    assert names == [
        "RepetitionPenaltyLogitsProcessor", "CountPenalty", "TemperatureLogitsWarper", "TopKLogitsWarper"
    ]  # fmt: skip
    assert [type(criterion).__name__ for criterion in sampler.criteria] == ["OwnTime", "StopStringCriteria"]
    assert sampler.record is not None
    assert sampler.record.scores == []


@pytest.mark.parametrize(("frequency", "presence"), [(0.5, 0.0), (0.0, 0.7), (1.5, -0.3), (-2.0, 2.0)])
def test_frequency_and_presence_penalties_count_what_was_generated(frequency: float, presence: float) -> None:
    sampler = Sampler.from_options(
        zoo.backbone(), [5, 6, 6], frequency_penalty=frequency, presence_penalty=presence, output_scores=True
    )
    logits = torch.randn(zoo.VOCAB)
    scores = sampler.scored(logits, [5, 6, 6, 7, 8, 7, 6])
    expected = logits.clone()
    for token, count in ((7, 2), (8, 1), (6, 1)):
        expected[token] -= frequency * count + presence
    assert torch.allclose(scores, expected)


def test_no_token_to_choose_is_an_error() -> None:
    for options in ({}, {"repetition_penalty": 1.2}, {"temperature": 1.0}):
        sampler = Sampler.from_options(zoo.backbone(), [5], **options)
        with pytest.raises(NoToken, match="NaN"):
            sampler.token(torch.randn(zoo.VOCAB).scatter(0, torch.tensor([4]), math.nan), [5])
        with pytest.raises(NoToken, match="every token is masked"):
            sampler.token(torch.full((zoo.VOCAB,), -math.inf), [5])


def test_the_best_token_comes_with_its_value() -> None:
    rows = torch.tensor([[0.0, 2.0, 2.0], [-math.inf, -3.0, -math.inf], [-math.inf] * 3], dtype=torch.bfloat16)
    assert largest(rows) == [(1, 2.0), (1, -3.0), (0, -math.inf)]
    assert largest(torch.zeros(1, 300_000).scatter(1, torch.tensor([[299_999]]), 1.0)) == [(299_999, 1.0)]
