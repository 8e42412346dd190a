"""What a comparison depends on: named in its report, and in the files with which it goes on."""

from __future__ import annotations

from typing import Any

from ..heads import chat
from ..heads.backbone import Backbone
from ..heads.base import DraftHead
from ..heads.forms import weights_hash
from .drafters import DEFAULT_LOOKUP, DEFAULT_SHAPE, modules_of
from .hybrid import Hybrid
from .machine import running
from .tree import Chain
from .tuned import tuned_tree


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
        "tree": _tree(backbone, drafter, tree),
        "max_new_tokens": max_new_tokens,
        **running(backbone),
    }


def _name(drafter: Any, name: str) -> str:
    if isinstance(drafter, DraftHead):
        return f"{name} ({drafter.method})"
    if isinstance(drafter, Backbone | Hybrid):
        return name
    return "none" if drafter is None else drafter if isinstance(drafter, str) else type(drafter).__name__


def _tree(backbone: Backbone, drafter: Any, tree: str | None) -> str | None:
    """The form that is asked for, the usual one where none is."""
    if isinstance(drafter, DraftHead):
        return tree or str(tuned_tree(backbone, drafter) or DEFAULT_SHAPE)
    found = tree or tuned_tree(backbone, drafter)
    return str(found or Chain(DEFAULT_LOOKUP)) if drafter == "ngram" else str(found) if found else None
