"""Work in fixed groups that resumes whole.

The unit of work is a group: its inputs are fixed by the settings, it is computed in one go, and its rows are kept only
when all of them are there. In bf16 a token can depend on its batch neighbours; as a group is never split by an
interruption, the rows after a kill are those of an undisturbed run.

Beside the output file `out` there are, while the work goes on:

    <out>.parts/settings.json    what determines the result
    <out>.parts/000017.jsonl     the rows of group 17, written whole
    .<name of out>.lock          held by the running process; the system frees it when that process ends

and afterwards `<out>.settings.json`: the settings the file was made with, and its hash.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from ..errors import UserError
from ..files import file_hash, read_jsonl, text_hash, write_jsonl, write_whole

Inputs = TypeVar("Inputs")
Row = dict[str, Any]

OURS = ("[0-9]*.jsonl", ".*.part", "settings.json")


def settings_hash(settings: Mapping[str, Any]) -> str:
    """Twelve hex digits that stand for `settings` (JSON values; the order of the keys does not matter)."""
    return text_hash(json.dumps(settings, sort_keys=True))[:12]


def finished(out: Path, settings: Mapping[str, Any]) -> bool:
    """Whether `out` is there, whole and unchanged, and was made with exactly these settings."""
    record = read_json(_record(out))
    return record is not None and out.is_file() and _record_of(out, settings).items() <= record.items()


def tidied(out: Path) -> None:
    """Put away the parts of a finished `out` whose run was killed at its very end."""
    if parts_of(out).exists():
        with locked(out):
            discard(parts_of(out))


def earlier(out: Path) -> int:
    """How many groups an interrupted run has left (ask inside `run_groups`): they are read, not computed."""
    return sum(1 for _ in parts_of(out).glob("[0-9]*.jsonl"))


@contextmanager
def run_groups(
    out: Path,
    settings: Mapping[str, Any],
    groups: Iterable[Inputs],
    work: Callable[[int, Inputs], list[Row]],
    *,
    restart: bool = False,
    notes: Mapping[str, Any] | None = None,
) -> Iterator[Iterator[list[Row]]]:
    """Yield an iterator over the rows of each group, in order; groups finished earlier are read, not recomputed.

        with run_groups(out, settings, groups, work) as results:
            for rows in results:
                kept += rows                      # a `break` is fine where enough rows are there
            write_jsonl(out, kept)                # the caller writes the final file, whole
        # here the parts are gone

    When the block raises or the process dies, the parts stay, and the next call with the same settings goes on. Ask
    `finished(out, settings)` first.

    Args:
        settings: all that determines the rows, as JSON values: options, group size, hashes of input and backbone.
        groups: the inputs of each group; may be endless.
        work: (number, inputs) to rows; must give the same rows whenever it is called with the same arguments.
        restart: throw away an unfinished run, and replace `out` even if other settings or another hand made it.
        notes: what is written beside the settings and determines nothing.

    Raises:
        UserError: another process is at work on `out`; an unfinished run with other settings is there; `out` exists
            and is no result of these settings.
    """
    parts = parts_of(out)
    with locked(out):
        if restart:
            discard(parts)
        _open_parts(out, parts, settings, restart)
        yield _results(parts, groups, work)
        assert out.is_file(), f"the block of run_groups has to write {out}"
        record = _record_of(out, settings) | ({"notes": notes} if notes else {})
        write_whole(_record(out), json.dumps(record, indent=1) + "\n")
        discard(parts)


def _results(parts: Path, groups: Iterable[Inputs], work: Callable[[int, Inputs], list[Row]]) -> Iterator[list[Row]]:
    for number, inputs in enumerate(groups):
        part = parts / f"{number:06d}.jsonl"
        if not part.exists():
            write_jsonl(part, work(number, inputs))
        yield list(read_jsonl(part))  # read back in either case: a resumed run sees what a first one saw


def _open_parts(out: Path, parts: Path, settings: Mapping[str, Any], restart: bool) -> None:
    """Make the folder of parts, or check that the one there belongs to these settings."""
    before = read_json(parts / "settings.json")
    if before is None:
        if out.exists() and not restart and not finished(out, settings):
            raise UserError(_occupied(out, settings))
        discard(parts)  # half-made
        write_whole(parts / "settings.json", json.dumps(settings, indent=1, sort_keys=True) + "\n")
    elif (change := _difference(before, settings)) and not earlier(out):
        discard(parts)  # it ended before its first group was done, over a wrong name, perhaps
        _open_parts(out, parts, settings, restart)
    elif change:
        raise UserError(
            f"{parts}: an unfinished run with other settings is there ({change}). Repeat that setting to go on with "
            "it, choose another --out, or pass --restart to throw it away"
        )


def discard(parts: Path, ours: Sequence[str] = OURS) -> None:
    """Remove a folder of parts: our own files only, in the order of these patterns. The settings go last, so that no
    group is ever left without them."""
    if not parts.exists():
        return
    for path in [path for pattern in ours for path in parts.glob(pattern)]:
        path.unlink(missing_ok=True)
    try:
        parts.rmdir()
    except OSError as error:
        raise UserError(
            f"{parts}: holds files that this command did not write ({error.strerror}); move them away"
        ) from None


def _occupied(out: Path, settings: Mapping[str, Any]) -> str:
    record = read_json(_record(out))
    if record is None:
        why = "exists already and was not made by this command"
    elif change := _difference(record["settings"], settings):
        why = f"exists already, made with other settings ({change})"
    else:
        why = "exists already, and was changed since it was made"
    return f"{out}: {why}. Choose another --out, or pass --restart to replace it"


def _difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """`name was X, is now Y` for each setting that differs; empty if none does."""
    now = json.loads(json.dumps(now))
    missing = "unset"
    return "; ".join(
        f"{name} was {before.get(name, missing)!r}, is now {now.get(name, missing)!r}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name, missing) != now.get(name, missing)
    )


def parts_of(out: Path) -> Path:
    """The folder of parts of `out`."""
    return out.with_name(out.name + ".parts")


def _record(out: Path) -> Path:
    return out.with_name(out.name + ".settings.json")


def _record_of(out: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {"settings": json.loads(json.dumps(settings)), "sha256": file_hash(out)}


def read_json(path: Path) -> Any:
    """The JSON value in `path`; None if there is no such file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); remove it to start afresh") from None


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Hold the lock of `out`, which is the system's own: a killed process leaves none behind.

    Raises:
        UserError: another process holds it, or the folder cannot be written.
    """
    path = out.with_name(f".{out.name}.lock")
    handle = _acquire(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def _acquire(path: Path) -> int:
    """Create and lock `path`; returns its file descriptor."""
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(f"{path.parent}: cannot be written ({error.strerror})") from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 32).decode(errors="replace").strip() or "unknown"
            os.close(handle)
            raise UserError(
                f"{path.with_name(path.name[1:-5])}: another process (number {holder}) is at work on this file; "
                "wait for it, or choose another --out"
            ) from None
        if _names(path, handle):
            os.ftruncate(handle, 0)
            os.write(handle, f"{os.getpid()}\n".encode())
            return handle
        os.close(handle)  # its last holder removed it between our open and our lock: such a lock guards nothing


def _names(path: Path, handle: int) -> bool:
    """Whether `path` still names the open file `handle`."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
