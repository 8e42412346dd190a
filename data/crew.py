"""Work in threads that wait for somebody else, such as a server.

They are daemons: an interrupted program ends at once, and does not wait for what they wait for.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from types import TracebackType
from typing import Any, Self

Job = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class Crew:
    """Threads that take jobs in the order in which they are given.

    Args:
        stopped: set when the block ends or a job fails; one that is under way should look at it now and then.
    """

    def __init__(self, threads: int, stopped: threading.Event):
        self.stopped, self.jobs = stopped, queue.SimpleQueue[Job]()
        for _ in range(threads):
            threading.Thread(target=self._serve, daemon=True).start()
        self.threads = threads
        self.failure: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stopped.set()
        for _ in range(self.threads):
            self.do(int)  # wakes a thread that waits

    @property
    def waiting(self) -> int:
        """Jobs that nobody has begun."""
        return self.jobs.qsize()

    def do(self, job: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.jobs.put((future, job, arguments))
        return future

    def results(self, futures: Sequence[Future[Any]], on_done: Callable[[int], None]) -> Iterator[Any]:
        """The results of jobs in their order; the first failure of any job is raised at once.

        Args:
            on_done: called with the number of jobs that were finished, at least once a second.
        """
        left = set(futures)
        while left:
            done, left = wait(left, timeout=1.0, return_when=FIRST_COMPLETED)
            if self.failure is not None:  # of any job: nobody takes one after it
                raise self.failure
            on_done(len(done))
        return iter([future.result() for future in futures])

    def _serve(self) -> None:
        while not self.stopped.is_set():
            future, job, arguments = self.jobs.get()
            try:
                future.set_result(job(*arguments))
            except BaseException as error:  # it is raised where the results are waited for
                self.failure = self.failure or error
                self.stopped.set()
                future.set_exception(error)
