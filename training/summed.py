"""A loss summed over many positions without ever holding all logits.

Values and gradients are made in one pass. The projection to logits runs in chunks of positions, the loss in blocks that
stay in the processor's cache, and gradients are taken on the spot: nothing is computed twice, and of all logits no more
than a chunk is kept. The backbone's distribution is computed once a position and serves all depths.

Letters: D depths, M_d positions of depth d, J positions of the teacher, m positions of a chunk or block, H width, Vd
draft vocabulary. p is the target's distribution, q the drafter's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .losses import Mixture, exact

BLOCK = {"cpu": 1 << 19}  # logits of a block: few enough for the cache
CHUNK = {"cpu": 1 << 23}  # logits of a chunk: enough for the matrix products, and what bounds the memory
ELSEWHERE = 1 << 26  # of either, on a device with a cache of another kind


@dataclass
class Terms:
    """What a loss is summed over."""

    loss: Mixture
    hidden: Sequence[Tensor]
    """D tensors (M_d, H) that `project` reads."""
    places: Sequence[Tensor]
    """D tensors (M_d,) int64, ascending: which of the teacher's positions each one is compared with."""
    labels: Sequence[Tensor]
    """D tensors (M_d,) draft ids of the data's tokens, -1 outside."""
    project: Callable[[Tensor, int], Tensor]
    """(m, H) and the depth to (m, Vd) logits."""
    teacher: Callable[[int, int], Tensor]
    """A run of the teacher's positions, as first and last + 1, to (m, Vd) logits."""
    count: int
    """J."""
    vocab: int
    """Vd; sizes blocks and chunks."""
    mass: Callable[[int, int], Tensor] | None = None
    """The same to (m,) logarithms of what p is divided by; None: p sums to 1 over the draft vocabulary."""
    truth: Tensor | None = None
    """(J, H) the features that `hidden` guesses; for losses that compare them."""


@dataclass
class Sums:
    """What came of it."""

    losses: Tensor
    """(D,) sums of the values by depth."""
    tops: list[Tensor]
    """D tensors (M_d,): the draft id that q is largest at."""
    teacher_tops: Tensor
    """(J,) the draft id that p is largest at; -1 where the loss reads no p."""
    total: Tensor
    """() the weighted sum of `losses`; the one thing that has a gradient."""


def summed(terms: Terms, weights: Tensor, parameters: Sequence[Tensor]) -> Sums:
    """Sum over depths d of weights[d] times the sum of the values at depth d.

    Args:
        weights: (D,).
        parameters: all trained tensors that `project` may read; gradients reach these and `hidden`.
    """
    walk = _Walk(terms, weights, parameters)
    total = _Summed.apply(walk, *terms.hidden, *parameters)  # type: ignore[no-untyped-call]
    return Sums(walk.losses, walk.tops, walk.teacher_tops, total)


class _Summed(torch.autograd.Function):
    """Gradients are made in the forward pass and handed out in the backward pass."""

    @staticmethod
    def forward(ctx: Any, walk: _Walk, *inputs: Tensor) -> Tensor:
        walk.run(wanted=any(ctx.needs_input_grad))
        ctx.save_for_backward(*walk.gradients)
        return (walk.losses * walk.weights).sum()

    @staticmethod
    def backward(ctx: Any, *outward: Tensor) -> tuple[Tensor | None, ...]:
        scale = outward[0]
        return None, *(None if one is None else one * scale.to(one.dtype) for one in ctx.saved_tensors)


class _Walk:
    """One pass over all positions, chunk by chunk, and in a chunk depth by depth."""

    def __init__(self, terms: Terms, weights: Tensor, parameters: Sequence[Tensor]) -> None:
        device = weights.device.type
        self.terms, self.weights, self.parameters = terms, weights, parameters
        self.block = max(1, BLOCK.get(device, ELSEWHERE) // terms.vocab)
        self.chunk = self.block * max(1, CHUNK.get(device, ELSEWHERE) // terms.vocab // self.block)
        self.losses = torch.zeros_like(weights)
        self.tops = [torch.empty_like(places) for places in terms.places]
        self.teacher_tops = torch.full((terms.count,), -1, device=weights.device)
        self.gradients: list[Tensor | None] = [None] * (len(terms.hidden) + len(parameters))
        # where each block of the teacher's positions begins among the positions of a depth
        grid = torch.arange(0, max(terms.count, 1) + self.block, self.block, device=weights.device)
        self.edges = [torch.searchsorted(places, grid).tolist() for places in terms.places]

    def run(self, wanted: bool) -> None:
        if wanted:
            for depth, hidden in enumerate(self.terms.hidden):
                self.gradients[depth] = torch.zeros_like(hidden)
        # without any position one empty chunk: its gradients are zeros, and no parameter is left without
        for start in range(0, max(self.terms.count, 1), self.chunk):
            stop = min(start + self.chunk, self.terms.count)
            targets = self._targets(start, stop)
            for depth in range(len(self.terms.hidden)):
                self._descend(depth, start // self.block, targets, wanted, first=start == 0)

    def _targets(self, start: int, stop: int) -> list[Tensor | None]:
        """p of each block of a chunk, (m, Vd) each."""
        if not self.terms.loss.teacher:
            return [None] * max(1, -(-(stop - start) // self.block))
        targets: list[Tensor | None] = []
        divided = torch.split(self.terms.mass(start, stop), self.block) if self.terms.mass else ()
        for place, logits in enumerate(torch.split(self.terms.teacher(start, stop), self.block)):
            dtype = exact(logits)
            p = (logits.to(dtype) - divided[place][:, None]).exp() if divided else logits.softmax(-1, dtype=dtype)
            self.teacher_tops[start + place * self.block :][: len(p)] = p.max(-1).indices
            targets.append(p)
        return targets

    def _descend(self, depth: int, number: int, targets: Sequence[Tensor | None], wanted: bool, first: bool) -> None:
        """One depth of a chunk, whose first block has this number."""
        edges = self.edges[depth][number : number + len(targets) + 1]
        begin, end = edges[0], edges[-1]
        if begin == end and not first:
            return
        piece = self.terms.hidden[depth].detach()[begin:end].requires_grad_(wanted)
        with torch.set_grad_enabled(wanted):
            logits = self.terms.project(piece, depth)  # (m, Vd)
        outward: list[Tensor] = []
        for i, p in enumerate(targets):
            if edges[i] < edges[i + 1]:
                block = logits.detach()[edges[i] - begin : edges[i + 1] - begin].requires_grad_(wanted)
                total = self._block(depth, slice(edges[i], edges[i + 1]), block, p, (number + i) * self.block)
                outward += torch.autograd.grad(total, block) if wanted else ()
        if wanted:
            outward = outward or [logits.detach()]
            gradients = torch.autograd.grad(logits, [piece, *self.parameters], torch.cat(outward), allow_unused=True)
            assert gradients[0] is not None, f"the projection of depth {depth} reads no hidden state"
            self._keep(depth, slice(begin, end), gradients)
        if self.terms.loss.features:
            total = self._features(depth, slice(begin, end), piece)
            if wanted:
                self._keep(depth, slice(begin, end), torch.autograd.grad(total, piece))

    def _block(self, depth: int, rows: slice, logits: Tensor, p: Tensor | None, start: int) -> Tensor:
        """The weighted loss of a block of a depth's rows, whose p begins at this position of the teacher."""
        self.tops[depth][rows] = logits.detach().max(-1).indices
        if p is not None and len(p) > len(logits):
            p = p[self.terms.places[depth][rows] - start]
        with torch.set_grad_enabled(logits.requires_grad):
            return self._weighed(depth, self.terms.loss.values(logits, p, self.terms.labels[depth][rows]))

    def _features(self, depth: int, rows: slice, guesses: Tensor) -> Tensor:
        """The weighted loss of features of a depth's rows."""
        assert self.terms.truth is not None, "a loss on features needs those of the backbone"
        truth = self.terms.truth[self.terms.places[depth][rows]]
        with torch.set_grad_enabled(guesses.requires_grad):
            return self._weighed(depth, self.terms.loss.feature_values(guesses, truth, self.terms.labels[depth][rows]))

    def _weighed(self, depth: int, values: Tensor) -> Tensor:
        total = values.sum()
        self.losses[depth] += total.detach()
        return total * self.weights[depth]

    def _keep(self, depth: int, rows: slice, gradients: Sequence[Tensor | None]) -> None:
        """Gradients of a depth's rows, and of all parameters or of none, added to those before."""
        hidden, piece = self.gradients[depth], gradients[0]
        assert hidden is not None, "run() makes room for it"
        if piece is not None:
            hidden[rows] += piece
        for place, gradient in enumerate(gradients[1:], len(self.terms.hidden)):
            kept = self.gradients[place]
            if gradient is not None:
                self.gradients[place] = gradient if kept is None else kept.add_(gradient)
