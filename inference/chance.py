"""Where the randomness of drafts and of the rules that judge them comes from, keyed so that it can be had again.

Letters: V vocabulary. q is the drafter's probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy
import torch
from torch import Tensor

SAMPLING, DRAFTING, JUDGING = 0, 1, 2
"""What noise is for. Tokens, drafts and the coins that judge them must never share any."""

Row = Tensor | Sequence[float]
"""(V,) probabilities, or anything in proportion to them."""


class Chance(Protocol):
    """Where a rule's randomness comes from; each call is independent of all others."""

    def accept(self, probability: float) -> bool:
        """A coin: True with this probability, and never where it is 0."""
        ...

    def draw(self, weights: Tensor) -> int:
        """An index of (V,) weights, each with its share of their sum; never one of weight 0."""
        ...


def keyed(seed: int, sample: int, position: int, purpose: int) -> numpy.random.Generator:
    """Noise that these alone determine, and that can be had at any time: it has a counter in place of a state (Philox,
    Salmon et al. 2011, as NumPy implements it)."""
    key = numpy.array([seed % 2**64, sample % 2**64], dtype=numpy.uint64)  # a bare list would go through float
    return numpy.random.Generator(numpy.random.Philox(key=key, counter=[0, 0, purpose, position]))


class Keyed:
    """Chance that (seed, sample, position, purpose) alone determine.

    One is made for each round and purpose, with the length of the text at the round's root as its position: a round
    emits at least one token, so no two rounds share noise, although both may judge drafts for the same place.
    """

    def __init__(self, seed: int, sample: int, position: int, purpose: int) -> None:
        assert purpose > SAMPLING, "that purpose belongs to the noise of sampler.gumbel_noise"
        self._generator = keyed(seed, sample, position, purpose)

    def accept(self, probability: float) -> bool:
        """Strictly below, so that a token of probability 0 is not accepted by a coin of 0."""
        return self._generator.random() < probability

    def draw(self, weights: Tensor) -> int:
        """By inverse of the cumulative sum, in float64."""
        bounds = weights.detach().cpu().double().cumsum(0)  # (V,)
        assert float(bounds[-1]) > 0, "weights without any mass"
        point = bounds[-1] * self._generator.random()
        index = int(torch.searchsorted(bounds, point, right=True))
        # rounding may lift the point to the last bound: the first index that reaches it has mass
        return index if index < len(bounds) else int(torch.searchsorted(bounds, bounds[-1]))


def without_replacement(q: Row, count: int, chance: Chance) -> list[int]:
    """Up to `count` distinct tokens, each drawn from q (V,) without the ones before; fewer where q has no more."""
    weights = normed(q).clone()  # (V,)
    tokens: list[int] = []
    while len(tokens) < count and float(weights.sum()) > 0:
        tokens.append(chance.draw(weights))
        weights[tokens[-1]] = 0
    return tokens


def normed(row: Row) -> Tensor:
    """(V,) float64, sum 1."""
    law = torch.as_tensor(row, dtype=torch.float64)
    mass = float(law.sum())
    assert 0 < mass < float("inf"), f"a row of probabilities sums to {mass}"
    return law / mass
