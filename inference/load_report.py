"""The report of a bench under load: every figure (latency.py has the definitions), and how it is told.

A run is one side under one load at one temperature. Beside its own figures it has its tokens a second over those of

- `over_generate`: transformers' `generate`, one request at a time;
- `over_batched`: transformers' `generate` in batches of as many as there are clients;
- `over_plain`: an engine without drafts under the same load.

Without looping answers (those which the request gets alone at this temperature have a run of 10 tokens twice), seconds
cannot be parted among requests that are answered together: `without_loops` has tokens a second as a request sees them,
and the same ratios of those, as `seen` has of all answers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from .costs import CostModel
from .figures import LOOP
from .latency import Figures, between, end, first, formula, group_figures, run_figures
from .rows import Row
from .stats import repeats_ngram

Report = dict[str, Any]
Key = tuple[float, str, str]  # temperature, load, side


def report(
    rows: Sequence[Row], setup: dict[str, Any], costs: CostModel | None, facts: dict[str, Any], command: str = ""
) -> Report:
    """All figures, as JSON values.

    Args:
        facts: how many units there are, how many were measured, and how many questions did not fit.
    """
    runs: dict[Key, list[Row]] = {}
    for row in rows:
        runs.setdefault((row["temperature"], row["load"], row["side"]), []).append(row)
    figures = {key: {**run_figures(some), **_seen(some, looping(rows))} for key, some in runs.items()}
    return {
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "setup": setup,
        **facts,
        "looping": len(looping(rows)),
        "runs": [_run(key, runs, figures, costs) for key in sorted(runs, key=_place)],
    }


def looping(rows: Sequence[Row]) -> set[tuple[float, str]]:
    """The questions, with the temperature, whose answer alone is a loop."""
    alone = [row for row in rows if row["side"] == "alone" and "tokens" in row]
    return {(row["temperature"], row["of"]) for row in alone if repeats_ngram(row["tokens"], LOOP)}


def _seen(rows: Sequence[Row], loops: set[tuple[float, str]]) -> Figures:
    """As requests see it: of all answers, and of those that do not loop."""
    good = [row for row in rows if row.get("came")]
    clean = [row for row in good if (row["temperature"], row["of"]) not in loops]
    groups = dict.fromkeys(row["group"] for row in clean)
    parts = {name: group_figures([row for row in clean if row["group"] == name]) for name in groups}
    return {"seen": group_figures(good), "without_loops": {**group_figures(clean), "groups": parts}}


def _place(key: Key) -> tuple[Any, ...]:
    temperature, load, side = key
    kind, _, number = load.partition(":")
    known = ("generate", "lookup", "assisted", "alone", "plain", "engine")
    return temperature, kind, float(number), known.index(side) if side in known else len(known), side


def _run(key: Key, runs: dict[Key, list[Row]], figures: dict[Key, Figures], costs: CostModel | None) -> Report:
    temperature, load, side = key
    others = {
        "over_generate": (temperature, "closed:1", "generate"),
        "over_batched": (temperature, load, "generate"),
        "over_plain": (temperature, load, "plain"),
    }
    mine, plain = figures[key], runs.get(others["over_plain"])
    known = side == "engine" and load.startswith("closed:") and costs is not None and plain is not None
    return {
        "side": side,
        "load": load,
        "temperature": temperature,
        **mine,
        **{name: _over(mine, figures.get(other)) for name, other in others.items()},
        **{kind: {**mine[kind], **_seen_over(kind, mine, figures, others)} for kind in ("seen", "without_loops")},
        "formula": formula(runs[key], plain, costs, int(load[7:])) if known and costs and plain else None,
        "answers": [
            [row["of"], row["repeat"], len(row["tokens"]), *(_round(of(row)) for of in (first, between, end))]
            for row in runs[key]
            if row.get("came")
        ],
    }


def _seen_over(kind: str, mine: Figures, figures: dict[Key, Figures], others: dict[str, Key]) -> Figures:
    speed = "stream_tokens_per_second"
    return {name: _over(mine[kind], (figures.get(other) or {}).get(kind), speed) for name, other in others.items()}


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def _over(mine: Figures, other: Figures | None, speed: str = "tokens_per_second") -> float | None:
    one, two = mine[speed], (other or {}).get(speed)
    return one / two if one and two else None


# -- to read ---------------------------------------------------------------------------------------------------------

HEAD = (
    "side", "load", "tokens/s", "x generate", "x batched", "x plain", "requests/s", "first P50", "P90", "P99",
    "between P50", "P90", "P99", "pieces P99", "end P50", "P90", "P99", "tokens a round", "mean over prompts",
    "equal alone", "memory",
)  # fmt: skip


def line(run: Report) -> list[str]:
    """One run as the cells of a table."""
    acceptance = (run["acceptance_length"], run["acceptance_length_macro"])
    equal = f"{run['identical']}/{run['compared']}" if run["compared"] else "-"
    return [
        run["side"],
        run["load"],
        number(run["tokens_per_second"], 1),
        *(number(run[name]) for name in ("over_generate", "over_batched", "over_plain")),
        number(run["requests_per_second"]),
        *(seconds(run["first"][f"p{share}"]) for share in (50, 90, 99)),
        *(seconds(run["between"][f"p{share}"]) for share in (50, 90, 99)),
        seconds(run["pieces"]["p99"]),
        *(seconds(run["end"][f"p{share}"]) for share in (50, 90, 99)),
        *(number(value) for value in acceptance),
        equal + (f", {run['mismatches']} wrong" if run["mismatches"] else ""),
        memory(run),
    ]


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{1000 * value:.0f} ms" if value < 10 else f"{value:.1f} s"


def memory(run: Report) -> str:
    """The most that the run took beyond what lay there, slots included; and how much of it was reserved for slots."""
    peak = "-" if run["peak_bytes"] is None else f"{run['peak_bytes'] / 2**20:,.0f} MiB"
    return peak + (f" (slots {run['slot_bytes'] / 2**20:,.0f})" if run["slot_bytes"] else "")


def summary(made: Report) -> str:
    """For the terminal: a line a run, and what the formula says."""
    setup, cells = made["setup"], [[HEAD[at] for at in SHOWN]]
    lines = [f"{setup['backbone']} with {setup['drafter']} in {setup['dtype']}"]
    if made["measured"] < made["units"]:
        lines.append(f"interrupted: {made['measured']} of {made['units']} stretches measured; the same command goes on")
    if made["left_out"]:
        lines.append(f"{made['left_out']} questions are longer than the backbone's context, and were not asked")
    for temperature in dict.fromkeys(run["temperature"] for run in made["runs"]):
        rows = [line(run) for run in made["runs"] if run["temperature"] == temperature]
        cells = [[HEAD[at] for at in SHOWN], *([row[at] for at in SHOWN] for row in rows)]
        lines += ["", f"temperature {temperature:g}", *_aligned(cells)]
    lines += [said for run in made["runs"] if (said := _formula(run))]
    lines += [f"{run['side']}, {run['load']}: {fault}" for run in made["runs"] for fault in run["failed"]]
    return "\n".join(lines)


SHOWN = (0, 1, 2, 3, 5, 7, 9, 10, 12, 14, 16, 17, 19)


def _aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]


def _formula(run: Report) -> str:
    found = run["formula"]
    if not found:
        return ""
    return (
        f"{run['load']}, temperature {run['temperature']:g}: {found['acceptance_length']:.2f} tokens a round for "
        f"{found['verify_steps'] + found['draft_steps']:.2f} plain ones: predicted {found['predicted']:.2f}x plain, "
        f"measured {number(found['measured'])}x"
    )
