"""The verbs of `heads/`: what each takes, and the function that turns files into arguments."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headstart.verb import Verb


@dataclass
class FetchSettings:
    """A built-in backbone as a folder."""

    name: str
    """Which one: smollm2-135m."""
    folder: Path | None = None
    """Where to put it; without it, the cache ($HEADSTART_CACHE, or ~/.cache/headstart)."""


def fetch(settings: FetchSettings) -> None:
    from headstart.heads.fetch import fetch

    print(fetch(settings.name, folder=settings.folder))


HEADS: dict[str, Verb] = {
    "fetch": Verb(
        fetch,
        "Get a built-in backbone as an ordinary Hugging Face folder, once.",
        ("headstart.verbs_heads:FetchSettings",),
        ("name",),
        ("headstart fetch smollm2-135m", "headstart fetch smollm2-135m --folder models/smollm2"),
    ),
}
