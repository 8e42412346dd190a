"""One chat to token ids and the mask of what is supervised.

The text is what the tokenizer's own template writes for the whole chat. Supervised is every assistant turn with its
end-of-turn token: the text that the backbone has to produce after what a server would send it. Where the template
marks this itself (`{% generation %}`), its marks are the truth; else a turn's start is found by rendering the chat
before it with the opening of a reply, and its end by rendering the chat up to it. Both have to be beginnings of the
whole text: a template that writes an earlier turn otherwise once later ones follow gives a row that no server would
see, and it is refused.

Letters: T tokens of the chat.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ..errors import UserError
from ..heads import chat
from .chats import Message

Span = tuple[int, int]  # characters, from the first to behind the last

MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")  # what transformers itself looks for
NOTHING = "nothing to learn"
PROBE = "qzreplyzq"  # a reply that no template changes, to see what is written after one


class Unmaskable(Exception):
    """Why no true mask can be given for a chat: the kind of fault, then what is special about this chat."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason} ({detail})")
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Masked:
    """A chat as tokens."""

    ids: list[int]
    """(T,)"""
    mask: bytearray
    """(T,) 1 where the token is supervised: it starts inside a reply or its end of turn."""
    cuts: int
    """Ends of replies, on either side, that lie inside a token. Such a token counts where it starts."""


class Masker:
    """Makes ids and masks with one tokenizer.

    Raises:
        UserError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.template = chat.template_of(tokenizer)
        self.marked = MARK.search(self.template) is not None
        self.specials = [one for one in (*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()) if one.strip()]
        self._tails: dict[tuple[str, ...], tuple[str, int]] = {}

    def __call__(self, messages: Sequence[Message]) -> Masked:
        """Ids and mask of a chat; what follows its last reply is left away.

        Raises:
            Unmaskable: the template refuses the chat, or writes it otherwise than a server would see it.
        """
        last = max((k for k, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
        if last < 0:
            raise Unmaskable(NOTHING, "no assistant turn")
        text, spans = self.spans(messages[: last + 1])
        return self.tokens(text, spans)

    def spans(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """The text of a chat and the characters of it that are supervised, in order."""
        if self.marked:
            return self._marked(messages)
        text, spans = self._render(messages), []
        for k, message in enumerate(messages):
            if message["role"] == "assistant":
                spans.append(self._turn(text, messages, k))
        return text, spans

    def tokens(self, text: str, spans: Sequence[Span]) -> Masked:
        """Tokenise a text as a whole and map spans of characters to tokens."""
        options = {"return_offsets_mapping": True} if self.tokenizer.is_fast else {}
        encoded = self.tokenizer(text, add_special_tokens=False, verbose=False, **options)
        ids = list(encoded["input_ids"])
        # in order of the text; tokens that share a character, or have none, start where the one before does
        starts = list(accumulate((start for start, _ in encoded["offset_mapping"]), max)) if options else None
        mask, cuts = bytearray(len(ids)), 0
        for span in spans:
            (first, clean), (stop, clean_too) = (self._boundary(text, ids, starts, place) for place in span)
            mask[first:stop] = b"\1" * (stop - first)
            cuts += (not clean) + (not clean_too)
        return Masked(ids, mask, cuts)

    def _boundary(self, text: str, ids: list[int], starts: list[int] | None, place: int) -> tuple[int, bool]:
        """The first token that starts at character `place` or later, and whether no token lies across it.

        It is clean if the text before it, tokenised alone as a server does, gives the tokens before it.
        """
        if place == len(text):
            return len(ids), True
        before = self.tokenizer(text[:place], add_special_tokens=False, verbose=False)["input_ids"]
        if ids[: len(before)] == before:
            return len(before), True
        if starts is not None:
            return bisect_left(starts, place), False
        same = next((n for n, (one, other) in enumerate(zip(ids, before, strict=False)) if one != other), len(ids))
        return same + 1, False  # a slow tokenizer gives no places: the first token that differs is the one that is cut

    # -- where a reply starts and ends ---------------------------------------------------------------------------

    def _turn(self, text: str, messages: Sequence[Message], k: int) -> Span:
        """The characters of turn `k` in `text`, which is the whole chat."""
        where = f"message {k + 1} of {len(messages)}"
        before = self._render(messages[:k], add_generation_prompt=True)
        after = self._render(messages[: k + 1]) if k + 1 < len(messages) else text
        tail, ending = self._tail(messages[: k + 1])
        if not after.endswith(tail):
            raise Unmaskable("the end of a reply cannot be found", where)
        end = len(after) - len(tail) + ending
        for one, what in ((before, "what comes before the reply"), (after[:end], "the reply")):
            if not text.startswith(one):
                raise Unmaskable(
                    "the template writes history otherwise", f"{what}, {where}, is not what the whole chat has there"
                )
        return len(before), end

    def _tail(self, messages: Sequence[Message]) -> tuple[str, int]:
        """What the template writes after the content of a last reply, and how much of it is the end of turn.

        That is everything up to the first special token, or to the end of the first line of text if that comes before.
        """
        roles = tuple(message["role"] for message in messages)
        if roles not in self._tails:
            text = self._render([*messages[:-1], {"role": "assistant", "content": PROBE}])
            if PROBE not in text:
                raise Unmaskable("the template leaves a reply out", f"message {len(messages)}")
            tail = text.rpartition(PROBE)[2]
            line = re.match(r"\s*\S[^\n]*", tail)
            ends = [tail.index(special) + len(special) for special in self.specials if special in tail]
            self._tails[roles] = tail, min([len(line[0].rstrip()), *ends]) if line else 0
        return self._tails[roles]

    def _marked(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """The text, and what the template itself marks as generated."""
        from transformers.utils.chat_template_utils import render_jinja_template

        text = self._render(messages)
        found: Any = render_jinja_template(  # (texts, marks), whatever its annotation says
            conversations=[list(messages)],
            chat_template=self.template,
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )
        (marked,), (marks,) = found
        assert marked == text, "the marked and the plain rendering of a chat differ"
        return text, [(start, end) for start, end in marks if end > start]

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        try:
            return chat.render(self.tokenizer, messages, add_generation_prompt=add_generation_prompt)
        except UserError as error:
            raise Unmaskable("the template refuses it", str(error).partition(": ")[2] or str(error)) from None
