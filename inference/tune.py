"""`headstart tune`: the form of drafts for this head, this machine and these prompts.

Prompts are answered plainly once, and what the drafter would have drafted at every place is recorded (record.py). On
that, and on the measured costs (timing.py), every setting is replayed: expected tokens a second are the tokens over the
sum of T_verify(nodes) + T_draft(depth) of its rounds. The best of them, plain decoding and `auto` are then run in turn
on some of the prompts, and the fastest is kept as the default tree of the head.

In the folder of a tuning: `texts.jsonl` (a row an answer) and `runs.jsonl` (a row an answer of the settings that were
run); an interrupted one goes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UserError
from ..files import cache_folder, text_hash
from ..heads.backbone import Backbone
from ..heads.base import DraftHead
from ..progress import Progress
from .best_static import best_static
from .costs import CostModel, Costs
from .dialogue import dialogue, encode
from .drafter import HeadDrafter
from .drafters import Factory, drafter_factory
from .generator import Generator
from .machine import machine
from .record import RANKS, Moment, Replayed, moments, replay
from .rows import Row, opened
from .setup import setup_of
from .suite import Question
from .tree import Auto, Chain, Dynamic, Gain, Shape, parse_shape
from .tuned import costs_of, keep, remembered

DEPTH = 6  # of what is recorded
TOP_KS = (3, 4)
STATIC_NODES = (2, 4, 6, 8, 12, 16)
DYNAMIC_NODES = (3, 4, 6, 8, 10, 12, 16)
LOADS = (1, 2, 4, 8)  # rows that costs are measured for
PLAIN, AUTO = "none", "auto"


@dataclass
class TuneSettings:
    """The form of drafts that is fastest for these prompts on this machine."""

    suite: str | None = None
    """File of questions: Spec-Bench style (turns), HumanEval, GSM8K, prompts or chats in .jsonl or .json, or a .txt
    with a prompt a line; or `shipped`: those of the shipped conversations that recipes hold out."""
    prompts: str | None = None
    """The same: a file of prompts of your own."""
    head: str = "ngram"
    """What drafts: the folder or Hub id of a head, the folder of a smaller model, ngram, suffix, exit:6 (its own first
    layers), int8, hybrid:NAME."""
    limit: int = 100
    """Ask this many prompts at most, spread over the file."""
    max_new_tokens: int = 128
    """Stop each answer after this many tokens."""
    temperature: float = 0.0
    """Of the answers; 0 is greedy."""
    settings: list[str] = field(default_factory=list)
    """The forms to choose among, such as chain:2 dynamic:3x3x6; without them, chains, static and dynamic trees of all
    sizes that could pay."""
    confirm: int = 3
    """Run this many of the best settings, beside plain decoding and auto."""
    runs: int = 24
    """On this many of the prompts."""
    rows: int = 8
    """Requests at once, up to which it is told what would pay."""
    out: Path | None = None
    """Folder for what was recorded and run, with which the same command goes on; without it, one in the cache."""
    raw: bool = False
    """Ask the texts as they stand, without the chat template."""
    save: bool = True
    """Keep the best setting as the default tree of the head on this machine."""
    json: bool = False
    """Print one JSON object in place of tables."""
    restart: bool = False
    """Throw away what an earlier tuning recorded."""

    def __post_init__(self) -> None:
        for name, least in (("limit", 1), ("max_new_tokens", 2), ("confirm", 1), ("runs", 1), ("rows", 1)):
            if getattr(self, name) < least:
                raise UserError(f"{name} is {getattr(self, name)}; it has to be at least {least}")
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature is {self.temperature}; it has to be 0 (greedy) or above")
        for text in self.settings:
            if isinstance(parse_shape(text), Gain | Auto):
                raise UserError(f"settings: {text} has no form that could be replayed; auto is always run")
        if (self.suite is None) == (self.prompts is None):
            raise UserError("tune asks real prompts: give --suite FILE or --prompts FILE, and one of them only")


class Setting(NamedTuple):
    """One form of drafts and what it is expected to do."""

    name: str
    shape: Shape | None
    replayed: Replayed
    expected: float
    """Tokens a second of decoding, by recorded acceptance and measured costs."""


class Run(NamedTuple):
    """One answer of a setting that was run."""

    group: str
    tokens: int
    seconds: float
    """In all."""
    prefill: float
    """Of them, for the prompt and the first token."""


class Tuning(NamedTuple):
    """All that was found."""

    texts: list[Row]
    """An answer each."""
    costs: CostModel
    settings: list[Setting]
    """The fastest first, as expected; plain decoding is one of them."""
    runs: dict[str, list[Run]]
    """By setting that was run, each answer; those of one place are to the same prompt."""
    chosen: str
    place: Path | None
    """Where the choice was kept; None where it was not to be, or nobody would find it again."""

    @property
    def plain(self) -> Setting:
        return next(one for one in self.settings if one.shape is None)


def tune(backbone: Backbone, drafter: Any, questions: Sequence[Question], settings: TuneSettings) -> Tuning:
    """Record, replay, run, choose.

    Args:
        drafter: what `Generator` takes; `settings.head` is only its name.
        questions: of a suite; `settings.limit` of them are asked.

    Raises:
        UserError: there is nothing to draft with, a question cannot be asked, or the folder is in use or holds another
            tuning.
    """
    if drafter is None:
        raise UserError("tune is for what drafts: --head names a head, a model or a lookup")
    asked = spread(questions, settings.limit)
    for question in asked:  # whatever is wrong with one is told before any work
        encode(backbone, question, question.turns[0], settings.raw)
    make, depth = largest(backbone, drafter)
    candidates([], settings, isinstance(drafter, DraftHead), depth)
    loads = sorted({*(rows for rows in LOADS if rows < settings.rows), settings.rows, 1})
    facts = _facts(backbone, drafter, settings)
    folder = settings.out or cache_folder() / "tuning" / text_hash(str(sorted(facts.items())))[:16]
    anew = settings.restart or not (folder / "texts.jsonl").exists()
    costs = costs_of(backbone, drafter, make(), Dynamic(depth, max(TOP_KS), 24), loads, anew=anew)
    texts = _recorded(backbone, make, depth, asked, settings, folder, facts)
    recorded = [row["moments"] for row in texts]
    found = ranked(recorded, candidates(recorded, settings, isinstance(drafter, DraftHead), depth), costs.at(1))
    best = [one.name for one in found if one.shape is not None][: settings.confirm]
    runs = _run(backbone, drafter, spread(asked, settings.runs), settings, folder, facts, [PLAIN, *best, AUTO])
    chosen = choice(runs)
    survival = next(one.replayed for one in found if one.shape is not None)
    known = {
        "tree": AUTO if chosen == PLAIN else chosen,  # which decodes plainly, and sees where that changes
        "survival": [count / max(1, survival.rounds) for count in survival.accepted],
        "speedup": speed(runs[chosen]) / speed(runs[PLAIN]),
    }
    place = keep(backbone, drafter, **known) if settings.save and remembered(drafter) else None
    return Tuning(texts, costs, found, runs, chosen, place)


def spread(questions: Sequence[Question], count: int) -> list[Question]:
    """So many of them, evenly over all."""
    count = min(count, len(questions))
    return [questions[place * len(questions) // count] for place in range(count)]


def speed(runs: Sequence[Run]) -> float:
    """Tokens a second, prefill included."""
    return sum(run.tokens for run in runs) / max(sum(run.seconds for run in runs), 1e-9)


def choice(runs: dict[str, list[Run]], near: float = 0.98) -> str:
    """The fastest that was run; `auto` where it is as fast up to noise, since it follows the text and the load."""
    fastest = max(runs, key=lambda name: speed(runs[name]))
    if fastest != PLAIN and speed(runs[AUTO]) >= near * speed(runs[fastest]):
        return AUTO
    return fastest


# -- what is recorded ------------------------------------------------------------------------------------------------


def largest(backbone: Backbone, drafter: Any) -> tuple[Factory, int]:
    """What makes a drafter for recording, and how deep it drafts."""
    if isinstance(drafter, DraftHead):
        depth = min(DEPTH, drafter.max_depth or DEPTH)
        return drafter_factory(backbone, drafter, Dynamic(depth, max(TOP_KS), 24)), depth
    try:
        return drafter_factory(backbone, drafter, Chain(DEPTH)), DEPTH
    except UserError:  # it grows forms of its own
        return drafter_factory(backbone, drafter, None), DEPTH


def _facts(backbone: Backbone, drafter: Any, settings: TuneSettings) -> dict[str, Any]:
    asked: dict[str, Any] = {
        "head": settings.head,
        "tree": PLAIN,
        "max_new_tokens": settings.max_new_tokens,
        "raw": settings.raw,
    }
    return {**setup_of(backbone, drafter, **asked), **machine(), "temperature": settings.temperature}


def _recorded(
    backbone: Backbone,
    make: Factory,
    depth: int,
    asked: Sequence[Question],
    settings: TuneSettings,
    folder: Path,
    facts: dict[str, Any],
) -> list[Row]:
    """A row for each answer."""
    plain, head = Generator(backbone), type(make()) is HeadDrafter
    options = _options(settings)

    def answer(ids: list[int], limit: int) -> tuple[Row, list[int]]:
        output = plain.generate(ids, **{**options, "max_new_tokens": limit})
        found = moments(backbone, make, ids, output.tokens, depth, TOP_KS if head else ())
        seconds = {name: output.stats.seconds[name] for name in ("prefill", "verify")}
        return {"prompt_tokens": len(ids), "tokens": len(output.tokens), **seconds, "moments": found}, output.tokens

    with opened(folder / "texts.jsonl", folder / "texts.json", facts, settings.restart) as store:
        with Progress(len(asked), "prompts", "recorded", done=sum(one.key in store.of for one in asked)) as progress:
            for question in asked:
                if question.key not in store.of:
                    store.add(dialogue(backbone, question, settings.max_new_tokens, settings.raw, answer))
                    progress.advance()
        rows = [row for question in asked for row in store.of[question.key] if "skipped" not in row]
    if not any(row["moments"] for row in rows):
        raise UserError("every answer has one token or none: there is nothing to draft for")
    return rows


def _options(settings: TuneSettings) -> dict[str, Any]:
    drawn = {"temperature": settings.temperature, "seed": 0} if settings.temperature else {"do_sample": False}
    return {**drawn, "max_new_tokens": settings.max_new_tokens}


# -- settings --------------------------------------------------------------------------------------------------------


def candidates(texts: Sequence[Sequence[Moment]], settings: TuneSettings, head: bool, depth: int) -> list[Shape | None]:
    """The forms that are compared, plain decoding (None) first.

    Raises:
        UserError: one that was asked for is none that this drafter grows, or was not recorded.
    """
    if settings.settings:
        asked = [parse_shape(text) for text in settings.settings]
        for shape in asked:
            if not isinstance(shape, Chain) and not head:
                raise UserError(f"settings: {shape} is for heads; {settings.head} is replayed in chains")
            if isinstance(shape, Dynamic) and shape.top_k not in TOP_KS:
                known = " and ".join(map(str, TOP_KS))
                raise UserError(f"settings: {shape} has {shape.top_k} children a node; {known} are recorded")
            if shape.depth > depth:
                raise UserError(f"settings: {shape} is deeper than the {depth} depths that are recorded")
        return [None, *asked]
    shapes: list[Shape | None] = [None, *(Chain(deep) for deep in range(1, depth + 1))]
    if head:
        shapes += statics(texts, depth)
        shapes += [
            Dynamic(deep, top_k, nodes)
            for deep in range(2, depth + 1)
            for top_k in TOP_KS
            for nodes in DYNAMIC_NODES
            if deep < nodes <= top_k + (deep - 1) * top_k**2
        ]
    return shapes


def ranked(texts: Sequence[Sequence[Moment]], shapes: Sequence[Shape | None], costs: Costs) -> list[Setting]:
    """All settings by what they are expected to do on recorded texts, the fastest first."""
    found = [_setting(texts, shape, costs) for shape in dict.fromkeys(shapes)]
    return sorted(found, key=lambda one: -one.expected)


def _setting(texts: Sequence[Sequence[Moment]], shape: Shape | None, costs: Costs) -> Setting:
    replayed = replay(texts, shape)
    return Setting(PLAIN if shape is None else str(shape), shape, replayed, expected_speed(replayed, costs))


def expected_speed(replayed: Replayed, costs: Costs) -> float:
    """Tokens a second: those of a round, 1 + accepted drafts, over T_verify(nodes) + T_draft(depth)."""
    rounds = max(1, replayed.rounds)
    nodes, depth = 1 + replayed.nodes / rounds, replayed.depths / rounds
    return replayed.acceptance_length / costs.of(nodes, depth)


def statics(texts: Sequence[Sequence[Moment]], depth: int) -> list[Shape | None]:
    """The static trees of a few sizes that accept most by the recorded ranks."""
    rates = rates_of(texts, depth)
    while rates and not any(rates[-1]):
        rates.pop()
    return [best_static(rates, nodes) for nodes in STATIC_NODES] if rates else []


def rates_of(texts: Sequence[Sequence[Moment]], depth: int) -> list[list[float]]:
    """By depth and rank: how often the draft of this rank was right, given that those before it were."""
    rates = []
    for deep in range(depth):
        counts, total = [0] * RANKS, 0
        for text in texts:
            for place, moment in enumerate(text):
                ranks = moment["ranks"]
                if len(ranks) >= deep and place + deep < len(text) and deep < moment.get("room", DEPTH):
                    total += 1
                    if len(ranks) > deep:
                        counts[ranks[deep]] += 1
        rates.append([count / total for count in counts[:8]] if total else [0.0])
    return rates


# -- runs ------------------------------------------------------------------------------------------------------------


def _run(
    backbone: Backbone,
    drafter: Any,
    asked: Sequence[Question],
    settings: TuneSettings,
    folder: Path,
    facts: dict[str, Any],
    names: Sequence[str],
) -> dict[str, list[Run]]:
    """What each setting really takes: question by question in turn, another one first each time."""
    made: dict[str, Callable[..., Any]] = {}
    for name in names:
        plain = name == PLAIN
        made[name] = Generator(backbone, None if plain else drafter, tree=None if plain else name).generate
    options, place = _options(settings), 0

    def answer(ids: list[int], limit: int) -> tuple[Row, list[int]]:
        nonlocal place
        row, given = {}, {}
        for name in [*names[place % len(names) :], *names[: place % len(names)]]:
            output = made[name](ids, **{**options, "max_new_tokens": limit})
            stats = output.stats
            row[name] = [len(output.tokens), stats.total_seconds, stats.seconds["prefill"]]
            given[name] = output.tokens
        place += 1
        return {"runs": row}, given[PLAIN]

    facts = {**facts, "settings": list(names)}
    with opened(
        folder / "runs.jsonl", folder / "runs.json", facts, settings.restart or _others(folder, facts)
    ) as store:
        missing = [question for question in asked if question.key not in store.of]
        if missing:  # warms up
            ids = encode(backbone, missing[0], missing[0].turns[0], settings.raw)
            for name in names:
                made[name](ids, **{**options, "max_new_tokens": 16})
        with Progress(len(asked), "prompts", "run", done=len(asked) - len(missing)) as progress:
            for question in missing:
                store.add(dialogue(backbone, question, settings.max_new_tokens, settings.raw, answer))
                progress.advance()
        rows = [row for question in asked for row in store.of[question.key] if "skipped" not in row]
    return {name: [Run(row["group"], *row["runs"][name]) for row in rows] for name in names}


def _others(folder: Path, facts: dict[str, Any]) -> bool:
    """Whether the runs that are there are of other settings, since more was recorded meanwhile."""
    try:
        before = json.loads((folder / "runs.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool({**before, "settings": None} == {**facts, "settings": None} and before != facts)
