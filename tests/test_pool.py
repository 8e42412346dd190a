"""Chunks in several processes: in order, the same as in one, and no process outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headstart.data import pool
from headstart.errors import UserError


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "CHUNK", 5)
    monkeypatch.setattr(pool, "SMALL", 2)


def work(chunk: list[int]) -> tuple[int, list[int]]:
    time.sleep(0.01 * (chunk[0] % 3))
    return os.getpid(), [number * number for number in chunk]


@pytest.mark.parametrize("workers", [1, 2, 3, None])
def test_results_are_in_order(workers: int | None) -> None:
    found = list(pool.mapped(work, range(103), workers))
    assert [number for _, numbers in found for number in numbers] == [number * number for number in range(103)]
    assert [len(numbers) for _, numbers in found] == [5] * 20 + [3]
    pids = {pid for pid, _ in found}
    assert (pids == {os.getpid()}) == (workers == 1 or (workers is None and len(os.sched_getaffinity(0)) == 1))


def test_little_work_stays_here() -> None:
    assert {pid for pid, _ in pool.mapped(work, range(10), 4)} == {os.getpid()}
    assert list(pool.mapped(work, [], 4)) == []


def test_a_long_stream_is_not_held() -> None:
    """Only so many chunks are taken ahead of what is done."""
    taken = 0

    def stream() -> Iterator[int]:
        nonlocal taken
        for number in range(100_000):
            taken += 1
            yield number

    results = pool.mapped(work, stream(), 2)
    next(results)
    assert taken <= 5 * (3 * 2 + 2)
    results.close()  # type: ignore[attr-defined]


def fail(chunk: list[int]) -> None:
    if 40 in chunk:
        raise UserError("number 40")


def end(chunk: list[int]) -> None:
    if 40 in chunk:
        os.kill(os.getpid(), signal.SIGKILL)


def test_errors_come_back() -> None:
    with pytest.raises(UserError, match="number 40"):
        list(pool.mapped(fail, range(100), 2))
    with pytest.raises(UserError, match="a process that prepared rows was ended"):
        list(pool.mapped(end, range(100), 2))


PARENT = """
import os, time
from headstart.data import pool
pool.CHUNK, pool.SMALL = 1, 1
def work(chunk):
    open(f"{chunk[0]}-{os.getpid()}", "w").close()
    time.sleep(30)
list(pool.mapped(work, range(9), 2))
"""


def test_no_process_outlives_its_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=tmp_path)
    pids: set[int] = set()
    while len(pids) < 2:
        time.sleep(0.05)
        pids = {int(path.name.partition("-")[2]) for path in tmp_path.iterdir()}
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(running(pid) for pid in pids):
        time.sleep(0.1)
    assert not any(running(pid) for pid in pids)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
