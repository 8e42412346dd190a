"""Drafters by name: from what a user may pass as drafter to what makes the drafter of a new request."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from ..errors import UserError
from ..heads.backbone import Backbone
from ..heads.base import DraftHead
from .drafter import Drafter, HeadDrafter, NoDrafter
from .lookup import LookupDrafter
from .tree import Chain, Dynamic, Shape, limited

DEFAULT_SHAPE = Dynamic(depth=3, top_k=3, nodes=6)
DEFAULT_LOOKUP = 5


def drafter_factory(backbone: Backbone, drafter: Any, shape: Shape | None) -> Callable[[], Drafter]:
    """What makes the drafter of a new request."""
    if isinstance(drafter, DraftHead):
        head = drafter.to(backbone.device).bind(backbone)
        fitted = _fitted(shape or DEFAULT_SHAPE, head, noted=shape is not None)
        return lambda: HeadDrafter(head, fitted, backbone.device)
    if isinstance(drafter, str) and drafter == "ngram":
        if not isinstance(shape, Chain | None):
            raise UserError(f"ngram drafts chains, as in tree=chain:4; {shape} is none")
        return lambda: LookupDrafter(shape.depth if shape else DEFAULT_LOOKUP)
    if shape is not None:
        raise UserError(f"tree={shape} is for heads and ngram; a drafter of one's own grows its own trees")
    if drafter is None:
        return NoDrafter
    if isinstance(drafter, Drafter):
        return lambda: drafter
    kinds = 'a draft head, "ngram", None, or an object with taps, start, advance and draft'
    raise UserError(f"drafter {drafter!r}: expected {kinds}")


def chained(drafter: Any, shape: Shape | None, rule: str) -> Shape | None:
    """The form of the drafts for a rule that judges chains; None leaves it to the drafter.

    Raises:
        UserError: another form was asked for.
    """
    if shape is None and isinstance(drafter, DraftHead):
        return Chain(min(DEFAULT_SHAPE.depth, drafter.max_depth or DEFAULT_SHAPE.depth))
    if shape is not None and any(set(path) - {0} for path in getattr(shape, "paths", [(1,)])):
        raise UserError(f"rule={rule} judges chains, as in tree=chain:4; {shape} is none (rule=siblings takes trees)")
    return shape


def _fitted(shape: Shape, head: DraftHead, noted: bool) -> Shape:
    """The shape, cut to what the head can draft."""
    if head.max_depth is None or shape.depth <= head.max_depth:
        return shape
    if noted:
        note = f"{shape} is deeper than the head, which drafts {head.max_depth} tokens: cut to that"
        warnings.warn(note, stacklevel=4)
    return limited(shape, head.max_depth)
