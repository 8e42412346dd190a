"""What serving engines make of a folder, as their sources have it: what they drop, leave at random, or read otherwise.

Sources: vLLM 0.32.0 (run) and 0.33.0, SGLang 0.5.23, SafeAILab/EAGLE. Engines load drafters leniently: a tensor without
a place and a place without a tensor are often no error there, and drafts are then accepted by chance alone.

`ENGINES` says for each engine which kinds it reads, and the check for each of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from .layouts import Config

Shape = tuple[tuple[int, ...], str]


@dataclass(frozen=True)
class Finding:
    """One thing that an engine would do with a head."""

    what: str
    fix: str
    wrong: bool = True
    """False: worth knowing, and no fault."""


@dataclass
class Files:
    """What is looked at."""

    config: Config
    tensors: dict[str, Shape]
    zeros: frozenset[str] = field(default_factory=frozenset)
    """Biases that are all zero, whose loss changes nothing."""
    taps: tuple[int, ...] | None = None
    """Hidden states that the head was made for, if that is known."""

    def has(self, pattern: str) -> list[str]:
        """Names that a pattern fits."""
        return [name for name in self.tensors if re.fullmatch(pattern, name)]


Check = Callable[[Files], Iterator[Finding]]
_EXPORT = "headstart export --to {} writes it as it has to be"


@dataclass(frozen=True)
class Engine:
    """One engine: its kinds, and those it has no more or never had."""

    title: str
    checks: dict[str, Check]
    never: dict[str, str]
    """Kind to why not."""


# -- shared -----------------------------------------------------------------------------------------------------------

_LAYER = (
    *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
    *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    "post_attention_layernorm.weight",
)


def _missing(files: Files, wanted: list[str], fate: str, to: str) -> Iterator[Finding]:
    names = {re.sub(r"^(model\.)?midlayer\.", "layers.0.", name).removeprefix("model.") for name in files.tensors}
    for name in wanted:
        if name not in names:
            yield Finding(f"{name} is missing, and would be {fate}", f"find the tensor; {_EXPORT.format(to)}")


def _activation(files: Files) -> Iterator[Finding]:
    act = files.config.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        yield Finding(f"hidden_act is {act}, and it computes silu alone", "train with head.hidden_act=silu")


def _layers(files: Files) -> int:
    numbers = [int(m[1]) for name in files.tensors if (m := re.search(r"(?:^|\.)layers\.(\d+)\.", name))]
    return max(numbers, default=0) + 1


def _counted(files: Files) -> Iterator[Finding]:
    said, found = files.config.get("num_hidden_layers", 1), _layers(files)
    if said != found:
        yield Finding(f"num_hidden_layers is {said}, and the file holds {found}", f"set num_hidden_layers to {found}")


def _no_names(files: Files, pattern: str, what: str, fix: str) -> Iterator[Finding]:
    found = files.has(pattern)
    if found and not all(name in files.zeros for name in found):
        yield Finding(f"{', '.join(found[:3])}: {what}", fix)


def _maps(files: Files) -> Iterator[Finding]:
    config = files.config
    rows = files.tensors.get("lm_head.weight", files.tensors.get("model.lm_head.weight", ((0,), "")))[0][0]
    draft, size = config.get("draft_vocab_size") or rows, config.get("vocab_size")
    if size and draft and draft != size and not files.has(r"(model\.)?d2t"):
        yield Finding(
            f"d2t is missing, and {draft} of {size} tokens are proposed: they would be read as the first {draft}",
            "find the map that the head was trained with",
        )


# -- vLLM -------------------------------------------------------------------------------------------------------------


def _vllm_eagle1(files: Files) -> Iterator[Finding]:
    config = files.config
    yield from _missing(files, ["fc.weight", *(f"layers.0.{name}" for name in _LAYER)], "left at random", "vllm")
    yield from _no_names(files, r"model\..*", "vLLM knows no such names and stops", "take the prefix model. away")
    odd = r"layers\.0\.input_layernorm\.weight|norm\.weight|lm_head\.weight|d2t|t2d|.*[qk]_norm\.weight"
    yield from _no_names(files, odd, "vLLM has no place for it and stops", _EXPORT.format("vllm"))
    yield from _no_names(files, r"fc\.bias", "dropped without a word", "train with head.fc_bias=false")
    if config.get("bias"):
        yield Finding("bias is true, which vLLM takes for biases of the attention, left at random", "set bias to false")
    yield from _attention_biases(
        files, config.get("qkv_bias", config.get("attention_bias")), config.get("attention_bias")
    )
    yield from (*_activation(files), *_counted(files))


def _attention_biases(files: Files, inputs: object, output: object) -> Iterator[Finding]:
    for said, names, key in ((inputs, "qkv", "attention_bias"), (output, "o", "attention_bias")):
        found = files.has(rf".*self_attn\.[{names}]_proj\.bias")
        if said and not found:
            yield Finding(
                f"{key} is true, and the file has no bias of {names}_proj: left at random",
                f"set it to false, or add zeros; {_EXPORT.format('vllm')}",
            )
        if not said:
            yield from _no_names(
                files, rf".*self_attn\.[{names}]_proj\.bias", f"dropped, since {key} is not true", f"set {key} to true"
            )


def _vllm_eagle3(files: Files) -> Iterator[Finding]:
    config = files.config
    wanted = ["fc.weight", "norm.weight", "lm_head.weight", *(f"layers.0.{name}" for name in _LAYER)]
    yield from _missing(files, wanted, "left at random", "vllm")
    norms = ["layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight"]
    yield from _missing(files, norms, "left at one", "vllm")
    yield from _maps(files)
    if config.get("draft_vocab_size") == config.get("vocab_size"):
        yield from _no_names(files, "d2t", "vLLM has no place for it where all tokens are proposed", "take it out")
    yield from _switch(files, "norm_before_fc", r"(model\.)?input_norm\.weight")
    yield from _switch(files, "fc_norm", r"(model\.)?fc_norm\.\d+\.weight")
    yield from _no_names(files, r"(model\.)?fc\.bias", "dropped without a word", "train without a bias there")
    yield from _attention_biases(files, config.get("attention_bias"), config.get("attention_bias"))
    yield from _no_names(
        files,
        r"layers\.[1-9]\d*\.hidden_norm\.weight",
        "vLLM normalises upper layers with input_layernorm, and takes this for something else",
        "rename it to input_layernorm",
    )
    if config.get("bias"):
        yield Finding("bias is true, which vLLM takes for biases of the attention, left at random", "take it out")
    yield from (*_activation(files), *_counted(files), *_vllm_taps(files))


def _switch(files: Files, key: str, pattern: str) -> Iterator[Finding]:
    found = files.has(pattern)
    if found and not files.config.get(key):
        yield Finding(f"{found[0]} is dropped, since {key} is not true", f"set {key} to true")
    if files.config.get(key) and not found:
        yield Finding(f"{key} is true, and its norm is missing: left at one", f"set {key} to false, or find the norm")


def _vllm_taps(files: Files) -> Iterator[Finding]:
    config = files.config
    top, inner = _ids(config), _ids(config.get("eagle_config") or {})
    fix = "write eagle_aux_hidden_state_layer_ids, k for the output of layer k - 1, at the top of config.json"
    if not top and inner and inner[0] != 2:
        yield Finding(
            f"eagle_config names layers {inner}, outputs as SGLang counts; vLLM takes them for hidden states, one "
            "lower: off by one",
            f"{fix}: {[k + 1 for k in inner]}",
        )
    said = top or (inner if inner and inner[0] == 2 else [])
    if said != sorted(set(said)):
        yield Finding(f"layers {said} are put in ascending order", "train with head.taps in order")
    if said and files.taps and list(files.taps) != said:
        yield Finding(f"layers are {said}, and the head was made for {list(files.taps)}", fix)


def _ids(config: Config) -> list[int]:
    return list(config.get("eagle_aux_hidden_state_layer_ids") or [])


def _vllm_speculators(files: Files) -> Iterator[Finding]:
    config = files.config
    inner = config.get("transformer_layer_config")
    if not isinstance(inner, dict):
        yield Finding("transformer_layer_config is missing, and vLLM stops", _EXPORT.format("speculators"))
        return
    said = config.get("speculators_config") or {}
    methods = said.get("proposal_methods") or [{}]
    if methods[0].get("speculative_tokens") is None:
        yield Finding("speculators_config names no speculative_tokens, and vLLM stops", "say how many tokens to draft")
    if not (said.get("verifier") or {}).get("name_or_path"):
        yield Finding("speculators_config.verifier.name_or_path is missing, and vLLM stops", "name the backbone")
    if config.get("norm_before_residual") is None:
        yield Finding(
            "norm_before_residual is missing: vLLM takes it for true, speculators for false",
            "write what the head was trained with",
        )
    if inner.get("model_type") not in ("llama", "qwen3"):
        yield Finding(f"model_type is {inner.get('model_type')!r}; vLLM knows llama and qwen3", "train such a head")
    if not files.has(r"(model\.)?embed_tokens\.weight"):
        yield Finding(
            "the file has no embedding: vLLM shares the backbone's, but the speculators package saves a wrong one",
            _EXPORT.format("speculators"),
            wrong=False,
        )
    flat = {**inner, **{key: value for key, value in config.items() if key != "transformer_layer_config"}}
    yield from _vllm_eagle3(Files(flat, files.tensors, files.zeros, files.taps))


def _vllm_medusa(files: Files) -> Iterator[Finding]:
    config = files.config
    for key in ("hidden_size", "vocab_size"):
        if config.get(key) is None:
            yield Finding(f"{key} is missing: vLLM would take its default", f"write {key} into config.json")
    if not config.get("medusa_fc_bias"):
        yield from _no_names(
            files,
            r"(medusa_heads\.)?(blocks\.\d+\.layers\.\d+|\d+\.\d+\.linear)\.bias",
            "dropped without a word, since medusa_fc_bias is not true",
            "set medusa_fc_bias to true",
        )
    if not files.has(r".*lm_heads?\..*weight|(medusa_heads\.)?\d+\.\d+\.weight"):
        yield Finding(
            "the file holds no projection: vLLM does not take the backbone's, and leaves it at random",
            f"{_EXPORT.format('vllm')} (with --backbone)",
        )
    truncated, size = config.get("truncated_vocab_size"), config.get("vocab_size")
    if truncated and size and truncated < size:
        yield Finding(
            f"{truncated} of {size} tokens are proposed (truncated_vocab_size): vLLM reads token_map, and then stops, "
            "as it finds that nothing was loaded for it",
            "train without a draft vocabulary",
        )


# -- SGLang -----------------------------------------------------------------------------------------------------------


def _architecture(files: Files, wanted: str) -> Iterator[Finding]:
    found = files.config.get("architectures") or []
    if wanted not in found:
        yield Finding(f"architectures is {found}, and SGLang would load another class", f"set it to [{wanted!r}]")


def _sglang_eagle1(files: Files) -> Iterator[Finding]:
    yield from _architecture(files, "LlamaForCausalLMEagle")
    wanted = ["fc.weight", "fc.bias", *(f"layers.0.{name}" for name in _LAYER)]
    yield from _missing(files, wanted, "left at random", "sglang")
    if files.config.get("bias"):
        yield Finding("bias is true, which SGLang takes for biases of the attention", "take it out")
    yield from _no_names(
        files,
        r"(norm|layers\.0\.input_layernorm)\.weight|d2t|t2d|.*[qk]_norm\.weight|.*mlp\..*bias",
        "dropped without a word",
        _EXPORT.format("sglang"),
    )
    yield from (*_activation(files), *_counted(files))


def _sglang_eagle3(files: Files) -> Iterator[Finding]:
    config = files.config
    yield from _architecture(files, "LlamaForCausalLMEagle3")
    if "draft_vocab_size" not in config:
        yield Finding("draft_vocab_size is missing, and SGLang stops", "write it into config.json")
    wanted = ["fc.weight", "norm.weight", *(f"layers.0.{name}" for name in _LAYER)]
    wanted += ["layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight"]
    borrowed = "draft_vocab_size" in config and config["draft_vocab_size"] is None
    yield from _missing(files, wanted + ([] if borrowed else ["lm_head.weight"]), "left at random", "sglang")
    yield from _maps(files)
    yield from _no_names(files, r".*_proj\.bias", "dropped without a word", "train with head.attention_bias=false")
    yield from _no_names(
        files, r".*self_attn\.[qk]_norm\.weight", "dropped without a word", "train with head.qk_norm=none"
    )
    yield from _switch(files, "norm_before_fc", r"(model\.)?input_norm\.weight")
    aux = "use_aux_norm" if config.get("use_aux_norm") else "fc_norm"
    yield from _switch(files, aux, r"(model\.)?(fc_norm\.\d+|aux_norm_\w+)\.weight")
    if config.get("norm_before_residual"):
        yield Finding("norm_before_residual is true, and SGLang has no such switch", "train with it off")
    if config.get("tie_word_embeddings"):
        yield Finding(
            "tie_word_embeddings is true: the draft's embedding takes the place of lm_head", "set it to false"
        )
    same_width = config.get("target_hidden_size") in (None, config.get("hidden_size"))
    if same_width and files.has(r"(model\.)?embed_tokens\.weight"):
        yield Finding("embed_tokens is replaced by the backbone's: fine if it is the same", "compare them", wrong=False)
    if not config.get("bias"):
        yield from _no_names(files, r"(model\.)?fc\.bias", "dropped, since bias is not true", "set bias to true")
    yield from _no_names(
        files,
        r"layers\.[1-9]\d*\.input_layernorm\.weight",
        "SGLang normalises upper layers with hidden_norm, and drops this",
        "rename it to hidden_norm",
    )
    yield from (*_activation(files), *_counted(files), *_sglang_taps(files))


def _sglang_taps(files: Files) -> Iterator[Finding]:
    top, inner = _ids(files.config), _ids(files.config.get("eagle_config") or {})
    fix = "write eagle_config.eagle_aux_hidden_state_layer_ids, the layers whose outputs are taken"
    if inner and inner[0] == 2:
        yield Finding(
            f"eagle_config names {inner}, which SGLang takes for outputs, one higher than hidden states of that "
            "number: off by one, if they are the usual three",
            f"{fix}: {[k - 1 for k in inner]}",
        )
    elif inner and files.taps and [k + 1 for k in inner] != list(files.taps):
        yield Finding(f"eagle_config names {inner}, and the head was made for {list(files.taps)}", fix)
    if top and not inner:
        usual = files.taps is not None and len(files.taps) == 3 and files.taps[0] == 2
        yield Finding(
            f"layers {top} stand at the top of config.json, where SGLang does not look: it takes 2, N // 2 and N - 3",
            f"{fix}: {[k - 1 for k in top]}",
            wrong=not usual,
        )


def _official_eagle(files: Files) -> Iterator[Finding]:
    yield from _missing(
        files, ["fc.weight", *(f"layers.0.{name}" for name in _LAYER)], "missing, and it stops", "eagle"
    )
    heads, width, said = (files.config.get(k) for k in ("num_attention_heads", "hidden_size", "head_dim"))
    if heads and width and said and said * heads != width:
        yield Finding(f"head_dim is {said}, and it takes {width // heads}", "train with another head.head_dim")
    for key in ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output"):
        if files.config.get(key):
            yield Finding(f"{key} is true, and there is no such switch", f"train with head.{key}=false")


_NO = "it has no such heads"
_SPECULATOR = "MLP speculators went with vLLM 0.33.0, and 0.32 has no way to run them any more"
ENGINES: dict[str, Engine] = {
    "vllm": Engine(
        "vLLM 0.32",
        {
            "eagle1": _vllm_eagle1,
            "eagle3": _vllm_eagle3,
            "speculators": _vllm_speculators,
            "medusa": _vllm_medusa,
            "medusa-vllm": _vllm_medusa,
        },
        {
            "mlp_speculator": _SPECULATOR,
            "hydra": _NO,
            "medusa-2": "heads are read from a folder of their own, not from the model's shards",
            "medusa-trt": "it reads other names of the same tensors",
        },
    ),
    "sglang": Engine(
        "SGLang 0.5.23",
        {"eagle1": _sglang_eagle1, "eagle3": _sglang_eagle3},
        {
            "speculators": "the config inside the config is not read; export it to sglang",
            **dict.fromkeys(("medusa", "medusa-vllm", "medusa-2", "medusa-trt", "hydra", "mlp_speculator"), _NO),
        },
    ),
    "eagle": Engine(
        "SafeAILab/EAGLE",
        {"eagle1": _official_eagle, "eagle3": _official_eagle},
        dict.fromkeys(
            ("speculators", "medusa", "medusa-vllm", "medusa-2", "medusa-trt", "hydra", "mlp_speculator"), _NO
        ),
    ),
}
