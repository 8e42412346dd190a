"""What one chat template expects of messages beyond a role and a text, found by trying it and by reading its source.

Messages come in one form, OpenAI's: content as text, reasoning as `reasoning_content`, tool calls with their arguments
as a mapping, the roles system, developer, user, assistant and tool. A template may want content as a list of parts, or
reasoning under another name; and where it fails on a chat, it may take the chat in another form (`others`). A template
that takes the common form gets it unchanged, as it does from a server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]

REASONING = ("reasoning_content", "reasoning", "thinking", "thought")
PROBES = ("qzaskedzq", "qzsaidzq")  # words that no template knows
READS = re.compile(r"\b(?!ns\b|namespace\b|state\b)\w+(?:\.get\(\s*['\"]|\[\s*['\"]|\.)(\w+)")
"""A field that is read of something: `message.thinking`, `message['thinking']`, `m.get('thinking')`."""


@dataclass(frozen=True)
class Dialect:
    """How one template wants messages."""

    parts: bool = False
    """Content as `[{"type": "text", "text": ...}]`; as a text it would get lost."""
    reasoning: str = REASONING[0]
    """The field that the reasoning of a reply is read from."""

    @classmethod
    def of(cls, template: str, render: Callable[[list[Message]], str]) -> Dialect:
        """Find the dialect of a template.

        Args:
            render: messages to text by this template; may raise anything.
        """
        read = READS.findall(template)
        return cls(_wants_parts(render), next((name for name in REASONING if name in read), REASONING[0]))

    def speak(self, messages: Sequence[Message]) -> list[Message]:
        """Messages as this template wants them."""
        return [message if self._takes(message) else self._spoken(message) for message in messages]

    def _takes(self, message: Message) -> bool:
        """Whether a message can stay as it is, as nearly all can."""
        return not self.parts and message.keys() <= {"role", "content"} and isinstance(message.get("content"), str)

    def _spoken(self, message: Message) -> Message:
        said = dict(message)
        thoughts = [said.pop(name) for name in REASONING if name in said]
        if thoughts:
            said[self.reasoning] = thoughts[0]
        content = said.get("content")
        if self.parts:
            return _in_parts(said)
        if isinstance(content, list):
            said["content"] = _joined(content)
        return said


def others(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Other forms of a chat for a template that fails on it: the arguments of calls as JSON texts, no content where it
    is empty, a developer as system, content in parts; each of these where it changes anything, and all so far."""
    every = list(messages)
    for change in (_texted, _unsaid, _as_system, _in_parts):
        changed = [change(message) for message in messages]
        if changed != list(messages):
            every = [change(message) for message in every]
            yield changed
            if every != changed:
                yield every


def _texted(message: Message) -> Message:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_with_text(call) for call in calls]} if isinstance(calls, list) else message


def _with_text(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), Mapping):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _unsaid(message: Message) -> Message:
    return {name: value for name, value in message.items() if name != "content" or value}


def _as_system(message: Message) -> Message:
    return {**message, "role": "system"} if message.get("role") == "developer" else message


def _in_parts(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _joined(content: list[Any]) -> Any:
    """The texts of a list of parts as one; the list itself if it holds anything else."""
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part for part in content]
    return "".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else content


def _wants_parts(render: Callable[[list[Message]], str]) -> bool:
    """Whether texts get lost where parts do not."""
    plain = [{"role": role, "content": word} for role, word in zip(("user", "assistant"), PROBES, strict=True)]
    if _keeps(render, plain):
        return False
    return _keeps(render, list(map(_in_parts, plain)))


def _keeps(render: Callable[[list[Message]], str], messages: Sequence[Message]) -> bool:
    try:
        text = render(list(messages))
    except Exception:  # a template is foreign code
        return False
    return all(word in text for word in PROBES)
