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

import math

import torch

from ..errors import UserError
from .backbone import Backbone
from .layouts import (
    Config,
    Found,
    Tensors,
    backbone_facts,
    embedding_of,
    flag,
    needed,
    number,
    same,
)
from .llama_config import (
    count_layers,
    head_width,
    layer_fields,
    unknown,
    vocab_size,
    without_frequencies,
)
from .names import Table, outward, renamed

LAYERS: Table = (("layers.0.{rest}", "midlayer.{rest}"),)
_AUX: Table = (
    ("aux_norm_low.{rest}", "fc_norm.0.{rest}"),
    ("aux_norm_mid.{rest}", "fc_norm.1.{rest}"),
    ("aux_norm_high.{rest}", "fc_norm.2.{rest}"),
)
SWITCHES = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")


def read(config: Config, tensors: Tensors, backbone: Backbone | None) -> Found:
    """A head in any of these layouts.

    Raises:
        UserError: something contradicts itself, is not known here, or cannot be known without the backbone.
    """
    inner = config.get("eagle_config") or {}
    _refuse_other_heads(config, inner, tensors)
    tensors, table = _own_names(tensors)
    tensors = without_frequencies(config, tensors)
    width = head_width(config, tensors)
    hidden = number(config, "target_hidden_size") or (backbone.hidden_size if backbone and not _own(tensors) else width)
    size = vocab_size(config, None) or _rows(tensors, "t2d") or vocab_size(config, backbone)
    if size is None:
        raise UserError("vocab_size is missing, and neither t2d nor a backbone tells it")
    notes = unknown(config)
    taps = _taps(config, inner, backbone, notes)
    if (states := number(config, "num_aux_hidden_states") or len(taps)) != len(taps):
        raise UserError(
            f"num_aux_hidden_states is {states}, and the layers are {list(taps)}, as named or else usual; name "
            "all of them in eagle_aux_hidden_state_layer_ids"
        )
    tensors, embedding = _embedding(tensors, backbone, width, hidden)
    tensors = _projection(config, tensors, backbone, size)
    draft = number(config, "draft_vocab_size") or _rows(tensors, "lm_head.weight") or size
    tensors = _maps(tensors, draft, size)
    fields = {
        **backbone_facts(backbone, str(config.get("base_model_name_or_path") or "")),
        **layer_fields(config, tensors, "midlayer.", width),
        **{name: flag(config, name) for name in SWITCHES},
        "norm_before_fc": flag(inner if "norm_before_fc" in inner else config, "norm_before_fc"),  # as engines do
        "hidden_size": hidden,
        "vocab_size": size,
        "draft_vocab_size": draft,
        "taps": taps,
        "width": None if width == hidden else width,
        "embedding": embedding,
        "head_layers": count_layers(config, tensors),
    }
    fields["fc_norm"] = fields["fc_norm"] or flag(config, "use_aux_norm")
    return Found("eagle3", fields, tensors, lambda name: outward(name, table), notes)


def _own_names(tensors: Tensors) -> tuple[Tensors, Table]:
    """Tensors by our names, and the table that leads back."""
    prefixed = any(name.startswith("model.") for name in tensors)
    table: Table = (*LAYERS, *_AUX)
    if any(name.startswith(("midlayer.", "model.midlayer.")) for name in tensors):
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
    has, tied = "lm_head.weight" in tensors, flag(config, "tie_word_embeddings")
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
    if t2d is not None and t2d.shape != (size,):
        raise UserError(f"t2d has shape {tuple(t2d.shape)}, and vocab_size is {size}: expected a mark for each token")
    trivial = (d2t is None or (len(d2t) == size and not d2t.any())) and (t2d is None or bool(t2d.all()))
    if draft == size and trivial:
        return rest
    if d2t is None:
        return {**rest, **({} if t2d is None else {"t2d": t2d})}
    d2t = d2t.long()
    if len(d2t) != draft:
        raise UserError(f"d2t has {len(d2t)} entries, and the head proposes {draft} tokens")
    _refuse_absolute(d2t, t2d, size)
    if t2d is None and draft < size:
        t2d = torch.zeros(size, dtype=torch.bool)
        ids = d2t + torch.arange(len(d2t))
        t2d[ids[(ids >= 0) & (ids < size)]] = True
    return {**rest, "d2t": d2t, **({} if t2d is None else {"t2d": t2d})}


def _refuse_absolute(d2t: torch.Tensor, t2d: torch.Tensor | None, size: int) -> None:
    """Token ids where offsets belong: `t2d` tells; without it, what no choice of tokens would give."""
    if t2d is not None:
        wrong = bool(d2t.any()) and torch.equal(t2d.nonzero().flatten(), d2t)
        wrong = wrong and not torch.equal(t2d.nonzero().flatten(), d2t + torch.arange(len(d2t)))
    else:
        steps = d2t.diff()
        # offsets that rise at each step, and not evenly, mean that no two neighbours among all tokens were chosen
        risen = bool((steps > 0).all()) and not bool((steps == steps[:1]).all())
        counted = len(d2t) > 1 and torch.equal(d2t, torch.arange(len(d2t)))
        wrong = counted or (risen and _log_odds(len(d2t), size) < -7)
    if wrong:
        raise UserError(
            "d2t holds token ids where offsets are expected (target id = draft id + d2t[draft id]), so engines would "
            "propose other tokens; subtract 0, 1, 2, … from it"
        )


def _log_odds(chosen: int, size: int) -> float:
    """Logarithm of the chance that a random choice holds no two neighbours."""
    if 2 * chosen > size + 1:
        return -math.inf
    return _log_choices(size - chosen + 1, chosen) - _log_choices(size, chosen)


def _log_choices(size: int, chosen: int) -> float:
    return math.lgamma(size + 1) - math.lgamma(chosen + 1) - math.lgamma(size - chosen + 1)


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
