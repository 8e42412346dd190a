"""Where two answers of a backbone part, and whether rounding explains it: the one rule for all comparisons.

- fp32: a *tie* where float64 puts both tokens less than 1e-4 below the best one (about one in 300,000 tokens).
- half precision: *rounding* where that gap is at most what the errors of this precision at this very prefix explain.
- anything else is a *mismatch*.

Letters: T positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..heads.backbone import Backbone
from .sampler import Sampler, gumbel_noise

TIE = 1e-4
ERRORS = 6  # standard deviations: two logits part by the square root of 2 of them, so that this is about four of theirs


@dataclass(frozen=True)
class Parting:
    """The first step at which two answers differ."""

    kind: str
    """tie, rounding or mismatch."""
    step: int
    """Counted from 0 behind the prompt."""
    plain: int | None
    """The token of the first answer; None if it has ended."""
    ours: int | None
    """That of the second."""
    gap: float | None = None
    """How far the lower of the two lies below the best token, in float64; None where one is ruled out or missing."""
    margin: float | None = None
    """Between the two best tokens, as the backbone's own precision has them."""
    allowed: float | None = None
    """The gap that rounding explains."""

    @property
    def explained(self) -> bool:
        return self.kind != "mismatch"

    def row(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


class Judge:
    """Judges pairs of answers of one backbone."""

    def __init__(self, backbone: Backbone) -> None:
        self.backbone = backbone

    def parting(
        self, prompt: Sequence[int], plain: Sequence[int], ours: Sequence[int], **options: Any
    ) -> Parting | None:
        """None if the answers are equal.

        Args:
            options: those of `Generator.generate` with which both were made; for draws, seed and sample among them.
        """
        if list(plain) == list(ours):
            return None
        step = next((k for k, (a, b) in enumerate(zip(plain, ours, strict=False)) if a != b), None)
        if step is None:
            step = min(len(plain), len(ours))
            return Parting("mismatch", step, *((one[step] if step < len(one) else None) for one in (plain, ours)))
        sampler = Sampler.from_options(self.backbone, prompt, **options)
        return self._judged(sampler, [*prompt, *plain[:step]], Parting("mismatch", step, plain[step], ours[step]))

    @torch.no_grad()
    def _judged(self, sampler: Sampler, text: list[int], found: Parting) -> Parting:
        half = self.backbone.dtype != torch.float32
        exact, rounded = self.logits(text, exactly=True), self.logits(text)
        allowed = explained_by(exact, rounded) if half else TIE
        scores = _scores(sampler, text, exact)
        gap = float(scores.max() - scores[[found.plain, found.ours]].min())
        best, second = _scores(sampler, text, rounded.double()).topk(2).values.tolist()
        kind = "mismatch" if gap > allowed or (gap == allowed and not half) else "rounding" if half else "tie"
        finite = gap < float("inf")
        margin = best - second if second > -float("inf") else None
        return Parting(kind, found.step, found.plain, found.ours, gap if finite else None, margin, allowed)

    def logits(self, text: Sequence[int], exactly: bool = False) -> Tensor:
        """(V,) logits behind a text; `exactly`: computed in float64."""
        model, ids = self.backbone.model, torch.tensor([list(text)], device=self.backbone.device)  # (1, T)
        if not exactly:
            return _last(model, ids)
        with _doubled(model):
            return _last(model, ids)


def explained_by(exact: Tensor, rounded: Tensor) -> float:
    """The gap that rounding explains: by how much it moves two logits (V,) against each other.

    The spread of the errors over the vocabulary tells (what all logits have in common moves none of them), and the best
    ones, the largest, are rounded once more to the spacing of their dtype there.
    """
    spread = float((rounded.double() - exact).std())
    return ERRORS * spread + torch.finfo(rounded.dtype).eps * 2.0 ** math.floor(
        math.log2(abs(float(exact.max())) or 1.0)
    )


def _last(model: nn.Module, ids: Tensor) -> Tensor:
    training = model.training
    model.eval()
    try:
        logits: Tensor = model(input_ids=ids, use_cache=False).logits[0, -1]
        return logits
    finally:
        model.train(training)


def _scores(sampler: Sampler, text: Sequence[int], logits: Tensor) -> Tensor:
    """(V,) float64 scores whose best is the token: processors applied, noise added."""
    scores = logits[None].double()
    if sampler.processors:
        scores = sampler.processors(torch.tensor([list(text)], device=logits.device), scores)  # type: ignore[arg-type]
    if sampler.greedy:
        return scores[0]
    noise = gumbel_noise(sampler.seed, sampler.sample, len(text), scores.shape[-1])
    return scores[0] + noise.to(scores.device)


@contextmanager
def _doubled(model: nn.Module) -> Iterator[None]:
    """The modules of a model compute in float64 while the block runs, a copy of the weights of one at a time."""
    before: dict[Tensor, Tensor] = {}

    def widen(module: nn.Module, *_: Any) -> None:
        for tensor in _own(module):
            before[tensor], tensor.data = tensor.data, tensor.data.double()

    def restore(module: nn.Module, *_: Any) -> None:
        for tensor in _own(module):
            tensor.data = before.pop(tensor, tensor.data)

    handles = []
    for module in model.modules():
        if any(True for _ in _own(module)):
            handles += [module.register_forward_pre_hook(widen), module.register_forward_hook(restore)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for tensor, data in before.items():
            tensor.data = data


def _own(module: nn.Module) -> Iterator[Tensor]:
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if tensor.is_floating_point():
            yield tensor


def verdict(partings: Iterable[Mapping[str, Any] | None]) -> str:
    """`equal`, `equal but for 2 ties`, `NOT equal: 1 mismatch`: in the same words wherever answers are compared."""
    judged = list(partings)
    if not judged:
        return "nothing was compared"
    kinds = [one["kind"] for one in judged if one]
    wrong, rest = kinds.count("mismatch"), [_counted(kinds.count(kind), kind) for kind in ("tie", "rounding")]
    excused = " and ".join(one for one in rest if one)
    if wrong:
        return f"NOT equal: {_counted(wrong, 'mismatch')}" + (f", besides {excused}" if excused else "")
    return f"equal but for {excused}" if excused else "equal"


def _counted(number: int, kind: str) -> str:
    name = {"rounding": "near-tie of this precision"}.get(kind, kind)
    many = {"tie": "ties", "rounding": "near-ties of this precision", "mismatch": "mismatches"}[kind]
    return f"{number} {name if number == 1 else many}" if number else ""
