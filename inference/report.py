"""The report of a bench: Markdown to read, JSON with every figure (figures.py has the definitions), and a picture."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..files import write_whole
from .figures import Figures, Report, report
from .plots import draw
from .rows import Row
from .stats import PARTS

SHOWN = 20  # differences and skipped turns that the Markdown lists; the JSON has all


def write_report(folder: Path, rows: Sequence[Row], setup: dict[str, Any], command: str = "") -> Report:
    """Write report.md, report.json and, with matplotlib, report.png, each whole or not at all; returns the report."""
    made = report(rows, setup, command)
    drawn = draw(made, folder / "report.png")
    write_whole(folder / "report.json", json.dumps(made, indent=1, ensure_ascii=False) + "\n")
    write_whole(folder / "report.md", markdown(made, "report.png" if drawn else None))
    return made


def summary(made: Report) -> str:
    """A few lines for the terminal."""
    whole, clean, setup = made["all"]["overall"], made["without_loops"]["overall"], made["setup"]
    rates = f"{_f(whole['plain_tokens_per_second'], 1)} -> {_f(whole['tokens_per_second'], 1)} tokens/s"

    def clean_too(value: str) -> str:
        return f"; {value} without {_count(made['looping'], 'looping answer')}" if made["looping"] else ""

    lines = [
        f"{setup['backbone']} with {setup['drafter']} in {setup['dtype']}, {_count(whole['questions'], 'question')}",
        f"speed-up           {_x(whole['speedup'])} ({rates}){clean_too(_x(clean['speedup']))}",
        f"acceptance length  {_f(whole['acceptance_length'])}{clean_too(_f(clean['acceptance_length']))}",
        f"identical          {whole['identical']}/{whole['answers']} answers",
        f"verdict            {_verdict(made)}",
        *([f"not asked          {_count(len(made['skipped']), 'turn')}"] if made["skipped"] else []),
    ]
    others = [f"{name}: {_x(_whole(one)['speedup'])}, {_length(_whole(one))}" for name, one in _others(made)]
    failed = [f"{name}: {fault}" for name, one in _others(made) for fault in one["failed"]]
    return "\n".join([*lines, *_advice(whole), *others, *failed])


def markdown(made: Report, picture: str | None = None) -> str:
    """The report as a page; `picture` is the name of the plot's file."""
    whole, setup = made["all"]["overall"], made["setup"]
    sections = [
        f"# {setup['backbone']} with {setup['drafter']}: {_x(whole['speedup'])}",
        _opening(made),
        _overall(made),
        f"![Speed-up by category, acceptance by depth, shares of time]({picture})" if picture else "",
        _further(made),
        "## By category\n\n" + _by_category(made),
        "## Acceptance by depth\n\n" + _by_depth(made),
        "## Time\n\n" + _time(made),
        _differences(made),
        _skipped(made),
        "## How it was measured\n\n" + _measured(made),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _opening(made: Report) -> str:
    whole, limit = made["all"]["overall"], made["setup"]["max_new_tokens"]
    plain, ours = (_f(whole[name], 1) for name in ("plain_tokens_per_second", "tokens_per_second"))
    parts = [
        f"Greedy answers to {_count(whole['questions'], 'question')} ({_count(whole['answers'], 'answer')} of at most",
        f"{limit} tokens), prefill included: {plain} tokens a second by transformers' `generate`, {ours} by headstart.",
        f"**{whole['identical']} of {whole['answers']} answers are identical**; verdict: {_verdict(made)}.",
    ]
    return " ".join([*parts, *_advice(whole)])


def _verdict(made: Report) -> str:
    """The verdict of `verify`, by the same rule, and what the differences are."""
    found, said = [one for one in made["differences"] if one["gap"] is not None], str(made["verdict"])
    if not found:
        return said
    worst = max(found, key=lambda one: one["gap"])
    explained = f"of {worst['allowed']:.2g} that rounding in {made['setup']['dtype']} explains"
    return f"{said} (largest gap {worst['gap']:.2g}, {explained})"


def _advice(whole: Figures) -> list[str]:
    costs = whole["costs"]
    if not costs:
        return []
    price = costs["draft"] + costs["verify"] + costs["rest"]
    told = f"A round emits {whole['acceptance_length']:.2f} tokens and costs {price:.2f} plain steps"
    return [told + (": it does not pay here." if whole["speedup"] < 1 else ".")]


def _overall(made: Report) -> str:
    two = [made[name]["overall"] for name in ("all", "without_loops")]
    rows = [
        ["answers", *(str(one["answers"]) for one in two)],
        ["identical to `model.generate`", *(f"{one['identical']}/{one['answers']}" for one in two)],
        ["tokens a second, transformers", *(_f(one["plain_tokens_per_second"], 1) for one in two)],
        ["tokens a second, headstart", *(_f(one["tokens_per_second"], 1) for one in two)],
        ["**speed-up**", *(f"**{_x(one['speedup'])}**" for one in two)],
        ["speed-up, mean over questions", *(_x(one["speedup_macro"]) for one in two)],
        ["acceptance length", *(_f(one["acceptance_length"]) for one in two)],
        ["acceptance length, mean over questions", *(_f(one["acceptance_length_macro"]) for one in two)],
    ]
    if two[0]["speedup_by_repetition"]:
        rows.append(["speed-up by repetition", *(", ".join(map(_x, one["speedup_by_repetition"])) for one in two)])
    return _table(["", "all", f"without {_count(made['looping'], 'looping answer')}"], rows)


def _others(made: Report) -> list[tuple[str, Report]]:
    return list(made.get("also", {}).items())


def _whole(one: Report) -> Figures:
    found: Figures = one["all"]["overall"]
    return found


def _length(one: Figures) -> str:
    return f"{_f(one['tokens_per_second'], 1)} tokens/s, {_f(one['acceptance_length'])} tokens a round"


def _further(made: Report) -> str:
    """The table of further sides."""
    if not _others(made):
        return ""
    rows = []
    for name, one in _others(made):
        two = [one[kind]["overall"] for kind in ("all", "without_loops")]
        figures = [text for each in two for text in (_x(each["speedup"]), _f(each["acceptance_length"]))]
        same = f"{two[0]['identical']}/{two[0]['answers']}"
        rows.append([name, str(one.get("tree") or "-"), _f(two[0]["tokens_per_second"], 1), *figures, same])
    head = [
        "side",
        "tree",
        "tokens/s",
        "speed-up",
        "tokens a round",
        "speed-up, no loops",
        "tokens a round",
        "identical",
    ]
    faults = "".join(f"\n\n{name} failed: {fault}" for name, one in _others(made) for fault in one["failed"])
    return f"## Further sides of the same run\n\n{_table(head, rows)}{faults}"


def _by_category(made: Report) -> str:
    head = ["category", "answers", "identical", "transformers", "headstart", "speed-up", "tokens a round"]
    rows = []
    for name, one in made["all"]["groups"].items():
        rows.append(_category(name, one, made["without_loops"]["groups"].get(name)))
        for part, figure in made["all"]["categories"].items():
            if figure["group"] == name:
                rows.append(_category(f"&nbsp;&nbsp;{part}", figure, made["without_loops"]["categories"].get(part)))
    table = _table([*head, "not looping", "speed-up", "tokens a round"], rows)
    return f"{table}\n\nTokens a second of each side; the last three columns are without looping answers."


def _category(name: str, one: Figures, clean: Figures | None) -> list[str]:
    rates = (_f(one["plain_tokens_per_second"], 1), _f(one["tokens_per_second"], 1))
    rest = (str(clean["answers"]), _x(clean["speedup"]), _f(clean["acceptance_length"])) if clean else ("0", "-", "-")
    same = f"{one['identical']}/{one['answers']}"
    return [name, str(one["answers"]), same, *rates, _x(one["speedup"]), _f(one["acceptance_length"]), *rest]


def _by_depth(made: Report) -> str:
    two = [made[name]["overall"] for name in ("all", "without_loops")]
    if not two[0]["accepted"]:
        return "Nothing was drafted."
    rows = []
    for depth, offered in enumerate(two[0]["offered"]):
        shares = [_at(one[name], depth) for one in two for name in ("acceptance", "conditional_acceptance")]
        rows.append([str(depth), f"{offered:,}", f"{_at(two[0]['accepted'], depth):,}", *map(_percent, shares)])
    head = ["depth", "rounds that drafted it", "accepted", "of all rounds", "of those accepted above"]
    return _table([*head, "of all, no loops", "of above, no loops"], rows)


def _time(made: Report) -> str:
    two = [made[name]["overall"] for name in ("all", "without_loops")]
    shares = [[part, *(_percent(one["shares"][part]) for one in two)] for part in PARTS]
    text = _table(["share of headstart's time", "all", "no loops"], shares)
    if not any(one["costs"] for one in two):
        return text
    names = {
        "draft": "drafting, in plain steps a round",
        "verify": "verification",
        "rest": "the rest",
        "predicted_decode": "predicted speed-up of decoding: acceptance length / these three",
        "predicted": "predicted speed-up, prefill included",
        "bound": "with drafting and the rest free it would be, of decoding",
    }
    rows = [[text, *(_f((one["costs"] or {}).get(name)) for one in two)] for name, text in names.items()]
    rows.insert(5, ["measured speed-up", *(_f(one["speedup"]) for one in two)])
    step = (two[0]["costs"] or two[1]["costs"])["plain_step_seconds"]
    costs = _table(["cost of a round", "all", "no loops"], rows)
    return f"{text}\n\nA plain decoding step takes {1000 * step:.1f} ms.\n\n{costs}"


def _differences(made: Report) -> str:
    found = made["differences"]
    if not found:
        return ""
    head = ["question", "turn", "step", "plain token", "our token", "what it is", "gap", "explained", "margin"]
    rows = [
        [*(str(one[name]) for name in ("question", "turn", "step", "plain", "ours", "kind")),
         *(_f(one[name], 5) for name in ("gap", "allowed", "margin"))]
        for one in found[:SHOWN]
    ]  # fmt: skip
    said = (
        "The first step (from 0) at which an answer parts from `model.generate`; how far, in float64, the lower of\n"
        "the two tokens lies below the best there; the gap that rounding in this dtype explains; and the margin\n"
        "between the two best tokens as this dtype has it."
    )
    return f"## Differences\n\n{said}\n\n{_table(head, rows)}{_more(found)}"


def _skipped(made: Report) -> str:
    found = made["skipped"]
    rows = [[str(one["question"]), str(one["turn"]), one["skipped"]] for one in found[:SHOWN]]
    return f"## Not asked\n\n{_table(['question', 'turn', 'why'], rows)}{_more(found)}" if found else ""


def _measured(made: Report) -> str:
    facts = [[name.replace("_", " "), str(value)] for name, value in made["setup"].items() if value is not None]
    command = f"\n\n```text\n{made['command']}\n```" if made["command"] else ""
    return (
        "Both sides in one process, in turn, who goes first alternating, after a warm-up; a later turn is asked\n"
        "behind the plain answer to the one before. Tokens a round (acceptance length) count the backbone's own one,\n"
        "and not the one that prefill gives. An answer loops if the plain one has a run of 10 tokens twice.\n\n"
        f"{_table(['setup', made['date']], facts, ':---')}{command}"
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], align: str = "---:") -> str:
    lines = [head, ["---", *([align] * (len(head) - 1))], *rows]
    cells = ([cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines)
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)


def _more(found: Sequence[Any]) -> str:
    return f"\n\n{len(found) - SHOWN} more are in report.json." if len(found) > SHOWN else ""


def _at(values: Sequence[Any], place: int) -> Any:
    return values[place] if place < len(values) else 0


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _f(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _x(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"
