"""Hydra heads as their authors store them: `hydra_lm_head.pt`.

Source: zankner/Hydra. The prefix layer is called `prefix_embeding_layer` there, and its blocks are counted with the
dropouts between them. A file may hold the embedding that it was trained with, which is the backbone's.

Letters: H width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

from ..errors import UserError
from .backbone import Backbone
from .hydra import HydraConfig
from .layer import LayerConfig
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
    number,
    plain_projection,
    refuse,
    same,
)
from .llama_config import dtype_name, without_frequencies
from .names import Table, outward, renamed

_BARE: Table = (("hydra_head.{rest}", "{rest}"),)
_MLP: Table = (
    ("hydra_mlp.{i}.{j}.{p}", "heads.{i}.{j}.{p}"),
    ("hydra_lm_head.{i}.{p}", "projections.{i}.{p}"),
)
_PREFIX_LAYER: Table = (
    ("prefix_embeding_layer.layers.0.{p}", "prefix.{p}"),
    ("prefix_embeding_layer.norm.{p}", "norm.{p}"),
    ("hydra_lm_head.{i}.1.{p}", "projections.{i}.{p}"),
)
_ARCHES = ("mlp", "prefix-mlp")


def _table(arch: str, blocks: int) -> Table:
    if arch == "mlp":
        return _MLP
    dropped = tuple((f"hydra_mlp.{{i}}.{2 * j + 1}.{{p}}", f"heads.{{i}}.{j}.{{p}}") for j in range(blocks))
    return (*_PREFIX_LAYER, *dropped)


def read(config: Config, tensors: Tensors, backbone: Backbone | None) -> Found:
    """Hydra or Hydra++ heads.

    Raises:
        UserError: they are of another kind, contradict themselves, or belong to another backbone.
    """
    model = needed(backbone, "the file does not say how its backbone is shaped")
    tensors = renamed(tensors, _BARE)
    prefix = any(name.startswith("prefix_embeding_layer.") for name in tensors)
    arch = config.get("hydra_head_arch") or ("prefix-mlp" if prefix else "mlp")
    _refuse_others(config, arch)
    first = sorted({int(name.split(".")[2]) for name in tensors if name.startswith("hydra_mlp.0.")})
    if not first:
        raise UserError("hydra_mlp.0 is missing: the blocks of the first head")
    blocks = number(config, "hydra_num_layers") or len(first)
    table = _table(arch, blocks)
    shape = HydraConfig.shape(model)
    found = without_frequencies(shape, renamed(_without_embedding(tensors, model), table))
    own = any(name.startswith("projections.") for name in found)
    heads = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("hydra_mlp."))
    # a joining block without a residual matrix would need widths that are equal, which they never are
    fields = {
        **shape,
        **backbone_facts(backbone, str(config.get("base_model_name_or_path") or "")),
        "num_heads": number(config, "hydra_num_heads") or heads,
        "num_blocks": blocks,
        "head_arch": arch,
        "projection": "own" if own else "shared",
        "projection_bias": any(name.startswith("projections.") and name.endswith(".bias") for name in found),
    }
    if not own and config.get("hydra_num_heads"):
        raise UserError(f"{outward('projections.0.weight', table)} and its like are missing")
    return Found("hydra", fields, found, lambda name: outward(name, table))


def _refuse_others(config: Config, arch: str) -> None:
    if arch not in _ARCHES:
        raise UserError(f"hydra_head_arch is {arch!r}; known here are {' and '.join(_ARCHES)}")
    if config.get("grounded_heads") is not None and not flag(config, "grounded_heads"):
        raise UserError("grounded_heads is false: such heads read no drafted tokens, and are not known here")
    if config.get("hidden_state_offset") not in (None, 0):
        raise UserError(
            f"hidden_state_offset is {config['hidden_state_offset']}; heads here read the last hidden state"
        )


def _without_embedding(tensors: Tensors, backbone: Backbone) -> Tensors:
    """Without the embedding that is the backbone's, and the prefix layer's, which nothing reads."""
    name = "input_embed_fn.weight"
    if name in tensors and not same(tensors[name], embedding_of(backbone)):
        raise UserError(f"{name} is not that of {backbone.name}, so the heads were made for another backbone")
    unread = (name, "prefix_embeding_layer.embed_tokens.weight")
    return {name: one for name, one in tensors.items() if name not in unread}


def write(config: HydraConfig, tensors: Tensors, backbone: Backbone | None) -> Files:
    """Each head with a projection and its bias."""
    faults = [*full_vocabulary(config, "they propose")]
    if config.head_arch == "prefix-mlp":
        faults += _prefix_faults(config, backbone)
    refuse(_NO_FORM, faults)
    kept = dict(tensors)
    rows = None
    if config.projection == "shared":
        model = needed(backbone, "each head has a projection in this format, and theirs is the backbone's")
        if not plain_projection(model) and model.output_bias is None:
            refuse(_NO_FORM, [f"{model.name} scales or caps its logits: train with head.projection=own"])
        rows = model.output_weight.detach().cpu().to(dtype=next(iter(tensors.values())).dtype)
    for head in range(config.num_heads):
        if rows is not None:
            kept[f"projections.{head}.weight"] = rows
            if backbone is not None and backbone.output_bias is not None:
                kept[f"projections.{head}.bias"] = backbone.output_bias.detach().cpu().to(rows.dtype)
        weight = kept[f"projections.{head}.weight"]
        kept.setdefault(f"projections.{head}.bias", weight.new_zeros(len(weight)))
    made = {
        "hydra_num_heads": config.num_heads,
        "hydra_num_layers": config.num_blocks,
        "hydra_head_arch": config.head_arch,
        "base_model_name_or_path": config.backbone,
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "torch_dtype": dtype_name(kept),
    }
    return Files(made, renamed(kept, _table(config.head_arch, config.num_blocks), out=True), "hydra_lm_head.pt")


_NO_FORM = "these hydra heads cannot be written for Hydra, which would read others"


def _prefix_faults(config: HydraConfig, backbone: Backbone | None) -> list[str]:
    """The file does not say how the prefix layer is shaped: it is the backbone's own kind of layer."""
    model = needed(backbone, "the prefix layer takes its shape from the backbone")
    return [
        f"{name} is {getattr(config, name)}, and the prefix layer's is the backbone's, {own}: train without head.{name}"
        for name, own in LayerConfig.shape(model).items()
        if name != "draft_vocab_size" and getattr(config, name) != own
    ]


WRITERS: dict[str, Callable[[HydraConfig, Tensors, Backbone | None], Files]] = {"hydra": write}
