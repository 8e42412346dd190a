"""What a causal LM of transformers is made of: its decoder, layers, norm, and how far its layers look back.

The names and kinds that differ from model to model stand here and nowhere else; what cannot be driven is refused.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn

from ..errors import UserError
from .mask import Reach

_NORM_NAMES = ("norm", "final_layernorm", "ln_f", "final_layer_norm", "norm_f", "final_norm", "layer_norm")
_BY_SLOTS = {"bloom": "ALiBi", "mpt": "ALiBi", "gpt_neo": "the local attention"}
_RECOMPUTING = {"phi3", "phimoe", "phi4_multimodal"}
_STATELESS = {"mlp", "moe"}
_RECURRENT = {"rwkv": "recurrent", "xlstm": "recurrent"}  # their configs list no layer types


def find_decoder(model: Any) -> nn.Module:
    """The part of a causal LM that ends with the final norm, however deep it lies."""
    passed = [model]
    while (inner := _within(passed[-1])) not in passed:
        passed.append(inner)
    assert isinstance(passed[-1], nn.Module)
    return passed[-1]


def _within(model: Any) -> Any:
    """What a model calls its decoder; asked for it, some name themselves or their output projection."""
    found = model.get_decoder() if hasattr(model, "get_decoder") else model
    if found is model or isinstance(found, nn.Linear):
        found = getattr(model, "model", getattr(model, "base_model", model))
    return found


def one_layer(config: Any) -> Any:
    """What a config says of the first layer, where it says other things of each (no field is ambiguous then)."""
    return config.per_layer_config[0] if getattr(config, "is_heterogeneous", False) else config


def refuse_slots(config: Any, decoder: nn.Module, name: str) -> None:
    """Models that count places in the cache instead of reading position ids misplace drafts."""
    kind = config.model_type
    if kind in _BY_SLOTS or getattr(config, "alibi", False):
        what = _BY_SLOTS.get(kind, "ALiBi")
        raise UserError(
            f"{name}: {what} of {kind} models counts places in the cache and reads no position ids, so drafts "
            "side by side cannot be placed; models with rotary or learned positions work"
        )
    if "position_ids" not in inspect.signature(inspect.unwrap(decoder.forward)).parameters:
        raise UserError(
            f"{name}: {type(decoder).__name__} takes no position ids, so drafts side by side cannot be placed; models "
            "whose positions are an input work"
        )


def refuse_both_ways(config: Any, name: str) -> None:
    """Models of prefixes read a prompt both ways: a token has no state of its own before the prompt has ended."""
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        raise UserError(
            f"{name}: its layers look both ways over a prompt (use_bidirectional_attention), so no draft head can "
            "learn from whole texts; models with causal attention work"
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


def find_reaches(config: Any, decoder: nn.Module, name: str) -> dict[str, Reach]:
    """How far back layers look, by layer type."""
    window = getattr(one_layer(config), "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    known = {
        "full_attention": Reach(),
        "sliding_attention": Reach(window=window),
        "chunked_attention": Reach(chunk=chunk),
    }
    kind = config.model_type
    types = [_RECURRENT[kind]] if kind in _RECURRENT else getattr(config, "layer_types", None)
    if not types and window is not None and not _slides(decoder):
        warnings.warn(
            f"{name}: its config names a sliding window of {window} tokens, which {type(decoder).__name__} does not "
            "apply: here it looks at the whole text, while generate of transformers goes on with a cache that forgets "
            "what lies further back; config.sliding_window = None makes them agree",
            stacklevel=3,
        )
        window = None
    if not types:
        return {"full_attention": Reach(window=window)}
    unknown = sorted(set(types) - known.keys() - _STATELESS)
    if unknown:
        raise UserError(
            f"{name}: layers of type {', '.join(unknown)} {_reason(unknown)}; models with full, sliding-window or "
            "chunked attention work"
        )
    return {one: known[one] for one in sorted(set(types) & known.keys())}


def _reason(kinds: Sequence[str]) -> str:
    """Why layers of these kinds are refused."""
    if all("attention" in kind and "linear" not in kind and "hybrid" not in kind for kind in kinds):
        return "choose what they look at in a way that no mask of a tree can tell them"
    return "keep a state that cannot be rolled back when drafts are rejected"


def _slides(decoder: nn.Module) -> bool:
    """Whether it makes masks of a window at all; configs of models that do not may name one all the same."""
    modules = [sys.modules[kind.__module__] for kind in type(decoder).__mro__]
    known = [module for module in modules if hasattr(module, "create_causal_mask")]
    return not known or any(hasattr(module, "create_sliding_window_causal_mask") for module in known)


def run_by_texts(config: Any, state: int) -> int:
    """The number of a hidden state that a text alone leaves behind, the same one: layers that look at images (Mllama)
    hand on what they are given."""
    while state and state - 1 in (getattr(config, "cross_attention_layers", None) or ()):
        state -= 1
    return state


def find_turn(config: Any) -> tuple[int | None, bool]:
    """Position from which on longrope takes its long factors (None: other rope), and whether `generate` computes the
    text anew there (transformers does so for the Phi family alone)."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return None, False
    return int(rope["original_max_position_embeddings"]), config.model_type in _RECOMPUTING
