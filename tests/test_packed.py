"""Weights laid out for a CPU: the same numbers, sooner; the model as it was; changes followed."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import zoo
from headstart.heads import packed
from headstart.heads.backbone import Backbone
from headstart.heads.format import load_head, save_head
from headstart.heads.linear import Linear
from headstart.heads.methods import METHODS
from headstart.inference.engine import Engine
from headstart.inference.generator import Generator
from headstart.inference.tuned import keep

DTYPES = [torch.bfloat16, torch.float32]
IDS = torch.tensor([[5, 17, 40, 8, 5, 17, 40]])
NO_END: dict[str, Any] = {"eos_token_id": -1, "do_sample": False, "max_new_tokens": 24}

pytestmark = pytest.mark.skipif(not packed.works(torch.float32), reason="torch without oneDNN")


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "LEAST", 1)


def backbone_of(dtype: torch.dtype, family: str = "llama") -> Backbone:
    return Backbone(zoo.model(family).to(dtype), zoo.tokenizer())


def need(dtype: torch.dtype) -> None:
    if not packed.works(dtype):
        pytest.skip(f"no {dtype} products on this CPU")


@torch.inference_mode()
def logits(backbone: Backbone) -> torch.Tensor:
    return backbone.logits(backbone.forward(IDS, taps=(0, 2)).last)


def mlp_of(backbone: Backbone, layer: int) -> Any:
    return backbone.layers[layer].mlp


def layers(backbone: Backbone) -> int:
    return len(backbone.packing.packed.layers)


@pytest.mark.parametrize("family", zoo.FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_the_same_and_the_model_is_left_as_it_was(dtype: torch.dtype, family: str) -> None:
    need(dtype)
    backbone = backbone_of(dtype, family)
    before, whole = logits(backbone), backbone.model(IDS).logits
    backbone.pack()
    assert layers(backbone) == 4 * 7 + 1
    after = logits(backbone)
    if dtype == torch.bfloat16:
        assert torch.equal(before, after)
    torch.testing.assert_close(before, after, rtol=1e-5, atol=1e-5)
    assert torch.equal(backbone.model(IDS).logits, whole)
    assert not any("forward" in one.__dict__ for one in backbone.model.modules())
    backbone.forward(IDS).last.sum().backward()  # with gradients it goes the ordinary way
    assert all(one.grad is not None for one in backbone.layers[0].parameters())


@pytest.mark.parametrize("dtype", DTYPES)
def test_answers_are_those_of_generate(dtype: torch.dtype) -> None:
    need(dtype)
    backbone = backbone_of(dtype)
    expected = backbone.model.generate(IDS, **NO_END)[0, IDS.shape[1] :].tolist()
    torch.manual_seed(1)
    for drafter in (None, "suffix", *(METHODS[name].build(backbone).to(dtype) for name in METHODS)):
        generator = Generator(backbone, drafter)
        assert layers(backbone) > 0
        ours = generator.generate(IDS, **NO_END).tokens
        if dtype == torch.float32:
            assert ours == expected
            engine = Engine(backbone, drafter, max_rows=2)
            asked = [engine.submit(IDS[0, :n].tolist(), **NO_END) for n in (7, 4)]
            engine.run()
            assert asked[0].output.tokens == expected


@pytest.mark.parametrize("change", ["data", "in place", "another", "loaded"])
def test_weights_that_change_are_followed(change: str) -> None:
    backbone = backbone_of(torch.float32)
    generator = Generator(backbone)
    before = logits(backbone)
    layer = mlp_of(backbone, 1).up_proj
    with torch.no_grad():
        if change == "data":  # as peft merges an adapter
            layer.weight.data += 0.5 * torch.randn_like(layer.weight)
        elif change == "in place":
            layer.weight.mul_(1.5)
        elif change == "another":
            layer.weight = nn.Parameter(1.5 * layer.weight)
        else:
            layer.load_state_dict({"weight": 1.5 * layer.weight})
    expected = backbone.model.generate(IDS, **NO_END)[0, IDS.shape[1] :].tolist()
    assert generator.generate(IDS, **NO_END).tokens == expected
    assert not torch.allclose(before, logits(backbone))


def test_what_is_no_plain_layer_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = backbone_of(torch.float32)
    mlp = mlp_of(backbone, 0)
    parametrizations.weight_norm(mlp.gate_proj)
    kept = mlp.up_proj.forward
    mlp.up_proj.forward = lambda states: kept(states)  # as hooks of accelerate do
    mlp.down_proj.weight.data = mlp.down_proj.weight.data.half().float().t().contiguous().t()
    expected = logits(backbone)
    backbone.pack()
    assert layers(backbone) == 4 * 7 + 1 - 3
    torch.testing.assert_close(logits(backbone), expected, rtol=1e-5, atol=1e-5)
    assert "forward" in mlp.up_proj.__dict__
    calls, layer = list[int](), mlp_of(backbone, 1).up_proj
    own = layer.forward
    layer.forward = lambda states: calls.append(1) or own(states)  # somebody watches one that was laid out
    torch.testing.assert_close(logits(backbone), expected, rtol=1e-5, atol=1e-5)
    assert calls == [1]
    assert "forward" in layer.__dict__
    monkeypatch.setattr(packed, "LEAST", 1 << 16)
    small = backbone_of(torch.float32)
    small.pack()
    assert layers(small) == 0


@pytest.mark.parametrize("why", ["memory", "asked", "no oneDNN", "half"])
def test_where_it_cannot_be_or_is_not_wanted_nothing_is_laid_out(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = backbone_of(torch.float16 if why == "half" else torch.float32)
    if why == "memory":
        monkeypatch.setattr(packed, "free_bytes", lambda: 1000)
    elif why == "asked":
        backbone.packs = False
    elif why == "no oneDNN":
        packed.works.cache_clear()
        monkeypatch.setattr(packed, "op", None)
    head = METHODS["eagle3"].build(backbone).to(backbone.dtype)
    expected = logits(backbone)
    Generator(backbone, head).generate(IDS, **NO_END)
    assert layers(backbone) == 0
    if why != "memory":
        assert all(one.blocks is None for one in head.modules() if isinstance(one, Linear))
    assert torch.equal(logits(backbone), expected)
    packed.works.cache_clear()


def test_what_tune_keeps_is_found_by_another_process(tmp_path: Path) -> None:
    """Laid out or not is part of the setup, and is so before the first answer, too."""
    backbone = backbone_of(torch.float32)
    folder = save_head(METHODS["eagle3"].build(backbone), tmp_path / "head")
    head = load_head(folder, backbone)
    Generator(backbone, head).generate(IDS, **NO_END)
    keep(backbone, head, tree="chain:2")
    other = backbone_of(torch.float32)
    assert str(Generator(other, load_head(folder, other)).tuned) == "chain:2"
    other.packs = False
    assert Generator(other, load_head(folder, other)).tuned is None


def test_an_error_inside_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = backbone_of(torch.float32)
    backbone.pack()
    with pytest.raises(IndexError), torch.no_grad():
        backbone.forward(torch.tensor([[10_000]]))
    assert not any("forward" in one.__dict__ for one in backbone.model.modules())


@pytest.mark.parametrize("method", METHODS)
def test_heads_say_the_same_and_travel_without(method: str) -> None:
    backbone = zoo.backbone()
    torch.manual_seed(0)
    head = METHODS[method].build(backbone)

    @torch.inference_mode()
    def said(head: Any) -> torch.Tensor:
        state = head.start()
        features = backbone.forward(IDS, taps=head.taps)
        first = head.extend(state, features, torch.roll(IDS, -1, 1)).logits
        return torch.cat([first, head.step(state, torch.tensor([[7, 9]]), torch.tensor([[-1, -1]])).logits], 1)

    before = said(head)
    head.pack()
    linears = [one for one in head.modules() if isinstance(one, Linear)]
    assert all(one.blocks is not None for one in linears)
    torch.testing.assert_close(said(head), before, rtol=1e-4, atol=1e-4)
    assert head.state_dict().keys() == METHODS[method].build(backbone).state_dict().keys()
    other = copy.deepcopy(head)
    assert all(one.blocks is None for one in other.modules() if isinstance(one, Linear))
    torch.save(head.state_dict(), io.BytesIO())
    with torch.no_grad():
        for one in head.parameters():
            one.mul_(0.5)
        for one in other.parameters():
            one.mul_(0.5)
    torch.testing.assert_close(said(head), said(other), rtol=1e-4, atol=1e-4)
