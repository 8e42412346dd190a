"""Backbones, heads and tokenizers by name: the flags that choose them, and what loads them for a verb.

Nowhere else are they loaded by name. The rooms are imported inside the functions: help reads the classes from source.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

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
    revision: str | None = None
    """Branch, tag or commit of a Hub id."""


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
    given = {name: getattr(settings, name) for name in ("dtype", "attention", "revision") if hasattr(settings, name)}
    device = getattr(settings, "device", None) or ("cuda" if torch.cuda.is_available() else None)
    return load_backbone(settings.backbone, device=device, **given)


def silence() -> None:
    """Keep transformers' progress bars away: one status line at a time."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def tokenizer_of(options: TokenizerOptions) -> Any:
    """The tokenizer that the options name."""
    from headstart.heads.load import load_tokenizer

    return load_tokenizer(options.backbone, revision=options.revision)


def drafter_of(name: str, backbone: Backbone) -> Any:
    """What drafts: a head from its folder or Hub id, in the backbone's dtype; the name of a drafter without weights; or
    None."""
    if name in ("none", "ngram"):
        return None if name == "none" else name
    from headstart import load_head

    return load_head(name, backbone)
