"""Who sees whom: additive 4-D attention masks for rows, trees and windows.

Letters: B rows, T query positions (text or tree nodes), P pending positions (earlier ones of the round, then the T), S
slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Reach(NamedTuple):
    """How far back a layer looks; without either, over the whole text."""

    window: int | None = None
    """The last so many positions, the query's own counted (sliding-window attention)."""
    chunk: int | None = None
    """From the last position that is a multiple of this (chunked attention)."""


EVERYTHING = Reach()


def causal(width: int, device: torch.device | None = None) -> Tensor:
    """(T, T) bool: each position sees itself and those before it."""
    return torch.ones(width, width, dtype=torch.bool, device=device).tril()


def positions(lengths: Sequence[int], ancestors: Tensor) -> Tensor:
    """(B, T) position ids of the last T pending tokens: committed length plus number of proper ancestors.

    Args:
        lengths: committed tokens of each row.
        ancestors: (T, P) or (B, T, P) bool, which pending tokens a query sees, itself included.
    """
    depth = ancestors.sum(-1) - 1  # (T,) or (B, T)
    return torch.tensor(lengths, device=ancestors.device)[:, None] + depth


def attention_mask(
    lengths: Sequence[int], ancestors: Tensor, dtype: torch.dtype, *, reach: Reach = EVERYTHING
) -> Tensor:
    """(B, 1, T, S) additive mask over the slots of a cache: 0 where a query looks, the dtype's minimum elsewhere.

    A query sees the committed tokens of its row and its own ancestors among the pending ones, both only as far back
    as `reach` goes.

    Args:
        lengths: committed tokens of each row; pending ones lie right behind them.
        ancestors: (T, P) or (B, T, P) bool; the queries are the last T of the P pending tokens.
    """
    rows, longest = len(lengths), max(lengths)
    width, pending = ancestors.shape[-2:]
    device = ancestors.device
    if reach == EVERYTHING and min(lengths) == longest:
        visible = torch.ones(
            (ancestors.shape[0] if ancestors.ndim == 3 else 1),
            width,
            longest + pending,
            dtype=torch.bool,
            device=device,
        )
        visible[..., longest:] = ancestors
        return _additive(visible.expand(rows, -1, -1), dtype)
    length = torch.tensor(lengths, device=device)[:, None]  # (B, 1)
    slot = torch.arange(longest + pending, device=device)[None]  # (1, S)
    offset = slot - length  # (B, S): which pending token lies in this slot
    inside = (offset >= 0) & (offset < pending)
    offset = offset.clamp(0, pending - 1)
    if ancestors.ndim == 2:
        pending_visible = ancestors[:, offset].transpose(0, 1)  # (B, T, S)
    else:
        pending_visible = ancestors.gather(2, offset[:, None].expand(-1, width, -1))
    visible = torch.where(inside[:, None], pending_visible, (slot < length)[:, None])
    if reach != EVERYTHING:
        visible = visible & _within(reach, length, slot, offset, inside, ancestors)
    return _additive(visible, dtype)


def widened(mask: Tensor, slots: int) -> Tensor:
    """(B, 1, T, S) mask over at least so many slots; nobody sees those that are new."""
    more = slots - mask.shape[-1]
    return mask if more <= 0 else F.pad(mask, (0, more), value=torch.finfo(mask.dtype).min)


def _within(reach: Reach, length: Tensor, slot: Tensor, offset: Tensor, inside: Tensor, ancestors: Tensor) -> Tensor:
    """(B, T, S) bool: the slot's position is not too far behind the query's.

    A visible pending slot is an ancestor, so its distance is the number of the query's ancestors below it; ancestors
    come in order of depth, hence a running count from the right gives it.
    """
    depth = ancestors.sum(-1) - 1  # (T,) or (B, T)
    query = length + depth if depth.ndim == 2 else length + depth[None]  # (B, T) positions
    below = ancestors.flip(-1).cumsum(-1).flip(-1) - 1  # (.., T, P) distance to each ancestor
    if below.ndim == 2:
        distance = below[:, offset].transpose(0, 1)  # (B, T, S)
    else:
        distance = below.gather(2, offset[:, None].expand(-1, below.shape[1], -1))
    distance = torch.where(inside[:, None], distance, query[:, :, None] - slot[:, None])
    if reach.chunk is not None:
        return distance <= query[:, :, None] % reach.chunk
    assert reach.window is not None
    return distance < reach.window


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, T, S) bool to the (B, 1, T, S) float form that eager and sdpa attention both add."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]


def behind(text: Sequence[int], ids: Tensor, ancestors: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """(1, S + T) ids of a text and the nodes behind it, and who sees whom among them."""
    whole = torch.cat([torch.tensor([list(text)], device=ids.device), ids], 1)
    if ancestors is None:
        return whole, None
    tree = causal(whole.shape[1], ids.device)
    tree[len(text) :, len(text) :] = ancestors
    return whole, tree
