"""Prompts as they are given: texts, chats, token ids, padded batches of them.

Letters: B rows, T positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..errors import UserError
from ..heads.backbone import Backbone


class Encoded(NamedTuple):
    """One prompt."""

    ids: list[int]
    padding: int = 0
    """Tokens of padding that stood before it."""


def encoded(
    backbone: Backbone, prompt: Any, attention_mask: Any = None, position_ids: Any = None
) -> tuple[list[Encoded], bool]:
    """The token ids of all prompts, and whether it was a list of prompts.

    Args:
        prompt: a text, chat messages or token ids; or a list of these, or ids (B, T).
        attention_mask: (T,) or (B, T), for token ids: 0 for padding, which has to stand on the left. Without one, the
            pad tokens on the left of rows of a tensor (B, T) are padding, as `generate` has it.
        position_ids: (T,) or (B, T), for token ids: has to be what follows from the mask.

    Raises:
        UserError: a prompt is none, empty or too long (which one is named), or its mask or positions are of no use.
    """
    several = _rows(prompt)
    rows = [prompt] if several is None else several
    masks, places = _columns("attention_mask", attention_mask, rows), _columns("position_ids", position_ids, rows)
    found = []
    for number, row in enumerate(rows):
        try:
            mask = masks[number] if masks else _inferred(backbone, prompt, row)
            found.append(_one(backbone, row, mask, places[number] if places else None))
        except UserError as error:
            raise error if len(rows) == 1 else UserError(f"prompt {number}: {error}") from error
    return found, several is not None


def _rows(prompt: Any) -> list[Any] | None:
    """The prompts of a list of prompts; None if it is one prompt."""
    if isinstance(prompt, Tensor):
        return list(prompt) if prompt.ndim == 2 and len(prompt) != 1 else None
    several = isinstance(prompt, Sequence) and not isinstance(prompt, str) and len(prompt) > 0
    return list(prompt) if several and not isinstance(prompt[0], int | Mapping) else None


def _one(backbone: Backbone, row: Any, mask: list[int] | None, places: list[int] | None) -> Encoded:
    if not isinstance(row, str | Sequence | Tensor):
        raise UserError(f"a prompt is a text, a list of chat messages or token ids, not a {type(row).__name__}")
    ids, room = backbone.encode(row), backbone.max_positions
    padding = _padding(mask, len(ids)) if mask is not None else 0
    if places is not None:
        _check_positions(places, len(ids), padding)
    ids = ids[padding:]
    if len(ids) >= room:
        raise UserError(f"the prompt has {len(ids)} tokens; {backbone.name} holds {room}, the answer included")
    return Encoded(ids, padding)


def _columns(name: str, value: Any, rows: Sequence[Any]) -> list[list[int]] | None:
    """A row of numbers for each prompt."""
    if value is None:
        return None
    if any(isinstance(row, str) or (isinstance(row, Sequence) and row and isinstance(row[0], Mapping)) for row in rows):
        raise UserError(f"{name} is for token ids; texts and chats are encoded here, without padding")
    found = value.tolist() if isinstance(value, Tensor) else [list(v) if isinstance(v, Tensor) else v for v in value]
    if found and not isinstance(found[0], Sequence):
        found = [found]
    if len(found) == 1 and len(rows) > 1 and name == "position_ids":
        found = found * len(rows)  # generate takes one row for all
    if len(found) != len(rows):
        raise UserError(f"{name} has {len(found)} rows for {len(rows)} prompts")
    return [[int(number) for number in row] for row in found]


def _inferred(backbone: Backbone, prompt: Any, row: Any) -> list[int] | None:
    """The mask of a row of a tensor (B, T) whose left side is pad tokens."""
    config = backbone.model.generation_config
    pad = config.pad_token_id if config is not None else None
    if not (isinstance(prompt, Tensor) and prompt.ndim == 2) or pad is None or pad in backbone.eos_token_ids:
        return None
    true = (row.flatten() != pad).nonzero()
    first = int(true[0]) if len(true) else 0
    return [int(place >= first) for place in range(row.numel())]


def _padding(mask: Sequence[int], length: int) -> int:
    """How many positions on the left are padding."""
    if len(mask) != length:
        raise UserError(f"attention_mask has {len(mask)} positions for {length} tokens")
    if 1 not in mask or set(mask) - {0, 1}:
        raise UserError("attention_mask has to hold ones for the tokens of the prompt, and zeros for padding")
    padding = mask.index(1)
    if 0 in mask[padding:]:
        hole = padding + mask[padding:].index(0)
        raise UserError(
            f"attention_mask is 0 at position {hole}, behind the first true token at {padding}: padding is taken on "
            "the left only, so give the row without these tokens"
        )
    return padding


def _check_positions(places: Sequence[int], length: int, padding: int) -> None:
    if len(places) != length:
        raise UserError(f"position_ids has {len(places)} positions for {length} tokens")
    for place, position in enumerate(places[padding:]):
        if position != place:
            raise UserError(
                f"position_ids is {position} at position {padding + place}; only those that follow from the attention "
                f"mask are supported, {place} there"
            )
