"""Steps that go wrong: found before the head's weights are touched, and told with the row and the tensor.

Letters: B rows, T positions, D depths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import UserError
from .batches import Batch
from .processes import gathered, in_step
from .setup import Setup


def check_gradient(setup: Setup, batches: Sequence[Batch], norm: float, step: int) -> None:
    """The gradient of a step has to be finite, and not zero. On all processes, which then say the same.

    Args:
        batches: of the step, on this process.
        step: steps taken before.

    Raises:
        UserError: it is neither; says where it began.
    """
    if norm > 0 and math.isfinite(norm):
        return
    where = f"step {step + 1}"
    if norm == 0:
        raise UserError(
            f"{where}: no gradient reaches the head, so nothing can be learned; the backbone's logits may be constant, "
            "or the head's output may not depend on its weights"
        )
    for name, weight in setup.head.named_parameters():
        if not weight.isfinite().all():
            raise UserError(f"{where}: the head's weight {name} holds values that are not finite; its start was wrong")
    with setup.layout.whole(), in_step(setup.layout, setup.backbone):
        own = _origin(setup, batches)
    if found := next(filter(None, gathered(setup.accelerator, own)), ""):
        raise UserError(
            f"{where}: {found}. The head keeps the weights of the step before. Leave the row out, or try "
            "precision.backbone=float32"
        )
    trained = {name.removeprefix("head."): weight for name, weight in setup.objective.named_parameters()}
    gradients = {name: weight.grad for name, weight in trained.items() if weight.grad is not None}
    broken = ", ".join(name for name, gradient in gradients.items() if _broken(gradient)) or "in shards"
    raise UserError(
        f"{where}: the gradient is not finite ({broken}), though every loss is. The head keeps the weights of the step "
        "before. Try a lower optim.lr, or precision.autocast=no"
    )


def check_movement(losses: Sequence[float], number: int) -> None:
    """The losses of the first `number` steps must not all be the same.

    Raises:
        UserError: they are.
    """
    if len(losses) == number and max(losses) - min(losses) <= 1e-6 * abs(max(losses)):
        raise UserError(
            f"the loss has not moved in {number} steps, it is {losses[-1]:.6g}: nothing is learned. Look at the rows "
            "(headstart data preview), at optim.lr, and whether this is the backbone that you mean"
        )


def _origin(setup: Setup, batches: Sequence[Batch]) -> str:
    """The first tensor of these batches that is not finite, and its row; empty if all are."""
    for batch in batches:
        for row, number in enumerate(batch.rows):
            if tensor := _not_finite(setup, _row(batch, row)):
                return f"{tensor} is not finite in {setup.rows.places[number]}"
    return ""


def _not_finite(setup: Setup, batch: Batch) -> str:
    """The first tensor of a row that is not finite; empty if all are."""
    batch = batch.to(setup.accelerator.device)
    features = setup.objective.features(batch)
    named: dict[str, Tensor | None] = {
        "the backbone's last hidden state": features.last,
        "the backbone's hidden states that the head reads": features.taps,
    }
    for name, tensor in named.items():
        if tensor is not None and _broken(tensor):
            return f"{name}, from position {int(tensor[0].isfinite().all(-1).logical_not().nonzero()[0])} on,"
    with torch.no_grad():
        losses = setup.objective(batch, features, torch.ones(setup.objective.sums, device=batch.ids.device)).losses
    for depth, loss in enumerate(losses.tolist()):
        if not math.isfinite(loss):
            return f"the loss of depth {depth}"
    return ""


def _row(batch: Batch, row: int) -> Batch:
    """A row of a batch on its own, up to its last supervised token."""
    length = int(batch.mask[row].nonzero().max()) + 1 if batch.mask[row].any() else batch.ids.shape[1]
    part = (slice(row, row + 1), slice(0, length))
    read = batch.cached
    return Batch(
        batch.ids[part], batch.mask[part], [batch.rows[row]], length, None if read is None else lambda: read()[part]
    )


def _broken(tensor: Tensor) -> bool:
    return not bool(tensor.isfinite().all())
