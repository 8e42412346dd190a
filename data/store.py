"""The folder that `prepare` makes: token ids and loss masks, written row by row, read back with a check.

The folder is a saved `datasets` data set with a row for each text that a chat came to (one, or more where one text
cannot hold its replies as a server would have them)

    ids    int32, T tokens of the rendered chat
    mask   uint8, T, 1 where the token is supervised (a reply or its end of turn)
    key    the hash of the chat's content; held-out splits go by it
    place  the file and row it came from

beside `meta.json` (what it was made from, the template, counts) and `skipped.jsonl` (rows that are not used, and why).
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from ..errors import UserError, first_line
from ..files import file_hash
from ..heads import chat
from .chats import Skipped

if TYPE_CHECKING:
    from datasets import Dataset, Features

META, SKIPPED = "meta.json", "skipped.jsonl"
Array = np.ndarray[Any, Any]


class Damaged(UserError):
    """A folder that is not, or not any more, what `prepare` made."""


class Row(NamedTuple):
    """A row of the folder."""

    ids: Array
    """(T,) int32"""
    mask: Array
    """(T,) uint8"""
    key: str
    place: str


class RowWriter:
    """Appends rows to a file of the folder; `close` makes the data set of it. Memory holds one batch."""

    def __init__(self, folder: Path):
        from datasets.arrow_writer import ArrowWriter

        self.folder, self.raw = folder, folder / "part" / "rows.arrow"
        self.raw.parent.mkdir()
        self.writer = ArrowWriter(path=str(self.raw), features=_features())

    def add(self, rows: Sequence[Row]) -> None:
        import pyarrow as pa  # type: ignore[import-untyped]

        if not rows:
            return
        columns = {
            "ids": pa.array([row.ids for row in rows], pa.list_(pa.int32())),
            "mask": pa.array([row.mask for row in rows], pa.list_(pa.uint8())),
            "key": [row.key for row in rows],
            "place": [row.place for row in rows],
        }
        self.writer.write_table(pa.table(columns))

    def close(self) -> None:
        import datasets

        self.writer.finalize()
        with _no_bars():
            found = datasets.Dataset.from_file(str(self.raw))
            mark = file_hash(self.raw)[:16]  # its own one would be of the time
            datasets.Dataset(found.data, found.info, fingerprint=mark).save_to_disk(self.folder)
        shutil.rmtree(self.raw.parent)


class Listing:
    """`skipped.jsonl`: a line for each row that is not used, or not as a whole."""

    def __init__(self, folder: Path):
        self.path = folder / SKIPPED

    def __enter__(self) -> Self:
        self.handle = open(self.path, "w", encoding="utf-8")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.handle.close()

    def add(self, skipped: Sequence[Skipped]) -> None:
        self.handle.writelines(json.dumps(asdict(one)) + "\n" for one in skipped)


def load_prepared(folder: str | Path, tokenizer: Any = None) -> Dataset:
    """The rows of a prepared folder, as numpy arrays.

    Args:
        tokenizer: if given (a `Backbone` does, too), the folder has to be made with the same tokenizer and template. A
            folder that was made with a template given for it is used with a warning.

    Raises:
        UserError: there is no such folder, it is no prepared one, or it belongs to another tokenizer or template.
    """
    from datasets import load_from_disk

    folder = Path(folder)
    meta = read_meta(folder)
    if tokenizer is not None:
        _check_origin(folder, meta["source"], chat.fingerprint(tokenizer_of(tokenizer)))
    try:
        return load_from_disk(str(folder)).with_format("numpy")
    except (OSError, ValueError) as error:
        reason = first_line(error)
        raise Damaged(f"{folder}: is damaged ({reason}); remove it, and prepare the chats again") from None


def _check_origin(folder: Path, source: Mapping[str, Any], now: Mapping[str, str]) -> None:
    for name in now:
        before = source.get(name)
        if before == now[name]:
            continue
        if name == "template" and source.get("chat_template"):
            warnings.warn(
                f"{folder} was prepared with the template {source['chat_template']} ({before}); a server has to use "
                f"that one, not the backbone's own ({now[name]})",
                stacklevel=3,
            )
            continue
        raise UserError(
            f"{folder}: was prepared with another {name} ({before}, not {now[name]}); prepare the chats again with "
            "this backbone"
        )


def read_meta(folder: Path) -> dict[str, Any]:
    """What a prepared folder says of itself.

    Raises:
        UserError: there is no such folder, or it is no prepared one.
    """
    meta = meta_or_none(folder)
    if meta is None:
        raise UserError(f"{folder}: no prepared chats are there; make them with `headstart data prepare`")
    return meta


def meta_or_none(out: Path) -> dict[str, Any] | None:
    """The meta data of a prepared folder; None if nothing is there.

    Raises:
        UserError: something else is there.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    try:
        meta: dict[str, Any] = json.loads((out / META).read_text(encoding="utf-8"))
        if meta["source"]["format"] and meta["counts"]:
            return meta
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise Damaged(f"{out}: holds something else than prepared chats; choose another folder, or remove it")


def remove_leftovers(out: Path) -> None:
    """Remove what a killed run left beside `out`; nobody else is at work on it while we hold its lock."""
    for path in out.parent.glob(f".{out.name}.*.part"):
        shutil.rmtree(path, ignore_errors=True)


def summary(meta: Mapping[str, Any]) -> str:
    """Counts and the template of prepared chats, in a few lines."""
    counts, source = meta["counts"], meta["source"]
    extras = [
        f"{counts[name]:,} {text}"
        for name, text in (
            ("split", "chats in more than one row, as a server would render them"),
            ("truncated", f"cut off at {source['max_length']:,} tokens"),
            ("duplicates", "chats more than once"),
            ("lost", "turns not supervised"),
            ("cuts", "ends of replies inside a token"),
        )
        if counts.get(name)
    ]
    extras += [f"{count:,} {note}" for note, count in counts.get("notes", {}).items()]
    line = f"{counts['rows']:,} rows, {share(counts['tokens'], counts['supervised'])}"
    return "; ".join([line, *extras]) + f"\ntemplate {source['template']}, tokenizer {source['tokenizer']}"


def share(tokens: int, supervised: int) -> str:
    """`1,234 tokens, 567 supervised (45.9%)`"""
    return f"{tokens:,} tokens, {supervised:,} supervised ({100 * supervised / max(tokens, 1):.1f}%)"


def tokenizer_of(backbone: Any) -> Any:
    """The tokenizer of a backbone, or the tokenizer itself.

    Raises:
        UserError: the backbone has none.
    """
    tokenizer = getattr(backbone, "tokenizer", backbone)
    if not callable(tokenizer):
        raise UserError("the backbone has no tokenizer, so chats cannot be turned into tokens")
    return tokenizer


def _features() -> Features:
    import datasets

    return datasets.Features(
        ids=datasets.List(datasets.Value("int32")),
        mask=datasets.List(datasets.Value("uint8")),
        key=datasets.Value("string"),
        place=datasets.Value("string"),
    )


@contextmanager
def _no_bars() -> Iterator[None]:
    """Keep the progress bars of `datasets` away; ours is enough."""
    import datasets

    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
