"""What the features of a set of rows depend on, and at which positions training reads them.

Letters: T positions of a row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from ..errors import UserError
from ..files import text_hash
from ..heads import chat
from ..heads.backbone import Backbone
from ..heads.base import DraftHead

FORMAT = 1  # counts up when the same settings would give other shards
Store = Literal["auto", "float32", "bfloat16", "int8"]
Array = np.ndarray[Any, Any]

_PASSING = (
    *("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
"""Fields of a model's config that change no hidden state, or that the key holds by themselves."""


class Texts(Protocol):
    """Rows of token ids and loss masks, each up to the last token that training proposes."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> tuple[Array, Array]:
        """(T,) token ids and (T,) loss mask of a row."""

    def hash(self) -> str:
        """What stands for ids, masks and order."""


@dataclass(frozen=True)
class Reads:
    """What a head reads of its backbone in training, besides `Features.last` where it is taught."""

    taps: tuple[int, ...]
    """Hidden states, at all positions up to the last anchor."""
    whole_last: bool
    """Whether it reads `Features.last` at these, too, and not at the anchors alone."""

    @classmethod
    def of(cls, head: DraftHead) -> Reads:
        return cls(tuple(head.taps), head.whole_last)

    @classmethod
    def all(cls, some: Sequence[Reads]) -> Reads:
        """What all of these find what they read in."""
        return cls(tuple(sorted({tap for one in some for tap in one.taps})), any(one.whole_last for one in some))

    def positions(self, mask: Array) -> tuple[int, Array]:
        """Of a row with this loss mask (T,): how many of its first positions have taps, and which have `last`.

        Position t is an anchor if tokens t + 1 and t + 2 are supervised; the backbone's own logits for what is
        proposed there stand at t + 1.
        """
        supervised = mask.astype(bool)
        anchors = np.flatnonzero(supervised[1:-1] & supervised[2:])
        text = int(anchors[-1]) + 1 if len(anchors) else 0
        if self.whole_last:
            return text, np.arange(text + 1 if text else 0)
        return text, np.union1d(anchors, anchors + 1)


def settings_of(
    backbone: Backbone, weights: str, rows: Texts, reads: Reads, *, store: Store, max_length: int, group_tokens: int
) -> dict[str, Any]:
    """All that determines the features, as JSON values, by the words that messages use.

    Args:
        weights: `forms.weights_hash`, taken while this process had all of them.
    """
    tokenizer = backbone.tokenizer
    fingerprint = {} if tokenizer is None else chat.fingerprint(tokenizer)
    precision = str(backbone.dtype).removeprefix("torch.")
    return {
        "format": FORMAT,
        "weights": weights,
        "config": _config_hash(backbone),
        "attention": getattr(backbone.config, "_attn_implementation", None),
        "layers": backbone.num_layers,
        "width": backbone.hidden_size,
        "precision": precision,
        "tokenizer": fingerprint.get("tokenizer", "none"),
        "template": fingerprint.get("template", "none"),
        "taps": list(reads.taps),
        "taps norm": "before any norm",
        "last norm": "after the final norm",
        "last at": "every position" if reads.whole_last else "anchors",
        "store": stored_as(store, precision),
        "max_length": max_length,
        "rows": rows.hash(),
        "group_tokens": group_tokens,
    }


def stored_as(store: Store, precision: str) -> str:
    """The number format of the shards: `auto` is that of the backbone, which loses nothing.

    Raises:
        UserError: there is no such format.
    """
    known = ("auto", "float32", "bfloat16", "int8")
    if store not in known:
        raise UserError(f"store is {store!r}; choose one of {', '.join(known)}")
    return precision if store == "auto" else store


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """`name was X, is now Y` for each setting that differs; empty if none does."""
    missing = "unset"
    return "; ".join(
        f"{name} was {before.get(name, missing)}, is now {now.get(name, missing)}"
        for name in [*now, *(name for name in before if name not in now)]
        if before.get(name, missing) != now.get(name, missing)
    )


def _config_hash(backbone: Backbone) -> str:
    config = {name: value for name, value in backbone.config.to_dict().items() if name not in _PASSING}
    return text_hash(json.dumps(config, sort_keys=True, default=str))[:16]
