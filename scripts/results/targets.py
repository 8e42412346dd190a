"""What was to be reached, beside what was: judged by the reports alone, with all answers and without loops."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from results.read import Results, Side, sides

EAGLE3 = ("eagle3", "hybrid")
Value = float | None


class Target(NamedTuple):
    """One sentence of what was to be reached."""

    text: str
    least: float
    all: Value
    """None: not measured."""
    clean: Value
    by: str = ""
    """Which side, or which group, it is."""
    most: float | None = None
    """The value is to be no more than this, too."""
    clean_bounds: tuple[float, float | None] | None = None
    """Both without loops, where they are measured themselves."""

    @property
    def verdict(self) -> str:
        if self.all is None:
            return "not measured"
        if not _within(self.all, (self.least, self.most)):
            return "not reached"
        clean = self.clean_bounds or (self.least, self.most)
        return "reached" if self.clean is None or _within(self.clean, clean) else "reached; not without loops"


def _within(value: float, bounds: tuple[float, float | None]) -> bool:
    low, high = bounds
    return value >= low and (high is None or value <= high)


def targets(found: Results) -> list[Target]:
    """All of them, in the order in which they were set."""
    spec = sides(found.greedy["spec_bench"]) if "spec_bench" in found.greedy else []
    code = sides(found.greedy["humaneval"]) if "humaneval" in found.greedy else []
    best = fastest(one for one in spec if one.role in EAGLE3 and one.own)
    medusa, eagle1 = (fastest(one for one in spec if one.role == role and one.own) for role in ("medusa", "eagle1"))
    same = next((one for one in code if best and one.label == best.label), None)
    return [
        _of("EAGLE-3, alone or with lookup: tokens a round on Spec-Bench", 3.2, best, Side.length),
        _of("the same: speed-up on Spec-Bench", 2.2, best, Side.speed),
        _worst(best),
        _of("the same: speed-up on HumanEval", 2.5, same, Side.speed),
        _of("Medusa: speed-up on Spec-Bench", 1.5, medusa, Side.speed),
        _between(eagle1, medusa, best),
        _drawn(found),
        *_peers(found, spec),
        _ratio("EAGLE-3 with lookup over `generate` with prompt lookup", 1.5, *_pair(spec, "hybrid", "lookup")),
        _limit(best),
    ]


def fastest(some: Iterable[Side]) -> Side | None:
    known = [one for one in some if one.speed() is not None]
    return max(known, key=lambda one: one.speed() or 0.0, default=None)


def _of(text: str, least: float, side: Side | None, figure: Callable[..., Value]) -> Target:
    if side is None:
        return Target(text, least, None, None)
    return Target(text, least, figure(side), figure(side, clean=True), side.label)


def _between(side: Side | None, low: Side | None, high: Side | None) -> Target:
    text = "EAGLE-1: speed-up between those of Medusa and EAGLE-3"
    if side is None or low is None or high is None:
        return Target(text, 0.0, None, None)
    bounds, clean = ((low.speed(clean=way) or 0.0, high.speed(clean=way)) for way in (False, True))
    return Target(text, bounds[0], side.speed(), side.speed(clean=True), side.label, bounds[1], clean)


def _worst(side: Side | None) -> Target:
    """The group that gains least."""
    text = "the same: speed-up of every group of Spec-Bench"
    if side is None:
        return Target(text, 1.3, None, None)
    speeds = {group: speed for group in side.all["groups"] if (speed := side.speed(group)) is not None}
    clean = [speed for group in side.clean["groups"] if (speed := side.speed(group, clean=True)) is not None]
    group = min(speeds, key=lambda name: speeds[name], default=None)
    return Target(text, 1.3, speeds[group] if group else None, min(clean, default=None), f"least: {group}")


def _drawn(found: Results) -> Target:
    text = "temperature 1: speed-up of EAGLE-3 on Spec-Bench"
    runs = (found.drawn or {}).get("runs", [])
    some = [run for run in runs if run["side"] == "engine" or run["side"].startswith("hybrid:")]
    best = max((run for run in some if run["over_generate"]), key=lambda run: run["over_generate"], default=None)
    if best is None:
        return Target(text, 1.5, None, None)
    by = "alone" if best["side"] == "engine" else "with lookup"
    return Target(text, 1.5, best["over_generate"], best["without_loops"]["over_generate"], by)


def _peers(found: Results, spec: list[Side]) -> list[Target]:
    """Ours over the best peer of each kind, in one run: that with peers where there is one."""
    there = sides(found.peers) if found.peers else spec
    made = []
    for kind, name in (("lookup", "lookup"), ("eagle3", "EAGLE-3"), ("medusa", "Medusa")):
        ours = fastest(one for one in there if one.own and one.kind == kind)
        theirs = fastest(one for one in there if not one.own and one.kind == kind)
        made.append(_ratio(f"our {name} over the best peer's", 1.2, ours, theirs))
    return made


def _pair(some: list[Side], one: str, other: str) -> tuple[Side | None, Side | None]:
    return fastest(side for side in some if side.role == one), fastest(side for side in some if side.role == other)


def _ratio(text: str, least: float, ours: Side | None, theirs: Side | None) -> Target:
    """Tokens a second of two sides of one run."""
    if ours is None or theirs is None:
        return Target(text, least, None, None)
    ratios = []
    for clean in (False, True):
        a, b = (one.figure("tokens_per_second", clean=clean) for one in (ours, theirs))
        ratios.append(a / b if a and b else None)
    return Target(text, least, ratios[0], ratios[1], f"{ours.label}; {theirs.label}")


def _limit(side: Side | None) -> Target:
    text = "share of the limit on Spec-Bench"
    if side is None:
        return Target(text, 0.8, None, None)
    return Target(text, 0.8, share(side), share(side, clean=True), side.label)


def share(side: Side, clean: bool = False) -> Value:
    """What decoding gains, over what it would with drafting and the rest of a round free."""
    costs = (side.clean if clean else side.all)["overall"]["costs"]
    return costs["predicted_decode"] / costs["bound"] if costs and costs["bound"] else None


def drafted(some: Iterable[Side]) -> list[Side]:
    """Those of ours that draft, with what their rounds cost."""
    return [one for one in some if one.all["overall"]["costs"] and one.role != "none"]
