"""EAGLE-3 heads as other tools store them: one set of tensors, and as many ways of counting and naming.

Sources: SafeAILab/EAGLE (official), SpecForge 0.2.0, SGLang 0.5.23, vLLM 0.32.0, NVIDIA Model-Optimizer; vLLM's
speculators format wraps the same and has `speculators_layout.py`.

- Layers whose states are fused: ours, vLLM's and the papers' k is hidden state k, the input of layer k. SGLang,
  SpecForge and ModelOpt write in `eagle_config` the layer whose output is taken, k - 1. Files that name none mean 2,
  N // 2 and N - 3 of N layers.
- `d2t` holds offsets everywhere; `t2d` is missing in ModelOpt's files. A full vocabulary has neither, or trivial ones.
- The embedding is the backbone's where the file has none, or an equal one.

Letters: N layers of the backbone, H its width, W width of the head, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ..errors import UserError
from .backbone import Backbone
from .eagle3 import Eagle3Config
from .layouts import (
    Config,
    Files,
    Found,
    Tensors,
    backbone_facts,
    embedding_of,
    needed,
    refuse,
    same,
    scales_embedding,
)
from .llama_config import (
    dtype_name,
    filled_biases,
    head_width,
    layer_faults,
    layer_fields,
    llama_config,
    unknown_keys,
    vocab_size,
)
from .names import Table, outward, renamed

LAYERS: Table = (("layers.0.{rest}", "midlayer.{rest}"),)
_AUX: Table = (
    ("aux_norm_low.{rest}", "fc_norm.0.{rest}"),
    ("aux_norm_mid.{rest}", "fc_norm.1.{rest}"),
    ("aux_norm_high.{rest}", "fc_norm.2.{rest}"),
)
SWITCHES = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")


# -- reading ----------------------------------------------------------------------------------------------------------


def read(config: Config, tensors: Tensors, backbone: Backbone | None) -> Found:
    """A head in any of these layouts.

    Raises:
        UserError: something contradicts itself, is not known here, or cannot be known without the backbone.
    """
    inner = config.get("eagle_config") or {}
    _refuse_other_heads(config, inner, tensors)
    tensors, table = _own_names(tensors)
    width = head_width(config, tensors)
    hidden = config.get("target_hidden_size") or (backbone.hidden_size if backbone and not _own(tensors) else width)
    size = vocab_size(config, None) or _rows(tensors, "t2d") or vocab_size(config, backbone)
    if size is None:
        raise UserError("vocab_size is missing, and neither t2d nor a backbone tells it")
    notes = (
        [f"unknown in the config, and not heeded: {', '.join(unknown)}"] if (unknown := unknown_keys(config)) else []
    )
    taps = _taps(config, inner, backbone, notes)
    tensors, embedding = _embedding(tensors, backbone, width, hidden)
    tensors = _projection(config, tensors, backbone, size)
    draft = config.get("draft_vocab_size") or _rows(tensors, "lm_head.weight") or size
    tensors = _maps(tensors, draft, size)
    fields = {
        **backbone_facts(backbone, str(config.get("base_model_name_or_path") or "")),
        **layer_fields(config, tensors, "midlayer.", width),
        **{name: bool(config.get(name, False)) for name in SWITCHES},
        "hidden_size": hidden,
        "vocab_size": size,
        "draft_vocab_size": draft,
        "taps": taps,
        "width": None if width == hidden else width,
        "embedding": embedding,
        "head_layers": config.get("num_hidden_layers") or 1,
    }
    fields["fc_norm"] = fields["fc_norm"] or bool(config.get("use_aux_norm"))
    return Found("eagle3", fields, tensors, lambda name: outward(name, table), notes)


def _own_names(tensors: Tensors) -> tuple[Tensors, Table]:
    """Tensors by our names, and the table that leads back."""
    prefixed = any(name.startswith("model.") for name in tensors)
    table: Table = (*LAYERS, *_AUX)
    if "midlayer.self_attn.o_proj.weight" in tensors or "model.midlayer.self_attn.o_proj.weight" in tensors:
        table = _AUX
    if prefixed:
        tensors = renamed(tensors, (("model.{rest}", "{rest}"),))
    found = renamed(tensors, (*LAYERS, *_AUX))
    for name in [name for name in found if name.startswith("layers.") and name.endswith(".hidden_norm.weight")]:
        other = name.replace("hidden_norm", "input_layernorm")
        if other not in found:  # SGLang's name for the norm before the attention of upper layers
            found[other] = found.pop(name)
    if any(name.startswith("aux_norm") for name in tensors):
        return found, table
    return found, tuple(line for line in table if line not in _AUX)


def _taps(config: Config, inner: Config, backbone: Backbone | None, notes: list[str]) -> tuple[int, ...]:
    top, low = config.get("eagle_aux_hidden_state_layer_ids"), inner.get("eagle_aux_hidden_state_layer_ids")
    if top and low and list(low) not in (list(top), [k - 1 for k in top]):
        raise UserError(f"eagle_aux_hidden_state_layer_ids is {top}, and in eagle_config {low}; which is it?")
    if top:
        return tuple(top)
    if low:
        if low[0] == 2:  # SGLang's numbers begin with 1: 2 is where vLLM's do
            layers = needed(backbone, f"eagle_config counts layers as {low}, which may be meant in two ways").num_layers
            if tuple(low) == implied_taps(layers):
                notes.append(
                    f"layers {list(low)} in eagle_config are read as hidden states, since they are the usual three; "
                    "SGLang would take the outputs of these layers, one further up"
                )
                return tuple(low)
        return tuple(k + 1 for k in low)
    count = needed(backbone, "the file does not say which layers it reads, which follows from their number").num_layers
    taps = implied_taps(count)
    if len(set(taps)) < 3 or list(taps) != sorted(taps):
        raise UserError(
            f"the file does not say which layers it reads, and of {count} the usual 2, N // 2 and N - 3 are no three; "
            "add eagle_aux_hidden_state_layer_ids to its config.json (k: the output of layer k - 1)"
        )
    return taps


def implied_taps(layers: int) -> tuple[int, int, int]:
    """What files mean that name no layers."""
    return 2, layers // 2, layers - 3


def _embedding(tensors: Tensors, backbone: Backbone | None, width: int, hidden: int) -> tuple[Tensors, str]:
    """Without the embedding if it is the backbone's."""
    if "embed_tokens.weight" not in tensors:
        return tensors, "shared" if width == hidden else "own"
    if backbone is not None and width == hidden and same(tensors["embed_tokens.weight"], embedding_of(backbone)):
        return {name: one for name, one in tensors.items() if name != "embed_tokens.weight"}, "shared"
    return tensors, "own"


def _projection(config: Config, tensors: Tensors, backbone: Backbone | None, size: int) -> Tensors:
    """With the projection that the config says is another one's."""
    has, tied = "lm_head.weight" in tensors, bool(config.get("tie_word_embeddings"))
    embedding = tensors.get("embed_tokens.weight")
    if has and tied and embedding is not None and not same(tensors["lm_head.weight"], embedding):
        raise UserError("tie_word_embeddings is true, and lm_head.weight differs from embed_tokens.weight")
    if has and tied and embedding is None:
        raise UserError(
            "tie_word_embeddings is true, and the file has an lm_head.weight of its own: engines would take the "
            "embedding in its place. Set it to false if the head was trained with what it holds"
        )
    if has or not (tied or ("draft_vocab_size" in config and config["draft_vocab_size"] is None)):
        return tensors
    lent = embedding
    if not tied or lent is None:
        model = needed(backbone, "the file borrows its output projection from the backbone")
        lent = embedding_of(model) if tied else model.output_weight.detach().cpu()
    return {**tensors, "lm_head.weight": lent.clone()}


def _maps(tensors: Tensors, draft: int, size: int) -> Tensors:
    """With both maps, or with none for a full vocabulary."""
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    rest = {name: one for name, one in tensors.items() if name not in ("d2t", "t2d")}
    if d2t is not None and (d2t.is_floating_point() or d2t.dtype == torch.bool or d2t.ndim != 1):
        raise UserError(
            f"d2t is {str(d2t.dtype).removeprefix('torch.')} {tuple(d2t.shape)}; expected offsets, int64 (Vd,)"
        )
    if t2d is not None and t2d.dtype != torch.bool:
        if t2d.is_floating_point() or bool(((t2d != 0) & (t2d != 1)).any()):
            raise UserError(f"t2d is {str(t2d.dtype).removeprefix('torch.')}; expected bool marks of the {size} tokens")
        t2d = t2d.bool()
    trivial = (d2t is None or (len(d2t) == size and not d2t.any())) and (t2d is None or bool(t2d.all()))
    if draft == size and trivial and (t2d is None or len(t2d) == size):
        return rest
    if d2t is None:
        return {**rest, **({} if t2d is None else {"t2d": t2d})}
    d2t = d2t.long()
    _refuse_absolute(d2t, t2d)
    if t2d is None and draft < size:
        t2d = torch.zeros(size, dtype=torch.bool)
        ids = d2t + torch.arange(len(d2t))
        t2d[ids[(ids >= 0) & (ids < size)]] = True
    return {**rest, "d2t": d2t, **({} if t2d is None else {"t2d": t2d})}


def _refuse_absolute(d2t: torch.Tensor, t2d: torch.Tensor | None) -> None:
    """Token ids where offsets belong."""
    counted = len(d2t) > 1 and torch.equal(d2t, torch.arange(len(d2t)))
    told = t2d is not None and bool(d2t.any()) and torch.equal(t2d.nonzero().flatten(), d2t)
    if counted or told:
        raise UserError(
            "d2t holds token ids where offsets are expected (target id = draft id + d2t[draft id]), so engines would "
            "propose other tokens; subtract 0, 1, 2, … from it"
        )


def _own(tensors: Tensors) -> bool:
    return "embed_tokens.weight" in tensors


def _rows(tensors: Tensors, name: str) -> int | None:
    return len(tensors[name]) if name in tensors and tensors[name].ndim else None


def _refuse_other_heads(config: Config, inner: Config, tensors: Tensors) -> None:
    if any(name.endswith("mask_hidden") for name in tensors):
        raise UserError("the head drafts all tokens in parallel (P-EAGLE, it has mask_hidden); such are not known here")
    odd = {
        "use_aux_hidden_state": (True,), "use_input_layernorm_in_first_layer": (True,), "use_last_layernorm": (True,),
        "use_mtp_layernorm": (False,), "next_layer_regular": (True,), "parallel_draft_step": (1,),
        "parallel_draft_heads_num_layers": (0, 1),
    }  # fmt: skip
    for name, fine in odd.items():
        if inner.get(name) is not None and inner[name] not in fine:
            raise UserError(f"eagle_config says {name}: {inner[name]!r}; such heads are not known here")


# -- writing ----------------------------------------------------------------------------------------------------------


def official(config: Eagle3Config, tensors: Tensors, backbone: Backbone | None) -> Files:
    """SafeAILab's own."""
    faults = [
        *_common(config, three=True),
        *_cannot(config, *SWITCHES),
        *layer_faults(config, config.own_width, frozenset(("act",)), ("default", "linear", "dynamic")),
    ]
    if not config.num_layers or config.taps != implied_taps(config.num_layers):
        wanted = list(implied_taps(config.num_layers)) if config.num_layers else "the usual three"
        faults.append(f"taps are {list(config.taps)}, and it reads {wanted} always: train with head.taps={wanted}")
    refuse(_no_form("EAGLE"), faults)
    made = _config(config, tensors, "LlamaForCausalLM", drop=("attention_bias", "mlp_bias"))
    return Files(made, _with_scaled(config, tensors, backbone))


def specforge(config: Eagle3Config, tensors: Tensors, backbone: Backbone | None) -> Files:
    """SpecForge's, which always has both maps and never an embedding."""
    faults = [
        *_common(config, three=True, counted=True),
        *_cannot(config, "norm_before_fc", "norm_before_residual", "norm_output"),
        *layer_faults(
            config, config.own_width, frozenset(("act", "head_dim")), ("default", "linear", "dynamic", "llama3", "yarn")
        ),
        *_shared_embedding(config, backbone),
    ]
    refuse(_no_form("SpecForge"), faults)
    made = _config(config, tensors, "LlamaForCausalLMEagle3") | _counted(config) | {"fc_norm": config.fc_norm}
    trivial = {
        "d2t": torch.zeros(config.draft_vocab_size, dtype=torch.long),
        "t2d": torch.ones(config.vocab_size, dtype=torch.bool),
    }
    return Files(made, {**trivial, **tensors} if "d2t" not in tensors else dict(tensors))


def sglang(config: Eagle3Config, tensors: Tensors, backbone: Backbone | None) -> Files:
    """SGLang's."""
    faults = [
        *_common(config, counted=True),
        *_cannot(config, "norm_before_residual"),
        *layer_faults(config, config.own_width, frozenset(("head_dim",)), ()),
        *_shared_embedding(config, backbone),
    ]
    if len(config.taps) * config.hidden_size == config.own_width:
        faults.append("its fused states are as wide as the head, so SGLang would not fuse them: train with more taps")
    refuse(_no_form("SGLang"), faults)
    made = _config(config, tensors, "LlamaForCausalLMEagle3") | _counted(config) | _switches(config)
    made["num_aux_hidden_states"] = len(config.taps)
    return Files(made, dict(tensors))


def modelopt(config: Eagle3Config, tensors: Tensors, backbone: Backbone | None) -> Files:
    """NVIDIA Model-Optimizer's."""
    faults = [
        *_common(config, three=True, counted=True),
        *_cannot(config, *SWITCHES),
        *layer_faults(config, config.own_width, frozenset(("head_dim",)), ()),
        *_shared_embedding(config, backbone),
    ]
    if config.own_width != config.hidden_size:
        faults.append(f"width is {config.own_width}, and it knows the backbone's alone: train without head.width")
    refuse(_no_form("Model-Optimizer"), faults)
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
        *_common(config, three=True, layers=True),
        *layer_faults(config, config.own_width, able, ()),
    ]
    refuse(_no_form("vLLM"), faults)
    architecture = "Eagle3Qwen3ForCausalLM" if config.qk_norm == "head" else "LlamaForCausalLMEagle3"
    made = _config(config, tensors, architecture) | _switches(config)
    made |= {"norm_before_residual": config.norm_before_residual}
    made["eagle_aux_hidden_state_layer_ids"] = list(config.taps)
    biases = filled_biases(config, tensors, _prefixes(config))
    return Files(made, renamed({**_with_scaled(config, tensors, backbone), **biases}, LAYERS, out=True))


def _no_form(whose: str) -> str:
    return f"this eagle3 head cannot be written for {whose}, which would read another head"


def _common(config: Eagle3Config, *, three: bool = False, counted: bool = False, layers: bool = False) -> Iterator[str]:
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


def _prefixes(config: Eagle3Config) -> list[str]:
    return ["midlayer.", *(f"layers.{number}." for number in range(1, config.head_layers))]


WRITERS: dict[str, Callable[[Eagle3Config, Tensors, Backbone | None], Files]] = {
    "eagle": official,
    "specforge": specforge,
    "sglang": sglang,
    "modelopt": modelopt,
    "vllm": vllm,
}
