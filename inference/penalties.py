"""Penalties that `generate` of transformers does not have.

Letters: T tokens, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import LogitsProcessor

from ..errors import UserError


class CountPenalty(LogitsProcessor):
    """Frequency and presence penalties as the OpenAI API and vLLM define them.

    The logit of a token that was generated c > 0 times falls by `frequency * c + presence`; the prompt does not count.
    They come behind the other processors and before temperature and the rest of the warpers.

    Args:
        prompt: tokens of the prompt.
        frequency, presence: any finite numbers; below 0 they encourage.

    Raises:
        UserError: one of them is no finite number.
    """

    def __init__(self, prompt: int, frequency: float = 0.0, presence: float = 0.0) -> None:
        for name, value in (("frequency_penalty", frequency), ("presence_penalty", presence)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise UserError(f"{name} is {value!r}; it has to be a finite number, 0 for none")
        self.prompt, self.frequency, self.presence = prompt, frequency, presence

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(1, T) ids and (1, V) logits to (1, V) logits."""
        new = input_ids[:, self.prompt :]
        counts = torch.zeros_like(scores).scatter_add_(1, new, torch.ones_like(new, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)
