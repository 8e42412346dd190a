"""The backbone's output projection, borrowed by a head for its draft vocabulary.

Letters: H width, Vd draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .backbone import Backbone
from .linear import Blocks, linear
from .vocab import DraftVocab


class Borrowed:
    """Rows of the backbone's projection; no module, so that it is never trained, moved or saved with a head."""

    @torch.inference_mode(False)  # bound for decoding, it serves training, too
    def __init__(self, backbone: Backbone, vocab: DraftVocab) -> None:
        self.backbone, bias = backbone, backbone.output_bias
        self.weight = vocab.rows(backbone.output_weight.detach())
        self.bias = None if bias is None else vocab.rows(bias.detach())
        self.blocks: Blocks | None = None

    def pack(self) -> None:
        """Lay out the rows for the kernels of a CPU, where that is worth it."""
        self.blocks = Blocks.of(self.weight)

    def __call__(self, hidden: Tensor) -> Tensor:
        """(..., H) behind a final norm to (..., Vd) logits, in the backbone's dtype, soft caps and scales included."""
        return self.backbone.finish(linear(hidden.to(self.weight.dtype), self.weight, self.bias, self.blocks))
