"""Plain decoding of a fixed group of prompts, for the data commands: an engine without a drafter, and a row for each.

All rows begin in the first step and leave when they end, so that what shares a forward, and with it the last digits in
half precision, depends on the group alone: a group is computed in one go, and gives the same bytes each time.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from ..errors import UserError
from ..heads.backbone import Backbone
from .engine import Engine
from .intake import Asked, Intake
from .nucleus import Nucleus
from .ruling import MATCH
from .sampler import Sampler

PREFILL = 4096  # prompt tokens of one forward, all rows together: nobody waits for a stream here


def decode_group(
    backbone: Backbone,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int],
    temperature: float | Sequence[float] = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    samples: Sequence[int] | None = None,
    eos: frozenset[int] | None = None,
    give_up: Callable[[int, list[int]], bool] | None = None,
    on_step: Callable[[], None] | None = None,
) -> list[list[int]]:
    """New tokens for each prompt, the end token included where one came before the limit.

    A row whose logits leave no token to choose (a backbone that overflows) is empty, with a warning that says so.

    Args:
        prompts: token ids, at least one each.
        max_new_tokens: for all, or one for each prompt.
        temperature: for all, or one for each prompt. 0 is greedy; above it, warpers act in transformers' order
            (temperature, top_k, top_p) and the noise at a position depends on (seed, sample number, position). What the
            generation config of the model says is not asked.
        samples: the sample number of each prompt; by default its place in the group.
        eos: end tokens; by default the backbone's.
        give_up: called with the prompt's place and its new tokens so far, after each of them; True ends the row there.
        on_step: called after each step.

    Raises:
        UserError: a prompt is empty, or does not fit into the backbone's context with at least one new token; or no
            row has a token to choose.
    """
    if not prompts:
        return []
    backbone.pack()
    count = len(prompts)
    limits = [max_new_tokens] * count if isinstance(max_new_tokens, int) else max_new_tokens
    heats = [temperature] * count if isinstance(temperature, int | float) else temperature
    numbers = samples if samples is not None else range(count)
    asked = []
    for place, (prompt, limit, heat, number) in enumerate(zip(prompts, limits, heats, numbers, strict=True)):
        sampler = Sampler(
            processors=_processors(backbone, repetition_penalty, heat, top_k, top_p),
            greedy=not heat,
            seed=seed,
            sample=number,
            max_new_tokens=min(limit, _room(backbone, place, prompt)),
            eos=backbone.eos_token_ids if eos is None else eos,
            criteria=StoppingCriteriaList([_giving_up(give_up, place, len(prompt))] if give_up else []),
            device=backbone.device,
        )
        asked.append(Asked(list(prompt), sampler, MATCH))
    return _decoded(Intake(backbone, None, None, MATCH), asked, on_step or (lambda: None))


def _decoded(intake: Intake, asked: Sequence[Asked], on_step: Callable[[], None]) -> list[list[int]]:
    rows = len(asked) if intake.together else 1
    engine = Engine.of(intake, rows, rows * max(map(intake.need, asked)), PREFILL)
    requests = [engine.take(each) for each in asked]
    going = True
    while going:
        going = engine.step()
        on_step()
    failed = [request.error for request in requests if request.error is not None]
    for error in failed:
        if not isinstance(error, UserError) or len(failed) == len(requests):
            raise error
        warnings.warn(str(error), stacklevel=3)
    return [[] if request.error else request.tokens for request in requests]


def _room(backbone: Backbone, place: int, prompt: Sequence[int]) -> int:
    """New tokens that fit behind a prompt."""
    if not prompt:
        raise UserError(f"prompt {place} is empty: at least one token is needed")
    room = backbone.max_positions - len(prompt)
    if room < 1:
        raise UserError(
            f"prompt {place} has {len(prompt)} tokens, and {backbone.name} takes texts of {backbone.max_positions}"
        )
    return room


def _processors(backbone: Backbone, penalty: float, heat: float, top_k: int, top_p: float) -> LogitsProcessorList:
    """What acts on the scores of a row; warpers change nothing of a greedy one."""
    chosen = LogitsProcessorList()
    if penalty != 1.0:
        chosen.append(RepetitionPenaltyLogitsProcessor(penalty))
    if heat and heat != 1.0:
        chosen.append(TemperatureLogitsWarper(float(heat)))
    if heat and top_k:
        chosen.append(TopKLogitsWarper(min(top_k, backbone.vocab_size)))
    if heat and top_p < 1.0:
        chosen.append(Nucleus(top_p))
    return chosen


def _giving_up(give_up: Callable[[int, list[int]], bool], place: int, prompt: int) -> Any:
    """As a criterion of transformers."""

    def criterion(ids: Tensor, scores: Any) -> bool:
        return give_up(place, ids[0, prompt:].tolist())

    return criterion
