"""The backbone's own token at a position: logits processors, then argmax, or a draw with noise keyed by position.

Above temperature 0 the token at position t of a text is argmax over x of log p(x) + G(x), with standard Gumbel noise G
that depends on (seed, sample, t) alone. The draw has exactly the law p (Gumbel-max), and it is the same whatever was
drafted, in whatever tree, beside whichever other requests: a draft is right if and only if it is this token.

Letters: B rows, N nodes, V vocabulary. p is the target's probability after all processors.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..errors import UserError
from ..heads.backbone import Backbone
from . import options as given
from .chance import SAMPLING, Chance, Keyed, keyed
from .options import NoToken as NoToken
from .output import Record

DRAFT_WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
"""Processors that drafts are drawn with, too, so that q comes near p: they look at no prefix and keep no state."""


def gumbel_noise(seed: int, sample: int, position: int, size: int) -> Tensor:
    """(V,) float64 standard Gumbel noise that (seed, sample, position) alone determine."""
    exponential = keyed(seed, sample, position, SAMPLING).standard_exponential(size)
    return torch.from_numpy(-numpy.log(exponential))


@dataclass
class Sampler:
    """Chooses the backbone's token for one request (one sample of it), and says where its text ends."""

    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    greedy: bool = True
    seed: int = 0
    sample: int = 0
    max_new_tokens: int = 20
    eos: frozenset[int] = frozenset()
    criteria: StoppingCriteriaList = field(default_factory=StoppingCriteriaList)
    """Asked once for each emitted token, with the true text."""
    record: Record | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Where the criteria are given the text."""
    returned: int = 1
    """Answers that are asked for of the same prompt: num_return_sequences."""
    over: bool = False
    """Whether the text has ended."""

    @property
    def plain(self) -> bool:
        """Whether the token is the argmax of the raw logits and nothing else is to be kept of it."""
        return self.greedy and not self.processors and self.record is None

    @property
    def reads(self) -> bool:
        """Whether `token` or `ended` look at the text before the last token."""
        return not self.plain or bool(self.criteria)

    @classmethod
    def from_options(
        cls,
        backbone: Backbone,
        prompt: Sequence[int],
        *,
        seed: int | None = None,
        sample: int = 0,
        row: int = 0,
        padding: int = 0,
        **options: Any,
    ) -> Sampler:
        """A sampler from what `model.generate` takes, over the model's own generation config.

        Giving temperature, top_k and the like implies do_sample; temperature 0 means greedy. Without a seed one is
        drawn from torch's default generator. The limit is max_new_tokens, else max_length, else 20 new tokens, as in
        `model.generate`.

        Args:
            row: number of the prompt in its call.
            padding: tokens of padding that stood before the prompt, and count for max_length and min_length.

        Raises:
            UserError: an option is unknown, out of range, or asks for beams and the like.
        """
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise UserError(f"seed is {seed!r}; it has to be a whole number")
        found = given.read(backbone, prompt, row=row, padding=padding, **options)
        sampled = bool(found.config.do_sample)
        return cls(
            processors=found.processors,
            greedy=not sampled,
            seed=seed if seed is not None else draw_seed() if sampled else 0,
            sample=sample,
            max_new_tokens=found.limit,
            eos=found.eos,
            criteria=found.criteria,
            record=found.record,
            returned=found.config.num_return_sequences or 1,
            device=backbone.device,
        )

    def begin(self) -> None:
        """A request begins: `max_time` counts from here."""
        self.over = False
        for criterion in self.criteria:
            if isinstance(criterion, given.OwnTime):
                criterion.initial_timestamp = time.time()

    def token(self, logits: Tensor, prefix: Sequence[int]) -> int:
        """The token after `prefix`; processors are called once, with this true prefix.

        Args:
            logits: (V,) of the backbone, any float dtype.
            prefix: all tokens before it, prompt included.

        Raises:
            NoToken: no token has any probability.
        """
        scores = self.scored(logits, prefix)
        if self.greedy:
            token = finite(*largest(scores[None])[0])
        else:
            row = scores.double().cpu()
            token = int((row + gumbel_noise(self.seed, self.sample, len(prefix), len(row))).argmax())
            finite(token, float(row[token]))
        if self.record is not None:
            self.record.add(logits, scores, token)
        return token

    def scored(self, logits: Tensor, prefix: Sequence[int]) -> Tensor:
        """(V,) logits to (V,) fp32 scores: what p is the softmax of. Calls each processor once.

        Raises:
            NoToken: a processor can do nothing with what those before it have left.
        """
        if not self.processors:
            return logits.to(torch.float32)
        ids = torch.tensor([list(prefix)], device=logits.device)
        scores = logits.to(torch.float32, copy=True)[None]  # a copy: some processors write into what they are given
        for processor in self.processors:
            try:
                found = processor(ids, scores)
            except ValueError as error:  # top_h and eta_cutoff make a distribution, which these scores may not be
                finite(0, float(scores.max()))
                raise UserError(f"{_called(processor)}: {error}") from error
            if not isinstance(found, Tensor) or found.shape != scores.shape:
                shown = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
                raise UserError(
                    f"logits_processor: {_called(processor)} gave {shown}, not scores {tuple(scores.shape)}"
                )
            scores = found
        return scores[0]

    def drafted(self, logits: Tensor) -> Tensor:
        """(B, V) logits of a drafter to (B, V) float64 on the CPU: the laws q that drafts are drawn from.

        Raises:
            UserError: they hold NaN.
        """
        scores = logits.to(torch.float32)
        for processor in self.processors:
            if isinstance(processor, DRAFT_WARPERS):
                scores = processor(None, scores)  # type: ignore[arg-type]
        laws = scores.cpu().double().softmax(-1)
        if not bool(laws.isfinite().all()):
            raise UserError("the drafter's logits hold NaN, so nothing can be drawn from them: its weights are broken")
        return laws

    def ended(self, text: Sequence[int]) -> bool:
        """Whether the text ends with its last token. Asked once for each emitted token, in order."""
        self.over = text[-1] in self.eos
        if self.criteria:
            ids = torch.tensor([list(text)], device=self.device)  # (1, T)
            kept = self.record.scores if self.record is not None else None
            scores = None if kept is None else tuple(kept)
            fired = [_fires(criterion, criterion(ids, scores)) for criterion in self.criteria]  # all, as generate does
            self.over |= any(fired)
        return self.over

    def chance(self, position: int, purpose: int) -> Chance:
        """The chance of a round whose root ends a text of `position` tokens."""
        return Keyed(self.seed, self.sample, position, purpose)


def largest(scores: Tensor) -> list[tuple[int, float]]:
    """Of each row of (N, V): its best token and that one's value in fp32, the first of equals, by one transfer."""
    rows = scores.float()
    best = rows.argmax(-1, keepdim=True)  # (N, 1)
    pairs = torch.cat([best.float(), rows.gather(-1, best)], -1).tolist()  # fp32 holds whole numbers up to 2**24
    return [(int(token), value) for token, value in pairs]


def finite(token: int, score: float) -> int:
    """The token, if the best score is one.

    Raises:
        NoToken: it is NaN, or minus infinity.
    """
    if score == score and score != -torch.inf:
        return token
    if score == score:
        raise NoToken("every token is masked (all scores are -inf): the options leave nothing to choose")
    raise NoToken("the scores hold NaN: the backbone overflows (try another dtype), or a logits processor makes them")


def _fires(criterion: Any, answer: Any) -> bool:
    """Whether a criterion's answer ends the text."""
    try:
        found = torch.as_tensor(answer)
    except (TypeError, ValueError, RuntimeError):
        shown = f"{_called(criterion)} gave {answer!r}"
        raise UserError(f"stopping_criteria: {shown}; it has to give True or False, or a tensor of them") from None
    return bool(found.any())


def _called(one: Any) -> str:
    return str(getattr(one, "__name__", type(one).__name__))


def draw_seed() -> int:
    """A seed from torch's default generator, so that `torch.manual_seed` makes unseeded calls repeatable."""
    return int(torch.randint(2**63 - 1, ()).item())
