"""`--check`: everything loaded, one step taken in memory, and a sheet that says what the run will be.

Nothing in the run's folder changes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..heads.backbone import Backbone
from ..progress import duration
from . import checkpoints
from .batches import Batch
from .log import memory
from .loop import agree, optimize
from .recipe import Recipe, load_recipe
from .setup import Setup, set_up

STEPS = 2  # the first of a process is slower than those that follow


def check(
    recipe: Recipe | str | Path,
    overrides: Mapping[str, Any] | Iterable[str] = (),
    *,
    backbone: Backbone | None = None,
) -> dict[str, Any]:
    """Load what a recipe names, take a step, and return the run sheet: names and values, in the order of telling.

    Raises:
        UserError: whatever `train` would stop at.
    """
    recipe = load_recipe(recipe, overrides)
    checkpoints.open_run(recipe, write=False)
    setup = set_up(recipe, backbone)
    try:
        return _sheet(setup)
    finally:
        setup.objective.release()


def _sheet(setup: Setup) -> dict[str, Any]:
    """What a step says of the run."""
    recipe = setup.recipe
    batches = setup.batches.forwards(0)
    seconds = min(timed(setup, batches, step) for step in range(STEPS))
    steps, padded = setup.schedule.steps, sum(batch.ids.numel() for batch in batches)
    tokens = sum(batch.tokens for batch in batches)
    rows, minutes = setup.rows, recipe.optim.max_minutes
    supervised = int(rows.supervised.sum()) / int(rows.lengths.sum())
    return {
        "method": f"{recipe.method} for {setup.backbone.name}, {setup.objective.depths} depths",
        "trainable parameters": f"{sum(one.numel() for one in setup.parameters):,}",
        "draft vocabulary": f"{setup.head.vocab.size:,} of {setup.backbone.vocab_size:,} tokens",
        "precision": f"backbone {_name(setup.backbone.dtype)}, head fp32, products {_products(setup)}",
        "rows": f"{len(rows):,} trained on, {len(setup.held_out):,} held out, {setup.dropped:,} without supervision",
        "tokens": f"{int(rows.lengths.sum()):,}, {100 * supervised:.1f}% of them supervised",
        "steps": f"{steps:,}" + (f" at most, {minutes:g} minutes" if minutes else ""),
        "first step": f"{tokens:,} tokens in {len(batches)} forwards, {100 * (1 - tokens / padded):.0f}% padding",
        "memory": f"{memory(setup.accelerator.device):.2f} GiB at most so far",
        "seconds a step": f"{seconds:.2f} ({tokens / seconds:,.0f} tokens/s)",
        "expected time": f"{duration(min(steps * seconds, setup.schedule.seconds))}, without evaluation",
    }


def told(sheet: Mapping[str, Any]) -> str:
    """The run sheet as text."""
    width = max(map(len, sheet))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in sheet.items())


def timed(setup: Setup, batches: list[Batch], step: int) -> float:
    """Seconds of a step."""
    batches, counts, *_ = agree(setup, batches)
    began = time.monotonic()
    optimize(setup, batches, counts, setup.schedule.lr(step + 1, 0.0), step)
    return time.monotonic() - began


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _products(setup: Setup) -> str:
    return "bf16" if setup.objective.autocast else "fp32"
