"""Files and folders that appear whole or not at all.

- `write_whole`, `whole_file`: a file is written beside its place and renamed into it.
- `whole_folder`: the same for a folder.
- `cache_folder`: where fetched and derived things are kept.
- `read_jsonl`, `write_jsonl`: JSON lines, plain or `.gz`.
- `file_hash`, `text_hash`: SHA-256, in hex.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import UserError

CACHE_VARIABLE = "HEADSTART_CACHE"


def cache_folder() -> Path:
    """The folder for fetched backbones and the like: `$HEADSTART_CACHE`, or `~/.cache/headstart`."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "headstart").expanduser()


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder; on success it is renamed to `path`, on failure removed.

    Raises:
        UserError: the folder cannot be written, or the disk is full.
    """
    path = Path(path)
    with _explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            yield temporary
            with open(temporary, "rb") as handle:
                os.fsync(handle.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: str | Path) -> Iterator[Path]:
    """Yield a temporary folder beside `path`; on success it takes the place of `path`, on failure it is removed.

    Raises:
        UserError: the parent folder cannot be written, or the disk is full.
    """
    path = Path(path)
    with _explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent))
        temporary.chmod(0o755)  # mkdtemp makes it private; the finished folder is an ordinary one
        try:
            yield temporary
            old = _move_away(path)
            os.replace(temporary, path)
            if old is not None:
                shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write text (UTF-8) or bytes to `path`, whole or not at all."""
    with whole_file(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def write_jsonl(path: str | Path, rows: Iterable[Any]) -> int:
    """Write one JSON value a line, gzipped if `path` ends in `.gz`; returns how many rows were written."""
    count = 0
    with whole_file(path) as temporary, _open_for_writing(temporary, str(path).endswith(".gz")) as handle:
        for row in rows:
            handle.write((json.dumps(row, ensure_ascii=False) + "\n").encode())
            count += 1
    return count


def read_jsonl(path: str | Path) -> Iterator[Any]:
    """Yield the JSON value of each non-empty line of `path` (plain or `.gz`).

    Raises:
        UserError: the file is missing, or a line is not JSON (named by its number).
    """
    opener = gzip.open if str(path).endswith(".gz") else open
    try:
        with opener(path, "rt", encoding="utf-8") as handle:
            for number, line in enumerate(handle, 1):
                if line.strip():
                    try:
                        yield json.loads(line)
                    except json.JSONDecodeError as error:
                        raise UserError(f"{path}, line {number}: not JSON ({error.msg} at column {error.colno})") from None
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (IsADirectoryError, UnicodeDecodeError, EOFError, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: cannot be read as JSON lines ({error})") from None


def file_hash(path: str | Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def text_hash(text: str) -> str:
    """SHA-256 of a text's UTF-8 bytes, in hex."""
    return hashlib.sha256(text.encode()).hexdigest()


def _move_away(path: Path) -> Path | None:
    """Rename an existing folder aside, so that a full one can take its name; None if there is nothing."""
    if not path.exists():
        return None
    old = path.with_name(f".{path.name}.{os.getpid()}.old")
    os.replace(path, old)
    return old


@contextmanager
def _open_for_writing(path: Path, zipped: bool) -> Iterator[Any]:
    if not zipped:
        with open(path, "wb") as handle:
            yield handle
        return
    # mtime and name stay out of the file, so that equal rows give equal bytes
    with open(path, "wb") as raw, gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as handle:
        yield handle


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn what the operating system says of a write into a message for the user."""
    try:
        yield
    except (PermissionError, NotADirectoryError, FileExistsError) as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}: {error.filename})") from error
    except OSError as error:
        if error.errno in (28, 30, 122):  # ENOSPC, EROFS, EDQUOT
            raise UserError(f"{path}: cannot be written ({error.strerror}); nothing was changed there") from error
        raise
