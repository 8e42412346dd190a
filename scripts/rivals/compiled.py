"""transformers' own compiled decoding: a static cache and torch.compile, as `generate` offers them.

    PYTHONPATH=scripts headstart bench ... --peer rivals.compiled:generate

On a GPU transformers compiles where the cache is static; on a CPU it has to be told by a mark of its `CompileConfig`.
The first call, which the bench does not count (--warm-up), answers three times at other lengths: one graph is compiled
for the first length, one with the length left open for all others, and nothing after that. The cache is as long as this
prompt and answer need. By itself transformers keeps the longest length so far, all of which is read at each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import CompileConfig

WARM = (4, 5, 6)  # new tokens of the answers that compile, each from a cache of another length
_warmed: dict[int, Any] = {}


def generate(model: Any, tokenizer: Any, ids: list[int], *, max_new_tokens: int, temperature: float) -> Iterator[int]:
    """New tokens, each of a forward of its own; they come when all are there."""
    if _warmed.get(id(model)) is not model:
        for count in WARM:
            call(model, ids + ids[-count:], count, temperature)
        _warmed[id(model)] = model
    return iter(call(model, ids, max_new_tokens, temperature))


def call(model: Any, ids: list[int], limit: int, temperature: float) -> list[int]:
    """New tokens of `generate`."""
    config = CompileConfig()
    config._compile_all_devices = True
    model._previous_max_cache_length = -1  # else the cache of the longest answer so far
    drawn: dict[str, Any] = {"do_sample": False}
    if temperature:
        drawn = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    ends = model.generation_config.eos_token_id
    prompt = torch.tensor([ids], device=model.device)  # (1, T)
    found = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=limit, cache_implementation="static",
        compile_config=config, pad_token_id=ends[0] if isinstance(ends, list) else ends, **drawn,
    )  # fmt: skip
    tokens: list[int] = found[0, len(ids) :].tolist()
    return tokens
