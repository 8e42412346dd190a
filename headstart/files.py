"""Files and folders that appear whole or not at all.

- `write_whole`, `whole_file`: a file is written beside its place and renamed into it.
- `whole_folder`: the same for a folder.
- `cache_folder`: where fetched and derived things are kept.
- `read_jsonl`, `write_jsonl`: JSON lines, plain or `.gz`.
- `file_hash`, `text_hash`: SHA-256, in hex.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import UserError

CACHE_VARIABLE = "HEADSTART_CACHE"

_REFUSALS = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR, errno.EISDIR),
    *(errno.ENOSPC, errno.EDQUOT),
}


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

    A folder that is replaced and holds names that the new one has not is kept beside it as `NAME.old`.

    Raises:
        UserError: the parent folder cannot be written, `path` is a file or a folder one stands in, or the disk is full.
    """
    path = Path(os.path.realpath(path))  # behind a link, the folder itself is replaced
    if path.exists() and not path.is_dir():
        raise UserError(f"{path}: is a file, and a folder is to be written there; move it away or choose another name")
    if any(place.is_relative_to(path) for place in (Path.cwd(), Path.home())):
        raise UserError(f"{path}: would be replaced as a whole; name a folder of its own")
    with _explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent))
        temporary.chmod(0o755)  # mkdtemp makes it private; the finished folder is an ordinary one
        try:
            yield temporary
            _swap(temporary, path)
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
            handle.write(_line(row))
            count += 1
    return count


def read_jsonl(path: str | Path) -> Iterator[Any]:
    """Yield the JSON value of each non-empty line of `path` (plain or `.gz`).

    Raises:
        UserError: the file is missing, or a line is not JSON (named by its number).
    """
    opener = gzip.open if str(path).endswith(".gz") else open
    try:
        with opener(path, "rt", encoding="utf-8-sig") as handle:
            for number, line in enumerate(handle, 1):
                if line.strip():
                    try:
                        yield json.loads(line)
                    except json.JSONDecodeError as error:
                        place = f"{path}, line {number}"
                        raise UserError(f"{place}: not JSON ({error.msg} at column {error.colno})") from None
                    except (ValueError, RecursionError) as error:  # a number or a nesting beyond what Python reads
                        raise UserError(f"{path}, line {number}: not JSON ({error})") from None
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read as JSON lines ({error})") from None


def file_hash(path: str | Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def text_hash(text: str) -> str:
    """SHA-256 of a text's UTF-8 bytes, in hex."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _swap(new: Path, path: Path) -> None:
    """Give a finished folder the name `path`; a folder that has that name gets it back if this fails."""
    if not path.exists():
        os.replace(new, path)
        return
    foreign = set(os.listdir(path)) - set(os.listdir(new))
    old = path.with_name(f".{path.name}.{os.getpid()}.old")
    os.replace(path, old)
    try:
        os.replace(new, path)
    except BaseException:
        os.replace(old, path)
        raise
    if foreign:
        names = (path.with_name(f"{path.name}.old{number}") for number in ("", *range(2, 1000)))
        os.replace(old, next(name for name in names if not name.exists()))
    else:
        shutil.rmtree(old, ignore_errors=True)


def _line(row: Any) -> bytes:
    try:
        return (json.dumps(row, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:  # half of a surrogate pair has no bytes; escaped it survives
        return (json.dumps(row) + "\n").encode()


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
    """Turn what the operating system says of a write into a message for the user; any other error passes."""
    try:
        yield
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        where = f": {error.filename}" if error.filename else ""
        raise UserError(f"{path}: cannot be written ({error.strerror}{where}); nothing was changed there") from error
