"""A reply in a text, and the replies of a long chat, found in short windows of it.

Whether a reply stands where a server would have it takes a rendering of all that comes before it: for a thousand
replies, a million messages rendered. Most templates write a turn alike whatever came long before, so that a window is
enough: the beginning of the chat, then the last few turns. What a window says is believed between two replies that were
found in the whole chat, if it says the same of these two, and if all that it writes from the first to the last of them
stands in the text of the whole chat. Where it does not, each reply is looked for in the whole chat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isqrt
from typing import Any

Message = dict[str, Any]

LONG = 64  # replies; a shorter chat is read as a whole
BLOCK = 16  # replies at least that share a window


class Unmaskable(Exception):
    """Why no true mask can be given for a chat or a turn: the kind of fault, then what is special about this one."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason} ({detail})")
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Turn:
    """A reply in a text that ends with it, or soon after."""

    source: str
    """A text that starts as a server would have sent it."""
    start: int
    """Where the reply starts: behind what a server would have sent."""
    rest: str
    """The reply, and what the template writes behind it."""
    end: int
    """Behind its end of turn, or behind the last word of a reply that was cut off."""
    cut: bool = False
    """Whether it was cut off."""

    @property
    def text(self) -> str:
        return self.source[: self.start] + self.rest

    @property
    def upto(self) -> str:
        """The text up to the end of turn."""
        return self.text[: self.end]


Find = Callable[[Sequence[Message], int], Turn]


def turns_of(find: Find, messages: Sequence[Message], wanted: Sequence[int]) -> dict[int, Turn | Unmaskable]:
    """Each wanted reply, or why it cannot be had.

    Args:
        find: finds a reply, given by its number, in a chat; raises `Unmaskable`.
        wanted: numbers of messages, ascending.
    """
    if len(wanted) < LONG:
        return {k: _tried(find, messages, k) for k in wanted}
    ends = [*wanted[: -1 : max(BLOCK, isqrt(len(wanted)))], wanted[-1]]
    made = {k: _tried(find, messages, k) for k in ends}
    for first, last in pairwise(ends):
        block = [k for k in wanted if first < k < last]
        seen = _seen(find, messages, [first, *block, last], made)
        made.update(seen or ((k, _tried(find, messages, k)) for k in block))
    return dict(sorted(made.items()))


def window(messages: Sequence[Message], k: int) -> tuple[list[Message], int]:
    """The chat up to its first reply, then from the last question before reply `k` on that follows a reply; and how
    many messages lie between the two."""
    roles = [message["role"] for message in messages[: k + 1]]
    head = roles.index("assistant") + 1 if "assistant" in roles else 0
    starts = (n for n in range(k, head, -1) if roles[n] == "user" and roles[n - 1] == "assistant")
    start = next(starts, head)
    return [*messages[:head], *messages[start:]], start - head


def _tried(find: Find, messages: Sequence[Message], k: int) -> Turn | Unmaskable:
    try:
        return find(messages, k)
    except Unmaskable as fault:
        return fault


def _seen(
    find: Find, messages: Sequence[Message], block: Sequence[int], made: dict[int, Turn | Unmaskable]
) -> dict[int, Turn]:
    """The replies of a block, as a window has them; nothing if it cannot be believed."""
    first, last, whole = made[block[0]], made[block[-1]], made[max(made)]
    near, gap = window(messages, block[0])
    if isinstance(first, Unmaskable) or isinstance(last, Unmaskable) or isinstance(whole, Unmaskable) or not gap:
        return {}
    try:
        found = {k: find(near[: k + 2 - gap], k - gap) for k in block}
    except Unmaskable:
        return {}
    text, shift = whole.text, first.start - found[block[0]].start
    moved = {k: Turn(text, one.start + shift, one.rest, one.end + shift) for k, one in found.items()}
    written = found[block[-1]].upto[first.start - shift :]
    alike = text.startswith(written, first.start) and all(
        text.startswith(one.rest[: one.end - one.start], one.start) for one in moved.values()
    )
    agree = all(
        (moved[k].text, moved[k].end) == (one.text, one.end) for k, one in ((block[0], first), (block[-1], last))
    )
    return moved if alike and agree else {}
