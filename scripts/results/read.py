"""The folder of scripts/measure_results.sh, read: reports by part, and the sides of a run by what they are."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.errors import UserError

Report = dict[str, Any]
SUITES = {"spec_bench": "Spec-Bench", "humaneval": "HumanEval", "gsm8k": "GSM8K"}
METHODS = {"eagle3": "EAGLE-3", "eagle1": "EAGLE-1", "medusa": "Medusa", "hydra": "Hydra"}
LOOKUPS = ("ngram", "suffix", "lookup")
COMPILED = "peer:rivals.compiled:generate"
OWN_TRAINED = "headstart"
"""Of HEADS, the one that headstart trained on what the others had."""
NAMES = {
    "generate": "`generate`, eager", "none": "our loop, no drafts", "alone": "our loop, no drafts",
    "plain": "engine, no drafts", "ngram": "`ngram`", "suffix": "`suffix`", "lookup": "`generate` with prompt lookup",
    COMPILED: "`generate`, static cache, compiled",
}  # fmt: skip


@dataclass(frozen=True)
class Side:
    """One side of a run."""

    role: str
    """none, ngram, suffix, lookup, compiled, peer, hybrid, or the method of a head."""
    label: str
    tree: str | None
    own: bool
    """Whether it is a drafter of ours: not a peer's decoder, and no head that another tool trained."""
    all: Report
    """Figures: overall, groups."""
    clean: Report
    """The same without looping answers."""
    failed: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """What it drafts with: lookup, eagle3, eagle1, medusa, hybrid, or other."""
        if self.role in LOOKUPS:
            return "lookup"
        if self.role != "peer":
            return self.role
        words = {"lookup": "lookup", "pld": "lookup", "ngram": "lookup", "suffix": "lookup", "medusa": "medusa"}
        words |= dict.fromkeys(("eagle3", "speculators", "specforge"), "eagle3") | {"eagle1": "eagle1"}
        return next((kind for word, kind in words.items() if word in self.label.lower()), "other")

    def speed(self, group: str | None = None, clean: bool = False) -> float | None:
        """Relative to eager `generate`."""
        return self.figure("speedup", group, clean)

    def length(self, group: str | None = None, clean: bool = False) -> float | None:
        """Tokens a round."""
        return self.figure("acceptance_length", group, clean)

    def figure(self, name: str, group: str | None = None, clean: bool = False) -> float | None:
        section = self.clean if clean else self.all
        found: float | None = (section["overall"] if group is None else section["groups"].get(group, {})).get(name)
        return found


@dataclass(frozen=True)
class Results:
    """All that is there; what is missing is None."""

    folder: Path
    greedy: dict[str, Report]
    """By suite."""
    long: Report | None
    drawn: Report | None
    batches: Report | None
    compiled: Report | None
    peers: Report | None
    all480: Report | None
    trees: dict[str, Report]
    """What `headstart tune` found, by head."""
    curve: Report | None
    notes: str

    @property
    def reports(self) -> dict[str, Report]:
        """All reports of benches, by part."""
        found = {f"greedy/{name}": one for name, one in self.greedy.items()}
        single = {"long": self.long, "drawn": self.drawn, "batches": self.batches, "compiled": self.compiled,
                  "peers": self.peers, "all480": self.all480}  # fmt: skip
        found |= {f"{name}/spec_bench": one for name, one in single.items() if one}
        return found | ({"curve": self.curve} if self.curve else {})


def read(folder: Path) -> Results:
    """What scripts/measure_results.sh left there.

    Raises:
        UserError: there is no report at all, or a file is broken.
    """
    bench = {name: _json(folder / f"{name}/spec_bench/report.json") for name in ("long", "compiled", "peers", "all480")}
    load = {name: _json(folder / f"{name}/spec_bench/load_report.json") for name in ("drawn", "batches")}
    greedy = {name: made for name in SUITES if (made := _json(folder / f"greedy/{name}/report.json"))}
    trees = {path.parent.name: _tuned(path) for path in sorted((folder / "trees").glob("*/found.json"))}
    notes = folder / "notes.md"
    found = Results(
        folder, greedy, bench["long"], load["drawn"], load["batches"], bench["compiled"], bench["peers"],
        bench["all480"], trees, _json(folder / "curve/report.json"),
        notes.read_text(encoding="utf-8").strip() if notes.exists() else "",
    )  # fmt: skip
    if not found.reports:
        raise UserError(f"{folder}: no report is there; scripts/measure_results.sh SUITES {folder} makes them")
    return found


def _tuned(path: Path) -> Report:
    """What `headstart tune` said, and the command of it."""
    done = path.parent / "done"
    return {**_json(path), "command": done.read_text(encoding="utf-8").strip() if done.exists() else ""}


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})") from None


def sides(made: Report) -> list[Side]:
    """The sides of a bench, without eager `generate`: first that of `--head`, then the further ones."""
    setup = made["setup"]
    first = _side(setup["drafter"], setup, made["all"], made["without_loops"])
    rest = [_side(name, one, one["all"], one["without_loops"]) for name, one in made.get("also", {}).items()]
    return [first, *rest]


def _side(name: str, facts: Report, whole: Report, clean: Report) -> Side:
    role, label, own = told(name, facts)
    return Side(role, label, facts.get("tree"), own, whole, clean, tuple(facts.get("failed", ())))


def told(name: str, facts: Report) -> tuple[str, str, bool]:
    """What a side is, what a reader calls it, and whether it is ours."""
    if name in NAMES:
        role = "compiled" if name == COMPILED else name
        return role, NAMES[name], role not in ("generate", "lookup", "compiled")
    if name.startswith("peer"):
        return "peer", f"peer `{re.sub('^peer[: ]', '', name)}`", False
    drafter, tree = str(facts.get("drafter") or name), facts.get("tree")
    if drafter in NAMES:
        return drafter, f"{NAMES[drafter]}, {tree}", True
    folder, _, rest = drafter.partition(" (")
    place = Path(folder.rpartition(":")[2]).name
    plain = place in METHODS or place in ("head", "")
    own, form = plain or place == OWN_TRAINED, f", {tree}" if tree else ""
    if drafter.startswith("hybrid:"):
        return "hybrid", f"{METHODS.get(place, f'head `{place}`')} with lookup{form}", own
    method = rest.rstrip(")")
    if method not in METHODS:
        return "other", f"`{drafter}`{form}", own
    return method, METHODS[method] + ("" if plain else f" head `{place}`") + form, own


def points(made: Report) -> list[tuple[int, Side]]:
    """The heads of the part curve, by the supervised tokens that they were trained on."""
    found = [(re.search(r"curve-(\d+)", side.label), side) for side in sides(made)]
    return sorted(((int(match[1]), side) for match, side in found if match), key=lambda point: point[0])


def command(text: str) -> str:
    """A command as it is shown: without folders of a machine."""
    return shlex.join(Path(word).name if word.startswith("/") else word for word in shlex.split(text))
