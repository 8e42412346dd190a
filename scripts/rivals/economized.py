"""economize 0.3.2 as a peer: its lookup, its EAGLE-3 and its Medusa, each on the model that everyone else decodes.

    PYTHONPATH=scripts PEER_ECONOMIZE_EAGLE3=DIR/final headstart bench ... --peer rivals.economized:eagle3

environment: PEER_ECONOMIZE_EAGLE3, PEER_ECONOMIZE_MEDUSA  folders of heads that its own trainer left
             PEER_LOOKUP_CYCLE (9), PEER_EAGLE3_CYCLE (4), PEER_MEDUSA_CYCLE (5)  tokens of a round, its own included
             PEER_MEDUSA_TREE (small)  one of its trees by name, or chain
             (what is best here: scripts/compare_peers.sh DIR choose)

Heads run in the model's number format, as its documentation advises; they were trained in fp32. Its `decode` is called
and not its `generate`, which fails with transformers 5.24. Drawn tokens are verified by its `rejection`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Iterator
from typing import Any

import economize
import torch
from economize.techniques.lookup import LookupConfig

CYCLES = {"lookup": 9, "eagle3": 4, "medusa": 5}
HEADS = {"eagle3": "PEER_ECONOMIZE_EAGLE3", "medusa": "PEER_ECONOMIZE_MEDUSA"}


def lookup(model: Any, tokenizer: Any, ids: list[int], *, max_new_tokens: int, temperature: float) -> Iterator[Any]:
    """Prompt lookup."""
    return answer("lookup", model, ids, max_new_tokens, temperature)


def eagle3(model: Any, tokenizer: Any, ids: list[int], *, max_new_tokens: int, temperature: float) -> Iterator[Any]:
    """A chain by its EAGLE-3 head."""
    return answer("eagle3", model, ids, max_new_tokens, temperature)


def medusa(model: Any, tokenizer: Any, ids: list[int], *, max_new_tokens: int, temperature: float) -> Iterator[Any]:
    """A chain or tree by its Medusa heads."""
    return answer("medusa", model, ids, max_new_tokens, temperature)


def answer(kind: str, model: Any, ids: list[int], limit: int, temperature: float) -> Iterator[list[int]]:
    """New tokens in as many runs as there were forwards of the model; they come when all are there."""
    cycle = int(os.environ.get(f"PEER_{kind.upper()}_CYCLE", CYCLES[kind]))
    selector, verifier = None, {}
    if temperature:
        seed = int(torch.randint(2**31, ()))
        selector, verifier = economize.TopPSampler(temperature=temperature, seed=seed), {"verifier": "rejection"}
    ends = model.generation_config.eos_token_id
    found = attached(kind, model).decode(
        torch.tensor(ids, device=model.device), limit, selector=selector, stop=ends,
        decoding=economize.DecodeConfig(cycle_length=cycle, **verifier),
    )  # fmt: skip
    rounds = sum(event.kind == economize.decoding.CostKind.EXACT for event in found.cost.events)
    return runs(found.tokens.tolist(), rounds)


def runs(tokens: list[int], rounds: int) -> Iterator[list[int]]:
    """The tokens in so many runs, as even as can be."""
    rounds = max(1, min(rounds, len(tokens)))
    bounds = [len(tokens) * place // rounds for place in range(rounds + 1)]
    return (tokens[start:stop] for start, stop in itertools.pairwise(bounds) if stop > start)


@functools.cache
def attached(kind: str, model: Any) -> Any:
    """The model with a drafter beside it; made at the first call."""
    if kind == "lookup":
        return economize.apply(model, LookupConfig()).eval()
    folder = os.environ.get(HEADS[kind])
    if not folder:
        raise RuntimeError(f"{HEADS[kind]} has to name the folder of a head (scripts/compare_peers.sh)")
    saved = economize.read_checkpoint(folder)
    changes: dict[str, Any] = {"param_dtype": "model"}
    if kind == "medusa":
        tree = os.environ.get("PEER_MEDUSA_TREE", "small")
        changes["tree"] = None if tree == "chain" else tree
    saved = dataclasses.replace(saved, configs=[dataclasses.replace(one, **changes) for one in saved.configs])
    return economize.core.attach(model, saved).eval()  # warns where the weights, or their number format, are others
