"""Where rows come from: files of JSON, JSON lines, CSV and Parquet, saved data sets, data sets of the Hub.

- `.jsonl`, `.json`, `.csv`, each also with `.gz` or `.zst`; `.parquet`. A `.json` file may hold a list or lines.
- a folder that `datasets` saved, or `user/name` of the Hub, as `NAME[/CONFIG][@REVISION][:SPLIT]` (without a split:
  train, or the only one).
- `shipped`: the conversations that come with the package; `shipped-long`: those of them about long texts.

Rows are read one after another; nothing is held but the row at hand.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ..errors import UserError, first_line
from ..files import file_hash, text_hash

SHIPPED = {"shipped": "shipped", "shipped-long": "shipped/long"}
"""Names of what comes with the package, and the folders that hold it."""
PACKED = (".gz", ".zst")
SUFFIXES = tuple(f"{kind}{packed}" for kind in (".jsonl", ".json", ".csv") for packed in ("", *PACKED)) + (".parquet",)
HUB = re.compile(
    r"(?P<name>[\w.-]+/[\w.-]+)(?:/(?P<config>[\w.-]+))?(?:@(?P<revision>[\w./-]+))?(?::(?P<split>[\w.-]+))?"
)
CHUNK = 1 << 20  # characters of a .json file that are read at a time
BLANK = " \t\r\n"
DECODER = json.JSONDecoder()
FIRST_LINE = 1 << 24  # bytes; a longer line is no row of its own
UNNAMED = "(cells without a name)"  # of a row of CSV that is longer than the first line

Numbered = Iterator[tuple[int, Any]]


@dataclass(frozen=True)
class Source:
    """Something that has rows."""

    name: str
    """As it was given."""
    path: Path | None
    """The file or folder; None for a data set of the Hub."""
    split: str | None = None

    def rows(self) -> Numbered:
        """(row number, counting from 1; a line of JSON as bytes, or a value).

        Raises:
            UserError: it cannot be read.
        """
        if self.path is None or self.path.is_dir():
            yield from enumerate(map(_pruned, self._data_set()), 1)
            return
        with _explained(self.name):
            _check_letters(self.path)
            kind = re.sub(r"\.(gz|zst)$", "", self.path.name.lower()).rpartition(".")[2]
            yield from {"jsonl": _lines, "json": _json, "csv": _csv, "parquet": _parquet}[kind](self.path)

    def identity(self) -> str:
        """Its name and a hash of its content."""
        if self.path is None:
            return f"{self.name} {_commit(self.name)}"
        return f"{self.path.name} {self.hash()[:16]}"

    def hash(self) -> str:
        """SHA-256 of its content, in hex."""
        if self.path is None:
            return text_hash(self.identity())
        if self.path.is_file():
            return file_hash(self.path)
        files = sorted(path for path in self.path.rglob("*") if path.is_file())
        named = [f"{path.relative_to(self.path)} {file_hash(path)}" for path in files]
        return text_hash("\n".join([str(self.split), *named]))

    def _data_set(self) -> Iterable[Any]:
        import datasets

        try:
            if self.path is not None:
                found = datasets.load_from_disk(str(self.path))
            else:
                parts = HUB.fullmatch(self.name)
                assert parts is not None, f"{self.name} is no name of a data set"
                found = datasets.load_dataset(
                    parts["name"], parts["config"], revision=parts["revision"], split=parts["split"], streaming=True
                )
        except Exception as error:  # of a network, a server, or a script of somebody else
            reason = first_line(error)
            what = "a saved data set" if self.path else "a data set of the Hub, and is no file here"
            raise UserError(f"{self.name}: cannot be read as {what} ({reason})") from None
        return _split(self, found)


def sources_of(names: Iterable[str | Path]) -> list[Source]:
    """What the names stand for, each of them there.

    Raises:
        UserError: a file is missing, or of a kind that is not read; or no name is given.
    """
    found = [source for name in names for source in _sources(str(name))]
    if not found:
        raise UserError("no file of chats is given; `shipped` stands for the conversations that come with headstart")
    return found


def files_of(paths: Iterable[str | Path]) -> list[Path]:
    """The files that `paths` name, where they name files alone.

    Raises:
        UserError: as `sources_of`, or one of them is no file.
    """
    found = sources_of(paths)
    for source in found:
        if source.path is None or not source.path.is_file():
            raise UserError(f"{source.name}: is no file")
    return [source.path for source in found if source.path]


def _sources(name: str) -> list[Source]:
    if name in SHIPPED:
        return [Source(str(path), path) for path in _shipped(SHIPPED[name])]
    path, (folder, _, split) = Path(name), name.rpartition(":")
    if path.is_file():
        if not path.name.lower().endswith(SUFFIXES):
            raise UserError(f"{path}: not a file of chats; {', '.join(SUFFIXES)} are read")
        return [Source(name, path)]
    if path.is_dir():
        return [_saved(name, path, None)]
    if folder and Path(folder).is_dir():
        return [_saved(name, Path(folder), split)]
    hub = HUB.fullmatch(name)
    if hub and not name.lower().endswith(SUFFIXES) and not path.parent.is_dir():
        return [Source(name, None, hub["split"])]
    raise UserError(f"{path}: no such file")


def _saved(name: str, folder: Path, split: str | None) -> Source:
    if (folder / "meta.json").is_file():
        raise UserError(f"{name}: holds chats that are prepared already")
    if not any((folder / file).is_file() for file in ("state.json", "dataset_dict.json")):
        raise UserError(f"{name}: not a file of chats, and no folder that `datasets` saved")
    return Source(name, folder, split)


def _shipped(place: str) -> list[Path]:
    folder = Path(__file__).parent / place
    files = sorted(path for path in folder.glob("*") if path.name.endswith(SUFFIXES))
    if not files:
        raise UserError(f"{folder}: holds no conversations in this installation")
    return files


def _split(source: Source, found: Any) -> Iterable[Any]:
    """The split that is asked for, train, or the only one."""
    if not isinstance(found, dict):
        return found  # type: ignore[no-any-return]
    wanted = source.split or ("train" if "train" in found else next(iter(found)) if len(found) == 1 else None)
    if wanted not in found:
        name = source.name.partition(":")[0]
        raise UserError(f"{source.name}: has the splits {', '.join(found)}; name one as {name}:SPLIT")
    return found[wanted]  # type: ignore[no-any-return]


def _commit(name: str) -> str:
    """The commit that a name of the Hub stands for now; nothing where the Hub cannot be asked."""
    import huggingface_hub

    parts = HUB.fullmatch(name)
    assert parts is not None, f"{name} is no name of a data set"
    try:
        return str(huggingface_hub.HfApi().dataset_info(parts["name"], revision=parts["revision"]).sha)
    except Exception:
        return parts["revision"] or ""


# --- kinds of files -------------------------------------------------------------------------------------------------


def _check_letters(path: Path) -> None:
    """Refuse what some programs save as text: every row of it would be unreadable."""
    with open(path, "rb") as handle:
        if handle.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise UserError(f"{path}: is UTF-16 text; save it as UTF-8")


def _lines(path: Path) -> Numbered:
    """Lines as bytes; only a line feed ends one, because JSON may hold every other sign."""
    with _opened(path) as handle:
        for number, line in enumerate(handle, 1):
            if line.strip():
                yield number, line


def _json(path: Path) -> Numbered:
    """The values of a list; or of lines, where the first line is a value and others follow."""
    with _opened(path) as handle:
        first = handle.readline(FIRST_LINE)
        by_line = first.endswith(b"\n") and _is_json(first) and handle.read(1) != b""
    if by_line:
        yield from _lines(path)
        return
    with _opened(path) as handle:
        decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")  # half letters are told row by row
        yield from enumerate(_values(_Buffer(handle, decoder), path), 1)


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


@dataclass
class _Buffer:
    """A window on the text of a file, and a place in it."""

    handle: IO[bytes]
    decoder: codecs.IncrementalDecoder
    text: str = ""
    place: int = 0
    ended: bool = False

    def more(self) -> bool:
        """Read on, at least as much again as is left; False at the end of the file."""
        left = self.text[self.place :]
        chunk = self.handle.read(max(CHUNK, len(left)))
        self.text, self.place = left + self.decoder.decode(chunk, not chunk), 0
        self.ended = not chunk
        return not self.ended

    def skip(self, signs: str) -> str:
        """Go past these signs; returns the next one, empty at the end of the file."""
        while True:
            while self.place < len(self.text) and self.text[self.place] in signs:
                self.place += 1
            if self.place < len(self.text) or not self.more():
                return self.text[self.place : self.place + 1]

    def value(self) -> Any:
        """The JSON value that starts here; the place is then behind it."""
        while True:
            try:
                value, end = DECODER.raw_decode(self.text, self.place)
                if self.ended or self.text[end : end + 1] in tuple(BLANK + ",]"):  # a number might go on
                    self.place = end
                    return value
            except ValueError:
                if self.ended:
                    raise
            self.more()


def _values(buffer: _Buffer, path: Path) -> Iterator[Any]:
    """The elements of the list that a file holds, or its one value."""
    number = 0
    try:
        first = buffer.skip(BLANK + "\ufeff")
        if first not in ("[", ""):
            number = 1
            yield buffer.value()
        elif first:
            buffer.place += 1
            while buffer.skip(BLANK + ",") not in ("]", ""):
                number += 1
                yield buffer.value()
            if buffer.skip(BLANK) != "]":
                raise ValueError("the list does not end")
            buffer.place += 1
        if rest := buffer.skip(BLANK):
            raise ValueError(f"{rest!r} follows")
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON: {error} (behind row {number})") from None


def _csv(path: Path) -> Numbered:
    """Rows by the names in the first line, between commas, or else semicolons or tabs; every cell is text."""
    csv.field_size_limit(1 << 30)
    with _opened(path) as handle:
        first = handle.readline(FIRST_LINE)
    between = next((sign for sign in ",;\t" if sign.encode() in first), ",")
    with _opened(path) as handle:
        text = io.TextIOWrapper(handle, encoding="utf-8-sig", errors="surrogateescape", newline="")
        number = 0
        try:  # strict: an open quote would swallow the rest of the file
            for number, row in enumerate(csv.DictReader(text, restkey=UNNAMED, delimiter=between, strict=True), 1):
                yield number, {name: value for name, value in row.items() if value is not None}
        except csv.Error as error:
            raise UserError(f"{path}: not CSV ({error}, behind row {number})") from None


def _parquet(path: Path) -> Numbered:
    import datasets
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    try:
        if pq.read_metadata(path).num_rows == 0:
            return
        rows = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
        yield from enumerate(map(_pruned, rows), 1)
    except Exception as error:  # whatever Arrow raises
        raise UserError(f"{path}: cannot be read as Parquet ({error})") from None


def _pruned(value: Any) -> Any:
    """Without the empty fields that a table gives each mapping for the sake of the others."""
    if isinstance(value, dict):
        return {name: _pruned(one) for name, one in value.items() if one is not None}
    return [_pruned(one) for one in value] if isinstance(value, list) else value


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """A file for reading, unpacked."""
    if path.suffix.lower() == ".gz":
        with gzip.open(path) as zipped:
            yield zipped  # type: ignore[misc]
    elif path.suffix.lower() == ".zst":
        import pyarrow as pa

        with io.BufferedReader(pa.input_stream(str(path), compression="zstd")) as handle:
            yield handle
    else:
        with open(path, "rb") as handle:
            yield handle


@contextmanager
def _explained(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{name}: cannot be read ({error})") from None
