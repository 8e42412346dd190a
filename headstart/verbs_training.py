"""The verbs of `training/`: what each takes, and the function that turns files into arguments."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from headstart.errors import UserError
from headstart.options import silence
from headstart.verb import Verb

if TYPE_CHECKING:
    from headstart.inference.serving import ServeSettings
    from headstart.training.plan import PlanSettings


@dataclass
class TrainSettings:
    """A training run."""

    recipe: Path
    """The recipe, a YAML file such as configs/smollm2-eagle3.yaml."""
    overrides: list[str] = field(default_factory=list)
    """Settings of the recipe that are to be otherwise, as key=value."""
    check: bool = False
    """Load everything, run one step, print what the run would be, and leave nothing behind."""


def train(settings: TrainSettings) -> None:
    from headstart.training.loop import train
    from headstart.training.sheet import check, told

    silence()
    if settings.check:
        result = told(check(settings.recipe, settings.overrides))
    else:
        result = str(train(settings.recipe, settings.overrides))
    if os.environ.get("RANK", "0") == "0":  # the first of the processes that accelerate launched
        print(result)


def plan(settings: PlanSettings, served: ServeSettings) -> None:
    silence()
    if served.serve:
        _plan_serving(settings, served)
        return
    from headstart.training.plan import options_of, plan
    from headstart.training.sheet import told

    if settings.recipe is None:
        raise UserError("plan takes the recipe of a run, or --serve for what serving adds")
    made = plan(settings.recipe, settings.overrides, **options_of(settings))
    print(told(made.lines()), flush=True)
    made.check()


def _plan_serving(settings: PlanSettings, served: ServeSettings) -> None:
    import json

    from headstart.inference.serving import GIB, figures, serving, told

    if settings.recipe is not None:
        raise UserError(f"plan --serve takes no recipe; {settings.recipe} is one too many")
    room = None if settings.memory is None else settings.memory * GIB
    parts = serving(served)
    print(json.dumps(figures(parts, served, room)) if served.json else told(parts, served, room))


@dataclass
class PlotSettings:
    """Curves of training runs."""

    runs: list[Path]
    """Folders of runs, to be compared."""
    out: Path = Path("curves.png")
    """The picture."""


def plot(settings: PlotSettings) -> None:
    from headstart.training.curves import read_curves, table
    from headstart.training.plot import draw

    curves = read_curves(settings.runs)
    print(table(curves), flush=True)
    draw(curves, settings.out)
    print(settings.out)


TRAINING: dict[str, Verb] = {
    "train": Verb(
        train,
        "Train a head by a recipe; a run that is there goes on where it was.",
        ("headstart.verbs_training:TrainSettings",),
        ("recipe", "overrides"),
        (
            "headstart train configs/smollm2-eagle3.yaml",
            "headstart train configs/smollm2-eagle3.yaml optim.lr=2e-4 run=runs/other",
            "headstart train configs/smollm2-eagle3.yaml --check",
        ),
        recipe="headstart.training.recipe:Recipe",
    ),
    "plan": Verb(
        plan,
        "Estimate memory, disk, steps and time of a training run; with --serve, what drafting adds to a server.",
        ("headstart.training.plan:PlanSettings", "headstart.inference.serving:ServeSettings"),
        ("recipe", "overrides"),
        (
            "headstart plan configs/smollm2-eagle3.yaml",
            "headstart plan configs/smollm2-eagle3.yaml batch.rows=16 --calibrate",
            "headstart plan configs/smollm2-eagle3.yaml --processes 8 --layout zero3 --memory 24",
            "headstart plan --serve --backbone 8b --head eagle3 --rows 16 --length 4096 --memory 40",
        ),
        recipe="headstart.training.recipe:Recipe",
    ),
    "plot": Verb(
        plot,
        "Draw the curves of training runs into one picture, and print what they came to.",
        ("headstart.verbs_training:PlotSettings",),
        ("runs",),
        ("headstart plot runs/smollm2-eagle3", "headstart plot runs/a runs/b --out compared.png"),
    ),
}
