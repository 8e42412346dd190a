"""Which tokens a head can propose.

Letters: V vocabulary of the backbone, Vd draft vocabulary.

A draft id is a row of the head's projection, a target id a token of the backbone; both have the same order. In files
the map is two tensors, as in the EAGLE-3 layout: `d2t` (Vd,) int64 holds offsets, target id = draft id + d2t[draft id];
`t2d` (V,) bool marks the target ids that can be proposed. A full vocabulary has neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..errors import UserError


class DraftVocab(nn.Module):
    """The map between draft ids and target ids.

    Args:
        ids: the target ids that can be proposed, ascending; None: all of them.
        vocab_size: V.

    Raises:
        UserError: an id is out of range, occurs twice or is out of order.
    """

    d2t: Tensor | None
    t2d: Tensor | None

    def __init__(self, ids: Tensor | Sequence[int] | None, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        chosen = torch.arange(vocab_size) if ids is None else torch.as_tensor(ids, dtype=torch.long).cpu()
        _check(chosen, vocab_size)
        self.size = len(chosen)
        self.full = self.size == vocab_size
        marks = torch.zeros(vocab_size, dtype=torch.bool)
        marks[chosen] = True
        self.register_buffer("d2t", None if self.full else chosen - torch.arange(self.size))  # (Vd,)
        self.register_buffer("t2d", None if self.full else marks)  # (V,)

    @classmethod
    def count(cls, rows: Iterable[tuple[Any, Any]], vocab_size: int, size: int) -> Self:
        """The `size` tokens that are supervised most often; ties, and tokens never seen, go by the lower id.

        Args:
            rows: pairs (ids, mask) of equal length: token ids, and which of them are supervised.

        Raises:
            UserError: `size` is not within 1..V, a row's mask is of another length, or an id is out of range.
        """
        if not 1 <= size <= vocab_size:
            raise UserError(f"a draft vocabulary of {size} tokens was asked for; the backbone has {vocab_size}")
        counts = torch.zeros(vocab_size, dtype=torch.long)
        for number, (ids, mask) in enumerate(rows):
            tokens, supervised = torch.as_tensor(ids, dtype=torch.long), torch.as_tensor(mask, dtype=torch.bool)
            if tokens.shape != supervised.shape:
                raise UserError(f"row {number} has {tokens.numel()} tokens and a mask of {supervised.numel()}")
            kept = tokens[supervised]
            if kept.numel() and (int(kept.min()) < 0 or int(kept.max()) >= vocab_size):
                outside = kept[(kept < 0) | (kept >= vocab_size)][0]
                raise UserError(f"row {number} has token {int(outside)}; the backbone's vocabulary is {vocab_size}")
            counts.index_add_(0, kept, torch.ones_like(kept))  # a row does not pass over the whole vocabulary
        return cls.frequent(counts, size)

    @classmethod
    def frequent(cls, counts: Tensor, size: int) -> Self:
        """The `size` tokens with the highest of (V,) counts; ties go by the lower id."""
        return cls(counts.sort(descending=True, stable=True).indices[:size].sort().values, len(counts))

    @classmethod
    def from_maps(cls, d2t: Tensor, t2d: Tensor, vocab_size: int) -> Self:
        """The map that a file holds.

        Raises:
            UserError: they are no maps of this vocabulary, or contradict each other; names the first bad entry.
        """
        if d2t.ndim != 1 or d2t.dtype != torch.long:
            raise UserError(f"d2t is {_kind(d2t)}; expected offsets, int64 (Vd,)")
        if t2d.shape != (vocab_size,) or t2d.dtype != torch.bool:
            raise UserError(f"t2d is {_kind(t2d)}; expected bool ({vocab_size},)")
        vocab = cls(d2t + torch.arange(len(d2t)), vocab_size)
        marks = torch.ones_like(t2d) if vocab.t2d is None else vocab.t2d
        wrong = (marks != t2d).nonzero().flatten()
        if len(wrong):
            token = int(wrong[0])
            raise UserError(f"t2d[{token}] is {bool(t2d[token])}, and d2t says {bool(marks[token])}")
        return vocab

    @property
    def ids(self) -> Tensor:
        """(Vd,) the target id of each draft id."""
        if self.d2t is None:
            return torch.arange(self.size)
        return self.d2t + torch.arange(self.size, device=self.d2t.device)

    def to_target(self, draft: Tensor) -> Tensor:
        """(...) draft ids to target ids."""
        return draft if self.d2t is None else draft + self.d2t[draft]

    def to_draft(self, target: Tensor) -> Tensor:
        """(...) target ids to draft ids, -1 for those that cannot be proposed."""
        if self.t2d is None:
            return target
        place = self.t2d.cumsum(0) - 1  # (V,)
        return torch.where(self.t2d, place, -1)[target]

    def contains(self, target: Tensor) -> Tensor:
        """(...) target ids to bool: can it be proposed?"""
        return torch.ones_like(target, dtype=torch.bool) if self.t2d is None else self.t2d[target]

    def rows(self, weight: Tensor) -> Tensor:
        """The rows (Vd, ...) of a (V, ...) tensor that belong to the draft vocabulary."""
        return weight if self.full else weight[self.ids.to(weight.device)]

    def extra_repr(self) -> str:
        return f"{self.size} of {self.vocab_size}"


def _check(ids: Tensor, vocab_size: int) -> None:
    """Refuse ids that are no ascending selection of 0..V-1, naming the first that is wrong."""
    if ids.ndim != 1 or not len(ids):
        raise UserError(f"a draft vocabulary is a list of token ids; this one has shape {tuple(ids.shape)}")
    outside = ((ids < 0) | (ids >= vocab_size)).nonzero().flatten()
    if len(outside):
        entry = int(outside[0])
        raise UserError(f"draft id {entry} stands for token {int(ids[entry])}; the vocabulary is 0..{vocab_size - 1}")
    steps = (ids.diff() <= 0).nonzero().flatten()
    if len(steps):
        entry = int(steps[0]) + 1
        before, here = int(ids[entry - 1]), int(ids[entry])
        what = f"twice: token {here}" if before == here else f"out of order: token {here} after {before}"
        raise UserError(f"draft id {entry} makes the draft vocabulary hold a token {what}; ids have to ascend")


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
