"""Rows of different widths in one forward: ids side by side, and masks in which padding is seen by nobody.

Padding sees itself alone, and so stands at a position that every model has.

Letters: B rows, T positions, N tree nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .tree import Tree


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """(B, T) ids, with zeros behind the shorter ones."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)


def texts(counts: Sequence[int], device: torch.device) -> Tensor | None:
    """(B, T, T) who sees whom in pieces of text; padding sees itself alone, and so stands at the piece's first place.
    None: no padding."""
    width = max(counts)
    if min(counts) == width:
        return None
    place = torch.arange(width)
    true = place < torch.tensor(counts)[:, None]  # (B, T)
    seen = (place <= place[:, None]) & true[:, :, None] | torch.eye(width, dtype=torch.bool)
    return seen.to(device)


def forest(trees: Sequence[Tree], device: torch.device) -> Tensor | None:
    """(B, N, N) who sees whom in the trees; padding sees itself alone. None: chains of one length."""
    width = max(map(len, trees))
    if all(tree.depth == width - 1 for tree in trees):
        return None
    seen = torch.eye(width, dtype=torch.bool).repeat(len(trees), 1, 1)
    for place, tree in enumerate(trees):
        seen[place, : len(tree), : len(tree)] = tree.ancestors
    return seen.to(device)
