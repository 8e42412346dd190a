"""The verdict of scripts/check_policy.sh on what `headstart tune --json` found.

Speeds are tokens a second, prefill included. The noise band is two standard errors of the mean difference of the
logarithms of paired speeds, prompt by prompt.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from statistics import stdev
from typing import Any

NEAR, SLOWER = 0.95, 0.97
Runs = list[dict[str, Any]]


def speed(runs: Runs) -> float:
    return float(sum(run["tokens"] for run in runs) / sum(run["seconds"] for run in runs))


def band(runs: Runs, others: Runs) -> float:
    """How far a ratio of the two may be off by chance."""
    logs = [math.log(b["seconds"] / a["seconds"]) for a, b in zip(runs, others, strict=True)]
    return 2 * stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else 1.0


def verdict(found: dict[str, Any]) -> tuple[str, bool]:
    """What is to be read, and whether both promises are kept."""
    runs: dict[str, Runs] = found["runs"]
    plain, auto = runs["none"], runs["auto"]
    best = max((name for name in runs if name not in ("none", "auto")), key=lambda name: speed(runs[name]))
    ranked = [one["tree"] for one in found["settings"] if one["tree"] != "none"]
    lines = [f"ranked by replay: {', '.join(ranked)}", ""]
    lines += [
        f"{name}: {speed(some):.2f} tokens/s, {speed(some) / speed(plain):.3f} of plain" for name, some in runs.items()
    ]
    ratio, noise = speed(auto) / speed(runs[best]), band(auto, runs[best])
    kept = ratio >= min(NEAR, 1 - noise)
    lines += ["", f"auto / best fixed ({best}): {ratio:.3f}, noise band {noise:.3f}: {'kept' if kept else 'NOT KEPT'}"]
    for group in dict.fromkeys(run["group"] for run in plain):
        mine, theirs = ([run for run in some if run["group"] == group] for some in (auto, plain))
        ratio, noise = speed(mine) / speed(theirs), band(mine, theirs)
        fine = ratio >= min(SLOWER, 1 - noise)
        kept &= fine
        lines.append(f"{group}: auto / plain {ratio:.3f}, noise band {noise:.3f}: {'kept' if fine else 'NOT KEPT'}")
    return "\n".join(lines), kept


if __name__ == "__main__":
    text, fine = verdict(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    print(text)
    sys.exit(0 if fine else 1)
