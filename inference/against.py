"""A bench against an earlier one: what got slower beyond noise.

Answers to the same questions are compared, side by side and load by load. A difference is told where it exceeds each of
three kinds of noise:

- between questions: the questions are drawn again and again, the same ones in both runs (a bootstrap);
- between repetitions: how far those of each run lie apart, as Student's t of their logarithms has it. One repetition
  tells nothing of that, so that with one a difference is said to be unknown, and not to be none;
- of the machine: all is taken relative to the time of transformers' `generate`, one request at a time, in the same
  repetition of the same run; and by as much as another side of transformers, whose code no change of ours touches,
  differs between the runs, nothing is told of ours.

Tokens a second are those of one stream, tokens / (end - asked), summed first; in a closed loop that is the throughput
over the number of clients.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from ..errors import UserError
from .latency import percentile

Report = dict[str, Any]
Answer = tuple[float, float | None, float | None, float]  # tokens; first, between, end in seconds
Name = tuple[str, str, float]  # side, load, temperature

DRAWS = 400
BAND = (2.5, 97.5)
LEAST = 0.03  # what is below this is not told, however sure it is
ENOUGH = 8  # answers in common, with less there is no telling
STUDENT = (4.30, 3.18, 2.78, 2.57, 2.45, 2.36)  # two-sided 95% for 2, 3, ... degrees of freedom; more are taken for 7
THEIRS = ("generate", "lookup", "assisted")  # sides of transformers
NAMES = ("load_report.json", "report.json")  # in the folder of a bench


Answers = dict[str, dict[int, Answer]]  # by question and repetition


class Change(NamedTuple):
    """One figure of one run: how many times as slow it is as before (above 1: slower), and the band of chance."""

    name: Name
    figure: str
    ratio: float
    low: float
    high: float
    repeated: bool = True
    """Whether both runs have repetitions, so that the band knows how far these lie apart."""

    @property
    def verdict(self) -> str:
        """slower, faster, same, or unknown."""
        slower, faster = self.low > 1 and self.ratio > 1 + LEAST, self.high < 1 and self.ratio < 1 - LEAST
        if not slower and not faster:
            return "same"
        return "unknown" if not self.repeated else "slower" if slower else "faster"


def read_report(path: Path) -> Report:
    """An earlier report: its JSON file, or the folder of the bench.

    Raises:
        UserError: there is none, or it holds no answers (one of an older version).
    """
    found = next((path / name for name in NAMES if (path / name).exists()), path) if path.is_dir() else path
    try:
        made = json.loads(found.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"against: {found}: no report of a bench can be read there ({error})") from None
    if not isinstance(made, dict) or not made.get("runs"):
        raise UserError(
            f"against: {found}: holds no answers that could be compared; run that bench again to write them"
        )
    return made


def changes(now: Report, before: Report) -> list[Change]:
    """All figures that both have; those of `generate`, one at a time, as they are, the others relative to it."""
    runs = [_runs(made) for made in (now, before)]
    found: list[Change] = []
    for name in sorted(runs[0].keys() & runs[1].keys(), key=lambda one: one[0] not in THEIRS):
        control = ("generate", "closed:1", name[2])
        pair = Pair(*(_common(name, *runs)), *(_common(control, *runs) if name != control else ({}, {})))
        if len(pair.now) >= ENOUGH:
            found += _changes(name, pair)
    drift = max((abs(math.log(one.ratio)) for one in found if one.name[0] in THEIRS and one.figure == SPEED
                 and one.name[:2] != ("generate", "closed:1")), default=0.0)  # fmt: skip
    wide = math.exp(drift)
    return [one if one.name[0] in THEIRS else one._replace(low=one.low / wide, high=one.high * wide) for one in found]


def told(now: Report, before: Report) -> str:
    """In words: what differs between the setups, what got slower, what got faster."""
    one, two = (made.get("setup", {}) for made in (before, now))
    differ = [key for key in sorted(one.keys() | two.keys()) if one.get(key) != two.get(key)]
    lines = [f"against a bench of {before.get('date', 'an unknown day')}"]
    lines += [f"  {key}: was {one.get(key)!r}, is {two.get(key)!r}" for key in differ]
    found = changes(now, before)
    if not found:
        return "\n".join([*lines, f"  nothing to compare: no side has {ENOUGH} answers in common with it"])
    for verdict in ("slower", "faster"):
        some = [one for one in found if one.verdict == verdict]
        lines += [f"{verdict} beyond noise:" if some else f"nothing {verdict} beyond noise", *map(_line, some)]
    if unknown := [one for one in found if one.verdict == "unknown"]:
        lines += ["cannot tell, as one of the runs has no repetitions (--repeats 3 in both shows how these differ):"]
        lines += map(_line, unknown)
    machine = [one for one in found if one.name[:2] == ("generate", "closed:1") and one.figure == SPEED]
    lines += [f"the machine, by generate alone: {one.ratio:.2f} times the time ({one.low:.2f} to {one.high:.2f})"
              for one in machine]  # fmt: skip
    return "\n".join(lines)


def _line(one: Change) -> str:
    side, load, temperature = one.name
    band = f"(noise {one.low:.2f} to {one.high:.2f})"
    return f"  {side}, {load}, temperature {temperature:g}: {one.figure} {one.ratio:.2f} times the time {band}"


# -- figures ---------------------------------------------------------------------------------------------------------

Figure = Callable[[Sequence[Answer]], float | None]
SPEED = "a token"


def _speed(answers: Sequence[Answer]) -> float | None:
    """Seconds a token, waiting and prefill included."""
    tokens = sum(one[0] for one in answers)
    return sum(one[3] for one in answers) / tokens if tokens else None


def _at(place: int, percent: int) -> Callable[[Sequence[Answer]], float | None]:
    return lambda answers: percentile([value for one in answers if (value := one[place]) is not None], percent)


FIGURES: dict[str, Figure] = {
    SPEED: _speed,
    **{f"{name} P{percent}": _at(place, percent)
       for place, name in ((1, "first token"), (2, "between tokens"), (3, "end")) for percent in (50, 90)},
}  # fmt: skip


class Pair(NamedTuple):
    """One side in both runs: the answers to the questions that both have, and those that show the machine's speed, if
    there are some."""

    now: Answers
    before: Answers
    machine_now: Answers
    machine_before: Answers

    def ratio(self, of: Figure) -> float | None:
        """The figure over that of before, in the machine's time."""
        one, two = _value(of, self.now, self.machine_now), _value(of, self.before, self.machine_before)
        return one / two if one and two else None

    def drawn(self, chance: random.Random) -> Pair:
        """The same with questions drawn at random."""
        machine, own = self.machine_now.keys(), self.now.keys()
        some = [chance.choices(sorted(keys), k=len(keys)) if keys else [] for keys in (own, machine)]
        parts = zip(self, (some[0], some[0], some[1], some[1]), strict=True)
        return Pair(*({str(place): answers[key] for place, key in enumerate(keys)} for answers, keys in parts))


def _changes(name: Name, pair: Pair) -> Iterator[Change]:
    for figure, of in FIGURES.items():
        ratio, chance = pair.ratio(of), random.Random(f"{name} {figure}")
        known = [one for one in (pair.drawn(chance).ratio(of) for _ in range(DRAWS)) if one is not None]
        low, high = (percentile(known, percent) for percent in BAND)
        if ratio is None or low is None or high is None:
            continue
        runs = [_by_repetition(of, *pair[place::2]) for place in (0, 1)]
        repeated = min(map(len, runs)) > 1
        wide = math.exp(_apart(*runs)) if repeated else 1.0
        yield Change(name, figure, ratio, min(low, ratio / wide), max(high, ratio * wide), repeated)


def _value(of: Figure, answers: Answers, machine: Answers) -> float | None:
    """The figure over all repetitions, in units of what the machine takes for a token where that is known."""
    found, unit = (figure([one for some in part.values() for one in some.values()]) if part else 1.0
                   for figure, part in ((of, answers), (_speed, machine)))  # fmt: skip
    return found / unit if found and unit else None


def _by_repetition(of: Figure, answers: Answers, machine: Answers) -> list[float]:
    """The logarithm of the figure in each repetition, in the machine's time in the same one where that is known."""
    found = []
    for repeat in sorted({repeat for some in answers.values() for repeat in some}):
        then = _only(machine, repeat)
        value = _value(of, _only(answers, repeat), then if then else machine)
        found += [math.log(value)] if value else []
    return found


def _apart(now: Sequence[float], before: Sequence[float]) -> float:
    """How far the means of two runs of the same may lie apart, by what their repetitions differ (95%)."""
    free = len(now) + len(before) - 2
    pooled = sum((value - fmean(run)) ** 2 for run in (now, before) for value in run) / free
    return STUDENT[min(free, len(STUDENT) + 1) - 2] * math.sqrt(pooled * (1 / len(now) + 1 / len(before)))


def _only(answers: Answers, repeat: int) -> Answers:
    return {key: {repeat: some[repeat]} for key, some in answers.items() if repeat in some}


def _common(name: Name, now: dict[Name, Answers], before: dict[Name, Answers]) -> tuple[Answers, Answers]:
    """The answers of a side in both runs, to the questions that both have."""
    one, two = now.get(name, {}), before.get(name, {})
    keys = sorted(one.keys() & two.keys())
    return {key: one[key] for key in keys}, {key: two[key] for key in keys}


def _runs(made: Report) -> dict[Name, Answers]:
    """By run, question and repetition, what the answer took."""
    found: dict[Name, Answers] = {}
    for run in made["runs"]:
        some = found.setdefault((run["side"], run["load"], float(run["temperature"])), {})
        for key, repeat, tokens, first, between, end in run["answers"]:
            some.setdefault(key, {})[repeat] = (tokens, first, between, end)
    return found
