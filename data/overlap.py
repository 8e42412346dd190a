"""Chats that hold a question of an evaluation file: exactly, but for spelling, or 13 words of it in a row.

An exact hit is a message that is a question, spaces around it aside. A normalised one is so in lower case and without
anything that is no letter or digit. Longer questions are also hit by any of their runs of 13 words (Brown et al. 2020,
appendix C), a sign of Chinese, Japanese or Korean counting as a word.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..inference.suite import read_suite
from .chats import Chat

RUN = 13
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W_\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")
KINDS = ("exact", "normalised", f"{RUN} words")


@dataclass(frozen=True)
class Hit:
    """A chat that holds a question."""

    kind: str
    place: str
    """Where the chat stands."""
    question: str
    """Where the question stands."""
    text: str
    """What they share."""

    def __str__(self) -> str:
        return f"{self.place}: {self.kind}, {self.question}: {self.text[:80]!r}"


@dataclass
class Overlap:
    """The questions of evaluation files, and what was found of them."""

    questions: dict[str, dict[str, str]] = field(default_factory=lambda: {kind: {} for kind in KINDS})
    """For each kind: a text, and where the question that holds it stands."""
    hits: list[Hit] = field(default_factory=list)
    seen: int = 0
    """Chats that were looked at."""

    @classmethod
    def of(cls, files: Iterable[str | Path]) -> Overlap:
        """The questions of these files.

        Raises:
            UserError: as `read_suite`.
        """
        made = cls()
        for file in files:
            for question in read_suite(file):
                for message in (message for turn in question.turns for message in turn if message["role"] == "user"):
                    made._know(message["content"], f"{Path(file).name}, row {question.row}")
        return made

    def _know(self, text: str, place: str) -> None:
        words = words_of(text)
        self.questions["exact"].setdefault(text.strip(), place)
        self.questions["normalised"].setdefault(" ".join(words), place)
        for run in runs(words):
            self.questions[KINDS[2]].setdefault(run, place)

    def look(self, one: Chat) -> None:
        """Note the closest hit of a chat, if it has one."""
        self.seen += 1
        texts = [one.text] if one.text is not None else [message["content"] for message in one.messages]
        words = [words_of(text) for text in texts]
        forms: Sequence[Iterable[str]] = (
            (text.strip() for text in texts),
            (" ".join(some) for some in words),
            (run for some in words for run in runs(some)),
        )
        for kind, found in zip(KINDS, forms, strict=True):
            hit = next((text for text in found if text and text in self.questions[kind]), None)
            if hit is not None:
                self.hits.append(Hit(kind, one.place, self.questions[kind][hit], hit))
                return

    def lines(self, limit: int = 20) -> Iterator[str]:
        """Counts by kind, then the first hits."""
        counts: Any = Counter(hit.kind for hit in self.hits)
        by_kind = ", ".join(f"{counts[kind]:,} {kind}" for kind in KINDS)
        yield f"overlap: {len(self.hits):,} of {self.seen:,} chats hold a question of the evaluation files ({by_kind})"
        yield from (f"  {hit}" for hit in self.hits[:limit])
        if len(self.hits) > limit:
            yield f"  and {len(self.hits) - limit:,} more"


def words_of(text: str) -> list[str]:
    """The words of a text, in lower case."""
    return WORD.findall(text.casefold())


def runs(words: Sequence[str]) -> Iterator[str]:
    """All runs of 13 words."""
    return (" ".join(words[start : start + RUN]) for start in range(len(words) - RUN + 1))
