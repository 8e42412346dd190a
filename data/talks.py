"""A conversation that is being answered anew: what comes before each answer, what was said, and why it ended.

The words of system, user and tools stay, and so do an assistant's tool calls: what a tool would say to another call
cannot be known. Answered anew is what an assistant said in words; every message of the user gets an answer, unless a
call follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .chats import Chat
from .messages import Message

WHY = {
    "length": "cut off at the limit",
    "dropped": "cut off at the limit, and dropped",
    "context": "ended at the backbone's context",
    "empty": "ended by an empty answer",
    "overflow": "left no token to choose (the backbone overflows)",
    "refused": "refused by the chat template",
    "rejected": "refused by the endpoint",
    "failed": "not answered by the endpoint",
}
"""Why a conversation ended before its last turn was answered."""


@dataclass(frozen=True)
class Answer:
    """What came back for a prompt."""

    text: str
    finish: str
    """stop, or a key of `WHY`."""
    detail: str = ""
    reasoning: str = ""


@dataclass
class Talk:
    """A conversation on its way."""

    number: int
    """Its place in the input; the number of its random sample."""
    turns: list[list[Message]]
    """What comes before each answer."""
    tools: tuple[dict[str, Any], ...] = ()
    messages: list[Message] = field(default_factory=list)
    """What has been said and answered."""
    turn: int = 0
    """Answers so far."""
    finish: str = ""
    """Why it ended; empty while it goes on."""
    detail: str = ""

    @classmethod
    def of(cls, number: int, one: Chat) -> Talk:
        return cls(number, turns_of(one.messages), one.tools)

    def prompt(self) -> list[Message]:
        """All that comes before the next answer."""
        return [*self.messages, *self.turns[self.turn]]

    def end(self, finish: str, detail: str) -> None:
        self.finish, self.detail = finish, detail

    def take(self, answer: Answer, keep_cut: bool) -> None:
        """Add an answer, and see whether it ends the conversation.

        Args:
            keep_cut: add it even if it was cut off.
        """
        place = f"answer {self.turn + 1}"
        if answer.finish not in ("stop", "length"):
            self.end(answer.finish, f"{place}: {answer.detail}" if answer.detail else place)
            return
        text = answer.text.rstrip("\ufffd") if answer.finish == "length" else answer.text  # half a character
        if not text.strip():
            self.end("empty", place)
            return
        if answer.finish == "stop" or keep_cut:
            said = {"role": "assistant", "content": text}
            self.messages = [
                *self.prompt(),
                {**said, "reasoning_content": answer.reasoning} if answer.reasoning else said,
            ]
            self.turn += 1
        if answer.finish == "length":
            self.end("length" if keep_cut else "dropped", f"{place}, {answer.detail}")
        elif self.turn == len(self.turns):
            self.finish = "stop"


def turns_of(messages: Sequence[Message]) -> list[list[Message]]:
    """A chat without its answers, cut where one belongs."""
    turns: list[list[Message]] = [[]]
    for place, message in enumerate(messages):
        if _is_call(message) or message["role"] != "assistant":
            turns[-1].append(message)
        if _is_answered(messages, place):
            turns.append([])
    return turns[:-1]


def kept(messages: Sequence[Message]) -> list[Message]:
    """Messages for a row: calls that somebody else made are not trained on."""
    return [{**message, "weight": 0} if _is_call(message) else message for message in messages]


def _is_call(message: Message) -> bool:
    return message["role"] == "assistant" and bool(message.get("tool_calls"))


def _is_answered(messages: Sequence[Message], place: int) -> bool:
    """Whether an answer belongs behind a message."""
    following = messages[place + 1] if place + 1 < len(messages) else None
    if messages[place]["role"] not in ("user", "tool") or (following is not None and _is_call(following)):
        return False
    return messages[place]["role"] == "user" or following is None or following["role"] != "tool"
