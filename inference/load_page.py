"""The page of a bench under load: tables and plots in one HTML file, which asks for nothing from elsewhere.

matplotlib draws the plots, as SVG inside the page; without it, the page has tables alone.
"""

from __future__ import annotations

import html
import io
import json
import re
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..files import write_whole
from .against import told
from .costs import CostModel
from .load_report import HEAD, Report, line, number, report, seconds
from .plots import GRID, STYLE
from .rows import Row

COLOURS = ("#2563a8", "#e8923a", "#63b3a4", "#b0485f", "#7a6bb0", "#8a8f3c", "#5c6b7a", "#c77fb3")
PANELS = {
    "tokens_per_second": "Tokens a second, all clients",
    "first": "Seconds to the first token",
    "between": "Seconds between tokens",
    "end": "Seconds to the last token",
}
CSS = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 82em; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: .6em 0 1.4em; display: block; overflow-x: auto; }
th, td { padding: .2em .6em; border-bottom: 1px solid #e3e7ec; text-align: right; white-space: nowrap; }
th { color: #6b7785; font-weight: 500; } th:first-child, td:first-child { text-align: left; }
svg { max-width: 100%; height: auto; } h2 { margin-top: 1.8em; } pre { white-space: pre-wrap; }
"""


def write_load(
    folder: Path, rows: Sequence[Row], setup: dict[str, Any], costs: CostModel | None, facts: dict[str, Any],
    command: str = "", earlier: Report | None = None,
) -> Report:  # fmt: skip
    """Write load_report.json and load.html, each whole or not at all; returns the report."""
    made = report(rows, setup, costs, facts, command)
    if earlier is not None:
        made["against"] = told(made, earlier)
    write_whole(folder / "load_report.json", json.dumps(made, indent=1, ensure_ascii=False) + "\n")
    write_whole(folder / "load.html", page(made))
    return made


def page(made: Report) -> str:
    """The whole page."""
    setup = made["setup"]
    title = f"{setup['backbone']} with {setup['drafter']} under load"
    parts = [f"<h1>{html.escape(title)}</h1>", f"<p>{html.escape(_opening(made))}</p>"]
    for temperature in dict.fromkeys(run["temperature"] for run in made["runs"]):
        runs = [run for run in made["runs"] if run["temperature"] == temperature]
        parts += [f"<h2>Temperature {temperature:g}</h2>", _drawn(runs), _table(HEAD, map(line, runs))]
        parts += ["<h3>By category</h3>", _categories(runs), *_formulas(runs)]
    if "against" in made:
        parts += [f"<h2>Against an earlier run</h2><pre>{html.escape(made['against'])}</pre>"]
    facts = [[name.replace("_", " "), str(value)] for name, value in setup.items() if value is not None]
    parts += ["<h2>How it was measured</h2>", f"<p>{METHOD}</p>", _table(["setup", made["date"]], facts)]
    parts += [f"<pre>{html.escape(made['command'])}</pre>"]
    return (
        f"<!doctype html>\n<html lang=en><meta charset=utf-8><title>{html.escape(title)}</title>\n"
        f"<style>{CSS}</style>\n" + "\n".join(parts) + "\n</html>\n"
    )


METHOD = (
    "All sides in one process, each with the machine to itself, in turn, stretch by stretch of questions. closed:4 has "
    "four clients, each asking again once it was answered; open:2 has two requests a second, at random, counted from "
    "when they were due. generate answers in batches of as many as there are clients, counted from the beginning of a "
    "batch; lookup and assisted are transformers' own; alone is headstart without drafts, one row; plain is an engine "
    "without drafts. Equal: answers that are, token for token, those of the same request alone. Between tokens is the "
    "mean pace of a request, between pieces each gap. Memory is what a run took at most beyond what lay there before."
)


def _opening(made: Report) -> str:
    answers = sum(run["requests"] for run in made["runs"])
    compared, same = (sum(run[name] for run in made["runs"]) for name in ("compared", "identical"))
    told = f"{answers} answers; {same} of {compared} that can be compared are those of the same request alone."
    if made["measured"] < made["units"]:
        told += f" Interrupted: {made['measured']} of {made['units']} stretches are measured."
    return told


def _categories(runs: Sequence[Report]) -> str:
    head = ["category", "side", "load", "requests", "tokens/s of one", "x plain", "first P50", "P99",
            "between P50", "P99", "end P50", "P99", "tokens a round", "mean over prompts", "equal alone"]  # fmt: skip
    plain = {(run["load"], name): one for run in runs if run["side"] == "plain" for name, one in run["groups"].items()}
    rows = []
    for name in dict.fromkeys(name for run in runs for name in run["groups"]):
        for run in runs:
            if (one := run["groups"].get(name)) is None:
                continue
            speed = one["stream_tokens_per_second"]
            other = plain.get((run["load"], name), {}).get("stream_tokens_per_second")
            rows.append([
                name, run["side"], run["load"], str(one["requests"]), number(speed, 1),
                number(speed / other if speed and other else None),
                *(seconds(one[kind][share]) for kind in ("first", "between", "end") for share in ("p50", "p99")),
                number(one["acceptance_length"]), number(one["acceptance_length_macro"]),
                f"{one['identical']}/{one['compared']}" if one["compared"] else "-",
            ])  # fmt: skip
    return _table(head, rows)


def _formulas(runs: Sequence[Report]) -> list[str]:
    found = [(run["load"], run["formula"]) for run in runs if run["formula"]]
    if not found:
        return []
    head = ["load", "rounds that draft", "nodes", "depth", "tokens a round", "verification, in plain rounds",
            "drafting", "decoding predicted", "measured", "with prefill predicted", "measured"]  # fmt: skip
    names = ("drafting", "nodes", "depth", "acceptance_length", "verify_steps", "draft_steps", "predicted_decode",
             "measured_decode", "predicted", "measured")  # fmt: skip
    rows = [[load, *(number(one[name]) for name in names)] for load, one in found]
    return ["<h3>The formula: speed-up over plain rounds, from acceptance and measured costs</h3>", _table(head, rows)]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def cells(kind: str, row: Sequence[str]) -> str:
        return "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in row)

    return f"<table><tr>{cells('th', head)}</tr>" + "".join(f"<tr>{cells('td', row)}</tr>" for row in rows) + "</table>"


def _drawn(runs: Sequence[Report]) -> str:
    """Four panels over the number of clients, a line a side; empty without a closed loop or matplotlib."""
    closed = [run for run in runs if run["load"].startswith("closed:")]
    if not closed:
        return ""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        warnings.warn("no plots: matplotlib is missing; pip install 'headstart[plot]'", stacklevel=2)
        return ""
    with rc_context({**STYLE, "svg.fonttype": "none", "svg.hashsalt": "headstart"}):
        figure = Figure(figsize=(11, 6.6), layout="constrained", facecolor="white")
        axes = figure.subplots(2, 2).flatten()
        for panel, (name, title) in zip(axes, PANELS.items(), strict=True):
            _panel(panel, closed, name, title)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, ncols=len(labels), loc="outside lower center")
        content = io.StringIO()
        figure.savefig(content, format="svg", metadata={"Date": None})
    return re.sub(r"^.*?(?=<svg)", "", content.getvalue(), flags=re.DOTALL)


def _panel(axes: Any, runs: Sequence[Report], name: str, title: str) -> None:
    clients = sorted({_clients(run) for run in runs})
    for place, side in enumerate(dict.fromkeys(run["side"] for run in runs)):
        mine = sorted((run for run in runs if run["side"] == side), key=_clients)
        style: dict[str, Any] = {"color": COLOURS[place % len(COLOURS)], "marker": "o", "markersize": 4}
        at = [clients.index(_clients(run)) for run in mine]
        if name == "tokens_per_second":
            axes.plot(at, [run[name] or 0.0 for run in mine], label=side, **style)
            continue
        axes.plot(at, [run[name]["p50"] or 0.0 for run in mine], **style)
        axes.plot(at, [run[name]["p99"] or 0.0 for run in mine], linestyle=":", **style)
    axes.set_title(title if name == "tokens_per_second" else f"{title}: P50, and P99 dotted")
    axes.set_xticks(range(len(clients)), [str(count) for count in clients])
    axes.set_xlabel("clients at once")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color=GRID)
    axes.set_axisbelow(True)


def _clients(run: Report) -> int:
    return int(run["load"].partition(":")[2])
