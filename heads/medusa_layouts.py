"""Medusa heads as other tools store them.

Sources: FasterDecoding/Medusa (official, versions 1 and 2; Medusa-2 inside the shards of a whole model), vLLM 0.32.0
and older, TensorRT-LLM. All hold the same residual blocks; they differ in names, and in whose projection is read.

Letters: H width, V vocabulary, Vd draft vocabulary, L blocks of a head.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import torch

from ..errors import UserError
from .backbone import Backbone
from .layouts import (
    Config,
    Files,
    Found,
    Tensors,
    backbone_facts,
    flag,
    full_vocabulary,
    needed,
    number,
    plain_projection,
    refuse,
    same,
)
from .llama_config import dtype_name
from .medusa import MedusaConfig
from .names import Table, outward, renamed

_TRT: Table = (
    ("medusa_heads.{i}.medusa_layers.{j}.linear.{p}", "heads.{i}.{j}.linear.{p}"),
    ("medusa_heads.{i}.lm_head.{p}", "projections.{i}.{p}"),
)
_VLLM: Table = (
    ("blocks.{i}.layers.{j}.{p}", "heads.{i}.{j}.linear.{p}"),
    ("lm_heads.{i}.{p}", "projections.{i}.{p}"),
)
_HEADS = ("medusa_num_heads", "num_medusa_heads", "num_heads")
MODEL_SHARD = "model-medusa.safetensors"


def _official(blocks: int, prefix: str = "") -> Table:
    return (
        (f"{prefix}{{i}}.{blocks}.{{p}}", "projections.{i}.{p}"),
        (f"{prefix}{{i}}.{{j}}.linear.{{p}}", "heads.{i}.{j}.linear.{p}"),
    )


# -- reading ----------------------------------------------------------------------------------------------------------


def read(config: Config, tensors: Tensors, backbone: Backbone | None) -> Found:
    """Official names, with whatever prefix; a whole model's other tensors are not given."""
    prefix = next((p for p in ("medusa_head.", "medusa_heads.", "model.") if any(n.startswith(p) for n in tensors)), "")
    said, seen = _number(config, "medusa_num_layers"), _blocks(tensors, r"\d+\.(\d+)\.linear\.")
    table = _official(said or seen, prefix)
    found = renamed(tensors, table)
    own = any(name.startswith("projections.") for name in found)
    if (version := str(config.get("version") or 1)) not in ("1", "2"):
        raise UserError(f"version is {version}; known here are 1 and 2")
    second = version == "2"
    if own and second:
        raise UserError("config.json says version 2, which has no projections, and the file holds some: which counts?")
    if not own and not second and "medusa_num_heads" in config:
        wanted = outward("projections.0.weight", table)
        raise UserError(f"{wanted} and its like are missing, and config.json does not say version 2, which has none")
    return _found(config, found, backbone, table, said or seen)


def read_tensorrt(config: Config, tensors: Tensors, backbone: Backbone | None) -> Found:
    """TensorRT-LLM's names."""
    blocks = _number(config, "num_medusa_layers", "medusa_num_layers") or _blocks(tensors, r"medusa_layers\.(\d+)\.")
    return _found(config, renamed(tensors, _TRT), backbone, _TRT, blocks)


def read_vllm(config: Config, tensors: Tensors, backbone: Backbone | None) -> Found:
    """vLLM's names, with a shared projection or a truncated vocabulary."""
    if config.get("logit_scale") not in (None, 1, 1.0):
        raise UserError(f"logit_scale is {config['logit_scale']}; heads here scale no logits")
    prefixed = any(name.startswith("medusa_heads.") for name in tensors)
    found = renamed(renamed(tensors, (("medusa_heads.{rest}", "{rest}"),)), _VLLM)
    blocks = _number(config, "num_hidden_layers", "medusa_num_layers") or _blocks(found, r"heads\.\d+\.(\d+)\.")
    found = _with_biases(config, found)
    found = _with_map(config, found, backbone)
    heads = _number(config, *_HEADS) or _count(found)
    table = _VLLM
    found = _with_one_projection(config, found)
    if "lm_head.weight" in found:
        shared = found.pop("lm_head.weight")
        if not (backbone is not None and _lent(shared, backbone, found)):
            found |= {f"projections.{head}.weight": shared.clone() for head in range(heads)}
        table = (_VLLM[0], ("lm_head.{p}", "projections.{i}.{p}"))
    if prefixed:
        table = tuple((f"medusa_heads.{file}", own) for file, own in table)
    return _found(config, found, backbone, table, blocks)


def _found(config: Config, tensors: Tensors, backbone: Backbone | None, table: Table, blocks: int) -> Found:
    first = tensors.get("heads.0.0.linear.weight")
    if first is None:
        raise UserError(f"{outward('heads.0.0.linear.weight', table)} is missing: the first block of the first head")
    projection = tensors.get("projections.0.weight")
    size = _number(config, "vocab_size") or (backbone.vocab_size if backbone else None)
    size = size or (len(projection) if projection is not None and "d2t" not in tensors else None)
    if size is None:
        size = needed(backbone, "neither config.json nor the file says how large the vocabulary is").vocab_size
    own = any(name.startswith("projections.") for name in tensors)
    fields = {
        **backbone_facts(backbone, str(config.get("base_model_name_or_path") or "")),
        "hidden_size": _number(config, "hidden_size") or int(first.shape[-1]),
        "vocab_size": size,
        "draft_vocab_size": len(tensors["d2t"]) if "d2t" in tensors else size,
        "num_heads": _number(config, *_HEADS) or _count(tensors),
        "num_blocks": blocks,
        "projection": "own" if own else "shared",
    }
    return Found("medusa", fields, tensors, lambda name: outward(name, table))


def _number(config: Config, *names: str) -> int | None:
    """What the config says under whichever of these names."""
    said = {name: value for name in names if (value := number(config, name)) is not None}
    if len(set(said.values())) > 1:
        raise UserError(" and ".join(f"{name} is {value}" for name, value in said.items()) + "; which is it?")
    return next(iter(said.values()), None)


def _blocks(tensors: Tensors, pattern: str) -> int:
    found = [int(m[1]) for name in tensors if (m := re.search(pattern, name))]
    return max(found, default=0) + 1


def _count(tensors: Tensors) -> int:
    return 1 + max((int(name.split(".")[1]) for name in tensors if name.startswith("heads.")), default=0)


def _with_biases(config: Config, tensors: Tensors) -> Tensors:
    """With biases of zero where the layout says that there are none."""
    biases = [name for name in tensors if name.startswith("heads.") and name.endswith(".bias")]
    said = flag(config, "medusa_fc_bias")
    if biases and not said and config:
        raise UserError(
            f"medusa_fc_bias is {config.get('medusa_fc_bias')}, and the file holds {outward(biases[0], _VLLM)}, which "
            "vLLM then drops without a word; set it to true if the heads were trained with biases"
        )
    if biases or said:
        return tensors
    weights = [name for name in tensors if name.startswith("heads.") and name.endswith(".weight")]
    return tensors | {name.replace(".weight", ".bias"): tensors[name].new_zeros(len(tensors[name])) for name in weights}


def _with_one_projection(config: Config, tensors: Tensors) -> Tensors:
    """With the one of all heads by its own name; vLLM takes the first head's where all are said to read one."""
    said, own = flag(config, "original_lm_head"), [name for name in tensors if name.startswith("projections.")]
    if "lm_head.weight" in tensors:
        if config and not said:
            raise UserError(
                "original_lm_head is not true, and the file holds lm_head.weight, which vLLM then drops without a "
                "word; set it to true if all heads read it"
            )
        return tensors
    if not said:
        return tensors
    first = tensors.get("projections.0.weight")
    if first is None:
        raise UserError("original_lm_head is true, and lm_head.weight is missing: vLLM does not take the backbone's")
    other = next((name for name in own if not tensors[name].equal(first)), None)
    if other is not None:
        raise UserError(
            f"original_lm_head is true, and {outward(other, _VLLM)} differs from lm_heads.0.weight, which vLLM takes "
            "for all heads; set it to false if each head has its own"
        )
    return {name: one for name, one in tensors.items() if name not in own} | {"lm_head.weight": first}


def _with_map(config: Config, tensors: Tensors, backbone: Backbone | None) -> Tensors:
    """With the token ids of a truncated vocabulary as our maps."""
    rest = {name: one for name, one in tensors.items() if name != "token_map"}
    ids = tensors.get("token_map")
    size = _number(config, "vocab_size") or (backbone.vocab_size if backbone else None)
    truncated = _number(config, "truncated_vocab_size")
    if ids is None:
        if truncated is not None and size is not None and truncated != size:
            raise UserError(f"token_map is missing: truncated_vocab_size is {truncated} of {size} tokens")
        return rest
    size = size or needed(backbone, "config.json does not say how large the vocabulary is").vocab_size
    if ids.ndim != 1 or ids.is_floating_point() or (truncated is not None and len(ids) != truncated):
        raise UserError(f"token_map has shape {tuple(ids.shape)}; expected {truncated} token ids")
    ids = ids.long()
    if len(ids) == size and torch.equal(ids, torch.arange(size)):
        return rest
    marks = torch.zeros(size, dtype=torch.bool)
    marks[ids[(ids >= 0) & (ids < size)]] = True
    return {**rest, "d2t": ids - torch.arange(len(ids)), "t2d": marks}


def _lent(shared: torch.Tensor, backbone: Backbone, tensors: Tensors) -> bool:
    """Whether one projection for all heads is the backbone's."""
    rows = backbone.output_weight.detach().cpu()
    if "d2t" in tensors:
        ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        if bool(((ids < 0) | (ids >= len(rows))).any()):
            return False
        rows = rows[ids]
    return plain_projection(backbone) and same(shared, rows)


# -- writing ----------------------------------------------------------------------------------------------------------


def official_1(config: MedusaConfig, tensors: Tensors, backbone: Backbone | None) -> Files:
    """Version 1: each head with a projection of its own."""
    made = _official_config(config)
    kept = _own_projections(config, tensors, backbone, "Medusa")
    return Files(made, renamed(kept, _official(config.num_blocks), out=True), "medusa_lm_head.pt")


def official_2(config: MedusaConfig, tensors: Tensors, backbone: Backbone | None) -> Files:
    """Version 2: all heads read the backbone's projection."""
    refuse(_no_form("Medusa version 2"), full_vocabulary(config))
    kept = {name: one for name, one in tensors.items() if not name.startswith("projections.")}
    if config.projection == "own":
        model = needed(
            backbone, "version 2 reads the backbone's projection, with which those of the heads are compared"
        )
        rows = model.output_weight.detach().cpu()
        other = [n for n in tensors if n.startswith("projections.") and not same(tensors[n], rows)]
        if other or not plain_projection(model):
            refuse(
                _no_form("Medusa version 2"),
                [
                    f"{len(other)} of {config.num_heads} heads have a projection unlike the backbone's: train with "
                    "head.projection=shared"
                ],
            )
    made = _official_config(config) | {"version": "2"}
    return Files(made, renamed(kept, _official(config.num_blocks), out=True), "medusa_lm_head.safetensors")


def whole_model(config: MedusaConfig, tensors: Tensors, backbone: Backbone | None) -> Files:
    """Medusa-2: the heads inside the shards of the backbone."""
    model = needed(backbone, "Medusa-2 is one model with its heads")
    kept = _own_projections(config, tensors, model, "Medusa-2")
    made = {"medusa_num_heads": config.num_heads, "medusa_num_layers": config.num_blocks}
    table = _official(config.num_blocks, "medusa_head.")
    return Files(made, renamed(kept, table, out=True), MODEL_SHARD, model=model)


def tensorrt(config: MedusaConfig, tensors: Tensors, backbone: Backbone | None) -> Files:
    """TensorRT-LLM's names."""
    kept = _own_projections(config, tensors, backbone, "TensorRT-LLM")
    made = _official_config(config) | {"num_medusa_heads": config.num_heads, "num_medusa_layers": config.num_blocks}
    return Files(made, renamed(kept, _TRT, out=True), "medusa_lm_head.safetensors")


def vllm(config: MedusaConfig, tensors: Tensors, backbone: Backbone | None) -> Files:
    """vLLM's, which can share a projection.

    Its loader has a place for a draft vocabulary, too (token_map, truncated_vocab_size). But 0.32.0 takes the map in
    and then stops, as its check of completeness does not find it among what was loaded.
    """
    refuse(_no_form("vLLM"), full_vocabulary(config))
    kept = dict(tensors)
    if config.projection == "shared":
        model = needed(backbone, "vLLM reads a shared projection from the head's file, and it is the backbone's")
        refuse(_no_form("vLLM"), _odd_projection(model))
        kept["lm_head.weight"] = model.output_weight.detach().cpu().to(tensors["heads.0.0.linear.weight"].dtype)
    made = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.vocab_size,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_blocks,
        "medusa_fc_bias": True,
        "original_lm_head": config.projection == "shared",
        "max_paths": 64,
        "topk": 10,
        "torch_dtype": dtype_name(tensors),
    }
    return Files(made, renamed(kept, _VLLM, out=True))


def _official_config(config: MedusaConfig) -> Config:
    return {
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_blocks,
        "base_model_name_or_path": config.backbone,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
    }


def _own_projections(config: MedusaConfig, tensors: Tensors, backbone: Backbone | None, whose: str) -> Tensors:
    """With a projection for each head; the backbone's, where they share it."""
    refuse(_no_form(whose), full_vocabulary(config))
    if config.projection == "own":
        return tensors
    model = needed(backbone, "each head has a projection in this format, and theirs is the backbone's")
    refuse(_no_form(whose), _odd_projection(model))
    rows = model.output_weight.detach().cpu().to(tensors["heads.0.0.linear.weight"].dtype)
    return tensors | {f"projections.{head}.weight": rows for head in range(config.num_heads)}


def _odd_projection(backbone: Backbone) -> Iterator[str]:
    if not plain_projection(backbone):
        yield (
            f"the projection of {backbone.name} has a bias, a scale or a soft cap, and there is a matrix alone: train "
            "with head.projection=own"
        )


def _no_form(whose: str) -> str:
    return f"these medusa heads cannot be written for {whose}, which would read others"


WRITERS: dict[str, Callable[[MedusaConfig, Tensors, Backbone | None], Files]] = {
    "medusa": official_1,
    "medusa-v2": official_2,
    "medusa-2": whole_model,
    "tensorrt-llm": tensorrt,
    "vllm": vllm,
}
