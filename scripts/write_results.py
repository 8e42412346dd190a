"""Write docs/results.md, and its pictures, from what scripts/measure_results.sh left in a folder.

    python scripts/write_results.py OUT [--docs docs]

No figure of a table or picture is typed by hand: all are from the reports, and what is missing is said to be.
OUT/notes.md may hold what is to be said of the figures; it goes into the page as it stands.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from results.pictures import draw
from results.read import METHODS, SUITES, Report, Results, read
from results.tables import (
    by_group,
    commands,
    curve,
    facts,
    groups_of,
    limit,
    load_groups,
    loads,
    overall,
    reached,
    trees,
)  # fmt: skip
from results.targets import targets

from headstart.errors import UserError
from headstart.files import write_whole


def page(found: Results, pictures: dict[str, str]) -> str:
    """The whole page.

    Args:
        pictures: by name, the file in images/ that was drawn.
    """
    sections = [
        "# Results",
        _opening(found),
        "## What was to be reached\n\n" + reached(found) + _summary(found),
        found.notes,
        _greedy(found, pictures),
        _limit(found),
        _single("Longer answers", "long", found.long, _longer(found), overall),
        _single("Temperature 1", "drawn", found.drawn, DRAWN, lambda made: f"{loads(made)}{_under(load_groups(made))}"),
        _single("Several at once", "batches", found.batches, BATCHES, loads),
        _single("`generate` compiled", "compiled", found.compiled, COMPILED, overall),
        _single("Beside other decoders", "peers", found.peers, PEERS, overall),
        _single("All of Spec-Bench", "all480", found.all480, ALL, groups_of),
        _trees(found, pictures),
        _curve(found, pictures),
        f"## How it was measured\n\n{MEASURED}\n\n{facts(found.reports)}\n\n{commands(found)}",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


DRAWN = "The first turn of each question; each side draws for itself. By group: as a request sees it, over `generate`."
BATCHES = (
    "The first turn of each question. An engine with so many clients, each asking again once it was answered, beside\n"
    "`generate` in batches of as many. Without loops: ratios of tokens a second as one request sees them."
)
COMPILED = "Graphs are made ahead of the clock."
PEERS = "All in the same run, the drafters of others beside ours; what they accept a round is told by how tokens come."
ALL = "Plain `generate` against EAGLE-3, greedy."
MEASURED = (
    "All sides of a run in one process, in turn at every answer (under load, every few), who goes first changing\n"
    "each time; times are those of the whole call, prefill included; a later turn is asked behind the plain answer to\n"
    "the one before. Loops: answers of which the plain one has a run of 10 tokens twice. In bf16, answers part at\n"
    "near-ties, so that not all are identical ([bench](bench.md)). `scripts/measure_results.sh` runs all of it, and\n"
    "`scripts/write_results.py` wrote this page."
)


def _opening(found: Results) -> str:
    made = found.greedy.get("spec_bench") or next(iter(found.reports.values()))
    setup, dates = made["setup"], sorted(one["date"] for one in found.reports.values())
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    where = f"{setup['cpu']}, {_threads(setup['threads'])}"
    return (
        f"{Path(setup['backbone']).name} in {setup['dtype']} on {where}, measured {when}. Every ratio is\n"
        "to transformers' eager `generate` in the same run; figures in brackets leave out answers that loop, which\n"
        "flatter every drafter."
    )


def _threads(count: int) -> str:
    return f"{count} thread" + ("" if count == 1 else "s")


def _summary(found: Results) -> str:
    """How many were reached."""
    verdicts = [one.verdict for one in targets(found)]
    count = {kind: sum(one.startswith(kind) for one in verdicts) for kind in ("reached", "not reached", "not measured")}
    return f"\n\n{count['reached']} reached, {count['not reached']} not reached, {count['not measured']} not measured."


def _greedy(found: Results, pictures: dict[str, str]) -> str:
    parts = ["## Greedy, one at a time"]
    for name, title in SUITES.items():
        made = found.greedy.get(name)
        if made is None:
            parts.append(f"### {title}\n\n{_missing('greedy')}")
            continue
        whole = made["all"]["overall"]
        count = f"{whole['questions']} questions, {whole['answers']} answers, {made['looping']} of them loops"
        judged = f"Of the first of our sides below: {made['verdict']}."
        parts.append(f"### {title}\n\n{count}. {judged}\n\n{overall(made)}")
    if "spec_bench" in found.greedy:
        parts.append(f"### Speed-up by group\n\n{by_group(found.greedy, 'speedup')}")
        parts.append(f"### Tokens a round by group\n\n{by_group(found.greedy, 'acceptance_length')}")
        parts.append(_picture(pictures, "depth", "Acceptance by depth"))
    return "\n\n".join(part for part in parts if part)


def _longer(found: Results) -> str:
    if found.long is None:
        return ""
    made = found.long
    limit, whole = made["setup"]["max_new_tokens"], made["all"]["overall"]
    return (
        f"{whole['questions']} of these questions with answers of up to {limit} tokens; {made['looping']} of\n"
        f"{whole['answers']} answers loop."
    )


def _limit(found: Results) -> str:
    head = "## The limit"
    if "spec_bench" not in found.greedy:
        return f"{head}\n\n{_missing('greedy')}"
    said = (
        "Tokens a round over the cost of verifying the same tree, with drafting and Python free, beside what\n"
        "decoding gains. Costs are parts of a round in plain steps of `generate`, by the clocks of the bench on\n"
        "Spec-Bench; verification is the forward with its masks and the walk behind it. The last column has prefill\n"
        "in it, which no draft shortens."
    )
    return f"{head}\n\n{said}\n\n{limit(found.greedy['spec_bench'])}"


def _single(title: str, part: str, made: Report | None, said: str, show: Callable[[Report], str]) -> str:
    return f"## {title}\n\n" + (f"{said}\n\n{show(made)}" if made else _missing(part))


def _trees(found: Results, pictures: dict[str, str]) -> str:
    if not found.trees:
        return f"## Size of the tree\n\n{_missing('trees')}"
    said = (
        "Replayed on recorded acceptance and measured costs (`headstart tune`); the best were run. Its questions are\n"
        "asked in none of the parts above."
    )
    parts = [f"{METHODS.get(head, head)}:\n\n{trees(made)}" for head, made in found.trees.items()]
    return "\n\n".join(["## Size of the tree", said, _picture(pictures, "trees", "Speed by size of the tree"), *parts])


def _curve(found: Results, pictures: dict[str, str]) -> str:
    if found.curve is None:
        return f"## More training\n\n{_missing('curve')}"
    said = "Heads alone, on the questions by which trees are chosen; the cost of a round in plain steps of `generate`."
    picture = _picture(pictures, "curve", "Acceptance against training tokens")
    return "\n\n".join(part for part in ("## More training", said, picture, curve(found.curve)) if part)


def _under(text: str) -> str:
    return f"\n\n{text}" if text else ""


def _missing(part: str) -> str:
    return f"Not measured yet: part `{part}` of `scripts/measure_results.sh`."


def _picture(pictures: dict[str, str], name: str, said: str) -> str:
    return f"![{said}](images/{pictures[name]})" if name in pictures else ""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="the folder that scripts/measure_results.sh filled")
    parser.add_argument("--docs", type=Path, default=Path(__file__).resolve().parent.parent / "docs")
    given = parser.parse_args(arguments)
    try:
        found = read(given.out)
        text = page(found, draw(found, given.docs / "images"))
        write_whole(given.docs / "results.md", text)
    except UserError as error:
        parser.exit(2, f"write_results: {error}\n")
    print(given.docs / "results.md")


if __name__ == "__main__":
    main()
