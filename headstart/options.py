"""Backbones, heads and tokenizers by name: the flags that choose them, and what loads them for a verb.

Nowhere else are they loaded by name. The rooms are imported inside the functions: help reads the classes from source.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headstart.errors import UserError

if TYPE_CHECKING:
    from headstart.heads.backbone import Backbone


@dataclass
class BackboneOptions:
    """Which backbone, and how it is loaded."""

    backbone: str
    """The frozen model: a built-in name (smollm2-135m), a folder, or a Hub id."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Number format of its weights; without it, the one they are stored in."""
    device: str | None = None
    """Where it runs, such as cpu or cuda; without it, a GPU if there is one."""
    attention: Literal["sdpa", "eager"] | None = None
    """Attention implementation; without it, transformers chooses."""
    quantize: Literal["8bit", "4bit", "int8"] | None = None
    """Round its weights while loading: 8bit or 4bit by bitsandbytes, int8 by torchao (which have to be installed)."""
    device_map: str | None = None
    """How it is spread over several devices, as accelerate takes it (auto, balanced); in place of device."""
    revision: str | None = None
    """Branch, tag or commit of a Hub id."""
    adapter: str | None = None
    """A Medusa-2 head, by folder or Hub id: the LoRA beside it is taken into the backbone, whose answers change."""


@dataclass
class ExactOptions(BackboneOptions):
    """The same for proofs, which are exact in fp32 only."""

    dtype: Literal["float32", "bfloat16", "float16"] | None = "float32"
    """Number format of its weights; in half precision near-ties are judged by what its rounding explains."""


@dataclass
class WriterOptions(BackboneOptions):
    """The backbone that answers; with --endpoint there need not be one."""

    backbone: str | None = None  # type: ignore[assignment]
    """The model that answers: a built-in name (smollm2-135m), a folder, or a Hub id. With --endpoint it is not loaded,
    and only says which model that is."""


@dataclass
class TokenizerOptions:
    """Whose tokenizer and chat template; no weights are loaded."""

    backbone: str
    """The model whose tokenizer and chat template are used: a built-in name (smollm2-135m), a folder, or a Hub id."""
    revision: str | None = None
    """Branch, tag or commit of a Hub id."""


def backbone_of(settings: Any) -> Backbone:
    """The backbone that a verb's settings name, on a GPU if there is one and nothing else was said."""
    import torch

    from headstart import load_backbone

    silence()
    names = ("dtype", "attention", "quantize", "device_map", "revision")
    given = {name: getattr(settings, name) for name in names if hasattr(settings, name)}
    device = getattr(settings, "device", None) or ("cuda" if torch.cuda.is_available() else None)
    backbone = load_backbone(settings.backbone, device=device, **given)
    if adapter := getattr(settings, "adapter", None):
        from headstart import load_head

        load_head(adapter, backbone, adapter=True)
    return backbone


def silence() -> None:
    """Keep transformers' progress bars away: one status line at a time."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def tokenizer_of(options: TokenizerOptions) -> Any:
    """The tokenizer that the options name."""
    from headstart.heads.load import load_tokenizer

    return load_tokenizer(options.backbone, revision=options.revision)


def drafter_of(name: str, backbone: Backbone) -> Any:
    """What drafts, by name: none, a name that `Generator` knows (ngram, suffix, exit:6, int8, hybrid:NAME), a causal LM
    from its folder or built-in name, or a head from its folder or Hub id; weights in the backbone's dtype.

    Raises:
        UserError: there is none of this name.
    """
    from headstart import load_backbone, load_head
    from headstart.inference.drafters import is_name
    from headstart.inference.hybrid import Hybrid

    if name == "none":
        return None
    kind, _, rest = name.partition(":")
    if kind == "hybrid" and rest and not Path(name).exists():
        second = drafter_of(rest, backbone)
        if second is None:
            raise UserError(
                f"{name}: hybrid:NAME names what drafts where lookup knows nothing; for lookup alone, suffix"
            )
        return Hybrid("suffix", second)
    if is_name(name) and not Path(name).exists():
        return name
    if _is_model(name):
        return load_backbone(name, dtype=backbone.dtype, device=backbone.device)
    return load_head(name, backbone)


def _is_model(name: str) -> bool:
    """Whether a name stands for a whole causal LM; some heads carry the architecture of their backbone."""
    from headstart.heads.fetch import BUILT_IN

    if name in BUILT_IN:
        return True
    try:
        config = json.loads((Path(name) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # whoever loads it says what is wrong
    if not isinstance(config, dict) or {"draft_vocab_size", "speculators_model_type"} & config.keys():
        return False
    architecture = str((config.get("architectures") or [""])[0])
    return architecture.endswith("ForCausalLM") and not _holds_head(Path(name), config)


def _holds_head(folder: Path, config: dict[str, Any]) -> bool:
    """Whether the names of the tensors are those of a head."""
    from headstart.heads.kinds import kind_of
    from headstart.heads.weights import PICKLES, tensor_shapes, weight_files

    try:
        files = weight_files(folder)
        if any(path.suffix in PICKLES for path in files) and config.get("num_hidden_layers", 1) > 1:
            return False  # pickles would have to be read whole, and those of heads are small
        return bool(kind_of(config, tensor_shapes(files)))
    except UserError:
        return False
