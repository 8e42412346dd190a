"""A head and its loss as one module: what is wrapped for many processes, and what evaluation asks, too.

Letters: B rows, T positions, D depths, M_d anchors of depth d, J positions of the teacher, H width, Vd draft
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UserError
from ..heads.backbone import Backbone, Features
from ..heads.base import DraftHead
from .batches import Batch, anchors
from .losses import LOSSES, Terms, summed
from .recipe import LossSettings

DEPTHS = 3  # of a head that unrolls as far as it is told to


@dataclass
class Result:
    """What a batch came to."""

    total: Tensor
    """() what is minimised."""
    losses: Tensor
    """(D,) sums by depth."""
    hits: Tensor
    """(D,) positions whose first choice is the one that the loss teaches: the backbone's within the draft vocabulary
    (soft), or the data's token (hard)."""
    tops: list[Tensor]
    """D tensors (M_d,): first choices, as draft ids."""


class Objective(nn.Module):
    """Batches to weighted losses. The backbone is no part of the module: it is neither trained, wrapped nor saved.

    Args:
        head: bound to its backbone.
        settings: which loss, how many depths, and their weights.
        autocast: whether the head's matrix products run in bf16; its weights stay fp32.

    Raises:
        UserError: more or fewer depths are asked for than the head has.
    """

    def __init__(self, head: DraftHead, settings: LossSettings, *, autocast: bool = False) -> None:
        super().__init__()
        limit = head.max_depth
        if limit is not None and settings.depths not in (None, limit):
            raise UserError(
                f"loss.depths is {settings.depths}; the {head.method} head has {limit} depths, and each of them has to "
                "be trained: leave loss.depths out, or make the head another (num_heads)"
            )
        self.head = head
        self.depths = settings.depths or limit or DEPTHS
        self.loss = LOSSES[settings.name]
        self.autocast = autocast
        decay = torch.tensor([settings.decay**depth for depth in range(self.depths)], device=head.backbone.device)
        self.register_buffer("shares", decay / decay.sum(), persistent=False)
        self.shares: Tensor  # (D,) weights of the depths, 1 in all
        self._rows: tuple[Tensor, Tensor | None] | None = None

    @property
    def backbone(self) -> Backbone:
        return self.head.backbone

    @torch.no_grad()
    def features(self, batch: Batch) -> Features:
        """What the frozen backbone makes of a batch; only what the head and the loss read is kept."""
        return self.backbone.forward(batch.ids, taps=self.head.taps)

    def counts(self, batch: Batch) -> Tensor:
        """(D,) positions of this batch that count in the loss of each depth; on the CPU."""
        found = anchors(batch.mask, self.depths)
        if self.loss.teacher:
            return torch.tensor([len(at) for at in found], dtype=torch.float32)
        return torch.stack([(labels >= 0).sum() for labels in self.labels(batch.ids, found)]).float().cpu()

    def labels(self, ids: Tensor, found: Sequence[Tensor]) -> list[Tensor]:
        """For each depth (M_d,) the draft ids of the data's tokens, -1 for those that cannot be proposed."""
        draft = self.head.vocab.to_draft(ids.flatten())  # (B * T,)
        return [draft[at + 2 + depth] for depth, at in enumerate(found)]

    def forward(self, batch: Batch, features: Features, scale: Tensor) -> Result:
        """Losses of a batch.

        Args:
            features: of the batch.
            scale: (D,) what the sum of a depth's losses is multiplied with, besides the weight of the depth: 1 over the
                positions of the whole step.
        """
        found = anchors(batch.mask, self.depths)
        taught = found[0] + 1  # (J,) the backbone's logits for the token that depth 0 proposes
        places = [torch.searchsorted(taught, at + 1 + depth) for depth, at in enumerate(found)]
        labels = self.labels(batch.ids, found)
        trained = [one for one in self.head.parameters() if one.requires_grad]
        with torch.autocast(batch.ids.device.type, torch.bfloat16, enabled=self.autocast):
            terms = Terms(
                loss=self.loss,
                hidden=list(self.head.unroll(features, batch.ids, found)),
                places=places,
                labels=labels,
                project=self.head.project,
                teacher=self._teacher(features.last.flatten(0, 1)[taught]),
                count=len(taught),
                vocab=self.head.vocab.size,
            )
            sums = summed(terms, scale * self.shares, trained)
        total = sums.total
        if not len(taught):  # a process without a row of its own hands in gradients of zero, or the others would wait
            total = total + sum(0 * one.sum() for one in trained)
        aims = [sums.teacher_tops[place] for place in places] if self.loss.teacher else labels
        hits = torch.stack([(top == aim).sum() for top, aim in zip(sums.tops, aims, strict=True)])
        return Result(total, sums.losses, hits, sums.tops)

    def _teacher(self, last: Tensor) -> _Teacher:
        if self._rows is None:
            backbone, vocab = self.backbone, self.head.vocab
            bias = backbone.output_bias
            self._rows = vocab.rows(backbone.output_weight), None if bias is None else vocab.rows(bias)
        return _Teacher(self.backbone, last, *self._rows)


class _Teacher:
    """The backbone's logits for (J, H) hidden states, in its own dtype, over the draft vocabulary alone."""

    def __init__(self, backbone: Backbone, last: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.backbone, self.last, self.weight, self.bias = backbone, last, weight, bias

    @torch.no_grad()
    def __call__(self, start: int, stop: int) -> Tensor:
        with torch.autocast(self.last.device.type, enabled=False):
            return self.backbone.finish(F.linear(self.last[start:stop].to(self.weight.dtype), self.weight, self.bias))
