"""Llama-shaped configs, which EAGLE heads of every tool carry: read into the fields of a decoder layer, and written.

What a config does not say the tensors decide; where it speaks, it has to agree with them.

Rotary embeddings: newer files write `rope_parameters`, older ones `rope_theta` and `rope_scaling`; both are read, and
both written. A file without any was trained with 10000, whatever its backbone has, and stays so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import LlamaConfig, Qwen3Config

from ..errors import UserError
from .backbone import Backbone
from .layer import LayerConfig
from .layouts import Config, Tensors, flag, number
from .rotary import Rotary

# what may stand in such a config and is either read here or says nothing of how the head computes
_KNOWN = {
    *("target_hidden_size", "target_model_type", "draft_vocab_size", "eagle_config", "norm_output", "norm_before_fc"),
    *("eagle_aux_hidden_state_layer_ids", "norm_before_residual", "fc_norm", "use_aux_norm", "num_aux_hidden_states"),
    *("rope_theta", "rope_scaling", "partial_rotary_factor", "qkv_bias", "bias", "torch_dtype", "is_causal"),
    *("base_model_name_or_path", "name_or_path", "embed_requires_grad", "hot_vocab_size", "parallel_drafting"),
    *("logit_scale", "quantization_config", "transformers_version", "model_type", "transformer_layer_config"),
    *("speculators_model_type", "speculators_config", "speculators_version", "mm_hidden_size", "auto_map"),
}  # fmt: skip


def layer_fields(config: Config, tensors: Tensors, first: str, width: int) -> Config:
    """The fields of `LayerConfig`, from a config and the first layer's tensors.

    Args:
        tensors: by our names.
        first: prefix of the first layer, "midlayer." say.
        width: of the head's states.

    Raises:
        UserError: a field is missing that no tensor tells, or both contradict each other.
    """
    heads = number(config, "num_attention_heads")
    if heads is None:
        raise UserError("num_attention_heads is missing, and no tensor tells how many there are")
    _refuse_other_layers(config)
    act, inner = config.get("hidden_act") or "silu", number(config, "intermediate_size")
    up, queries, keys = (tensors.get(f"{first}{name}_proj.weight") for name in ("mlp.up", "self_attn.q", "self_attn.k"))
    head_dim = number(config, "head_dim") or (width if queries is None else len(queries)) // heads
    groups = number(config, "num_key_value_heads") or (heads if keys is None else len(keys) // max(1, head_dim))
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": head_dim,
        "intermediate_size": inner if inner is not None or up is None else int(up.shape[0]),
        "hidden_act": act,
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "attention_bias": _bias(config, ("qkv_bias", "attention_bias"), tensors, f"{first}self_attn.q_proj.bias"),
        "output_bias": f"{first}self_attn.o_proj.bias" in tensors,
        "mlp_bias": _bias(config, ("mlp_bias",), tensors, f"{first}mlp.up_proj.bias"),
        "qk_norm": _qk_norm(tensors, first, head_dim),
        "max_position_embeddings": number(config, "max_position_embeddings") or 2048,
        "rope_parameters": rope_parameters(config),
    }


def unknown(config: Config) -> list[str]:
    """A note of the keys that nobody here knows, if there are any: they might change how the head computes."""
    usual = {*LlamaConfig().to_dict(), *Qwen3Config().to_dict(), *_KNOWN}
    keys = sorted(key for key in config if key not in usual)
    return [f"unknown in the config, and not heeded: {', '.join(keys)}"] if keys else []


def rope_parameters(config: Config) -> dict[str, Any]:
    """The rotary embedding, as transformers writes it now.

    Raises:
        UserError: old and new fields say different things.
    """
    new = config.get("rope_parameters") or {}
    if new and all(isinstance(value, dict) for value in new.values()):
        new = new.get("full_attention") or next(iter(new.values()))
    old = {("rope_type" if key == "type" else key): value for key, value in (config.get("rope_scaling") or {}).items()}
    if config.get("rope_theta") is not None:
        old["rope_theta"] = config["rope_theta"]
    if config.get("partial_rotary_factor") is not None:
        old["partial_rotary_factor"] = config["partial_rotary_factor"]
    for key in old.keys() & new.keys():
        if old[key] != new[key]:
            raise UserError(
                f"rope_parameters says {key} {new[key]!r}, and rope_theta or rope_scaling {old[key]!r}: which was it "
                "trained with? Keep one of them"
            )
    found = {"rope_type": "default", "rope_theta": 10000.0, **old, **new}
    try:
        return {**found, "rope_theta": float(found["rope_theta"])}
    except (TypeError, ValueError):
        raise UserError(f"rope_theta is {found['rope_theta']!r}, and no number") from None


def without_frequencies(config: Config, tensors: Tensors) -> Tensors:
    """Without the rotary frequencies that older files hold beside their weights.

    Raises:
        UserError: they are not those of the config.
    """
    kept = {name: one for name, one in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    for name in sorted(tensors.keys() - kept.keys()):
        found, rope = tensors[name].float(), rope_parameters(config)
        wanted = Rotary(rope, 2 * len(found), number(config, "max_position_embeddings") or 2048).embedding.inv_freq
        if not torch.allclose(found, wanted, rtol=0.02, atol=1e-4):  # half precision rounds them
            raise UserError(
                f"{name} is not that of rope_theta {rope['rope_theta']:g}, which config.json says or leaves unsaid: "
                "write there what the head was trained with"
            )
    return kept


def llama_config(config: LayerConfig, *, width: int, layers: int, dtype: str, architecture: str) -> Config:
    """The config of a head's layers, with old and new fields for the rotary embedding."""
    rope = dict(config.rope_parameters)
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
    scaled = rope.get("rope_type", "default") != "default"
    return {
        "architectures": [architecture],
        "model_type": "qwen3" if config.qk_norm == "head" else "llama",
        "hidden_size": width,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": rope.get("rope_theta", 10000.0),
        "rope_scaling": scaling if scaled else None,
        "rope_parameters": rope,
        "attention_bias": config.attention_bias or config.output_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": False,
        "use_cache": True,
        "torch_dtype": dtype,
    }


def filled_biases(config: LayerConfig, tensors: Tensors, prefixes: list[str]) -> Tensors:
    """Zeros where a reader expects biases on all four projections of attention as soon as one of them has some."""
    if config.attention_bias == config.output_bias:
        return {}
    parts = ("o",) if config.attention_bias else ("q", "k", "v")
    names = [f"{prefix}self_attn.{part}_proj" for prefix in prefixes for part in parts]
    return {f"{name}.bias": tensors[f"{name}.weight"].new_zeros(len(tensors[f"{name}.weight"])) for name in names}


# -- what a reader cannot do ------------------------------------------------------------------------------------------


def layer_faults(config: LayerConfig, width: int, able: frozenset[str], ropes: tuple[str, ...]) -> Iterator[str]:
    """Why a decoder layer like this cannot be said to a reader, and what would have to be trained differently.

    Args:
        able: of head_dim, act, qk_norm, attention_bias, output_bias, mlp_bias what it can.
        ropes: kinds of rotary embedding that it knows; empty: any.
    """
    if config.head_dim * config.num_attention_heads != width and "head_dim" not in able:
        yield (
            f"head_dim is {config.head_dim}, and it takes hidden size / heads = {width // config.num_attention_heads}: "
            f"train with head.head_dim={width // config.num_attention_heads}"
        )
    if config.hidden_act not in ("silu", "swish") and "act" not in able:
        yield f"hidden_act is {config.hidden_act}, and it takes silu for granted: train with head.hidden_act=silu"
    if config.qk_norm == "all" or (config.qk_norm == "head" and "qk_norm" not in able):
        yield f"qk_norm is {config.qk_norm}, and it has no such norms on queries and keys: train with head.qk_norm=none"
    for name, where in (
        ("attention_bias", "queries, keys and values"),
        ("output_bias", "the attention's output"),
        ("mlp_bias", "the MLP"),
    ):
        if getattr(config, name) and name not in able:
            yield f"{name} is true, and it drops biases on {where} without a word: train with head.{name}=false"
    kind = str(config.rope_parameters.get("rope_type", "default"))
    if ropes and kind not in ropes:
        yield f"rope_type is {kind}, and it knows {', '.join(ropes)}: train with another head.rope_parameters"
    if config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        yield (
            f"partial_rotary_factor is {config.rope_parameters['partial_rotary_factor']}, and it turns whole heads: "
            "train without it in head.rope_parameters"
        )


def _bias(config: Config, keys: tuple[str, ...], tensors: Tensors, name: str) -> bool:
    said = [flag(config, key) for key in keys if config.get(key) is not None]
    if not said:
        return name in tensors
    if not any(said) and name in tensors:
        raise UserError(f"{' and '.join(key for key in keys if key in config)} is false, and the file holds {name}")
    return any(said) and not _output_alone(said, tensors, name)


def _output_alone(said: list[bool], tensors: Tensors, name: str) -> bool:
    """Whether `qkv_bias: false, attention_bias: true` leaves the bias behind the attention alone."""
    return len(said) > 1 and not said[0] and name not in tensors


def _qk_norm(tensors: Tensors, first: str, head_dim: int) -> str:
    norm = tensors.get(f"{first}self_attn.q_norm.weight")
    if norm is None:
        return "none"
    return "head" if tuple(norm.shape) == (head_dim,) else "all"


def _refuse_other_layers(config: Config) -> None:
    """Layers that compute otherwise than ours do."""
    types = set(config.get("layer_types") or ())
    window = config.get("sliding_window")
    used = config.get("use_sliding_window", config.get("model_type") == "mistral")
    if types - {"full_attention"} or (window and used):
        raise UserError(
            f"the head's layers see a window of {window} positions; heads here see the whole text, so it would draft "
            "otherwise than it was trained"
        )
    if config.get("logit_scale") not in (None, 1, 1.0):
        raise UserError(f"logit_scale is {config['logit_scale']}; heads here scale no logits")
    if config.get("is_causal") is False or config.get("parallel_drafting"):
        raise UserError("the head drafts all tokens in parallel (P-EAGLE); such heads are not known here")
    if config.get("hot_vocab_size"):
        raise UserError("hot_vocab_size is set: the tokens it can propose stand in another file, which is not read")
    if (config.get("quantization_config") or {}) != {}:
        raise UserError("quantization_config is set: quantised heads are not read; save it in float16 or the like")


def dtype_name(tensors: Tensors) -> str:
    """What `torch_dtype` says of a file."""
    return next(str(t.dtype).removeprefix("torch.") for t in tensors.values() if t.is_floating_point())


def head_width(config: Config, tensors: Tensors) -> int:
    """Width of the head's states: what the config says, else rows of the layer that joins its inputs."""
    said = number(config, "hidden_size")
    if said is not None:
        return said
    if "fc.weight" not in tensors:
        raise UserError("hidden_size is missing, and so is fc.weight, which would tell it")
    return int(tensors["fc.weight"].shape[0])


def vocab_size(config: Config, backbone: Backbone | None) -> int | None:
    """What the config says; else the backbone's."""
    return number(config, "vocab_size") or (None if backbone is None else backbone.vocab_size)


def count_layers(config: Config, tensors: Tensors) -> int:
    """Decoder layers as the config says; else by the numbers in names, the first of which may have one of its own.

    Raises:
        UserError: the file holds fewer; some configs give the backbone's number.
    """
    said = number(config, "num_hidden_layers")
    found = 1 + max((int(name.split(".")[1]) for name in tensors if name.startswith("layers.")), default=0)
    if said is not None and said > found:
        raise UserError(f"num_hidden_layers is {said}, and the file holds {found}; write {found} if none is missing")
    return said or found
