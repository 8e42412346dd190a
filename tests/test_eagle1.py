"""EAGLE-1: against a plain causal transformer, what its predictions are, and what files hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plain_eagle
import pytest
import torch
from safetensors.torch import load_file

import zoo
from headstart.heads.eagle1 import Eagle1
from headstart.heads.format import load_head, save_head
from headstart.heads.vocab import DraftVocab
from headstart.inference.generator import Generator

IDS = torch.randint(3, zoo.VOCAB, (2, 12), generator=torch.Generator().manual_seed(7))


def built(family: str = "llama", *, vocab: DraftVocab | None = None, **fields: Any) -> Eagle1:
    torch.manual_seed(3)
    head = Eagle1.build(zoo.backbone(family), vocab=vocab, **fields)
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    return head


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma"])
@pytest.mark.parametrize("fields", [{}, {"fc_bias": False, "head_layers": 3}, {"qk_norm": "all"}], ids=str)
def test_equals_a_plain_transformer(family: str, fields: dict[str, Any]) -> None:
    head = built(family, **fields)
    with torch.no_grad():
        features, embedded = head.backbone.forward(IDS), head.backbone.embed(IDS)
    at = [torch.tensor([4, 12 + 6])] * 4
    unrolled = [hidden.detach() for hidden in head.unroll(features, IDS, at)]
    for place, (row, anchor) in enumerate([(0, 4), (1, 6)]):
        expected = plain_eagle.eagle1(head, features.last[row], embedded[row], anchor, 4)
        for depth, one in enumerate(expected):
            torch.testing.assert_close(unrolled[depth][place], one, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_a_right_prediction_gives_the_backbones_logits(family: str) -> None:
    head = built(family)
    assert head.regresses
    with torch.no_grad():
        features = head.backbone.forward(IDS)
        torch.testing.assert_close(
            head.project(features.last, 0), head.backbone.model(IDS).logits, atol=1e-4, rtol=1e-4
        )


def test_starts_as_the_state_it_reads() -> None:
    """The hidden state goes through at first; the embedding comes in little by little."""
    torch.manual_seed(0)
    head = Eagle1.build(zoo.backbone())
    with torch.no_grad():
        features = head.backbone.forward(IDS)
        read, _ = head.read(head.embedded(IDS), head.true_states(features))
    assert (read - features.last).norm() < 0.3 * features.last.norm()


def test_training_on_features_finds_them() -> None:
    """Regression alone: predictions of all depths come close to the true states at t + 1 + d, and to no others."""
    backbone = zoo.backbone()
    ids = torch.arange(3, 27)[None]
    torch.manual_seed(0)
    head = Eagle1.build(backbone)
    with torch.no_grad():
        features = backbone.forward(ids)
    anchors = [torch.arange(22 - depth) for depth in range(3)]
    optimizer = torch.optim.Adam(head.parameters(), lr=0.01)
    for _ in range(150):
        losses = [
            torch.nn.functional.smooth_l1_loss(hidden, features.last[0, at + 1 + depth])
            for depth, (at, hidden) in enumerate(zip(anchors, head.unroll(features, ids, anchors), strict=True))
        ]
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()
    state = head.start()
    step = head.extend(state, features[:, :11], ids[:, 1:12])
    for depth in range(3):
        if depth:
            step = head.step(state, ids[:, 11 + depth, None], torch.tensor([[depth - 2]]))
        assert step.hidden is not None
        gaps = (features.last[0] - step.hidden[0]).norm(dim=-1)
        assert gaps.argmin() == 11 + depth
        assert gaps.min() < 0.4 * gaps.median()


def test_file_holds_what_released_heads_hold(tmp_path: Path) -> None:
    head = built("qwen2", vocab=DraftVocab([4, 7, 50], zoo.VOCAB))
    names = set(load_file(save_head(head, tmp_path / "head") / "model.safetensors"))
    parts = [f"self_attn.{part}_proj" for part in "qkvo"] + [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    expected = {"fc.weight", "fc.bias", "d2t", "t2d", "layers.0.post_attention_layernorm.weight"}
    expected |= {f"layers.0.{part}.weight" for part in parts} | {
        f"layers.0.self_attn.{part}_proj.bias" for part in "qkv"
    }
    assert names == expected
    assert load_head(tmp_path / "head", head.backbone).config == head.config


@pytest.mark.parametrize("tree", ["chain:4", "dynamic:3x3x6"])
def test_generation_is_the_backbones_own(tree: str) -> None:
    """A dynamic tree makes it EAGLE-2."""
    head = built()
    prompt = IDS[0].tolist()
    expected = Generator(head.backbone).generate(prompt, max_new_tokens=16, do_sample=False).tokens
    found = Generator(head.backbone, head, tree=tree).generate(prompt, max_new_tokens=16, do_sample=False)
    assert found.tokens == expected
