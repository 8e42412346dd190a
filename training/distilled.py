"""Medusa-2: heads and a LoRA on their backbone, trained together; the original backbone teaches both.

Source: Cai et al., "Medusa", arXiv 2401.10774. Section 2.2.2, joint training: a weight for the heads' loss, another
learning rate for the backbone, and heads that learn alone at first. Section 2.3.2, self-distillation: in place of the
cross-entropy with the data stands the divergence KL(original || changed), with the adapter off and on.

Letters: B rows, T positions, D depths, J positions whose next token is supervised, H width, V vocabulary. p is the
original backbone's distribution, q the changed one's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..heads.adapter import Adapter
from ..heads.backbone import Features
from ..heads.base import DraftHead
from .batches import Batch
from .losses import Mixture
from .objective import Objective, Result
from .recipe import LossSettings
from .summed import Sums, Terms, summed

PREFIX = "adapter."


class Distilled(Objective):
    """A head and an adapter on its backbone as one module.

    Args:
        adapter: at work in the backbone of the head.
        weight: of the heads' loss; the divergence has 1.
    """

    def __init__(
        self, head: DraftHead, settings: LossSettings, adapter: Adapter, weight: float, *, autocast: bool = False
    ) -> None:
        super().__init__(head, settings, autocast=autocast)
        self.adapter, self.weight = adapter, weight
        self.matrices = nn.ParameterList(adapter.parameters())  # trained, clipped and averaged as the head's are

    @property
    def sums(self) -> int:
        return self.depths + 1

    def original(self) -> AbstractContextManager[None]:
        return self.adapter.off()

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | {PREFIX + name: one for name, one in self.adapter.tensors().items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        super().load(of_head(tensors))
        self.adapter.load({name.removeprefix(PREFIX): one for name, one in tensors.items() if name.startswith(PREFIX)})

    def release(self) -> None:
        self.adapter.remove()

    @torch.no_grad()
    def features(self, batch: Batch) -> Features:
        """In training what the original backbone makes of a batch; otherwise what the changed one does."""
        if not self.head.training:
            return super().features(batch)
        with self.original():
            return super().features(batch)

    def counts(self, batch: Batch) -> Tensor:
        """(D + 1,): behind those of the depths, the positions of the divergence."""
        return torch.cat((super().counts(batch), batch.mask[:, 1:].sum().cpu()[None].float()))

    def forward(
        self, batch: Batch, features: Features, scale: Tensor, teacher_features: Features | None = None
    ) -> Result:
        """As `Objective.forward`, where in training the features are those of the original backbone, and the scale is
        (D + 1,)."""
        if not self.head.training:
            return super().forward(batch, features, scale[: self.depths], teacher_features)
        with torch.set_grad_enabled(self.joined > 0 and torch.is_grad_enabled()):
            changed = self.backbone.forward(batch.ids, taps=self.head.taps)
        found = super().forward(batch, changed, scale[: self.depths], features)
        apart = self._apart(batch, features.last, changed.last, scale[self.depths :])
        nothing = sum(0 * one.sum() for one in self.matrices)  # while the heads learn alone; others wait for gradients
        return replace(found, total=self.weight * found.total + apart.total + nothing, distance=apart.losses.sum())

    @torch.no_grad()
    def distance(self, batches: Iterable[Batch]) -> Tensor:
        made = torch.zeros(2, device=self.backbone.device)
        for batch in batches:
            with self.original():
                before = self.backbone.forward(batch.ids).last
            apart = self._apart(batch, before, self.backbone.forward(batch.ids).last, made.new_ones(1))
            made += torch.stack((apart.losses.sum(), batch.mask[:, 1:].sum().float()))
        return made

    def _apart(self, batch: Batch, before: Tensor, after: Tensor, scale: Tensor) -> Sums:
        """KL(p || q) at every position whose next token is supervised, over all tokens."""
        followed = torch.zeros_like(batch.mask)
        followed[:, :-1] = batch.mask[:, 1:]
        places = followed.flatten().nonzero().flatten()  # (J,)
        truth = before.flatten(0, 1)[places]
        with torch.autocast(after.device.type, enabled=False):
            terms = Terms(
                loss=Mixture.of(LossSettings(name="kl")),
                hidden=[after.flatten(0, 1)[places]],
                places=[torch.arange(len(places), device=places.device)],
                labels=[torch.full_like(places, -1)],
                project=lambda hidden, depth: self.backbone.logits(hidden),
                teacher=lambda start, stop: self.backbone.logits(truth[start:stop]),
                count=len(places),
                vocab=self.backbone.vocab_size,
            )
            return summed(terms, scale, [])


def of_head(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of them that are the head's."""
    return {name: one for name, one in tensors.items() if not name.startswith(PREFIX)}
