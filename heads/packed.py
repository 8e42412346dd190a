"""Weights laid out once for the kernels of a CPU.

oneDNN reads weights in blocks of its own. `F.linear` gives it plain ones, which are copied into blocks at each call:
with the few rows of a tree, that copy is most of the work. Laid out once, an output projection of 49,152 x 576 in bf16
takes 0.9 ms for six rows instead of 2.7 (two cores, AVX-512). Numbers are the same bit for bit in bf16; in fp32, sums
have another order.

The model is not changed: its layers take the other way only inside a `with` block. Weights take their memory twice.

Letters: I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEAST = 1 << 16  # numbers in a weight: smaller ones gain nothing
ROWS = 8  # that a layout is made for; others use it, too
PLACES = 16  # of each weight that are compared to see whether it changed
SHARE = 0.25  # of the memory that is free, at most

op: Callable[..., Tensor] | None
try:
    op = torch.ops.mkldnn._linear_pointwise.default
except AttributeError:  # torch built without oneDNN
    op = None


class Packed:
    """The linear layers among some modules: inside its `with` block, those of `nn.Linear` itself take laid-out weights.

    Args:
        modules: looked through. What is not a plain, dense layer on a CPU, or small, or has a forward of its own, is
            left alone.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.layers = _fitting(modules)
        self._forwards: list[tuple[nn.Linear, Callable[[Tensor], Tensor]]] = []
        self._said: Tensor | None = None
        self.renew()

    def renew(self) -> None:
        """Lay out anew what changed since: other weights, or others in their place."""
        if not self.layers or (self._said is not None and torch.equal(self._sample(), self._said)):
            return
        self.layers = _fitting(self.layers)
        self._forwards = [(one, _forward(one, laid_out(one.weight))) for one in self.layers]
        self._seen: list[Tensor] = [one.weight for one in self.layers]
        self._said = self._sample()

    def _sample(self) -> Tensor:
        """A few numbers of each weight; none where another one came in its place."""
        if any(one.weight is not seen for one, seen in zip(self.layers, self._seen, strict=True)):
            return torch.empty(0)
        weights = [one.weight.detach().flatten() for one in self.layers]
        return torch.cat([one[:: len(one) // PLACES].float() for one in weights])

    def __enter__(self) -> Packed:
        for layer, forward in self._forwards:
            layer.__dict__.setdefault("forward", forward)  # one that somebody put there meanwhile stays
        return self

    def __exit__(self, *error: Any) -> None:
        for layer, forward in self._forwards:
            if layer.__dict__.get("forward") is forward:
                del layer.__dict__["forward"]


class Packing:
    """What a backbone keeps of this: nothing at first."""

    def __init__(self) -> None:
        self.packed = Packed([])

    def follow(self, modules: Iterable[nn.Module]) -> None:
        """Lay out the layers among these modules, where memory allows, or what changed of them; of none, nothing is
        kept. They are looked through only where nothing is laid out."""
        if self.done and modules:
            self.packed.renew()
            return
        some = list(dict.fromkeys(modules))
        self.packed = Packed(some if affordable(some) else [])

    @property
    def done(self) -> bool:
        """Whether there is something laid out."""
        return bool(self.packed.layers)

    def quick(self) -> AbstractContextManager[Any]:
        """Where layers read what was laid out."""
        return self.packed if self.done and not torch.is_grad_enabled() else nullcontext()


def laid_out(weight: Tensor) -> Tensor:
    """An (O, I) weight in blocks, for `product`."""
    found: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)
    return found


def product(states: Tensor, blocks: Tensor, bias: Tensor | None) -> Tensor:
    """(..., I) states and a weight in blocks to (..., O)."""
    assert op is not None, "no oneDNN"
    return op(states, blocks, bias, "none", [], "")


def packs(weight: Any) -> bool:
    """Whether laying out this weight is possible and worth it."""
    return (
        type(weight) in (Tensor, nn.Parameter)
        and weight.device.type == "cpu"
        and weight.layout == torch.strided
        and weight.dim() == 2
        and weight.numel() >= LEAST
        and weight.is_contiguous()
        and works(weight.dtype)
    )


@cache
def works(dtype: torch.dtype) -> bool:
    """Whether this machine multiplies numbers of this kind so, and right."""
    if op is None or dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    try:
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        with torch.inference_mode():
            source = torch.Generator().manual_seed(0)
            weight = torch.randn(48, 80, generator=source).to(dtype)
            states = torch.randn(1, 3, 80, generator=source).to(dtype)
            gap = product(states, laid_out(weight), None).float() - F.linear(states.float(), weight.float())
        return bool(gap.abs().max() < (1e-4 if dtype == torch.float32 else 0.2))
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


def affordable(modules: Iterable[nn.Module]) -> bool:
    """Whether laid-out copies of these layers' weights fit well into what memory is free; where that is not known, they
    do not."""
    wanted = sum(one.weight.numel() * one.weight.element_size() for one in _fitting(modules))
    return wanted <= SHARE * free_bytes()


def free_bytes() -> int:
    """Memory that is free, or would be where it is asked for; 0 where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return 0


def _fitting(modules: Iterable[nn.Module]) -> list[nn.Linear]:
    """Those that are left as they are have a forward of their own: they are offloaded, or wrapped by somebody."""
    found = []
    for one in modules:
        own = "forward" in one.__dict__ or hasattr(one, "parametrizations")
        if type(one) is nn.Linear and not own and packs(one.weight):
            found.append(one)
    return found


def _forward(layer: nn.Linear, blocks: Tensor) -> Callable[[Tensor], Tensor]:
    weight, dtype = layer.weight, layer.weight.dtype

    def forward(states: Tensor) -> Tensor:
        if states.dtype != dtype or not states.numel() or torch.is_autocast_enabled("cpu"):
            return F.linear(states, weight, layer.bias)
        return product(states, blocks, layer.bias)

    return forward
