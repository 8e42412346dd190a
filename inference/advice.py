"""What `headstart tune` found, told: tables, and in words whether drafting is worth it, where not, and by how much.

Acceptance by depth is that of the drafter's best guess: how often it was right, given that those before it were.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .costs import CostModel
from .record import Moment, replay
from .rows import Row
from .tree import Shape
from .tune import PLAIN, Run, Setting, Tuning, expected_speed, speed

WORTH = 1.03  # a speed-up below this is none
SHORT = 16  # tokens of an answer that drafting hardly gets into
FAR = 0.2  # of the tokens, out of a head's reach, that is worth a word
SHOWN = 12  # settings in the table


def findings(tuning: Tuning) -> dict[str, Any]:
    """All figures, as JSON values."""
    one, plain = tuning.costs.at(1), tuning.plain.expected
    best = next(each for each in tuning.settings if each.shape is not None)
    return {
        "prompts": {name: _about(rows, best.shape, tuning) for name, rows in groups(tuning.texts).items()},
        "costs": {
            "rows": tuning.costs.as_dict()["rows"],
            "read_seconds_a_token": tuning.costs.read,
            "plain_step_seconds": one.of(1, 0),
        },
        "settings": [_setting(each, plain, tuning) for each in shown(tuning)],
        "runs": {name: [run._asdict() for run in runs] for name, runs in tuning.runs.items()},
        "loads": {str(rows): _load(tuning, tuning.costs, rows) for rows in tuning.costs.by_rows},
        "chosen": tuning.chosen,
        "speedup": speed(tuning.runs[tuning.chosen]) / speed(tuning.runs[PLAIN]),
        "kept": None if tuning.place is None else str(tuning.place),
        "advice": list(advice(tuning)),
    }


def groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The answers by prompt type."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["group"], []).append(row)
    return found


def shown(tuning: Tuning) -> list[Setting]:
    """The best settings, and those that were run."""
    best = tuning.settings[:SHOWN]
    return best + [one for one in tuning.settings if one.name in tuning.runs and one not in best]


def acceptance(texts: Sequence[Sequence[Moment]], depth: int = 6) -> list[float]:
    """By depth, how often the drafter's best guess was right, given that those before it were; where there was one."""
    found = []
    for deep in range(depth):
        reached = right = 0
        for text in texts:
            for place, moment in enumerate(text):
                got = _run(moment)
                if got >= deep and place + deep < len(text) and deep < moment.get("room", depth):
                    reached, right = reached + 1, right + (got > deep)
        if not reached:
            break
        found.append(right / reached)
    return found


def _run(moment: Moment) -> int:
    """How many of the drafter's best guesses are right one after the other."""
    if "chain" in moment:
        return int(moment["chain"])
    wrong = [depth for depth, rank in enumerate(moment["ranks"]) if rank]
    return wrong[0] if wrong else len(moment["ranks"])


def _about(rows: Sequence[Row], shape: Shape | None, tuning: Tuning) -> dict[str, Any]:
    texts = [row["moments"] for row in rows]
    costs = tuning.costs.at(1)
    best = replay(texts, shape)
    prefill, tokens = sum(row["prefill"] for row in rows), sum(row["tokens"] for row in rows)
    step = costs.of(1, 0)
    return {
        "answers": len(rows),
        "prompt_tokens": sum(row["prompt_tokens"] for row in rows) / len(rows),
        "tokens": tokens / len(rows),
        "acceptance": acceptance(texts),
        "out_of_reach": sum(moment.get("room") == 0 for text in texts for moment in text)
        / max(sum(map(len, texts)), 1),
        "acceptance_length": best.acceptance_length,
        "speedup": expected_speed(best, costs) * step,
        "prefill_share": prefill / max(prefill + (tokens - len(rows)) * step, 1e-9),
    }


def _setting(one: Setting, plain: float, tuning: Tuning) -> dict[str, Any]:
    run = tuning.runs.get(one.name)
    rounds = max(1, one.replayed.rounds)
    return {
        "tree": one.name,
        "acceptance_length": one.replayed.acceptance_length,
        "nodes": 1 + one.replayed.nodes / rounds,
        "expected_tokens_per_second": one.expected,
        "expected_speedup": one.expected / plain,
        "measured_tokens_per_second": None if run is None else _decoding(run),
    }


def _decoding(runs: Sequence[Run]) -> float:
    """Tokens a second behind the first one: what the expected speed is held against."""
    return sum(run.tokens - 1 for run in runs) / max(sum(run.seconds - run.prefill for run in runs), 1e-9)


def _load(tuning: Tuning, costs: CostModel, rows: int) -> dict[str, Any]:
    """The best form where so many rows share each forward."""
    at = costs.at(rows)
    best = max(tuning.settings, key=lambda one: expected_speed(one.replayed, at))
    return {"best": best.name, "speedup": expected_speed(best.replayed, at) * at.of(1, 0), "tokens_per_second":
            rows * expected_speed(best.replayed, at)}  # fmt: skip


# -- in words --------------------------------------------------------------------------------------------------------


def advice(tuning: Tuning) -> Iterator[str]:
    """What the figures mean, a sentence each."""
    gain = speed(tuning.runs[tuning.chosen]) / speed(tuning.runs[PLAIN])
    drafting = [name for name in tuning.runs if name != PLAIN]
    if tuning.chosen == PLAIN or gain < WORTH:
        best = max(drafting, key=lambda name: speed(tuning.runs[name]))
        rate = speed(tuning.runs[best]) / speed(tuning.runs[PLAIN])
        yield f"Drafting is not worth it for these prompts here: the best form run, {best}, gives {_times(rate)}."
    else:
        yield f"Take {tuning.chosen}: {_times(gain)} on the prompts that were run, prefill included."
    about = findings_by_group(tuning)
    for name, found in about.items():
        if found["out_of_reach"] > FAR:
            yield (
                f"{name}: {100 * found['out_of_reach']:.0f}% of the tokens stand behind a longer text than the head "
                "was trained for, where it drafts nothing; a lookup does, and so does a head trained on longer texts."
            )
        elif found["speedup"] < WORTH and len(about) > 1:
            yield (
                f"{name}: drafts are rarely right ({_percent(found['acceptance'][:1])} of first guesses; high entropy, "
                f"or unlike what the drafter learned): {_times(found['speedup'])} while decoding."
            )
        if found["tokens"] < SHORT:
            yield f"{name}: answers have {found['tokens']:.0f} tokens; there is little to shorten."
        if found["prefill_share"] > 0.3:
            most = 1 / (found["prefill_share"] + (1 - found["prefill_share"]) / max(found["speedup"], 1.0))
            yield (
                f"{name}: {100 * found['prefill_share']:.0f}% of the time goes into reading prompts of "
                f"{found['prompt_tokens']:.0f} tokens, which drafts do not shorten: {most:.2f} times as fast at most."
            )
    for rows in sorted(tuning.costs.by_rows):
        if rows > 1:
            load = _load(tuning, tuning.costs, rows)
            if load["best"] == PLAIN:
                yield f"At {rows} requests at once nothing pays: a full batch leaves no idle arithmetic to draft with."
                break
            yield f"At {rows} requests at once the best is {load['best']}, {_times(load['speedup'])} over plain rounds."


def findings_by_group(tuning: Tuning) -> dict[str, dict[str, Any]]:
    """Figures of each prompt type, with the best form for all of them."""
    best = next(each for each in tuning.settings if each.shape is not None)
    return {name: _about(rows, best.shape, tuning) for name, rows in groups(tuning.texts).items()}


def told(tuning: Tuning) -> str:
    """Tables and words."""
    lines = ["Acceptance by prompt type and depth (the best guess, given that those before it were right)", ""]
    lines += ["| prompts | answers | prompt tokens | tokens | by depth | tokens a round | prefill |", "|" + "---|" * 7]
    for name, found in findings_by_group(tuning).items():
        depths = " ".join(f"{100 * a:.0f}%" for a in found["acceptance"])
        lines.append(
            f"| {name} | {found['answers']} | {found['prompt_tokens']:.0f} | {found['tokens']:.0f} | {depths} | "
            f"{found['acceptance_length']:.2f} | {100 * found['prefill_share']:.0f}% of the time |"
        )
    one = tuning.costs.at(1)
    step = one.of(1, 0)
    lines += ["", "Cost of a round, one row", "", "| nodes | ms | plain steps |", "|---|---|---|"]
    lines += [f"| {nodes} | {1000 * s:.1f} | {s / step:.2f} |" for nodes, s in one.verify]  # type: ignore[misc]
    lines += ["", "| depth of drafts | ms | plain steps |", "|---|---|---|"]
    lines += [f"| {depth} | {1000 * s:.1f} | {s / step:.2f} |" for depth, s in one.draft]  # type: ignore[misc]
    lines += ["", "Settings: tokens a second while decoding, expected and measured", ""]
    lines += ["| tree | tokens a round | nodes | expected | over plain | measured |", "|" + "---|" * 6]
    for setting in shown(tuning):
        figures = _setting(setting, tuning.plain.expected, tuning)
        measured = figures["measured_tokens_per_second"]
        run = "" if measured is None else f"{measured:.1f}"
        lines.append(
            f"| {setting.name} | {figures['acceptance_length']:.2f} | {figures['nodes']:.1f} | "
            f"{setting.expected:.1f} | {figures['expected_speedup']:.2f} | {run} |"
        )
    lines.append(f"| auto | | | | | {_decoding(tuning.runs['auto']):.1f} |")
    lines += ["", *advice(tuning)]
    if tuning.place is not None:
        lines.append(f"Kept in {tuning.place}: from now on the default tree of this drafter on this machine.")
    elif tuning.chosen != PLAIN:
        lines.append(f"Not kept as a default: give --tree {tuning.chosen}.")
    return "\n".join(lines)


def _times(rate: float) -> str:
    """1.25 as `1.25 times the speed of plain decoding (25% faster)`."""
    change = f"{100 * (rate - 1):.0f}% faster" if rate >= 1 else f"{100 * (1 - rate):.0f}% slower"
    return f"{rate:.2f} times the speed of plain decoding ({change})"


def _percent(shares: Sequence[float]) -> str:
    return f"{100 * shares[0]:.0f}%" if shares else "none"
