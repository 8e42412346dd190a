"""`Nucleus`: top_p without sorting the whole vocabulary, which takes longer than a row's share of a batched forward.

Letters: V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, TopPLogitsWarper

LIKELIEST = 1024  # are looked at first; where they are not enough, all are sorted


class Nucleus(LogitsProcessor):
    """Keeps what `TopPLogitsWarper` of transformers keeps: the likeliest tokens, as few as make up `top_p` of the
    probability (Holtzman et al. 2020, section 3.1). At the boundary, sums in another order may round otherwise, and of
    equal scores others may stay."""

    def __init__(self, top_p: float) -> None:
        self.top_p, self.whole = top_p, TopPLogitsWarper(top_p)

    def __call__(self, input_ids: Any, scores: Tensor) -> Tensor:
        """(1, V) scores to (1, V), -inf for what is left out."""
        best, tokens = scores.topk(min(LIKELIEST, scores.shape[-1]))
        mass = (best - scores.logsumexp(-1, keepdim=True)).exp().cumsum(-1)
        kept = int((mass < self.top_p).sum()) + 1  # the one that reaches it belongs to it
        if kept > best.shape[-1]:
            return self.whole(input_ids, scores)  # type: ignore[no-any-return]
        return torch.full_like(scores, -torch.inf).scatter(-1, tokens[:, :kept], best[:, :kept])
