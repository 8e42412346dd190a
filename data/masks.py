"""One chat to token ids and the mask of what is supervised.

Supervised is every assistant turn (or the last alone) with its end-of-turn token: the text that the backbone has to
produce after what a server would send it (`turns.py`); a reply that was cut off has no such token. Ids are those of the
whole text. Where the start of a reply lies inside a token of it, a server's prompt would end in other tokens: such a
turn gets a row of its own, in which prompt and reply are tokenised apart.

Letters: T tokens of a row.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from ..heads.chat import Tools
from .replies import Message, Turn, Unmaskable
from .turns import Script, Span, Turns

NOTHING = "nothing to learn"


@dataclass(frozen=True)
class Masked:
    """A row: a chat, or as much of it as one text can hold, as tokens."""

    ids: list[int]
    """(T,)"""
    mask: bytearray
    """(T,) 1 where the token is supervised: it starts inside a reply or its end of turn."""
    cuts: int = 0
    """Ends of replies that lie inside a token. Such a token counts where it starts."""


@dataclass
class Made:
    """What a chat came to."""

    rows: list[Masked]
    lost: list[Unmaskable] = field(default_factory=list)
    """Turns that are not supervised, and why."""
    notes: Counter[str] = field(default_factory=Counter)


class Masker:
    """Makes rows with one tokenizer; arguments as `Turns` takes them.

    Raises:
        UserError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any, *, thinking: bool | None = None, last_turn: bool = False):
        self.tokenizer = tokenizer
        self.turns = Turns(tokenizer, thinking=thinking, last_turn=last_turn)
        self.template = self.turns.template
        self._openings: dict[str, list[int]] = {}
        self.added = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}

    def __call__(
        self,
        messages: Sequence[Message],
        tools: Tools | None = None,
        muted: Sequence[int] = (),
        cut: Sequence[int] = (),
    ) -> Made:
        """Ids and masks of a chat; what follows its last reply is left away.

        Raises:
            Unmaskable: no turn of it can be supervised.
        """
        found = self.turns(messages, tools, muted, cut)
        rows = [row for script in found.scripts for row in self._rows(script)]
        if not any(any(row.mask) for row in rows):
            raise Unmaskable(NOTHING, "the template marks no reply")
        return Made(rows, found.lost, found.notes)

    def plain(self, text: str) -> Masked:
        """A text that is no chat: all of it is supervised, but for special tokens that the tokenizer adds."""
        encoded = self.tokenizer(text, verbose=False, return_special_tokens_mask=True)
        ids, added = list(encoded["input_ids"]), encoded["special_tokens_mask"]
        edges = [place for place, special in enumerate(added) if not special]
        inside = range(edges[0], edges[-1] + 1) if edges else range(0)  # special tokens within the text are its own
        return Masked(ids, bytearray(place in inside for place in range(len(ids))))

    def _rows(self, script: Script) -> list[Masked]:
        ids, places = self._encode(script.text)
        if script.turns is None:
            return [Masked(ids, self._overlapped(script, ids, places))]
        mask, cuts, apart = bytearray(len(ids)), 0, []
        for (start, stop), turn in zip(script.spans, script.turns, strict=True):
            first, clean = self._boundary(script.text, ids, places, start)
            if clean:
                cuts += self._supervise(mask, first, script.text, ids, places, stop, turn.cut)
            else:
                apart.append(turn)
        rows = [Masked(ids, mask, cuts)] if len(apart) < len(script.turns) else []
        return rows + [self._apart(turn) for turn in apart]

    def _apart(self, turn: Turn) -> Masked:
        """A row in which the prompt is tokenised as a server does, and the reply for itself."""
        text, start = turn.text, turn.start
        before, (after, places) = self._encode(text[:start])[0], self._encode(text[start:])
        ids, _ = self._encode(text)
        if self._text(before + after) != self._text(ids):  # a tokenizer that starts every text with a space
            return self._cut(turn)
        mask = bytearray(len(after))
        cuts = self._supervise(mask, 0, text[start:], after, places, turn.end - start, turn.cut)
        return Masked(before + after, bytearray(len(before)) + mask, cuts)

    def _cut(self, turn: Turn) -> Masked:
        """The row of the whole text; the token across the start of the reply is not supervised."""
        ids, places = self._encode(turn.text)
        mask = bytearray(len(ids))
        first, _ = self._boundary(turn.text, ids, places, turn.start)
        return Masked(ids, mask, 1 + self._supervise(mask, first, turn.text, ids, places, turn.end, turn.cut))

    def _supervise(
        self,
        mask: bytearray,
        first: int,
        text: str,
        ids: list[int],
        places: list[Span] | None,
        stop: int,
        cut: bool = False,
    ) -> int:
        """Supervise from a token to a character; returns 1 if the end lies inside a token, which is not supervised
        where the reply was cut off: nobody wrote it as it stands there."""
        last, clean = self._boundary(text, ids, places, stop)
        last -= int(cut and not clean)
        mask[first:last] = b"\1" * (last - first)
        return int(not clean)

    def _overlapped(self, script: Script, ids: list[int], places: list[Span] | None) -> bytearray:
        """Every token with a character in a span, as transformers masks what a template marks."""
        mask = bytearray(len(ids))
        for start, stop in script.spans:
            if places is None:  # a slow tokenizer
                first, clean = self._boundary(script.text, ids, None, start)
                self._supervise(mask, first - (not clean), script.text, ids, None, stop)
            else:
                first = max(bisect_left(places, (start, start)) - 1, 0)
                for token in range(first, len(ids)):
                    if places[token][0] >= stop:
                        break
                    mask[token] |= places[token][1] > start
        return mask

    def _boundary(self, text: str, ids: list[int], places: list[Span] | None, place: int) -> tuple[int, bool]:
        """The first token that starts at character `place` or later, and whether no token lies across it.

        It is clean if the text before it, tokenised alone as a server does, gives the tokens before it.
        """
        if place == len(text):
            return len(ids), True
        if places is None:
            before, _ = self._encode(text[:place])
            if ids[: len(before)] == before:
                return len(before), True
            same = next((n for n, (one, other) in enumerate(zip(ids, before, strict=False)) if one != other), len(ids))
            return same + 1, False  # the first token that differs is the one that is cut
        count = bisect_left(places, (place, -1))
        if count and places[count - 1][1] > place:
            return count, False
        # a special token splits the text for good, so that only what follows the last one has to be tokenised again
        anchor = next((n for n in range(count - 1, -1, -1) if ids[n] in self.added), 0)
        if ids[anchor] in self.added and anchor + 1 == count:
            return count, True
        return count, ids[anchor:count] == self._opening(text[places[anchor][0] if anchor else 0 : place])

    def _opening(self, text: str) -> list[int]:
        """Ids of a text that is mostly the opening of a reply, and then always the same one."""
        if len(text) > 100:
            return self._encode(text)[0]
        if text not in self._openings:
            self._openings[text] = self._encode(text)[0]
        return self._openings[text]

    def _encode(self, text: str) -> tuple[list[int], list[Span] | None]:
        """Ids, and the characters that each of them stands for; None for a tokenizer that does not know."""
        options = {"return_offsets_mapping": True} if self.tokenizer.is_fast else {}
        encoded = self.tokenizer(text, add_special_tokens=False, verbose=False, **options)
        if not options:
            return list(encoded["input_ids"]), None
        offsets = encoded["offset_mapping"]
        # in order of the text; tokens that share a character, or have none, start where the one before does
        starts = accumulate((start for start, _ in offsets), max)
        return list(encoded["input_ids"]), [(start, stop) for start, (_, stop) in zip(starts, offsets, strict=True)]

    def _text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
