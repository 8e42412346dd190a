"""What was found, what was left out, and the time that is left."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from headstart.progress import Progress, duration
from headstart.training.log import memory


@dataclass
class Check:
    """Something that has to hold."""

    name: str
    passed: bool
    detail: str = ""
    trace: str = ""
    """Of an error that nobody expected."""


@dataclass
class Table:
    """Figures."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[Any]] = field(default_factory=list)
    note: str = ""


@dataclass
class Record:
    """All that goes into the report."""

    facts: dict[str, Any] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    omitted: list[str] = field(default_factory=list)
    """What was not checked, and why."""

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if not check.passed]


@dataclass(frozen=True)
class Part:
    """A piece of work that stands on its own."""

    name: str
    work: Callable[[Run], None]
    seconds: float
    """What it may take; it does not begin where less time is left."""
    timing: bool = False
    """Figures alone: may be left out for lack of memory, too."""


class Run:
    """One run of the script.

    Args:
        work: a folder for what training writes.
        minutes: that all of it may take.
    """

    def __init__(
        self,
        device: torch.device,
        work: Path,
        minutes: float,
        *,
        quick: bool = False,
        started: float | None = None,
    ) -> None:
        self.device, self.work, self.quick = device, work, quick
        self.record = Record()
        self.ends = (time.monotonic() if started is None else started) + 60 * minutes
        self.parts = Table("Parts", ("part", "seconds", "peak memory, GiB"))
        """What each part took; memory of the GPU, or on a CPU of the process so far."""
        self.progress = Progress(None, "parts", "check_gpu")

    @property
    def left(self) -> float:
        """Seconds."""
        return self.ends - time.monotonic()

    def check(self, name: str, passed: bool, detail: str = "") -> None:
        """Note whether something holds."""
        self.record.checks.append(Check(name, passed, detail))
        self.progress.say(f"{'ok    ' if passed else 'FAILED'} {name}" + (f": {detail}" if detail else ""))

    def omit(self, what: str) -> None:
        """Note something that is not checked."""
        if what not in self.record.omitted:
            self.record.omitted.append(what)
            self.progress.say(f"left out: {what}")

    def table(self, title: str, *columns: str, note: str = "") -> Table:
        """A new table of the report."""
        self.record.tables.append(Table(title, columns, note=note))
        return self.record.tables[-1]

    def go(self, parts: Sequence[Part]) -> None:
        """Do the parts one after another. What goes wrong in one is noted, and the next begins."""
        self.progress.total = len(parts)
        with self.progress:
            for part in parts:
                left = max(self.left, 0)
                self.progress.say(f"-- {part.name}")
                if left < part.seconds:
                    self.omit(f"{part.name}: takes about {part.seconds:.0f} s, and {left:.0f} s were left")
                else:
                    self._do(part)
                self.progress.note(budget=f"ends in {duration(max(self.left, 0))}")
                self.progress.advance()

    def _do(self, part: Part) -> None:
        began = time.monotonic()
        reset_memory(self.device)
        try:
            part.work(self)
        except torch.OutOfMemoryError as error:
            if part.timing:
                self.omit(f"{part.name}: {_told(error)}")
            else:
                self.check(part.name, False, _told(error))
        except Exception as error:
            self.check(part.name, False, _told(error))
            self.record.checks[-1].trace = traceback.format_exc()
            self.progress.say(self.record.checks[-1].trace)
        self.parts.rows.append((part.name, time.monotonic() - began, memory(self.device)))


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


def reset_memory(device: torch.device) -> None:
    """Free what nobody holds, and count the peak from here."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
