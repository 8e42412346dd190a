"""What kind of head a file holds, told by the names of its tensors; configs are asked only where names leave it open.

Some heads carry the architecture of their backbone, or no config at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..errors import UserError
from .assembly import some
from .layouts import Config

_EAGLE = r"(midlayer|layers|norm|lm_head|fc|fc_norm|input_norm|aux_norm_\w+|embed_tokens)\..*|d2t|t2d|mask_hidden"
_SIGNS: tuple[tuple[str, str], ...] = (
    ("hydra", r"(hydra_head\.)?(hydra_mlp|hydra_lm_head|prefix_embeding_layer)\..*"),
    ("mlp_speculator", r"(speculator\.)?(emb|proj|ln|head)\.\d+\.(weight|bias)"),
    ("medusa-trt", r"medusa_heads\.\d+\.(medusa_layers|lm_head)\..*"),
    ("medusa-vllm", r"(medusa_heads\.)?(blocks|lm_heads)\.\d+\..*"),
    ("medusa", r"((medusa_head|medusa_heads|model)\.)?\d+\.\d+\.(linear\.)?(weight|bias)"),
    ("lora", r".*\.lora_[AB](\..*)?"),
    ("causal-lm", r"(model|transformer|gpt_neox)\.(layers|h)\.\d+\..*"),
    ("eagle", rf"(model\.)?({_EAGLE})"),
)
_UNKNOWN = {
    "dflash": "a DFlash head, which is not known here",
    "lora": "an adapter (LoRA), which changes a model and drafts nothing",
    "causal-lm": "a whole causal LM, which is to be given as the backbone",
}
TITLES = {
    "medusa": "Medusa heads, named as by their authors",
    "medusa-2": "Medusa-2: heads inside the shards of a whole model",
    "medusa-vllm": "Medusa heads, named as by vLLM",
    "medusa-trt": "Medusa heads, named as by TensorRT-LLM",
    "eagle1": "an EAGLE-1 or EAGLE-2 head",
    "eagle3": "an EAGLE-3 head",
    "speculators": "an EAGLE-3 head in the speculators format of vLLM",
    "hydra": "Hydra heads",
    "mlp_speculator": "an MLP speculator",
    "headstart": "a head in headstart's own format",
}


def kind_of(config: Config, names: Iterable[str]) -> str:
    """A key of `TITLES`.

    Raises:
        UserError: it is nothing that is known here; says what it looks like.
    """
    names = list(names)
    if config.get("format") == "headstart":
        return "headstart"
    if "speculators_model_type" in config:
        return "speculators"
    # by most, so that a stray tensor misleads nobody
    counts = {kind: sum(bool(re.fullmatch(sign, name)) for name in names) for kind, sign in _SIGNS}
    kind = max(counts, key=lambda kind: counts[kind])
    if any(re.fullmatch(r"medusa_head\.\d+\.\d+\..*", name) for name in names):
        kind = "medusa-2" if counts["causal-lm"] else "medusa"
    elif kind in ("causal-lm", "eagle") and counts["causal-lm"]:  # heads with the prefix of a model have a layer more
        kind = "eagle" if any(re.search(r"(^|\.)(fc|hidden_norm)\.weight$", name) for name in names) else "causal-lm"
    elif kind == "eagle" and ("dflash_config" in config or "hidden_norm.weight" in names):
        kind = "dflash"
    if kind == "eagle":
        kind = "eagle3" if _says_eagle3(config, names) else "eagle1"
    if not max(counts.values()) or kind in _UNKNOWN:
        raise UserError(f"it looks like {_UNKNOWN.get(kind) or likeness(config, names)}")
    return kind


def wrapper_of(names: Iterable[str]) -> str:
    """What a wrapper around the head (DistributedDataParallel, torch.compile) has put before every name, if one has."""
    rests, prefix = list(names), ""
    while rests and not any(re.fullmatch(sign, rest) for rest in rests for _, sign in _SIGNS):
        firsts = {rest.partition(".")[0] for rest in rests}
        if len(firsts) > 1 or any("." not in rest for rest in rests):
            return ""
        prefix += f"{firsts.pop()}."
        rests = [rest.partition(".")[2] for rest in rests]
    return prefix


def _says_eagle3(config: Config, names: list[str]) -> bool:
    return (
        "draft_vocab_size" in config
        or "Eagle3" in str(config.get("architectures"))
        or any(re.fullmatch(r"(model\.)?(d2t|t2d|midlayer\..*|layers\.0\.hidden_norm\.weight)", name) for name in names)
    )


def likeness(config: Config, names: list[str]) -> str:
    """What the config alone makes of it."""
    architecture = str((config.get("architectures") or [""])[0])
    model = str(config.get("model_type", ""))
    guesses = {
        "Medusa heads without their tensors": "medusa_num_heads" in config or model == "medusa",
        "Hydra heads without their tensors": "hydra_num_heads" in config,
        "an MLP speculator without its tensors": model == "mlp_speculator",
        "an EAGLE-3 head without its tensors": "Eagle3" in architecture or "draft_vocab_size" in config,
        "an EAGLE head without its tensors": "Eagle" in architecture or config.get("num_hidden_layers") == 1,
        _UNKNOWN["causal-lm"]: architecture.endswith("ForCausalLM"),
    }
    return next((text for text, fits in guesses.items() if fits), f"nothing known here, with {some(sorted(names))}")
