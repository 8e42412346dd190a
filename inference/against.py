"""A bench against an earlier one: what got slower beyond noise.

Answers to the same questions are compared, side by side and load by load. How far a figure may differ by chance is told
by drawing the answers again and again (a bootstrap over questions, the same ones on both sides). A machine that was
slower as a whole is seen at transformers' `generate`, one request at a time, where both runs have it: other sides are
judged relative to it, and its own noise is in the band. A machine whose speed changes while a bench runs is seen at the
other sides of transformers, whose code no change of ours touches: by as much as one of them differs, nothing is told.
A bootstrap knows nothing of the hour: of the same code, two runs of one stretch each differed by up to half where the
machine had other work. Only repetitions show that.

Tokens a second are those of one stream, tokens / (end - asked), summed first; in a closed loop that is the throughput
over the number of clients.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
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
NAMES = ("load_report.json", "report.json")  # in the folder of a bench


class Change(NamedTuple):
    """One figure of one run: how many times as slow it is as before (above 1: slower), and the band of chance."""

    name: Name
    figure: str
    ratio: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        if self.low > 1 and self.ratio > 1 + LEAST:
            return "slower"
        return "faster" if self.high < 1 and self.ratio < 1 - LEAST else "same"


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
    ours, theirs = _runs(now), _runs(before)
    found = []
    theirs_own = [one for one in ours if one[0] in ("generate", "lookup", "assisted")]
    for name in sorted(ours, key=lambda one: one not in theirs_own):
        if name not in theirs or len(common := sorted(ours[name].keys() & theirs[name].keys())) < ENOUGH:
            continue
        control = ("generate", "closed:1", name[2])
        pairs = [(ours[name][key], theirs[name][key]) for key in common]
        machine = [(one, theirs[control][key]) for key, one in ours.get(control, {}).items()
                   if name != control and key in theirs.get(control, {})]  # fmt: skip
        found += list(_changes(name, pairs, machine))
    drift = max((abs(math.log(one.ratio)) for one in found if one.name in theirs_own and one.figure == SPEED
                 and one.name[:2] != ("generate", "closed:1")), default=0.0)  # fmt: skip
    wide = math.exp(drift)
    return [one if one.name in theirs_own else one._replace(low=one.low / wide, high=one.high * wide) for one in found]


def told(now: Report, before: Report) -> str:
    """In words: what differs between the setups, what got slower, what got faster."""
    one, two = (made.get("setup", {}) for made in (before, now))
    differ = [key for key in sorted(one.keys() | two.keys()) if one.get(key) != two.get(key)]
    lines = [f"against a bench of {before.get('date', 'an unknown day')}"]
    lines += [f"  {key}: was {one.get(key)!r}, is {two.get(key)!r}" for key in differ]
    found = changes(now, before)
    if any(len({answer[1] for answer in run["answers"]}) == 1 for made in (now, before) for run in made["runs"]):
        lines.append("  measured once: how far two runs of the same differ is not known; --repeats 3 in both shows it")
    if not found:
        return "\n".join([*lines, f"  nothing to compare: no side has {ENOUGH} answers in common with it"])
    for verdict in ("slower", "faster"):
        some = [one for one in found if one.verdict == verdict]
        lines += [f"{verdict} beyond noise:" if some else f"nothing {verdict} beyond noise", *map(_line, some)]
    machine = [one for one in found if one.name[:2] == ("generate", "closed:1") and one.figure == SPEED]
    lines += [f"the machine, by generate alone: {one.ratio:.2f} times the time ({one.low:.2f} to {one.high:.2f})"
              for one in machine]  # fmt: skip
    return "\n".join(lines)


def _line(one: Change) -> str:
    side, load, temperature = one.name
    band = f"(noise {one.low:.2f} to {one.high:.2f})"
    return f"  {side}, {load}, temperature {temperature:g}: {one.figure} {one.ratio:.2f} times the time {band}"


# -- figures ---------------------------------------------------------------------------------------------------------

SPEED = "a token"


def _speed(answers: Sequence[Answer]) -> float | None:
    """Seconds a token, waiting and prefill included."""
    tokens = sum(one[0] for one in answers)
    return sum(one[3] for one in answers) / tokens if tokens else None


def _at(place: int, percent: int) -> Callable[[Sequence[Answer]], float | None]:
    return lambda answers: percentile([value for one in answers if (value := one[place]) is not None], percent)


FIGURES: dict[str, Callable[[Sequence[Answer]], float | None]] = {
    SPEED: _speed,
    **{f"{name} P{percent}": _at(place, percent)
       for place, name in ((1, "first token"), (2, "between tokens"), (3, "end")) for percent in (50, 90)},
}  # fmt: skip


def _changes(
    name: Name, pairs: Sequence[tuple[Answer, Answer]], machine: Sequence[tuple[Answer, Answer]]
) -> Iterator[Change]:
    for figure, of in FIGURES.items():
        ratio = _ratio(of, pairs, machine)
        if ratio is None:
            continue
        chance = random.Random(f"{name} {figure}")
        drawn = (_ratio(of, *(chance.choices(some, k=len(some)) if some else [] for some in (pairs, machine)))
                 for _ in range(DRAWS))  # fmt: skip
        known = [one for one in drawn if one is not None]
        low, high = (percentile(known, percent) for percent in BAND)
        if low is not None and high is not None:
            yield Change(name, figure, ratio, low, high)


def _ratio(
    of: Callable[[Sequence[Answer]], float | None],
    pairs: Sequence[tuple[Answer, Answer]],
    machine: Sequence[tuple[Answer, Answer]],
) -> float | None:
    now, before = (of([pair[place] for pair in pairs]) for place in (0, 1))
    whole = [_speed([pair[place] for pair in machine]) if machine else 1.0 for place in (0, 1)]
    if not now or not before or not whole[0] or not whole[1]:
        return None
    return (now / before) / (whole[0] / whole[1])


def _runs(made: Report) -> dict[Name, dict[str, Answer]]:
    """By run and question, what its answer took; several repetitions stand for themselves."""
    found: dict[Name, dict[str, Answer]] = {}
    for run in made["runs"]:
        some = found.setdefault((run["side"], run["load"], float(run["temperature"])), {})
        for key, repeat, tokens, first, between, end in run["answers"]:
            some[f"{key} {repeat}"] = (tokens, first, between, end)
    return found
