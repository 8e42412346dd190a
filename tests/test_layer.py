"""The decoder layer of a head follows the backbone's family: norms, biases, widths, and which part of a head turns."""

from __future__ import annotations

from typing import Any

import families
import pytest
import torch

from headstart.heads.eagle1 import Eagle1
from headstart.heads.eagle3 import Eagle3
from headstart.heads.rotary import Rotary, rotated

FOLLOWS: dict[str, dict[str, Any]] = {
    "llama": {"qk_norm": "none", "attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "head_dim": 8},
    "llama-biased": {"attention_bias": True, "output_bias": True, "mlp_bias": True},
    "llama-wide-heads": {"head_dim": 20},
    "qwen2": {"qk_norm": "none", "attention_bias": True, "output_bias": False},
    "qwen3": {"qk_norm": "head", "attention_bias": False},
    "gemma3": {"qk_norm": "head", "hidden_act": "gelu_pytorch_tanh", "head_dim": 16},
    "olmo2": {"qk_norm": "all"},
    "stablelm": {"attention_bias": True, "output_bias": False},
}
PARTIAL = ["phi", "gpt-neox", "stablelm", "nemotron", "glm"]


@pytest.mark.parametrize("name", FOLLOWS)
def test_the_layer_follows_the_family(name: str) -> None:
    head = Eagle1.build(families.backbone(name))
    assert {field: getattr(head.config, field) for field in FOLLOWS[name]} == FOLLOWS[name]
    attention, kind = head.stack[0].self_attn, head.config.qk_norm
    heads, groups, width = head.config.num_attention_heads, head.config.num_key_value_heads, head.config.head_dim
    if kind == "none":
        assert not hasattr(attention, "q_norm")
    else:
        expected = (width, width) if kind == "head" else (heads * width, groups * width)
        assert (attention.q_norm.weight.numel(), attention.k_norm.weight.numel()) == expected


@pytest.mark.parametrize("name", PARTIAL)
def test_the_part_that_turns_is_the_backbones(name: str) -> None:
    """B136 of its own kind: a head that turned all of it would place tokens otherwise than its config says."""
    backbone = families.backbone(name)
    head = Eagle3.build(backbone)
    rotary = backbone.model.get_decoder().rotary_emb
    expected, _ = rotary(torch.zeros(()), torch.arange(50)[None])
    cos, sin = head.rotary.table(50, torch.zeros(()))
    torch.testing.assert_close(cos[:50, 0, : cos.shape[-1] // 2], expected[0, :, : cos.shape[-1] // 2])
    assert cos.shape[-1] == head.config.head_dim // 2
    turned = rotated(torch.ones(50, 1, head.config.head_dim), cos[:50], sin[:50])
    assert (turned[1:, :, : cos.shape[-1]] != 1).any(-1).all()
    assert (turned[..., cos.shape[-1] :] == 1).all()


@pytest.mark.parametrize("kind", ["default", "linear", "dynamic", "yarn", "llama3"])
def test_a_part_turns_in_every_kind_of_scaling(kind: str) -> None:
    more = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64, "factor": 4.0}
    half = Rotary({"rope_type": kind, "rope_theta": 1e4, "partial_rotary_factor": 0.5, **more}, 16, 256)
    whole = Rotary({"rope_type": kind, "rope_theta": 1e4, **more}, 8, 256)
    for one, other in zip(half.table(100, torch.zeros(())), whole.table(100, torch.zeros(())), strict=True):
        torch.testing.assert_close(one, other)
