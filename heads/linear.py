"""Matrix times few vectors, the way a CPU is quick at it.

In fp32, a product of one to sixteen rows with a large matrix takes a CPU two to five times as long as the same product
the other way round, weight first. A drafted token is little more than such products.

Letters: M rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW = 16  # rows; above, both ways take the same time


class Linear(nn.Linear):
    """A linear layer of a head: `nn.Linear` but for the order of the product."""

    def forward(self, states: Tensor) -> Tensor:
        return linear(states, self.weight, self.bias)


def linear(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(..., I) states, an (O, I) weight and an (O,) bias to (..., O), rounded otherwise than by `F.linear`."""
    rows = states.numel() // states.shape[-1]
    slow = weight.dtype == torch.float32 == states.dtype and weight.device.type == "cpu" and 0 < rows <= FEW
    if not slow or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return F.linear(states, weight, bias)
    vectors = states.reshape(rows, -1)  # (M, I)
    if rows == 1:
        vectors = vectors.expand(2, -1)  # a single one goes to another, slower kernel
    columns = vectors.contiguous().T  # in memory one behind the other, where it is quick
    product = weight @ columns if bias is None else torch.addmm(bias[:, None], weight, columns)  # (O, M)
    return product[:, :rows].T.reshape(*states.shape[:-1], -1)
