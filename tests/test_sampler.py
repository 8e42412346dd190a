"""The sampler: processors in transformers' order, noise keyed by position, options read as generate reads them."""

from __future__ import annotations

import math

import pytest
import torch

import zoo
from headstart.errors import UserError
from headstart.inference.sampler import Sampler, gumbel_noise


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
        ({"num_beams": 2}, "beam"),
        ({"guidance_scale": 2.0}, "guidance_scale"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences"),
        ({"stop_strings": ["red"]}, "stop_strings"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
        ({"no_such_option": 1}, "no_such_option"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_length": 1}, "the prompt alone has 1"),
        ({"temperature": -1.0}, "0 .greedy. or above"),
        ({"top_k": -1}, "top_k"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(options: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Sampler.from_options(zoo.backbone(), [5], **options)
