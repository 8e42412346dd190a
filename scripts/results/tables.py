"""Reports as tables of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from results.read import METHODS, NAMES, SUITES, Report, Results, Side, command, points, sides, told
from results.targets import drafted, share, targets

FACTS = ("backbone", "dtype", "attention", "device", "cpu", "cores", "threads", "torch", "transformers", "python",
         "headstart", "weights", "prompts", "max_new_tokens")  # fmt: skip


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def f(value: float | None, digits: int = 2, unit: str = "") -> str:
    return "-" if value is None else f"{value:,.{digits}f}{unit}"


def both(one: float | None, clean: float | None) -> str:
    """A figure, and in brackets that without loops."""
    return f"{f(one)} ({f(clean)})"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"


# -- greedy, one at a time -------------------------------------------------------------------------------------------


def overall(made: Report) -> str:
    """Every side of a bench beside eager `generate`."""
    two, rows = [made[kind]["overall"] for kind in ("all", "without_loops")], []
    eager = [f(one["plain_tokens_per_second"], 1) for one in two]
    rows.append([NAMES["generate"], f"{eager[0]} ({eager[1]})", "1.00 (1.00)", "-", "-"])
    for side in sides(made):
        speeds = [f(side.figure("tokens_per_second", clean=clean), 1) for clean in (False, True)]
        whole = side.all["overall"]
        rows.append([
            side.label, f"{speeds[0]} ({speeds[1]})", both(side.speed(), side.speed(clean=True)),
            both(side.length(), side.length(clean=True)), f"{whole['identical']}/{whole['answers']}",
        ])  # fmt: skip
    return table(["side", "tokens a second", "speed-up", "tokens a round", "identical"], rows) + _faults(sides(made))


def _faults(some: Iterable[Side]) -> str:
    return "".join(f"\n\n{side.label} failed: {fault}" for side in some for fault in side.failed)


def by_group(greedy: dict[str, Report], figure: str) -> str:
    """A row for each side, a column for each group of Spec-Bench and for each other suite."""
    spec = sides(greedy["spec_bench"]) if "spec_bench" in greedy else []
    groups = list(greedy["spec_bench"]["all"]["groups"]) if spec else []
    others = {name: {one.label: one for one in sides(made)} for name, made in greedy.items() if name != "spec_bench"}
    rows = []
    for side in spec:
        cells = [both(side.figure(figure, group), side.figure(figure, group, clean=True)) for group in groups]
        for there in others.values():
            one = there.get(side.label)
            cells.append(both(one.figure(figure), one.figure(figure, clean=True)) if one else "-")
        rows.append([side.label, *cells])
    head = ["side", *(name.replace("_", " ") for name in groups), *(SUITES[name] for name in others)]
    return table(head, rows)


def groups_of(made: Report) -> str:
    """One side by group: the whole of a bench with one drafter."""
    rows = []
    for name, one in [*made["all"]["groups"].items(), ("**all**", made["all"]["overall"])]:
        clean = made["without_loops"]["groups"].get(name, {}) if name != "**all**" else made["without_loops"]["overall"]
        pair = [both(one[figure], clean.get(figure)) for figure in ("speedup", "acceptance_length")]
        rates = [f(one[figure], 1) for figure in ("plain_tokens_per_second", "tokens_per_second")]
        same = f"{one['identical']}/{one['answers']}"
        rows.append([name.replace("_", " "), same, str(clean.get("answers", 0)), *rates, *pair])
    ours = sides(made)[0].label
    return table(["prompts", "identical", "not looping", "`generate`", ours, "speed-up", "tokens a round"], rows)


# -- under load ------------------------------------------------------------------------------------------------------


def label(side: str, setup: Report) -> str:
    """A side of a load, as a reader calls it."""
    if side == "engine":
        return told(setup["drafter"], setup)[1]
    return told(side, setup.get("also", {}).get(side, {}))[1]


def loads(made: Report) -> str:
    """Sides by load. Without loops: of tokens a second as one request sees them, which are compared within a load."""
    clients = {run["load"]: int(run["load"].partition(":")[2]) for run in made["runs"]}
    rows = []
    for run in sorted(made["runs"], key=lambda run: clients[run["load"]]):
        clean, count = run["without_loops"], clients[run["load"]]
        alone = both(run["over_generate"], clean["over_generate"]) if count == 1 else f(run["over_generate"])
        over = [both(run["over_batched"], clean["over_batched"])] if len(set(clients.values())) > 1 else []
        same = f"{run['identical']}/{run['compared']}" if run["compared"] else "-"
        length = both(run["acceptance_length"], clean["acceptance_length"])
        speed = f(run["tokens_per_second"], 1)
        rows.append([str(count), label(run["side"], made["setup"]), speed, alone, *over, length, same])
    head = ["at once", "side", "tokens a second", "over `generate` alone"]
    head += ["over batched `generate`"] if len(set(clients.values())) > 1 else []
    faults = "".join(f"\n\n{run['side']} failed: {fault}" for run in made["runs"] for fault in run["failed"])
    return table([*head, "tokens a round", "as alone"], rows) + faults


def load_groups(made: Report) -> str:
    """One at a time, over `generate`, by group, as a request sees it."""
    speed, runs = "stream_tokens_per_second", {run["side"]: run for run in made["runs"] if run["load"] == "closed:1"}
    if "generate" not in runs:
        return ""
    rows = []
    for side, run in runs.items():
        pairs = (run, runs["generate"]), (run["without_loops"], runs["generate"]["without_loops"])
        cells = [
            both(*(_over(*(some["groups"].get(name, {}).get(speed) for some in pair)) for pair in pairs))
            for name in runs["generate"]["groups"]
        ]
        rows.append([label(side, made["setup"]), *cells])
    return table(["side", *(name.replace("_", " ") for name in runs["generate"]["groups"])], rows)


def _over(one: float | None, other: float | None) -> float | None:
    return one / other if one and other else None


# -- what was to be reached, and the limit -----------------------------------------------------------------------------


def reached(found: Results) -> str:
    rows = []
    for one in targets(found):
        wanted = f"{f(one.least)} to {f(one.most)}" if one.most is not None else f"{f(one.least)} or more"
        rows.append([one.text, wanted, both(one.all, one.clean) if one.all else "-", one.by, f"**{one.verdict}**"])
    return table(["what", "wanted", "measured", "by", ""], rows)


def curve(made: Report) -> str:
    """Heads by what they were trained on."""
    rows = []
    for tokens, side in points(made):
        costs = side.all["overall"]["costs"]
        spent = sum(costs[name] for name in ("verify", "draft", "rest")) if costs else None
        rows.append([
            f"{tokens:,}", METHODS[side.role], both(side.length(), side.length(clean=True)), f(spent),
            both(side.speed(), side.speed(clean=True)),
        ])  # fmt: skip
    return table(["supervised tokens", "head", "tokens a round", "cost of a round", "speed-up"], rows)


def limit(made: Report) -> str:
    """What rounds cost, in plain steps, and what they would gain with drafting and the rest free."""
    rows = []
    for side in drafted(sides(made)):
        whole, costs = side.all["overall"], side.all["overall"]["costs"]
        parts = [f(costs[name]) for name in ("verify", "draft", "rest")]
        gains = [f(costs[name], 2, "x") for name in ("bound", "predicted_decode")]
        clean = percent(share(side, clean=True))
        shares = f"{percent(share(side))} ({clean})"
        nodes = 1 + whole["drafted"] / whole["rounds"]
        told = f(side.speed(), 2, "x")
        rows.append([side.label, f(nodes, 1), f(side.length()), *parts, *gains, shares, told])
    head = ["side", "nodes", "tokens a round", "verification", "drafting", "rest", "limit", "decoding"]
    return table([*head, "share of the limit", "prefill included"], rows)


def trees(made: Report) -> str:
    """What `headstart tune` found for one head."""
    rows = [
        [one["tree"], f(one["nodes"], 1), f(one["acceptance_length"]), f(one["expected_speedup"], 2, "x"),
         f(one["measured_tokens_per_second"], 1)]
        for one in sorted(made["settings"], key=lambda one: one["nodes"])
    ]  # fmt: skip
    return table(["tree", "nodes", "tokens a round", "expected", "tokens a second, run"], rows)


# -- how it was measured -----------------------------------------------------------------------------------------------


def facts(reports: dict[str, Report]) -> str:
    """The setup that reports share; where some differ, each value with its parts."""
    rows = []
    for name in FACTS:
        values: dict[str, list[str]] = {}
        for part, made in reports.items():
            if (value := made["setup"].get(name)) is not None:
                shown = Path(value).name if str(value).startswith("/") else str(value)
                values.setdefault(shown, []).append(part)
        cells = list(values) if len(values) == 1 else [f"{value} ({', '.join(some)})" for value, some in values.items()]
        if cells:
            rows.append([name.replace("_", " "), "; ".join(cells)])
    return table(["setup", ""], rows)


def commands(found: Results) -> str:
    """What was run, and when."""
    ran = [(f"{part}, {made['date']}", made["command"]) for part, made in found.reports.items()]
    ran += [(f"trees/{head}", made["command"]) for head, made in found.trees.items()]
    return "\n\n".join(f"{when}:\n\n```sh\n{command(text)}\n```" for when, text in ran if text)
