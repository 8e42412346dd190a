"""Matrix times few vectors, the way a CPU is quick at it.

For decoding, weights are laid out once for its kernels (packed.py). Without that, in fp32, a product of one to sixteen
rows with a large matrix takes a CPU two to five times as long as the same product the other way round, weight first. A
drafted token is little more than such products.

Letters: M rows, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .packed import laid_out, packs, product

FEW = 16  # rows; above, both ways take the same time


class Blocks:
    """A weight laid out for the kernels of a CPU, as long as it stays as it is."""

    def __init__(self, weight: Tensor) -> None:
        self.weight, self.version, self.laid_out = weight, _version(weight), laid_out(weight)

    @classmethod
    def of(cls, weight: Tensor) -> Blocks | None:
        return cls(weight) if packs(weight) else None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # copies and files of a head go without

    def fit(self, weight: Tensor, states: Tensor) -> bool:
        """Whether they are those of this weight, for such states."""
        same = weight is self.weight and _version(weight) == self.version and weight.device.type == "cpu"
        return same and states.dtype == weight.dtype == self.laid_out.dtype


class Linear(nn.Linear):
    """A linear layer of a head: `nn.Linear` but for the order of the product."""

    blocks: Blocks | None = None

    def pack(self) -> None:
        """Lay out the weight as it is now, where that is worth it."""
        self.blocks = Blocks.of(self.weight)

    def forward(self, states: Tensor) -> Tensor:
        return linear(states, self.weight, self.bias, self.blocks)


def linear(states: Tensor, weight: Tensor, bias: Tensor | None, blocks: Blocks | None = None) -> Tensor:
    """(..., I) states, an (O, I) weight and an (O,) bias to (..., O), rounded otherwise than by `F.linear`."""
    rows = states.numel() // states.shape[-1]
    if weight.device.type != "cpu" or not rows or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return F.linear(states, weight, bias)
    if blocks is not None and blocks.fit(weight, states):
        return product(states, blocks.laid_out, bias)
    if weight.dtype != torch.float32 or states.dtype != torch.float32 or rows > FEW:
        return F.linear(states, weight, bias)
    vectors = states.reshape(rows, -1)  # (M, I)
    if rows == 1:
        vectors = vectors.expand(2, -1)  # a single one goes to another, slower kernel
    columns = vectors.contiguous().T  # in memory one behind the other, where it is quick
    found = weight @ columns if bias is None else torch.addmm(bias[:, None], weight, columns)  # (O, M)
    return found[:, :rows].T.reshape(*states.shape[:-1], -1)


def _version(weight: Tensor) -> int:
    """How often it was written to; tensors made for inference do not count."""
    return 0 if weight.is_inference() else weight._version
