"""What vLLM makes of a head, by version.

Sources: vllm/model_executor/models/{llama_eagle,llama_eagle3,qwen3_eagle3,medusa}.py, the configs beside them and the
runners, read in releases from 0.12.0 to 0.33.0; 0.32.0 was run, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from .layouts import Config
from .reading import EXPORT, LAYER, Files, Finding, activation, counted, fused, ids, maps, missing, no_names, switch

_EAGLE1 = {"Llama", "Cohere", "Llama4", "MiniCPM", "Mistral", "MistralLarge3", "DeepSeekMTP"}
_EAGLE3 = {
    *("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3MiniMaxM2ForCausalLM", "Eagle3Qwen3ForCausalLM"),
    *("Eagle3Qwen2_5vlForCausalLM", "Eagle3Qwen3vlForCausalLM"),
}
_QWEN3 = "Eagle3Qwen3ForCausalLM"


def eagle1(files: Files) -> Iterator[Finding]:
    config = files.config
    yield from missing(files, ["fc.weight", *(f"layers.0.{name}" for name in LAYER)], "left at random", "vllm")
    yield from no_names(files, r"model\..*", "vLLM knows no such names and stops", "take the prefix model. away")
    odd = r"layers\.0\.input_layernorm\.weight|norm\.weight|lm_head\.weight|d2t|t2d|.*[qk]_norm\.weight"
    yield from no_names(files, odd, "vLLM has no place for it and stops", EXPORT.format("vllm"))
    yield from no_names(files, r"fc\.bias", "dropped without a word", "train with head.fc_bias=false")
    if config.get("bias"):
        yield Finding("bias is true, which vLLM takes for biases of the attention, left at random", "set bias to false")
    yield from _attention_biases(
        files, config.get("qkv_bias", config.get("attention_bias")), config.get("attention_bias")
    )
    yield from (*activation(files), *counted(files), *_known_to_eagle1(config))


def _known_to_eagle1(config: Config) -> Iterator[Finding]:
    if not config.get("architectures"):
        yield Finding("architectures is missing, and vLLM stops", _LLAMA)
    for name in config.get("architectures") or []:
        if name.removeprefix("Eagle").removesuffix("ForCausalLM").removesuffix("Model") not in _EAGLE1:
            yield Finding(f"vLLM makes Eagle{name} of architectures, knows no such class and stops", _LLAMA)


_LLAMA = 'set it to ["LlamaForCausalLM"], whose shape a head has whatever its backbone'


def _attention_biases(files: Files, inputs: object, output: object) -> Iterator[Finding]:
    for said, names, key in ((inputs, "qkv", "attention_bias"), (output, "o", "attention_bias")):
        found = files.has(rf".*self_attn\.[{names}]_proj\.bias")
        if said and not found:
            yield Finding(
                f"{key} is true, and the file has no bias of {names}_proj: left at random",
                f"set it to false, or add zeros; {EXPORT.format('vllm')}",
            )
        if not said:
            yield from no_names(
                files, rf".*self_attn\.[{names}]_proj\.bias", f"dropped, since {key} is not true", f"set {key} to true"
            )


def eagle3(files: Files) -> Iterator[Finding]:
    config = files.config
    wanted = ["fc.weight", "norm.weight", "lm_head.weight", *(f"layers.0.{name}" for name in LAYER)]
    yield from missing(files, wanted, "left at random", "vllm")
    norms = ["layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight"]
    yield from missing(files, norms, "left at one", "vllm")
    yield from maps(files)
    if config.get("draft_vocab_size") == config.get("vocab_size") and not files.before(0, 30):
        yield from no_names(files, "d2t", "vLLM has no place for it where all tokens are proposed", "take it out")
    inner = config.get("eagle_config") or {}
    before_fc = inner.get("norm_before_fc", config.get("norm_before_fc", False))
    told = Files({"norm_before_fc": before_fc}, files.tensors)
    yield from switch(told, "norm_before_fc", r"(model\.)?input_norm\.weight")
    yield from switch(files, "fc_norm", r"(model\.)?fc_norm\.\d+\.weight")
    yield from no_names(files, r"(model\.)?fc\.bias", "dropped without a word", "train without a bias there")
    yield from _attention_biases(files, config.get("attention_bias"), config.get("attention_bias"))
    yield from no_names(
        files,
        r"layers\.[1-9]\d*\.hidden_norm\.weight",
        "vLLM normalises upper layers with input_layernorm, and takes this for something else",
        "rename it to input_layernorm",
    )
    if config.get("bias"):
        yield Finding("bias is true, which vLLM takes for biases of the attention, left at random", "take it out")
    if inner.get("use_aux_hidden_state") is False:
        yield Finding("use_aux_hidden_state is false: fc is dropped", "set eagle_config.use_aux_hidden_state to true")
    yield from no_names(files, "mask_hidden", "skipped unless drafting is parallel (P-EAGLE)", "serve it as P-EAGLE")
    yield from (*activation(files), *counted(files), *_taps(files), *_class_of_eagle3(files), *_since(files))
    yield from fused(files, _states(files), "vLLM")


def _states(files: Files) -> int:
    """How many hidden states vLLM builds `fc` for; names at the top of the config do not count."""
    config = files.config
    said = config.get("num_aux_hidden_states") or len(ids(config.get("eagle_config") or {})) or 3
    return 3 if files.before(0, 22) else int(said)


def _class_of_eagle3(files: Files) -> Iterator[Finding]:
    """The class that vLLM makes of the architecture, and whether it has the norms of queries and keys."""
    named = next(iter(files.config.get("architectures") or ["LlamaForCausalLM"]))
    made = named if named.startswith("Eagle3") or named.endswith("Eagle3") else f"Eagle3{named}"
    if "speculators_model_type" in files.config:
        made = {"qwen3": _QWEN3}.get(str(files.config.get("model_type")), "Eagle3LlamaForCausalLM")
    if made not in _EAGLE3:
        yield Finding(f"vLLM makes {made} of architectures, knows no such class and stops", _LLAMA)
    normed = files.has(r".*self_attn\.[qk]_norm\.weight")
    if normed and made != _QWEN3:
        yield Finding(f"{normed[0]}: {made} has no place for it and stops", f'set architectures to ["{_QWEN3}"]')
    if not normed and made == _QWEN3:
        yield Finding(
            f"{_QWEN3} normalises queries and keys, and the file has no q_norm: left at one", EXPORT.format("vllm")
        )
    if made == _QWEN3 and files.before(0, 24):
        yield Finding(f"{_QWEN3} is known since vLLM 0.24", "update vLLM, or train with head.qk_norm=none")


def _since(files: Files) -> Iterator[Finding]:
    """Switches that older versions do not know."""
    config = files.config
    inner = config.get("eagle_config") or {}
    for key, version, fate in (
        ("norm_before_fc", (0, 18), "its norm has no place, and vLLM stops"),
        ("fc_norm", (0, 22), "its norms have no place, and vLLM stops"),
        ("norm_output", (0, 22), "ignored without a word"),
        ("attention_bias", (0, 16), "biases of q, k and v have no place"),
    ):
        if (config.get(key) or inner.get(key)) and files.before(*version):
            yield Finding(
                f"{key} is true, which vLLM knows since {version[0]}.{version[1]}: {fate}",
                f"update vLLM, or train with head.{key}=false",
            )
    if files.before(0, 27) and (positions := config.get("max_position_embeddings")):
        what = f"max_position_embeddings is {positions}; before vLLM 0.27, longer texts read behind its rotary table"
        yield Finding(what, "give --max-model-len, or update vLLM", wrong=False)


def _taps(files: Files) -> Iterator[Finding]:
    config = files.config
    top, inner = ids(config), ids(config.get("eagle_config") or {})
    fix = "write eagle_aux_hidden_state_layer_ids, k for the output of layer k - 1, at the top of config.json"
    if not top and inner and inner[0] != 2:
        yield Finding(
            f"eagle_config names layers {inner}, outputs as SGLang counts; vLLM takes them for hidden states, one "
            "lower: off by one (its second model runner does not look there, and takes 2, N // 2 and N - 3)",
            f"{fix}: {[k + 1 for k in inner]}",
        )
    said = top or (inner if inner and inner[0] == 2 else [])
    if said != sorted(set(said)):
        yield Finding(f"layers {said} are put in ascending order", "train with head.taps in order")
    if said and files.taps and list(files.taps) != said:
        yield Finding(f"layers are {said}, and the head was made for {list(files.taps)}", fix)


def speculators(files: Files) -> Iterator[Finding]:
    config = files.config
    inner = config.get("transformer_layer_config")
    if not isinstance(inner, dict):
        yield Finding("transformer_layer_config is missing, and vLLM stops", EXPORT.format("speculators"))
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
    if inner.get("model_type", "llama") not in ("llama", "qwen3"):
        yield Finding(f"model_type is {inner.get('model_type')!r}; vLLM knows llama and qwen3", "train such a head")
    if files.before(0, 25):
        for key in ("fc_norm", "norm_output"):
            if config.get(key):
                yield Finding(f"{key} is true, and vLLM takes it over from this format since 0.25", "update vLLM")
    if not files.has(r"(model\.)?embed_tokens\.weight"):
        yield Finding(
            "the file has no embedding: vLLM shares the backbone's, but the speculators package saves a wrong one",
            EXPORT.format("speculators"),
            wrong=False,
        )
    given = {key: value for key, value in config.items() if key != "transformer_layer_config" and value is not None}
    yield from eagle3(Files({**inner, **given}, files.tensors, files.zeros, files.taps, files.version))


def medusa(files: Files) -> Iterator[Finding]:
    config = files.config
    if not files.before(0, 33):
        yield Finding(
            "Medusa heads went with vLLM 0.33", "serve them with 0.32, with headstart, or train an eagle3 head"
        )
        return
    if config.get("hidden_size") is None:
        yield Finding("hidden_size is missing: vLLM would take 4096", "write hidden_size into config.json")
    old = files.has(r"(medusa_heads\.)?\d+\.\d+\..*")
    if files.before(0, 25):
        if old:
            yield Finding(
                f"{old[0]}: names of the authors are dropped without a word before vLLM 0.25",
                f"update vLLM; {EXPORT.format('vllm')}",
            )
        if config.get("vocab_size") is None:
            yield Finding("vocab_size is missing: vLLM would take 32001", "write vocab_size into config.json")
    if not config.get("medusa_fc_bias"):
        yield from no_names(
            files,
            r"(medusa_heads\.)?(blocks\.\d+\.layers\.\d+|\d+\.\d+\.linear)\.bias",
            "dropped without a word, since medusa_fc_bias is not true",
            "set medusa_fc_bias to true",
        )
    if not files.has(r".*lm_heads?\..*weight|(medusa_heads\.)?\d+\.\d+\.weight"):
        yield Finding(
            "the file holds no projection: vLLM does not take the backbone's, and leaves it at random",
            f"{EXPORT.format('vllm')} (with --backbone)",
        )
    yield from (*_one_projection(files), *_blocks(files))
    truncated, size = config.get("truncated_vocab_size"), config.get("vocab_size")
    if truncated and size and truncated < size:
        yield Finding(
            f"{truncated} of {size} tokens are proposed (truncated_vocab_size): vLLM reads token_map, and then stops, "
            "as it finds that nothing was loaded for it",
            "train without a draft vocabulary",
        )


def _blocks(files: Files) -> Iterator[Finding]:
    """Whether vLLM builds as many blocks for a head as the file holds."""
    block = r"(?:medusa_heads\.)?(?:blocks\.\d+\.layers\.(\d+)|\d+\.(\d+)\.linear)\.weight"
    numbers = [int(m[1] or m[2]) for name in files.tensors if (m := re.fullmatch(block, name))]
    said = files.config.get("num_hidden_layers", files.config.get("medusa_num_layers"))
    if numbers and (said or 1) != (found := max(numbers) + 1):
        yield Finding(
            f"num_hidden_layers is {said or 'missing, so that one is built'}, and each head has {found} blocks: the "
            "rest is dropped, or left at random, without a word",
            f"set num_hidden_layers to {found}",
        )


def _one_projection(files: Files) -> Iterator[Finding]:
    """Whether all heads read one projection, as the config says and as the file has it."""
    said = files.config.get("original_lm_head")
    if not said and files.has(r"(medusa_heads\.)?lm_head\.weight"):
        yield Finding(
            "lm_head.weight is dropped, since original_lm_head is not true, and projections are left at random",
            "set original_lm_head to true",
        )
    if said and (others := files.has(r"(medusa_heads\.)?lm_heads\.[1-9]\d*\.weight")):
        yield Finding(
            f"original_lm_head is true, so that the first head's projection serves all, and {others[0]} is dropped",
            "set original_lm_head to false if each head has its own",
        )
