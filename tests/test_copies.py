"""Copies of a backbone that draft: its first layers, and int8; the backbone itself stays as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zoo
from headstart.errors import UserError
from headstart.heads.backbone import Backbone
from headstart.inference.copies import quantized, shallow
from headstart.inference.generator import Generator

IDS = torch.tensor([[5, 17, 40, 8, 60, 33, 21, 9, 11, 4]])


def gemma3() -> Backbone:
    import transformers

    config = transformers.Gemma3TextConfig(
        vocab_size=zoo.VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, sliding_window=8,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        initializer_range=0.3, eos_token_id=0, pad_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return Backbone(transformers.Gemma3ForCausalLM(config).eval(), zoo.tokenizer(), name="tiny-gemma3")


def backbone(family: str) -> Backbone:
    return gemma3() if family == "gemma3" else zoo.backbone(family)


@pytest.mark.parametrize("family", [*zoo.FAMILIES, "gemma3"])
@torch.inference_mode()
def test_the_first_layers_give_what_they_give_in_the_whole(family: str) -> None:
    whole = backbone(family)
    fingerprint, layers = whole.fingerprint(), whole.num_layers
    before = whole.forward(IDS, taps=(2,))
    for depth in (1, 2, 3):
        short = shallow(whole, depth)
        hidden = whole.forward(IDS, taps=(depth,)).taps
        assert (short.num_layers, len(getattr(short.config, "layer_types", None) or range(depth))) == (depth, depth)
        torch.testing.assert_close(short.forward(IDS).last, whole.norm(hidden), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(short.logits(short.forward(IDS).last), whole.logits(whole.norm(hidden)))
        assert {id(w) for w in short.model.parameters()} <= {id(w) for w in whole.model.parameters()}, "no weight twice"
        cache = short.new_cache()
        short.forward(IDS, cache=cache)
        assert len(cache.keys) == depth
    after = whole.forward(IDS, taps=(2,))
    assert torch.equal(before.last, after.last)
    assert (whole.num_layers, whole.fingerprint()) == (layers, fingerprint)
    assert whole.model.config.num_hidden_layers == layers


@pytest.mark.parametrize("layers", [0, 4, 9])
def test_other_numbers_of_layers_are_refused(layers: int) -> None:
    with pytest.raises(UserError, match="has 4 layers; choose exit:1 to exit:3"):
        Generator(zoo.backbone(), f"exit:{layers}")
    with pytest.raises(UserError, match="expected the number of layers"):
        Generator(zoo.backbone(), "exit:two")


@torch.inference_mode()
def test_int8_is_right_up_to_rounding_and_leaves_the_backbone_alone() -> None:
    """Each product of the copy is off by no more than half a step of weights (by row) and activations explains."""
    whole = zoo.backbone()
    for layer in whole.model.model.layers:
        layer.mlp.up_proj.weight[0] *= 100  # a large row must not cost the others their precision
    fingerprint, copied = whole.fingerprint(), quantized(whole)
    assert whole.fingerprint() == fingerprint
    twins = dict(copied.model.named_modules())
    linear = {name: m for name, m in whole.model.model.named_modules() if isinstance(m, torch.nn.Linear)}
    assert len(linear) == 4 * 7
    for name, module in linear.items():
        weight, x = module.weight, torch.randn(6, module.in_features)
        rows = weight.abs().amax(1) / 127  # (out,) a step of each row
        step = (x.max().clamp(min=0) - x.min().clamp(max=0)) / 127  # of activations, which keep 7 bits on some machines
        by_weight = x.abs().sum(1)[:, None] * rows / 2
        by_input = weight.abs().sum(1) * step / 2
        most = by_weight + by_input + module.in_features * rows * step / 4
        assert bool(((twins[f"model.{name}"](x) - module(x)).abs() <= most).all()), name
    assert type(copied.model.get_output_embeddings()) is torch.nn.Linear, "the projection is left as it is"
    assert copied.name == "tiny-llama in int8"
    assert quantized(Backbone(zoo.model().bfloat16())).dtype == torch.float32


class Elsewhere:
    name, device = "far", torch.device("meta")


def test_int8_is_for_the_cpu() -> None:
    with pytest.raises(UserError, match="int8: works on the CPU; far is on meta"):
        quantized(Elsewhere())  # type: ignore[arg-type]


@pytest.mark.parametrize("drafter", ["exit:3", "int8"])
@pytest.mark.parametrize("tree", ["chain:3"])
def test_answers_are_those_of_plain_decoding(drafter: str, tree: str) -> None:
    whole = zoo.backbone()
    drafted = Generator(whole, drafter, tree=tree)
    options: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": -1}
    for extra in ({}, {"temperature": 1.0, "seed": 4}):
        wanted = Generator(whole).generate(IDS, **options, **extra)
        found = drafted.generate(IDS, **options, **extra)
        assert found.tokens == wanted.tokens
        if drafter == "int8" and not extra:  # sampled, even the backbone itself would hardly guess what is drawn
            rate = sum(found.stats.accepted) / sum(found.stats.offered)
            assert rate > 10 / zoo.VOCAB, "a copy has to do much better than chance"
