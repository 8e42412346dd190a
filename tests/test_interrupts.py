"""Ctrl-C, as a signal: wherever it falls, an engine stays whole, and a bench says what it has."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from test_engine import nothing_left
from test_generator import NO_END, backbone, head, prompt_of

import zoo
from headstart import cli
from headstart.heads.slots import Slots
from headstart.inference import engine as module
from headstart.inference.engine import Engine
from headstart.inference.generator import Generator
from headstart.inference.row import Row

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")


@contextmanager
def control_c(seconds: float) -> Iterator[None]:
    """SIGINT to this process after some time."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def submitted(engine: Engine, new: int) -> list[Any]:
    return [engine.submit(prompt_of(3 + 4 * k), max_new_tokens=new, **NO_END) for k in range(6)]


def as_alone(requests: list[Any], new: int) -> None:
    for request in requests:
        expected = Generator(backbone()).generate(prompt_of(len(request.asked.ids)), max_new_tokens=new, **NO_END)
        assert request.output.tokens == expected.tokens


@pytest.mark.parametrize("seconds", [0.05, 0.2])
def test_a_running_engine(seconds: float) -> None:
    engine = Engine(backbone(), head("llama", "eagle3"), max_rows=2)
    requests = submitted(engine, 150)
    with control_c(seconds), pytest.raises(KeyboardInterrupt):
        while True:
            engine.run()
            requests += submitted(engine, 150)
    ended = [request for request in requests if request.error is not None]
    assert len(ended) <= 2
    assert all(str(request.error) == "interrupted" for request in ended)
    answered = [request for request in requests if request.done and request.error is None]
    waiting = [request for request in requests if not request.done]
    for request in waiting[1:]:
        request.cancel()
    engine.run()
    as_alone([*answered[-1:], *waiting[:1]], 150)
    nothing_left(engine)


PLACES = [(Slots, name) for name in ("admit", "arrange", "swap", "move", "pop", "take")] + [(Row, "begin")]


@pytest.mark.parametrize(("owner", "name"), PLACES, ids=[name for _, name in PLACES])
def test_an_interrupt_between_two_steps_of_the_books(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backbone's slots know of it, and those of the head do not yet."""
    monkeypatch.setattr(module, "PREFILL", 12)
    engine = Engine(backbone(), head("llama", "eagle3"), max_rows=3, max_tokens=170)
    asked = [(3 + 9 * k, 4 + k) for k in (0, 2, 1, 5, 3, 4)] + [(60, 3)]  # the last one needs longer lines
    requests = [engine.submit(prompt_of(length), max_new_tokens=new, **NO_END) for length, new in asked[:-1]]
    engine.step()
    right, calls = getattr(owner, name), 0

    def interrupted(self: Any, *given: Any) -> None:
        nonlocal calls
        calls += 1
        right(self, *given)
        if calls == 1:
            signal.raise_signal(signal.SIGINT)

    requests.append(engine.submit(prompt_of(60), max_new_tokens=3, **NO_END))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, name, interrupted)
        engine.run()
    left = [(request, *sizes) for request, sizes in zip(requests, asked, strict=True) if not request.done]
    assert left
    engine.run()
    for request, length, new in left:
        expected = Generator(backbone()).generate(prompt_of(length), max_new_tokens=new, **NO_END)
        assert request.output.tokens == expected.tokens
    nothing_left(engine)


def test_coroutines() -> None:
    engine = Engine(backbone(), "ngram", max_rows=2)
    requests = submitted(engine, 150)

    async def all_of_them() -> None:
        while True:
            await asyncio.gather(*requests)
            requests.extend(submitted(engine, 150))

    with control_c(0.2), pytest.raises(KeyboardInterrupt):
        asyncio.run(all_of_them())
    engine.run()  # nothing was lost: the step that was under way came to its end
    assert all(request.error is None for request in requests)
    as_alone(requests[-1:], 150)
    nothing_left(engine)


def test_a_bench_under_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    zoo.model().save_pretrained(tmp_path / "backbone")
    zoo.tokenizer().save_pretrained(tmp_path / "backbone")
    (tmp_path / "s.txt").write_text("".join(f"red {'sun ' * (k % 7)}\n" for k in range(400)))
    monkeypatch.setattr("headstart.inference.load.Bench.costs", lambda self: None)
    out = tmp_path / "out"
    flags = ["--backbone", tmp_path / "backbone", "--suite", tmp_path / "s.txt", "--out", out, "--head", "ngram"]
    flags += ["--concurrency", "2", "--sides", "plain,engine", "--stretch", "2", "--max-new-tokens", "24"]
    timer = threading.Thread(target=_once_there, args=(out / "load.jsonl",))
    timer.start()
    with pytest.warns(UserWarning, match="stretches are measured; the same command goes on") as told:
        assert cli.main(["bench", *map(str, flags)]) == 130
    timer.join()
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert said.rstrip().endswith("headstart: interrupted")
    report = json.loads((out / "load_report.json").read_text())
    assert 0 < report["measured"] < report["units"] == 600
    assert str(told[0].message).startswith(f"{report['measured']} of 600 stretches")
    assert str(told[0].message).endswith(str(out / "load.html"))
    assert (out / "load.html").read_text()


def _once_there(path: Path) -> None:
    """SIGINT, once a file has something in it."""
    for _ in range(6000):
        if path.exists() and path.stat().st_size > 2000:
            break
        threading.Event().wait(0.01)
    os.kill(os.getpid(), signal.SIGINT)
