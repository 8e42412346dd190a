"""The card of a synthetic set: what is in it, in figures, as Markdown beside the file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from .language import language_of

Row = Mapping[str, Any]

SHOWN = 15  # lines of a table


def card(name: str, rows: Sequence[Row], counts: Mapping[str, int], settings: Mapping[str, Any]) -> str:
    """The card.

    Args:
        rows: what is kept, each with `messages`, `kind`, `topic`, `answers`, `finish` and `tokens` (of its answers).
        counts: of everything that was written, `kept` or by the reason why not.
        settings: all that determines the file.
    """
    answers = [one["content"] for row in rows for one in row["messages"] if one["role"] == "assistant"]
    first = [next(one["content"] for one in row["messages"] if one["role"] == "user") for row in rows]
    asked = [words for row, words in zip(rows, first, strict=True) if row["kind"] != "long"]
    openings = [" ".join(words.split()[:2]) for words in asked]
    turns = Counter(sum(one["role"] == "user" for one in row["messages"]) for row in rows)
    written = sum(counts.values())
    parts = [
        f"# {name}\n",
        f"{len(rows):,} conversations that {settings['backbone']} wrote, both sides. Nothing was checked for truth.\n",
        _table(("", ""), _overview(rows, answers, first)),
        _counted("Kinds", Counter(row["kind"] for row in rows)),
        _counted("Questions in a conversation", turns),
        _counted("Topics", Counter(row["topic"] or "(none)" for row in rows)),
        _counted("First words", Counter(openings)),
        _counted("Languages of the answers", Counter(map(language_of, answers))),
        _counted("Decoding", Counter(row["answers"] for row in rows)),
        _counted("How the last answer ended", Counter(row["finish"] for row in rows)),
        _counted(f"Of {written:,} that were written", counts),
        "## Settings\n",
        _table(("setting", "value"), [(key, f"`{value}`") for key, value in sorted(settings.items())]),
    ]
    return "\n".join(parts)


def _overview(rows: Sequence[Row], answers: Sequence[str], first: Sequence[str]) -> list[tuple[str, str]]:
    """Sizes, and the shares that tell whether a set is varied."""
    tokens = [int(row["tokens"]) for row in rows]
    systems = sum(row["messages"][0]["role"] == "system" for row in rows)
    return [
        ("tokens of answers", f"{sum(tokens):,}"),
        ("tokens of answers in a conversation", _spread(tokens)),
        ("characters of an answer", _spread(map(len, answers))),
        ("characters of a first question", _spread(map(len, first))),
        ("answers", f"{len(answers):,}, of which {len(set(answers)):,} differ"),
        ("with a system prompt", _share(systems, len(rows))),
        ("most frequent first word", _most(words.split()[0] for words in first)),
    ]


def _spread(values: Iterable[int]) -> str:
    ordered = sorted(values)
    return f"{ordered[0]:,} to {ordered[-1]:,}, median {median(ordered):,.0f}"


def _most(values: Iterable[str]) -> str:
    counts = Counter(values)
    (value, count), *_ = counts.most_common(1)
    return f"{_cell(value)}, {_share(count, counts.total())}"


def _counted(title: str, counts: Mapping[Any, int]) -> str:
    """A table of counts, the most frequent first."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], str(item[0])))
    total = sum(counts.values())
    lines = [(_cell(name), _share(count, total)) for name, count in ordered[:SHOWN]]
    if len(ordered) > SHOWN:
        lines.append((f"{len(ordered) - SHOWN:,} others", _share(sum(count for _, count in ordered[SHOWN:]), total)))
    return f"## {title}\n\n" + _table(("", ""), lines)


def _share(count: int, total: int) -> str:
    return f"{count:,} ({count / max(total, 1):.1%})"


def _cell(value: Any) -> str:
    return re.sub(r"([|\\`*_<\[\]])", r"\\\1", " ".join(str(value).split()))


def _table(head: tuple[str, str], lines: Iterable[tuple[str, str]]) -> str:
    rows = [f"| {name} | {value} |" for name, value in lines]
    return "\n".join([f"| {head[0]} | {head[1]} |", "|---|---|", *rows, ""])
