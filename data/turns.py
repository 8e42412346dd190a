"""Where the replies of a chat stand in its rendered text.

The prefix of a supervised turn has to be what a server would have sent: the chat before it, rendered with the opening
of a reply. Its end is where the template has written the content of the reply and its end of turn. A template that
writes history otherwise than it wrote the last turn (thoughts that are dropped, an end of turn that changes) gets more
than one text for a chat: the turns that one text cannot hold stand in texts that end with them.

Where the template itself marks what is generated (`{% generation %}`), its marks are the truth, in one text.

A reply that was cut off at a limit has no end: what the template writes behind its last word is none of the backbone's.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..heads import chat
from ..heads.dialect import READS, REASONING
from .replies import LONG, Message, Turn, Unmaskable, turns_of, window

Span = tuple[int, int]  # characters, from the first to behind the last

NO_REPLY = "no reply"
REFUSED = "the template refuses it"
OTHERWISE = "the template writes a reply otherwise than a server would open it"
CUT_UNSEEN = "the words of a reply that was cut off cannot be found"
SHORT = "replies that were cut off, without their end of turn"
PROBE, NEXT = "qzreplyzq", "qznextzq"  # a reply and a question that no template changes
LOOKS = r"<[^<>\s]{1,60}>|\[[^\[\]\s]{1,60}\]|〈[^〈〉\s]{1,60}〉"  # how special tokens are spelled
CLOSES = re.compile(r"end|eo[stm]|stop|return|call|sep|^</|^\[/", re.IGNORECASE)


@dataclass(frozen=True)
class Script:
    """A text and what is supervised in it."""

    text: str
    spans: list[Span]
    turns: list[Turn] | None
    """The turns behind the spans, each in a text of its own; None where the template's own marks are followed."""


@dataclass
class Scripts:
    """The texts of a chat."""

    scripts: list[Script] = field(default_factory=list)
    lost: list[Unmaskable] = field(default_factory=list)
    """Turns that no text can hold as a server would have it, and why."""
    notes: Counter[str] = field(default_factory=Counter)
    """What else should be known, with counts."""


@dataclass(frozen=True)
class _Tail:
    """What a template writes after the content of a reply: the text, how much of it ends the turn, and an end of turn
    that it writes only once something follows."""

    text: str
    ending: int
    missing: str


class Turns:
    """Finds the replies of chats with one tokenizer's template.

    Args:
        thinking: given to the template as `enable_thinking` and `thinking`.
        last_turn: supervise the last reply alone.

    Raises:
        UserError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any, *, thinking: bool | None = None, last_turn: bool = False):
        self.tokenizer, self.thinking, self.last_turn = tokenizer, thinking, last_turn
        self.template = chat.template_of(tokenizer)
        known = {one for one in (*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()) if one.strip()}
        self.special = "|".join([*map(re.escape, sorted(known, key=len, reverse=True)), LOOKS])
        self._tails: dict[tuple[str, ...], _Tail | None] = {}

    def __call__(
        self,
        messages: Sequence[Message],
        tools: chat.Tools | None = None,
        muted: Sequence[int] = (),
        cut: Sequence[int] = (),
    ) -> Scripts:
        """The texts of a chat; what follows its last supervised reply is left away.

        Args:
            muted: numbers of messages that are not supervised.
            cut: numbers of replies that were cut off.

        Raises:
            Unmaskable: no turn can be supervised.
        """
        wanted = [k for k, one in enumerate(messages) if one["role"] == "assistant" and k not in muted]
        if not wanted:
            raise Unmaskable(NO_REPLY, "no assistant turn" + (" of weight 1" if muted else ""))
        wanted = wanted[-1:] if self.last_turn else wanted
        cut = [k for k in cut if k in wanted]
        if cut and any(name in REASONING for name in READS.findall(chat.template_of(self.tokenizer, tools))):
            messages = [_opened(message) if k in cut else message for k, message in enumerate(messages)]
        if chat.MARK.search(chat.template_of(self.tokenizer, tools)):
            made = self._marked(messages[: wanted[-1] + 1], tools, wanted, cut)
        else:
            made = self._found(messages, tools, wanted, cut)
        if cut:
            made.notes[SHORT] += len(cut)
        return made

    # -- by rendering what a server would have sent -------------------------------------------------------------------

    def _found(
        self, messages: Sequence[Message], tools: chat.Tools | None, wanted: list[int], cut: list[int]
    ) -> Scripts:
        found = turns_of(lambda said, k: self._turn(said, tools, k), messages, wanted)
        found |= {k: self._unended(one, messages, tools, k) for k in cut if isinstance(one := found[k], Turn)}
        turns = {k: one for k, one in found.items() if isinstance(one, Turn)}
        made = Scripts(lost=[_of_chat(one, messages) for one in found.values() if isinstance(one, Unmaskable)])
        refusal = next((fault for fault in made.lost if fault.reason == REFUSED), None)
        if not turns or (refusal and not any(_says(messages[k], one.rest) for k, one in turns.items())):
            raise refusal or made.lost[0]
        left = sorted(turns)
        while left:  # the last turn's text holds as many of the others as were written alike
            text = turns[left[-1]].text
            held = [k for k in left if text.startswith(turns[k].upto)]
            spans = [(turns[k].start, turns[k].end) for k in held]
            made.scripts.insert(0, Script(text, spans, [turns[k] for k in held]))
            left = [k for k in left if k not in held]
        self._note_left_out(made, messages, tools, turns)
        return made

    def _turn(self, messages: Sequence[Message], tools: chat.Tools | None, k: int) -> Turn:
        """Reply `k` in the shortest text that starts as a server would have it."""
        before = self._render(messages[:k], tools, add_generation_prompt=True)
        for stop in dict.fromkeys((k + 1, min(k + 2, len(messages)), len(messages))):
            after = self._render(messages[:stop], tools)
            if after.startswith(before):
                return self._ended(messages[:stop], tools, k, before, after)
        whole = self._render(messages[: k + 1], tools)
        same = _alike(before, whole)
        raise Unmaskable(
            OTHERWISE,
            f"message {k + 1} of {len(messages)}: a server sends {before[same:][:40]!r} where the chat has "
            f"{whole[same:][:40]!r}",
        )

    def _ended(self, messages: Sequence[Message], tools: chat.Tools | None, k: int, before: str, after: str) -> Turn:
        tail = self._tail(messages, tools, k)
        if tail is not None and after.endswith(tail.text):
            after += tail.missing
            end = len(after) if tail.missing else len(after) - len(tail.text) + tail.ending
        elif k + 1 == len(messages):
            end = len(after.rstrip())
        else:
            raise Unmaskable("the end of a reply cannot be found", f"message {k + 1}")
        if end <= len(before):
            raise Unmaskable("the template leaves a reply out", f"message {k + 1}")
        return Turn(after, len(before), after[len(before) :], end)

    def _tail(self, messages: Sequence[Message], tools: chat.Tools | None, k: int) -> _Tail | None:
        """What stands behind the content of reply `k`; None if that cannot be told."""
        plain = all(message.keys() <= {"role", "content"} and message["role"] != "tool" for message in messages)
        if not plain or tools or k + 1 < len(messages):
            return self._tail_of(messages, tools, k)
        key = tuple(message["role"] for message in messages)
        if key not in self._tails:  # of made-up messages, so that it does not matter which chat came first
            asked = [{"role": role, "content": f"{NEXT} {number}"} for number, role in enumerate(key)]
            self._tails[key] = self._tail_of(asked, tools, k)
        return self._tails[key]

    def _tail_of(self, messages: Sequence[Message], tools: chat.Tools | None, k: int) -> _Tail | None:
        said = [*messages[:k], {"role": "assistant", "content": PROBE}, *messages[k + 1 :]]
        try:
            text = self._render(said, tools)
        except Unmaskable:
            return None
        if PROBE not in text:
            return None
        try:
            followed = self._render([*said[: k + 1], {"role": "user", "content": NEXT}], tools)
        except Unmaskable:
            followed = text
        tail, later = text.rpartition(PROBE)[2], followed.rpartition(PROBE)[2]
        return _Tail(tail, *ending(tail, later, self.special, self.tokenizer.eos_token))

    def _unended(self, turn: Turn, messages: Sequence[Message], tools: chat.Tools | None, k: int) -> Turn | Unmaskable:
        """A reply that was cut off, without its end of turn."""
        tail, text = self._tail(messages[: k + 1], tools, k), turn.upto
        closing = "" if tail is None else tail.missing or tail.text[: tail.ending]
        known = tail is not None and text.endswith(closing)
        end = _last_word(messages[k], text, turn.start, len(text) - len(closing) if known else len(text), known)
        return replace(turn, end=end, cut=True) if end > turn.start else Unmaskable(CUT_UNSEEN, f"message {k + 1}")

    # -- by the template's own marks ----------------------------------------------------------------------------------

    def _marked(
        self, messages: Sequence[Message], tools: chat.Tools | None, wanted: list[int], cut: list[int]
    ) -> Scripts:
        try:
            text, marks = chat.marked(self.tokenizer, messages, tools=tools, thinking=self.thinking)
        except chat.Refusal as refusal:
            raise _of_chat(Unmaskable(REFUSED, refusal.words), messages) from None
        if len(wanted) < sum(message["role"] == "assistant" for message in messages):
            places = [self._place(messages, tools, k, text) for k in wanted]
            marks = [mark for mark in marks if any(start <= mark[0] < stop for start, stop in places)]
        made = Scripts()
        for k in cut:
            marks, found = self._unmarked(marks, text, messages, tools, k)
            made.lost += [] if found else [Unmaskable(CUT_UNSEEN, f"message {k + 1}")]
        if made.lost and not marks:
            raise made.lost[0]
        made.scripts = [Script(text, marks, None)]
        if 0 < len(marks) < len(wanted):
            made.notes["replies that the template does not mark"] = len(wanted) - len(marks)
        otherwise = sum(not self._opens(text, messages[:k], tools) for k in wanted)
        if otherwise:
            made.notes["turns that the template marks, but a server would open otherwise"] = otherwise
        return made

    def _unmarked(
        self, marks: list[Span], text: str, messages: Sequence[Message], tools: chat.Tools | None, k: int
    ) -> tuple[list[Span], bool]:
        """The marks, without the end of a reply that was cut off; and whether its words were found."""
        start, stop = self._place(messages, tools, k, text)
        tail = self._tail(messages, tools, k)
        known = tail is not None and text.endswith(tail.text)
        end = _last_word(messages[k], text, start, len(text) - len(tail.text) if tail and known else stop, known)
        clipped = ((first, min(last, end) if start <= first < stop else last) for first, last in marks)
        return [(first, last) for first, last in clipped if last > first], end > start

    def _place(self, messages: Sequence[Message], tools: chat.Tools | None, k: int, text: str) -> Span:
        """Where message `k` stands in the text, header and all."""
        start = _alike(self._render(messages[:k], tools), text)
        if k + 1 == len(messages):
            return start, len(text)
        return start, _alike(self._render(messages[: k + 1], tools), text)

    def _opens(self, text: str, messages: Sequence[Message], tools: chat.Tools | None) -> bool:
        try:
            return text.startswith(self._render(messages, tools, add_generation_prompt=True))
        except Unmaskable:
            return False

    # -- what a template says nothing of ------------------------------------------------------------------------------

    def _note_left_out(
        self, made: Scripts, messages: Sequence[Message], tools: chat.Tools | None, turns: dict[int, Turn]
    ) -> None:
        """Count what the template does not print: messages before the last reply, reasoning and calls of replies."""
        last = max(turns)
        text = turns[last].text
        for k, message in enumerate(messages[:last]):
            if message["role"] != "assistant" and self._leaves_out(text, messages[: last + 1], tools, k):
                made.notes[f"{message['role']} messages that the template leaves out"] += 1
        for k, turn in turns.items():
            calls = _called(messages[k])
            if not all(name in turn.rest for name in calls):  # of a server's prompt, too
                made.notes["replies whose tool calls the template leaves out"] += 1
            elif calls and self._leaves_out(turn.text, messages[: k + 1], tools, k):
                made.notes["replies with tool calls whose other words the template leaves out"] += 1
            thoughts = next((messages[k][name] for name in REASONING if messages[k].get(name)), None)
            if isinstance(thoughts, str) and thoughts.strip() and thoughts.strip() not in turn.text:
                made.notes["replies whose reasoning the template leaves out"] += 1

    def _leaves_out(self, text: str, messages: Sequence[Message], tools: chat.Tools | None, k: int) -> bool:
        content = messages[k].get("content")
        if not isinstance(content, str) or not (content := content.strip()):
            return False
        if len(content) > 8 and (content in text or json.dumps(content, ensure_ascii=False)[1:-1] in text):
            return False
        near, gap = window(messages[: k + 2], k) if len(messages) > 2 * LONG else (messages, 0)
        messages, k = (near, k - gap) if gap else (messages, k)
        asked = [*messages[:k], {**messages[k], "content": NEXT}, *messages[k + 1 :]]
        try:
            return NEXT not in self._render(asked, tools).lower()
        except Unmaskable:
            return False  # it reads the content, at least

    def _render(
        self, messages: Sequence[Message], tools: chat.Tools | None, add_generation_prompt: bool = False
    ) -> str:
        try:
            return chat.render(
                self.tokenizer,
                messages,
                tools=tools,
                thinking=self.thinking,
                add_generation_prompt=add_generation_prompt,
            )
        except chat.Refusal as refusal:
            raise Unmaskable(REFUSED, refusal.words) from None


def ending(last: str, followed: str, special: str, eos: str | None) -> tuple[int, str]:
    """How many characters behind a reply end its turn, and an end of turn that is written only once a turn follows.

    Args:
        last: what stands behind the content of a reply that nothing follows.
        followed: the same where a user's turn follows.
        special: a pattern for special tokens.
        eos: the token that ends what is generated.

    The end of turn is the first special token (or line of text), with closing tokens that stand right behind it; up to
    `eos` where that is always written.
    """
    always = _alike(last, followed)
    if eos and 0 <= last.find(eos) <= always - len(eos):
        return last.find(eos) + len(eos), ""
    first = re.match(rf"\s*(?:({special})|\S[^\n]*)", last)
    if first is None:
        later = re.match(rf"\s*({special})", followed)
        closes = later is not None and not last and (later[1] == eos or CLOSES.search(later[1]))
        return 0, later[0] if closes and later else ""
    end = len(first[0].rstrip())
    if end > always and not (first[1] and (first[1] == eos or CLOSES.search(first[1]))):
        return 0, ""  # an opening of what follows, not an end
    while (more := re.compile(special).match(last, end)) and more.end() <= always and CLOSES.search(more[0]):
        end = more.end()
    return end, ""


def _last_word(message: Message, text: str, start: int, end: int, known: bool) -> int:
    """Where the words of a reply that was cut off end in a text; `start` if that cannot be told.

    Args:
        start, end: between which it stands.
        known: whether its end of turn begins at `end`.
    """
    said = str(message.get("content") or "").strip()
    if known and (said or message.get("tool_calls")):
        return end
    said = said or next((str(message[name]).strip() for name in REASONING if message.get(name)), "")
    place = text.rfind(said, start, end) if said else -1
    return start if place < 0 else place + len(said)


def _opened(message: Message) -> Message:
    """Thoughts that were cut off before their end stand in a field of their own, as a template wants them."""
    said = str(message.get("content") or "").lstrip()
    if not said.startswith("<think>") or "</think>" in said:
        return message
    return {**message, "content": "", "reasoning_content": said.removeprefix("<think>").strip()}


def _called(message: Message) -> list[str]:
    """The names of the functions that a reply calls."""
    return [call.get("function", call).get("name", "") for call in message.get("tool_calls") or []]


def _says(message: Message, written: str) -> bool:
    """Whether what is written of a reply is more than its end of turn."""
    thoughts = [str(message[name]).strip() for name in REASONING if message.get(name)]
    return bool(message.get("content")) or any(one in written for one in (*_called(message), *thoughts))


def _alike(one: str, other: str) -> int:
    """How many characters two texts have in common at their start."""
    length = min(len(one), len(other))
    return next((n for n in range(length) if one[n] != other[n]), length)


def _of_chat(fault: Unmaskable, messages: Sequence[Message]) -> Unmaskable:
    """A refusal with the roles of the chat, which it is mostly about."""
    if fault.reason != REFUSED:
        return fault
    return Unmaskable(REFUSED, f"{fault.detail}; roles {', '.join(str(message['role']) for message in messages)}")
