"""What a comparison depends on: named in its report, and in the files with which it goes on."""

from __future__ import annotations

from typing import Any

from ..heads import chat
from ..heads.backbone import Backbone
from ..heads.base import DraftHead
from ..heads.forms import weights_hash
from .drafters import modules_of, usual
from .hybrid import Hybrid
from .machine import running
from .tuned import tuned_tree


def setup_of(
    backbone: Backbone,
    drafter: Any,
    *,
    head: str,
    tree: str | None,
    max_new_tokens: int,
    raw: bool,
    compile: bool = False,
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
        "tree": tree or (str(shape) if (shape := tuned_tree(backbone, drafter) or usual(backbone, drafter)) else None),
        "max_new_tokens": max_new_tokens,
        **({"compile": True} if compile else {}),
        **running(backbone),
    }


def _name(drafter: Any, name: str) -> str:
    if isinstance(drafter, DraftHead):
        return f"{name} ({drafter.method})"
    if isinstance(drafter, Backbone | Hybrid):
        return name
    return "none" if drafter is None else drafter if isinstance(drafter, str) else type(drafter).__name__
