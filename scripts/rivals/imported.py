"""Heads that other trainers made, decoded by our own loop: `Generator` as anyone calls it.

    PYTHONPATH=scripts PEER_SPECFORGE=DIR/heads/specforge headstart bench ... --peer rivals.imported:specforge

environment: PEER_SPECULATORS, PEER_SPECFORGE  folders of heads (scripts/compare_peers.sh DIR heads)
             PEER_TREE                         form of the drafts; without it, the usual one
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any

from headstart import Backbone, Generator, load_head


def speculators(
    model: Any, tokenizer: Any, ids: list[int], *, max_new_tokens: int, temperature: float
) -> Iterator[Any]:
    """A head by speculators."""
    return answer("PEER_SPECULATORS", model, tokenizer, ids, max_new_tokens, temperature)


def specforge(model: Any, tokenizer: Any, ids: list[int], *, max_new_tokens: int, temperature: float) -> Iterator[Any]:
    """A head by SpecForge."""
    return answer("PEER_SPECFORGE", model, tokenizer, ids, max_new_tokens, temperature)


def answer(
    name: str, model: Any, tokenizer: Any, ids: list[int], limit: int, temperature: float
) -> Iterator[list[int]]:
    """New tokens, a run a round, as they come."""
    drawn = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {"temperature": 0}
    for piece in generator(name, model, tokenizer).stream(ids, max_new_tokens=limit, **drawn):
        if piece.tokens:
            yield list(piece.tokens)


@functools.cache
def generator(name: str, model: Any, tokenizer: Any) -> Generator:
    """Made at the first call."""
    folder = os.environ.get(name)
    if not folder:
        raise RuntimeError(f"{name} has to name the folder of a head (scripts/compare_peers.sh)")
    backbone = Backbone(model, tokenizer)
    return Generator(backbone, load_head(folder, backbone), tree=os.environ.get("PEER_TREE") or None)
