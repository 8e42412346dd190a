"""What a row holds: its messages, or a text, with tools and system prompt, out of every shape that is accepted.

- `messages`, `conversations`, `conversation`: a list of messages, or its JSON text
- a bare list of messages
- `prompt` (or `question`, `query`, `input`) and `response` (or `completion`, `answer`, `output`), as texts or messages;
  or a prompt alone
- `instruction`, `input`, `output`, with `history` as pairs of question and answer
- `text`, or a bare text: plain text, which no template touches

beside `system`, `tools` (or `functions`) as list or JSON text, and `finish` (or `finish_reason`), which is `length`
where the last reply was cut off at a limit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .messages import CUT, FINISHES, UNKNOWN, NoChat, decoded
from .sources import UNNAMED

LISTS = ("messages", "conversations", "conversation")
QUESTIONS = ("question", "query", "input")
ANSWERS = ("response", "completion", "answer", "output")
MEDIA = ("images", "image", "videos", "video", "audios", "audio")
SHAPES = (
    "messages (role, content), conversations (from, value), prompt and response, instruction, input and output, "
    "text, a bare list of messages, a bare text"
)
RENDERED = re.compile(
    r"<\|im_start\|>|<\|start_header_id\|>|\[INST\]|<start_of_turn>|<\|(?:user|assistant|start)\|>|<｜(?:User|Assistant)｜>"
)
"""What a chat leaves behind that somebody rendered: taken as plain text, its questions would be trained on, too."""


@dataclass
class Contents:
    """What a row holds, as it stands there."""

    messages: list[Any] = field(default_factory=list)
    text: str | None = None
    """Plain text instead of messages."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    cut: bool = False
    """Whether the last reply was cut off at a limit."""


def contents_of(row: Any) -> Contents:
    """The contents of a row.

    Raises:
        NoChat: its shape is unknown, or it holds what is not text.
    """
    if isinstance(row, list):
        return Contents(row)
    if isinstance(row, str):
        return Contents(text=_plain(row))
    if not isinstance(row, Mapping):
        raise NoChat(UNKNOWN, f"a {type(row).__name__}, not a mapping, a list or a text")
    if found := [name for name in MEDIA if row.get(name) not in (None, "", "[]") and row[name]]:
        raise NoChat("images, audio or video", f"the row has {', '.join(found)}")
    if UNNAMED in row:
        raise NoChat("more cells than names", "is a comma in a text, without quotes around it?")
    messages = _messages(row)
    if messages is None:
        if not isinstance(row.get("text"), str):
            raise NoChat(UNKNOWN, f"{_why(row)}keys {', '.join(map(str, row)) or 'none'}")
        return Contents(text=_plain(row["text"]))
    cut = any(row.get(name) in CUT for name in FINISHES)
    return Contents(_with_system(messages, row), tools=_tools(row), cut=cut)


def _messages(row: Mapping[str, Any]) -> list[Any] | None:
    lists = [value for name in LISTS if isinstance(value := decoded(row.get(name)), list)]
    if lists:
        return list(next(filter(None, lists), []))
    if "instruction" in row:
        return _instructed(row)
    answer = next((row[name] for name in ANSWERS if row.get(name) is not None), None)
    asked = [name for name in QUESTIONS if name in row and answer is not None]
    for name in ("prompt", *asked):
        if name in row and "chosen" not in row:
            return _as_messages(row[name], "user") + ([] if answer is None else _as_messages(answer, "assistant"))
    return None


def _instructed(row: Mapping[str, Any]) -> list[Any]:
    """Instruction and input are one question, an empty line between them; history comes before it."""
    pairs = decoded(row.get("history")) or []
    if not isinstance(pairs, list) or not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs):
        raise NoChat(UNKNOWN, "history is no list of pairs of question and answer")
    said = [message for asked, answer in pairs for message in (_said("user", asked), _said("assistant", answer))]
    question = row["instruction"]
    if isinstance(question, str) and isinstance(row.get("input"), str) and row["input"].strip():
        question = f"{question}\n\n{row['input']}"
    answer = next((row[name] for name in ("output", *ANSWERS) if row.get(name) is not None), None)
    return [*said, _said("user", question)] + ([] if answer is None else [_said("assistant", answer)])


def _as_messages(value: Any, role: str) -> list[Any]:
    """A text as a message; a list of messages as it is."""
    if isinstance(value, list) and all(isinstance(one, Mapping) for one in value):
        return value
    if isinstance(value, list) and len(value) > 1:
        raise NoChat("content is no text", f"{len(value)} texts where one of the {role} is needed")
    return [_said(role, value)]


def _said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _with_system(messages: list[Any], row: Mapping[str, Any]) -> list[Any]:
    """With the row's system prompt in front, if the messages have none."""
    system = next((row[name] for name in ("system", "system_prompt") if isinstance(row.get(name), str)), "")
    first = messages[0] if messages and isinstance(messages[0], Mapping) else {}
    if not system.strip() or first.get("role", first.get("from")) in ("system", "developer"):
        return messages
    return [_said("system", system), *messages]


def _tools(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tools of a row, each as `{"type": "function", "function": ...}`."""
    given = next((row[name] for name in ("tools", "functions") if row.get(name)), None)
    value = decoded(given)
    if not value or (isinstance(value, str) and not value.strip()):
        return []
    tools = [decoded(one) for one in (value if isinstance(value, list) else [value])]
    if not all(map(_named, tools)):
        raise NoChat("tools are no list of functions", str(given)[:60])
    return [one if "function" in one else {"type": "function", "function": one} for one in tools]


def _named(tool: Any) -> bool:
    """Whether a tool is a function with a name."""
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _why(row: Mapping[str, Any]) -> str:
    """What is unusual about a row of no known shape."""
    if "role" in row or "from" in row:
        return "a message alone, where its chat is needed: "
    name = next((name for name in LISTS if row.get(name) is not None), None)
    if name is None:
        return ""
    return f"{name} holds {'text that is no JSON list' if isinstance(row[name], str) else 'no list'}: "


def _plain(text: str) -> str:
    if not text.strip():
        raise NoChat("empty content", "the text")
    if found := RENDERED.search(text):
        raise NoChat("a rendered chat as plain text", f"holds {found[0]}; give its messages")
    return text
