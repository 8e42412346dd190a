"""What a drafter has not read yet, in large pieces.

Letters: T positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..heads.backbone import Features

PIECE = 512  # positions that a drafter reads at once


def joined(held: Sequence[tuple[Features, Sequence[int]]]) -> list[tuple[Features, Sequence[int]]]:
    """Texts that follow each other, in pieces of some hundred positions: (1, T, .) features and T tokens each."""
    found: list[tuple[list[Features], list[int]]] = []
    for features, ids in held:
        if not found or len(found[-1][1]) + len(ids) > PIECE:
            found.append(([], []))
        found[-1][0].append(features)
        found[-1][1].extend(ids)
    return [(_cat(features), ids) for features, ids in found]


def _cat(features: Sequence[Features]) -> Features:
    if len(features) == 1:
        return features[0]
    taps = [one.taps for one in features if one.taps is not None]
    return Features(torch.cat([one.last for one in features], 1), torch.cat(taps, 1) if taps else None)
