"""A head and its loss as one module: what is wrapped for many processes, and what evaluation asks, too.

Letters: B rows, T positions, D depths, M_d anchors of depth d, J positions of the teacher, H width, Vd draft
vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UserError
from ..heads.backbone import Backbone, Features
from ..heads.base import DraftHead
from .batches import Batch, anchors
from .losses import LOSSES, Mixture, exact, named
from .noise import noisy
from .packing import packed_features
from .recipe import LossSettings
from .summed import CHUNK, ELSEWHERE, Terms, summed

DEPTHS = 3  # of a head that unrolls as far as it is told to


@dataclass
class Result:
    """What a batch came to."""

    total: Tensor
    """() what is minimised."""
    losses: Tensor
    """(D,) sums by depth."""
    hits: Tensor
    """(D,) positions whose first choice is the one that is taught: the backbone's within the draft vocabulary,
    or (hard) the token of the data."""
    tops: list[Tensor]
    """D tensors (M_d,): first choices, as draft ids."""
    distance: Tensor | None = None
    """() sum of the divergences of a backbone that learns from the original one."""


class Objective(nn.Module):
    """Batches to weighted losses. The backbone is no part of the module: it is neither trained, wrapped nor saved.

    Args:
        head: bound to its backbone.
        settings: which loss, how many depths, and their weights.
        autocast: whether the head's matrix products run in bf16; its weights stay fp32.

    Raises:
        UserError: as `depths_of`.
    """

    def __init__(self, head: DraftHead, settings: LossSettings, *, autocast: bool = False) -> None:
        super().__init__()
        self.head = head
        self.depths = depths_of(settings, head)
        self.loss = Mixture.of(settings)
        self.settings = settings
        self.autocast = autocast
        self.seed = 0  # of the noise; another one for each step
        self.joined = 1.0  # the part of its learning rate that an adapter has at this step
        weights = torch.tensor(_weights(settings, self.depths), device=head.backbone.device)
        self.register_buffer("shares", weights / weights.sum(), persistent=False)
        self.shares: Tensor  # (D,) weights of the depths, 1 in all
        self._rows: tuple[Tensor, Tensor | None] | None = None

    @property
    def sums(self) -> int:
        """Numbers that `counts` gives: one for each depth, and for each other sum that makes up the loss."""
        return self.depths

    @property
    def backbone(self) -> Backbone:
        return self.head.backbone

    def original(self) -> AbstractContextManager[None]:
        """While it is open, the backbone is what it was before anything was trained."""
        return nullcontext()

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds of it, by name."""
        return self.head.state_dict()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The reverse of `tensors`."""
        self.head.load_state_dict(tensors, strict=True)

    def distance(self, batches: Iterable[Batch]) -> Tensor | None:
        """(2,) divergence of the backbone from the original one, summed over these batches, and its positions."""
        return None

    def release(self) -> None:
        """Leave the backbone as it was."""

    @torch.no_grad()
    def features(self, batch: Batch) -> Features:
        """What the frozen backbone makes of a batch, now or earlier; only what the head and the loss read is kept."""
        if batch.cached is not None:
            return batch.cached().to(batch.ids.device)
        if batch.lengths is not None:
            return packed_features(self.backbone, batch.ids, batch.lengths, self.head.taps)
        return self.backbone.forward(batch.ids, taps=self.head.taps)

    def counts(self, batch: Batch) -> Tensor:
        """(D,) positions of this batch that count in the loss of each depth, and in its other `sums`; on the CPU."""
        found = anchors(batch.mask, self.depths)
        if self.loss.teacher:
            return torch.tensor([len(at) for at in found], dtype=torch.float32)
        return torch.stack([(labels >= 0).sum() for labels in self.labels(batch.ids, found)]).float().cpu()

    def labels(self, ids: Tensor, found: Sequence[Tensor]) -> list[Tensor]:
        """For each depth (M_d,) the draft ids of the data's tokens, -1 for those that cannot be proposed."""
        draft = self.head.vocab.to_draft(ids.flatten())  # (B * T,)
        return [draft[at + 2 + depth] for depth, at in enumerate(found)]

    def forward(
        self, batch: Batch, features: Features, scale: Tensor, teacher_features: Features | None = None
    ) -> Result:
        """Losses of a batch.

        Args:
            features: of the batch.
            teacher_features: those of the backbone that teaches, where it is another one.
            scale: (D,) what the sum of a depth's losses is multiplied with, besides the weight of the depth: 1 over the
                positions of the whole step.
        """
        found = anchors(batch.mask, self.depths)
        taught = found[0] + 1  # (J,) the backbone's logits for the token that depth 0 proposes
        places = [torch.searchsorted(taught, at + 1 + depth) for depth, at in enumerate(found)]
        labels = self.labels(batch.ids, found)
        teacher = self._teacher((teacher_features or features).last.flatten(0, 1)[taught])
        trained = [one for one in self.head.parameters() if one.requires_grad]
        with torch.autocast(batch.ids.device.type, torch.bfloat16, enabled=self.autocast):
            terms = Terms(
                loss=self.loss,
                hidden=list(self.head.unroll(self._read(batch, features), batch.ids, found)),
                places=places,
                labels=labels,
                project=self.head.project,
                teacher=teacher,
                count=len(taught),
                vocab=self.head.vocab.size,
                mass=teacher.mass if self.settings.over == "all" and not self.head.vocab.full else None,
                truth=teacher.last,
            )
            sums = summed(terms, scale * self.shares, trained)
        total = sums.total
        if not len(taught):  # a process without a row of its own hands in gradients of zero, or the others would wait
            total = total + sum(0 * one.sum() for one in trained)
        aims = [sums.teacher_tops[place] for place in places] if self.loss.teacher else labels
        hits = torch.stack([(top == aim).sum() for top, aim in zip(sums.tops, aims, strict=True)])
        return Result(total, sums.losses, hits, sums.tops)

    def _read(self, batch: Batch, features: Features) -> Features:
        """What the head is given to read."""
        if not (self.settings.noise and self.head.training):
            return features
        width = batch.mask.shape[1]
        lengths = width - batch.mask.flip(1).byte().argmax(1)  # (B,) up to the last token that anything is learned from
        return noisy(features, batch.rows, lengths.tolist(), self.settings.noise, self.seed)

    def _teacher(self, last: Tensor) -> _Teacher:
        if self._rows is None:
            backbone, vocab = self.backbone, self.head.vocab
            bias = backbone.output_bias
            self._rows = vocab.rows(backbone.output_weight), None if bias is None else vocab.rows(bias)
        return _Teacher(self.backbone, last, *self._rows)


class _Teacher:
    """What the backbone says behind (J, H) hidden states, in its own dtype."""

    def __init__(self, backbone: Backbone, last: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.backbone, self.last, self.weight, self.bias = backbone, last, weight, bias

    @torch.no_grad()
    def __call__(self, start: int, stop: int) -> Tensor:
        """(m, Vd) logits over the draft vocabulary alone."""
        with torch.autocast(self.last.device.type, enabled=False):
            return self.backbone.finish(F.linear(self.last[start:stop].to(self.weight.dtype), self.weight, self.bias))

    @torch.no_grad()
    def mass(self, start: int, stop: int) -> Tensor:
        """(m,) log of the sum of exp(logits) over all tokens, some positions at a time."""
        device = self.last.device.type
        room = max(1, CHUNK.get(device, ELSEWHERE) // self.backbone.vocab_size)
        with torch.autocast(device, enabled=False):
            parts = torch.split(self.last[start:stop], room)
            return torch.cat([self.backbone.logits(part).to(exact(part)).logsumexp(-1) for part in parts])


def depths_of(settings: LossSettings, head: DraftHead) -> int:
    """Depths that are trained.

    Args:
        head: whose losses these are to be; its shape is enough.

    Raises:
        UserError: a loss has nothing to compare in this head, or more tokens than it proposes; there are more or fewer
            depths than the head has, or than have weights.
    """
    for name in named(settings):
        if LOSSES[name].features and not head.regresses:
            raise UserError(
                f"loss.name or loss.terms asks for {name}, which compares guessed features with the backbone's; what "
                f"this {head.method} head hands to its projection is no guess of them. Losses on logits fit every head"
            )
        if name == "top_k" and settings.k > head.vocab.size:
            raise UserError(f"loss.k is {settings.k}; the head proposes {head.vocab.size} tokens: choose no more")
    limit = head.max_depth
    if limit is not None and settings.depths not in (None, limit):
        raise UserError(
            f"loss.depths is {settings.depths}; the {head.method} head has {limit} depths, and each of them has to "
            "be trained: leave loss.depths out, or make the head another (num_heads)"
        )
    depths = settings.depths or limit or DEPTHS
    if settings.weights and len(settings.weights) != depths:
        raise UserError(f"loss.weights has {len(settings.weights)} weights; the depths trained are {depths}")
    return depths


def _weights(settings: LossSettings, depths: int) -> list[float]:
    return settings.weights or [settings.decay**depth for depth in range(depths)]
