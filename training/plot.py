"""Curves of runs as a picture: loss, accuracy and acceptance by depth, acceptance length, speed.

A colour stands for a run, a lighter line for a deeper depth. matplotlib is imported when a picture is drawn, and not
needed for anything else.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import write_whole
from .curves import Curves, Points

COLOURS = ("#2563a8", "#e8923a", "#3f9b7f", "#b0417a", "#7a6cc3", "#8a7442", "#4aa5c9", "#c65b4a")
INK, FAINT, GRID = "#1f2933", "#6b7785", "#e3e7ec"
STYLE: Any = {
    "font.size": 9.5, "text.color": INK, "text.parse_math": False, "axes.edgecolor": GRID, "axes.labelcolor": FAINT,
    "xtick.color": FAINT, "ytick.color": FAINT, "axes.titlesize": 11, "axes.titleweight": "bold",
    "axes.titlelocation": "left", "axes.titlecolor": INK, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.color": GRID, "axes.axisbelow": True, "legend.frameon": False, "legend.fontsize": 8.5,
}  # fmt: skip


def draw(runs: Sequence[Curves], path: Path) -> None:
    """Draw runs into one PNG, whole or not at all.

    Raises:
        UserError: matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("matplotlib is missing, which draws the curves: pip install 'headstart[plot]'") from None
    with rc_context(STYLE):
        figure = Figure(figsize=(13, 7), dpi=130, facecolor="white", layout="constrained")
        panels = figure.subplots(2, 3).flatten()
        for panel, fill in zip(panels, PANELS, strict=False):
            for place, run in enumerate(runs):
                fill(panel, run, COLOURS[place % len(COLOURS)])
            panel.set_xlabel("step")
            if not panel.has_data():
                panel.text(0.02, 0.9, "nothing was measured", color=FAINT, transform=panel.transAxes)
        _legend(panels[-1], runs)
        content = io.BytesIO()
        figure.savefig(content, format="png")
    write_whole(path, content.getvalue())


def _loss(panel: Any, run: Curves, colour: str) -> None:
    panel.set_title("Loss")
    _line(panel, run.points("loss"), colour, alpha=0.45, linewidth=1)
    _line(panel, run.points("loss", held_out=True), colour, marker="o")


def _accuracy(panel: Any, run: Curves, colour: str) -> None:
    panel.set_title("Accuracy by depth")
    _depths(panel, run.by_depth("accuracy", held_out=True) or run.by_depth("accuracy"), colour)


def _acceptance(panel: Any, run: Curves, colour: str) -> None:
    panel.set_title("Acceptance by depth, measured")
    _depths(panel, run.by_depth("acceptance", held_out=True), colour)


def _length(panel: Any, run: Curves, colour: str) -> None:
    panel.set_title("Tokens a round")
    _line(panel, run.points("estimated_acceptance_length", held_out=True), colour, linestyle=":", marker=".")
    _line(panel, run.points("acceptance_length", held_out=True), colour, marker="o")


def _speed(panel: Any, run: Curves, colour: str) -> None:
    panel.set_title("Tokens a second, in training")
    _line(panel, run.points("tokens_per_second"), colour)
    panel.set_ylim(bottom=0)


PANELS = (_loss, _accuracy, _acceptance, _length, _speed)


def _line(panel: Any, points: Points, colour: str, **style: Any) -> None:
    if points:
        steps, values = zip(*points, strict=True)
        panel.plot(steps, values, color=colour, markersize=4, **style)


def _depths(panel: Any, depths: Sequence[Points], colour: str) -> None:
    for depth, points in enumerate(depths):
        _line(panel, points, colour, alpha=max(0.25, 1 - 0.25 * depth), marker=".")
    panel.set_ylim(0, 1.02)
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")


def _legend(panel: Any, runs: Sequence[Curves]) -> None:
    """Which colour is which run, and what the kinds of lines say."""
    for place, run in enumerate(runs):
        panel.plot([], [], color=COLOURS[place % len(COLOURS)], linewidth=3, label=run.name)
    kinds: dict[str, dict[str, Any]] = {
        "held out, measured": {"marker": "o"},
        "estimated": {"linestyle": ":", "marker": "."},
        "while training": {"alpha": 0.45, "linewidth": 1},
        "lighter: deeper": {"alpha": 0.3, "marker": "."},
    }
    for label, style in kinds.items():
        panel.plot([], [], color=INK, markersize=4, label=label, **style)
    panel.legend(loc="center left")
    panel.axis("off")
