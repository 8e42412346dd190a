"""A fixed number of slots for keys and values, shared out among rows that come and go.

`Cache` serves rows that begin together and may grow; `Slots` never grow. All memory is there from the start, and each
row has a line of it. How many lines there are is up to `arrange`: few long ones or many short ones. A forward works on
neighbouring lines through a `Cache` that is lent for it.

Letters: B rows, S slots of a line, h key-value heads, d their width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .cache import Cache


class Lent(Cache):
    """Some lines, for one forward (and what is committed of it). It cannot grow."""

    def open(self, width: int) -> None:
        assert self.end + width <= self.capacity, f"{self.end} + {width} tokens in lines of {self.capacity} slots"
        super().open(width)


class Slots:
    """Room for `tokens` tokens.

    Args:
        tokens: slots in all.
        like: a cache that has been written to; says which layers there are, of what shape, type and device.
    """

    def __init__(self, tokens: int, like: Cache) -> None:
        self.tokens = tokens
        self.pools: list[list[Tensor]] = [
            [buffer.new_zeros((buffer.shape[1], tokens, buffer.shape[3])) for buffer in buffers]  # (h, tokens, d)
            for buffers in (like.keys, like.values)
        ]
        self.lengths: list[int] = []
        """Committed tokens of each row."""
        self._texts: list[list[int] | None] = []
        self.lines = 1

    @property
    def capacity(self) -> int:
        """Slots of a line, S."""
        return self.tokens // self.lines

    @property
    def bytes(self) -> int:
        """Memory of all slots."""
        return sum(pool.numel() * pool.element_size() for pools in self.pools for pool in pools)

    @torch.inference_mode()
    def arrange(self, lines: int) -> None:
        """Make it so many lines, as long as that leaves them."""
        assert len(self.lengths) <= lines, f"{len(self.lengths)} rows in {lines} lines"
        if lines == self.lines:
            return
        rows, used = len(self.lengths), max(self.lengths, default=0)
        assert used <= self.tokens // lines, f"a row of {used} tokens in lines of {self.tokens // lines}"
        before, self.lines = self.lines, lines
        for pool in (pool for pools in self.pools for pool in pools):
            kept = _lines(pool, before)[:rows, :, :used].clone()
            _lines(pool, lines)[:rows, :, :used] = kept

    def admit(self) -> None:
        """One more row, behind the others."""
        assert len(self.lengths) < self.lines, f"{self.lines} lines are all taken"
        self.lengths.append(0)
        self._texts.append(None)

    def lend(self, begin: int, end: int) -> Lent:
        """The lines of these rows; `take` what was committed before anything is moved."""
        cache = Lent(end - begin, self.capacity)
        cache.lengths = self.lengths[begin:end]
        cache.keys, cache.values = ([_lines(pool, self.lines)[begin:end] for pool in pools] for pools in self.pools)
        texts = [text for text in self._texts[begin:end] if text is not None]
        cache.texts = texts if len(texts) == end - begin else None
        return cache

    def take(self, cache: Lent, begin: int) -> None:
        """What was committed in lines that were lent from `begin` on."""
        self.lengths[begin : begin + cache.rows] = cache.lengths
        if cache.texts is not None:
            self._texts[begin : begin + cache.rows] = cache.texts

    def swap(self, one: int, other: int) -> None:
        """Two rows change places."""
        for line in self._each():
            used = max(self.lengths[one], self.lengths[other])
            kept = line[one, :, :used].clone()
            line[one, :, :used] = line[other, :, :used]
            line[other, :, :used] = kept
        lengths, texts = self.lengths, self._texts
        lengths[one], lengths[other] = lengths[other], lengths[one]
        texts[one], texts[other] = texts[other], texts[one]

    def move(self, source: int, target: int) -> None:
        """A row takes the place of another, which is forgotten; its own place is worth nothing from here on."""
        used = self.lengths[source]
        for line in self._each():
            line[target, :, :used] = line[source, :, :used]
        self.lengths[target], self._texts[target] = used, self._texts[source]

    def wipe(self, row: int) -> None:
        """Zeros in all of its slots: a number that is none would reach other rows even behind a mask."""
        for line in self._each():
            line[row] = 0

    def pop(self) -> None:
        """Forget the last row."""
        self.lengths.pop()
        self._texts.pop()

    def clear(self) -> None:
        """Forget all rows, and wipe their lines."""
        self.lengths.clear()
        self._texts.clear()
        for pool in (pool for pools in self.pools for pool in pools):
            pool.zero_()

    def _each(self) -> list[Tensor]:
        """(B, h, S, d) views of all pools."""
        return [_lines(pool, self.lines) for pools in self.pools for pool in pools]


def _lines(pool: Tensor, lines: int) -> Tensor:
    """(h, tokens, d) as (lines, h, S, d): a view."""
    capacity = pool.shape[1] // lines
    return pool[:, : lines * capacity].view(pool.shape[0], lines, capacity, pool.shape[2]).transpose(0, 1)
