"""What is trained on, to look at: rows in colour, on the terminal or as a page; statistics; overlap."""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import write_whole
from ..heads import chat
from ..progress import Progress
from .chats import Chat, Faults, chat_of, raw_rows
from .overlap import Overlap
from .page import page, row_html
from .pool import mapped
from .prepare import masker_of, outcome_of
from .sources import sources_of
from .statistics import Statistics
from .store import META, Row, load_prepared, read_meta, share, summary, tokenizer_of

GREEN, PLAIN = ("\x1b[32m", "\x1b[0m"), ("⟦", "⟧")


@dataclass
class PreviewSettings:
    """Rows as they are trained on."""

    input: list[str]
    """Chats, as `data prepare` takes them, or one folder that it made."""
    rows: int = 3
    """How many rows to show."""
    max_length: int = 2048
    """Tokens of a row; what lies behind them is cut off (a prepared folder is cut already)."""
    last_turn: bool = False
    """Supervise the last reply of each chat alone (a prepared folder has what it was made with)."""
    chat_template: str | None = None
    """Another chat template than the tokenizer's own: a file, the name of one of its templates, or chatml."""
    thinking: bool | None = None
    """What the template is told of thinking (enable_thinking); without it, nothing."""
    color: bool | None = None
    """Supervised tokens in green, or between ⟦ and ⟧; without it, green on a terminal unless NO_COLOR is set."""
    html: Path | None = None
    """Write the rows as a page to this file, too."""
    statistics: bool = False
    """Read all rows: lengths, supervised share, duplicates, languages, and the text of the template."""
    against: list[str] = field(default_factory=list)
    """Evaluation files (Spec-Bench style or plain prompts): list the chats that hold a question of theirs."""


def preview(backbone: Any, settings: PreviewSettings) -> None:
    """Print rows with what is supervised in them, counts, and what else is asked for.

    Args:
        backbone: a `Backbone` or a tokenizer.

    Raises:
        UserError: as `prepare` and `load_prepared` do for files and folders.
    """
    tokenizer = tokenizer_of(backbone)
    folder = Path(settings.input[0]) if len(settings.input) == 1 and (Path(settings.input[0]) / META).exists() else None
    if folder and settings.against:
        raise UserError("overlap is looked for in chats: give the files that the folder was made of")
    if settings.chat_template is not None and not folder:
        tokenizer = chat.with_template(tokenizer, settings.chat_template)
    overlap, faults = Overlap.of(settings.against), Faults()
    rows = _from_folder(folder, tokenizer) if folder else _from_sources(tokenizer, settings, faults)
    shown, statistics = _read(rows, tokenizer, settings)
    if faults.counts:
        print(faults.told("not used, or not as a whole"))
    elif not shown.rows and settings.rows:
        raise UserError(f"{', '.join(settings.input)}: holds no row")
    print(f"--- shown: {share(shown.tokens, shown.supervised)}")
    facts = [f"whole folder: {summary(read_meta(folder))}" if folder else _template_line(tokenizer)]
    if settings.statistics:
        facts += statistics.lines()
    if settings.against:
        facts += _looked(overlap, settings.input)
    print("\n".join(facts))
    template = read_meta(folder)["template"] if folder else chat.template_of(tokenizer)
    if settings.statistics:
        print(f"chat template:\n{_visible(template)}")
    if settings.html is not None:
        write_whole(settings.html, page(", ".join(settings.input), facts, template, shown.rows))
        print(f"{settings.html}: {len(shown.rows)} rows as a page")


def _read(rows: Iterator[Row], tokenizer: Any, settings: PreviewSettings) -> tuple[_Shown, Statistics]:
    """Show the first rows; read on for statistics alone."""
    shown, statistics = _Shown(tokenizer, settings), Statistics()
    for row in rows:
        shown.add(row)
        if settings.statistics:
            said = tokenizer.decode(row.ids[row.mask.astype(bool)].tolist(), skip_special_tokens=True)
            statistics.add(row.key, row.place, row.mask.tolist(), said)
        elif len(shown.rows) >= settings.rows:
            break
    return shown, statistics


def _looked(overlap: Overlap, names: Sequence[str]) -> Iterator[str]:
    for raw in raw_rows(sources_of(names)):
        if isinstance(one := chat_of(raw), Chat):
            overlap.look(one)
    yield from overlap.lines()


class _Shown:
    """The first rows, printed as they come, and kept for a page."""

    def __init__(self, tokenizer: Any, settings: PreviewSettings):
        self.tokenizer, self.settings = tokenizer, settings
        self.marks = GREEN if _colored(settings.color) else PLAIN
        self.rows: list[tuple[str, str]] = []
        self.tokens = self.supervised = 0

    def add(self, row: Row) -> None:
        if len(self.rows) >= self.settings.rows:
            return
        ids, mask = row.ids.tolist(), row.mask.tolist()
        heading = f"{row.place}: {share(len(ids), sum(mask))}"
        print(f"--- {heading}\n{marked(self.tokenizer, ids, mask, self.marks)}")
        self.rows.append((heading, row_html(self.tokenizer, ids, mask) if self.settings.html else ""))
        self.tokens, self.supervised = self.tokens + len(ids), self.supervised + sum(mask)


def marked(tokenizer: Any, ids: Sequence[int], mask: Sequence[int], marks: tuple[str, str]) -> str:
    """The text of a row with each run of supervised tokens between two marks."""
    out, text, done = [], "", 0
    for supervised, run in itertools.groupby(range(len(ids)), lambda place: bool(mask[place])):
        # decoded with what comes before, because some tokenizers drop the space that a text starts with
        done += len(list(run))
        longer = tokenizer.decode(ids[:done], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        piece, text = _visible(longer[len(text) :]), longer
        out.append(f"{marks[0]}{piece}{marks[1]}" if supervised else piece)
    return "".join(out)


def _visible(text: str) -> str:
    """Control characters as pictures, so that a row cannot steer the terminal."""
    return "".join(c if c in "\n\t" or c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def _from_sources(tokenizer: Any, settings: PreviewSettings, faults: Faults) -> Iterator[Row]:
    """The rows that `prepare` would make; what it would not use is noted."""
    work = functools.partial(outcome_of, masker_of(tokenizer, settings), settings.max_length)
    rows = raw_rows(sources_of(settings.input))
    with Progress(None, "rows", "preview", enabled=settings.statistics) as progress:
        for outcome in mapped(work, rows) if settings.statistics else (work([raw]) for raw in rows):
            faults.add(outcome.skipped + outcome.lost)
            yield from outcome.rows
            progress.advance(outcome.seen)


def _from_folder(folder: Path, tokenizer: Any) -> Iterator[Row]:
    rows = load_prepared(folder, tokenizer)
    for number in range(len(rows)):
        row = rows[number]
        yield Row(row["ids"], row["mask"], str(row["key"]), str(row["place"]))


def _template_line(tokenizer: Any) -> str:
    found = chat.fingerprint(tokenizer)
    return f"template {found['template']}, tokenizer {found['tokenizer']}"


def _colored(wanted: bool | None) -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") if wanted is None else wanted
