"""Chats to token ids and loss masks, in a folder that appears whole (`store.py` says what is in it)."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from ..files import whole_folder
from ..heads import chat
from ..progress import Progress
from .chats import Chat, Faults, Raw, Skipped, chat_of, raw_rows
from .groups import locked
from .masks import NOTHING, Made, Masked, Masker
from .pool import mapped
from .replies import Unmaskable
from .sources import sources_of
from .store import (
    META,
    Listing,
    Row,
    RowWriter,
    load_prepared,
    meta_or_none,
    read_meta,
    remove_leftovers,
    summary,
    tokenizer_of,
)
from .turns import OTHERWISE

__all__ = ["META", "PrepareSettings", "load_prepared", "prepare", "read_meta", "tokenizer_of"]

FORMAT = 4  # counts up when the same chats would give other ids or masks
CUT_OFF = "no reply within max_length"


@dataclass
class PrepareSettings:
    """Chats to token ids and loss masks."""

    input: list[str]
    """Chats: files (.jsonl, .json, .csv, plain, .gz or .zst; .parquet), saved data sets, Hub ids (user/name:split);
    `shipped` stands for the conversations that come with headstart."""
    out: Path
    """The folder to make."""
    max_length: int = 2048
    """Tokens of a row; what lies behind them is cut off, and a row without a reply before that is dropped."""
    last_turn: bool = False
    """Supervise the last reply of each chat alone, instead of every one."""
    chat_template: str | None = None
    """Another chat template than the tokenizer's own: a file, the name of one of its templates, or chatml."""
    thinking: bool | None = None
    """What the template is told of thinking (enable_thinking), as the server will tell it; without it, nothing."""
    strict: bool = False
    """Refuse the whole set because of one bad row, instead of skipping and listing it."""
    drop_empty: bool = False
    """Skip rows in which the template marks no reply, which otherwise make the set refused."""
    workers: int | None = None
    """Processes; without it, one a core, and a single one for small sets. They change the time and nothing else."""

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise UserError(f"max_length is {self.max_length}; a row needs at least 2 tokens")
        if self.workers is not None and self.workers < 1:
            raise UserError(f"workers is {self.workers}; at least one is needed")


@dataclass
class Outcome:
    """What some chats came to."""

    rows: list[Row] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    """Rows that are not used: bad ones, those with nothing to learn, those without a reply within max_length."""
    lost: list[Skipped] = field(default_factory=list)
    """Turns that are not supervised, of rows that are used."""
    keys: list[str] = field(default_factory=list)
    """Of the chats that are used."""
    counts: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    seen: int = 0
    """Rows of files."""


def prepare(backbone: Any, settings: PrepareSettings) -> dict[str, Any]:
    """Make the folder `settings.out`, or say that it is there already; returns its meta data.

    The same files, tokenizer, template and settings find the finished folder; any other make it anew.

    Args:
        backbone: a `Backbone` or a tokenizer.

    Raises:
        UserError: a file is missing, a row has an empty mask, no row is left, the tokenizer has no chat template, or
            `out` holds something else.
    """
    tokenizer = tokenizer_of(backbone)
    if settings.chat_template is not None:
        tokenizer = chat.with_template(tokenizer, settings.chat_template)
    source = _source(tokenizer, settings)
    meta = meta_or_none(settings.out)
    if meta is not None and meta["source"] == source:
        print(f"{settings.out}: already there\n{summary(meta)}")
        return meta
    with locked(settings.out):
        remove_leftovers(settings.out)
        masker = masker_of(tokenizer, settings)
        with whole_folder(settings.out) as folder:
            tally = _write(masker, settings, folder)
            meta = {"source": source, "template": masker.template, "counts": tally.counts()}
            (folder / META).write_text(json.dumps(meta, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{settings.out}: made\n{summary(meta)}")
    tally.tell()
    return meta


def masker_of(tokenizer: Any, settings: Any) -> Masker:
    """The masker that `thinking` and `last_turn` of the settings ask for."""
    return Masker(tokenizer, thinking=settings.thinking, last_turn=settings.last_turn)


def outcome_of(masker: Masker, max_length: int, raws: Sequence[Raw]) -> Outcome:
    """Ids and masks of rows of files, cut off at `max_length` tokens; what cannot be used is listed."""
    outcome = Outcome(seen=len(raws))
    for raw in raws:
        one = chat_of(raw)
        if isinstance(one, Skipped):
            outcome.skipped.append(one)
            continue
        try:
            made = masked(masker, one)
        except Unmaskable as fault:
            outcome.skipped.append(Skipped(one.file, one.row, fault.reason, fault.detail))
            continue
        _add(outcome, one, made, max_length)
    return outcome


def masked(masker: Masker, one: Chat) -> Made:
    """The rows of a chat or a text.

    Raises:
        Unmaskable: it has none.
    """
    if one.text is not None:
        return Made([masker.plain(one.text)])
    return masker(one.messages, one.tools, one.muted, one.cut)


def _add(outcome: Outcome, one: Chat, made: Made, max_length: int) -> None:
    before = len(outcome.rows)
    for number, row in enumerate(made.rows, 1):
        if any(row.mask[:max_length]):
            place = one.place if len(made.rows) == 1 else f"{one.place}, part {number}"
            outcome.rows.append(_cut(row, one.key, place, max_length))
            outcome.counts.update(truncated=int(len(row.ids) > max_length), cuts=row.cuts)
        else:
            outcome.skipped.append(Skipped(one.file, one.row, CUT_OFF, f"{len(row.ids)} tokens"))
    outcome.lost += [Skipped(one.file, one.row, fault.reason, fault.detail) for fault in made.lost]
    outcome.keys += [one.key] if len(outcome.rows) > before else []
    outcome.counts.update(lost=len(made.lost), split=int(len(made.rows) > 1))
    outcome.notes += made.notes


def _cut(row: Masked, key: str, place: str, max_length: int) -> Row:
    mask = np.frombuffer(row.mask[:max_length], np.uint8)
    return Row(np.array(row.ids[:max_length], np.int32), mask, key, place)


def _write(masker: Masker, settings: PrepareSettings, folder: Path) -> _Tally:
    """Write the rows of all sources, and the list of those that are not used.

    Raises:
        UserError: the set cannot be used.
    """
    work = functools.partial(outcome_of, masker, settings.max_length)
    rows, tally = raw_rows(sources_of(settings.input)), _Tally(settings, masker.template)
    writer = RowWriter(folder)
    with Listing(folder) as listing, Progress(None, "rows", "prepare") as progress:
        for outcome in mapped(work, rows, settings.workers):
            writer.add(outcome.rows)
            listing.add(outcome.skipped + outcome.lost)
            tally.add(outcome)
            progress.advance(outcome.seen)
    tally.check()
    writer.close()
    return tally


class _Tally:
    """Adds up outcomes, and says whether the set can be used. Holds a hash of each chat, and the first bad rows."""

    def __init__(self, settings: PrepareSettings, template: str):
        self.settings, self.template = settings, template
        self.total, self.notes, self.keys = Counter[str](), Counter[str](), Counter[bytes]()
        self.skipped, self.lost, self.empty = Faults(), Faults(), Faults()

    def add(self, outcome: Outcome) -> None:
        self.total.update(outcome.counts)
        self.total.update(
            rows=len(outcome.rows),
            tokens=sum(len(row.ids) for row in outcome.rows),
            supervised=sum(int(row.mask.sum()) for row in outcome.rows),
        )
        self.notes.update(outcome.notes)
        self.keys.update(bytes.fromhex(key) for key in outcome.keys)
        self.skipped.add(outcome.skipped)
        self.lost.add(outcome.lost)
        self.empty.add([one for one in outcome.skipped if one.reason == NOTHING])

    def check(self) -> None:
        """Refuse a set with rows of empty masks, with bad rows if that is asked for, or without any row."""
        if self.empty.counts and not self.settings.drop_empty:
            raise UserError(
                f"rows with nothing to learn: {self.empty.told()}\nThe template marks no reply in them: give "
                "another one (--chat-template), or pass --drop-empty to leave them out"
            )
        if self.settings.strict and any(reason != CUT_OFF for reason in self.skipped.counts):
            raise UserError(self.skipped.told())
        if not self.total["rows"]:
            if not self.skipped.counts:
                raise UserError(f"{', '.join(map(str, self.settings.input))}: holds no row")
            raise UserError(f"no row is left to train on; {self.skipped.told()}{self._hint()}")

    def counts(self) -> dict[str, Any]:
        names = ("rows", "tokens", "supervised", "truncated", "split", "lost", "cuts")
        return {
            **{name: self.total[name] for name in names},
            "chats": sum(self.keys.values()),
            "duplicates": sum(self.keys.values()) - len(self.keys),
            "skipped": dict(self.skipped.counts.most_common()),
            "notes": dict(self.notes),
        }

    def tell(self) -> None:
        """Print what is not used, and why."""
        if self.skipped.counts:
            print(self.skipped.told())
        if self.lost.counts:
            print(self.lost.told("with turns that are not supervised") + self._hint())

    def _hint(self) -> str:
        """What may help against replies that are opened otherwise than written."""
        found = self.skipped.counts[OTHERWISE] + self.lost.counts[OTHERWISE]
        if not found or self.settings.thinking is not None or "thinking" not in self.template:
            return ""
        return "\nThe template knows of thinking: say how the server will have it, with --thinking or --no-thinking"


def _source(tokenizer: Any, settings: PrepareSettings) -> dict[str, Any]:
    """All that determines the rows."""
    options = {name: value for name, value in asdict(settings).items() if name not in ("input", "out", "workers")}
    files = [[source.name, source.hash()] for source in sources_of(settings.input)]
    return {"format": FORMAT, **chat.fingerprint(tokenizer), **options, "files": files}
