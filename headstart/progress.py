"""One status line with rate and time left; plain lines where there is no terminal.

    with Progress(total=600, unit="steps", label="train") as progress:
        for step in range(600):
            ...
            progress.note(loss=loss)
            progress.advance()

    for row in Progress(len(rows), "rows", "prepare").over(rows): ...

Everything goes to standard error, so that standard output holds results alone.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Self, TextIO, TypeVar

T = TypeVar("T")

REFRESH = 0.1  # seconds between two paintings of the status line
WINDOW = 30.0  # seconds that the rate looks back: it follows changes, and one slow step does not shake it


class Progress:
    """Counts units of work and says how far it is, how fast, and how long it still takes.

    Args:
        total: how many units there are; None if nobody knows.
        unit: what is counted, in the plural.
        label: the work, in a word or two.
        done: units finished earlier (a resumed run); they count towards the total and not towards the rate.
        every: seconds between two lines where there is no terminal.
        enabled: False for silence (all ranks but the first).
    """

    def __init__(
        self,
        total: int | None = None,
        unit: str = "items",
        label: str = "",
        *,
        done: int = 0,
        every: float = 15.0,
        enabled: bool = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.total, self.unit, self.label, self.done, self.clock = total, unit, label, done, clock
        self.stream = sys.stderr if stream is None else stream
        self.enabled = enabled
        self.terminal = self.stream.isatty()
        self.pause = REFRESH if self.terminal else every
        self.notes: dict[str, Any] = {}
        self.first = self.done
        self.started = self.shown = clock()
        self.past: deque[tuple[float, int]] = deque([(self.started, done)])  # (seconds, units), oldest first

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items, one unit each."""
        with self:
            for item in items:
                yield item
                self.advance()

    def advance(self, units: int = 1) -> None:
        """Count finished units; paints only when it is time to."""
        self.done += units
        self.refresh()

    def note(self, **fields: Any) -> None:
        """Put figures on the line, such as `loss=2.31`; a later note of the same name replaces it, None removes it."""
        self.notes = {name: value for name, value in (self.notes | fields).items() if value is not None}

    def refresh(self) -> None:
        """Paint the line if the last painting is long enough ago."""
        now = self.clock()
        if now - self.shown >= self.pause:
            self._paint(now)

    def say(self, line: str) -> None:
        """Write a line that stays, above the status line."""
        if self.enabled:
            self.stream.write(f"\r\x1b[K{line}\n" if self.terminal else f"{line}\n")
            self.stream.flush()
            self.shown = self.clock() - self.pause  # the status line was wiped: paint it at the next chance

    def close(self) -> None:
        """Write how it ended; the line stays."""
        if self.enabled:
            ended = self._text(self.clock(), over=True)
            self.stream.write(f"\r\x1b[K{ended}\n" if self.terminal else f"{ended}\n")
            self.stream.flush()
            self.enabled = False

    def rate(self, now: float | None = None) -> float | None:
        """Units a second over the last half minute; None before anything was finished."""
        now = self.clock() if now is None else now
        seconds, units = self.past[0]
        return (self.done - units) / (now - seconds) if self.done > units and now > seconds else None

    def left(self, now: float | None = None) -> float | None:
        """Seconds still to go; None if nobody knows."""
        rate = self.rate(now)
        return None if rate is None or self.total is None else max(self.total - self.done, 0) / rate

    def _paint(self, now: float) -> None:
        self.shown = now
        self.past.append((now, self.done))
        while len(self.past) > 2 and self.past[1][0] <= now - WINDOW:
            self.past.popleft()
        if self.enabled:
            text = self._text(now)
            width = shutil.get_terminal_size().columns - 1
            self.stream.write(f"\r{text[:width]}\x1b[K" if self.terminal else f"{text}\n")
            self.stream.flush()

    def _text(self, now: float, over: bool = False) -> str:
        """`train · 120/600 steps, 20% · 1.7 steps/s · loss 2.314 · 4:42 left`"""
        count = f"{self.done:,}" if self.total is None else f"{self.done:,}/{self.total:,}"
        share = f", {100 * self.done // self.total}%" if self.total else ""
        seconds = now - self.started
        rate = (self.done - self.first) / seconds if over and self.done > self.first and seconds > 0 else self.rate(now)
        left = self.left(now)
        ending = f"{duration(seconds)} in all" if over else f"{duration(left)} left" if left is not None else ""
        parts = [self.label, f"{count} {self.unit}{share}", self._speed(rate), *map(_shown, self.notes.items()), ending]
        return " · ".join(part for part in parts if part)

    def _speed(self, rate: float | None) -> str:
        if rate is None:
            return ""
        if rate >= 1:
            return f"{rate:,.0f} {self.unit}/s" if rate >= 100 else f"{rate:.1f} {self.unit}/s"
        return f"{1 / rate:.1f} s/{self.unit.removesuffix('s')}"


def duration(seconds: float) -> str:
    """Seconds as `0:07`, `4:42` or `1:05:09`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _shown(note: tuple[str, Any]) -> str:
    name, value = note
    return f"{name.replace('_', ' ')} {value:.4g}" if isinstance(value, float) else f"{name.replace('_', ' ')} {value}"
