"""Which attention takes the mask of a tree, and another one for as long as it is needed.

Kernels such as flash attention know causal masks alone. A model that was loaded with one keeps it for whole texts; what
needs a mask of ours is computed by sdpa, or eager attention where the model has no sdpa.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from ..errors import UserError

_MASKED = ("sdpa", "eager")


def substitute(model: Any, decoder: nn.Module, name: str) -> str | None:
    """The attention to verify with; None: the model's own takes masks.

    Raises:
        UserError: its layers were built for a kernel that takes none.
    """
    config = model.config.get_text_config(decoder=True)
    own = config._attn_implementation
    if own is None or own in _MASKED or _takes_masks(own):
        return None
    for layer in decoder.modules():
        if "FlashAttention" in type(layer).__name__:
            raise UserError(
                f"{name}: its layers ({type(layer).__name__}) are built for {own}, which takes no mask of a tree; "
                'load it with attention="sdpa"'
            )
    return "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"


@contextmanager
def attending(config: Any, attention: str | None) -> Iterator[None]:
    """With this attention meanwhile; None: the model's own."""
    if attention is None:
        yield
        return
    own = config._attn_implementation
    config._attn_implementation = attention
    try:
        yield
    finally:
        config._attn_implementation = own


def _takes_masks(attention: str) -> bool:
    """Whether transformers makes additive or boolean 4-D masks for it."""
    known = dict(ALL_MASK_ATTENTION_FUNCTIONS.items())
    return attention in known and known[attention] in [known[one] for one in _MASKED]
