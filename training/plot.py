"""Curves of runs as a picture: loss, accuracy and acceptance by depth, acceptance length, speed.

A colour stands for a run, a lighter line for a deeper depth, and all panels have the same steps. matplotlib is imported
when a picture is drawn, and not needed for anything else.
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
    "figure.constrained_layout.w_pad": 0.15, "figure.constrained_layout.h_pad": 0.15,
}  # fmt: skip
TRAINED: dict[str, Any] = {"alpha": 0.45, "linewidth": 1}
ESTIMATED: dict[str, Any] = {"linestyle": ":", "marker": "o", "markerfacecolor": "white"}


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
        last = max(line["step"] for run in runs for line in (*run.steps, *run.held_out))
        panels = figure.subplots(2, 3).flatten()
        for panel, fill in zip(panels, PANELS, strict=False):
            for place, run in enumerate(runs):
                fill(panel, run, COLOURS[place % len(COLOURS)])
            panel.set_xlabel("step")
            panel.set_xlim(0, 1.02 * max(last, 1))
            panel.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
            panel.xaxis.get_major_locator().set_params(integer=True)
            if not panel.has_data():
                panel.text(0.02, 0.9, "nothing was measured", color=FAINT, transform=panel.transAxes)
        _legend(panels[-1], runs)
        content = io.BytesIO()
        figure.savefig(content, format="png")
    write_whole(path, content.getvalue())


def _loss(panel: Any, run: Curves, colour: str) -> None:
    panel.set_title("Loss")
    _line(panel, run.points("loss"), colour, **TRAINED)
    _line(panel, run.points("loss", held_out=True), colour, marker="o")
    _digits(panel, "{:.4g}")


def _accuracy(panel: Any, run: Curves, colour: str) -> None:
    panel.set_title("Accuracy by depth")
    _depths(panel, run.by_depth("accuracy"), colour, **TRAINED)
    _depths(panel, run.by_depth("accuracy", held_out=True), colour, marker="o")


def _acceptance(panel: Any, run: Curves, colour: str) -> None:
    panel.set_title("Acceptance by depth, measured")
    _depths(panel, run.by_depth("acceptance", held_out=True), colour, marker="o")


def _length(panel: Any, run: Curves, colour: str) -> None:
    panel.set_title("Tokens a round")
    _line(panel, run.points("estimated_acceptance_length", held_out=True), colour, **ESTIMATED)
    _line(panel, run.points("acceptance_length", held_out=True), colour, marker="o")
    _digits(panel, "{:.4g}")


def _speed(panel: Any, run: Curves, colour: str) -> None:
    panel.set_title("Tokens a second, in training")
    _line(panel, run.points("tokens_per_second"), colour)
    panel.set_ylim(0, max([panel.get_ylim()[1], *(1.05 * value for _, value in run.points("tokens_per_second"))]))
    _digits(panel, "{:,.0f}")


PANELS = (_loss, _accuracy, _acceptance, _length, _speed)


def _line(panel: Any, points: Points, colour: str, **style: Any) -> None:
    if points:
        steps, values = zip(*points, strict=True)
        panel.plot(steps, values, color=colour, **{"markersize": 4, **style})


def _depths(panel: Any, depths: Sequence[Points], colour: str, **style: Any) -> None:
    for depth, points in enumerate(depths):
        alpha = style.get("alpha", 1.0) * max(0.25, 1 - 0.25 * depth)
        _line(panel, points, colour, **{**style, "alpha": alpha})
    panel.set_ylim(-0.02, 1.02)
    _digits(panel, "{:.0%}")


def _digits(panel: Any, form: str) -> None:
    panel.yaxis.set_major_formatter(lambda value, _: form.format(value))


def _legend(panel: Any, runs: Sequence[Curves]) -> None:
    """Which colour is which run, and what the kinds of lines say."""
    for place, run in enumerate(runs):
        panel.plot([], [], color=COLOURS[place % len(COLOURS)], linewidth=3, label=run.name)
    kinds: dict[str, dict[str, Any]] = {
        "held out, measured": {"marker": "o"},
        "estimated": ESTIMATED,
        "while training": TRAINED,
        "lighter: deeper": {"alpha": 0.3, "marker": "o"},
    }
    for label, style in kinds.items():
        panel.plot([], [], color=INK, label=label, **{"markersize": 4, **style})
    panel.legend(loc="upper left")
    panel.axis("off")
