"""Where a run stands, and the learning rate there: functions of the step and the clock, with no state of their own."""

from __future__ import annotations

import math

from .recipe import OptimSettings


class Schedule:
    """Linear warm-up, then a cosine that ends with the last step.

    Steps are optimizer steps, and the first is step 1. Where `max_minutes` is set, the run stands where steps or clock
    are further on: the cosine ends with the last step that the time allows, whatever a step turns out to take.

    Args:
        steps: optimizer steps of the run, if time does not end it before.
    """

    def __init__(self, settings: OptimSettings, steps: int) -> None:
        self.settings, self.steps = settings, steps
        self.seconds = 60 * settings.max_minutes if settings.max_minutes else math.inf

    def progress(self, step: int, seconds: float) -> float:
        """How much of the run is done with this step, 0 to 1, if it ends so many seconds after the start."""
        return min(1.0, max(step / self.steps, seconds / self.seconds))

    def lr(self, step: int, seconds: float) -> float:
        """The learning rate of this step."""
        warmup, done = self.settings.warmup, self.progress(step, seconds)
        share = warmup if warmup < 1 else min(warmup / self.steps, 1.0)  # of the run
        ramp = done / share if 0 < warmup < 1 else step / warmup if warmup else 1.0
        if ramp < 1:
            return self.settings.lr * ramp
        rest = max(done - share, 0.0) / (1 - share) if share < 1 else 0.0
        fall = (1 + math.cos(math.pi * rest)) / 2
        return self.settings.lr * (self.settings.final + (1 - self.settings.final) * fall)

    def joined(self, alone: float, step: int, seconds: float) -> float:
        """The part of its learning rate that an adapter has at this step: 0 while the heads learn `alone`, which is a
        share of the run below 1 and steps from there on, then rising to 1 over as long again."""
        done = self.progress(step, seconds) if alone < 1 else step
        return min(1.0, max(0.0, done / alone - 1)) if alone else 1.0

    def over(self, step: int, seconds: float) -> bool:
        """Is the run done after this step?"""
        return step >= self.steps or seconds >= self.seconds

    def expected_steps(self, step: int, seconds: float) -> int:
        """Steps of the run by the rate so far."""
        if not step or not seconds or math.isinf(self.seconds):
            return self.steps
        return max(step, min(self.steps, round(step * self.seconds / seconds)))

    def seconds_left(self, step: int, seconds: float) -> float:
        """Of the run, by the rate so far, behind its first step."""
        rest = seconds / step * (self.expected_steps(step, seconds) - step)
        return max(0.0, min(rest, self.seconds - seconds))
