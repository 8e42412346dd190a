"""What transformers offers for the same work, and what else is installed: answers as rows (traffic.py has the fields).

- `batched`: `generate` of left-padded batches; a batch ends with its last row. With one row, plain `generate`.
- `lookup`, `assisted`: its prompt lookup and its assisted generation, which know one row only.
- `peer`: any function of the user's, `module:function`.

Their first round reads the prompt, too, so that their acceptance length is tokens over rounds. Times are those at which
transformers hands tokens to a streamer; `took` is the whole call (of one that comes alone).

Letters: B rows, T positions.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from ..errors import UserError
from ..heads.backbone import Backbone
from .draft_model import same_tokens
from .rows import Row
from .traffic import Ask

LOOKUP = 10  # tokens that prompt lookup drafts
Tick = Callable[[], None]
Rival = Callable[[Sequence[Ask], Tick], list[Row]]


class Clock(BaseStreamer):
    """Notes when tokens come: (seconds by perf_counter, how many for each row)."""

    def __init__(self) -> None:
        self.came: list[tuple[float, int]] = []
        self._begun = False

    def put(self, value: torch.Tensor) -> None:
        """The prompt first, then (B,) tokens of a step, or (T,) of one row."""
        if self._begun:
            self.came.append((perf_counter(), value.numel()))
        self._begun = True

    def end(self) -> None:
        pass


def batched(backbone: Backbone, rows: int, **extra: Any) -> Rival:
    """`generate` of so many prompts at a time, with further options. A row was asked when its batch began."""

    def answer(asks: Sequence[Ask], tick: Tick) -> list[Row]:
        begun, found = perf_counter(), list[Row]()
        for start in range(0, len(asks), rows):
            found += _batch(backbone, asks[start : start + rows], begun, extra)
            for _ in asks[start : start + rows]:
                tick()
        return found

    return answer


def lookup(backbone: Backbone) -> Rival:
    return batched(backbone, 1, prompt_lookup_num_tokens=LOOKUP)


def assisted(backbone: Backbone, assistant: Any) -> Rival:
    """Assisted generation: by a smaller model (a `Backbone`), or by the first layers of the backbone (exit:6)."""
    if isinstance(assistant, str):
        return batched(backbone, 1, assistant_early_exit=int(assistant.partition(":")[2]))
    extra = {"assistant_model": assistant.model}
    if not same_tokens(backbone.tokenizer, assistant.tokenizer):
        extra |= {"tokenizer": backbone.tokenizer, "assistant_tokenizer": assistant.tokenizer}
    return batched(backbone, 1, **extra)


def peer(backbone: Backbone, name: str) -> Rival:
    """A function of an installed package or of the user's own, `module:function`, one prompt at a time. It is called as
    function(model, tokenizer, ids, max_new_tokens=, temperature=) and gives new tokens: a list, or runs as they come.

    Raises:
        UserError: there is none of this name.
    """
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"peer: {name} is no module:function that can be imported ({error})") from None

    def answer(asks: Sequence[Ask], tick: Tick) -> list[Row]:
        begun, found = perf_counter(), list[Row]()
        for ids, options in asks:
            asked, came, tokens = perf_counter() - begun, list[tuple[float, int]](), list[int]()
            told = {"max_new_tokens": options["max_new_tokens"], "temperature": options.get("temperature", 0.0)}
            for run in _runs(function(backbone.model, backbone.tokenizer, list(ids), **told)):
                tokens += run
                came.append((perf_counter(), len(run)))
            found.append({**_row(tokens, came, asked, begun), "took": round(perf_counter() - begun - asked, 6)})
            tick()
        return found

    return answer


def _runs(found: Iterable[Any]) -> Iterable[list[int]]:
    """A list of tokens is one run; anything else is runs, or tokens, as they come."""
    if isinstance(found, torch.Tensor):
        found = found.flatten().tolist()
    if isinstance(found, list):
        yield list(map(int, found))
        return
    for run in found:
        yield [int(run)] if isinstance(run, int) else list(map(int, run))


def _batch(backbone: Backbone, asks: Sequence[Ask], begun: float, extra: dict[str, Any]) -> list[Row]:
    """The answers to some prompts in one call of `generate`."""
    ends, clock = backbone.eos_token_ids, Clock()
    pad, width = min(ends, default=0), max(len(ask.ids) for ask in asks)
    ids = torch.tensor([[pad] * (width - len(ask.ids)) + ask.ids for ask in asks])  # (B, T)
    mask = torch.tensor([[0] * (width - len(ask.ids)) + [1] * len(ask.ids) for ask in asks])
    options = {**asks[0].options, "max_new_tokens": max(ask.options["max_new_tokens"] for ask in asks)}
    if (seed := options.pop("seed", None)) is not None:
        torch.manual_seed(seed)
    asked = perf_counter() - begun
    found = backbone.model.generate(
        ids.to(backbone.device), attention_mask=mask.to(backbone.device), pad_token_id=pad, streamer=clock,
        **options, **extra,
    )[:, width:].tolist()  # fmt: skip
    took = round(perf_counter() - begun - asked, 6)
    counts = [(at, count // len(asks)) for at, count in clock.came]  # one row brings runs, several a token each
    rows = []
    for ask, answer in zip(asks, found, strict=True):
        end = next((place + 1 for place, token in enumerate(answer) if token in ends), len(answer))
        given = answer[: min(end, ask.options["max_new_tokens"])]
        rows.append({**_row(given, counts, asked, begun), "took": took})
    return rows


def _row(tokens: list[int], came: Sequence[tuple[float, int]], asked: float, begun: float) -> Row:
    """A row; of what came, no more than these tokens (a batch goes on behind the end of one answer)."""
    runs, left = [], len(tokens)
    for at, count in came:
        if left > 0 and count:
            runs.append([round(at - begun, 6), min(count, left)])
            left -= count
    rounds = len(runs)
    return {
        "tokens": tokens,
        "asked": round(asked, 6),
        "came": runs,
        "rounds": rounds,
        "accepted": len(tokens) - rounds,
    }
