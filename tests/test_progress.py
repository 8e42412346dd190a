"""The status line: figures, terminals, and what is left where there is none."""

from __future__ import annotations

import io

import pytest

from headstart.progress import WINDOW, Progress, duration


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_plain_lines_without_a_terminal():
    clock, stream = Clock(), io.StringIO()
    with Progress(100, "steps", "train", every=10, stream=stream, clock=clock) as progress:
        for _ in range(100):
            clock.now += 0.5
            progress.note(loss=2.0)
            progress.advance()
    lines = stream.getvalue().splitlines()
    assert lines == [
        "train · 20/100 steps, 20% · 2.0 steps/s · loss 2 · 0:40 left",
        "train · 40/100 steps, 40% · 2.0 steps/s · loss 2 · 0:30 left",
        "train · 60/100 steps, 60% · 2.0 steps/s · loss 2 · 0:20 left",
        "train · 80/100 steps, 80% · 2.0 steps/s · loss 2 · 0:10 left",
        "train · 100/100 steps, 100% · 2.0 steps/s · loss 2 · 0:00 left",
        "train · 100/100 steps, 100% · 2.0 steps/s · loss 2 · 0:50 in all",
    ]


def test_one_line_on_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    clock, stream = Clock(), Terminal()
    with Progress(10, "rows", "prepare", stream=stream, clock=clock) as progress:
        for _ in range(10):
            clock.now += 1
            progress.advance()
        progress.say("a word")
    text = stream.getvalue()
    assert text.count("\n") == 2  # the word and the end; everything else is painted over
    assert max(len(part.partition("\x1b")[0]) for part in text.splitlines()[0].split("\r")) <= 19
    assert "a word\n" in text
    assert text.endswith("10/10 rows, 100% · 1.0 rows/s · 0:10 in all\n")


def test_paints_at_most_ten_times_a_second():
    clock, stream = Clock(), Terminal()
    progress = Progress(10_000, stream=stream, clock=clock)
    for _ in range(10_000):
        clock.now += 0.0001
        progress.advance()
    assert 5 <= stream.getvalue().count("\r") <= 11


def test_a_resumed_run_counts_its_own_work_only():
    clock = Clock()
    progress = Progress(1000, done=900, stream=io.StringIO(), clock=clock)
    assert progress.rate() is None
    clock.now += 10
    progress.advance(20)
    assert progress.rate() == pytest.approx(2)
    assert progress.left() == pytest.approx(40)


def test_the_rate_follows_changes():
    clock = Clock()
    progress = Progress(10_000, stream=io.StringIO(), every=1, clock=clock)
    for seconds in (1.0,) * 100 + (0.1,) * int(20 * WINDOW):
        clock.now += seconds
        progress.advance()
    assert progress.rate() == pytest.approx(10, rel=0.05)


def test_over_no_total_and_errors():
    clock, stream = Clock(), io.StringIO()
    assert list(Progress(None, "rows", "read", stream=stream, clock=clock).over("abc")) == ["a", "b", "c"]
    assert stream.getvalue() == "read · 3 rows · 0:00 in all\n"
    stream = Terminal()
    with pytest.raises(ValueError, match="inside"), Progress(3, stream=stream, clock=clock):
        raise ValueError("inside")
    assert stream.getvalue().endswith("\n")  # what follows starts on its own line


def test_silence_and_notes():
    stream = io.StringIO()
    with Progress(3, enabled=False, every=0, stream=stream) as progress:
        progress.advance(3)
        progress.say("nothing")
    assert stream.getvalue() == ""
    clock = Clock()
    with Progress(3, stream=stream, clock=clock) as progress:
        progress.note(loss=0.123456, head="eagle3", learning_rate=1e-4)
        progress.note(head=None)
        clock.now += 30
        progress.advance()
    assert "1/3 items, 33% · 30.0 s/item · loss 0.1235 · learning rate 0.0001 · " in stream.getvalue()


def test_duration():
    assert [duration(s) for s in (0, 7.4, 282, 3909)] == ["0:00", "0:07", "4:42", "1:05:09"]
