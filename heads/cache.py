"""Keys and values in preallocated slots: the one file that touches transformers' cache classes.

Each row owns a line of slots. The first `lengths[row]` slots hold committed tokens, in order and from slot 0, whatever
the other rows do; behind them lie the tokens of the forwards since the last commit ("pending"). `commit` keeps the
accepted ones, gathered into place, and forgets the rest. Sliding-window layers keep every token here as well (the mask
hides what has left the window), so that nothing is lost when drafts are rejected.

Letters: B rows, T positions of one forward, S slots, h key-value heads, d their width.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from ..errors import UserError

_GROWTH = 256  # slots added at a time, at least


class Cache(transformers.Cache):
    """Slots for `rows` rows; give it to a forward after `open`, then `commit` what is to stay.

    Args:
        rows: number of rows, B.
        capacity: slots a row has at first; more are added as needed.

    `keys` and `values` hold one (B, h, S, d) buffer a layer, allocated when its first states arrive; S is 0 for layers
    that texts do not run (those that look at images).
    """

    def __init__(self, rows: int = 1, capacity: int = _GROWTH) -> None:
        super().__init__(layers=[])
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.capacity = capacity
        self.lengths = [0] * rows
        self.pending = 0
        self.texts: list[list[int]] | None = None
        """Committed token ids of each row, where the backbone asks for them (`remember`)."""
        self._nodes: list[list[int]] = []  # ids of the pending tokens, by row, where texts are kept
        self._width = 0  # tokens of the open forward
        self._index: tuple[Tensor, Tensor] | None = None

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def end(self) -> int:
        """One past the last slot that any row uses, pending tokens included."""
        return max(self.lengths) + self.pending

    def open(self, width: int) -> None:
        """Make room for one forward of `width` tokens a row, behind the committed and the pending ones."""
        self._width = width
        self.pending += width
        if self.end > self.capacity:
            self.capacity = max(self.end, self.capacity + _GROWTH, self.capacity * 5 // 4)
        self._index = None

    def forget(self) -> None:
        """Drop the pending tokens."""
        self.pending = 0

    def remember(self, ids: Tensor) -> None:
        """Keep the ids (B, T) of the next tokens to be written, and of those committed from now on."""
        self.texts = [[] for _ in self.lengths] if self.texts is None else self.texts
        before = self._nodes if self.pending else [[] for _ in self.lengths]
        self._nodes = [[*nodes, *row] for nodes, row in zip(before, ids.tolist(), strict=True)]

    def restart(self) -> None:
        """Forget all tokens, but not their ids."""
        self.lengths = [0] * self.rows
        self.pending = 0

    def settle(self, count: int) -> None:
        """Commit the first `count` pending tokens of every row; those behind them stay pending."""
        self.lengths = [length + count for length in self.lengths]
        self.pending -= count

    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        """Keep, for each row, these of its pending tokens (numbered from 0 in the order they were written)."""
        assert len(kept) == self.rows, f"commit got {len(kept)} rows for {self.rows}"
        for row, chosen in enumerate(kept):
            assert all(0 <= n < self.pending for n in chosen), f"row {row}: kept {list(chosen)} of {self.pending}"
            self._gather(row, list(chosen))
            if self.texts is not None:
                self.texts[row] += [self._nodes[row][n] for n in chosen]
        self.lengths = [length + len(chosen) for length, chosen in zip(self.lengths, kept, strict=True)]
        self.pending = 0

    def commit_all(self) -> None:
        """Keep every pending token of every row."""
        for text, nodes in zip(self.texts or (), self._nodes, strict=False):
            text += nodes
        self.lengths = [length + self.pending for length in self.lengths]
        self.pending = 0

    def truncate(self, lengths: Sequence[int]) -> None:
        """Keep so many of each row's committed tokens, and no pending ones."""
        assert all(new <= old for new, old in zip(lengths, self.lengths, strict=True)), f"{lengths} of {self.lengths}"
        self.lengths, self.pending = list(lengths), 0
        if self.texts is not None:
            self.texts = [text[:length] for text, length in zip(self.texts, lengths, strict=True)]

    def drop(self, rows: Sequence[int]) -> list[int]:
        """Forget these rows; returns which old row each remaining one is.

        Rows from the end move into the gaps, so that only those are copied.
        """
        assert self.pending == 0, "drop with pending tokens"
        order, left = list(range(self.rows)), self.rows - len(set(rows))
        movers = [row for row in range(left, self.rows) if row not in rows]
        gaps = [row for row in sorted(set(rows)) if row < left]
        for gap, mover in zip(gaps, movers, strict=True):
            order[gap] = mover
            length = self.lengths[gap] = self.lengths[mover]
            if self.texts is not None:
                self.texts[gap] = self.texts[mover]
            for buffer in (*self.keys, *self.values):
                buffer[gap, :, :length] = buffer[mover, :, :length]
        self.keys, self.values = ([buffer[:left] for buffer in buffers] for buffers in (self.keys, self.values))
        self.lengths = self.lengths[:left]
        self.texts = None if self.texts is None else self.texts[:left]
        return order[:left]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by the model's attention, layer by layer: write (B, h, T, d), return all that a query may look at."""
        for buffers, states in ((self.keys, key_states), (self.values, value_states)):
            while layer_idx >= len(buffers):
                buffers.append(states[:, :, :0])  # of those passed over, some are written later
            if not buffers[layer_idx].shape[2]:
                buffers[layer_idx] = _slots(states, self.capacity)
            elif buffers[layer_idx].shape[2] < self.capacity:
                buffers[layer_idx] = _grown(buffers[layer_idx], self.capacity)
            self._write(buffers[layer_idx], states)
        return self.keys[layer_idx][:, :, : self.end], self.values[layer_idx][:, :, : self.end]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        passed_over = layer_idx >= len(self.keys) or not self.keys[layer_idx].shape[2]
        return 0 if passed_over else max(self.lengths)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.end, 0

    def whole(self, width: int, capacity: int) -> Whole:
        """All slots, at least `capacity` of them, for one forward of `width` tokens behind the committed ones (B = 1).

        The tokens are pending.
        """
        assert self.rows == 1, f"{self.rows} rows"
        self.capacity = max(capacity, self.capacity)
        for buffers in (self.keys, self.values):
            for layer, buffer in enumerate(buffers):
                if buffer.shape[2] < self.capacity:
                    buffers[layer] = _grown(buffer, self.capacity)
        self.pending = width
        places = torch.arange(width) + self.lengths[0]
        return Whole(self.keys, self.values, places.to(self.keys[0].device))

    def _write(self, buffer: Tensor, states: Tensor) -> None:
        """Put the (B, h, T, d) states of the open forward into a (B, h, S, d) buffer."""
        assert states.shape[2] == self._width, f"{states.shape[2]} tokens written where {self._width} were opened"
        before = self.pending - self._width
        if min(self.lengths) == max(self.lengths):
            start = self.lengths[0] + before
            buffer[:, :, start : start + self._width] = states
            return
        if self._index is None or self._index[0].device != buffer.device:
            start_of_row = torch.tensor(self.lengths, device=buffer.device) + before
            slots = start_of_row[:, None] + torch.arange(self._width, device=buffer.device)  # (B, T)
            self._index = torch.arange(self.rows, device=buffer.device)[:, None], slots
        buffer.transpose(1, 2)[self._index] = states.transpose(1, 2)

    def _gather(self, row: int, chosen: list[int]) -> None:
        """Copy the chosen pending tokens of a row to the slots behind its committed ones."""
        if chosen == list(range(len(chosen))):
            return  # already in place
        start = self.lengths[row]
        index = torch.tensor(chosen) + start
        for buffer in (one for one in (*self.keys, *self.values) if one.shape[2]):
            index = index.to(buffer.device)  # once for all that lie together
            # index_select copies first: source and destination overlap
            buffer[row, :, start : start + len(chosen)] = buffer[row].index_select(1, index)


class Whole(transformers.Cache):
    """The slots of a `Cache` for forwards of fixed shapes: states go to `places` (T,), a query looks at all slots, and
    masks say what is there."""

    def __init__(self, keys: list[Tensor], values: list[Tensor], places: Tensor) -> None:
        super().__init__(layers=[])
        self.keys, self.values, self.places = keys, values, places

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        keys.index_copy_(2, self.places.to(keys.device), key_states)
        values.index_copy_(2, self.places.to(keys.device), value_states)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.keys[layer_idx].shape[2], 0


def cache_argument(decoder: nn.Module) -> str:
    """transformers 5.24 renamed the forward argument `past_key_values` to `cache`."""
    names = inspect.signature(inspect.unwrap(decoder.forward)).parameters
    return "cache" if "cache" in names else "past_key_values"


# -- caches of transformers that a user hands over ---------------------------------------------------------------------


def fitting(lent: Any, prompt: int, new: int, answers: int) -> None:
    """Refuse by name what cannot be taken over for one answer of `new` tokens to a prompt of so many.

    Raises:
        UserError: it is no cache of attention layers, has several rows or too few slots, or holds more than the prompt.
    """
    kind = type(lent).__name__
    if not isinstance(lent, transformers.Cache) or isinstance(lent, transformers.EncoderDecoderCache | Cache):
        raise UserError(f"cache is a {kind}; expected a DynamicCache or StaticCache of transformers")
    strange = sorted({type(layer).__name__ for layer in lent.layers if type(layer).__name__ not in _KNOWN})
    if strange:
        raise UserError(f"cache: its layers are {', '.join(strange)}; those of a DynamicCache or StaticCache are known")
    if answers != 1:
        raise UserError(f"cache: holds one text, and {answers} answers are asked for; ask for one at a time")
    held = _held(lent)
    if held >= prompt:
        raise UserError(
            f"cache: holds {held} tokens and the prompt has {prompt}; give the whole text as the prompt, those tokens "
            "and at least one more"
        )
    for layer in lent.layers:
        slots, window = getattr(layer, "max_cache_len", None), getattr(layer, "is_sliding", False)
        if slots is not None and not window and slots < prompt + new - 1:
            raise UserError(f"cache: has {slots} slots, and prompt and answer come to {prompt + new} tokens")


def check_lent(lent: Any, cache: Cache) -> None:
    """That what it holds is what the backbone makes of the beginning of the prompt, which `cache` holds.

    Raises:
        UserError: it belongs to another text or model.
    """
    held = 0 if lent is None else _held(lent)
    for number, layer in enumerate(lent.layers if held else ()):
        kept = min(held, layer.keys.shape[2])  # a window keeps the last ones
        for name, theirs, ours in (("keys", layer.keys, cache.keys), ("values", layer.values, cache.values)):
            expected = ours[number][:, :, held - kept : held].float()
            shape = theirs.shape[:2] + theirs.shape[3:]
            if shape != expected.shape[:2] + expected.shape[3:] or not _near(theirs[:, :, :kept], expected):
                raise UserError(
                    f"cache: its {name} of layer {number} are not those of the first {held} tokens of the prompt; it "
                    "belongs to another text or model"
                )


def hand_back(cache: Cache, lent: Any) -> None:
    """Put what is committed behind what it holds, in its own way."""
    held = 0 if lent is None else _held(lent)
    for number in range(0 if lent is None else len(cache.keys)):
        states = (buffers[number][:, :, held : cache.lengths[0]].clone() for buffers in (cache.keys, cache.values))
        lent.update(*states, number)


_KNOWN = ("DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer", "StaticSlidingWindowLayer")
_TOLERANCE = 0.05  # of the largest value: other pieces of a prompt round otherwise, other tokens differ by far more


def _held(lent: Any) -> int:
    return int(lent.get_seq_length()) if lent.layers else 0


def _near(theirs: Tensor, ours: Tensor) -> bool:
    gap = (theirs.to(ours.device).float() - ours).abs().max()
    return bool(gap <= _TOLERANCE * ours.abs().max())


def _slots(states: Tensor, capacity: int) -> Tensor:
    rows, heads, _, width = states.shape
    return states.new_zeros((rows, heads, capacity, width))


def _grown(buffer: Tensor, capacity: int) -> Tensor:
    larger = _slots(buffer, capacity)
    larger[:, :, : buffer.shape[2]] = buffer
    return larger


HANDED_OVER = ("cache", "past_key_values")
"""What `generate` of transformers calls its cache, now and before 5.24."""


def begun(arguments: Mapping[str, Any]) -> bool:
    """Whether a cache among the arguments that `generate` prepared holds a text already."""
    found = [arguments[name] for name in HANDED_OVER if arguments.get(name) is not None]
    return any(cache.get_seq_length() > 0 for cache in found)
