"""Noise on the features that a head reads in training, so that it bears features that are not quite right.

Source: Li et al. 2024, EAGLE, arXiv 2401.15077, section 4.2, in the form of the authors' code: uniform, and the weaker
the longer the row. What the loss compares with stays clean.

Letters: B rows, T positions, H width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..heads.backbone import Features

LENGTH = 512  # tokens of a row at which the noise is as wide as it is called


def noisy(features: Features, rows: Sequence[int], lengths: Sequence[int], width: float, seed: int) -> Features:
    """The features of B rows, each with noise of its own: neither batch nor padding changes it.

    Args:
        features: (B, T, .).
        rows: B numbers of the rows; with the seed, they determine the noise.
        lengths: B lengths; row b has uniform noise of +- width / 2 * 512 / lengths[b].
    """
    parts = [part for part in (features.last, features.taps) if part is not None]
    made = [part.clone() for part in parts]
    for place, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        generator = torch.Generator().manual_seed((seed * 1_000_003 + row) % 2**63)
        for part in made:
            drawn = torch.rand(length, part.shape[-1], generator=generator).sub_(0.5).mul_(width * LENGTH / length)
            part[place, :length] += drawn.to(part)
    return Features(made[0], made[1] if features.taps is not None else None)
