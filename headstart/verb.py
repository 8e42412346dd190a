"""`Verb`: one verb of the command line, and what its settings objects are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Verb:
    """One verb of the command line."""

    run: Callable[..., int | None]
    """Called with one object for each class in `settings`; what it returns is the exit code."""
    summary: str
    settings: tuple[str, ...]
    """Settings classes as `module:Class`; their fields are the flags."""
    positional: tuple[str, ...] = ()
    """Fields that are given without a flag, in this order."""
    examples: tuple[str, ...] = ()
    recipe: str | None = None
    """The settings class of the file that this verb reads; help lists its keys."""
