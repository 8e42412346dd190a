"""MLP speculators as IBM's accelerators store them, read only: nothing here trains them.

Source: foundation-model-stack and vLLM up to 0.32. Tied weights stand under every number in some files and under one in
others.
"""

from __future__ import annotations

import re

from ..errors import UserError
from .backbone import Backbone
from .layouts import Config, Found, Tensors, backbone_facts, flag, needed, number
from .names import Table, outward, renamed

_TABLE: Table = (("speculator.{rest}", "{rest}"),)


def read(config: Config, tensors: Tensors, backbone: Backbone | None) -> Found:
    """A speculator.

    Raises:
        UserError: something contradicts itself, or cannot be known without the backbone.
    """
    prefixed = any(name.startswith("speculator.") for name in tensors)
    found = renamed(tensors, _TABLE)
    levels = number(config, "n_predict") or 1 + max(_level(name) for name in found if name.startswith("head."))
    tied = flag(config, "tie_weights")
    found = _untied(found, levels) if tied else found
    first = found.get("proj.0.weight")
    if first is None:
        raise UserError("proj.0.weight is missing: the first level's inner matrix")
    size = number(config, "vocab_size") or needed(backbone, "vocab_size is missing").vocab_size
    width = number(config, "emb_dim")
    inner = (config.get("inner_dim") and number(config, "inner_dim")) or width or int(first.shape[0])  # 0: as wide
    counts = config.get("top_k_tokens_per_head")
    if counts is not None and len(counts) != levels:
        raise UserError(f"n_predict is {levels}, and top_k_tokens_per_head names {len(counts)} levels")
    fields = {
        **backbone_facts(backbone, str(config.get("base_model_name_or_path") or "")),
        "hidden_size": width or int(first.shape[1]),
        "vocab_size": size,
        "draft_vocab_size": size,
        "num_heads": levels,
        "inner_size": inner,
        "tie_weights": tied,
        "scale_input": flag(config, "scale_input"),
    }
    return Found("mlp_speculator", fields, found, (lambda n: outward(n, _TABLE)) if prefixed else str)


def _level(name: str) -> int:
    return int(name.split(".")[1])


def _untied(tensors: Tensors, levels: int) -> Tensors:
    """One of each tensor that all levels share.

    Raises:
        UserError: what is said to be one tensor differs from level to level.
    """
    kept: Tensors = {}
    for name in sorted(tensors, key=lambda name: (name.split(".")[0], _level(name))):
        kind, level, rest = re.split(r"\.", name, maxsplit=2)
        first = f"{kind}.{min(int(level), 1) if kind == 'proj' else 0}.{rest}"
        if first not in kept:
            kept[first if int(level) < levels else name] = tensors[name]
        elif not tensors[name].equal(kept[first]):
            raise UserError(f"tie_weights is true, and {name} differs from {first}")
    return kept
