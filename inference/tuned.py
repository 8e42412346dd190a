"""What was measured of a head on this machine, and kept: what its rounds cost, how far its drafts survive, and the tree
that `headstart tune` chose.

A file `tuning.json` beside the head, or, where that cannot be written or the head came from the Hub, one in the cache
folder. It has an entry for each setup: backbone, head, machine, dtype, threads, versions. What was measured in another
one says nothing here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import cache_folder, text_hash, write_whole
from ..heads.backbone import Backbone
from ..heads.base import DraftHead
from ..heads.format import TUNING
from ..heads.forms import weights_hash
from ..progress import Progress
from .costs import CostModel
from .drafter import Drafter
from .drafters import modules_of
from .machine import machine, running
from .timing import SECONDS, measured
from .tree import Dynamic, Shape, parse_shape

LOOKUPS = ("ngram", "suffix")
MINUTE = 50.0  # seconds, with room for what is under way
Entry = dict[str, Any]


def entry(backbone: Backbone, drafter: Any) -> Entry:
    """What is known of this drafter in this setup; empty where nothing is."""
    path = _path(drafter)
    found = _entries(path).get(_key(backbone, drafter), {}) if path.exists() else {}
    return found if isinstance(found, dict) else {}


def keep(backbone: Backbone, drafter: Any, **changes: Any) -> Path:
    """Add to what is known of it; returns the file."""
    path, facts = _path(drafter), _facts(backbone, drafter)
    entries = _entries(path)
    key = _hash(facts)
    entries[key] = {**entries.get(key, {}), "setup": facts, **changes}
    write_whole(path, json.dumps(entries, indent=1) + "\n")
    return path


def remembered(drafter: Any) -> bool:
    """Whether a later process finds again what is kept of it, without reading all of its weights first: heads that were
    loaded, and lookups by name."""
    return bool(drafter.source) if isinstance(drafter, DraftHead) else drafter in LOOKUPS


def tuned_tree(backbone: Backbone, drafter: Any) -> Shape | None:
    """The tree that `headstart tune` chose for it here, if it did."""
    found = entry(backbone, drafter).get("tree") if remembered(drafter) else None
    try:
        return None if found is None else parse_shape(str(found))
    except UserError:  # a form that this version does not know
        return None


def costs_of(
    backbone: Backbone, drafter: Any, new: Drafter, shape: Dynamic, rows: Sequence[int], *, anew: bool = False
) -> CostModel:
    """The costs of its rounds with these numbers of rows: those that were kept; the others are measured, in a minute,
    and kept.

    Args:
        new: a drafter that may be asked for drafts.
        shape: of the trees whose drafting is timed.
        anew: measure all of them.
    """
    known = None if anew else _costs(entry(backbone, drafter))
    missing = [count for count in rows if known is None or count not in known.by_rows]
    for count in Progress(len(missing), "batch sizes", "measuring costs", enabled=bool(missing)).over(missing):
        found = measured(backbone, new, shape, [count], min(SECONDS, MINUTE / len(missing)))
        known = found if known is None else known.with_rows(found)
        keep(backbone, drafter, costs=known.as_dict())
    assert known is not None, "no rows were asked for"
    return known


def _costs(found: Entry) -> CostModel | None:
    try:
        return CostModel.of(found["costs"])
    except (UserError, KeyError, ValueError, TypeError, AttributeError):
        return None


def _path(drafter: Any) -> Path:
    home = drafter.home if isinstance(drafter, DraftHead) else None
    if home is not None and os.access(home, os.W_OK):
        return home / TUNING
    name = (isinstance(drafter, DraftHead) and drafter.source) or _weights(drafter)
    return cache_folder() / "tuning" / f"{text_hash(name)[:16]}.json"


def _facts(backbone: Backbone, drafter: Any) -> dict[str, Any]:
    backbone.pack()  # as where it decodes: before that, it would be another setup
    return {
        "backbone": backbone.fingerprint(),
        "drafter": _weights(drafter),
        "packed": backbone.packing.done,
        **running(backbone),
        **machine(),
    }


def _weights(drafter: Any) -> str:
    found = " ".join(map(weights_hash, modules_of(drafter)))
    return found or str(drafter)


def _key(backbone: Backbone, drafter: Any) -> str:
    return _hash(_facts(backbone, drafter))


def _hash(facts: dict[str, Any]) -> str:
    return text_hash(json.dumps(facts, sort_keys=True))[:16]


def _entries(path: Path) -> dict[str, Entry]:
    """What a file holds; nothing where it cannot be read, since all of it can be measured again."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError):
        return {}
