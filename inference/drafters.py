"""Drafters by name: from what a user may pass as drafter to what makes the drafter of a new request.

None              plain decoding
"ngram"           what followed the last few tokens before (lookup.py)
"suffix"          what followed the longest known suffix most often (suffix.py)
"exit:6"          the backbone's own first 6 layers (copies.py)
"int8"            the backbone itself in int8 (copies.py)
"hybrid:NAME"     "suffix" and any of these, as far as each is expected to pay (hybrid.py)
a draft head, a `Backbone`, a `SuffixStore`, a `Hybrid` of any two of these, or any `Drafter`
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from ..errors import UserError
from ..heads.backbone import Backbone
from ..heads.base import DraftHead
from .copies import quantized, shallow
from .draft_model import DraftModel, ModelDrafter, same_tokens
from .drafter import Drafter, HeadDrafter, NoDrafter
from .hybrid import Hybrid, HybridDrafter
from .lookup import LookupDrafter
from .suffix import SuffixDrafter, SuffixStore
from .translate import TranslatedDrafter
from .tree import Auto, Chain, Dynamic, Shape, Static, limited
from .worth import Worth

DEFAULT_SHAPE = Dynamic(depth=3, top_k=3, nodes=6)
DEFAULT_LOOKUP = 5
DEFAULT_SUFFIX = Dynamic(depth=8, top_k=3, nodes=8)
DEFAULT_TRANSLATED = 4
LOOKED_UP = Dynamic(depth=12, top_k=3, nodes=24)  # what a hybrid chooses from
OWN_NODES = 64  # of trees whose size nothing says, where many rows share a forward

Factory = Callable[[], Drafter]
"""Called for each request."""


def drafter_factory(backbone: Backbone, drafter: Any, shape: Shape | None) -> Factory:
    """What makes the drafter of a new request.

    Args:
        drafter: see the top of this file.
        shape: of its trees; None: the default of its kind.

    Raises:
        UserError: there is no such drafter, it does not fit the backbone, or it grows no trees of this shape.
    """
    if isinstance(drafter, DraftHead):
        head = drafter.to(backbone.device).bind(backbone)
        if backbone.packs:
            head.pack()
        fitted = _fitted(shape or DEFAULT_SHAPE, head, noted=shape is not None)
        return lambda: HeadDrafter(head, fitted, backbone.device)
    if isinstance(drafter, Backbone):
        return _of_model(backbone, drafter, shape)
    if isinstance(drafter, Hybrid):
        return _of_hybrid(backbone, drafter, shape)
    if isinstance(drafter, SuffixStore):
        return _of_suffix(drafter, shape)
    if isinstance(drafter, str):
        return _by_name(backbone, drafter, shape)
    if shape is not None:
        raise UserError(f"tree={shape} is for drafters that headstart grows; one of your own grows its own trees")
    if drafter is None:
        return NoDrafter
    if isinstance(drafter, Drafter):
        _check_taps(backbone, drafter)
        return lambda: drafter
    kinds = (
        f"a draft head, a Backbone, a Hybrid, one of {_KNOWN}, None, or an object with taps, start, advance and draft"
    )
    raise UserError(f"drafter {drafter!r}: expected {kinds}")


def usual(backbone: Backbone, drafter: Any) -> Shape | None:
    """The form of its drafts where none is asked for; None: it has none, or one of its own."""
    if isinstance(drafter, Hybrid):
        return usual(backbone, drafter.second)
    if isinstance(drafter, SuffixStore):
        return DEFAULT_SUFFIX
    if isinstance(drafter, str):
        kind, _, rest = drafter.partition(":")
        return usual(backbone, rest) if kind == "hybrid" else _USUAL.get(kind)
    if isinstance(drafter, Backbone) and not same_tokens(backbone.tokenizer, drafter.tokenizer):
        return Chain(DEFAULT_TRANSLATED)
    return DEFAULT_SHAPE if isinstance(drafter, DraftHead | Backbone) else None


def chained(drafter: Any, shape: Shape | None, rule: str) -> Shape | None:
    """The form of the drafts for a rule that judges chains; None leaves it to the drafter.

    Raises:
        UserError: another form was asked for.
    """
    if isinstance(shape, Auto):
        return Auto(shape.depth, 1, shape.depth)
    if shape is None and isinstance(drafter, DraftHead):
        return Chain(min(DEFAULT_SHAPE.depth, drafter.max_depth or DEFAULT_SHAPE.depth))
    if shape is None and (
        isinstance(drafter, Backbone) or str(drafter).partition(":")[0] in ("exit", "int8", "suffix")
    ):
        return Chain(DEFAULT_SHAPE.depth)
    if shape is not None and any(set(path) - {0} for path in getattr(shape, "paths", [(1,)])):
        raise UserError(f"rule={rule} judges chains, as in tree=chain:4; {shape} is none (rule=siblings takes trees)")
    return shape


def modules_of(drafter: Any) -> Iterator[nn.Module]:
    """The modules in what a user passed as drafter."""
    if isinstance(drafter, Hybrid):
        yield from modules_of(drafter.first)
        yield from modules_of(drafter.second)
    elif isinstance(drafter, Backbone):
        yield drafter.model
    elif isinstance(drafter, nn.Module):
        yield drafter


def width_of(drafter: Drafter) -> int:
    """Nodes of its trees at most, and guesses that its head is given; of a user's own, what they are cut to."""
    drafter = getattr(drafter, "inner", drafter)  # under a policy
    if isinstance(drafter, NoDrafter):
        return 1
    if isinstance(drafter, HybridDrafter):
        return width_of(drafter.first) + width_of(drafter.second)
    if isinstance(drafter, LookupDrafter):
        return drafter.depth + 1
    shape = getattr(drafter, "shape", None)
    if isinstance(shape, Dynamic):
        return 1 + max(shape.nodes, shape.depth * shape.top_k)
    return 1 + len(shape.paths) if isinstance(shape, Chain | Static) else OWN_NODES


def serves_one(factory: Factory) -> bool:
    """Whether all requests would get the same drafter, which then serves them one after the other."""
    return _same(factory(), factory())


def _same(one: Drafter, other: Drafter) -> bool:
    if isinstance(one, HybridDrafter) and isinstance(other, HybridDrafter):
        return _same(one.first, other.first) or _same(one.second, other.second)
    return one is other


def is_name(text: str) -> bool:
    """Whether this is the name of a drafter, and not that of a file."""
    return text.partition(":")[0] in _NAMES


def _by_name(backbone: Backbone, name: str, shape: Shape | None) -> Factory:
    kind, colon, rest = name.partition(":")
    if kind not in _NAMES or bool(colon) != (kind in _WITH_MORE):
        raise UserError(f"drafter {name!r}: known are {_KNOWN}")
    return _NAMES[kind](backbone, rest, shape)


def _of_ngram(backbone: Backbone, rest: str, shape: Shape | None) -> Factory:
    if not isinstance(shape, Chain | None):
        raise UserError(f"ngram drafts chains, as in tree=chain:4; {shape} is none")
    return lambda: LookupDrafter(shape.depth if shape else DEFAULT_LOOKUP)


def _of_suffix(store: SuffixStore | None, shape: Shape | None) -> Factory:
    if not isinstance(shape, Chain | Dynamic | None):
        raise UserError(f"suffix drafts chains and dynamic trees, as in tree=dynamic:8x3x8; {shape} is neither")
    return lambda: SuffixDrafter(shape or DEFAULT_SUFFIX, store)


def _of_exit(backbone: Backbone, rest: str, shape: Shape | None) -> Factory:
    if not rest.isdecimal():
        raise UserError(f"drafter 'exit:{rest}': expected the number of layers that draft, as in exit:6")
    return _of_model(backbone, shallow(backbone, int(rest)), shape)


def _of_model(backbone: Backbone, model: Backbone, shape: Shape | None) -> Factory:
    model.pack()
    source = DraftModel(model, backbone.vocab_size)
    if same_tokens(backbone.tokenizer, model.tokenizer):
        return lambda: ModelDrafter(source, shape or DEFAULT_SHAPE)
    if not isinstance(shape, Chain | None):
        raise UserError(f"{model.name} has another tokenizer and drafts chains, as in tree=chain:4; {shape} is none")
    free = DraftModel(model, model.vocab_size)
    return lambda: TranslatedDrafter(backbone, free, shape.depth if shape else DEFAULT_TRANSLATED)


def _of_hybrid(backbone: Backbone, hybrid: Hybrid, shape: Shape | None) -> Factory:
    """The shape is that of the second drafter."""
    wide = LOOKED_UP if hybrid.learned and (hybrid.first == "suffix" or isinstance(hybrid.first, SuffixStore)) else None
    first, second = drafter_factory(backbone, hybrid.first, wide), drafter_factory(backbone, hybrid.second, shape)
    worth = Worth(hybrid.costs, hybrid.read)
    return lambda: HybridDrafter(first(), second(), hybrid.least, hybrid.joined, worth)


_NAMES: dict[str, Callable[[Backbone, str, Shape | None], Factory]] = {
    "ngram": _of_ngram,
    "suffix": lambda backbone, rest, shape: _of_suffix(None, shape),
    "exit": _of_exit,
    "int8": lambda backbone, rest, shape: _of_model(backbone, quantized(backbone), shape),
    "hybrid": lambda backbone, rest, shape: _of_hybrid(backbone, Hybrid("suffix", rest), shape),
}
_USUAL: dict[str, Shape] = {
    "ngram": Chain(DEFAULT_LOOKUP),
    "suffix": DEFAULT_SUFFIX,
    "exit": DEFAULT_SHAPE,
    "int8": DEFAULT_SHAPE,
}
_WITH_MORE = {"exit", "hybrid"}
_KNOWN = '"ngram", "suffix", "exit:LAYERS", "int8", "hybrid:NAME"'


def _check_taps(backbone: Backbone, drafter: Drafter) -> None:
    beyond = [tap for tap in drafter.taps if tap not in range(backbone.num_layers + 1)]
    if beyond:
        known = f"{backbone.name} has hidden states 0 to {backbone.num_layers}"
        raise UserError(f"taps of {type(drafter).__name__}: {beyond[0]}; {known}")


def _fitted(shape: Shape, head: DraftHead, noted: bool) -> Shape:
    """The shape, cut to what the head can draft."""
    if head.max_depth is None or shape.depth <= head.max_depth:
        return shape
    if noted:
        note = f"{shape} is deeper than the head, which drafts {head.max_depth} tokens: cut to that"
        warnings.warn(note, stacklevel=6)
    return limited(shape, head.max_depth)
