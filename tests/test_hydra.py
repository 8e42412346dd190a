"""Hydra heads: the formula, where they start, and that a tree keeps its paths apart."""

from __future__ import annotations

from typing import Any

import plain_eagle
import pytest
import torch
import torch.nn.functional as F

import zoo
from headstart.errors import UserError
from headstart.heads.backbone import Features
from headstart.heads.hydra import Hydra
from headstart.heads.vocab import DraftVocab

IDS = torch.randint(3, zoo.VOCAB, (1, 14), generator=torch.Generator().manual_seed(5))


def built(family: str = "llama", *, vocab: DraftVocab | None = None, **fields: Any) -> Hydra:
    torch.manual_seed(3)
    head = Hydra.build(zoo.backbone(family), vocab=vocab, **fields)
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return head


@torch.no_grad()
def seen(head: Hydra) -> Features:
    return head.backbone.forward(IDS)


def by_the_book(head: Hydra, features: Features, anchor: int, path: list[int]) -> torch.Tensor:
    """Logits behind a path of guesses from an anchor: everything that the paper's formulas say, and nothing else."""
    config, weights = head.config, {name: one.detach() for name, one in head.state_dict().items()}
    state = features.last[0, anchor]
    if config.head_arch == "prefix-mlp":
        layer = plain_eagle.Weights(weights, "prefix.", config)
        state = plain_eagle.rms(
            layer.upper(features.last[0, : anchor + 1])[-1], weights["norm.weight"], config.rms_norm_eps
        )
    tokens = torch.tensor([int(IDS[0, anchor + 1]), *path])
    x = torch.cat((state, *head.backbone.embed(tokens).detach()))
    depth = len(path)

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return weights[f"heads.{depth}.{name}.weight"] @ x + weights[f"heads.{depth}.{name}.bias"]

    x = linear("0.res_connection", x) + F.silu(linear("0.linear", x))
    for block in range(1, config.num_blocks):
        x = x + F.silu(linear(f"{block}.linear", x))
    if config.projection == "own":
        bias = weights.get(f"projections.{depth}.bias", torch.zeros(()))
        return weights[f"projections.{depth}.weight"] @ x + bias
    return head.backbone.logits(x).detach()


@pytest.mark.parametrize("family", ["llama", "gemma", "qwen3"])
@pytest.mark.parametrize(
    "fields",
    [
        {"num_heads": 3},
        {"num_heads": 3, "num_blocks": 3, "projection": "own", "projection_bias": True},
        {"num_heads": 3, "head_arch": "prefix-mlp"},
    ],
    ids=str,
)
def test_a_tree_equals_the_formula_path_by_path(family: str, fields: dict[str, Any]) -> None:
    head = built(family, **fields)
    features, state, anchor = seen(head), head.start(), 6
    found = head.extend(state, features[:, : anchor + 1], IDS[:, 1 : anchor + 2])
    torch.testing.assert_close(found.logits[0, 0], by_the_book(head, features, anchor, []), atol=1e-5, rtol=1e-5)
    first = head.step(state, torch.tensor([[5, 9, 7]]), torch.tensor([[-1, -1, -1]]))
    second = head.step(state, torch.tensor([[11, 12, 11]]), torch.tensor([[2, 0, 0]]))
    expected = {(0, 0): [5], (0, 1): [9], (0, 2): [7], (1, 0): [7, 11], (1, 1): [5, 12], (1, 2): [5, 11]}
    for (depth, node), path in expected.items():
        logits = (first, second)[depth].logits[0, node]
        torch.testing.assert_close(logits, by_the_book(head, features, anchor, path), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("projection", ["shared", "own"])
def test_starts_as_the_backbones_prediction(projection: str) -> None:
    head = Hydra.build(zoo.backbone("gemma"), num_blocks=2, projection=projection)
    features = seen(head)
    expected = head.backbone.logits(features.last)[:, -1:].detach()
    step = head.extend(head.start(), features, IDS)
    torch.testing.assert_close(step.logits, expected, atol=1e-5, rtol=1e-5)


def test_heads_have_their_own_width_and_no_block_is_shared() -> None:
    head = built(num_heads=3, num_blocks=3)
    widths = [head.get_parameter(f"heads.{d}.0.linear.weight").shape for d in range(3)]
    assert [tuple(one) for one in widths] == [(32, 64), (32, 96), (32, 128)]
    assert len({weight.data_ptr() for weight in head.parameters()}) == 3 * (4 + 2 * 2)


def test_no_deeper_than_its_heads_and_wrong_fields_are_refused() -> None:
    head = built(num_heads=2)
    state = head.start()
    head.extend(state, seen(head), IDS)
    head.step(state, IDS[:, :1], torch.tensor([[-1]]))
    with pytest.raises(AssertionError, match="depth 2 of 2"):
        head.step(state, IDS[:, :1], torch.tensor([[0]]))
    with pytest.raises(UserError, match="num_blocks 0"):
        Hydra.build(zoo.backbone(), num_blocks=0)
    with pytest.raises(UserError, match="projection_bias is true"):
        Hydra.build(zoo.backbone(), projection_bias=True)
    with pytest.raises(UserError, match="prefix-mlp"):
        Hydra.build(zoo.backbone(), head_arch="eagle-attn")
