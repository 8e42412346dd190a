"""Rows to batches, in an order that (seed, epoch) determines and a step number addresses.

The rows of an optimizer step follow from its number alone, so that going on in the middle of an epoch is arithmetic.
How they are dealt out to processes and forwards changes no gradient: the loss is weighted over the whole step.

Letters: B rows, T positions, D depths, M_d anchors of depth d.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import count, pairwise
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from ..data.features import FeatureCache
from ..errors import UserError
from ..heads.backbone import Features
from .recipe import BatchSettings

Array = np.ndarray[Any, Any]


@dataclass
class Batch:
    """Rows of one forward, padded on the right."""

    ids: Tensor
    """(B, T) int64."""
    mask: Tensor
    """(B, T) bool, True where a token is supervised; padding is not."""
    rows: list[int]
    """Their numbers among the rows trained on."""
    tokens: int
    """True tokens, padding left out."""
    cached: Callable[[], Features] | None = None
    """Reads the features of these positions, on the CPU, where a cache has them."""
    lengths: list[int] | None = None
    """True tokens of each row, where several rows may be packed into one of the backbone's forward."""

    def to(self, device: torch.device) -> Batch:
        return replace(self, ids=self.ids.to(device), mask=self.mask.to(device))

    def blank(self) -> Batch:
        """Its last row with nothing supervised: a forward that others wait for, of features from the same place."""
        last, read = slice(-1, None), self.cached
        cached = None if read is None else lambda: read()[last]
        return Batch(self.ids[last], torch.zeros_like(self.mask[last]), self.rows[last], 0, cached)


def anchors(mask: Tensor, depths: int) -> list[Tensor]:
    """For each depth d the anchors (M_d,) int64, ascending, b * T + t.

    Position t is an anchor of depth d if tokens t + 1 .. t + 2 + d are all supervised: the last token emitted, the
    drafts above, and the proposed token t + 2 + d are one run of a reply. Those of depth d are among those of depth
    d - 1. Of a reply at positions s .. e - 1, depth 0 proposes s + 1 .. e - 1; the backbone's prefill gives s itself.

    Args:
        mask: (B, T) bool.
    """
    width = mask.shape[1]
    alive = torch.zeros_like(mask)
    alive[:, : max(width - 2, 0)] = mask[:, 1:-1] & mask[:, 2:]
    found = []
    for depth in range(depths):
        if depth:
            proposed = torch.zeros_like(mask)
            proposed[:, : max(width - 2 - depth, 0)] = mask[:, 2 + depth :]
            alive = alive & proposed
        found.append(alive.flatten().nonzero().flatten())
    return found


@dataclass
class Rows:
    """Tokens and masks of many rows, lying end to end."""

    ids: Array
    """All token ids."""
    mask: Array
    """bool, True where a token is supervised."""
    starts: Array
    """(rows,) where each row starts in these."""
    stops: Array
    """(rows,) behind its last token."""
    keys: list[str]
    """The hash of each row's conversation."""
    places: list[str]
    """The file and row that each came from, for messages."""
    numbers: Array | None = None
    """(rows,) their numbers in the prepared set; None: as they stand."""
    cache: FeatureCache | None = None
    """Where their features are; None: the backbone is asked."""

    @classmethod
    def of(cls, dataset: Any) -> Self:
        """From a prepared data set, with columns ids, mask, key and place."""
        table = dataset.with_format("arrow")[:]
        ids, mask = (table[name].combine_chunks() for name in ("ids", "mask"))
        offsets = ids.offsets.to_numpy()
        assert (offsets == mask.offsets.to_numpy()).all(), "ids and masks of the prepared rows differ in length"
        flat_mask = mask.values.to_numpy().astype(bool)
        keys, places = table["key"].to_pylist(), table["place"].to_pylist()
        return cls(ids.values.to_numpy(), flat_mask, offsets[:-1], offsets[1:], keys, places)

    @classmethod
    def from_lists(cls, ids: Sequence[Sequence[int]], mask: Sequence[Sequence[int]]) -> Self:
        """From plain lists, a row each; its number is its key."""
        stops = np.cumsum([len(row) for row in ids])
        starts = np.concatenate(([0], stops[:-1]))
        flat_ids, flat_mask = (np.array([one for row in rows for one in row]) for rows in (ids, mask))
        keys = [str(row) for row in range(len(ids))]
        return cls(flat_ids, flat_mask.astype(bool), starts, stops, keys, [f"row {key}" for key in keys])

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, row: int) -> tuple[Array, Array]:
        """Ids and mask of a row."""
        place = slice(self.starts[row], self.stops[row])
        return self.ids[place], self.mask[place]

    def number(self, row: int) -> int:
        """The number of a row in the prepared set."""
        return row if self.numbers is None else int(self.numbers[row])

    @property
    def lengths(self) -> Array:
        return self.stops - self.starts

    @property
    def supervised(self) -> Array:
        """(rows,) supervised tokens of each."""
        sums = np.concatenate(([0], np.cumsum(self.mask)))
        return sums[self.stops] - sums[self.starts]

    @property
    def longest(self) -> int:
        """Tokens of the longest run of supervised ones; depth d learns from runs of d + 2 and more."""
        found = 0
        for row in range(len(self)):
            edges = np.flatnonzero(np.diff(self[row][1], prepend=False, append=False))
            found = max(found, int((edges[1::2] - edges[::2]).max(initial=0)))
        return found

    def parted(self, held_out: float, max_length: int) -> tuple[Rows, Rows]:
        """Rows to train on and rows held out, by `split`, each `trimmed`."""
        trained, held = (self.select(part).trimmed(max_length) for part in split(self.keys, held_out))
        return trained, held

    def select(self, rows: Iterable[int]) -> Rows:
        rows = np.array(list(rows), dtype=np.int64)
        keys, places = ([names[row] for row in rows] for names in (self.keys, self.places))
        numbers = rows if self.numbers is None else self.numbers[rows]
        return replace(
            self, starts=self.starts[rows], stops=self.stops[rows], keys=keys, places=places, numbers=numbers
        )

    def trimmed(self, max_length: int) -> Rows:
        """Each row up to the last token within `max_length` that depth 0 proposes; rows without any are left out."""
        kept: list[int] = []
        stops: list[int] = []
        for row, start in enumerate(self.starts):
            mask = self[row][1][:max_length]
            proposed = np.flatnonzero(mask[1:-1] & mask[2:])
            if len(proposed):
                kept.append(row)
                stops.append(start + proposed[-1] + 3)
        made = self.select(kept)
        made.stops = np.array(stops, dtype=np.int64)
        return made

    def hash(self) -> str:
        """16 hex digits that stand for ids, masks and order."""
        digest = hashlib.sha256()
        for row in range(len(self)):
            ids, mask = self[row]
            digest.update(len(ids).to_bytes(8) + ids.astype(np.int64).tobytes() + mask.tobytes())
        return digest.hexdigest()[:16]


def split(keys: Sequence[str], share: float) -> tuple[list[int], list[int]]:
    """Rows to train on and rows held out, by a hash of each conversation's key: the same in any file and order.

    Of two conversations or more, a share above 0 holds out at least one and leaves at least one.
    """
    draws = {key: int(hashlib.sha256(f"held out {key}".encode()).hexdigest()[:16], 16) / 16**16 for key in keys}
    order = sorted(draws, key=lambda key: (draws[key], key))
    number = sum(draw < share for draw in draws.values())
    if share > 0:
        number = min(max(number, 1), len(order) - 1)
    held = set(order[:number])
    return [i for i, key in enumerate(keys) if key not in held], [i for i, key in enumerate(keys) if key in held]


class Batches:
    """The batches of one process.

    Args:
        rows: what is trained on; every row has something to learn.
        settings: how many rows a step has, and how many a forward.
        seed: with the epoch, determines the order.
        rank, world: which process this is, of how many.
    """

    def __init__(self, rows: Rows, settings: BatchSettings, seed: int, *, rank: int = 0, world: int = 1) -> None:
        if not len(rows):
            raise UserError(
                "nothing to train on: no row has two supervised tokens in a run within max_length; look at the rows "
                "with headstart data preview"
            )
        self.rows, self.settings, self.seed, self.rank, self.world = rows, settings, seed, rank, world
        self.lengths = rows.lengths
        self.plan = lru_cache(maxsize=2)(self._plan)
        self.size = cache(self._size)

    def _plan(self, epoch: int) -> list[list[int]]:
        """The rows of each step of an epoch: every row once."""
        order = self._order_of(epoch).tolist()
        return [order[start:stop] for start, stop in pairwise(self._bounds(epoch))]

    def _order_of(self, epoch: int) -> Array:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return torch.randperm(len(self.rows), generator=generator).numpy()

    def _bounds(self, epoch: int) -> list[int]:
        """Where the steps of an epoch begin in its order, and where the last one ends."""
        number = len(self.rows)
        if self.settings.tokens is None:
            return [*range(0, number, self.settings.rows), number]
        tokens, bounds = np.cumsum(self.lengths[self._order_of(epoch)]), [0]
        while bounds[-1] < number:  # the first row that fills a step up ends it
            before = int(tokens[bounds[-1] - 1]) if bounds[-1] else 0
            bounds.append(min(number, int(np.searchsorted(tokens, before + self.settings.tokens)) + 1))
        return bounds

    def steps(self, epochs: int) -> int:
        """Optimizer steps of so many epochs; the last one of an epoch may be short."""
        return sum(self.size(epoch) for epoch in range(epochs))

    def _size(self, epoch: int) -> int:
        """Steps of an epoch; by tokens it has to be dealt out to know, but only once."""
        if self.settings.tokens is None:
            return -(-len(self.rows) // self.settings.rows)
        return len(self._bounds(epoch)) - 1

    def place(self, step: int) -> tuple[int, int]:
        """The epoch of a step (both from 0), and its number in it."""
        for epoch in count():
            steps = self.size(epoch)
            if step < steps:
                return epoch, step
            step -= steps
        raise AssertionError("unreachable")

    def rows_of(self, step: int) -> list[int]:
        """The rows of a step, over all processes."""
        epoch, number = self.place(step)
        return self.plan(epoch)[number]

    def _order(self, step: int) -> list[int]:
        """The rows of a step as they are dealt out to processes, the longest first."""
        return sorted(self.rows_of(step), key=lambda row: (-self.lengths[row], row))

    def groups(self, step: int) -> list[list[int]]:
        """The rows of each forward of a step on this process, the longest first."""
        return grouped(self.rows, self._order(step)[self.rank :: self.world], self.settings)

    def forwards(self, step: int) -> list[Batch]:
        """The batches of a step on this process; one without anything supervised if no row is left for it."""
        groups = self.groups(step)
        if not groups:
            return [collate(self.rows, self._order(step)[-1:]).blank()]
        return [collate(self.rows, group, pack=self.settings.pack) for group in groups]


def forwards(rows: Rows, order: Sequence[int], settings: BatchSettings) -> list[Batch]:
    """Batches of these rows, longest first, each within the limits of one forward."""
    return [collate(rows, group, pack=settings.pack) for group in grouped(rows, order, settings)]


def grouped(rows: Rows, order: Sequence[int], settings: BatchSettings) -> list[list[int]]:
    """The rows of each of these forwards."""
    groups: list[list[int]] = [[]]
    lengths = rows.lengths
    most = settings.forward_rows or len(order)
    for row in sorted(order, key=lambda row: (-lengths[row], row)):
        group = groups[-1]
        if group and (len(group) == most or (len(group) + 1) * lengths[group[0]] > settings.forward_tokens):
            groups.append([])
        groups[-1].append(row)
    return [group for group in groups if group]


def collate(rows: Rows, numbers: Sequence[int], *, pack: bool = False) -> Batch:
    """These rows, side by side."""
    chosen = [rows[number] for number in numbers]
    width = max(len(ids) for ids, _ in chosen)
    ids = np.zeros((len(chosen), width), dtype=np.int64)
    mask = np.zeros((len(chosen), width), dtype=bool)
    for row, (tokens, supervised) in enumerate(chosen):
        ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, supervised
    cached = None
    if rows.cache is not None:
        places = [(rows.number(number), row, 0) for row, number in enumerate(numbers)]
        cached = partial(rows.cache.read, places, *ids.shape)
    lengths = [len(tokens) for tokens, _ in chosen]
    return Batch(
        torch.from_numpy(ids), torch.from_numpy(mask), list(numbers), sum(lengths), cached, lengths if pack else None
    )
