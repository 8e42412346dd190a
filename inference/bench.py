"""The comparison: transformers' `model.generate` and ours, in turn, on the same prompts, in one process.

Both get the same token ids, token limit, dtype, threads and attention, both are warmed up, and the time is that of the
whole call, prefill included. Who goes first alternates. Decoding is greedy. A later turn is asked behind the *plain*
answer to the one before, whatever ours was.

In the folder of a bench:

    setup.json                           what the figures depend on; rows of another setup are not added to
    rows.jsonl                           a row an answer, all rows of a question at once
    report.md, report.json, report.png   made of the rows (report.py, plots.py)

An interrupted bench goes on with the questions that have no rows yet, and so does one with a higher limit.
"""

from __future__ import annotations

import itertools
import platform
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import UserError
from ..heads.backbone import Backbone
from ..progress import Progress
from .dialogue import dialogue, encode, own_answer
from .figures import Report, speedup
from .generator import Generator, Output
from .judge import Judge
from .machine import machine
from .report import write_report
from .rows import Row, Rows, opened
from .setup import setup_of
from .stats import repeats_ngram
from .suite import Question, choose
from .timing import now

LOOP = 10  # a plain answer in which a run of this many tokens occurs twice is a loop
WARM_UP_TOKENS = 32


@dataclass
class BenchSettings:
    """A comparison with transformers' generate on the same prompts, as a report."""

    suite: str
    """File of questions: Spec-Bench style (turns), HumanEval, GSM8K, prompts or chats in .jsonl or .json, or a .txt
    with a prompt a line; or `shipped`: those of the shipped conversations that recipes hold out."""
    out: Path
    """Folder for report.md, report.json, report.png and rows.jsonl; the same command goes on with what is there."""
    head: str = "none"
    """What drafts: the folder or Hub id of a head, the folder of a smaller model, ngram, suffix, exit:6 (its own first
    layers), int8, hybrid:NAME, or none (plain decoding in our loop)."""
    tree: str | None = None
    """Form of the drafts, such as chain:4 or dynamic:4x4x8 (depth, children of a node, nodes in all); auto takes what
    gives the most tokens a second. Without it, what `headstart tune` chose for the head here, else the usual form."""
    max_new_tokens: int = 128
    """Stop each answer after this many tokens."""
    every: int = 1
    """Ask every K-th question only."""
    limit: int | None = None
    """Ask this many questions at most."""
    repeats: int = 1
    """Measure each answer this many times; times are averaged."""
    warm_up: int = 2
    """Short answers of each side before anything is measured."""
    threads: int | None = None
    """CPU threads of both sides; without it, what torch chooses."""
    compile: bool = False
    """Run rounds through torch.compile; the first ones take long, and what cannot be compiled goes on without."""
    raw: bool = False
    """Ask the texts as they stand, without the chat template."""
    restart: bool = False
    """Throw away the rows of an earlier bench in this folder."""

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "every", "limit", "repeats", "warm_up", "threads"):
            value, least = getattr(self, name), 0 if name == "warm_up" else 1
            if value is not None and value < least:
                raise UserError(f"{name} is {value}; it has to be at least {least}")


class Timed(NamedTuple):
    """One answer of one side."""

    tokens: list[int]
    seconds: dict[str, float]
    """`seconds`: all of the call. `prefill`; of ours also `draft` and `verify`: what these parts of it took."""
    output: Output | None = None
    """Of ours."""


def bench(
    backbone: Backbone, drafter: Any, questions: Sequence[Question], settings: BenchSettings, *, command: str = ""
) -> Report:
    """Measure what has no rows in `settings.out` yet, and write the report of all.

    Args:
        drafter: what `Generator` takes; `settings.head` is only its name.
        questions: of a suite; `settings.every` and `settings.limit` choose among them.
        command: how to run this again, for the report.

    Returns:
        The report, as in report.json.

    Raises:
        UserError: a question cannot be asked (no chat template, say), the head belongs to another backbone, or the
            folder holds rows of another setup or is in use.
    """
    asked = choose(questions, settings.every, settings.limit)
    with threads(settings.threads):
        generator = Generator(backbone, drafter, tree=settings.tree, compile=settings.compile)
        for question in asked:  # whatever is wrong with one is told before any work
            encode(backbone, question, question.turns[0], settings.raw)
        setup = _setup(backbone, drafter, settings)
        paths = (settings.out / "rows.jsonl", settings.out / "setup.json")
        with opened(*paths, setup, settings.restart) as store:
            rows = _run(generator, asked, settings, store)
        found = speedup(rows)
        if found is not None and found < 1 and drafter is not None:
            note = f"slower than plain decoding here (a measured speed-up of {found:.2f})"
            better = "try fewer nodes (--tree) or another drafter"
            warnings.warn(f"drafting with {settings.head} is {note}; {better}", stacklevel=2)
        return write_report(settings.out, rows, setup, command)


def _run(generator: Generator, asked: Sequence[Question], settings: BenchSettings, store: Rows) -> list[Row]:
    """The rows of all questions, in order; those that are missing are measured."""
    missing = [question for question in asked if question.key not in store.of]
    total, left = (sum(len(question.turns) for question in some) for some in (asked, missing))
    place = 0
    if missing:
        _warm_up(generator, missing[0], settings)
    with Progress(total, "answers", "bench", done=total - left) as progress:
        for question in asked:
            if question.key not in store.of:
                store.add(_measure_question(generator, question, settings, place))
                progress.note(speedup=speedup([row for q in asked for row in store.of.get(q.key, ())]))
                progress.advance(len(question.turns))
            place += len(question.turns)
    return [row for question in asked for row in store.of[question.key]]


def _warm_up(generator: Generator, question: Question, settings: BenchSettings) -> None:
    ids = encode(generator.backbone, question, question.turns[0], settings.raw)
    most = settings.max_new_tokens if settings.compile else WARM_UP_TOKENS  # graphs are made for every size of a round
    limit = min(settings.max_new_tokens, most, generator.backbone.max_positions - len(ids))
    for _ in range(settings.warm_up if limit > 0 else 0):
        answer_plainly(generator.backbone, ids, limit)
        answer_ours(generator, ids, limit)


# -- one question ----------------------------------------------------------------------------------------------------


def _measure_question(generator: Generator, question: Question, settings: BenchSettings, place: int) -> list[Row]:
    """The rows of all its turns. `place` counts the answers before it: it decides who goes first."""
    turns = itertools.count(place)

    def answer(ids: list[int], limit: int) -> tuple[Row, list[int]]:
        row = _measure(generator, ids, limit, settings.repeats, next(turns))
        return row, row["plain"]["tokens"]

    return dialogue(generator.backbone, question, settings.max_new_tokens, settings.raw, answer)


def _measure(generator: Generator, ids: list[int], limit: int, repeats: int, place: int) -> Row:
    """What both sides did with one prompt, `repeats` times each."""
    plain: list[Timed] = []
    ours: list[Timed] = []
    for repeat in range(repeats):
        for side in (0, 1) if (place + repeat) % 2 == 0 else (1, 0):
            if side == 0:
                plain.append(answer_plainly(generator.backbone, ids, limit))
            else:
                ours.append(answer_ours(generator, ids, limit))
    pairs = list(zip(plain, ours, strict=True))
    a, b = next((pair for pair in pairs if pair[0].tokens != pair[1].tokens), pairs[0])
    assert b.output is not None, "ours comes with stats"
    stats = b.output.stats
    parting = Judge(generator.backbone).parting(ids, a.tokens, b.tokens, max_new_tokens=limit, temperature=0)
    return {
        "prompt_tokens": len(ids),
        "plain": {"tokens": a.tokens, **_times(plain)},
        "ours": {"tokens": b.tokens, **_times(ours)},
        "rounds": stats.rounds,
        "drafted": stats.drafted,
        "offered": stats.offered,
        "accepted": stats.accepted,
        "loops": repeats_ngram(a.tokens, LOOP),
        "difference": parting.row() if parting else None,
    }


def _times(answers: Sequence[Timed]) -> dict[str, list[float]]:
    """By part, the seconds of each repetition."""
    return {part: [round(answer.seconds[part], 6) for answer in answers] for part in answers[0].seconds}


def answer_plainly(backbone: Backbone, ids: list[int], limit: int) -> Timed:
    """Greedy `model.generate`: what everything is compared with."""
    first: list[float] = []

    def note(*_: Any) -> None:
        first.append(now(backbone.device))
        hook.remove()  # later forwards are to cost nothing more

    hook = backbone.model.register_forward_hook(note)
    start = now(backbone.device)
    tokens = own_answer(backbone, ids, limit)
    end = now(backbone.device)
    return Timed(tokens, {"seconds": end - start, "prefill": first[0] - start})


def answer_ours(generator: Generator, ids: list[int], limit: int) -> Timed:
    start = now(generator.backbone.device)
    output = generator.generate(ids, max_new_tokens=limit, temperature=0)
    end = now(generator.backbone.device)
    parts = {part: output.stats.seconds[part] for part in ("prefill", "draft", "verify")}
    return Timed(output.tokens, {"seconds": end - start, **parts}, output)


# -- what the figures depend on --------------------------------------------------------------------------------------


def _setup(backbone: Backbone, drafter: Any, settings: BenchSettings) -> dict[str, Any]:
    asked = {name: getattr(settings, name) for name in ("head", "tree", "max_new_tokens", "raw", "compile")}
    return {
        **setup_of(backbone, drafter, **asked),
        "temperature": 0,
        "repeats": settings.repeats,
        **machine(),
        "python": platform.python_version(),
    }


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
