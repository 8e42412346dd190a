"""Hidden states in eight bits: a scale for each state, and its few largest channels apart.

Single channels of a hidden state reach a thousand times the rest of it, and one scale for all would leave the rest
nothing. So the largest channels of each state are kept as they are, in bf16, and the scale is that of the others.

Letters: N states, H channels, k channels kept apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

APART = 4  # channels of each state
PARTS = ("q", "scale", "value", "channel")


def encoded(states: Tensor) -> dict[str, Tensor]:
    """(N, H) states to the parts that stand for them.

    Returns:
        q (N, H) int8, scale (N,) fp32, value (N, k) bf16 and channel (N, k) int16 of what is kept apart.
    """
    assert states.shape[-1] < 1 << 15, f"{states.shape[-1]} channels; their numbers are kept in 16 bits"
    states = states.float()
    channel = states.abs().topk(min(APART, states.shape[-1]), -1).indices.sort(-1).values  # (N, k)
    rest = states.scatter(-1, channel, 0.0)
    scale = rest.abs().amax(-1) / 127  # (N,)
    q = (rest / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round().to(torch.int8)
    return {"q": q, "scale": scale, "value": states.gather(-1, channel).bfloat16(), "channel": channel.short()}


def decoded(parts: dict[str, Tensor]) -> Tensor:
    """The parts (N, .) to (N, H) states, fp32."""
    rest = parts["q"].float() * parts["scale"][:, None]
    return rest.scatter(-1, parts["channel"].long(), parts["value"].float())


def size(width: int) -> int:
    """Bytes of a state."""
    return width + 4 + min(APART, width) * (2 + 2)
