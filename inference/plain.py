"""Plain batched decoding of a fixed group of prompts, for the data commands.

Rows start together at their own lengths, leave the batch when they end, and never wait for one another in the cache.
A row's tokens depend on (seed, sample number) and, in half precision, on its group: a group is computed in one go.

Letters: B rows still running, T prompt positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..errors import UserError
from ..heads.backbone import Backbone
from ..heads.cache import Cache
from .padding import padded
from .sampler import gumbel_noise

_PREFILL_TOKENS = 4096  # prompt tokens of one forward: bounds the memory of masks and activations


@torch.inference_mode()
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
    on_step: Callable[[int], None] | None = None,
) -> list[list[int]]:
    """New tokens for each prompt, the end token included where one came before the limit.

    Args:
        prompts: token ids, at least one each.
        max_new_tokens: for all, or one for each prompt.
        temperature: for all, or one for each prompt. 0 is greedy; above it, warpers act in transformers' order
            (temperature, top_k, top_p) and the noise at a position depends on (seed, sample number, position).
        samples: the sample number of each prompt; by default its place in the group.
        eos: end tokens; by default the backbone's.
        give_up: called with the prompt's place and its new tokens so far, after each of them; True ends the row there.
        on_step: called after each forward with the number of tokens it gave.

    Raises:
        UserError: a prompt is empty, or does not fit into the backbone's context with at least one new token.
    """
    if not prompts:
        return []
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    limits = [min(n, _room(backbone, i, p)) for i, (p, n) in enumerate(zip(prompts, limits, strict=True))]
    heat = [float(temperature)] * len(prompts) if isinstance(temperature, int | float) else list(temperature)
    numbers = list(samples if samples is not None else range(len(prompts)))
    stops = backbone.eos_token_ids if eos is None else eos
    processors = _processors(top_k, top_p, repetition_penalty, backbone)
    texts = [list(prompt) for prompt in prompts]
    running = list(range(len(prompts)))
    cache, logits = _prefill(backbone, texts, max(limits))
    while True:
        keys = [(heat[row], numbers[row]) for row in running]
        chosen = _choose(logits, [texts[row] for row in running], processors, seed, keys)
        for row, token in zip(running, chosen, strict=True):
            texts[row].append(token)
        if on_step is not None:
            on_step(len(running))
        ended = [
            place
            for place, row in enumerate(running)
            if chosen[place] in stops
            or len(texts[row]) - len(prompts[row]) >= limits[row]
            or (give_up is not None and give_up(row, texts[row][len(prompts[row]) :]))
        ]
        if len(ended) == len(running):
            return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
        if ended:
            running = [running[place] for place in cache.drop(ended)]
        last = torch.tensor([[texts[row][-1]] for row in running], device=backbone.device)  # (B, 1)
        hidden = backbone.forward(last, cache=cache).last
        cache.commit_all()
        logits = backbone.logits(hidden[:, -1])  # (B, V)


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


def _prefill(backbone: Backbone, texts: list[list[int]], new_tokens: int) -> tuple[Cache, Tensor]:
    """The cache behind all prompts, and the (B, V) logits after each."""
    cache = backbone.new_cache(len(texts), capacity=max(map(len, texts)) + new_tokens)
    last = torch.empty(len(texts), backbone.hidden_size, dtype=backbone.dtype, device=backbone.device)
    width = max(1, _PREFILL_TOKENS // len(texts))
    for start in range(0, max(map(len, texts)), width):
        chunk = [text[start : start + width] for text in texts]
        hidden = backbone.forward(padded(chunk, backbone.device), cache=cache).last
        cache.commit([range(len(part)) for part in chunk])
        for row, part in enumerate(chunk):
            if part:
                last[row] = hidden[row, len(part) - 1]
    return cache, backbone.logits(last)


def _processors(top_k: int, top_p: float, penalty: float, backbone: Backbone) -> LogitsProcessorList:
    """What acts on the scores of all rows alike; on a greedy row the warpers change nothing that matters."""
    chosen = LogitsProcessorList()
    if penalty != 1.0:
        chosen.append(RepetitionPenaltyLogitsProcessor(penalty))
    if top_k:
        chosen.append(TopKLogitsWarper(min(top_k, backbone.vocab_size)))
    if top_p < 1.0:
        chosen.append(TopPLogitsWarper(top_p))
    return chosen


def _choose(
    logits: Tensor,
    texts: list[list[int]],
    processors: LogitsProcessorList,
    seed: int,
    keys: Sequence[tuple[float, int]],
) -> list[int]:
    """The next token of each row from its (B, V) logits; `keys` are the temperature and sample number of each."""
    if processors:
        longest = max(map(len, texts))
        # the processors of this loop look only at which tokens a text has: its last one as padding changes nothing
        ids = torch.tensor([text + [text[-1]] * (longest - len(text)) for text in texts], device=logits.device)
        penalties = LogitsProcessorList(p for p in processors if isinstance(p, RepetitionPenaltyLogitsProcessor))
        warpers = LogitsProcessorList(p for p in processors if not isinstance(p, RepetitionPenaltyLogitsProcessor))
        heats = torch.tensor([[heat or 1.0] for heat, _ in keys], device=logits.device)
        logits = warpers(ids, penalties(ids, logits.float()) / heats)  # type: ignore[arg-type]
    tokens: list[int] = logits.argmax(-1).tolist()
    for row, ((heat, number), text) in enumerate(zip(keys, texts, strict=True)):
        if heat:
            scores = logits[row].float() if processors else logits[row].float() / heat
            noise = gumbel_noise(seed, number, len(text), scores.shape[-1])
            tokens[row] = int((scores.double().cpu() + noise).argmax())
    return tokens
