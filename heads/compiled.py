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

from ..errors import UserError, first_line
from .attention import attending
from .backbone import Backbone, Features
from .cache import Cache, Whole
from .mask import causal, positions
from .tapping import Tapping

WIDTHS = (1, 8)  # nodes; then twice as many each
SLOTS = 256  # of the smallest cache; then twice as many each
GRAPHS = 64  # that are made at most, where torch's own limit is 8
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
BACKEND = "inductor"


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
        given: dict[str, Any] = {"cache": cache, "ancestors": ancestors, "taps": taps}
        if not self.off and cache.rows == 1:
            try:
                return self._call(ids, **given)
            except Exception as error:  # of the compiler's many kinds; one of the model's own comes again below
                cause = getattr(error, "inner_exception", error)  # torch wraps what its backends raise
                self._give_up(f"{type(cause).__name__}: {first_line(cause)}")
        return self.backbone.forward(ids, **given)

    def _call(self, ids: Tensor, cache: Cache, ancestors: Tensor | None, taps: Sequence[int]) -> Features:
        backbone, nodes = self.backbone, ids.shape[1]
        seen = _padded(causal(nodes, ids.device) if ancestors is None else ancestors, width(nodes))
        view = cache.whole(len(seen), slots(cache.lengths[0] + len(seen)))
        masks = backbone.masks(cache.lengths, seen, cache.capacity)
        given = F.pad(ids, (0, len(seen) - nodes)), positions(cache.lengths, seen), masks, view
        shape, run = (len(seen), cache.capacity, tuple(taps)), self._graph(tuple(taps))
        if self.mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        with backbone.tapping(taps), attending(backbone.config, backbone.substitute), self._making(shape):
            last, tapped = run(*given)
        cache.pending = nodes
        return Features(last, tapped)[:, :nodes]

    @contextmanager
    def _making(self, shape: tuple[Any, ...]) -> Iterator[None]:
        """Where a graph may have to be made for a shape."""
        if shape in self._known:
            yield
            return
        with torch._dynamo.config.patch(recompile_limit=GRAPHS):
            yield
        self._known.add(shape)

    def _graph(self, taps: tuple[int, ...]) -> Any:
        if taps not in self._graphs:
            run = _runner(self.backbone, self.backbone.tapping(taps))
            self._graphs[taps] = torch.compile(run, dynamic=False, mode=self.mode, backend=BACKEND) if BACKEND else run
        return self._graphs[taps]

    def _give_up(self, reason: str) -> None:
        self.off = reason
        warnings.warn(f"{self.backbone.name}: cannot be compiled ({reason}): goes on uncompiled", stacklevel=3)


def compiled(backbone: Backbone, asked: bool | str) -> Compiled | None:
    """What is meant by a flag, or by the name of a mode.

    Raises:
        UserError: there is no such mode.
    """
    if not asked:
        return None
    if asked is not True and asked not in MODES:
        raise UserError(f"compile is {asked!r}; it has to be True, False or one of {', '.join(MODES)}")
    return Compiled(backbone, None if asked is True else str(asked))


def _runner(backbone: Backbone, tapping: Tapping) -> Any:
    """What is compiled: (1, M) ids, their positions, masks and a cache to (1, M, H) and (1, M, taps * H)."""
    decoder, name = backbone.decoder, backbone.cache_argument

    def run(ids: Tensor, places: Tensor, masks: Any, cache: Whole) -> tuple[Tensor, Tensor | None]:
        output = decoder(input_ids=ids, position_ids=places, attention_mask=masks, use_cache=True, **{name: cache})
        return output.last_hidden_state.to(ids.device), tapping.taken(ids.device)

    return run


def _padded(seen: Tensor, width: int) -> Tensor:
    """(N, N) who sees whom to (M, M); padding sees itself alone."""
    wider = torch.eye(width, dtype=torch.bool, device=seen.device)
    wider[: len(seen), : len(seen)] = seen
    return wider
