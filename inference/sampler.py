"""The backbone's own token at a position: logits processors, then argmax, or a draw with noise keyed by position.

Above temperature 0 the token at position t of a text is argmax over x of log p(x) + G(x), with standard Gumbel noise G
that depends on (seed, sample, t) alone. The draw has exactly the law p (Gumbel-max), and it is the same whatever was
drafted, in whatever tree, beside whichever other requests: a draft is right if and only if it is this token.

Letters: B rows, V vocabulary. p is the target's probability after all processors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.configuration_utils import GenerationMode

from ..errors import UserError
from ..heads.backbone import Backbone

SAMPLING_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")
"""Options that ask for a draw: given one of them (and temperature above 0), do_sample need not be said."""


REFUSED = {
    "num_return_sequences": 1,
    "stop_strings": None,
    "max_time": None,
    "watermarking_config": None,
    "output_scores": False,
    "output_logits": False,
    "output_attentions": False,
    "output_hidden_states": False,
    "return_dict_in_generate": False,
}
"""Options of `generate` that would be ignored here, with the value that asks for nothing."""


def gumbel_noise(seed: int, sample: int, position: int, size: int) -> Tensor:
    """(V,) float64 standard Gumbel noise that (seed, sample, position) alone determine.

    Counter-based (Philox, Salmon et al. 2011, as NumPy implements it), so any position can be asked for at any time.
    """
    key = numpy.array([seed % 2**64, sample % 2**64], numpy.uint64)  # a plain list would round 64 bits
    bits = numpy.random.Philox(key=key, counter=[0, 0, 0, position])
    exponential = numpy.random.Generator(bits).standard_exponential(size)
    return torch.from_numpy(-numpy.log(exponential))


@dataclass
class Sampler:
    """Chooses the backbone's token for one request (one sample of it)."""

    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    greedy: bool = True
    seed: int = 0
    sample: int = 0
    max_new_tokens: int = 20
    eos: frozenset[int] = frozenset()
    config: GenerationConfig | None = None

    @property
    def plain(self) -> bool:
        """Whether the token is the argmax of the raw logits, so that no prefix is needed."""
        return self.greedy and not self.processors

    @classmethod
    def from_options(
        cls,
        backbone: Backbone,
        prompt: Sequence[int],
        *,
        generation_config: GenerationConfig | None = None,
        logits_processor: Any = None,
        prefix_allowed_tokens_fn: Any = None,
        seed: int | None = None,
        sample: int = 0,
        **options: Any,
    ) -> Sampler:
        """A sampler from what `model.generate` takes, over the model's own generation config.

        Giving temperature, top_k and the like implies do_sample; temperature 0 means greedy. Without a seed one is
        drawn from torch's default generator. The limit is max_new_tokens, else max_length, else 20 new tokens, as in
        `model.generate`.

        Raises:
            UserError: an option is unknown, out of range, or asks for beams and the like.
        """
        options = _with_implied(options)
        model = backbone.model
        try:
            config, unknown = model._prepare_generation_config(generation_config, **options)
        except (ValueError, TypeError) as error:
            raise UserError(f"generation options: {error}") from error
        if unknown:
            raise UserError(f"generation options not known or not supported: {', '.join(sorted(unknown))}")
        _refuse_unsupported(config)
        explicit = generation_config if generation_config is not None else model.generation_config
        has_length = options.get("max_length") is not None or getattr(explicit, "max_length", None) is not None
        limit = _limit(config, len(prompt), has_length)
        config.max_length = len(prompt) + limit
        if config.min_new_tokens is not None:
            config.min_length = len(prompt) + config.min_new_tokens
        model._prepare_special_tokens(config, kwargs_has_attention_mask=True, device=backbone.device)
        try:
            processors = model._get_logits_processor(
                generation_config=config,
                input_ids_seq_length=len(prompt),
                encoder_input_ids=torch.tensor([list(prompt)], device=backbone.device),
                prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
                logits_processor=LogitsProcessorList(logits_processor or []),
                device=str(backbone.device),
                model_kwargs={},
            )
        except ValueError as error:
            raise UserError(f"generation options: {error}") from error
        eos = config._eos_token_tensor
        return cls(
            processors=processors,
            greedy=not config.do_sample,
            seed=seed if seed is not None else draw_seed() if config.do_sample else 0,
            sample=sample,
            max_new_tokens=limit,
            eos=frozenset() if eos is None else frozenset(eos.tolist()),
            config=config,
        )

    def token(self, logits: Tensor, prefix: Sequence[int]) -> int:
        """The token after `prefix`; processors are called once, with this true prefix.

        Args:
            logits: (V,) of the backbone, any float dtype.
            prefix: all tokens before it, prompt included.
        """
        scores = logits.to(torch.float32)[None]  # (1, V)
        if self.processors:
            ids = torch.tensor([list(prefix)], device=logits.device)
            scores = self.processors(ids, scores)  # type: ignore[arg-type]
        if self.greedy:
            return int(scores[0].argmax())
        noise = gumbel_noise(self.seed, self.sample, len(prefix), scores.shape[-1])
        return int((scores[0].double().cpu() + noise).argmax())


def draw_seed() -> int:
    """A seed from torch's default generator, so that `torch.manual_seed` makes unseeded calls repeatable."""
    return int(torch.randint(2**63 - 1, ()).item())


def _with_implied(options: dict[str, Any]) -> dict[str, Any]:
    """Add the do_sample that the other options imply."""
    options = dict(options)
    temperature = options.get("temperature")
    if temperature is not None and temperature < 1e-5:
        if temperature < 0:
            raise UserError(f"temperature is {temperature}; it has to be 0 (greedy) or above")
        if options.get("do_sample"):
            raise UserError("do_sample=True with temperature 0: give a temperature above 0, or leave do_sample out")
        options.pop("temperature")
        options["do_sample"] = False
        return {name: value for name, value in options.items() if name not in SAMPLING_OPTIONS}
    if options.get("do_sample") is None and any(options.get(name) is not None for name in SAMPLING_OPTIONS):
        options["do_sample"] = True
    return options


def _refuse_unsupported(config: GenerationConfig) -> None:
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise UserError(f"{mode.value.replace('_', ' ')} is not supported; greedy decoding and sampling are")
    if config.guidance_scale not in (None, 1, 1.0):
        raise UserError(
            f"guidance_scale={config.guidance_scale} is not supported: it needs a second, unconditional text"
        )
    for name, neutral in REFUSED.items():
        if getattr(config, name, None) not in (None, False, neutral):
            raise UserError(f"{name}={getattr(config, name)!r} is not supported")


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
    if limit < 1:
        raise UserError(f"max_new_tokens is {limit}; at least 1 is needed")
    return int(limit)
