"""The loop: rows in their order, losses weighted over the whole step, and a head in the run's folder at the end.

    train("configs/smollm2-eagle3.yaml", {"optim.lr": 1e-4})

Every supervised position weighs the same, however a step is dealt out to forwards and processes: before the first
forward all processes agree on how many positions of each depth the step has, and all sums are divided by these.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import settings
from ..errors import UserError
from ..heads.backbone import Backbone
from ..heads.format import load_head, save_head
from . import checkpoints
from .batches import Batch
from .checkpoints import Interrupts, State
from .distilled import Distilled, of_head
from .evaluate import evaluate
from .log import Log, Window, memory, told, totals
from .lora import merged
from .losses import wording
from .objective import Result
from .recipe import Recipe, load_recipe
from .setup import Setup, set_up
from .trouble import check_gradient, check_movement

WATCHED = 10  # first steps, over which the loss has to move
PATIENCE = 15.0  # seconds; a launcher repeats Ctrl-C to its processes, and ends them after 30


def train(
    recipe: Recipe | str | Path,
    overrides: Mapping[str, Any] | Iterable[str] = (),
    *,
    backbone: Backbone | None = None,
) -> Path:
    """Train a head as a recipe says; a run whose folder is there goes on where it was.

    Args:
        recipe: a recipe, or the path of its YAML file.
        overrides: settings that are to be otherwise, as `{"optim.lr": 1e-4}` or as texts `optim.lr=1e-4`.
        backbone: one in memory, as it is, in place of the one that the recipe names.

    Returns:
        The folder of the trained head.

    Raises:
        UserError: a setting, file or row is wrong, or a step goes wrong (which says where).
        SystemExit: Ctrl-C or SIGTERM, once a checkpoint is written.
    """
    recipe = load_recipe(recipe, overrides)
    checkpoints.open_run(recipe, write=False)
    if checkpoints.finished(recipe.run):
        print(f"{recipe.run}: this run is finished", file=sys.stderr)
    else:
        setup = set_up(recipe, backbone)
        try:
            _sitting(setup)
        finally:
            setup.objective.release()
    return recipe.run / checkpoints.HEAD


def _sitting(setup: Setup) -> None:
    """Begin a run, or go on with it, to its end."""
    recipe, main = setup.recipe, setup.accelerator.is_main_process
    with checkpoints.alone(recipe.run) if main else nullcontext():
        if main:
            checkpoints.open_run(recipe)
            checkpoints.remove_leftovers(recipe.run)
        setup.accelerator.wait_for_everyone()
        run = Run(setup, checkpoints.resume(recipe.run, setup))
        try:
            run.train()
        finally:
            run.log.close()


class Run:
    """One sitting of a run."""

    def __init__(self, setup: Setup, state: State) -> None:
        self.setup, self.state, self.recipe = setup, state, setup.recipe
        self.log = Log(setup.recipe, setup.accelerator, state.step, state.evaluated, setup.schedule.steps)
        self.clock = time.monotonic() - state.seconds
        self.window = Window(setup.objective.shares.cpu())
        self.first_losses: list[float] = []
        self.last: dict[str, float] = {}

    def train(self) -> None:
        state, accelerator = self.state, self.setup.accelerator
        if state.step:
            epoch, number = self.setup.batches.place(state.step)
            self.log.say(f"{self.recipe.run}: going on behind step {state.step}, step {number} of epoch {epoch + 1}")
        with Interrupts(PATIENCE if accelerator.num_processes > 1 else 0.0) as interrupts:
            while not state.finished:
                mine = self.setup.batches.forwards(state.step)
                batches, counts, seconds, stop = agree(
                    self.setup, mine, time.monotonic() - self.clock, bool(interrupts.signal)
                )
                if self.setup.schedule.over(state.step, seconds):
                    break
                if stop:
                    self.save()
                    accelerator.wait_for_everyone()
                    self.log.say(f"{self.recipe.run}: saved at step {state.step}; the same command goes on from there")
                    raise SystemExit(128 + (interrupts.signal or 15))
                self.step(batches, counts, seconds)
            self.finish()

    def step(self, batches: Sequence[Batch], counts: Tensor, seconds: float) -> None:
        """One optimizer step, and what is due behind it."""
        state, setup, every = self.state, self.setup, self.recipe.evaluate.every
        rows = setup.batches.rows_of(state.step)
        began = time.monotonic()
        here = state.step + 1, seconds + self.window.step_seconds
        lr = setup.schedule.lr(*here)
        setup.objective.joined = setup.schedule.joined(self.recipe.adapter.alone, *here)
        try:
            results, norm = optimize(setup, batches, counts, lr, state.step)
        except UserError as error:
            raise UserError(f"{error}{self.rescued()}") from None
        tokens = int(setup.rows.lengths[rows].sum())
        self.window.add(totals(results, setup.accelerator), counts, tokens, time.monotonic() - began)
        self.last = {"lr": lr, "gradient_norm": norm}
        state.step, state.tokens, state.seconds = state.step + 1, state.tokens + tokens, time.monotonic() - self.clock
        self.check()
        self.log.status(setup.schedule.expected_steps(state.step, state.seconds), self.window)
        if self.recipe.log.rows:
            self.log.write(state.step, {"rows": [setup.rows.keys[row] for row in rows]}, "rows.jsonl")
        if state.step % self.recipe.log.every == 0:
            self.report()
        if every and state.step % every == 0:
            self.evaluate()
        if state.step % self.recipe.save.every == 0:
            self.save(due=True)

    def rescued(self) -> str:
        """Write the head as it was before a step that went wrong, and say where it is; empty if it is not worth it."""
        if not self.state.step or not all(one.isfinite().all() for one in self.setup.head.parameters()):
            return ""
        folder = self.recipe.run / checkpoints.STOPPED
        try:
            self.write_head(checkpoints.STOPPED)
        except UserError:
            return ""
        return f". That head is {folder}; start={folder} begins another run with it"

    def check(self) -> None:
        """Once, early: does the loss move? (Not in a run that was gone on with.)"""
        if len(self.first_losses) == self.state.step - 1 < WATCHED:
            self.first_losses.append(self.window.loss)
            check_movement(self.first_losses, WATCHED)

    def report(self) -> None:
        """A line of metrics: sums since the line before, the rest as of the last step."""
        state, accelerator = self.state, self.setup.accelerator
        figures = {
            "epoch": self.setup.batches.place(state.step - 1)[0] + 1,
            **self.last,
            **self.window.figures(),
            "tokens": state.tokens,
            "seconds": state.seconds,
            "seconds_left": self.setup.schedule.seconds_left(state.step, state.seconds),
            "memory_gib": memory(accelerator.device),
        }
        self.log.write(state.step, figures)

    def evaluate(self) -> None:
        figures = evaluate(self.setup)
        self.state.evaluated, self.state.held_out = self.state.step, figures
        if figures:
            self.log.write(self.state.step, {"held_out": figures})
            self.log.say(f"step {self.state.step}: {told(figures)}")
        self.keep_best(figures.get("acceptance_length", 0.0))

    def keep_best(self, length: float) -> None:
        """Write the head beside the run's checkpoints, if none before it was accepted that long."""
        state = self.state
        if length <= state.best.get("acceptance_length", 0.0):
            return
        state.best = {"step": state.step, "acceptance_length": length}
        try:
            self.write_head(checkpoints.BEST)
        except UserError as error:
            self.log.say(f"training goes on, but the best head so far was not written: {error}")

    def save(self, due: bool = False) -> None:
        """Write a checkpoint. One that was merely due may fail: the run goes on, and the next one is tried."""
        self.state.seconds, layout = time.monotonic() - self.clock, self.setup.layout
        weights, moments = layout.weights(self.setup.objective), layout.moments()
        if self.setup.accelerator.is_main_process:
            try:
                checkpoints.save(self.recipe.run, self.state, weights, moments, self.recipe.save.keep)
            except UserError as error:
                if not due:
                    raise
                self.log.say(f"training goes on, but the checkpoint of step {self.state.step} was not written: {error}")

    def finish(self) -> None:
        """Evaluate, save, and write the head."""
        if not self.state.finished:
            if self.window.tokens:
                self.report()
            if self.state.evaluated != self.state.step:
                self.evaluate()
            self.state.finished = True
            self.save()
        self.write_head(checkpoints.HEAD)
        self.setup.accelerator.wait_for_everyone()
        if self.state.best and self.state.best["step"] != self.state.step:
            step, length = self.state.best.values()
            self.log.say(
                f"the best head, of step {step} ({length:.2f} measured), is {self.recipe.run / checkpoints.BEST}"
            )

    def write_head(self, name: str) -> None:
        """The head as it is now, in its own format, read back. On all processes."""
        objective = self.setup.objective
        weights = merged(self.setup.head, of_head(self.setup.layout.weights(objective)))
        adapter = objective.adapter if isinstance(objective, Distilled) else None
        if self.setup.accelerator.is_main_process:
            folder = self.recipe.run / name
            told = provenance(self.setup, self.state)
            save_head(self.setup.head, folder, weights=weights, provenance=told, adapter=adapter)
            checkpoints.check_written(folder, load_head(folder).state_dict(), weights)


def agree(
    setup: Setup, batches: Sequence[Batch], seconds: float = 0.0, stop: bool = False
) -> tuple[list[Batch], Tensor, float, bool]:
    """What all processes have to know of a step before its first forward. On all processes.

    Args:
        batches: of this process.
        seconds: that the run has taken; those of the first process count.
        stop: whether to end the run; one process is enough.

    Returns:
        The batches, filled up with empty ones where all processes have to make as many forwards; the positions of the
        step by depth (D,), and of the other sums; seconds; whether to stop.
    """
    objective, accelerator = setup.objective, setup.accelerator
    counts = sum((objective.counts(batch) for batch in batches), torch.zeros(objective.sums))
    forwards = torch.zeros(accelerator.num_processes)
    forwards[accelerator.process_index] = len(batches)
    own = torch.tensor([seconds if accelerator.is_main_process else 0.0, float(stop)])
    agreed = accelerator.reduce(torch.cat((own, counts, forwards)).to(accelerator.device), "sum").cpu()
    most = int(agreed[2 + objective.sums :].max()) if setup.layout.sharded else 0
    filled = [*batches, *[batches[-1].blank()] * (most - len(batches))]
    return filled, agreed[2 : 2 + objective.sums], float(agreed[0]), bool(agreed[1] > 0)


def optimize(
    setup: Setup, batches: Sequence[Batch], counts: Tensor, lr: float, step: int
) -> tuple[list[Result], float]:
    """One optimizer step over all its forwards; what they came to, and the gradient's norm before it is clipped.

    Args:
        counts: (D,) supervised positions of the step, and those of other sums, over all processes.
        step: steps taken before; determines the random numbers.

    Raises:
        UserError: the gradient is not finite, or zero; the head keeps its weights.
    """
    accelerator, world = setup.accelerator, setup.accelerator.num_processes
    setup.objective.seed = setup.recipe.seed * 1_000_003 + step
    torch.manual_seed(setup.objective.seed * world + accelerator.process_index)
    for group in setup.optimizer.param_groups:
        group["lr"] = lr * group["share"] * (setup.objective.joined if group.get("adapter") else 1)
    scale = (world / counts.clamp(min=1)).to(accelerator.device)  # many processes average their gradients
    results = []
    for number, batch in enumerate(batches, 1):
        batch = batch.to(accelerator.device)
        features = setup.objective.features(batch)
        results.append(setup.layout.run(batch, features, scale, last=number == len(batches)))
    norm = setup.layout.norm()
    check_gradient(setup, batches, norm, step)
    setup.layout.step()
    return results, norm


def provenance(setup: Setup, state: State) -> dict[str, Any]:
    """What the head's files say of its training; names of files, no paths."""
    recipe = setup.recipe
    return {
        "data": [Path(name).name for name in recipe.data.train],
        "rows": len(setup.rows),
        "steps": state.step,
        "tokens": state.tokens,
        "loss": wording(recipe.loss),
        "depths": setup.objective.depths,
        "lr": recipe.optim.lr,
        "step": f"{recipe.batch.tokens} tokens" if recipe.batch.tokens else f"{recipe.batch.rows} rows",
        "seed": recipe.seed,
        "held_out": state.held_out,
        **({"start": Path(recipe.start).name} if recipe.start else {}),
        **({"lora_rank": recipe.lora.rank} if recipe.lora.rank else {}),
        **({"adapter": settings.dump(recipe.adapter)} if recipe.adapter.rank else {}),
    }
