"""What the authors' code of EAGLE and TensorRT-LLM make of a head.

Sources: SafeAILab/EAGLE, eagle/model/cnets.py; TensorRT-LLM, _torch/models/modeling_speculative.py and
_torch/speculative/eagle3.py of its main branch in 2026. Neither was run here.
"""

from __future__ import annotations

from collections.abc import Iterator

from .reading import LAYER, Files, Finding, activation, counted, maps, missing, no_names, switch


def official(files: Files) -> Iterator[Finding]:
    yield from missing(files, ["fc.weight", *(f"layers.0.{name}" for name in LAYER)], "missing, and it stops", "eagle")
    heads, width, said = (files.config.get(k) for k in ("num_attention_heads", "hidden_size", "head_dim"))
    if heads and width and said and said * heads != width:
        yield Finding(f"head_dim is {said}, and it takes {width // heads}", "train with another head.head_dim")
    for key in ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output"):
        if files.config.get(key):
            yield Finding(f"{key} is true, and there is no such switch", f"train with head.{key}=false")


def tensorrt_eagle3(files: Files) -> Iterator[Finding]:
    """TensorRT-LLM's PyTorch backend. Which hidden states it reads, its own settings say, and not the head's files."""
    config = files.config
    inner = config.get("eagle_config") or {}
    wanted = ["fc.weight", "norm.weight", *(f"layers.0.{name}" for name in LAYER)]
    wanted += ["layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight"]
    yield from missing(files, wanted, "left at random, or it stops", "modelopt")
    yield from maps(files)
    if files.taps:
        yield Finding(
            f"it reads the layers of its own settings, the usual three without any; the head was made for {files.taps}",
            f"set eagle3_layers_to_capture to {[k - 1 for k in files.taps]} where they are others",
            wrong=len(files.taps) != 3 or files.taps[0] != 2,
        )
    told = Files({"norm_before_fc": inner.get("norm_before_fc", False)}, files.tensors)
    yield from switch(told, "norm_before_fc", r"(model\.)?input_norm\.weight")
    if config.get("norm_before_fc") and not inner.get("norm_before_fc"):
        yield Finding("norm_before_fc stands at the top, where it is not read", "write it into eagle_config")
    yield from switch(files, "fc_norm", r"(model\.)?fc_norm\.\d+\.weight")
    if config.get("norm_before_residual"):
        yield Finding("norm_before_residual is true, and there is no such switch", "train with it off")
    yield from no_names(files, r".*[qk]_norm\.weight", "there is no place for it", "train with head.qk_norm=none")
    if config.get("target_hidden_size") in (None, config.get("hidden_size")):
        what = "the backbone's embedding is put in its place"
        if files.has(r"(model\.)?embed_tokens\.weight"):
            yield Finding(f"embed_tokens: {what}, fine if it is the same", "compare them", wrong=False)
    yield from no_names(
        files,
        r"layers\.[1-9]\d*\.input_layernorm\.weight",
        "upper layers are normalised with hidden_norm, and this has no place",
        "train with head.head_layers=1",
    )
    if not config.get("bias"):
        yield from no_names(files, r"(model\.)?fc\.bias", "dropped, since bias is not true", "set bias to true")
    yield from (*activation(files), *counted(files))
