"""One message of a row, however it is written, to the form that `heads/dialect.py` starts from.

    {"role": "system" | "developer" | "user" | "assistant" | "tool", "content": text,
     "reasoning_content": text, "tool_calls": [{"type": "function", "function": {"name", "arguments": mapping}}], ...}

Read are role and content, or from and value; content as text or as a list of parts (text, reasoning, tool calls and
their results); calls as mapping, list or JSON text; the older `function_call`. Further fields are kept as they are. A
weight of 0 (`weight`, `loss_weight`, or `train: false`) means that a reply is not trained on, and a `finish` (or
`finish_reason`) of `length` that it was cut off at a limit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..heads.dialect import REASONING

Message = dict[str, Any]

ROLES = {
    "system": "system",
    "developer": "developer",
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model", "ai"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function", "function_response", "tool_response", "ipython"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "call"),
}
"""The role that each name stands for; a `call` is an assistant's message that is a tool call as a whole."""
WEIGHTS = ("weight", "loss_weight", "train")
FINISHES = ("finish", "finish_reason")
UNKNOWN = "unknown shape"
CUT = ("length", "max_tokens")  # how servers say that an answer reached its limit
JSON = (str, int, float, list, dict)  # dates and the like, which tables have, are left away
TEXTS = ("text", "input_text", "output_text")
THOUGHTS = ("reasoning", "thinking")
CALLS = ("tool_call", "tool_use", "function_call")
CALLED = ("tool_calls", "function_call")


class NoChat(Exception):
    """Why a row is no chat: the kind of fault, then what is special about this row."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason)
        self.reason, self.detail = reason, detail


@dataclass
class Said:
    """The messages of a row."""

    messages: list[Message] = field(default_factory=list)
    """In the one form."""
    muted: list[int] = field(default_factory=list)
    """Numbers of those that are not trained on."""
    cut: list[int] = field(default_factory=list)
    """Numbers of replies that were cut off at a limit, so that their end is none of the backbone's."""


def messages_of(raw: Sequence[Any], cut: bool = False) -> Said:
    """Messages in the one form, and what is special about some of them.

    Args:
        cut: the last of them was cut off at a limit.

    Raises:
        NoChat: one of them is no message, or has nothing to say.
    """
    said = Said()
    for number, one in enumerate(raw):
        message, weight = _message(one, f"message {number + 1}")
        finish = [message.pop(name) for name in FINISHES if name in message]
        said.messages.append(message)
        if message["role"] == "assistant":
            said.muted += [] if weight else [number]
            said.cut += [number] if (cut and number + 1 == len(raw)) or any(one in CUT for one in finish) else []
    return said


def decoded(text: Any) -> Any:
    """A JSON text as its value; anything else, and a text that is no JSON, as it is."""
    if isinstance(text, str) and text.strip()[:1] in ("[", "{"):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            pass
    return text


def _message(raw: Any, where: str) -> tuple[Message, bool]:
    if not isinstance(raw, dict):
        raise NoChat(UNKNOWN, f"{where} is a {type(raw).__name__}, not a mapping")
    role_key = "role" if "role" in raw else "from"
    content_key = "content" if "content" in raw else "value"
    role = ROLES.get(str(raw.get(role_key)).strip().lower())
    wordless = role == "tool" or any(raw.get(name) for name in (*CALLED, *REASONING))  # a table leaves null away
    if role_key not in raw or (content_key not in raw and not wordless):
        raise NoChat(UNKNOWN, f"{where} has keys {', '.join(map(str, raw)) or 'none'}")
    if role is None:
        raise NoChat("unknown role", f"{where} is of {raw[role_key]!r}; known are {', '.join(ROLES)}")
    rest = {name: raw[name] for name in raw if name not in (role_key, content_key) and isinstance(raw[name], JSON)}
    if role == "call":
        message = _called(raw.get(content_key), where)
    else:
        message = {"role": role, **_content(raw.get(content_key), role, wordless, where)}
    weight = _weight(rest, where)
    _add_thoughts(message, rest, where)
    _add_calls(message, rest, where)
    _check_said(message, raw.get(content_key), where)
    return {**message, **rest}, weight


def _called(value: Any, where: str) -> Message:
    """An assistant's message that is a call; as text where it cannot be read as one."""
    try:
        return {"role": "assistant", "content": "", "tool_calls": _calls(value, where)}
    except NoChat:
        return {"role": "assistant", **_content(value, "assistant", False, where)}


def _content(content: Any, role: str, wordless: bool, where: str) -> Message:
    """Content, and what its parts hold besides text.

    Args:
        wordless: the message may have none.
    """
    if isinstance(content, str):
        return {"content": content}
    if content is None:
        if wordless:
            return {"content": ""}
        raise NoChat("null content", where)
    if isinstance(content, list) and all(isinstance(part, (str, Mapping)) for part in content):
        return _from_parts(content, role, where)
    if role == "tool":
        return {"content": json.dumps(content, ensure_ascii=False)}
    raise NoChat("content is no text", f"{where} holds a {type(content).__name__}")


def _from_parts(parts: Sequence[Any], role: str, where: str) -> Message:
    """The texts of parts joined as they stand, with reasoning and calls in fields of their own."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Message] = []
    odd: list[str] = []
    for part in parts:
        kind = _kind(part)
        value = _value(part, kind)
        if kind == "tool_result" or (role == "tool" and not isinstance(value, str)):
            texts.append(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        elif kind in CALLS:
            calls += _calls(value, where)
        elif isinstance(value, str) and kind in (*TEXTS, *THOUGHTS):
            (thoughts if kind in THOUGHTS else texts).append(value)
        else:
            odd.append(kind)
    if odd:
        raise NoChat("content is no text", f"{where} has parts {', '.join(odd)}")
    made: Message = {"content": "".join(texts)}
    if thoughts:
        made["reasoning_content"] = "".join(thoughts)
    return made | ({"tool_calls": calls} if calls else {})


def _kind(part: Any) -> str:
    return str(part.get("type") or "text") if isinstance(part, Mapping) else "text"


def _value(part: Any, kind: str) -> Any:
    """What a part holds: under `value`, or under the name of its kind, or (a call) itself."""
    if not isinstance(part, Mapping):
        return part
    named = next((part[name] for name in ("value", kind, "text", "content") if part.get(name) is not None), None)
    if kind in CALLS and "name" in part:
        return {"name": part["name"], "arguments": part.get("input", part.get("arguments", {})), "id": part.get("id")}
    if kind == "tool_result" and isinstance(named, list):
        return "".join(str(_value(one, _kind(one))) for one in named)
    return named


def _weight(rest: Message, where: str) -> bool:
    """Whether a message is trained on; takes the fields that say so away."""
    given = {name: rest.pop(name) for name in WEIGHTS if name in rest}
    for name, value in given.items():
        if value not in (0, 1, "0", "1", 0.0, 1.0):
            raise NoChat("weight of a turn", f"{where} has {name} {value!r}; 0 and 1 are known")
    return all(float(value) for value in given.values())


def _add_thoughts(message: Message, rest: Message, where: str) -> None:
    """Reasoning under the one name."""
    found = [rest.pop(name) for name in REASONING if name in rest]
    for thoughts in found:
        if not isinstance(thoughts, str):
            raise NoChat("reasoning is no text", f"{where} holds a {type(thoughts).__name__}")
        if thoughts:
            message["reasoning_content"] = thoughts
            return


def _add_calls(message: Message, rest: Message, where: str) -> None:
    """Calls in the one form."""
    calls = [*message.get("tool_calls", [])]
    for name in CALLED:
        if value := rest.pop(name, None):
            calls += _calls(value, where)
    if calls:
        message["tool_calls"] = calls


def _calls(value: Any, where: str) -> list[Message]:
    value = decoded(value)
    listed = value if isinstance(value, list) else [value]
    return [_call(decoded(one), where) for one in listed]


def _call(call: Any, where: str) -> Message:
    function = decoded(call.get("function", call)) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise NoChat("tool call", f"{where} has one without a name: {str(call)[:60]}")
    names = ("arguments", "parameters", "input")
    arguments = decoded(next((function[name] for name in names if function.get(name) is not None), {}))
    made = {"type": "function", "function": {"name": function["name"], "arguments": arguments or {}}}
    return {"id": call["id"], **made} if call.get("id") else made


def _check_said(message: Message, content: Any, where: str) -> None:
    """A message has to say something; a system's may be empty, and a tool's answer."""
    if message["role"] in ("system", "developer", "tool") or message["content"].strip():
        return
    if not message.get("tool_calls") and not message.get("reasoning_content"):
        reason = "null content" if content is None else "empty content"
        raise NoChat(reason, f"{where}, of the {message['role']}")
