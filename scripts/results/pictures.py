"""The pictures of the page: acceptance by depth, speed against tree size, acceptance against training tokens."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headstart.files import write_whole
from headstart.inference.plots import GRID, STYLE
from headstart.training.plot import COLOURS
from results.read import METHODS, Results, points, sides
from results.targets import drafted


def draw(found: Results, images: Path) -> dict[str, str]:
    """Draw what there are figures for; by name, the file that was drawn. A picture of an earlier page goes."""
    made = {}
    for name, (fill, there) in PICTURES.items():
        path = images / f"results-{name}.png"
        if there(found) and _drawn(found, fill, path):
            made[name] = path.name
        else:
            path.unlink(missing_ok=True)
    return made


def _drawn(found: Results, fill: Callable[[Any, Results], None], path: Path) -> bool:
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        warnings.warn("no pictures: matplotlib is missing; pip install 'headstart[plot]'", stacklevel=2)
        return False
    with rc_context(STYLE):
        figure = Figure(figsize=(8, 4.4), dpi=130, facecolor="white", layout="constrained")
        axes = figure.subplots()
        fill(axes, found)
        axes.grid(color=GRID)
        axes.set_axisbelow(True)
        axes.legend()
        content = io.BytesIO()
        figure.savefig(content, format="png")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content.getvalue())
    return True


def _depth(axes: Any, found: Results) -> None:
    """A colour for a side; dotted: without looping answers."""
    for place, side in enumerate(drafted(sides(found.greedy["spec_bench"]))):
        colour = COLOURS[place % len(COLOURS)]
        for section, style, label in ((side.all, "-", side.label.replace("`", "")), (side.clean, ":", None)):
            values = [value or 0.0 for value in section["overall"]["acceptance"]]
            axes.plot(range(len(values)), values, style, color=colour, marker="o", markersize=4, label=label)
    axes.set_title("Acceptance by depth, Spec-Bench, greedy (dotted: without loops)")
    axes.set_xlabel("depth of the draft")
    axes.set_ylabel("of all rounds")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")


def _trees(axes: Any, found: Results) -> None:
    """Lines: expected by replay; filled: run."""
    for place, (head, made) in enumerate(found.trees.items()):
        colour, label = COLOURS[place % len(COLOURS)], METHODS.get(head, head)
        some = sorted((one for one in made["settings"] if one["tree"] != "none"), key=lambda one: one["nodes"])
        for form, style in (("chain", "o--"), ("static", "o-."), ("dynamic", "o:")):
            expected = [(one["nodes"], one["expected_speedup"]) for one in some if one["tree"].startswith(form)]
            named = {"label": f"{label}, {form}, expected", "markerfacecolor": "white"}
            if expected:
                axes.plot(*zip(*expected, strict=True), style, color=colour, **named)
        plain = next((one for one in made["settings"] if one["tree"] == "none"), {}).get("measured_tokens_per_second")
        run = [(one["nodes"], one["measured_tokens_per_second"] / plain) for one in some
               if plain and one["measured_tokens_per_second"]]  # fmt: skip
        if run:
            axes.plot(*zip(*run, strict=True), "o", color=colour, label=f"{label}, run")
        for one in some:
            axes.annotate(one["tree"], (one["nodes"], one["expected_speedup"]), (4, -9), textcoords="offset points",
                          fontsize=6.5)  # fmt: skip
    axes.set_title("Decoding speed by size of the tree")
    axes.set_xlabel("nodes of a verification, the root included")
    axes.set_ylabel("times our plain decoding")


def _curve(axes: Any, found: Results) -> None:
    """A line for a head and tree."""
    assert found.curve is not None
    lines: dict[str, list[tuple[float, float | None]]] = {}
    for tokens, side in points(found.curve):
        lines.setdefault(f"{METHODS[side.role]}, {side.tree}", []).append((tokens, side.length()))
    for place, (label, line) in enumerate(lines.items()):
        axes.plot(*zip(*line, strict=True), "o-", color=COLOURS[place % len(COLOURS)], label=label)
    axes.set_xscale("log")
    axes.set_xticks(sorted({tokens for line in lines.values() for tokens, _ in line}))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g}")
    axes.minorticks_off()
    axes.set_title("Acceptance by training tokens")
    axes.set_xlabel("supervised tokens, millions")
    axes.set_ylabel("tokens a round")


PICTURES: dict[str, tuple[Callable[[Any, Results], None], Callable[[Results], bool]]] = {
    "depth": (_depth, lambda found: "spec_bench" in found.greedy),
    "trees": (_trees, lambda found: bool(found.trees)),
    "curve": (_curve, lambda found: found.curve is not None),
}
