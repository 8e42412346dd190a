"""Files of other tools with something broken in them: refused by the name of what is wrong, or loaded exactly."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
from test_exchange import built, proposed
from torch import Tensor

import zoo
from headstart.errors import UserError
from headstart.heads.base import DraftHead
from headstart.heads.exchange import FORMATS, read_head, written
from headstart.heads.kinds import kind_of

PAIRS = [(method, to) for to, writers in FORMATS.items() for method in writers]
SHAPES: dict[str, dict[str, Any]] = {
    "eagle1": {"fc_bias": False},
    "medusa": {"num_blocks": 2},
    "hydra": {"num_heads": 2, "head_arch": "prefix-mlp", "num_blocks": 2},
}
Broken = tuple[str, dict[str, Any], dict[str, Tensor]]


@functools.cache
def example(method: str, to: str) -> tuple[DraftHead, dict[str, Any], dict[str, Tensor], Tensor]:
    head = built(method, SHAPES.get(method, {}), small=method == "eagle3")
    files = written(head, to)
    return head, files.config, files.tensors, proposed(head)


def outcome(method: str, to: str, config: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """What a loader says; empty if it loads the very head."""
    head, _, _, expected = example(method, to)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            kind = kind_of(config, tensors)
            found = read_head(kind, config, tensors, head.backbone, "here").bind(head.backbone).eval()
        except UserError as error:
            return str(error)
    logits = proposed(found)
    return "" if torch.allclose(logits, expected, atol=1e-6) else "loaded as another head"


def names(method: str, to: str) -> list[str]:
    return sorted(example(method, to)[2])


@pytest.mark.parametrize(("method", "to"), PAIRS)
def test_as_it_is_it_loads(method: str, to: str) -> None:
    _, config, tensors, _ = example(method, to)
    assert outcome(method, to, config, tensors) == ""


@pytest.mark.parametrize(("method", "to"), PAIRS)
def test_a_tensor_that_is_missing(method: str, to: str) -> None:
    """What a loader may do without: marks that follow from offsets, and copies of the backbone's own."""
    _, config, tensors, _ = example(method, to)
    for name in names(method, to):
        said = outcome(method, to, config, {key: one for key, one in tensors.items() if key != name})
        free = name in ("t2d", "embed_tokens.weight") or (name == "fc.bias" and not tensors[name].any())
        assert name in said or (free and said == ""), f"{name}: {said}"


@pytest.mark.parametrize(("method", "to"), PAIRS)
def test_a_tensor_by_another_name(method: str, to: str) -> None:
    _, config, tensors, _ = example(method, to)
    for name in names(method, to):
        said = outcome(method, to, config, {(f"odd.{key}" if key == name else key): t for key, t in tensors.items()})
        assert name in said, f"{name}: {said}"


@pytest.mark.parametrize(("method", "to"), PAIRS)
def test_one_tensor_more(method: str, to: str) -> None:
    _, config, tensors, _ = example(method, to)
    for name in (
        "surplus.weight",
        "layers.0.self_attn.q_proj.bias",
        "layers.7.mlp.up_proj.weight",
        "9.0.linear.weight",
    ):
        said = outcome(method, to, config, tensors | {name: torch.zeros(32)})
        assert name in said or ("_proj.bias" in name and "_proj.bias" in said), f"{name}: {said}"


@pytest.mark.parametrize(("method", "to"), PAIRS)
def test_a_tensor_of_another_shape_or_kind(method: str, to: str) -> None:
    _, config, tensors, _ = example(method, to)
    for name in names(method, to):
        one = tensors[name]
        for other in (one[:-1], one.T.contiguous(), one[None], one.to(torch.int8), one.to(torch.complex64)):
            if other.shape == one.shape and other.dtype == one.dtype:
                continue  # a square one that is turned looks like any other
            said = outcome(method, to, config, tensors | {name: other})
            same = name in ("d2t", "t2d", "token_map") and said == ""  # small numbers are the same in any integer type
            assert same or name in said, f"{name} {tuple(other.shape)} {other.dtype}: {said}"


@pytest.mark.parametrize("to", [to for method, to in PAIRS if method == "eagle3"])
@pytest.mark.parametrize(("entry", "offset"), [(39, 57), (0, -1), (7, 4), (7, 3)])
def test_maps_out_of_range_or_twice(to: str, entry: int, offset: int) -> None:
    _, config, tensors, _ = example("eagle3", to)
    d2t = tensors["d2t"].clone()
    d2t[entry] = offset
    assert f"draft id {entry}" in outcome("eagle3", to, config, tensors | {"d2t": d2t})


@pytest.mark.parametrize("to", [to for method, to in PAIRS if method == "eagle3"])
def test_maps_that_contradict_each_other(to: str) -> None:
    _, config, tensors, _ = example("eagle3", to)
    absolute = tensors["d2t"] + torch.arange(40)
    said = outcome("eagle3", to, config, tensors | {"d2t": absolute})
    # without marks, ids that follow each other might as well be offsets of every other token
    assert "d2t" in said or "t2d" not in tensors
    irregular = torch.randperm(96, generator=torch.Generator().manual_seed(0))[:40].sort().values
    assert "t2d" in tensors or "offsets" in outcome("eagle3", to, config, tensors | {"d2t": irregular})
    said = outcome("eagle3", to, config, tensors | {"d2t": torch.arange(40)})
    assert "offsets" in said or "d2t says" in said
    marks = torch.zeros(96, dtype=torch.bool)
    marks[6:46] = True
    assert "t2d[5]" in outcome("eagle3", to, config, tensors | {"t2d": marks})
    assert "t2d" in outcome("eagle3", to, config, tensors | {"t2d": torch.ones(95, dtype=torch.bool)})


# keys that a tensor shows to be wrong, and what they are set to
NUMBERS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "draft_vocab_size", "target_hidden_size", "medusa_num_heads", "medusa_num_layers"),
    *("num_heads", "truncated_vocab_size", "hydra_num_heads", "hydra_num_layers"),
)
FLAGS = (
    "attention_bias",
    "mlp_bias",
    "qkv_bias",
    "norm_before_fc",
    "fc_norm",
    "medusa_fc_bias",
    "tie_word_embeddings",
    "bias",
)


def changed(config: dict[str, Any], key: str, change: Any) -> dict[str, Any] | None:
    """A copy in which one key, wherever it stands, is another; None if it is not there."""
    config = copy.deepcopy(config)
    inner = config.get("transformer_layer_config", {})
    place = config if key in config else inner
    if place.get(key) is None:
        return None
    place[key] = change(place[key])
    return config


@pytest.mark.parametrize(("method", "to"), PAIRS)
def test_numbers_of_the_config_that_are_wrong(method: str, to: str) -> None:
    _, config, tensors, _ = example(method, to)
    for key in NUMBERS:
        for change in (lambda value: value + 1, lambda value: value * 2, lambda value: max(1, value // 2)):
            made = changed(config, key, change)
            if made is not None and made != config:
                said = outcome(method, to, made, tensors)
                assert said not in ("", "loaded as another head"), f"{key}: {said}"


@pytest.mark.parametrize(("method", "to"), PAIRS)
def test_numbers_that_are_missing(method: str, to: str) -> None:
    """B092: what the tensors tell need not be said."""
    _, config, tensors, _ = example(method, to)
    for key in NUMBERS:
        made = copy.deepcopy(config)
        for place in (made, made.get("transformer_layer_config", {})):
            place.pop(key, None)
        said = outcome(method, to, made, tensors)
        assert said == "" or key in said, f"{key}: {said}"


@pytest.mark.parametrize(("method", "to"), PAIRS)
def test_flags_that_are_flipped(method: str, to: str) -> None:
    _, config, tensors, _ = example(method, to)
    for key in FLAGS:
        made = changed(config, key, lambda value: not value)
        if made is not None:
            said = outcome(method, to, made, tensors)
            assert said == "" or said != "loaded as another head", f"{key}: {said}"


def test_another_backbone_is_named() -> None:
    _, config, tensors, _ = example("eagle3", "vllm")
    for change in ({"hidden_size": 64}, {"vocab_size": 97}):
        other = zoo.backbone(num_hidden_layers=8, **change)
        with pytest.raises(UserError, match="tiny-llama has|expected"):
            read_head("eagle3", config, tensors, other, "here").bind(other)
    _, config, tensors, _ = example("eagle1", "eagle")
    other = zoo.backbone(num_hidden_layers=8, initializer_range=0.2)
    with pytest.raises(UserError, match=r"embed_tokens\.weight is not that of tiny-llama"):
        read_head("eagle1", config, tensors, other, "here")
