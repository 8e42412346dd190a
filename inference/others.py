"""Further sides of a bench, beside `generate` and what `--head` names.

    NAME, NAME@TREE        a drafter, by name as for --head, with its usual form of drafts or with this one
    lookup                 transformers' own prompt lookup
    peer:module:function   any decoder that is installed (rivals.py)

A side is a function of token ids and a limit. What one of transformers or of others accepted at a depth is told by the
runs of tokens that come: a run of three tokens accepted two drafts. One that gives all at once tells nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UserError
from ..heads.backbone import Backbone
from .rivals import Rival, lookup, peer
from .rows import Row
from .setup import setup_of
from .traffic import Ask


class Timed(NamedTuple):
    """One answer of one side."""

    tokens: list[int]
    seconds: dict[str, float]
    """`seconds`: all of the call. `prefill`; of ours also `draft` and `verify`: what these parts of it took."""
    counts: Row
    """rounds, drafted, offered and accepted; empty for plain answers."""


Answer = Callable[[list[int], int], Timed]


def parted(name: str) -> tuple[str, str | None]:
    """The name of a drafter and the form of its drafts."""
    stem, at, tree = name.rpartition("@")
    return (stem, tree) if at and stem and tree and not Path(name).exists() else (name, None)


def is_rival(name: str) -> bool:
    """Whether a side is none of ours."""
    return name == "lookup" or name.startswith("peer:")


def rival_of(backbone: Backbone, name: str) -> Rival:
    """What `is_rival` says yes to.

    Raises:
        UserError: there is no such peer.
    """
    return lookup(backbone) if name == "lookup" else peer(backbone, name.removeprefix("peer:"))


def check(also: Sequence[str], drafters: Mapping[str, Any]) -> None:
    """Refuse sides that are named twice.

    Raises:
        UserError: one is.
    """
    if twice := sorted({name for name in also if list(also).count(name) > 1}):
        raise UserError(f"also: {twice[0]} is named twice; a side takes part once")
    assert all(is_rival(name) or name in drafters for name in also), "every drafter was loaded"


def about(backbone: Backbone, also: Sequence[str], drafters: Mapping[str, Any], raw: bool) -> dict[str, Any]:
    """What the figures of further sides depend on; empty where there is none."""
    kept = ("drafter", "drafter_weights", "tree")
    found: dict[str, Any] = {}
    for name in also:
        stem, tree = parted(name)
        made = {} if is_rival(name) else setup_of(
            backbone, drafters[name], head=stem, tree=tree, max_new_tokens=0, raw=raw
        )  # fmt: skip
        found[name] = {part: made[part] for part in kept if part in made}
    return {"also": found} if found else {}


def answered(rival: Rival) -> Answer:
    """A rival as a side; greedy."""

    def answer(ids: list[int], limit: int) -> Timed:
        (row,) = rival([Ask(ids, {"max_new_tokens": limit, "do_sample": False})], lambda: None)
        runs = [count for _, count in row["came"]]
        first = row["came"][0][0] - row["asked"] if runs else row["took"]
        return Timed(row["tokens"], {"seconds": row["took"], "prefill": first}, _counts(runs))

    return answer


def _counts(runs: Sequence[int]) -> Row:
    if len(runs) == 1 and runs[0] > 1:  # all at once
        runs = []
    depths = range(max(runs, default=1) - 1)
    accepted = [sum(count > depth + 1 for count in runs) for depth in depths]
    return {"rounds": len(runs), "drafted": 0, "offered": [], "accepted": accepted}
