"""The bench under load: engines and what transformers offers, with so many clients or requests at random times.

The first turn of each question is asked. Questions come in stretches; in each, all sides take their turn, who begins
changes from stretch to stretch, and what a side did with a stretch is stored whole, so that an interrupted bench goes
on with the next. Each side has the machine to itself and starts and ends a stretch empty.

Sides: `alone` (our loop without drafts, one row: what all answers are compared with), `generate` of transformers (in
batches, where there are several clients), its `lookup` and `assisted` generation (one row), `peer` functions (one
row), `plain` (an engine without drafts), `engine` (with the drafter), and further ones (others.py). In the folder:
`load.jsonl` and `load.json` (rows and what they depend on), `load_report.json` and `load.html` (load_report.py,
load_page.py).
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch

from ..errors import UserError
from ..files import text_hash
from ..heads.backbone import Backbone
from ..progress import Progress
from .bench import BenchSettings, threads
from .costs import CostModel
from .dialogue import encode
from .engine import Engine
from .generator import Generator
from .intake import Intake
from .judge import Judge
from .load_page import write_load
from .load_report import Report
from .load_settings import Load, LoadSettings
from .machine import machine
from .others import about, check, is_rival, parted, rival_of
from .peak import peak
from .rivals import Rival, assisted, batched, lookup, peer
from .rows import Row, Rows, opened
from .ruling import MATCH
from .setup import setup_of
from .suite import Question, choose
from .traffic import Ask, arrivals, counted, served
from .tree import Dynamic
from .tune import TOP_KS, largest
from .tuned import costs_of

WARM_UP_TOKENS = 16


class Unit(NamedTuple):
    """What is measured, and stored, at once."""

    side: str
    load: Load
    temperature: float
    repeat: int
    number: int
    """Of the stretch."""
    questions: list[Question]

    @property
    def key(self) -> str:
        content = text_hash("".join(question.key for question in self.questions))[:12]
        return f"{self.side} {self.load} t{self.temperature:g} r{self.repeat} s{self.number} {content}"


class Bench:
    """All that a measurement needs. Raises as `under_load`."""

    def __init__(
        self, backbone: Backbone, drafter: Any, assistant: Any, asked: Sequence[Question], settings: BenchSettings,
        load: LoadSettings, others: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.backbone, self.settings, self.load, self.assistant = backbone, settings, load, assistant
        encoded = {one.key: encode(backbone, one, one.turns[0], settings.raw) for one in asked}
        self.ids = {key: ids for key, ids in encoded.items() if len(ids) < backbone.max_positions}
        self.asked = [one for one in asked if one.key in self.ids]
        if not self.asked:
            raise UserError(f"no question fits into the {backbone.max_positions} positions of {backbone.name}")
        self.left_out = len(asked) - len(self.asked)
        self.intakes = {"plain": Intake(backbone, None, None, MATCH)}
        if drafter is not None:
            self.intakes["engine"] = Intake(backbone, drafter, settings.tree, MATCH)
        for name, one in others.items():
            self.intakes[name] = Intake(backbone, one, parted(name)[1], MATCH)
        self.rivals: dict[str, Rival] = {
            **({"assisted": assisted(backbone, assistant)} if assistant is not None else {}),
            **{f"peer {name}": peer(backbone, name) for name in load.peer},
            "lookup": lookup(backbone),
            **{name: rival_of(backbone, name) for name in settings.also if is_rival(name)},
        }
        self.judge = Judge(backbone)
        self._warm: set[str] = set()

    def units(self) -> Iterator[Unit]:
        """In the order in which they are measured."""
        size = self.load.stretch
        for number, start in enumerate(range(0, len(self.asked), size)):
            for repeat in range(self.settings.repeats):
                for temperature in self.load.temperatures:
                    for side, one in _order(self._pairs(self.load.loads), number + repeat):
                        yield Unit(side, one, temperature, repeat, number, self.asked[start : start + size])

    def _pairs(self, loads: Sequence[Load]) -> list[tuple[str, Load]]:
        """`alone` first: the others are compared with it."""
        part, one = [*self.load.taking_part, *self.settings.also], Load(1, None)
        singles = [side for side in self.rivals if side in part or side.startswith("peer ")]
        found = [("alone", one), *((side, one) for side in singles)]
        closed = [load for load in loads if load.rate is None]
        if "generate" in part:
            found += [("generate", load) for load in dict.fromkeys([one, *closed])]
        return found + [(side, load) for load in loads for side in self.intakes if side in part]

    def asks(self, unit: Unit) -> list[Ask]:
        found = []
        for question in unit.questions:
            ids = self.ids[question.key]
            limit = min(self.settings.max_new_tokens, self.backbone.max_positions - len(ids))
            found.append(Ask(ids, {"max_new_tokens": limit, **self._drawn(unit.temperature, question)}))
        return found

    def _drawn(self, temperature: float, question: Question) -> dict[str, Any]:
        if not temperature:
            return {"do_sample": False}
        seed = self.load.seed * 1_000_003 + question.row
        return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0, "seed": seed}

    def measure(self, unit: Unit, alone: dict[str, list[int]], tick: Callable[[], None]) -> list[Row]:
        """The rows of a unit.

        Args:
            alone: by question key, the tokens that it gets alone at this temperature.
        """
        asks = self.asks(unit)
        if unit.side not in self._warm and self.settings.warm_up:
            self._warm.add(unit.side)
            short = [ask._replace(options={**ask.options, "max_new_tokens": WARM_UP_TOKENS}) for ask in asks]
            self._answers(unit, short[: self.settings.warm_up], lambda: None)
        with peak(self.backbone.device) as taken:
            begun = perf_counter()
            found, slots = self._answers(unit, asks, tick)
            seconds = max((row["came"][-1][0] for row in found if row.get("came")), default=perf_counter() - begun)
        about = {
            "key": unit.key, "turns": len(found), "side": unit.side, "load": str(unit.load), "repeat": unit.repeat,
            "temperature": unit.temperature, "stretch_seconds": seconds, "slot_bytes": slots, "peak_bytes": taken.bytes,
        }  # fmt: skip
        rows = []
        for place, (question, ask, row) in enumerate(zip(unit.questions, asks, found, strict=True), 1):
            told = {"question": question.id, "of": question.key, "group": question.group, "category": question.category}
            same = self._compared(unit, ask, row, alone.get(question.key))
            rows.append({**about, "turn": place, **told, "prompt_tokens": len(ask.ids), **row, **same})
        return rows

    def _answers(self, unit: Unit, asks: Sequence[Ask], tick: Callable[[], None]) -> tuple[list[Row], int]:
        """The answers, and what was reserved for keys and values beforehand."""
        if unit.side == "alone":
            return _alone(Generator(self.backbone), asks, tick), 0
        if unit.side in self.intakes:
            intake, rows = self.intakes[unit.side], unit.load.clients or self.load.max_rows
            longest = max(len(ask.ids) + ask.options["max_new_tokens"] for ask in asks) + intake.width if asks else 1
            engine = Engine.of(intake, rows, rows * longest)
            times = arrivals(len(asks), unit.load.rate, self.load.seed + unit.number) if unit.load.rate else None
            return served(engine, asks, clients=unit.load.clients, times=times, tick=tick), engine.bytes
        rival = self.rivals.get(unit.side) or batched(self.backbone, unit.load.clients or 1)
        try:
            return rival(asks, tick), 0
        except Exception as error:  # of others: the bench goes on, and says what went wrong
            return [{"asked": 0.0, "failed": f"{type(error).__name__}: {error}"[:200]} for _ in asks], 0

    def _compared(self, unit: Unit, ask: Ask, row: Row, alone: list[int] | None) -> Row:
        """Whether the answer is the one that the request gets alone; in fp32, what the difference is."""
        ours = unit.side in self.intakes
        if "tokens" not in row or alone is None or unit.side == "alone" or (unit.temperature and not ours):
            return {"same": None, "difference": None}
        if row["tokens"] == alone:
            return {"same": True, "difference": None}
        exact = self.backbone.dtype == torch.float32
        parting = self.judge.parting(ask.ids, alone, row["tokens"], **ask.options) if exact else None
        return {"same": False, "difference": parting.row() if parting else None}

    def costs(self) -> CostModel | None:
        """What rounds cost, as `auto` and `tune` know it; measured within a minute where it is not known."""
        intake, rows = self.intakes.get("engine"), sorted({load.clients for load in self.load.loads if load.clients})
        if intake is None or not rows:
            return None
        make, depth = largest(self.backbone, intake.drafter)
        with intake.evaluating():
            return costs_of(self.backbone, intake.drafter, make(), Dynamic(depth, max(TOP_KS), 24), rows)


def under_load(
    backbone: Backbone, drafter: Any, questions: Sequence[Question], settings: BenchSettings, load: LoadSettings,
    *, others: Mapping[str, Any] | None = None, assistant: Any = None, earlier: Report | None = None, command: str = "",
) -> Report:  # fmt: skip
    """Measure what has no rows in `settings.out` yet, and write the report of all.

    Args:
        drafter: what `Engine` takes; `settings.head` is only its name.
        questions: of a suite; `settings.every` and `settings.limit` choose among them.
        others: what the drafters are that `settings.also` names: an engine each.
        assistant: of assisted generation: a `Backbone`, or a text such as exit:6.
        earlier: a report that the page compares this one with.

    Raises:
        UserError: a question cannot be asked, the folder holds rows of another setup or is in use, or
            compiled rounds are asked for.
    """
    if settings.compile:
        raise UserError("compile: engines run no compiled rounds; bench without --concurrency and --rate does")
    with threads(settings.threads):
        check(settings.also, others or {})
        asked = choose(questions, settings.every, settings.limit)
        made = Bench(backbone, drafter, assistant, asked, settings, load, others or {})
        setup = {
            **_setup(backbone, drafter, settings, load),
            **about(backbone, settings.also, others or {}, settings.raw),
        }
        units = list(made.units())
        costs = made.costs()
        with opened(settings.out / "load.jsonl", settings.out / "load.json", setup, settings.restart) as store:
            try:
                _run(made, units, store)
            finally:  # an interrupted one has a report of what is there
                rows = [row for unit in units for row in store.of.get(unit.key, ())]
                facts = {"units": len(units), "measured": sum(unit.key in store.of for unit in units)}
                if rows:
                    report = write_load(
                        settings.out, rows, setup, costs, {**facts, "left_out": made.left_out}, command, earlier
                    )
                if facts["measured"] < len(units):
                    said = f"{facts['measured']} of {len(units)} stretches are measured; the same command goes on"
                    warnings.warn(f"{said}: {settings.out / 'load.html'}" if rows else said, stacklevel=2)
        return report


def assistant_of(drafter: Any, load: LoadSettings) -> Any:
    """What assisted generation drafts with, of what may be a drafter here: a smaller model, or the first layers.

    Raises:
        UserError: it was asked for, and cannot draft there.
    """
    if isinstance(drafter, Backbone) or (isinstance(drafter, str) and drafter.startswith("exit:")):
        return drafter
    if load.assistant:
        raise UserError(f"assistant: {load.assistant} cannot assist generate; a smaller model or exit:6 can")
    return None


def _run(made: Bench, units: Sequence[Unit], store: Rows) -> None:
    total, left = (
        sum(len(unit.questions) for unit in some) for some in (units, [one for one in units if one.key not in store.of])
    )
    alone: dict[tuple[float, int], dict[str, list[int]]] = {}
    with Progress(total, "answers", "bench", done=total - left) as progress:
        for unit in units:
            if unit.key not in store.of:
                progress.note(side=unit.side, load=str(unit.load))
                texts = alone.get((unit.temperature, unit.number), {})
                store.add(made.measure(unit, texts, progress.advance))
            if unit.side == "alone":
                texts = {row["of"]: row["tokens"] for row in store.of[unit.key]}
                alone[unit.temperature, unit.number] = texts


def _order(pairs: Sequence[tuple[str, Load]], turn: int) -> list[tuple[str, Load]]:
    """The first one, and then the others, beginning with another one each time."""
    start = turn % max(1, len(pairs) - 1)
    rest = pairs[1:]
    return [pairs[0], *rest[start:], *rest[:start]]


def _alone(generator: Generator, asks: Sequence[Ask], tick: Callable[[], None]) -> list[Row]:
    """One after the other in our own loop."""
    begun, rows = perf_counter(), list[Row]()
    for ids, options in asks:
        asked, came, tokens = perf_counter() - begun, list[list[float]](), list[int]()
        for piece in generator.stream(ids, **options):
            if piece.tokens:
                tokens += piece.tokens
                came.append([round(perf_counter() - begun, 6), len(piece.tokens)])
            stats = piece.stats
        assert stats is not None, "the last piece has the stats"
        rows.append({"tokens": tokens, "asked": round(asked, 6), "came": came, **counted(stats)})
        tick()
    return rows


def _setup(backbone: Backbone, drafter: Any, settings: BenchSettings, load: LoadSettings) -> dict[str, Any]:
    asked = {name: getattr(settings, name) for name in ("head", "tree", "max_new_tokens", "raw")}
    own = {name: getattr(load, name) for name in ("assistant", "seed", "max_rows")}
    return {**setup_of(backbone, drafter, **asked), **own, **machine(), "python": platform.python_version()}
