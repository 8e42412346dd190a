"""Files of questions: what a bench asks.

A row is told by its keys:

- `{"turns": ["...", ...], "question_id": ..., "category": ...}`: Spec-Bench and MT-bench; all turns are asked
- `{"prompt": "...", "task_id": "HumanEval/0"}`: HumanEval
- `{"question": "..."}`: GSM8K
- `{"prompt": ...}` or `{"text": "..."}`: a plain prompt; a prompt may be a list of messages
- `{"messages": [...]}`, `{"conversations": [...]}` or a bare list of messages: a chat, asked up to its first user turn
  (as it stands, if the user has the last word)

in `.jsonl` (a row a line) or `.json` (a list of rows); in `.txt`, each line is a prompt; plain or `.gz`.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import read_jsonl, text_hash

Message = dict[str, str]

SHAPES = "turns, prompt, question, text, messages, conversations"
SUFFIXES = (".jsonl", ".json", ".txt")
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
ROLES = {"human": "user", "gpt": "assistant"}
TEXTS = ("prompt", "question", "text")
LISTS = ("messages", "conversations")


@dataclass(frozen=True)
class Question:
    """One question, of one turn or several."""

    id: str
    """As its file calls it, else the number of its row."""
    category: str
    """As its file calls it, else the name of the file."""
    group: str
    """What reports put it under: the eight categories of MT-bench are one group."""
    turns: tuple[tuple[Message, ...], ...]
    """For each answer the messages that come before it: what the user says, and system messages ahead of it."""
    row: int
    """Its place in the file, from 1."""

    @cached_property
    def key(self) -> str:
        """16 hex digits of place and content: tells questions of one suite apart, and whether one was changed."""
        return text_hash(json.dumps([self.row, self.id, self.category, self.turns]))[:16]


def read_suite(path: str | Path) -> list[Question]:
    """The questions of a file, in order.

    Raises:
        UserError: the file is missing, empty or no such file, or a row is no question (file, row and keys are named).
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path}: no such file")
    name = path.name.lower().removesuffix(".gz")
    if path.is_dir() or not name.endswith(SUFFIXES):
        raise UserError(f"{path}: not a file of questions; {', '.join(SUFFIXES)} are read, plain or with .gz")
    stem = path.name.removesuffix(".gz").rpartition(".")[0]
    questions = []
    for number, row in _rows(path, name):
        try:
            questions.append(question(row, number, stem))
        except ValueError as fault:
            raise UserError(f"{path}, row {number}: {fault}") from None
    if not questions:
        raise UserError(f"{path}: holds no question")
    return questions


def choose(questions: Sequence[Question], every: int = 1, limit: int | None = None) -> list[Question]:
    """Every `every`-th question, the first one included, and no more than `limit` of these."""
    if every < 1 or (limit is not None and limit < 1):
        raise UserError(f"every is {every} and limit is {limit}; each has to be 1 or more")
    return list(questions[::every][:limit])


def question(row: Any, number: int, category: str) -> Question:
    """One row as a question.

    Args:
        number: its place in the file, from 1.
        category: for rows that name none.

    Raises:
        ValueError: it is none; says why.
    """
    if not isinstance(row, dict):
        row = {"prompt" if isinstance(row, str) else "messages": row}
    name = str(row.get("question_id", row.get("task_id", row.get("id", number))))
    kind = str(row.get("category") or (name.partition("/")[0].lower() if name.startswith("HumanEval/") else category))
    turns = _turns(row)
    group = "mt_bench" if "turns" in row and kind in MT_BENCH else kind
    return Question(name, kind, group, turns, number)


def _turns(row: dict[str, Any]) -> tuple[tuple[Message, ...], ...]:
    if "turns" in row:
        turns = row["turns"]
        if not isinstance(turns, list) or not turns:
            raise ValueError("turns has to be a list of what the user says, with at least one entry")
        return tuple((_said(turn, f"turn {place}"),) for place, turn in enumerate(turns, 1))
    for key in LISTS:
        if key in row:
            return (_opening(row[key], key),)
    for key in TEXTS:
        if key in row:
            value = row[key]
            return (_opening(value, key) if isinstance(value, list) else (_said(value, key),),)
    raise ValueError(f"no question: it has the keys {', '.join(map(str, row)) or '(none)'}; one of {SHAPES} is needed")


def _said(text: Any, where: str) -> Message:
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{where} holds {_kind(text)} where a text is needed")
    return {"role": "user", "content": text}


def _opening(raw: Any, key: str) -> tuple[Message, ...]:
    """The messages of a chat that a backbone is to answer."""
    if not isinstance(raw, list) or not raw:
        raise ValueError(f"{key} has to be a list of messages, with at least one entry")
    roles = [_role(one) if isinstance(one, dict) else None for one in raw]
    if "user" not in roles:
        raise ValueError(f"{key} has no user turn; its roles are {', '.join(map(str, roles))}")
    asked = raw if roles[-1] == "user" else raw[: roles.index("user") + 1]
    return tuple(_message(one, place) for place, one in enumerate(asked, 1))


def _message(raw: Any, place: int) -> Message:
    if not isinstance(raw, dict):
        raise ValueError(f"message {place} is {_kind(raw)}, not a mapping with role and content")
    role, content = _role(raw), raw.get("content", raw.get("value"))
    if not isinstance(role, str) or not isinstance(content, str):
        keys = ", ".join(map(str, raw)) or "(none)"
        raise ValueError(f"message {place} needs a text as role and as content; it has the keys {keys}")
    return {"role": role, "content": content}


def _role(raw: dict[str, Any]) -> Any:
    role = raw.get("role", raw.get("from"))
    return ROLES.get(role, role) if isinstance(role, str) else None


def _kind(value: Any) -> str:
    names = {str: "an empty text", int: "a number", float: "a number", list: "a list", dict: "a mapping"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _rows(path: Path, name: str) -> Iterator[tuple[int, Any]]:
    """(number from 1, value) of each row; empty lines are none."""
    if name.endswith(".jsonl"):
        yield from enumerate(read_jsonl(path), 1)
        return
    text = _text(path)
    if name.endswith(".txt"):
        lines = enumerate(text.split("\n"), 1)
        yield from ((number, line.rstrip("\r")) for number, line in lines if line.strip())
        return
    try:
        whole = json.loads(text)
    except json.JSONDecodeError as error:
        reason = f"not JSON ({error.msg}); rows on lines of their own belong into a .jsonl file"
        raise UserError(f"{path}, line {error.lineno}: {reason}") from None
    except (ValueError, RecursionError) as error:  # a number or a nesting beyond what Python reads
        raise UserError(f"{path}: not JSON ({error})") from None
    yield from enumerate(whole if isinstance(whole, list) else [whole], 1)


def _text(path: Path) -> str:
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as handle:
            return handle.read().decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
