"""Rows of files to chats; whatever is no chat is listed with its file, row and reason.

`sources.py` says which files and data sets are read, `shapes.py` which rows are accepted, `messages.py` which messages.
A user speaks first, behind a system message or without one; two messages of one role may follow each other.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import text_hash
from .messages import UNKNOWN, Message, NoChat, messages_of
from .shapes import SHAPES, contents_of
from .sources import Source, sources_of
from .sources import files_of as files_of  # training reads its files' hashes

Raw = tuple[str, int, Any]
"""File, row, and what stands there: a line of JSON as bytes, or a value."""


@dataclass(frozen=True)
class Chat:
    """One conversation, and where it stands."""

    messages: list[Message]
    """As `messages.py` describes them; empty where there is a text instead."""
    key: str
    """16 hex digits of its content: the same in any file, shape and order."""
    file: str
    row: int
    """Counts from 1: the line of a .jsonl file, the place in the list of a .json file or in a table."""
    tools: tuple[dict[str, Any], ...] = ()
    muted: tuple[int, ...] = ()
    """Numbers of messages that are not trained on."""
    cut: tuple[int, ...] = ()
    """Numbers of replies that were cut off at a limit."""
    text: str | None = None
    """Plain text that is no chat."""

    @property
    def place(self) -> str:
        return f"{self.file}, row {self.row}"


@dataclass(frozen=True)
class Skipped:
    """A row that is not used, and why."""

    file: str
    row: int
    reason: str
    """The kind of fault, as it is counted."""
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.file}, row {self.row}: {self.reason}" + (f" ({self.detail})" if self.detail else "")


def read_chats(paths: Iterable[str | Path], strict: bool = False) -> tuple[list[Chat], list[Skipped]]:
    """Read all chats of files, in order; `shipped` stands for the conversations that come with the package.

    Args:
        paths: as `sources_of` takes them.
        strict: refuse everything because of one bad row.

    Returns:
        The chats, and the rows that are none; plain texts are among these.

    Raises:
        UserError: a file is missing or unreadable, no row of all is a chat, or (strict) some row is not.
    """
    chats: list[Chat] = []
    skipped: list[Skipped] = []
    for raw in raw_rows(sources_of(paths)):
        one = chat_of(raw)
        if isinstance(one, Chat) and one.text is not None:
            one = Skipped(one.file, one.row, "plain text, no chat")
        (chats if isinstance(one, Chat) else skipped).append(one)  # type: ignore[arg-type]
    if skipped and (strict or not chats):
        head = "" if chats else "no row is a chat; "
        raise UserError(f"{head}{listed(skipped)}")
    if not chats:
        raise UserError(f"{', '.join(map(str, paths))}: holds no row")
    return chats, skipped


def raw_rows(sources: Iterable[Source]) -> Iterator[Raw]:
    """The rows of sources, one after another, as they stand there."""
    for source in sources:
        for number, value in source.rows():
            yield source.name, number, value


def chat_of(raw: Raw) -> Chat | Skipped:
    """The chat that a row is, or why it is none."""
    file, row, value = raw
    try:
        contents = contents_of(_parsed(value) if isinstance(value, bytes) else value)
        if contents.text is not None:
            _check_text(contents.text)
            return Chat([], text_hash(contents.text)[:16], file, row, text=contents.text)
        said = messages_of(contents.messages, contents.cut)
        _check_order(said.messages)
        _check_text([said.messages, contents.tools])
    except NoChat as fault:
        return Skipped(file, row, fault.reason, fault.detail)
    key = key_of(said.messages)
    return Chat(said.messages, key, file, row, tuple(contents.tools), tuple(said.muted), tuple(said.cut))


def key_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """16 hex digits that stand for the content of a chat."""
    return text_hash(json.dumps(list(messages), sort_keys=True))[:16]


def counted(skipped: Iterable[Skipped]) -> dict[str, int]:
    """How many rows each reason took, the most frequent first."""
    return dict(Counter(one.reason for one in skipped).most_common())


def listed(
    skipped: Sequence[Skipped], what: str = "not used", limit: int = 10, counts: Mapping[str, int] | None = None
) -> str:
    """A line of counts by reason, then the first rows one by one; and the shapes that are known, if one is not.

    Args:
        counts: by reason, where `skipped` holds the first rows alone.
    """
    counts = counted(skipped) if counts is None else counts
    total = sum(counts.values())
    by_reason = "; ".join(f"{count} {reason}" for reason, count in counts.items())
    lines = [f"{total} {'row' if total == 1 else 'rows'} {what}: {by_reason}"]
    lines += [f"  {one}" for one in skipped[:limit]]
    if total > len(lines) - 1:
        lines.append(f"  and {total - len(lines) + 1} more")
    if UNKNOWN in counts:
        lines.append(f"Accepted rows: {SHAPES}")
    return "\n".join(lines)


class Faults:
    """Rows that are not used, counted by reason, and the first of them."""

    def __init__(self) -> None:
        self.counts, self.first = Counter[str](), list[Skipped]()

    def add(self, rows: Sequence[Skipped]) -> None:
        self.counts.update(one.reason for one in rows)
        self.first += rows[: 10 - len(self.first)]

    def told(self, what: str = "not used") -> str:
        """As `listed` tells them."""
        return listed(self.first, what, counts=dict(self.counts.most_common()))


def _parsed(line: bytes) -> Any:
    """The JSON value of a line."""
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise NoChat("not UTF-8 text", f"{error.reason} at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise NoChat("not JSON", str(error)[:100]) from None


def _check_order(messages: Sequence[Message]) -> None:
    if not messages:
        raise NoChat("empty chat")
    roles = [message["role"] for message in messages]
    if "user" not in roles:
        raise NoChat("no user turn", f"roles {', '.join(roles[:6])}")
    for early, article in (("assistant", "an"), ("tool", "a")):
        if early in roles[: roles.index("user")]:
            raise NoChat(f"starts with {article} {early} turn", f"roles {', '.join(roles[:6])}")


def _check_text(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise NoChat("broken text", f"no UTF-8, or half of a surrogate pair, {error.object[error.start]!r}") from None
    except (TypeError, ValueError) as error:  # a value of a table that JSON does not know
        raise NoChat("content is no text", str(error)[:100]) from None
