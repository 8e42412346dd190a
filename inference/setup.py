"""What a comparison depends on: named in its report, and in the files with which it goes on."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import torch

from ..heads import chat
from ..heads.backbone import Backbone
from ..heads.base import DraftHead
from ..heads.forms import weights_hash
from .drafters import DEFAULT_LOOKUP, DEFAULT_SHAPE, modules_of
from .hybrid import Hybrid
from .tree import Chain


def setup_of(
    backbone: Backbone, drafter: Any, *, head: str, tree: str | None, max_new_tokens: int, raw: bool
) -> dict[str, Any]:
    """The facts, as JSON values.

    Args:
        drafter: what `Generator` takes; `head` is only its name.
    """
    return {
        "backbone": backbone.name,
        "weights": backbone.fingerprint(),
        "prompts": "as they stand" if raw else f"chat template {chat.fingerprint(backbone.tokenizer)['template']}",
        "drafter": _name(drafter, head),
        "drafter_weights": " ".join(map(weights_hash, modules_of(drafter))) or None,
        "tree": _tree(drafter, tree),
        "max_new_tokens": max_new_tokens,
        **running(backbone),
    }


def running(backbone: Backbone) -> dict[str, Any]:
    """How and where its forwards are computed, and by which versions."""
    cuda = backbone.device.type == "cuda"
    return {
        "dtype": str(backbone.dtype).removeprefix("torch."),
        "attention": getattr(backbone.config, "_attn_implementation", None),
        "device": torch.cuda.get_device_name(backbone.device) if cuda else str(backbone.device),
        **{name: metadata.version(name) for name in ("torch", "transformers", "headstart")},
    }


def _name(drafter: Any, name: str) -> str:
    if isinstance(drafter, DraftHead):
        return f"{name} ({drafter.method})"
    if isinstance(drafter, Backbone | Hybrid):
        return name
    return "none" if drafter is None else drafter if isinstance(drafter, str) else type(drafter).__name__


def _tree(drafter: Any, tree: str | None) -> str | None:
    """The form that is asked for, the usual one where none is."""
    if isinstance(drafter, DraftHead):
        return tree or str(DEFAULT_SHAPE)
    return (tree or str(Chain(DEFAULT_LOOKUP))) if drafter == "ngram" else tree
