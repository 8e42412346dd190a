"""Work on a stream of items in several processes, with the results in order.

Items go in chunks of one size whatever the number of processes, and a chunk's result depends on the chunk alone, so
that the number of processes changes nothing but the time. A few chunks are on their way at once: memory is bounded.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from typing import Any, TypeVar

from ..errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")

CHUNK = 200  # items
SMALL = 10  # chunks; so few are done sooner than other processes start
_work: Callable[[Any], Any]


def mapped(
    work: Callable[[Sequence[Item]], Result], items: Iterable[Item], workers: int | None = None
) -> Iterator[Result]:
    """`work` on each chunk of the items, in order.

    Args:
        work: a function of a chunk; other processes are forked from this one, so that it need not be pickled, but its
            results are.
        workers: processes; None for one a core. Up to 2,000 items are always worked on here.

    Raises:
        UserError: a process was ended from outside.
    """
    rest = iter(items)
    chunks = iter(lambda: list(islice(rest, CHUNK)), [])
    first = list(islice(chunks, SMALL + 1))
    workers = len(os.sched_getaffinity(0)) if workers is None else workers
    if workers < 2 or len(first) <= SMALL:
        yield from map(work, chain(first, chunks))
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), _start, (work, os.getpid()))
    try:
        yield from _in_order(pool, chain(first, chunks), 3 * workers)
    except BrokenProcessPool:
        raise UserError(
            "a process that prepared rows was ended, for want of memory, perhaps; use fewer --workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(pool: ProcessPoolExecutor, chunks: Iterable[list[Any]], ahead: int) -> Iterator[Any]:
    waiting: deque[Future[Any]] = deque()
    for chunk in chunks:
        with warnings.catch_warnings():  # of threads in a process that forks: ours do nothing meanwhile
            warnings.simplefilter("ignore", DeprecationWarning)
            waiting.append(pool.submit(_do, chunk))
        if len(waiting) > ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _start(work: Callable[[Any], Any], parent: int) -> None:
    """In a new process: leave interrupts to the parent, and end when it does, however it ends."""
    global _work
    _work = work
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _do(chunk: list[Any]) -> Any:
    return _work(chunk)
