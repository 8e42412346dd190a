"""The speculators format of vLLM: a Llama- or Qwen3-shaped config inside another, for EAGLE-3 heads.

Source: speculators 0.9.0 and how vLLM 0.32.0 reads it. Hidden states are counted as here. Two traps: without
`norm_before_residual` vLLM takes it for true and the package for false, so it is always written and asked
for; and the package makes up an embedding where the file has none, so that there always is one.
"""

from __future__ import annotations

from collections.abc import Callable

from ..errors import UserError
from .backbone import Backbone
from .eagle3 import Eagle3Config
from .eagle3_read import LAYERS, SWITCHES
from .eagle3_read import read as read_eagle3
from .eagle3_write import common_faults, no_form, prefixes
from .layouts import Config, Files, Found, Tensors, embedding_of, needed, refuse
from .llama_config import dtype_name, filled_biases, layer_faults, llama_config
from .names import renamed

VERSION = "0.9.0"


def read(config: Config, tensors: Tensors, backbone: Backbone | None) -> Found:
    """A head in this format."""
    kind, inner = config.get("speculators_model_type"), config.get("transformer_layer_config")
    if kind != "eagle3":
        raise UserError(f"speculators_model_type is {kind!r}; of this format eagle3 heads are known here")
    if not isinstance(inner, dict):
        raise UserError("transformer_layer_config is missing: the shape of the layers stands there")
    if config.get("norm_before_residual") is None:
        raise UserError(
            "norm_before_residual is missing, which vLLM takes for true and speculators for false; write what it was "
            "trained with into config.json"
        )
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    flat = {**inner, **{key: value for key, value in config.items() if key not in inner or key in _OUTER}}
    flat.pop("dtype", None)
    flat["base_model_name_or_path"] = verifier.get("name_or_path") or ""
    return read_eagle3(flat, tensors, backbone)


_OUTER = (
    "draft_vocab_size",
    "target_hidden_size",
    "tie_word_embeddings",
    "eagle_aux_hidden_state_layer_ids",
    *SWITCHES,
)


def write(config: Eagle3Config, tensors: Tensors, backbone: Backbone | None) -> Files:
    able = frozenset(("head_dim", "act", "qk_norm", "attention_bias", "output_bias", "mlp_bias"))
    faults = [
        *common_faults(config, layers=True),
        *layer_faults(config, config.own_width, able, ()),
    ]
    if config.own_width != config.hidden_size:
        faults.append(f"width is {config.own_width}, and it knows the backbone's alone: train without head.width")
    refuse(no_form("speculators"), faults)
    if not config.own_embedding:
        model = needed(backbone, "the speculators format holds the embedding, which is the backbone's")
        tensors = {**tensors, "embed_tokens.weight": embedding_of(model).to(tensors["fc.weight"].dtype)}
    inner = llama_config(config, width=config.own_width, layers=config.head_layers, dtype="", architecture="")
    for key in ("architectures", "torch_dtype", "rope_scaling", "rope_theta"):
        inner.pop(key)
    if len(config.taps) != 3:
        inner["num_aux_hidden_states"] = len(config.taps)  # without it, vLLM builds fc for three
    names = [] if backbone is None else list(getattr(backbone.model.config, "architectures", None) or [])
    name = type(backbone.model).__name__ if backbone is not None else ""
    made = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": None,
        "norm_before_residual": config.norm_before_residual,
        **{key: getattr(config, key) for key in ("norm_before_fc", "fc_norm", "norm_output")},
        "eagle_aux_hidden_state_layer_ids": list(config.taps),
        "embed_requires_grad": config.own_embedding,
        "tie_word_embeddings": False,
        "dtype": dtype_name(tensors),
        "transformer_layer_config": inner,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 3,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": config.backbone, "architectures": names or ([name] if name else [])},
        },
    }
    biases = filled_biases(config, tensors, prefixes(config))
    return Files(made, renamed({**tensors, **biases}, LAYERS, out=True))


WRITERS: dict[str, Callable[[Eagle3Config, Tensors, Backbone | None], Files]] = {"speculators": write}
