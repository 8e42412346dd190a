"""transformers' own door: `model.generate(..., custom_generate=gen)`.

As a callable a `Generator` gets what transformers has prepared: ids with padding, processors, criteria, the merged
config. `received` turns that into requests of our loop, and `answered` their outputs into what `generate` returns.

Letters: B rows, T positions (padding included), V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PrefixConstrainedLogitsProcessor,
    StoppingCriteriaList,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..errors import UserError
from ..heads.backbone import Backbone
from ..heads.cache import HANDED_OVER, begun
from . import options as given
from .output import Output
from .prompts import Encoded, encoded
from .sampler import DRAFT_WARPERS, Sampler, draw_seed

PREPARED = ("attention_mask", "position_ids", *HANDED_OVER, "use_cache", "logits_to_keep")
"""What transformers hands over for its own forwards, and what is read of it or has no meaning here."""

BY_ROW = ("prompt_ignore_length", "encoder_input_ids", "generated_ngrams")
"""What processors of transformers know of each row of a batch."""


def received(
    backbone: Backbone,
    model: nn.Module,
    input_ids: Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    seed: int | None,
    more: Mapping[str, Any],
) -> list[tuple[list[int], Sampler]]:
    """Ids without padding and the sampler of each row.

    Processors and criteria are given the text with its padding, as `generate` gives it.

    Args:
        input_ids: (B, T), already repeated for num_return_sequences.
        more: model kwargs.

    Raises:
        UserError: it is another model, or something is asked for that is not supported.
    """
    if model is not backbone.model:
        other = getattr(model, "name_or_path", "") or type(model).__name__
        raise UserError(
            f"generate was called on {other} ({type(model).__name__}), and this generator belongs to {backbone.name} "
            f"({type(backbone.model).__name__}): make one for that model, Generator(Backbone(model, tokenizer), ...)"
        )
    given.check(config)
    _check_kwargs(more)
    if seed is None and config.do_sample:
        seed = draw_seed()
    mask = more.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask
    rows, _ = encoded(backbone, list(input_ids), mask, more.get("position_ids"))
    return [
        (row.ids, _sampler(backbone, row, place, input_ids.shape[1], processors, criteria, config, seed or 0))
        for place, row in enumerate(rows)
    ]


def _sampler(
    backbone: Backbone,
    row: Encoded,
    place: int,
    width: int,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    seed: int,
) -> Sampler:
    pads = _pads(config, row.padding)
    ends = [one.eos_token_id for one in criteria if isinstance(one, EosTokenCriteria)]
    return Sampler(
        processors=LogitsProcessorList(_of_row(one, place, pads) for one in processors),
        greedy=not config.do_sample,
        seed=seed,
        sample=place,
        max_new_tokens=max(1, min(one.max_length for one in criteria if isinstance(one, MaxLengthCriteria)) - width),
        eos=frozenset(int(token) for tensor in ends for token in tensor.flatten()),
        criteria=StoppingCriteriaList(_criteria(criteria, pads)),
        record=given.record_of(config) if config.return_dict_in_generate else None,
        device=backbone.device,
    )


def _pads(config: GenerationConfig, count: int) -> Tensor:
    """(1, count) tokens of padding."""
    return torch.full((1, count), pad_of(config))


def pad_of(config: GenerationConfig) -> int:
    """The token behind the end of a row, and of padding before it."""
    pad = getattr(config, "_pad_token_tensor", None)
    return 0 if pad is None else int(pad)


def _of_row(processor: Any, row: int, pads: Tensor) -> Any:
    """A processor of one row: told which it is, with what it knows of this row alone, and shown the padding before."""
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed = given.of_row(processor._prefix_allowed_tokens_fn, row)
        processor = PrefixConstrainedLogitsProcessor(allowed, 1)
    known = {name: getattr(processor, name, None) for name in BY_ROW if is_theirs(processor)}
    several = {name: value for name, value in known.items() if isinstance(value, Tensor | list)}
    if several:
        processor = copy.copy(processor)
        for name, value in several.items():
            setattr(processor, name, value[row : row + 1])
        if hasattr(processor, "batch_size"):
            processor.batch_size = 1
    if not pads.numel() or isinstance(processor, DRAFT_WARPERS):
        return processor
    return lambda ids, scores: processor(torch.cat([pads.to(ids.device), ids], 1), scores)


def _criteria(criteria: StoppingCriteriaList, pads: Tensor) -> Iterator[Any]:
    """Those that are neither a limit nor end tokens."""
    for one in criteria:
        if isinstance(one, MaxTimeCriteria):
            yield given.OwnTime(one.max_time)
        elif not isinstance(one, MaxLengthCriteria | EosTokenCriteria):
            yield _with_padding(one, pads) if pads.numel() else one


def _with_padding(criterion: Any, pads: Tensor) -> Callable[[Tensor, Any], Any]:
    return lambda ids, scores: criterion(torch.cat([pads.to(ids.device), ids], 1), scores)


def _check_kwargs(more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        if name in PREPARED or value is None or value is False:
            continue
        if name in given.REFUSED:
            given.refuse(name, value)
        raise UserError(f"{name} is not supported: the backbone is given token ids, masks and positions alone")


def lent(more: Mapping[str, Any], rows: int) -> Any:
    """The cache that is to be taken over: one that holds something, or the empty one of a single row, which may be
    transformers' own."""
    if not begun(more) and rows > 1:
        return None
    return next((more[name] for name in HANDED_OVER if more.get(name) is not None), None)


def is_theirs(processor: Any) -> bool:
    """Whether a processor is one of transformers' own, which keep no state."""
    return type(processor).__module__.startswith("transformers.")


def answered(input_ids: Tensor, outputs: Sequence[Output], config: GenerationConfig) -> Any:
    """What `generate` returns: (B, T + new) ids, or these and more as a `GenerateDecoderOnlyOutput`.

    Rows that ended before the longest are filled up with the pad token, which the scores of such steps are sure of.
    """
    longest, pad = max(len(output.tokens) for output in outputs), pad_of(config)
    new = [[*output.tokens, *[pad] * (longest - len(output.tokens))] for output in outputs]
    sequences = torch.cat([input_ids, torch.tensor(new, dtype=input_ids.dtype, device=input_ids.device)], 1)
    if not config.return_dict_in_generate:
        return sequences
    kept = {
        name: _by_step([getattr(output, name) for output in outputs], longest, pad) for name in ("scores", "logits")
    }
    return GenerateDecoderOnlyOutput(sequences=sequences, **kept)  # type: ignore[arg-type]


def _by_step(rows: Sequence[Tensor | None], longest: int, pad: int) -> tuple[Tensor, ...] | None:
    """Rows of (their own length, V) to one (B, V) a step."""
    known = [row for row in rows if row is not None]
    if not known:
        return None
    sure = torch.full((1, known[0].shape[1]), -torch.inf)
    sure[0, pad] = 0.0
    filled = [torch.cat([row, sure.expand(longest - len(row), -1)]) for row in known]
    return tuple(torch.stack(filled, 1))
