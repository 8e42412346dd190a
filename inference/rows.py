"""The rows of a comparison on disk: JSON lines, and beside them a file that says what they depend on.

A row is an answer; those of a question are written at once. Rows of another setup are not added to, and two processes
do not write into one file. What an interruption left of a question is cut off.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import UserError
from ..files import write_whole

Row = dict[str, Any]


class Rows:
    """An open file of rows.

    Raises:
        UserError: a line of it is not JSON.
    """

    def __init__(self, handle: BinaryIO, path: Path) -> None:
        self.handle = handle
        self.of: dict[str, list[Row]] = {}
        """By question key."""
        self._read(path)

    def add(self, rows: list[Row]) -> None:
        """Write the rows of a question."""
        self.handle.write("".join(json.dumps(row) + "\n" for row in rows).encode())
        self.handle.flush()
        self.of[rows[0]["key"]] = rows

    def _read(self, path: Path) -> None:
        """Read what is there, and cut off the question at the end that has not all of its rows."""
        self.handle.seek(0)
        rows: list[Row] = []
        size = whole = 0
        for number, line in enumerate(self.handle, 1):
            if not line.endswith(b"\n"):
                break
            size += len(line)
            rows.append(_parsed(line, f"{path}, line {number}"))
            if rows[-1]["turn"] == rows[-1]["turns"]:
                whole, self.of[rows[-1]["key"]], rows = size, rows, []
        self.handle.truncate(whole)


@contextmanager
def opened(path: Path, record: Path, setup: Mapping[str, Any], restart: bool = False) -> Iterator[Rows]:
    """The rows of a file, locked meanwhile; with `restart`, none of those that are there.

    Args:
        record: the file that holds `setup`, what the rows depend on.

    Raises:
        UserError: the file cannot be written, another process is at work on it, or its rows have another setup.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = open(path, "a+b")  # noqa: SIM115
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system's own: a killed process leaves none behind
        except BlockingIOError:
            reason = "another process is at work there; wait for it, or choose another --out"
            raise UserError(f"{path}: {reason}") from None
        if restart:
            handle.truncate(0)
        rows = Rows(handle, path)
        if rows.of:
            _check(path, record, setup)
        else:
            write_whole(record, json.dumps(setup, indent=1) + "\n")
        yield rows


def _check(path: Path, record: Path, setup: Mapping[str, Any]) -> None:
    try:
        before = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        unknown = "so that nobody knows what the rows beside it measure; pass --restart to measure everything again"
        raise UserError(f"{record}: cannot be read ({error}), {unknown}") from None
    changes = [
        f"{name} was {before.get(name)!r}, is now {setup.get(name)!r}"
        for name in sorted(before.keys() | setup.keys())
        if before.get(name) != setup.get(name)
    ]
    if changes:
        raise UserError(
            f"{path}: holds rows of another setup ({'; '.join(changes)}). Choose another --out, or pass "
            "--restart to throw them away"
        )


def _parsed(line: bytes, place: str) -> Row:
    try:
        row = json.loads(line)
        if isinstance(row, dict) and {"key", "turn", "turns"} <= row.keys():
            return row
    except ValueError:
        pass
    raise UserError(f"{place}: not a row that was written here; pass --restart to begin again")
