"""What generation gives back: outputs, pieces of a stream, and what is kept of each token where it is asked for.

Letters: T new tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .detokenizer import decode
from .stats import Stats


@dataclass
class Output:
    """What was generated for one prompt."""

    text: str
    """Without special tokens; empty if the backbone has no tokenizer."""
    tokens: list[int]
    """The new tokens, an end of sequence included."""
    stats: Stats
    scores: Tensor | None = None
    """With `output_scores`: (T, V) fp32, what each token was chosen by, after all processors."""
    logits: Tensor | None = None
    """With `output_logits`: (T, V) fp32, what the backbone said, before any processor."""
    logprobs: list[float] | None = None
    """With `output_logprobs`: natural logarithm of each token's probability under its scores."""

    @classmethod
    def of(cls, tokenizer: Any, tokens: list[int], stats: Stats, record: Record | None) -> Output:
        """The output of these tokens, with what a sampler kept of them."""
        kept: dict[str, Any] = {} if record is None else record.kept()
        return cls(decode(tokenizer, tokens), tokens, stats, **kept)

    def __str__(self) -> str:
        return self.text


@dataclass
class Piece:
    """A bit of a stream. The texts of all pieces add up to the text of the output, and so do the tokens."""

    text: str
    tokens: list[int] = field(default_factory=list)
    stats: Stats | None = None
    """On the last piece only, which may have no text."""

    def __str__(self) -> str:
        return self.text


@dataclass
class Record:
    """Rows of the emitted tokens, as they come. None: not asked for."""

    scores: list[Tensor] | None = None
    """(1, V) fp32 each."""
    logits: list[Tensor] | None = None
    """(1, V) fp32 each."""
    logprobs: list[float] | None = None

    def add(self, logits: Tensor, scores: Tensor, token: int) -> None:
        """Keep what was asked for of one token: its logits (V,), of any dtype, and scores (V,) fp32."""
        if self.scores is not None:
            self.scores.append(scores[None])
        if self.logits is not None:
            self.logits.append(logits.to(torch.float32, copy=True)[None])
        if self.logprobs is not None:
            self.logprobs.append(float(scores.log_softmax(-1)[token]))

    def kept(self) -> dict[str, Tensor | list[float] | None]:
        """The fields of an `Output`, on the CPU."""
        rows = {"scores": self.scores, "logits": self.logits}
        stacked = {name: None if kept is None else torch.cat(kept).cpu() for name, kept in rows.items()}
        return {**stacked, "logprobs": self.logprobs}
