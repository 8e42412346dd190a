"""The features of all rows of a run, from a folder: made if they are not there, and found again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..data.capture import GROUP_TOKENS, capture
from ..data.feature_key import Reads, settings_of
from ..data.features import FeatureCache
from ..data.groups import settings_hash
from ..files import cache_folder
from ..heads.backbone import Backbone
from .batches import Rows
from .recipe import DataSettings


def features_of(
    data: DataSettings, backbone: Backbone, weights: str, reads: Reads, prepared: Rows, world: Any, **options: Any
) -> FeatureCache:
    """The features that `data.cache` names, of rows trained on and held out; every process calls it.

    Args:
        weights: `weights_hash` of the backbone.
        prepared: all rows, as they were prepared.
        world: the accelerator.
        options: of `capture`.

    Raises:
        UserError: the folder has other features, or cannot be made.
    """
    assert data.cache is not None, "asked for cached features that nobody wants"
    rows = prepared.trimmed(data.max_length)
    settings = settings_of(
        backbone, weights, rows, reads, store=data.cache_store, max_length=data.max_length, group_tokens=GROUP_TOKENS
    )
    auto = cache_folder() / "features" / settings_hash(settings)
    out = auto if data.cache == "auto" else Path(data.cache).expanduser().absolute()
    numbers = [rows.number(row) for row in range(len(rows))]
    capture(backbone, rows, numbers, reads, settings, out, world=world, **options)
    return FeatureCache(out, settings, dtype=backbone.dtype)
