"""The verbs: what each takes, and the small function that turns files into arguments for the rooms.

Nowhere else are backbones, heads and files loaded by name. The rooms are imported inside the functions: `VERBS` itself
costs nothing, and help reads the settings classes from source.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from headstart.heads.backbone import Backbone


@dataclass(frozen=True)
class Verb:
    """One verb of the command line."""

    run: Callable[..., None]
    """Called with one object for each class in `settings`."""
    summary: str
    settings: tuple[str, ...]
    """Settings classes as `module:Class`; their fields are the flags."""
    positional: tuple[str, ...] = ()
    """Fields that are given without a flag, in this order."""
    examples: tuple[str, ...] = ()
    recipe: str | None = None
    """The settings class of the file that this verb reads; help lists its keys."""


@dataclass
class BackboneOptions:
    """Which backbone, and how it is loaded."""

    backbone: str
    """The frozen model: a built-in name (smollm2-135m), a folder, or a Hub id."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Number format of its weights; without it, the one they are stored in."""
    device: str | None = None
    """Where it runs, such as cpu or cuda; without it, a GPU if there is one."""
    attention: Literal["sdpa", "eager"] | None = None
    """Attention implementation; without it, transformers chooses."""
    revision: str | None = None
    """Branch, tag or commit of a Hub id."""


def load(options: BackboneOptions) -> Backbone:
    """The backbone that the flags name."""
    from headstart import load_backbone

    return load_backbone(
        options.backbone,
        dtype=options.dtype,
        device=options.device,
        attention=options.attention,
        revision=options.revision,
    )


# --- fetch ----------------------------------------------------------------------------------------------------------


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


VERBS: dict[str, Verb] = {
    "fetch": Verb(
        fetch,
        "Get a built-in backbone as an ordinary Hugging Face folder, once.",
        ("headstart.verbs:FetchSettings",),
        ("name",),
        ("headstart fetch smollm2-135m", "headstart fetch smollm2-135m --folder models/smollm2"),
    ),
}
