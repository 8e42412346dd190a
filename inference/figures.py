"""From the rows of a bench to its figures.

Definitions (all sums run over answers; of repeated measurements an answer has the mean time):

- speed-up: tokens / seconds of ours over tokens / seconds of plain `model.generate`, sums first (micro); the mean over
  questions of each question's own ratio is given beside it (macro).
- acceptance length: tokens a verification forward emits, the backbone's own one included: 1 + accepted drafts / rounds.
  The token that prefill gives belongs to no round.
- acceptance at depth d, from 0: rounds that accepted a draft there / all rounds; conditional: / rounds that accepted
  the one above. The acceptance length is 1 + the sum of the former.
- looping: the plain answer has a run of 10 tokens that occurs twice. Loops flatter every drafter, so that all figures
  stand there once more without these answers.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from .judge import verdict
from .rows import Row
from .stats import PARTS, Stats, expected_speedup, expected_tokens, merge

LOOP = 10  # a plain answer in which a run of this many tokens occurs twice is a loop
Figures = dict[str, Any]
Report = dict[str, Any]


def report(rows: Sequence[Row], setup: dict[str, Any], command: str = "") -> Report:
    """All figures of a bench, as JSON values. Where there is nothing to measure, a figure is None."""
    answers = [row for row in rows if "skipped" not in row]
    return {
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "setup": setup,
        "looping": sum(row["loops"] for row in answers),
        "verdict": verdict(row["difference"] for row in answers),
        "all": _sections(answers),
        "without_loops": _sections([row for row in answers if not row["loops"]]),
        "differences": [
            {**{name: row[name] for name in ("question", "turn", "category")}, **row["difference"]}
            for row in answers
            if row["difference"]
        ],
        "skipped": [{name: row[name] for name in ("question", "turn", "skipped")} for row in rows if "skipped" in row],
        "runs": [
            *(_run(answers, side, name) for side, name in (("plain", "generate"), ("ours", "headstart"))),
            *(_run(_seen(answers, name), "ours", name) for name in setup.get("also", {})),
        ],
        **({"also": {name: _other(answers, name, setup) for name in setup["also"]}} if "also" in setup else {}),
    }


def _seen(rows: Sequence[Row], name: str) -> list[Row]:
    """The rows with a further side in the place of ours, without those in which it failed."""
    return [{**row, **row["also"][name]} for row in rows if "failed" not in row["also"][name]]


def _other(rows: Sequence[Row], name: str, setup: dict[str, Any]) -> dict[str, Any]:
    """The same figures of a further side. Mismatches are known in fp32 alone."""
    seen = _seen(rows, name)
    kinds = [row["difference"]["kind"] for row in seen if row["difference"]]
    return {
        **setup["also"][name],
        "failed": sorted({row["also"][name]["failed"] for row in rows if "failed" in row["also"][name]}),
        "mismatches": kinds.count("mismatch") if setup["dtype"] == "float32" else None,
        "all": _sections(seen),
        "without_loops": _sections([row for row in seen if not row["loops"]]),
    }


def _run(rows: Sequence[Row], side: str, name: str) -> dict[str, Any]:
    """What each answer took, as a bench under load has it (load_report.py): to be compared with a later run."""
    answers = [
        [f"{row['key']} {row['turn']}", repeat, len(row[side]["tokens"]), row[side]["prefill"][repeat], None, seconds]
        for row in rows
        for repeat, seconds in enumerate(row[side]["seconds"])
    ]
    return {"side": name, "load": "closed:1", "temperature": 0.0, "answers": answers}


def _sections(rows: Sequence[Row]) -> dict[str, Any]:
    """Figures of all, of each group, and of the categories that a group is made of."""
    groups = list(dict.fromkeys(row["group"] for row in rows))
    parts = list(dict.fromkeys((row["group"], row["category"]) for row in rows if row["group"] != row["category"]))
    return {
        "overall": figures(rows),
        "groups": {name: figures([row for row in rows if row["group"] == name]) for name in groups},
        "categories": {
            name: {"group": group, **figures([row for row in rows if (row["group"], row["category"]) == (group, name)])}
            for group, name in parts
        },
    }


def figures(rows: Sequence[Row]) -> Figures:
    """The figures of some answers."""
    questions = [[row for row in rows if row["key"] == key] for key in dict.fromkeys(row["key"] for row in rows)]
    stats = merge(map(_stats, rows))
    plain_tokens, plain_seconds = _tokens(rows, "plain"), _seconds(rows, "plain", "seconds")
    repeats = min((len(row["ours"]["seconds"]) for row in rows), default=0)
    return {
        "questions": len(questions),
        "answers": len(rows),
        "identical": sum(row["difference"] is None for row in rows),
        "plain_tokens": plain_tokens,
        "plain_seconds": plain_seconds,
        "tokens": stats.tokens,
        "seconds": stats.total_seconds,
        "plain_tokens_per_second": _ratio(plain_tokens, plain_seconds),
        "tokens_per_second": _ratio(stats.tokens, stats.total_seconds),
        "speedup": speedup(rows),
        "speedup_macro": _mean(map(speedup, questions)),
        "speedup_by_repetition": [speedup(rows, repeat) for repeat in range(repeats)] if repeats > 1 else [],
        "rounds": stats.rounds,
        "drafted": stats.drafted,
        "acceptance_length": stats.acceptance_length if stats.rounds else None,
        "acceptance_length_macro": _mean(_acceptance_length(question) for question in questions),
        "offered": stats.offered,
        "accepted": stats.accepted,
        "acceptance": [_ratio(count, stats.rounds) for count in stats.accepted],
        "conditional_acceptance": stats.conditional_acceptance,
        "shares": {part: _ratio(stats.seconds[part], stats.total_seconds) for part in PARTS},
        "costs": _costs(rows, stats),
    }


def speedup(rows: Sequence[Row], repeat: int | None = None) -> float | None:
    """Tokens a second of ours over those of plain, over answers that were not skipped; of one repetition, or of all."""
    rows = [row for row in rows if "skipped" not in row]
    plain = _ratio(_tokens(rows, "plain"), _seconds(rows, "plain", "seconds", repeat))
    ours = _ratio(_tokens(rows, "ours"), _seconds(rows, "ours", "seconds", repeat))
    return ours / plain if plain and ours else None


def _costs(rows: Sequence[Row], stats: Stats) -> dict[str, Any] | None:
    """What a round costs, in plain decoding steps, and the speed-up that follows by the formula.

    `predicted_decode` is acceptance length / (draft + verify + rest) (Leviathan et al. 2023, theorem 3.8, with the cost
    of verification and of the rest put in), and `bound` the same with drafting and the rest free. `predicted` adds
    prefill: what the tokens of plain would take at that rate. It is near the measured speed-up if the books are right.
    """
    if not all("verify" in row["ours"] for row in rows):
        return None  # somebody else's decoder, whose rounds nobody took apart
    steps = _tokens(rows, "plain") - len(rows)
    prefill, total = _seconds(rows, "plain", "prefill"), _seconds(rows, "plain", "seconds")
    if not stats.rounds or steps < 1 or total <= prefill:
        return None
    step = (total - prefill) / steps
    draft, verify, rest = (stats.seconds[part] / stats.rounds / step for part in ("draft", "verify", "rest"))
    length = expected_tokens(stats.conditional_acceptance)
    rate = expected_speedup(length, 1, draft, verify, rest)
    return {
        "plain_step_seconds": step,
        "draft": draft,
        "verify": verify,
        "rest": rest,
        "predicted_decode": rate,
        "predicted": total / (stats.seconds["prefill"] + steps * step / rate),
        "bound": length / verify if verify else None,
    }


def _stats(row: Row) -> Stats:
    ours = {part: fmean(times) for part, times in row["ours"].items() if part != "tokens"}
    parts = {part: ours.get(part, 0.0) for part in ("prefill", "draft", "verify")}
    return Stats(
        prompt_tokens=row["prompt_tokens"],
        tokens=len(row["ours"]["tokens"]),
        rounds=row["rounds"],
        drafted=row["drafted"],
        offered=row["offered"],
        accepted=row["accepted"],
        seconds={**parts, "rest": max(ours["seconds"] - sum(parts.values()), 0.0)},
    )


def _acceptance_length(rows: Sequence[Row]) -> float | None:
    rounds = sum(row["rounds"] for row in rows)
    return 1 + sum(sum(row["accepted"]) for row in rows) / rounds if rounds else None


def _tokens(rows: Sequence[Row], side: str) -> int:
    return sum(len(row[side]["tokens"]) for row in rows)


def _seconds(rows: Sequence[Row], side: str, part: str, repeat: int | None = None) -> float:
    return sum(fmean(row[side][part]) if repeat is None else row[side][part][repeat] for row in rows)


def _ratio(a: float, b: float) -> float | None:
    return a / b if b else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
