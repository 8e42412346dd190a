"""The prompt into the cache, in pieces that fit into memory.

Letters: T positions.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Sequence

import torch

from ..errors import UserError
from ..heads.backbone import Backbone, Features
from ..heads.cache import Cache
from .drafter import Drafter

WHOLE = 4096  # positions of a first piece that needs no mask: as long as `generate` takes them at once, no slower
LEAST = 16  # positions of a piece: with less, masks and activations are no longer what fills the memory


def prefill(
    backbone: Backbone, drafter: Drafter, prompt: Sequence[int], cache: Cache, width: int
) -> tuple[Features, list[int]]:
    """Fill the cache with the prompt, `width` positions at a time, more of them where no mask is needed; all pieces but
    the last go to the drafter at once.

    Where memory runs out, pieces are halved from there on, which is told once.

    Returns:
        The features of the last piece, and the token behind each of its positions but the last.

    Raises:
        UserError: memory runs out over the smallest piece.
    """
    begin, asked = 0, width
    first = max(width, min(WHOLE, len(prompt))) if backbone.unmasked else width
    while True:
        end = begin + (width if begin else first)
        features = _piece(backbone, prompt[begin:end], cache, drafter.taps)
        if features is None:
            width = width if first > width else _halved(width, len(prompt))
            first = width
            continue
        cache.commit_all()
        following = list(prompt[begin + 1 : end + 1])
        if end >= len(prompt):
            break
        drafter.advance(features, following)
        begin = end
    if width < asked:
        warnings.warn(
            f"memory ran out over {asked} positions of the prompt: it was read {width} at a time", stacklevel=4
        )
    return features, following


def _piece(backbone: Backbone, ids: Sequence[int], cache: Cache, taps: Sequence[int]) -> Features | None:
    """One forward behind the committed tokens; None where memory ran out, with the cache as it was."""
    lengths = list(cache.lengths)
    given = torch.tensor([list(ids)], device=backbone.device)
    features = attempted(lambda: backbone.forward(given, cache=cache, taps=taps), backbone.device)
    if features is None:
        cache.lengths, cache.pending = lengths, 0
    return features


def attempted(forward: Callable[[], Features], device: torch.device) -> Features | None:
    """What a forward gives; None where memory ran out, and what it held is free again."""
    try:
        return forward()
    except RuntimeError as error:
        if not _out_of_memory(error):
            raise
    gc.collect()  # what the failed forward held is gone once its frames are
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return None


def _halved(width: int, length: int) -> int:
    smaller = min(width, length) // 2
    if smaller < LEAST:
        raise UserError(
            f"memory runs out over {width} positions of a prompt of {length} tokens: the text is too long for this "
            "device; shorten it, load the backbone in half precision or quantised, or use a larger device"
        )
    return smaller


def _out_of_memory(error: RuntimeError) -> bool:
    said = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in said or "can't allocate memory" in said
