"""The comparison: transformers' `model.generate` and ours, in turn, on the same prompts, in one process; and any number
of further sides (others.py), each in its turn at every answer.

All get the same token ids, token limit, dtype, threads and attention, all are warmed up, and the time is that of the
whole call, prefill included. Who goes first changes with every answer. Decoding is greedy. A later turn is asked behind
the *plain* answer to the one before, whatever the others were.

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import UserError
from ..heads.backbone import Backbone
from ..progress import Progress
from .dialogue import dialogue, encode, own_answer
from .figures import LOOP, Report, speedup
from .generator import Generator
from .judge import Judge
from .machine import machine
from .others import Answer, Timed, about, answered, check, is_rival, parted, rival_of
from .report import write_report
from .rows import Row, Rows, opened
from .setup import setup_of
from .stats import repeats_ngram
from .suite import Question, choose
from .timing import now

WARM_UP_TOKENS = 32
COUNTS = ("rounds", "drafted", "offered", "accepted")


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
    also: list[str] = field(default_factory=list)
    """Further sides of the same run: NAME or NAME@TREE, with NAME as for --head; lookup (transformers' own prompt
    lookup), or peer:module:function (called as --peer says)."""
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


def bench(
    backbone: Backbone, drafter: Any, questions: Sequence[Question], settings: BenchSettings, *,
    others: Mapping[str, Any] | None = None, command: str = "",
) -> Report:  # fmt: skip
    """Measure what has no rows in `settings.out` yet, and write the report of all.

    Args:
        drafter: what `Generator` takes; `settings.head` is only its name.
        questions: of a suite; `settings.every` and `settings.limit` choose among them.
        others: what the drafters are that `settings.also` names.
        command: how to run this again, for the report.

    Returns:
        The report, as in report.json.

    Raises:
        UserError: a question cannot be asked (no chat template, say), the head belongs to another backbone, or the
            folder holds rows of another setup or is in use.
    """
    asked = choose(questions, settings.every, settings.limit)
    with threads(settings.threads):
        check(settings.also, others or {})
        sides = _sides(backbone, drafter, settings, others or {})
        for question in asked:  # whatever is wrong with one is told before any work
            encode(backbone, question, question.turns[0], settings.raw)
        setup = {**_setup(backbone, drafter, settings), **about(backbone, settings.also, others or {}, settings.raw)}
        paths = (settings.out / "rows.jsonl", settings.out / "setup.json")
        with opened(*paths, setup, settings.restart) as store:
            rows = _run(sides, asked, settings, store)
        found = speedup(rows)
        if found is not None and found < 1 and drafter is not None:
            note = f"slower than plain decoding here (a measured speed-up of {found:.2f})"
            better = "try fewer nodes (--tree) or another drafter"
            warnings.warn(f"drafting with {settings.head} is {note}; {better}", stacklevel=2)
        return write_report(settings.out, rows, setup, command)


class Sides(NamedTuple):
    """Who takes part: the generator of ours, and further sides by name."""

    generator: Generator
    others: Mapping[str, Answer] = {}


def _sides(backbone: Backbone, drafter: Any, settings: BenchSettings, drafters: Mapping[str, Any]) -> Sides:
    others: dict[str, Answer] = {}
    for name in settings.also:
        if is_rival(name):
            others[name] = answered(rival_of(backbone, name))
        else:
            made = Generator(backbone, drafters[name], tree=parted(name)[1], compile=settings.compile)
            others[name] = partial(answer_ours, made)
    return Sides(Generator(backbone, drafter, tree=settings.tree, compile=settings.compile), others)


def _run(sides: Sides, asked: Sequence[Question], settings: BenchSettings, store: Rows) -> list[Row]:
    """The rows of all questions, in order; those that are missing are measured."""
    missing = [question for question in asked if question.key not in store.of]
    total, left = (sum(len(question.turns) for question in some) for some in (asked, missing))
    place = 0
    if missing:
        _warm_up(sides, missing[0], settings)
    with Progress(total, "answers", "bench", done=total - left) as progress:
        for question in asked:
            if question.key not in store.of:
                store.add(_measure_question(sides, question, settings, place))
                progress.note(speedup=speedup([row for q in asked for row in store.of.get(q.key, ())]))
                progress.advance(len(question.turns))
            place += len(question.turns)
    return [row for question in asked for row in store.of[question.key]]


def _warm_up(sides: Sides, question: Question, settings: BenchSettings) -> None:
    generator = sides.generator
    ids = encode(generator.backbone, question, question.turns[0], settings.raw)
    most = settings.max_new_tokens if settings.compile else WARM_UP_TOKENS  # graphs are made for every size of a round
    limit = min(settings.max_new_tokens, most, generator.backbone.max_positions - len(ids))
    for _ in range(settings.warm_up if limit > 0 else 0):
        answer_plainly(generator.backbone, ids, limit)
        answer_ours(generator, ids, limit)
        for answer in sides.others.values():
            _tried(answer, ids, limit)


# -- one question ----------------------------------------------------------------------------------------------------


def _measure_question(sides: Sides, question: Question, settings: BenchSettings, place: int) -> list[Row]:
    """The rows of all its turns. `place` counts the answers before it: it decides who goes first."""
    turns = itertools.count(place)

    def answer(ids: list[int], limit: int) -> tuple[Row, list[int]]:
        row = _measure(sides.generator, ids, limit, settings.repeats, next(turns), sides.others)
        return row, row["plain"]["tokens"]

    return dialogue(sides.generator.backbone, question, settings.max_new_tokens, settings.raw, answer)


def _measure(
    generator: Generator, ids: list[int], limit: int, repeats: int, place: int, others: Mapping[str, Answer] = {}
) -> Row:
    """What all sides did with one prompt, `repeats` times each."""
    sides: dict[str, Answer] = {
        "plain": lambda ids, limit: answer_plainly(generator.backbone, ids, limit),
        "ours": lambda ids, limit: answer_ours(generator, ids, limit),
        **others,
    }
    found: dict[str, list[Timed | str]] = {name: [] for name in sides}
    for repeat in range(repeats):
        first = (place + repeat) % len(sides)
        for name in [*sides, *sides][first : first + len(sides)]:
            answer = sides[name]
            found[name].append(_tried(answer, ids, limit) if name in others else answer(ids, limit))
    plain, ours = ([one for one in found.pop(name) if isinstance(one, Timed)] for name in ("plain", "ours"))
    told = _differing(plain, ours)[0].tokens
    also = {name: _also(generator.backbone, ids, limit, plain, some) for name, some in found.items()}
    return {
        "prompt_tokens": len(ids),
        "plain": {"tokens": told, **_times(plain)},
        **_side(generator.backbone, ids, limit, plain, ours, judged=True),
        "loops": repeats_ngram(told, LOOP),
        **({"also": also} if also else {}),
    }


def _tried(answer: Answer, ids: list[int], limit: int) -> Timed | str:
    """What a further side makes of it, or what went wrong: the bench goes on."""
    try:
        return answer(ids, limit)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]


def _also(backbone: Backbone, ids: list[int], limit: int, plain: Sequence[Timed], some: Sequence[Timed | str]) -> Row:
    """What a row has of a further side. In half precision its differences are not judged: `verify` is for that."""
    answers = [one for one in some if isinstance(one, Timed)]
    if len(answers) < len(some):
        return {"failed": next(one for one in some if isinstance(one, str))}
    return _side(backbone, ids, limit, plain, answers, judged=backbone.dtype == torch.float32)


def _side(
    backbone: Backbone, ids: list[int], limit: int, plain: Sequence[Timed], ours: Sequence[Timed], *, judged: bool
) -> Row:
    """What a row has of a side beside the plain one."""
    a, b = _differing(plain, ours)
    difference: Row | None = None if a.tokens == b.tokens else {"kind": None}
    if judged:
        parting = Judge(backbone).parting(ids, a.tokens, b.tokens, max_new_tokens=limit, temperature=0)
        difference = parting.row() if parting else None
    counts = {name: b.counts[name] for name in COUNTS}
    return {"ours": {"tokens": b.tokens, **_times(ours)}, **counts, "difference": difference}


def _differing(plain: Sequence[Timed], ours: Sequence[Timed]) -> tuple[Timed, Timed]:
    """The first pair of repetitions that differs, or the first one."""
    pairs = list(zip(plain, ours, strict=True))
    return next((pair for pair in pairs if pair[0].tokens != pair[1].tokens), pairs[0])


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
    return Timed(tokens, {"seconds": end - start, "prefill": first[0] - start}, {})


def answer_ours(generator: Generator, ids: list[int], limit: int) -> Timed:
    start = now(generator.backbone.device)
    output = generator.generate(ids, max_new_tokens=limit, temperature=0)
    end = now(generator.backbone.device)
    parts = {part: output.stats.seconds[part] for part in ("prefill", "draft", "verify")}
    counts = {name: getattr(output.stats, name) for name in COUNTS}
    return Timed(output.tokens, {"seconds": end - start, **parts}, counts)


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
