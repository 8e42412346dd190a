"""Rotary positions of a head: cosines and sines, by transformers' own embedding, every kind of scaling included.

Letters: B rows, T positions, h width of an attention head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PhiConfig
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding


class Rotary:
    """A table of cosines and sines, longer when asked for more; no module, so that no cast rounds its frequencies.

    Args:
        parameters: as transformers writes `rope_parameters`; with partial_rotary_factor only a part of h is turned.
        head_dim: h.
        limit: positions that the backbone was made for.
    """

    @torch.inference_mode(False)  # scalings that depend on the length write into what is made here
    def __init__(self, parameters: dict[str, Any], head_dim: int, limit: int) -> None:
        self.limit = limit
        # Phi's is the common one, and unlike Llama's it turns a part of the head in every kind of scaling
        config = PhiConfig(
            hidden_size=head_dim,
            num_attention_heads=1,
            max_position_embeddings=limit,
            rope_parameters={"partial_rotary_factor": 1.0, **parameters},
        )
        self.embedding = PhiRotaryEmbedding(config)
        self.cos = self.sin = torch.empty(0)

    @torch.inference_mode(False)  # made while decoding, it serves training, too
    def table(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """(at least `length`, 1, h) cosines and signed sines, with the dtype and device of `like`."""
        if len(self.cos) < length or (self.cos.dtype, self.cos.device) != (like.dtype, like.device):
            # scalings that depend on the length change at the limit: do not pass it before the text does
            room = max(length, min(2 * length, self.limit) if length <= self.limit else 2 * length)
            cos, sin = self.embedding(torch.zeros(()), torch.arange(room)[None])
            sin[..., : sin.shape[-1] // 2].neg_()
            self.cos, self.sin = (wave[0, :, None].to(like) for wave in (cos, sin))
        return self.cos, self.sin

    def at(self, starts: Sequence[int], width: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """(B or 1, T, 1, h) for T positions from `starts[row]` on."""
        cos, sin = self.table(max(starts) + width, like)
        if min(starts) == max(starts):
            return cos[None, starts[0] : starts[0] + width], sin[None, starts[0] : starts[0] + width]
        places = torch.tensor(starts, device=like.device)[:, None] + torch.arange(width, device=like.device)  # (B, T)
        return cos[places], sin[places]


def rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries or keys (..., heads, h) turned by their positions; a table narrower than h turns the first part only."""
    width = cos.shape[-1]
    if width < states.shape[-1]:
        return torch.cat((rotated(states[..., :width], cos, sin), states[..., width:]), -1)
    return torch.addcmul(states * cos, states.roll(width // 2, -1), sin)


def rope_of(config: Any) -> dict[str, Any]:
    """The rotary embedding of the layers that see the whole text; the common one for models without any."""
    found = getattr(config, "rope_parameters", None) or {}
    if found and all(isinstance(value, dict) for value in found.values()):
        found = found.get("full_attention") or next(iter(found.values()))
    return {"rope_type": "default", "rope_theta": 10000.0, **found}
