"""Answers of a backbone that are computed once: one small file each in the cache folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..files import cache_folder, text_hash, write_whole
from ..heads import backbone as heads
from ..heads.backbone import Backbone
from ..heads.forms import weights_hash
from .machine import running


class Kept:
    """The plain answers of one backbone.

    They are found again by prompt and options while all that they depend on is the same: every weight, both configs,
    dtype, attention, device, the versions of torch and transformers, and, for answers of our own loop, its source.
    """

    def __init__(self, backbone: Backbone) -> None:
        facts = {
            "weights": weights_hash(backbone.model),
            "config": backbone.config.to_dict(),
            "generation_config": backbone.model.generation_config.to_dict(),
            **running(backbone),
        }
        self.sources = _sources()  # now: files that change under a running process change nothing in it
        self.folder = cache_folder() / "answers" / _hash(facts)

    def tokens(
        self, ids: Sequence[int], options: Mapping[str, Any], answer: Callable[[], list[int]], *, own: bool = False
    ) -> list[int]:
        """The answer to a prompt: the one that was kept, else what `answer` gives, which is kept.

        Args:
            own: it comes from our own loop, not from transformers.
        """
        path = self.folder / f"{_hash([list(ids), options, self.sources if own else None])}.json"
        try:
            found: list[int] = json.loads(path.read_text(encoding="utf-8"))["tokens"]
        except (OSError, ValueError, KeyError):
            found = answer()
            write_whole(path, json.dumps({"tokens": found, "prompt_tokens": len(ids), "options": options}) + "\n")
        return found


def _hash(value: Any) -> str:
    return text_hash(json.dumps(value, sort_keys=True, default=str))[:32]


def _sources() -> list[str]:
    """Hashes of what our plain loop is made of: the two rooms that it runs in, whole, so that nothing is forgotten."""
    rooms = Path(__file__).parent, Path(heads.__file__).parent
    return [text_hash(file.read_text(encoding="utf-8")) for room in rooms for file in sorted(room.glob("*.py"))]
