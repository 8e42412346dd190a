"""What SGLang makes of a head, by version.

Sources: sglang/srt/models/{llama_eagle,llama_eagle3,llama}.py and model_executor, read in releases from 0.5.5 to
0.5.23; none was run here.
"""

from __future__ import annotations

from collections.abc import Iterator

from .reading import EXPORT, LAYER, Files, Finding, activation, counted, fused, ids, maps, missing, no_names, switch


def _architecture(files: Files, wanted: str) -> Iterator[Finding]:
    found = files.config.get("architectures") or []
    if wanted not in found:
        yield Finding(f"architectures is {found}, and SGLang would load another class", f"set it to [{wanted!r}]")


def eagle1(files: Files) -> Iterator[Finding]:
    yield from _architecture(files, "LlamaForCausalLMEagle")
    wanted = ["fc.weight", "fc.bias", *(f"layers.0.{name}" for name in LAYER)]
    yield from missing(files, wanted, "left at random", "sglang")
    yield from _biases(files)
    yield from no_names(
        files,
        r"(norm|layers\.0\.input_layernorm)\.weight|d2t|t2d|.*[qk]_norm\.weight|.*mlp\..*bias",
        "dropped without a word",
        EXPORT.format("sglang"),
    )
    yield from (*activation(files), *counted(files))


def eagle3(files: Files) -> Iterator[Finding]:
    config = files.config
    yield from _architecture(files, "LlamaForCausalLMEagle3")
    if "draft_vocab_size" not in config:
        yield Finding("draft_vocab_size is missing, and SGLang stops", "write it into config.json")
    wanted = ["fc.weight", "norm.weight", *(f"layers.0.{name}" for name in LAYER)]
    wanted += ["layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight"]
    borrowed = "draft_vocab_size" in config and config["draft_vocab_size"] is None
    yield from missing(files, wanted + ([] if borrowed else ["lm_head.weight"]), "left at random", "sglang")
    yield from maps(files)
    yield from no_names(
        files, r".*(qkv|[qkv]_proj|mlp\..*)\.bias", "dropped without a word", "train with head.attention_bias=false"
    )
    yield from _biases(files)
    yield from no_names(
        files, r".*self_attn\.[qk]_norm\.weight", "dropped without a word", "train with head.qk_norm=none"
    )
    yield from switch(files, "norm_before_fc", r"(model\.)?input_norm\.weight")
    aux = "use_aux_norm" if config.get("use_aux_norm") else "fc_norm"
    yield from switch(files, aux, r"(model\.)?(fc_norm\.\d+|aux_norm_\w+)\.weight")
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
        yield from no_names(
            files, r"(model\.)?fc\.bias", "dropped, since bias is not true", "train without a bias there"
        )
    yield from no_names(
        files,
        r"layers\.[1-9]\d*\.input_layernorm\.weight",
        "SGLang normalises upper layers with hidden_norm, and drops this",
        "rename it to hidden_norm",
    )
    said = config.get("num_aux_hidden_states") or len(ids(config.get("eagle_config") or {})) or 3
    yield from fused(files, 3 if files.before(0, 5, 12) else int(said), "SGLang")
    yield from (*activation(files), *counted(files), *_taps(files), *_since(files))


def _biases(files: Files) -> Iterator[Finding]:
    """`bias` is meant for `fc`, and gives the attention's output one, too."""
    key = next((key for key in ("attention_bias", "bias") if files.config.get(key)), None)
    if key and not files.has(r".*self_attn\.o_proj\.bias"):
        yield Finding(
            f"{key} is true, and gives o_proj a bias, too, which the file does not hold: left at random",
            f"set {key} to false, and train without such a bias; or add zeros for o_proj.bias",
        )
    if not key:
        yield from no_names(
            files,
            r".*self_attn\.o_proj\.bias",
            "dropped, since attention_bias is not true",
            "set attention_bias to true",
        )


def _since(files: Files) -> Iterator[Finding]:
    """What older versions do not know."""
    config = files.config
    if files.before(0, 5, 12):
        old = files.has(r"(model\.)?layers\.0\..*")
        if old:
            yield Finding(
                f"{old[0]}: before SGLang 0.5.12 the layer is called midlayer, and this is dropped: left at random",
                f"update SGLang; {EXPORT.format('sglang')}",
            )
        if config.get("num_hidden_layers", 1) != 1:
            yield Finding("before SGLang 0.5.12 there is one layer, and it stops", "update SGLang")
    for key, version in (
        ("fc_norm", (0, 5, 12)), ("use_aux_norm", (0, 5, 12)), ("norm_output", (0, 5, 12)),
        ("norm_before_fc", (0, 5, 17)),
    ):  # fmt: skip
        if (config.get(key) or (config.get("eagle_config") or {}).get(key)) and files.before(*version):
            known = ".".join(map(str, version))
            yield Finding(
                f"{key} is true, which SGLang knows since {known}: ignored without a word",
                f"update SGLang, or train with head.{key}=false",
            )


def _taps(files: Files) -> Iterator[Finding]:
    top, inner = ids(files.config), ids(files.config.get("eagle_config") or {})
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
