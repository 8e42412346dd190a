"""What a causal LM of transformers is made of: its decoder, layers, norm, and how far its layers look back.

The names and kinds that differ from model to model stand here and nowhere else; what cannot be driven is refused.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import UserError
from .mask import Reach

_NORM_NAMES = ("norm", "final_layernorm", "ln_f", "final_layer_norm", "norm_f", "final_norm", "layer_norm")
_BY_SLOTS = {"bloom": "ALiBi", "mpt": "ALiBi", "gpt_neo": "the local attention"}
_RECOMPUTING = {"phi3", "phimoe", "phi4_multimodal"}
_RECURRENT = {"rwkv": "recurrent", "xlstm": "recurrent"}  # their configs list no layer types


def find_decoder(model: Any) -> nn.Module:
    """The part of a causal LM that ends with the final norm; some models name themselves when asked for it."""
    found = model.get_decoder()
    decoder = model.model if found is model else found
    assert isinstance(decoder, nn.Module)
    return decoder


def refuse_slots(config: Any, name: str) -> None:
    """Models that count distances between slots of the cache instead of reading position ids misplace drafts."""
    kind = config.model_type
    if kind in _BY_SLOTS or getattr(config, "alibi", False):
        what = _BY_SLOTS.get(kind, "ALiBi")
        raise UserError(
            f"{name}: {what} of {kind} models counts places in the cache and reads no position ids, so drafts "
            "side by side cannot be placed; models with rotary or learned positions work"
        )


def find_layers(decoder: nn.Module, count: int) -> nn.ModuleList:
    """The list of its decoder layers."""
    for child in decoder.children():
        if isinstance(child, nn.ModuleList) and len(child) == count:
            return child
    raise UserError(f"{type(decoder).__name__}: no list of {count} decoder layers was found in it")


def find_norm(decoder: nn.Module) -> nn.Module:
    """The norm behind the last layer."""
    for name in _NORM_NAMES:
        module = getattr(decoder, name, None)
        if isinstance(module, nn.Module):
            return module
    names = [name for name, _ in decoder.named_children()]
    raise UserError(f"{type(decoder).__name__}: no final norm among its parts {names}")


def find_reaches(config: Any, name: str) -> dict[str, Reach]:
    """How far back layers look, by layer type."""
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    known = {
        "full_attention": Reach(),
        "sliding_attention": Reach(window=window),
        "chunked_attention": Reach(chunk=chunk),
    }
    kind = config.model_type
    types = [_RECURRENT[kind]] if kind in _RECURRENT else getattr(config, "layer_types", None)
    if not types:
        return {"full_attention": Reach(window=window)}
    unknown = sorted(set(types) - known.keys())
    if unknown:
        raise UserError(
            f"{name}: layers of type {', '.join(unknown)} keep a state that cannot be rolled back when drafts "
            "are rejected; models with full, sliding-window or chunked attention work"
        )
    return {one: known[one] for one in sorted(set(types))}


def find_turn(config: Any) -> tuple[int | None, bool]:
    """Position from which on longrope takes its long factors (None: other rope), and whether `generate` computes the
    text anew there (transformers does so for the Phi family alone)."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return None, False
    return int(rope["original_max_position_embeddings"]), config.model_type in _RECOMPUTING
