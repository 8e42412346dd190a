"""What `generate` of transformers takes, read as it reads it: config, processors, and where a text ends.

transformers itself merges the configs and makes the processors, in its own order; here stand the options that are
refused, those that are ours, and the limits.

Letters: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.configuration_utils import GenerationMode

from ..errors import UserError, nearest
from ..heads.backbone import Backbone
from ..heads.cache import HANDED_OVER
from .output import Record
from .penalties import CountPenalty

SAMPLING_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")
"""Options that ask for a draw: given one of them (and temperature above 0), do_sample need not be said."""

OWN = (
    "seed", "rule", "frequency_penalty", "presence_penalty", "output_logprobs", "attention_mask", "position_ids",
    "streamer", "tokenizer", "generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn",
    *HANDED_OVER,
)  # fmt: skip
"""What can be given besides the fields of a generation config."""

REFUSED: dict[str, tuple[Any, str]] = {
    "num_beams": (1, "only greedy decoding and sampling are"),
    "num_beam_groups": (1, "only greedy decoding and sampling are"),
    "diversity_penalty": (0.0, "only greedy decoding and sampling are"),
    "constraints": (None, "a logits processor or prefix_allowed_tokens_fn can constrain the text"),
    "force_words_ids": (None, "a logits processor or prefix_allowed_tokens_fn can constrain the text"),
    "penalty_alpha": (0.0, "only greedy decoding and sampling are"),
    "dola_layers": (None, "only greedy decoding and sampling are"),
    "guidance_scale": (1.0, "it needs a second, unconditional text"),
    "watermarking_config": (None, "a mark is kept for verification one token at a time"),
    "token_healing": (False, "heal the prompt before"),
    "output_attentions": (False, "tree forwards have attentions of another form"),
    "output_hidden_states": (False, "ask backbone.forward(ids, taps=...) for those of a text"),
    "prompt_lookup_num_tokens": (None, 'the drafter is an argument of Generator: "ngram"'),
    "assistant_early_exit": (None, "the drafter is an argument of Generator"),
    "use_mtp": (False, "the drafter is an argument of Generator"),
    "speculation_type": (None, "the drafter is an argument of Generator"),
    "assistant_model": (None, "the drafter is an argument of Generator"),
    "assistant_tokenizer": (None, "the drafter is an argument of Generator"),
    "negative_prompt_ids": (None, "it needs a second, unconditional text"),
    "negative_prompt_attention_mask": (None, "it needs a second, unconditional text"),
    "inputs_embeds": (None, "a prompt is token ids, a text or a chat"),
    "synced_gpus": (False, "each process generates by itself"),
    "custom_generate": (None, "this is the custom loop already"),
}
"""Options of `generate` that are not supported: the value that asks for nothing, and why."""


class NoToken(UserError):
    """The scores at a position leave no token to choose."""


class OwnTime(MaxTimeCriteria):
    """`max_time` of one answer, counted from its own beginning."""


@dataclass
class Given:
    """The options of one answer."""

    config: GenerationConfig
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    """Those that are neither a limit nor end tokens."""
    limit: int
    """New tokens, at most."""
    eos: frozenset[int]
    record: Record | None


def read(
    backbone: Backbone,
    prompt: Sequence[int],
    *,
    row: int = 0,
    padding: int = 0,
    generation_config: GenerationConfig | None = None,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    prefix_allowed_tokens_fn: Any = None,
    tokenizer: Any = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    output_logprobs: bool = False,
    **options: Any,
) -> Given:
    """The options of one answer, over the model's own generation config.

    Args:
        prompt: its true tokens.
        row: its number among the prompts of the call, for prefix_allowed_tokens_fn.
        padding: tokens that stood before it; transformers counts them for max_length and min_length.

    Raises:
        UserError: an option is unknown (the nearest known one is named), out of range, or not supported.
    """
    config, has_length = _config(backbone, generation_config, options)
    length, model = len(prompt), backbone.model
    limit = _limit(config, length + padding, has_length)
    config.max_length = length + limit
    if config.min_new_tokens is not None:
        config.min_length = length + config.min_new_tokens
    elif config.min_length is not None:
        config.min_length = max(0, config.min_length - padding)
    own = LogitsProcessorList()
    frequency = _value("frequency_penalty", frequency_penalty, config)
    presence = _value("presence_penalty", presence_penalty, config)
    if frequency or presence:
        own.append(CountPenalty(length, frequency, presence))
    own.extend(_listed("logits_processor", logits_processor))
    returned, config.num_return_sequences = config.num_return_sequences, 1  # each answer is a row of its own
    try:
        model._prepare_special_tokens(config, kwargs_has_attention_mask=True, device=backbone.device)
        processors = model._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=length,
            encoder_input_ids=torch.tensor([list(prompt)], device=backbone.device),
            prefix_allowed_tokens_fn=of_row(prefix_allowed_tokens_fn, row),
            logits_processor=own,
            device=str(backbone.device),
            model_kwargs={},
        )
        criteria = _criteria(config, stopping_criteria, tokenizer or backbone.tokenizer)
    except (ValueError, TypeError) as error:
        raise UserError(f"generation options: {error}") from error
    config.num_return_sequences = returned
    ends = config._eos_token_tensor
    for criterion in criteria:  # as in generate, these replace what the config says
        if type(criterion) is MaxLengthCriteria:
            limit = max(1, criterion.max_length - length - padding)
        if type(criterion) is EosTokenCriteria:
            ends = criterion.eos_token_id
    return Given(
        config=config,
        processors=processors,
        criteria=StoppingCriteriaList(c for c in criteria if type(c) not in (MaxLengthCriteria, EosTokenCriteria)),
        limit=limit,
        eos=frozenset() if ends is None else frozenset(ends.tolist()),
        record=record_of(config, output_logprobs),
    )


def _config(
    backbone: Backbone, config: GenerationConfig | None, options: Mapping[str, Any]
) -> tuple[GenerationConfig, bool]:
    """All options as one config, and whether somebody gave a max_length."""
    if config is not None and not isinstance(config, GenerationConfig):
        raise UserError(f"generation_config is a {type(config).__name__}; it has to be a GenerationConfig")
    kept = _with_implied(_asking(options))
    explicit = config if config is not None else backbone.model.generation_config
    has_length = kept.get("max_length") is not None or getattr(explicit, "max_length", None) is not None
    for name in kept:
        if name in REFUSED:
            refuse(name, kept[name])
    try:
        merged, unknown = backbone.model._prepare_generation_config(config, **kept)
    except (ValueError, TypeError) as error:
        raise UserError(f"generation options: {error}") from error
    check(merged)
    unknown = [name for name, value in unknown.items() if value is not None]
    if unknown:
        raise UserError("; ".join(map(_unknown, sorted(unknown))))
    return merged, has_length


def check(config: GenerationConfig) -> None:
    """Refuses by name what a config asks for and is not supported.

    Raises:
        UserError: there is such a thing.
    """
    for name, (neutral, _) in REFUSED.items():
        if getattr(config, name, None) not in (None, False, neutral):
            refuse(name, getattr(config, name))
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise UserError(f"{mode.value.replace('_', ' ')} is not supported; greedy decoding and sampling are")


def _asking(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options without those that are named only to ask for nothing."""
    return {
        name: value
        for name, value in options.items()
        if name not in REFUSED or not (value is None or value is False or value == REFUSED[name][0])
    }


def refuse(name: str, value: Any) -> None:
    shown = f"{name}={value!r}" if isinstance(value, bool | int | float | str) else name
    raise UserError(f"{shown} is not supported: {REFUSED[name][1]}")


def _unknown(name: str) -> str:
    fields = vars(GenerationConfig())  # type: ignore[no-untyped-call]
    taken = [field for field in fields if not field.startswith("_") and field not in REFUSED]
    meant = nearest(name, [*OWN, *taken])
    return f"generation option {name} is not known or not supported" + (f"; did you mean {meant}?" if meant else "")


def _with_implied(options: dict[str, Any]) -> dict[str, Any]:
    """Add the do_sample that the other options imply."""
    options = dict(options)
    temperature = options.get("temperature")
    if isinstance(temperature, bool) or not isinstance(temperature, int | float | None):
        raise UserError(f"temperature is {temperature!r}; it has to be a number")
    if temperature is not None and temperature < 1e-5:
        if temperature < 0:
            raise UserError(f"temperature is {temperature}; it has to be 0 (greedy) or above")
        if options.get("do_sample") and temperature == 0:
            raise UserError("do_sample=True with temperature 0: give a temperature above 0, or leave do_sample out")
        options.pop("temperature")
        options["do_sample"] = False
        return {name: value for name, value in options.items() if name not in SAMPLING_OPTIONS}
    if options.get("do_sample") is None and any(options.get(name) is not None for name in SAMPLING_OPTIONS):
        options["do_sample"] = True
    return options


def _limit(config: GenerationConfig, prompt: int, has_length: bool) -> int:
    """New tokens allowed, by the rules of `model.generate`."""
    if config.max_new_tokens is not None:
        limit = config.max_new_tokens
    elif has_length:
        limit = config.max_length - prompt
        if limit < 1:
            raise UserError(f"max_length is {config.max_length}, and the prompt alone has {prompt} tokens")
    else:
        limit = config.max_length  # transformers' default counts new tokens: 20
    if limit < 1 or limit != int(limit):
        raise UserError(f"max_new_tokens is {limit}; a whole number of at least 1 is needed")
    return int(limit)


def _criteria(config: GenerationConfig, custom: Any, tokenizer: Any) -> StoppingCriteriaList:
    """The user's criteria, and those that options ask for unless the user brings one of the same kind."""
    criteria = StoppingCriteriaList(_listed("stopping_criteria", custom))
    kinds = {type(criterion) for criterion in criteria}
    if config.max_time is not None and MaxTimeCriteria not in kinds:
        if isinstance(config.max_time, bool) or not isinstance(config.max_time, int | float):
            raise UserError(f"max_time is {config.max_time!r}; it has to be a number of seconds")
        criteria.append(OwnTime(config.max_time))
    if config.stop_strings is not None and StopStringCriteria not in kinds:
        if tokenizer is None:
            raise UserError("stop_strings need a tokenizer: Backbone(model, tokenizer), or tokenizer=...")
        criteria.append(stopping_at(config.stop_strings, tokenizer))
    return criteria


def stopping_at(strings: Any, tokenizer: Any) -> StopStringCriteria:
    """The criterion of stop strings: one, or a list of them.

    Raises:
        UserError: they are none.
    """
    listed: list[Any] = (
        [strings] if isinstance(strings, str) else list(strings) if isinstance(strings, Iterable) else [None]
    )
    if not listed or not all(isinstance(one, str) for one in listed):
        raise UserError(f"stop_strings is {strings!r}; it has to be a string or a list of strings")
    try:
        return StopStringCriteria(tokenizer, listed)
    except (ValueError, AttributeError) as error:  # letters that the tokenizer lacks; no tokenizer
        raise UserError(f"stop_strings is {strings!r}, tokenizer a {type(tokenizer).__name__}: {error}") from error


def of_row(allowed: Any, row: int) -> Any:
    """A prefix function that is told which prompt it is about, although each is a row of its own here."""

    def tokens(_: int, ids: Tensor) -> Any:
        found = allowed(row, ids)
        if not len(found):
            raise NoToken("prefix_allowed_tokens_fn allows no token")
        return found

    return None if allowed is None else tokens


def record_of(config: GenerationConfig, logprobs: bool = False) -> Record | None:
    """`return_dict_in_generate` means nothing here: an Output holds what was asked for."""
    record = Record(
        scores=[] if config.output_scores else None,
        logits=[] if config.output_logits else None,
        logprobs=[] if logprobs else None,
    )
    return None if record == Record() else record


def _listed(name: str, given: Any) -> list[Any]:
    """A list of callables."""
    if given is None:
        return []
    if not isinstance(given, Sequence) or not all(map(callable, given)):
        raise UserError(f"{name} is {type(given).__name__}; it has to be a list of callables")
    return list(given)


def _value(name: str, given: float | None, config: GenerationConfig) -> float:
    """An option that a generation config may carry as an entry of its own."""
    found: float | None = given if given is not None else getattr(config, name, None)
    return 0.0 if found is None else found
