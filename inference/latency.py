"""From the rows of a load to its figures: throughput, latency, acceptance, equality, and the formula beside them.

Definitions:

- first: seconds from when a request was asked to its first token; end: to its last. Waiting for a row counts.
- between: (end - first) / tokens behind those that came first, the mean pace of a request. pieces: each gap between two
  runs of tokens, of all requests: what a reader sees stall.
- tokens a second, requests a second: over the time of all stretches, from the first request of each to its last answer.
- acceptance length by sums (1 + accepted / rounds, over all requests) and its mean over prompts. Of transformers'
  assisted generation, whose first round reads the prompt, it is tokens / rounds, which is the same formula.
- predicted: what acceptance and the measured costs of `tuned` let expect (Leviathan et al. 2023, theorem 3.8, with the
  cost of verification put in): acceptance length * T_verify(1) / (T_verify(nodes) + T_draft(depth)), all for as many
  rows as there are clients, nodes and depth those of rounds that drafted, the other rounds plain ones;
  measured beside it is the same of the engine's own clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from .costs import CostModel
from .rows import Row

Figures = dict[str, Any]
SHARES = (50, 90, 99)
LATENCIES = {
    "first": "to the first token",
    "between": "between tokens",
    "pieces": "between pieces",
    "end": "to the end",
}


def percentile(values: Iterable[float], percent: float) -> float | None:
    """So many percent of the values lie below; between two of them, on a straight line (numpy's default). None where
    there is no value."""
    ordered = sorted(values)
    if not ordered:
        return None
    place = (len(ordered) - 1) * percent / 100
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return low + (high - low) * (place - math.floor(place))


def first(row: Row) -> float:
    return float(row["came"][0][0] - row["asked"])


def end(row: Row) -> float:
    return float(row["came"][-1][0] - row["asked"])


def between(row: Row) -> float | None:
    """None where there is one token, or all came at once."""
    if len(row["came"]) < 2:
        return None
    return float((row["came"][-1][0] - row["came"][0][0]) / (len(row["tokens"]) - row["came"][0][1]))


def latencies(rows: Sequence[Row]) -> dict[str, dict[str, float | None]]:
    """By name, P50, P90 and P99 in seconds."""
    values: dict[str, list[float]] = {
        "first": [first(row) for row in rows],
        "between": [pace for row in rows if (pace := between(row)) is not None],
        "pieces": [b[0] - a[0] for row in rows for a, b in zip(row["came"], row["came"][1:], strict=False)],
        "end": [end(row) for row in rows],
    }
    return {name: {f"p{share}": percentile(values[name], share) for share in SHARES} for name in LATENCIES}


def run_figures(rows: Sequence[Row]) -> Figures:
    """The figures of one side under one load at one temperature; a row is an answer."""
    good = [row for row in rows if row.get("came")]
    stretches = {row["key"]: row["stretch_seconds"] for row in rows}
    seconds, tokens = sum(stretches.values()), sum(len(row["tokens"]) for row in good)
    groups = dict.fromkeys(row["group"] for row in good)
    peaks = [row["peak_bytes"] for row in rows if row["peak_bytes"] is not None]
    return {
        "requests": len(good),
        "failed": sorted({row["failed"] for row in rows if "failed" in row}),
        "tokens": tokens,
        "seconds": seconds,
        "requests_per_second": len(good) / seconds if seconds else None,
        "tokens_per_second": tokens / seconds if seconds else None,
        "by_stretch": [_speed([row for row in good if row["key"] == key], stretches[key]) for key in stretches],
        **latencies(good),
        **acceptance(good),
        **equality(good),
        "slot_bytes": max((row["slot_bytes"] for row in rows), default=0),
        "peak_bytes": max(peaks, default=None),
        "groups": {name: group_figures([row for row in good if row["group"] == name]) for name in groups},
    }


def _speed(rows: Sequence[Row], seconds: float) -> float | None:
    return sum(len(row["tokens"]) for row in rows) / seconds if seconds else None


def group_figures(rows: Sequence[Row]) -> Figures:
    """Of a kind of prompt. Its requests share time with others; tokens a second are those that one of them sees."""
    seen = sum(map(end, rows))
    found = {"requests": len(rows), "stream_tokens_per_second": _speed(rows, seen)}
    return {**found, **latencies(rows), **acceptance(rows), **equality(rows)}


def acceptance(rows: Sequence[Row]) -> Figures:
    """Both conventions; None without a round."""
    rounds = sum(row["rounds"] for row in rows)
    each = [1 + row["accepted"] / row["rounds"] for row in rows if row["rounds"]]
    return {
        "rounds": rounds,
        "acceptance_length": 1 + sum(row["accepted"] for row in rows) / rounds if rounds else None,
        "acceptance_length_macro": fmean(each) if each else None,
    }


def equality(rows: Sequence[Row]) -> Figures:
    """How many answers are those that the same request gets alone, of those that can be compared."""
    compared = [row for row in rows if row.get("same") is not None]
    kinds = [row["difference"]["kind"] for row in compared if row.get("difference")]
    return {
        "compared": len(compared),
        "identical": sum(row["same"] for row in compared),
        "mismatches": kinds.count("mismatch"),
    }


def formula(rows: Sequence[Row], plain: Sequence[Row], costs: CostModel, clients: int) -> Figures | None:
    """What the formula expects of drafting, and what was measured; None where there was no round.

    Args:
        rows: of the engine that drafts; `plain`: of the one that does not, under the same load.
    """
    ours, theirs = ([row for row in some if row.get("seconds")] for some in (rows, plain))
    rounds = sum(row["rounds"] for row in ours)
    if not rounds or not any(row["rounds"] for row in theirs):
        return None
    length, here = 1 + sum(row["accepted"] for row in ours) / rounds, costs.at(clients)
    drafting = sum(row["drafting"] for row in ours)  # rounds; the others are plain ones
    nodes, depth = (sum(row[name] for row in ours) / max(drafting, 1) for name in ("drafted", "depths"))
    step, share = here.of(1, 0), drafting / rounds
    verify = share * here.of(1 + nodes, 0) / step + 1 - share
    draft = share * (here.of(1 + nodes, depth) - here.of(1 + nodes, 0)) / step
    rate = length / (verify + draft)
    (prefill, decode), (plain_prefill, plain_decode) = _parts(ours), _parts(theirs)
    behind, plain_behind = (sum(len(row["tokens"]) - 1 for row in some) for some in (ours, theirs))
    scaled = plain_decode * behind / plain_behind  # what plain would have taken for as many tokens
    return {
        "drafting": share,
        "nodes": 1 + nodes,
        "depth": depth,
        "acceptance_length": length,
        "step_seconds": step,
        "verify_steps": verify,
        "draft_steps": draft,
        "predicted_decode": rate,
        "measured_decode": scaled / decode if decode else None,
        "predicted": (plain_prefill + scaled) / (prefill + scaled / rate),
        "measured": (plain_prefill + scaled) / (prefill + decode),
    }


def _parts(rows: Sequence[Row]) -> tuple[float, float]:
    """Seconds of reading prompts, and of all else."""
    prefill = sum(row["seconds"]["prefill"] for row in rows)
    return prefill, sum(sum(row["seconds"].values()) for row in rows) - prefill
