"""What is trained on, to look at: rows with their supervised tokens in colour, or in marks where there is no colour."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..heads import chat
from .chats import listed, read_chats
from .masks import Masker
from .store import load_prepared, read_meta, share, summary, tokenizer_of
from .turns import Unmaskable

GREEN, PLAIN = ("\x1b[32m", "\x1b[0m"), ("⟦", "⟧")
Row = tuple[str, list[int], Sequence[int]]  # place, (T,) ids, (T,) mask


@dataclass
class PreviewSettings:
    """Rows as they are trained on."""

    input: list[str]
    """Files of chats, as `data prepare` takes them, or one folder that it made."""
    rows: int = 3
    """How many rows to show."""
    max_length: int = 2048
    """Tokens of a row; what lies behind them is cut off (a prepared folder is cut already)."""
    color: bool | None = None
    """Supervised tokens in green, or between ⟦ and ⟧; without it, green on a terminal unless NO_COLOR is set."""


def preview(backbone: Any, settings: PreviewSettings) -> None:
    """Print rows with what is supervised in them, a line of counts, and the hash of the template.

    Args:
        backbone: a `Backbone` or a tokenizer.

    Raises:
        UserError: as `prepare` and `load_prepared` do for files and folders.
    """
    tokenizer = tokenizer_of(backbone)
    marks = GREEN if _colored(settings.color) else PLAIN
    folder = Path(settings.input[0]) if len(settings.input) == 1 and Path(settings.input[0]).is_dir() else None
    tokens = supervised = 0
    for place, ids, mask in _from_folder(folder, tokenizer, settings) if folder else _from_files(tokenizer, settings):
        print(f"--- {place}: {share(len(ids), sum(mask))}")
        print(marked(tokenizer, ids, mask, marks))
        tokens, supervised = tokens + len(ids), supervised + sum(mask)
    print(f"--- shown: {share(tokens, supervised)}")
    print(f"whole folder: {summary(read_meta(folder))}" if folder else _template_line(tokenizer))


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


def _from_files(tokenizer: Any, settings: PreviewSettings) -> Iterator[Row]:
    masker = Masker(tokenizer)
    chats, skipped = read_chats(settings.input)
    if skipped:
        print(listed(skipped))
    for one in chats[: settings.rows]:
        try:
            for row in masker(one.messages, one.tools, one.muted).rows:
                yield one.place, row.ids[: settings.max_length], row.mask[: settings.max_length]
        except Unmaskable as fault:
            print(f"--- {one.place}: not used, {fault}")


def _from_folder(folder: Path, tokenizer: Any, settings: PreviewSettings) -> Iterator[Row]:
    rows = load_prepared(folder, tokenizer)
    for number in range(min(settings.rows, len(rows))):
        row = rows[number]
        yield str(row["place"]), row["ids"].tolist(), row["mask"].tolist()


def _template_line(tokenizer: Any) -> str:
    found = chat.fingerprint(tokenizer)
    return f"template {found['template']}, tokenizer {found['tokenizer']}"


def _colored(wanted: bool | None) -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") if wanted is None else wanted
