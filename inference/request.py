"""`Request`: one answer that an engine works on, as whoever asked for it sees it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Iterator
from time import perf_counter
from typing import Any, Protocol

from ..errors import UserError
from .detokenizer import Detokenizer
from .intake import Asked
from .output import Output, Piece
from .stats import Stats


class Cancelled(UserError):
    """The request was cancelled."""


class Worker(Protocol):
    """What a request needs of its engine."""

    def step(self) -> bool: ...

    async def turn(self) -> None: ...


class Request:
    """An answer on its way. Made by `Engine.submit`.

    It moves on whenever its engine does: through `engine.run()` or `engine.step()`, by reading its own `stream()`, or,
    in a coroutine, by `await request` or `async for piece in request`.
    """

    def __init__(self, engine: Worker, tokenizer: Any, asked: Asked, callback: Callable[[Piece], None] | None) -> None:
        self.asked = asked
        self.tokens: list[int] = []
        """All new tokens so far."""
        self.stats = Stats()
        """Seconds are this request's share of what was done for several at once."""
        self.error: Exception | None = None
        """Why there will be no output."""
        self.done = False
        """Whether nothing more will come."""
        self.came: list[tuple[float, int]] = []
        """By `perf_counter`: when each run of tokens came, and how many."""
        self.times: dict[str, float] = {"submitted": perf_counter()}
        """By `perf_counter`: submitted, started (its prompt begins to be read), first (token), done."""
        self._engine, self._tokenizer = engine, tokenizer
        self._runs: list[list[int]] = []
        self._callback, self._text = callback, Detokenizer(tokenizer) if callback else None

    @property
    def cancelled(self) -> bool:
        return isinstance(self.error, Cancelled)

    @property
    def output(self) -> Output:
        """The whole answer.

        Raises:
            UserError: it is not there yet.
            Exception: `error`, if there is one.
        """
        if self.error is not None:
            raise self.error
        if not self.done:
            raise UserError(f"the request has {len(self.tokens)} tokens and is not done: engine.run() first")
        return Output.of(self._tokenizer, self.tokens, self.stats, self.asked.sampler.record)

    def cancel(self) -> None:
        """No more of it; its slots are free from the next step on. Nothing happens where it is done."""
        self.fail(Cancelled(f"cancelled after {len(self.tokens)} tokens"))

    def stream(self) -> Iterator[Piece]:
        """Piece by piece from the beginning, each as soon as it is there. Runs the engine where it has to wait, and so
        all other requests with it.

        Raises:
            Exception: `error`, behind the pieces that came before it.
        """
        for piece in self._pieces():
            if piece is None:
                self._engine.step()
            else:
                yield piece

    async def __aiter__(self) -> AsyncIterator[Piece]:
        for piece in self._pieces():
            if piece is None:
                await self._engine.turn()
            else:
                yield piece

    def __await__(self) -> Generator[Any, None, Output]:
        return self._wait().__await__()

    async def _wait(self) -> Output:
        while not self.done:
            await self._engine.turn()
        return self.output

    def _pieces(self) -> Iterator[Piece | None]:
        """Piece by piece from the beginning; None where the engine has to move on first."""
        text, place = Detokenizer(self._tokenizer), 0
        while True:
            while place < len(self._runs):
                run, place = self._runs[place], place + 1
                yield Piece(text.push(run), run)
            if self.done:
                break
            yield None
        if self.error is not None:
            raise self.error
        yield Piece(text.finish(), [], self.stats)

    # -- called by the engine ----------------------------------------------------------------------------------------

    def push(self, run: list[int]) -> None:
        """Some more tokens."""
        now = perf_counter()
        self.times.setdefault("first", now)
        self.came.append((now, len(run)))
        self._runs.append(run)
        self.tokens += run
        if self._callback is not None and self._text is not None:
            self._callback(Piece(self._text.push(run), run))

    def finish(self) -> None:
        """That was all."""
        if self._callback is not None and self._text is not None:
            self._callback(Piece(self._text.finish(), [], self.stats))
        self._close()

    def fail(self, error: Exception) -> None:
        """It ends here, with an error."""
        if not self.done:
            self.error = error
            self._close()

    def _close(self) -> None:
        self.times["done"] = perf_counter()
        self.done = True
