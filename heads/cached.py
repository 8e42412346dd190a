"""A decoder layer over a cache of its keys and values: what drafting needs of it.

True tokens lie committed in the cache, guesses pending behind them.

Letters: B rows, T positions, K nodes, P pending nodes, S slots, H width, W width of the attention's inputs, k key-value
heads, h width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .base import at_anchors
from .cache import Cache
from .layer import DecoderLayer, attend
from .mask import attention_mask
from .rotary import Rotary

Pair = tuple[Tensor, Tensor]


def write(layer: DecoderLayer, number: int, cache: Cache, inputs: Tensor, turn: Pair) -> Pair:
    """Put entries of (B, T, W) inputs behind the others of layer `number`; keys and values (B, k, S, h) of all."""
    keys, values = layer.self_attn.entries(inputs, *turn)
    return cache.update(keys.transpose(1, 2), values.transpose(1, 2), number)


def seeing(cache: Cache, visible: Tensor | None, like: Tensor) -> Tensor | None:
    """The mask of nodes that see the committed text, and of what is pending `visible` (B, K, P) or all; None: all."""
    if visible is None and min(cache.lengths) == max(cache.lengths):
        return None
    everything = torch.ones(1, cache.pending, dtype=torch.bool, device=like.device)
    return attention_mask(cache.lengths, everything if visible is None else visible, like.dtype)


def answer(
    layer: DecoderLayer, residual: Tensor, inputs: Tensor, entries: Pair, turn: Pair, mask: Tensor | None
) -> Tensor:
    """(B, K, H) output of a layer at nodes whose entries are written."""
    return layer.finish(residual, attend(layer.self_attn.queries(inputs, *turn), *entries, mask))


def anchored(
    layer: DecoderLayer,
    number: int,
    cache: Cache,
    rotary: Rotary,
    inputs: Tensor,
    residual: Tensor,
    lengths: Sequence[int] | None,
) -> Tensor:
    """Take in (B, T, .) true positions, for which the cache was opened: all lend entries, the last of each row asks.

    Args:
        lengths: true positions of each row where they differ.

    Returns:
        (B, 1, H) output at the anchors; the true positions are committed.
    """
    width = inputs.shape[1]
    turn = rotary.at(cache.lengths, width, inputs)
    entries = write(layer, number, cache, inputs, turn)
    if lengths is None or min(lengths) == width:
        turn = turn[0][:, -1:], turn[1][:, -1:]
        hidden = answer(layer, residual[:, -1:], inputs[:, -1:], entries, turn, seeing(cache, None, inputs))
        cache.commit_all()
        return hidden
    visible = (torch.arange(width) < torch.tensor(lengths)[:, None])[:, None].to(inputs.device)  # (B, 1, T)
    places = [start + count - 1 for start, count in zip(cache.lengths, lengths, strict=True)]
    hidden = answer(
        layer,
        at_anchors(residual, lengths),
        at_anchors(inputs, lengths),
        entries,
        rotary.at(places, 1, inputs),
        seeing(cache, visible, inputs),
    )
    cache.commit([range(count) for count in lengths])
    return hidden


def below(states: Tensor, parents: Tensor, nodes: int) -> Tensor:
    """(B, K, .) states of the parents of K nodes, from (B, L, .) of the depth above, the last of `nodes` in the round.

    With no nodes yet that is the anchor, whose number is -1.
    """
    if parents.shape[1] == states.shape[1] == 1:
        return states  # still a chain
    first = nodes - states.shape[1]
    return states[torch.arange(len(parents), device=parents.device)[:, None], parents - first]
