"""Steps that are really taken, for what a plan cannot know by arithmetic: their time and their memory."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from ..errors import UserError
from ..heads.backbone import Backbone
from ..settings import dump_text
from .batches import Batches
from .log import memory
from .recipe import Recipe
from .setup import set_up
from .sheet import timed

LOOKED_AT = 5000  # steps whose forwards are looked at for the largest
CHILD = """import sys
from headstart.errors import UserError
from headstart.training import calibration, recipe
try:
    print(*calibration.steps_taken(recipe.load_recipe(sys.argv[1])))
except UserError as error:
    sys.exit(f"headstart: {error}")
"""


def calibrated(recipe: Recipe, backbone: Backbone | None) -> tuple[float, float]:
    """Seconds and bytes of steps that are really taken: in a process of their own, whose memory holds no plan.

    Args:
        backbone: one in memory, which no other process has: then in this one.

    Raises:
        UserError: whatever `train` would stop at before its first step.
    """
    if backbone is not None:
        return steps_taken(recipe, backbone)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(dump_text(recipe), encoding="utf-8")
        done = subprocess.run([sys.executable, "-P", "-c", CHILD, path], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise UserError(f"the steps to be measured ended with exit code {done.returncode}: see above")
    seconds, size = map(float, done.stdout.splitlines()[-1].split())
    return seconds, size


def steps_taken(recipe: Recipe, backbone: Backbone | None = None) -> tuple[float, float]:
    """Take four steps in memory, the largest first; seconds of one, and the most bytes that this process held."""
    setup = set_up(recipe, backbone)
    most = max(range(min(LOOKED_AT, setup.batches.steps(1))), key=lambda step: _work(setup.batches, step))
    seconds = sorted(timed(setup, setup.batches.forwards(step), number) for number, step in enumerate((most, 0, 1, 2)))
    return seconds[1], memory(setup.accelerator.device) * 2**30


def _work(batches: Batches, step: int) -> int:
    return max(len(group) * int(batches.lengths[group[0]]) for group in batches.groups(step))
