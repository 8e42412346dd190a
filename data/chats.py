"""Files of chats to message lists; whatever is no chat is listed with its file, row and reason.

A row is one of

- `{"messages": [{"role": ..., "content": ...}, ...]}`
- `{"conversations": [{"from": ..., "value": ...}, ...]}` (either key takes either kind of message)
- `{"prompt": ..., "response": ...}`, or a prompt alone
- a bare list of messages

in `.jsonl` (a row a line) or `.json` (a list of rows), plain or `.gz`. Roles are system, user and assistant, or one of
their usual other names (`ROLES`); content is a text, or a list of text parts. A user speaks first, behind a system
message or without one; two messages of one role may follow each other. Tools and their calls are refused, not lost.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import text_hash

Message = dict[str, Any]

SHIPPED = "shipped"
SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
}
LISTS = ("messages", "conversations", "conversation")
RESPONSES = ("response", "completion", "answer")
SHAPES = "messages (role, content), conversations (from, value), prompt and response, a bare list of messages"
UNHANDLED = ("tool_calls", "function_call", "tools", "functions", "images", "loss_weight", "weight")
"""Keys of a row or message that change what is rendered or trained on, and that nothing here can honour yet."""


@dataclass(frozen=True)
class Chat:
    """One conversation, and where it stands."""

    messages: list[Message]
    """`{"role": ..., "content": ...}` each; further keys of a message, such as reasoning_content, are kept."""
    key: str
    """16 hex digits of its content: the same in any file, shape and order."""
    file: str
    row: int
    """Counts from 1: the line of a .jsonl file, the place in the list of a .json file."""

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


class _NoChat(Exception):
    """Why a row is no chat: the kind of fault, then what is special about this row."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason)
        self.reason, self.detail = reason, detail


def read_chats(paths: Iterable[str | Path], strict: bool = False) -> tuple[list[Chat], list[Skipped]]:
    """Read chats from files, in order; `shipped` stands for the conversations that come with the package.

    Args:
        paths: files; a name without its folder works as any path does.
        strict: refuse everything because of one bad row.

    Returns:
        The chats, and the rows that are none.

    Raises:
        UserError: a file is missing or unreadable, no row of all is a chat, or (strict) some row is not.
    """
    chats: list[Chat] = []
    skipped: list[Skipped] = []
    for path in files_of(paths):
        for number, row in _rows(path):
            try:
                messages = _messages(row)
                chats.append(Chat(messages, key_of(messages), str(path), number))
            except _NoChat as fault:
                skipped.append(Skipped(str(path), number, fault.reason, fault.detail))
    if skipped and (strict or not chats):
        head = "" if chats else "no row is a chat; "
        raise UserError(f"{head}{listed(skipped)}\nAccepted rows: {SHAPES}")
    if not chats:
        raise UserError(f"{', '.join(map(str, paths))}: holds no row")
    return chats, skipped


def files_of(paths: Iterable[str | Path]) -> list[Path]:
    """The files that `paths` name, each of them there.

    Raises:
        UserError: one is missing, is a folder, or has a suffix that is not read; or no path is given.
    """
    files = [file for path in paths for file in (_shipped() if str(path) == SHIPPED else [Path(path)])]
    if not files:
        raise UserError("no file of chats is given; `shipped` stands for the conversations that come with headstart")
    for file in files:
        if not file.exists():
            raise UserError(f"{file}: no such file")
        if file.is_dir() or not file.name.lower().endswith(SUFFIXES):
            raise UserError(f"{file}: not a file of chats; {', '.join(SUFFIXES)} are read")
    return files


def key_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """16 hex digits that stand for the content of a chat."""
    return text_hash(json.dumps(list(messages), sort_keys=True))[:16]


def counted(skipped: Iterable[Skipped]) -> dict[str, int]:
    """How many rows each reason took, the most frequent first."""
    return dict(Counter(one.reason for one in skipped).most_common())


def listed(skipped: Sequence[Skipped], what: str = "not used", limit: int = 10) -> str:
    """A line of counts by reason, then the first rows one by one."""
    counts = "; ".join(f"{count} {reason}" for reason, count in counted(skipped).items())
    lines = [f"{len(skipped)} {'row' if len(skipped) == 1 else 'rows'} {what}: {counts}"]
    lines += [f"  {one}" for one in skipped[:limit]]
    if len(skipped) > limit:
        lines.append(f"  and {len(skipped) - limit} more")
    return "\n".join(lines)


# --- files to rows --------------------------------------------------------------------------------------------------


def _shipped() -> list[Path]:
    folder = Path(__file__).parent / "shipped"
    files = sorted(path for path in folder.glob("*") if path.name.endswith(SUFFIXES))
    if not files:
        raise UserError(f"{folder}: holds no conversations in this installation")
    return files


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    """(row number, its JSON value or the fault it has); a .json file that holds lines is read as lines."""
    lines = _lines(path)
    if ".json" in path.suffixes:
        whole = _parsed(b"".join(lines))
        if not isinstance(whole, _NoChat):
            yield from enumerate(whole if isinstance(whole, list) else [whole], 1)
            return
        if not whole.detail.startswith("Extra data"):
            raise UserError(f"{path}: {whole.reason}: {whole.detail}")
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield number, _parsed(line)


def _lines(path: Path) -> list[bytes]:
    """The lines of a file, unzipped; only a line feed ends a line, because JSON may hold every other sign."""
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else open(path, "rb") as handle:
            return handle.readlines()
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None


def _parsed(text: bytes) -> Any:
    """A JSON value, or the fault the text has."""
    try:
        return json.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return _NoChat("not UTF-8 text", f"{error.reason} at byte {error.start}")
    except (ValueError, RecursionError) as error:
        return _NoChat("not JSON", str(error)[:100])


# --- a row to messages ----------------------------------------------------------------------------------------------


def _messages(row: Any) -> list[Message]:
    """The messages of a row, normalised.

    Raises:
        _NoChat: it holds none, or none that can be trained on.
    """
    if isinstance(row, _NoChat):
        raise row
    raw = _listed_messages(row)
    if not raw:
        raise _NoChat("empty chat")
    messages = [_message(one, number) for number, one in enumerate(raw, 1)]
    roles = [message["role"] for message in messages]
    if "user" not in roles:
        raise _NoChat("no user turn", f"roles {', '.join(roles)}")
    if "assistant" in roles[: roles.index("user")]:
        raise _NoChat("starts with an assistant turn", f"roles {', '.join(roles[:6])}")
    try:
        json.dumps(messages, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise _NoChat("broken text", f"half of a surrogate pair, {error.object[error.start]!r}") from None
    return messages


def _listed_messages(row: Any) -> list[Any]:
    """The messages of a row of any accepted shape, as they stand there."""
    if isinstance(row, list):
        return row
    if not isinstance(row, dict):
        raise _NoChat("unknown shape", f"a {type(row).__name__}, not a mapping or a list")
    _refuse_unhandled(row, "the row")
    for key in LISTS:
        if isinstance(row.get(key), list):
            return list(row[key])
    if "prompt" in row:
        prompt = row["prompt"] if isinstance(row["prompt"], list) else [{"role": "user", "content": row["prompt"]}]
        answers = [row[key] for key in RESPONSES if row.get(key) is not None][:1]
        return [*prompt, *({"role": "assistant", "content": answer} for answer in answers)]
    raise _NoChat("unknown shape", f"keys {', '.join(map(str, row)) or 'none'}")


def _message(raw: Any, number: int) -> Message:
    where = f"message {number}"
    if not isinstance(raw, dict):
        raise _NoChat("unknown shape", f"{where} is a {type(raw).__name__}, not a mapping")
    role_key, content_key = ("role", "content") if "role" in raw else ("from", "value")
    if role_key not in raw or content_key not in raw:
        raise _NoChat("unknown shape", f"{where} has keys {', '.join(map(str, raw)) or 'none'}")
    _refuse_unhandled(raw, where)
    role = ROLES.get(str(raw[role_key]).strip().lower())
    if role is None:
        raise _NoChat("unknown role", f"{where} is of {raw[role_key]!r}; known are {', '.join(ROLES)}")
    content = _text(raw[content_key], where)
    if role != "system" and not content.strip():
        raise _NoChat("empty content", f"{where}, of the {role}")
    rest = {key: value for key, value in raw.items() if key not in (role_key, content_key) and value is not None}
    return {"role": role, "content": content, **rest}


def _text(content: Any, where: str) -> str:
    """Content as one text; text parts are joined as they stand."""
    if isinstance(content, str):
        return content
    if content is None:
        raise _NoChat("null content", where)
    if not isinstance(content, list):
        raise _NoChat("content is no text", f"{where} holds a {type(content).__name__}")
    texts = [_part(part) for part in content]
    if any(text is None for text in texts):
        kinds = [part.get("type") if isinstance(part, dict) else type(part).__name__ for part in content]
        raise _NoChat("content is no text", f"{where} has parts {', '.join(map(str, kinds))}")
    return "".join(text for text in texts if text is not None)


def _part(part: Any) -> str | None:
    """The text of a text part, else None."""
    if isinstance(part, dict) and part.get("type") == "text":
        part = part.get("text", part.get("value"))
    return part if isinstance(part, str) else None


def _refuse_unhandled(holder: Mapping[str, Any], where: str) -> None:
    found = [key for key in UNHANDLED if holder.get(key) not in (None, 1, [], {}, "", "[]")]
    if found:
        raise _NoChat("tools, images or weights", f"{where} has {', '.join(found)}")
