"""The proof that what drafts changes no token: question by question, for one backbone and one drafter.

Two comparisons, each on the same prompts, turn by turn:

- *greedy*: ours against the backbone's own `model.generate`;
- *drawn* at temperature 1, by seeds: ours with the drafter against ours without one.

Where two answers part, `judge.py` says whether rounding explains it. Plain answers are computed first, once for all
drafters (`kept.py`); rows go to a file with which a later call goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from ..errors import UserError
from ..heads.backbone import Backbone
from ..progress import Progress
from .dialogue import dialogue, encode, own_answer
from .generator import Generator
from .judge import Judge, verdict
from .kept import Kept
from .rows import Row, Rows, opened
from .setup import setup_of
from .suite import Question, choose

DRAWN = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
"""Draws from p itself, whatever the backbone's generation config cuts off."""
AGAINST = {"greedy": "model.generate", "drawn": "plain decoding with the same seeds"}


@dataclass
class ProofSettings:
    """The proof that what drafts changes no token of this backbone."""

    suite: str
    """File of questions: Spec-Bench style (turns), HumanEval, GSM8K, prompts or chats in .jsonl or .json, or a .txt
    with a prompt a line; or `shipped`: those of the shipped conversations that recipes hold out."""
    head: str = "none"
    """What drafts: the folder or Hub id of a head, the folder of a smaller model, ngram, suffix, exit:6 (its own first
    layers), int8, hybrid:NAME, or none (plain decoding in our loop)."""
    tree: str | None = None
    """Form of the drafts, such as chain:4 or dynamic:4x4x8 (depth, children of a node, nodes in all); auto takes what
    gives the most tokens a second. Without it, what `headstart tune` chose for the head here, else the usual form."""
    out: Path | None = None
    """File of finished answers, JSON lines; the same command goes on with what is there."""
    every: int = 1
    """Ask every K-th question only."""
    limit: int = 20
    """Ask this many questions at most, with all of their turns."""
    draws: int | None = None
    """Ask this many of them at temperature 1, too, spread evenly; without it, all of them."""
    max_new_tokens: int = 64
    """Stop each answer after this many tokens."""
    seed: int = 0
    """Seed of the draws; question in row n of the file has seed + n."""
    compile: bool = False
    """Run rounds through torch.compile; the first ones take long, and what cannot be compiled goes on without."""
    raw: bool = False
    """Ask the texts as they stand, without the chat template."""
    restart: bool = False
    """Throw away the answers in that file."""

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("limit", 1), ("max_new_tokens", 1), ("draws", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"{name} is {value}; it has to be at least {least}")


class Job(NamedTuple):
    """One question, asked in one way."""

    question: Question
    seed: int | None
    """None: greedy."""

    @property
    def kind(self) -> str:
        return "greedy" if self.seed is None else "drawn"

    @property
    def key(self) -> str:
        return f"{self.question.key}-{self.kind}"

    def options(self, limit: int) -> dict[str, Any]:
        asked = {"do_sample": False} if self.seed is None else {**DRAWN, "seed": self.seed}
        return {**asked, "max_new_tokens": limit}


class Proof:
    """Compares a drafter's answers with plain ones."""

    def __init__(self, backbone: Backbone, drafter: Any, settings: ProofSettings) -> None:
        self.backbone, self.settings = backbone, settings
        self.generator = Generator(backbone, drafter, tree=settings.tree, compile=settings.compile)
        self.plain = Generator(backbone)
        self.judge, self.kept = Judge(backbone), Kept(backbone)

    def rows(self, job: Job, compare: bool = True) -> list[Row]:
        """A row for each turn; without `compare`, plain answers are made and kept, and nothing else."""

        def answer(ids: list[int], limit: int) -> tuple[Row, list[int]]:
            plain = self._plain(job, ids, limit)
            return self._compared(job, ids, limit, plain) if compare else {}, plain

        found = dialogue(self.backbone, job.question, self.settings.max_new_tokens, self.settings.raw, answer)
        return [{**row, "key": job.key, "kind": job.kind, "seed": job.seed} for row in found]

    def _plain(self, job: Job, ids: list[int], limit: int) -> list[int]:
        options = job.options(limit)
        if job.seed is None:
            return self.kept.tokens(ids, options, lambda: own_answer(self.backbone, ids, limit))
        return self.kept.tokens(ids, options, lambda: self.plain.generate(ids, **options).tokens, own=True)

    def _compared(self, job: Job, ids: list[int], limit: int, plain: list[int]) -> Row:
        output = self.generator.generate(ids, **job.options(limit))
        parting = self.judge.parting(ids, plain, output.tokens, **job.options(limit))
        counts = {"rounds": output.stats.rounds, "accepted": sum(output.stats.accepted)}
        return {
            "prompt_tokens": len(ids),
            "tokens": len(plain),
            **counts,
            "parting": parting.row() if parting else None,
        }


def prove(backbone: Backbone, drafter: Any, questions: Sequence[Question], settings: ProofSettings) -> list[Row]:
    """The rows of all answers; those that `settings.out` holds are taken from there.

    Args:
        drafter: what `Generator` takes; `settings.head` is only its name.
        questions: of a suite; `settings.every` and `settings.limit` choose among them.

    Raises:
        UserError: a question cannot be asked, the head belongs to another backbone, or the file holds rows of other
            settings (both values are named) or is in use.
    """
    chosen = choose(questions, settings.every, settings.limit)
    for question in chosen:  # whatever is wrong with one is told before any work
        encode(backbone, question, question.turns[0], settings.raw)
    jobs = _jobs(chosen, settings)
    proof = Proof(backbone, drafter, settings)
    asked = {name: getattr(settings, name) for name in ("head", "tree", "max_new_tokens", "raw", "compile")}
    with _opened(settings, {**setup_of(backbone, drafter, **asked), "seed": settings.seed}) as store:
        missing = [job for job in jobs if job.key not in store.of]
        for job in Progress(len(missing), "questions", "plain answers", enabled=bool(missing)).over(missing):
            proof.rows(job, compare=False)
        with Progress(len(jobs), "questions", "compared", done=len(jobs) - len(missing)) as progress:
            for job in missing:
                store.add(proof.rows(job))
                progress.note(verdict=verdict(partings(row for job in jobs for row in store.of.get(job.key, ()))))
                progress.advance()
        return [row for job in jobs for row in store.of[job.key]]


def _jobs(asked: Sequence[Question], settings: ProofSettings) -> list[Job]:
    """All questions greedily, then those that are drawn."""
    draws = len(asked) if settings.draws is None else min(settings.draws, len(asked))
    drawn = [asked[k * len(asked) // draws] for k in range(draws)]
    greedy = [Job(question, None) for question in asked]
    return [*greedy, *(Job(question, settings.seed + question.row) for question in drawn)]


@contextmanager
def _opened(settings: ProofSettings, setup: dict[str, Any]) -> Iterator[Rows]:
    with TemporaryDirectory() as folder:
        out = settings.out or Path(folder) / "rows.jsonl"
        with opened(out, out.with_name(f"{out.name}.settings.json"), setup, settings.restart) as store:
            yield store


# -- what was found --------------------------------------------------------------------------------------------------


def partings(rows: Any) -> list[dict[str, Any] | None]:
    """Where the answers of some rows part; None for each that is equal."""
    return [row["parting"] for row in rows if "skipped" not in row]


def told(rows: Sequence[Row]) -> tuple[str, int]:
    """What was found, as text, and the exit code: 1 where a difference is a real one.

    Raises:
        UserError: nothing could be compared.
    """
    if not partings(rows):
        raise UserError(f"nothing could be compared: {rows[0]['skipped'] if rows else 'no question'}")
    lines = [line for kind in AGAINST for line in _about(kind, [row for row in rows if row["kind"] == kind])]
    lines.append(f"verdict: {verdict(partings(rows))}")
    return "\n".join(lines), 1 if any(one and one["kind"] == "mismatch" for one in partings(rows)) else 0


def _about(kind: str, rows: list[Row]) -> Iterator[str]:
    answers = [row for row in rows if "skipped" not in row]
    if answers:
        tokens, rounds, accepted = (sum(row[name] for row in answers) for name in ("tokens", "rounds", "accepted"))
        equal = sum(row["parting"] is None for row in answers)
        questions = len({row["key"] for row in answers})
        yield (
            f"{kind}: {equal:,} of {len(answers):,} answers to {questions:,} questions ({tokens:,} tokens) are those "
            f"of {AGAINST[kind]}; {1 + accepted / max(rounds, 1):.2f} tokens a round"
        )
    for row in rows:
        where = f"question {row['question']}, turn {row['turn']}"
        if "skipped" in row:
            yield f"  not asked: {where}: {row['skipped']}"
        elif row["parting"]:
            yield f"  {where}, {_parted(row['parting'])}"


def _parted(one: dict[str, Any]) -> str:
    """`step 33: tie, token 7 where plain has 9; gap 3.1e-05 of 1.0e-04 that rounding explains, margin 2.9e-05`"""
    said = f"step {one['step']}: {one['kind']}, {_token(one['ours'])} where plain has {_token(one['plain'])}"
    if one["allowed"] is None:
        return said
    gap = "one of them is ruled out" if one["gap"] is None else f"gap {one['gap']:.2g}"
    margin = "" if one["margin"] is None else f"; the two best are {one['margin']:.2g} apart"
    return f"{said}; {gap}, of {one['allowed']:.2g} that rounding explains{margin}"


def _token(token: int | None) -> str:
    return "the end" if token is None else f"token {token}"
