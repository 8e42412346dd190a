"""Heads to other tools' formats and back: the same logits, or a refusal that says why."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from headstart.errors import UserError
from headstart.heads.backbone import Backbone
from headstart.heads.base import DraftHead
from headstart.heads.exchange import FORMATS, export_head
from headstart.heads.format import load_head
from headstart.heads.methods import METHODS
from headstart.heads.vocab import DraftVocab

SMALL = DraftVocab(range(5, 45), zoo.VOCAB)
IDS = torch.randint(3, zoo.VOCAB, (1, 9), generator=torch.Generator().manual_seed(0))
USUAL = (2, 4, 5)  # of eight layers

EXACT, REFUSED = True, False
# method, fields, family, small vocabulary -> the formats that can say it
CASES: list[tuple[str, dict[str, Any], str, bool, set[str]]] = [
    ("eagle3", {}, "llama", True, {"eagle", "specforge", "sglang", "modelopt", "vllm", "speculators"}),
    ("eagle3", {}, "llama", False, {"eagle", "specforge", "sglang", "modelopt", "vllm", "speculators"}),
    ("eagle3", {"taps": (1, 3, 8)}, "llama", True, {"specforge", "sglang", "modelopt", "vllm", "speculators"}),
    ("eagle3", {"taps": (0, 3, 8)}, "llama", True, {"vllm", "speculators"}),
    ("eagle3", {"taps": (1, 2, 3, 8)}, "llama", True, {"sglang", "speculators"}),
    ("eagle3", {"taps": (5, 4, 2)}, "llama", True, set()),
    ("eagle3", {"norm_before_fc": True}, "llama", True, {"sglang", "vllm", "speculators"}),
    ("eagle3", {"fc_norm": True}, "llama", True, {"specforge", "sglang", "vllm", "speculators"}),
    ("eagle3", {"norm_before_fc": True, "fc_norm": True}, "llama", True, set()),
    ("eagle3", {"norm_before_residual": True}, "llama", True, {"vllm", "speculators"}),
    ("eagle3", {"norm_output": True}, "llama", True, {"sglang", "vllm", "speculators"}),
    ("eagle3", {"head_layers": 3}, "llama", True, {"vllm", "speculators"}),
    ("eagle3", {"embedding": "own"}, "llama", True, {"eagle", "vllm", "speculators"}),
    ("eagle3", {"width": 24}, "llama", True, {"specforge", "sglang", "vllm"}),
    ("eagle3", {"width": 32 + 16, "head_dim": 12}, "llama", True, {"eagle", "specforge", "sglang", "vllm"}),
    ("eagle3", {"qk_norm": "head"}, "llama", True, {"vllm", "speculators"}),
    ("eagle3", {"qk_norm": "all"}, "llama", True, set()),
    ("eagle3", {"head_dim": 16}, "llama", True, {"specforge", "sglang", "modelopt", "vllm", "speculators"}),
    ("eagle3", {"num_key_value_heads": 1}, "llama", True, set(FORMATS)),
    ("eagle3", {"hidden_act": "gelu_pytorch_tanh"}, "llama", True, {"eagle", "specforge", "speculators"}),
    ("eagle3", {"rms_norm_eps": 0.1}, "llama", True, set(FORMATS)),
    ("eagle3", {"attention_bias": True}, "llama", True, {"vllm", "speculators"}),
    ("eagle3", {"output_bias": True}, "llama", True, {"vllm", "speculators"}),
    ("eagle3", {"mlp_bias": True, "attention_bias": True, "output_bias": True}, "llama", True, {"vllm", "speculators"}),
    ("eagle3", {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}, "llama", True, set(FORMATS)),
    ("eagle3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 77.0}}, "llama", True,
     set(FORMATS)),
    ("eagle3", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 77.0, "low_freq_factor": 1.0,
     "high_freq_factor": 4.0, "original_max_position_embeddings": 32}}, "llama", True, set(FORMATS) - {"eagle"}),
    ("eagle3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "llama", True, set()),
    ("eagle3", {}, "qwen2", True, {"vllm", "speculators"}),
    ("eagle3", {}, "qwen3", True, {"vllm", "speculators"}),
    ("eagle3", {"hidden_act": "silu"}, "gemma", True, {"vllm", "speculators"}),
    ("eagle3", {"hidden_act": "silu", "head_dim": 8}, "gemma", True, {"eagle", "vllm", "speculators"}),
]  # fmt: skip


@functools.cache
def backbone(family: str = "llama", **changes: Any) -> Backbone:
    return zoo.backbone(family, num_hidden_layers=8, **changes)


def built(method: str, fields: dict[str, Any], family: str = "llama", small: bool = True) -> DraftHead:
    """A head with random weights: none of them zero or one, so that a part left out is seen."""
    torch.manual_seed(0)
    head = METHODS[method].build(backbone(family), vocab=SMALL if small else None, **fields)
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return head


@torch.no_grad()
def proposed(head: DraftHead) -> Tensor:
    """Logits (Vd) of the anchor and of three steps, over all tokens: -inf where none can be proposed."""
    features = head.backbone.forward(IDS, taps=head.taps)
    state = head.start()
    steps = [head.extend(state, features[:, :5], IDS[:, 1:6])]
    for depth in range(min(3, (head.max_depth or 4) - 1)):
        parent = torch.tensor([[depth - 1]])
        steps.append(head.step(state, IDS[:, 6 + depth : 7 + depth], parent))
    logits = torch.cat([step.logits[0, :1] for step in steps])
    found = torch.full((len(logits), head.config.vocab_size), -torch.inf)
    found[:, head.vocab.ids] = logits
    return found


def pairs() -> Iterator[Any]:
    for number, (method, fields, family, small, able) in enumerate(CASES):
        for to in FORMATS:
            if method in FORMATS[to]:
                yield pytest.param(method, fields, family, small, to, to in able, id=f"{number}-{method}-{family}-{to}")


@pytest.mark.parametrize(("method", "fields", "family", "small", "to", "able"), list(pairs()))
def test_the_way_out_and_back_is_exact_or_refused(
    method: str, fields: dict[str, Any], family: str, small: bool, to: str, able: bool, tmp_path: Path
) -> None:
    head = built(method, fields, family, small)
    if not able:
        with pytest.raises(UserError, match="cannot be written|scales its embedding"):
            export_head(head, to, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        return
    found = load_head(export_head(head, to, tmp_path / "out"), head.backbone)
    assert found.taps == head.taps
    assert torch.equal(found.vocab.ids, head.vocab.ids)
    torch.testing.assert_close(proposed(found), proposed(head), atol=1e-6, rtol=1e-6)
