"""The picture of a bench: speed-up by category, acceptance by depth, shares of time.

matplotlib is imported when a picture is drawn, and not needed for anything else.
"""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

from ..files import write_whole
from .figures import Report
from .stats import PARTS

INK, FAINT, GRID = "#1f2933", "#6b7785", "#e3e7ec"
KINDS = {"all": ("all answers", "#2563a8"), "without_loops": ("without loops", "#e8923a")}
COLOURS = {"prefill": "#c3cdd8", "draft": "#63b3a4", "verify": "#35566b", "rest": "#94a3b1"}
MOST = 24  # groups that are shown; those with the most answers
STYLE: Any = {
    "font.size": 10, "text.color": INK, "text.parse_math": False, "axes.edgecolor": GRID, "axes.labelcolor": FAINT,
    "xtick.color": FAINT, "ytick.color": INK, "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlepad": 10,
    "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    "legend.fontsize": 8.5,
}  # fmt: skip


def draw(made: Report, path: Path) -> bool:
    """Draw a report as PNG to `path`, whole or not at all; False, with a note, where matplotlib is missing."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError:
        warnings.warn("no picture: matplotlib is missing; pip install 'headstart[plot]'", stacklevel=2)
        path.unlink(missing_ok=True)  # one of an earlier run would show other figures
        return False
    names = _names(made)
    height = 1.6 + 0.4 * max(len(names), 5)  # inches of the upper row
    with rc_context(STYLE):
        pads = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
        figure = Figure(figsize=(11, height + 1.9), dpi=160, facecolor="white", layout=pads)
        grid = figure.add_gridspec(2, 2, height_ratios=[height, 1.2], width_ratios=[1.3, 1], hspace=0.08, wspace=0.08)
        _speedups(figure.add_subplot(grid[0, 0]), made, names)
        _acceptance(figure.add_subplot(grid[0, 1]), made)
        _shares(figure.add_subplot(grid[1, :]), made)
        figure.suptitle(_title(made), x=0.012, ha="left", fontsize=13, fontweight="bold")
        content = io.BytesIO()
        figure.savefig(content, format="png")
    write_whole(path, content.getvalue())
    return True


def _title(made: Report) -> str:
    setup, speedup = made["setup"], made["all"]["overall"]["speedup"]
    told = "" if speedup is None else f": {speedup:.2f}x"
    return f"{_short(setup['backbone'], 40)} with {_short(setup['drafter'], 40)}{told}"


def _names(made: Report) -> list[str]:
    """The groups with the most answers, in their order, and the whole if there are several."""
    groups = made["all"]["groups"]
    most = sorted(groups, key=lambda name: -groups[name]["answers"])[:MOST]
    return [*(name for name in groups if name in most), *(["overall"] if len(groups) != 1 else [])]


def _figure(section: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = section["groups"].get(name, {}) if name != "overall" else section["overall"]
    return found


def _speedups(axes: Any, made: Report, names: list[str]) -> None:
    """A bar for all answers of a group, and one for those that do not loop."""
    largest = 1.1
    for offset, (kind, (label, colour)) in zip((-0.19, 0.19), KINDS.items(), strict=True):
        values = [_figure(made[kind], name).get("speedup") or 0.0 for name in names]
        places = [place + offset for place in range(len(names))]
        axes.barh(places, values, height=0.35, color=colour, label=label)
        for place, value in zip(places, values, strict=True):
            axes.text(value, place, f" {value:.2f}" if value else " -", va="center", fontsize=8.5)
        largest = max(largest, *values)
    axes.axvline(1.0, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.set_yticks(range(len(names)), [_short(name, 24) for name in names])
    axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.set_xlim(0, 1.1 * largest)
    axes.set_xlabel("tokens a second, relative to transformers' generate")
    axes.set_title("Speed-up")
    axes.spines["left"].set_visible(False)
    axes.legend(ncols=2, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.3)


def _acceptance(axes: Any, made: Report) -> None:
    """Lines by depth: of all rounds, and of those that accepted the depth above."""
    axes.set_title("Acceptance by depth")
    depths = len(made["all"]["overall"]["accepted"])
    if not depths:
        axes.axis("off")
        axes.text(0, 0.9, "nothing was drafted", color=FAINT, transform=axes.transAxes)
        return
    ways = (("acceptance", "-", "of all rounds"), ("conditional_acceptance", ":", "of those accepted above"))
    for kind, (label, colour) in KINDS.items():
        for name, dash, way in ways:
            values = made[kind]["overall"][name]
            line = {"color": colour, "marker": "o", "markersize": 4, "label": f"{label}, {way}"}
            axes.plot(range(len(values)), [value or 0.0 for value in values], dash, **line)
    axes.set_ylim(0, 1.02)
    axes.set_xticks(range(depths))
    axes.set_xlabel("depth of the draft")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", color=GRID)
    axes.set_axisbelow(True)
    axes.spines["left"].set_visible(False)
    axes.legend()


def _shares(axes: Any, made: Report) -> None:
    """Where our time goes, as one bar each."""
    for place, kind in enumerate(KINDS):
        reached = 0.0
        for part in PARTS:
            share = made[kind]["overall"]["shares"][part] or 0.0
            axes.barh(place, share, left=reached, height=0.62, color=COLOURS[part], label=part if place == 0 else None)
            if share > 0.03:
                colour = "white" if part == "verify" else INK
                style = {"ha": "center", "va": "center", "fontsize": 9, "color": colour}
                axes.text(reached + share / 2, place, f"{share:.0%}", **style)
            reached += share
    axes.set_yticks(range(len(KINDS)), [label for label, _ in KINDS.values()])
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xticks([])
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_title("Where headstart spends its time")
    axes.legend(ncols=len(PARTS), loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.3)


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
