"""EAGLE-1 and EAGLE-2 heads as other tools store them; the two are one layout.

Sources: SafeAILab/EAGLE (official), vLLM 0.32.0, SGLang 0.5.23. The official config says with `bias` whether states are
joined with a bias, and means yes where it says nothing; vLLM has none and drops it without a word; SGLang always has
one. The official file holds a copy of the backbone's embedding.

Letters: H width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

from ..errors import UserError
from .backbone import Backbone
from .eagle1 import Eagle1Config
from .layouts import (
    Config,
    Files,
    Found,
    Tensors,
    backbone_facts,
    embedding_of,
    flag,
    full_vocabulary,
    needed,
    refuse,
    same,
    scales_embedding,
)
from .llama_config import (
    count_layers,
    dtype_name,
    filled_biases,
    head_width,
    layer_faults,
    layer_fields,
    llama_config,
    unknown,
    vocab_size,
    without_frequencies,
)
from .names import Table, outward, renamed

_PREFIX: Table = (("model.{rest}", "{rest}"),)
_SGLANG = "LlamaForCausalLMEagle"


def read(config: Config, tensors: Tensors, backbone: Backbone | None) -> Found:
    """A head in any of these layouts.

    Raises:
        UserError: something contradicts itself, or cannot be known without the backbone.
    """
    prefixed = any(name.startswith("model.") for name in tensors)
    tensors = without_frequencies(config, _without_copies(renamed(tensors, _PREFIX), backbone))
    size, width = vocab_size(config, backbone), head_width(config, tensors)
    if size is None:
        raise UserError("vocab_size is missing, and no backbone tells it")
    notes = unknown(config)
    fields = {
        **backbone_facts(backbone, str(config.get("base_model_name_or_path") or "")),
        **layer_fields(config, tensors, "layers.0.", width),
        "hidden_size": width,
        "vocab_size": size,
        "draft_vocab_size": size,
        "fc_bias": _fc_bias(config, tensors, notes),
        "head_layers": count_layers(config, tensors),
    }
    return Found("eagle1", fields, tensors, (lambda n: outward(n, _PREFIX)) if prefixed else str, notes)


def _without_copies(tensors: Tensors, backbone: Backbone | None) -> Tensors:
    """Without the backbone's embedding and projection, if they are the backbone's."""
    lent: dict[str, Callable[[Backbone], object]] = {
        "embed_tokens.weight": embedding_of,
        "lm_head.weight": lambda backbone: backbone.output_weight.detach().cpu(),
    }
    for name, original in lent.items():
        if name in tensors:
            model = needed(backbone, f"the file holds {name}, which has to be compared with the backbone's")
            if not same(tensors[name], original(model)):  # type: ignore[arg-type]
                raise UserError(
                    f"{name} is not that of {model.name}, so the head was made for another backbone; heads of this "
                    "kind have none of their own"
                )
    return {name: one for name, one in tensors.items() if name not in lent}


def _fc_bias(config: Config, tensors: Tensors, notes: list[str]) -> bool:
    said, has = None if config.get("bias") is None else flag(config, "bias"), "fc.bias" in tensors
    if said is False and has:
        raise UserError("bias is false, and the file holds fc.bias: with or without it?")
    if said is None and not has and _SGLANG not in (config.get("architectures") or []):
        notes.append(
            "config.json does not say bias, which the official code takes for true, and there is no fc.bias: read as a "
            "head without"
        )
        return False
    return bool(said) or has or said is None


def official(config: Eagle1Config, tensors: Tensors, backbone: Backbone | None) -> Files:
    """SafeAILab's own."""
    able = frozenset(("act", "attention_bias"))
    faults = [
        *full_vocabulary(config),
        *layer_faults(config, config.hidden_size, able, ("default", "linear", "dynamic")),
    ]
    refuse(_no_form("EAGLE"), faults)
    model = needed(backbone, "the official layout holds a copy of the backbone's embedding")
    made = _config(config, tensors, "LlamaForCausalLM") | {"bias": config.fc_bias, "qkv_bias": config.attention_bias}
    made = {key: value for key, value in made.items() if key not in ("attention_bias", "mlp_bias")}
    embedding = embedding_of(model).to(tensors["fc.weight"].dtype)
    return Files(made, {"embed_tokens.weight": embedding, **tensors}, "pytorch_model.bin")


def vllm(config: Eagle1Config, tensors: Tensors, backbone: Backbone | None) -> Files:
    """vLLM's."""
    able = frozenset(("head_dim", "attention_bias", "output_bias", "mlp_bias"))
    faults = [*full_vocabulary(config), *layer_faults(config, config.hidden_size, able, ())]
    if config.fc_bias and tensors["fc.bias"].any():
        faults.append("fc_bias is true, and vLLM drops it without a word: train with head.fc_bias=false")
    refuse(_no_form("vLLM"), faults)
    made = _config(config, tensors, "LlamaForCausalLM") | {"bias": False, "attention_bias": config.output_bias}
    if config.attention_bias != config.output_bias:
        made["qkv_bias"] = config.attention_bias
    kept = {name: one for name, one in tensors.items() if name != "fc.bias"}
    if backbone is not None and scales_embedding(backbone):
        kept["embed_tokens.weight"] = embedding_of(backbone).to(tensors["fc.weight"].dtype)
    return Files(made, kept)


def sglang(config: Eagle1Config, tensors: Tensors, backbone: Backbone | None) -> Files:
    """SGLang's."""
    able = frozenset(("head_dim", "attention_bias", "output_bias"))
    faults = [*full_vocabulary(config), *layer_faults(config, config.hidden_size, able, ())]
    if config.head_layers > 1:
        faults.append(f"head_layers is {config.head_layers}, and one layer is read: train with head.head_layers=1")
    if backbone is not None and scales_embedding(backbone):
        faults.append(f"{backbone.name} scales its embedding, and SGLang hands the head the rows alone")
    refuse(_no_form("SGLang"), faults)
    bias = {} if config.fc_bias else {"fc.bias": tensors["fc.weight"].new_zeros(config.hidden_size)}
    biases = filled_biases(config, tensors, ["layers.0."])
    return Files(_config(config, tensors, _SGLANG), {**tensors, **bias, **biases})


def _no_form(whose: str) -> str:
    return f"this eagle1 head cannot be written for {whose}, which would read another head"


def _config(config: Eagle1Config, tensors: Tensors, architecture: str) -> Config:
    return llama_config(
        config,
        width=config.hidden_size,
        layers=config.head_layers,
        dtype=dtype_name(tensors),
        architecture=architecture,
    )


WRITERS: dict[str, Callable[[Eagle1Config, Tensors, Backbone | None], Files]] = {
    "eagle": official,
    "vllm": vllm,
    "sglang": sglang,
}
