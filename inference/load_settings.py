"""What `headstart bench` measures under load: the flags, and the loads that they ask for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ..errors import UserError

SIDES = ("alone", "generate", "lookup", "assisted", "plain", "engine")


@dataclass
class LoadSettings:
    """The same under load, with latencies; asked for by any of these flags."""

    concurrency: str = ""
    """So many clients at once, each asking again once it was answered; several numbers with commas, such as 1,4,8."""
    rate: str = ""
    """So many requests a second, coming at random (Poisson); several numbers with commas."""
    temperature: str = ""
    """Of the answers; 0 is greedy. Several numbers with commas; 0 without it."""
    max_rows: int = 8
    """Rows of an engine to which requests come at a rate."""
    sides: str = ""
    """Who takes part, with commas: generate, lookup, assisted (of transformers), plain, engine; without it, all that
    can."""
    assistant: str | None = None
    """What drafts for assisted generation: the folder of a smaller model, or exit:6; without it, --head
    if that is one."""
    peer: list[str] = field(default_factory=list)
    """Other decoders, as module:function, called with (model, tokenizer, ids, max_new_tokens=, temperature=) and giving
    new tokens."""
    stretch: int = 32
    """Questions of one stretch; sides take turns stretch by stretch."""
    seed: int = 0
    """Of arrivals and sampled answers."""
    against: Path | None = None
    """The report of an earlier bench, or its folder: says what got slower beyond noise."""

    def __post_init__(self) -> None:
        for name in ("max_rows", "stretch"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it has to be at least 1")
        self.clients, self.rates, self.temperatures = (
            _numbers(self, "concurrency", 1),
            _numbers(self, "rate", 1e-9),
            _numbers(self, "temperature", 0) or [0.0],
        )
        if fault := next((one for one in self.clients if one != int(one)), None):
            raise UserError(f"concurrency: {fault:g} is no whole number of clients")
        self.taking_part = [one.strip() for one in self.sides.split(",") if one.strip()] or list(SIDES)
        if unknown := set(self.taking_part) - set(SIDES):
            raise UserError(f"sides: there is no {', '.join(sorted(unknown))}; there is {', '.join(SIDES)}")

    @property
    def loads(self) -> list[Load]:
        """One client, where nothing is said."""
        closed = [Load(int(count), None) for count in self.clients]
        return [*closed, *(Load(None, rate) for rate in self.rates)] or [Load(1, None)]

    @property
    def wanted(self) -> bool:
        """Whether any of this was asked for."""
        return bool(self.concurrency or self.rate or self.temperature or self.sides or self.assistant or self.peer)


class Load(NamedTuple):
    """A closed loop of so many clients, or an open one at a rate."""

    clients: int | None
    rate: float | None

    def __str__(self) -> str:
        return f"closed:{self.clients}" if self.rate is None else f"open:{self.rate:g}"


def _numbers(settings: LoadSettings, name: str, least: float) -> list[float]:
    """Numbers between commas.

    Raises:
        UserError: one is none, or too small.
    """
    try:
        found = [float(text) for text in str(getattr(settings, name)).split(",") if text.strip()]
    except ValueError:
        found = [float("nan")]
    if any(not least <= value < float("inf") for value in found):
        bound = f"{least:g} or more" if least >= 1 or not least else "above 0"
        raise UserError(f"{name} is {getattr(settings, name)}; numbers with commas between them, each {bound}")
    return list(dict.fromkeys(found))
