"""The MLP speculator: the formula path by path, tied weights, files, and that nobody trains it by mistake."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from headstart.errors import UserError
from headstart.heads.backbone import Features
from headstart.heads.format import load_head, save_head
from headstart.heads.mlp_speculator import MlpSpeculator
from headstart.heads.vocab import DraftVocab
from headstart.inference.generator import Generator

IDS = torch.randint(3, zoo.VOCAB, (1, 10), generator=torch.Generator().manual_seed(5))
SHAPES: list[dict[str, Any]] = [
    {},
    {"num_heads": 4, "inner_size": 24, "scale_input": True},
    {"num_heads": 4, "tie_weights": True},
    {"num_heads": 3, "tie_weights": True, "inner_size": 40, "scale_input": True},
    {"num_heads": 1},
]


def built(*, vocab: DraftVocab | None = None, **fields: Any) -> MlpSpeculator:
    torch.manual_seed(3)
    head = MlpSpeculator.build(zoo.backbone(), vocab=vocab, **fields)
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    return head


def seen(head: MlpSpeculator) -> Features:
    with torch.no_grad():
        return head.backbone.forward(IDS)


def by_the_book(head: MlpSpeculator, features: Features, anchor: int, path: list[int]) -> Tensor:
    """Logits behind a path of guesses from an anchor."""
    weights, config = {name: one.detach() for name, one in head.state_dict().items()}, head.config
    levels, inner = config.num_heads, config.inner_size or 32
    state_weight = 0.5 ** (0.5 / levels)
    emb_weight = math.sqrt((1 - state_weight**2) * (inner / 2))
    state = features.last[0, anchor]
    if config.scale_input:
        state = state / (state.square().mean() + 1e-6).sqrt() / math.sqrt(2)
    for level, token in enumerate([int(IDS[0, anchor + 1]), *path]):
        one, inner_level = (0, min(level, 1)) if config.tie_weights else (level, level)
        x = (
            weights[f"proj.{inner_level}.weight"] @ state
            + emb_weight / state_weight * weights[f"emb.{one}.weight"][token]
        )
        x = x / (x.square().mean() + 1e-6).sqrt() * weights[f"ln.{one}.weight"] + weights[f"ln.{one}.bias"]
        state = 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
        logits = weights[f"head.{one}.weight"] @ state
    return logits


@pytest.mark.parametrize("fields", SHAPES, ids=str)
@pytest.mark.parametrize("vocab", [None, DraftVocab([3, 8, 50], zoo.VOCAB)], ids=["full", "small"])
def test_a_tree_equals_the_formula_path_by_path(fields: dict[str, Any], vocab: DraftVocab | None) -> None:
    head = built(vocab=vocab, **fields)
    features, state, anchor = seen(head), head.start(), 6
    found = head.extend(state, features[:, : anchor + 1], IDS[:, 1 : anchor + 2])
    torch.testing.assert_close(found.logits[0, 0], by_the_book(head, features, anchor, []), atol=1e-5, rtol=1e-5)
    if head.config.num_heads < 3:
        return
    first = head.step(state, torch.tensor([[5, 9, 7]]), torch.tensor([[-1, -1, -1]]))
    second = head.step(state, torch.tensor([[11, 12, 11]]), torch.tensor([[2, 0, 0]]))
    expected = {(0, 0): [5], (0, 1): [9], (0, 2): [7], (1, 0): [7, 11], (1, 1): [5, 12], (1, 2): [5, 11]}
    for (depth, node), path in expected.items():
        logits = (first, second)[depth].logits[0, node]
        torch.testing.assert_close(logits, by_the_book(head, features, anchor, path), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("fields", SHAPES, ids=str)
def test_files_and_generation(fields: dict[str, Any], tmp_path: Path) -> None:
    head = built(**fields)
    assert head.max_depth == head.config.num_heads
    loaded = load_head(save_head(head, tmp_path / "head"), head.backbone)
    assert loaded.config == head.config
    prompt = IDS[0].tolist()
    expected = Generator(head.backbone).generate(prompt, max_new_tokens=12, do_sample=False).tokens
    assert Generator(head.backbone, loaded).generate(prompt, max_new_tokens=12, do_sample=False).tokens == expected


def test_tied_weights_are_stored_once() -> None:
    names = built(num_heads=5, tie_weights=True).state_dict().keys()
    assert sorted(names) == sorted([
        "emb.0.weight", "head.0.weight", "ln.0.bias", "ln.0.weight", "proj.0.weight", "proj.1.weight"
    ])  # fmt: skip


def test_training_is_refused_by_name() -> None:
    head = built()
    assert not head.trainable
    with pytest.raises(UserError, match="mlp_speculator head is for decoding only"):
        head.unroll(seen(head), IDS, [torch.arange(3)])
    with pytest.raises(AssertionError, match="depth 3 of 3"):
        state = head.start()
        head.extend(state, seen(head), IDS)
        for depth in range(3):
            head.step(state, IDS[:, :1], torch.tensor([[depth - 1]]))
    with pytest.raises(UserError, match="inner_size 0"):
        MlpSpeculator.build(zoo.backbone(), inner_size=0)
