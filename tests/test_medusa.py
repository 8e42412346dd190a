"""Medusa heads: where they start, what they learn from, what they share."""

from __future__ import annotations

import copy

import families
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zoo
from headstart.errors import UserError
from headstart.heads.backbone import Backbone
from headstart.heads.medusa import Medusa
from headstart.heads.vocab import DraftVocab

IDS = torch.randint(3, zoo.VOCAB, (2, 10), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", zoo.FAMILIES)
@pytest.mark.parametrize("projection", ["shared", "own"])
def test_starts_as_the_backbones_prediction(family: str, projection: str) -> None:
    backbone = zoo.backbone(family)
    head = Medusa.build(backbone, num_heads=3, num_blocks=2, projection=projection)
    with torch.no_grad():
        features = backbone.forward(IDS)
        expected = backbone.logits(features.last)[:, -1:]
    state = head.start(2)
    found = [head.extend(state, features, IDS).logits]
    found += [head.step(state, IDS[:, :1], torch.full((2, 1), -1)).logits for _ in range(2)]
    for logits in found:
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_equals_the_formula() -> None:
    """y = x + SiLU(W x + b), block after block, on the hidden state behind the final norm."""
    backbone = zoo.backbone()
    head = Medusa.build(backbone, num_heads=2, num_blocks=3)
    with torch.no_grad():
        for weight in head.parameters():
            weight.normal_(std=0.3)
        features = backbone.forward(IDS)
        hidden = features.last[1, 4]
        for block in range(3):
            linear = head.get_submodule(f"heads.1.{block}.linear")
            assert isinstance(linear, nn.Linear)
            x = linear.weight @ hidden + linear.bias
            hidden = hidden + x * torch.sigmoid(x)
        first, second = head.unroll(features, IDS, [torch.tensor([14]), torch.tensor([14])])
        torch.testing.assert_close(second[0], hidden, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(head.project(second, 1)[0], backbone.logits(hidden), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(first, second)


def test_blocks_are_distinct() -> None:
    head = Medusa.build(zoo.backbone(), num_heads=3, num_blocks=4)
    assert len({weight.data_ptr() for weight in head.parameters()}) == 3 * 4 * 2
    assert sum(weight.numel() for weight in head.parameters()) == 3 * 4 * (32 * 32 + 32)


@pytest.mark.parametrize("projection", ["shared", "own"])
def test_each_head_learns_its_own_offset(projection: str) -> None:
    """With tokens that are all different, head d after training is right about token t + 2 + d and no other."""
    backbone = zoo.backbone()
    ids = torch.arange(3, 27)[None]
    with torch.no_grad():
        features = backbone.forward(ids)
    head = Medusa.build(backbone, num_heads=3, projection=projection)
    anchors = [torch.arange(22 - depth) for depth in range(3)]
    optimizer = torch.optim.Adam(head.parameters(), lr=0.02)
    for _ in range(150):
        logits = [head.project(h, d) for d, h in enumerate(head.unroll(features, ids, anchors))]
        labels = [ids[0, at + 2 + depth] for depth, at in enumerate(anchors)]
        loss = sum(F.cross_entropy(one, label) for one, label in zip(logits, labels, strict=True))
        assert isinstance(loss, torch.Tensor)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    state = head.start()
    for depth in range(3):
        step = (
            head.step(state, ids[:, :1], torch.tensor([[depth - 2]]))
            if depth
            else head.extend(state, features[:, :11], ids)
        )
        assert step.logits.argmax().item() == ids[0, 10 + 2 + depth].item()


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_shared_projection_of_a_smaller_vocabulary(family: str) -> None:
    backbone = zoo.backbone(family)
    kept = [5, 8, 13, 21, 34]
    head = Medusa.build(backbone, vocab=DraftVocab(kept, zoo.VOCAB))
    hidden = torch.randn(3, 32)
    torch.testing.assert_close(head.project(hidden, 0), backbone.logits(hidden)[:, kept], atol=1e-5, rtol=1e-5)
    assert not any("projection" in name for name in head.state_dict())


def test_bias_of_the_shared_projection_counts() -> None:
    model = zoo.model()
    model.lm_head = nn.Linear(32, zoo.VOCAB, bias=True)
    backbone = Backbone(model, name="biased")
    for vocab in (None, DraftVocab([5, 8, 13], zoo.VOCAB)):
        head = Medusa.build(backbone, vocab=vocab)
        hidden = torch.randn(3, 32)
        torch.testing.assert_close(head.project(hidden, 0), head.vocab.rows(model.lm_head(hidden).T).T)


@pytest.mark.parametrize("applied", [True, False])
def test_a_soft_cap_counts_where_the_model_applies_it(applied: bool) -> None:
    model = copy.deepcopy(families.backbone("gemma2" if applied else "llama").model)
    with torch.no_grad():
        model.lm_head.weight.copy_(torch.randn(model.lm_head.weight.shape))
    model.config.final_logit_softcapping = 0.5
    head = Medusa.build(Backbone(model, name="capped"), vocab=DraftVocab([5, 8, 13], zoo.VOCAB))
    hidden = torch.randn(3, 32)
    expected = head.vocab.rows(model.lm_head(hidden).T).T
    expected = (expected * 2).tanh() / 2 if applied else expected
    torch.testing.assert_close(head.project(hidden, 0), expected)


def test_shared_projection_is_read_once_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = zoo.backbone()
    head = Medusa.build(backbone, num_heads=4)
    calls = []
    finish = backbone.finish
    monkeypatch.setattr(backbone, "finish", lambda logits: calls.append(1) or finish(logits))
    state = head.start()
    with torch.no_grad():
        head.extend(state, backbone.forward(IDS[:1]), IDS[:1])
    for depth in range(1, 4):
        head.step(state, IDS[:1, :2], torch.full((1, 2), 2 * depth - 4))
    assert len(calls) == 1


def test_no_deeper_than_its_heads() -> None:
    backbone = zoo.backbone()
    head = Medusa.build(backbone, num_heads=2)
    assert head.max_depth == 2
    state = head.start(2)
    with torch.no_grad():
        head.extend(state, backbone.forward(IDS), IDS)
    head.step(state, IDS[:, :1], torch.full((2, 1), -1))
    with pytest.raises(AssertionError, match="depth 2 of 2"):
        head.step(state, IDS[:, :1], torch.zeros(2, 1, dtype=torch.long))


def test_wrong_fields_are_refused() -> None:
    with pytest.raises(UserError, match="num_heads is 0"):
        Medusa.build(zoo.backbone(), num_heads=0)
    with pytest.raises(UserError, match="shared, own"):
        Medusa.build(zoo.backbone(), projection="mine")
