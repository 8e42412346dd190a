"""Several short conversations in one row of the backbone's forward, so that less of it is padding.

Each conversation sees itself alone, at positions that begin at 0, so that its features are those of a row of its own.

Letters: B conversations, T positions, P packed rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..heads.backbone import Backbone, Features


def places_of(lengths: Sequence[int], width: int) -> list[tuple[int, int]]:
    """Row and first position of each conversation in rows of this width: the longest first, where it fits first."""
    placed, filled = [(0, 0)] * len(lengths), list[int]()
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        length = lengths[number]
        row = next((row for row, end in enumerate(filled) if end + length <= width), len(filled))
        if row == len(filled):
            filled.append(0)
        placed[number] = row, filled[row]
        filled[row] += length
    return placed


def packed_features(backbone: Backbone, ids: Tensor, lengths: Sequence[int], taps: Sequence[int]) -> Features:
    """What `backbone.forward` makes of B conversations, by a forward of fewer rows; zeros stand at padding.

    Args:
        ids: (B, T), padded on the right.
        lengths: B of them, T at most.
    """
    width = ids.shape[1]
    placed = places_of(lengths, width)
    rows = 1 + max(row for row, _ in placed)
    if rows == len(placed):
        return backbone.forward(ids, taps=taps)
    packed = torch.zeros(rows, width, dtype=ids.dtype, device=ids.device)  # (P, T)
    # which conversation a position belongs to; each one of padding is its own, and sees itself
    owner = torch.arange(len(placed), len(placed) + width, device=ids.device).repeat(rows, 1)
    at = torch.zeros_like(ids)  # (B, T) where each position went, in the packed rows end to end
    true = torch.zeros_like(ids, dtype=torch.bool)
    for number, ((row, start), length) in enumerate(zip(placed, lengths, strict=True)):
        packed[row, start : start + length] = ids[number, :length]
        owner[row, start : start + length] = number
        at[number, :length] = torch.arange(length, device=ids.device) + row * width + start
        true[number, :length] = True
    seen = (owner[:, :, None] == owner[:, None]).tril()  # (P, T, T)
    features = backbone.forward(packed, ancestors=seen, taps=taps)
    last, tapped = (
        None if part is None else part.flatten(0, 1)[at] * true[..., None] for part in (features.last, features.taps)
    )
    assert last is not None, "every forward has last states"
    return Features(last, tapped)
