"""EAGLE-3 heads written as other tools store them; what each of them cannot say is refused. See eagle3_read.py.

Sources: SafeAILab/EAGLE (official), SpecForge 0.2.0, SGLang 0.5.23, NVIDIA Model-Optimizer, vLLM 0.32.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from .backbone import Backbone
from .eagle3 import Eagle3Config
from .eagle3_read import LAYERS, SWITCHES, implied_taps
from .layouts import Config, Files, Tensors, embedding_of, refuse, scales_embedding
from .llama_config import dtype_name, filled_biases, layer_faults, llama_config
from .names import renamed


def official(config: Eagle3Config, tensors: Tensors, backbone: Backbone | None) -> Files:
    """SafeAILab's own."""
    faults = [
        *common_faults(config, three=True),
        *_cannot(config, *SWITCHES),
        *layer_faults(config, config.own_width, frozenset(("act",)), ("default", "linear", "dynamic")),
    ]
    if not config.num_layers or config.taps != implied_taps(config.num_layers):
        wanted = list(implied_taps(config.num_layers)) if config.num_layers else "the usual three"
        faults.append(f"taps are {list(config.taps)}, and it reads {wanted} always: train with head.taps={wanted}")
    refuse(no_form("EAGLE"), faults)
    made = _config(config, tensors, "LlamaForCausalLM", drop=("attention_bias", "mlp_bias"))
    return Files(made, _with_scaled(config, tensors, backbone))


def specforge(config: Eagle3Config, tensors: Tensors, backbone: Backbone | None) -> Files:
    """SpecForge's, which always has both maps and never an embedding."""
    faults = [
        *common_faults(config, three=True, counted=True),
        *_cannot(config, "norm_before_fc", "norm_before_residual", "norm_output"),
        *layer_faults(
            config, config.own_width, frozenset(("act", "head_dim")), ("default", "linear", "dynamic", "llama3", "yarn")
        ),
        *_shared_embedding(config, backbone),
    ]
    refuse(no_form("SpecForge"), faults)
    made = _config(config, tensors, "LlamaForCausalLMEagle3") | _counted(config) | {"fc_norm": config.fc_norm}
    trivial = {
        "d2t": torch.zeros(config.draft_vocab_size, dtype=torch.long),
        "t2d": torch.ones(config.vocab_size, dtype=torch.bool),
    }
    return Files(made, {**trivial, **tensors} if "d2t" not in tensors else dict(tensors))


def sglang(config: Eagle3Config, tensors: Tensors, backbone: Backbone | None) -> Files:
    """SGLang's."""
    faults = [
        *common_faults(config, counted=True),
        *_cannot(config, "norm_before_residual"),
        *layer_faults(config, config.own_width, frozenset(("head_dim",)), ()),
        *_shared_embedding(config, backbone),
    ]
    if len(config.taps) * config.hidden_size == config.own_width:
        faults.append("its fused states are as wide as the head, so SGLang would not fuse them: train with more taps")
    refuse(no_form("SGLang"), faults)
    made = _config(config, tensors, "LlamaForCausalLMEagle3") | _counted(config) | _switches(config)
    made["num_aux_hidden_states"] = len(config.taps)
    return Files(made, dict(tensors))


def modelopt(config: Eagle3Config, tensors: Tensors, backbone: Backbone | None) -> Files:
    """NVIDIA Model-Optimizer's."""
    faults = [
        *common_faults(config, three=True, counted=True),
        *_cannot(config, *SWITCHES),
        *layer_faults(config, config.own_width, frozenset(("head_dim",)), ()),
        *_shared_embedding(config, backbone),
    ]
    if config.own_width != config.hidden_size:
        faults.append(f"width is {config.own_width}, and it knows the backbone's alone: train without head.width")
    refuse(no_form("Model-Optimizer"), faults)
    made = _config(config, tensors, "LlamaForCausalLMEagle3") | _counted(config)
    made["eagle_config"] |= {
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": 1,
    }
    return Files(made, renamed({name: one for name, one in tensors.items() if name != "t2d"}, LAYERS, out=True))


def vllm(config: Eagle3Config, tensors: Tensors, backbone: Backbone | None) -> Files:
    """vLLM's own reading of such a folder."""
    able = frozenset(("head_dim", "qk_norm", "attention_bias", "output_bias", "mlp_bias"))
    faults = [
        *common_faults(config, layers=True),
        *layer_faults(config, config.own_width, able, ()),
    ]
    refuse(no_form("vLLM"), faults)
    architecture = "Eagle3Qwen3ForCausalLM" if config.qk_norm == "head" else "LlamaForCausalLMEagle3"
    made = _config(config, tensors, architecture) | _switches(config)
    made |= {"norm_before_residual": config.norm_before_residual}
    made["eagle_aux_hidden_state_layer_ids"] = list(config.taps)
    made["num_aux_hidden_states"] = len(config.taps)  # without it, fc is built for three
    biases = filled_biases(config, tensors, prefixes(config))
    return Files(made, renamed({**_with_scaled(config, tensors, backbone), **biases}, LAYERS, out=True))


def no_form(whose: str) -> str:
    return f"this eagle3 head cannot be written for {whose}, which would read another head"


def common_faults(
    config: Eagle3Config, *, three: bool = False, counted: bool = False, layers: bool = False
) -> Iterator[str]:
    """What hinders every reader, or those that know three taps, count outputs of layers, or one layer."""
    if list(config.taps) != sorted(set(config.taps)):
        yield f"taps are {list(config.taps)}, and they are taken in ascending order: train with them in order"
    if three and len(config.taps) != 3:
        yield f"it reads {len(config.taps)} hidden states, and three are expected: train with three of head.taps"
    if counted and 0 in config.taps:
        yield "taps include 0, the embedding, and only outputs of layers can be named: train with head.taps above 0"
    if config.head_layers > 1 and not layers:
        yield f"head_layers is {config.head_layers}, and one layer is read: train with head.head_layers=1"
    if config.norm_before_fc and config.fc_norm:
        yield "norm_before_fc and fc_norm are both true, and one of them is allowed: train with one of them"


def _cannot(config: Eagle3Config, *names: str) -> Iterator[str]:
    yield from (
        f"{name} is true, and there is no such switch: train with head.{name}=false"
        for name in names
        if getattr(config, name)
    )


def _shared_embedding(config: Eagle3Config, backbone: Backbone | None) -> Iterator[str]:
    """Readers that put the backbone's embedding in place of any other."""
    if config.own_width != config.hidden_size:
        return
    if config.embedding == "own":
        yield "embedding is own, and the backbone's is put in its place: train with head.embedding=shared"
    elif backbone is not None and scales_embedding(backbone):
        yield f"{backbone.name} scales its embedding, and the reader hands the head the rows alone; none can be trained"


def _with_scaled(config: Eagle3Config, tensors: Tensors, backbone: Backbone | None) -> Tensors:
    """With an embedding of its own where the backbone's is more than its rows."""
    if config.own_embedding or backbone is None or not scales_embedding(backbone):
        return dict(tensors)
    return {**tensors, "embed_tokens.weight": embedding_of(backbone).to(tensors["fc.weight"].dtype)}


def _config(config: Eagle3Config, tensors: Tensors, architecture: str, drop: tuple[str, ...] = ()) -> Config:
    made = llama_config(
        config,
        width=config.own_width,
        layers=config.head_layers,
        dtype=dtype_name(tensors),
        architecture=architecture,
    )
    if config.own_width != config.hidden_size:
        made["target_hidden_size"] = config.hidden_size
    made["draft_vocab_size"] = config.draft_vocab_size
    return {key: value for key, value in made.items() if key not in drop}


def _counted(config: Eagle3Config) -> Config:
    ids = [k - 1 for k in config.taps]
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}}


def _switches(config: Eagle3Config) -> Config:
    return {name: getattr(config, name) for name in ("norm_before_fc", "fc_norm", "norm_output")}


def prefixes(config: Eagle3Config) -> list[str]:
    return ["midlayer.", *(f"layers.{number}." for number in range(1, config.head_layers))]


WRITERS: dict[str, Callable[[Eagle3Config, Tensors, Backbone | None], Files]] = {
    "eagle": official,
    "specforge": specforge,
    "sglang": sglang,
    "modelopt": modelopt,
    "vllm": vllm,
}
