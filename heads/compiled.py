"""The forward over a tree, compiled: the same few shapes again and again.

A compiled graph is made for shapes, and eager rounds have others each time: trees differ, and the cache is read up to
where the text ends. Here trees are padded to a few widths with nodes that see themselves alone and are cut off again,
the cache is handed out whole, with a mask over all of its slots, of which there are a few counts; and what is written
goes to places that are a tensor. So a graph is made once for a width and a count, and then for no round any more.

Prompts are read by the eager model. Tokens are those of the eager one but for rounding.

Letters: B rows (one), N tree nodes, M nodes with padding, S slots, H hidden width.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import first_line
from .attention import attending
from .backbone import Backbone, Features, keeper
from .cache import Cache, Whole, whole
from .mask import causal, positions

WIDTHS = (1, 8)  # nodes; then twice as many each
SLOTS = 256  # of the smallest cache; then twice as many each
GRAPHS = 64  # that are made at most, where torch's own limit is 8
BACKEND = "inductor"
_OURS = -1  # under which hooks of ours stand; torch counts its own from 0


def slots(count: int) -> int:
    """Slots of a cache that holds so many tokens."""
    return SLOTS << max(0, (count - 1).bit_length() - SLOTS.bit_length() + 1)


def width(nodes: int) -> int:
    """Nodes with padding."""
    return WIDTHS[0] if nodes <= WIDTHS[0] else max(WIDTHS[1], 1 << (nodes - 1).bit_length())


class Compiled:
    """Stands for `Backbone.forward` behind a prompt.

    Args:
        mode: of `torch.compile`; None: its default on a CPU, "reduce-overhead" (CUDA graphs) on a GPU.
    """

    def __init__(self, backbone: Backbone, mode: str | None = None) -> None:
        self.backbone, self.off = backbone, ""
        if not backbone.batches:
            self._give_up("its rotary factors change with the length of the text")
        if mode is None and backbone.device.type == "cuda":
            mode = "reduce-overhead"
        self.mode = mode
        self._graphs: dict[tuple[int, ...], Any] = {}  # by taps
        self._known: set[tuple[Any, ...]] = set()  # shapes that graphs were made for

    def forward(self, ids: Tensor, *, cache: Cache, ancestors: Tensor | None, taps: Sequence[int] = ()) -> Features:
        """As `Backbone.forward` behind the committed tokens of a cache of one row.

        What no graph can be made for is told once, and goes on without.
        """
        nodes, backbone = ids.shape[1], self.backbone
        if self.off or cache.rows != 1:
            return backbone.forward(ids, cache=cache, ancestors=ancestors, taps=taps)
        try:
            with attending(backbone.config, backbone.substitute):
                last, tapped = self._call(ids, cache, _padded(ancestors, nodes, ids.device), tuple(taps))
        except Exception as error:  # of the compiler's many kinds; an error of the model's own comes again below
            self._give_up(first_line(error))
            return backbone.forward(ids, cache=cache, ancestors=ancestors, taps=taps)
        cache.pending = nodes
        return Features(last, tapped)[:, :nodes]

    def _call(self, ids: Tensor, cache: Cache, seen: Tensor, taps: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        backbone, padded = self.backbone, len(seen)
        cache.forget()
        count = slots(cache.lengths[0] + padded)
        view = whole(cache, padded, max(count, cache.capacity))
        masks = backbone.masks(cache.lengths, seen, cache.capacity)
        given = F.pad(ids, (0, padded - ids.shape[1])), positions(cache.lengths, seen), masks, view
        shape = padded, cache.capacity, taps
        if self.mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        if shape in self._known:
            return self._graph(taps)(*given)  # type: ignore[no-any-return]
        with torch._dynamo.config.patch(recompile_limit=GRAPHS):
            found: tuple[Tensor, Tensor | None] = self._graph(taps)(*given)
        self._known.add(shape)
        return found

    def _graph(self, taps: tuple[int, ...]) -> Any:
        if taps not in self._graphs:
            run = _runner(self.backbone, taps)
            self._graphs[taps] = torch.compile(run, dynamic=False, mode=self.mode, backend=BACKEND) if BACKEND else run
        return self._graphs[taps]

    def _give_up(self, reason: str) -> None:
        self.off = reason
        warnings.warn(f"{self.backbone.name}: cannot be compiled ({reason}): goes on uncompiled", stacklevel=3)


def _runner(backbone: Backbone, taps: tuple[int, ...]) -> Any:
    """What is compiled: (1, M) ids, their positions, masks and a cache to (1, M, H) and (1, M, taps * H)."""
    decoder, name, kept = backbone.decoder, backbone.cache_argument, [torch.empty(0)] * len(taps)
    nothing = kept[0] if kept else None

    def run(ids: Tensor, places: Tensor, masks: Any, cache: Whole) -> tuple[Tensor, Tensor | None]:
        output = decoder(input_ids=ids, position_ids=places, attention_mask=masks, use_cache=True, **{name: cache})
        tapped = torch.cat(kept, -1) if taps else None
        for place in range(len(taps)):
            kept[place] = nothing  # type: ignore[call-overload]
        return output.last_hidden_state, tapped

    return run
