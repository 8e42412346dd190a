"""Which loss fits which head: each pair is trained or refused by name, and the table of docs/train.md says the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from formulas import plain_value
from test_heads import backbone, built, seen, trained
from torch import Tensor

import zoo
from headstart.errors import UserError
from headstart.heads.base import DraftHead
from headstart.heads.methods import TRAINABLE
from headstart.heads.vocab import DraftVocab
from headstart.training.batches import Batch, anchors
from headstart.training.losses import LOSSES
from headstart.training.objective import Objective
from headstart.training.recipe import LossSettings

PAGE = Path(__file__).parent.parent / "docs" / "train.md"
SHARED = "with `projection: shared`"


def table() -> dict[str, dict[str, str]]:
    """What the page says, by loss and method."""
    lines = iter(PAGE.read_text().splitlines())
    heads = next(line for line in lines if line.startswith("| fits |"))
    methods = [cell.strip(" `") for cell in heads.split("|")[2:-1]]
    next(lines)
    found = {}
    for line in lines:
        if not line.startswith("|"):
            return found
        name, *said = (cell.strip() for cell in line.split("|")[1:-1])
        found[name.strip("`")] = dict(zip(methods, said, strict=True))
    raise AssertionError("the table has no end")


def fits(name: str, method: str, fields: dict[str, Any]) -> bool:
    said = table()[name][method]
    assert said in ("yes", "no", SHARED)
    return said == "yes" or (said == SHARED and fields.get("projection", "shared") == "shared")


def batch_of() -> Batch:
    """A row with two replies, and a shorter one."""
    ids = torch.randint(3, zoo.VOCAB, (2, 14), generator=torch.Generator().manual_seed(2))
    mask = torch.zeros(2, 14, dtype=torch.bool)
    mask[0, 3:6], mask[0, 8:14], mask[1, 2:9] = True, True, True
    ids[1, 9:] = 2
    return Batch(ids, mask, [0, 1], 23)


def plain(settings: LossSettings, head: DraftHead, batch: Batch, depths: int) -> Tensor:
    """The loss by its formulas in float64, from full logits of backbone and head, position by position."""
    features = seen(head, batch.ids)
    taught = backbone().logits(features.last)[..., head.vocab.ids].softmax(-1).detach()
    total, whole = torch.zeros((), dtype=torch.float64), sum(settings.decay**d for d in range(depths))
    for depth, hidden in enumerate(head.unroll(features, batch.ids, found := anchors(batch.mask, depths))):
        values = []
        for z, f, at in zip(head.project(hidden, depth), hidden, found[depth].tolist(), strict=True):
            row, place = divmod(at, batch.ids.shape[1])
            label = int(head.vocab.to_draft(batch.ids[row, place + 2 + depth]))
            aim = row, place + 1 + depth
            z, p, f, truth = (one.double() for one in (z, taught[aim], f, features.last[aim]))
            values.append(plain_value(settings, z, p, label, f, truth))
        total = total + torch.stack(values).mean() * settings.decay**depth / whole
    return total


def step(objective: Objective, batch: Batch) -> float:
    """The loss, and a short step along its gradient."""
    objective.zero_grad()
    result = objective(batch, objective.features(batch), 1 / objective.counts(batch).clamp(min=1))
    result.total.backward()
    weights = [one for one in objective.parameters() if one.grad is not None]
    size = torch.stack([one.grad.norm() for one in weights]).norm()
    with torch.no_grad():
        for one in weights:
            one -= 0.02 * one.grad / size
    return result.total.item()


@trained
def test_each_loss_that_fits_falls_and_the_others_are_refused(method: str, fields: dict[str, Any]) -> None:
    batch = batch_of()
    for name in LOSSES:
        head = built(method, fields, vocab=DraftVocab(range(0, 80, 2), zoo.VOCAB))
        settings = LossSettings(name=name, depths=head.max_depth or 4)
        if not fits(name, method, fields):
            with pytest.raises(UserError, match=f"asks for {name}, which .* this {method} head"):
                Objective(head, settings)
            continue
        objective = Objective(head, settings)
        first, second, third = (step(objective, batch) for _ in range(3))
        assert 0 <= third < second < first < float("inf"), name


@trained
def test_all_losses_that_fit_at_once_are_their_plain_formulas(method: str, fields: dict[str, Any]) -> None:
    """Each alone is compared in test_objective.py, for the shape that a method has by default."""
    head, batch = built(method, fields, vocab=DraftVocab(range(0, 80, 2), zoo.VOCAB)), batch_of()
    depths = head.max_depth or 4
    terms = {name: 0.3 + 0.1 * place for place, name in enumerate(LOSSES) if fits(name, method, fields)}
    settings = LossSettings(terms=terms, depths=depths, k=5)
    expected = plain(settings, head, batch, depths)
    gradients = torch.autograd.grad(expected, list(head.parameters()), materialize_grads=True)
    objective = Objective(head, settings)
    result = objective(batch, objective.features(batch), 1 / objective.counts(batch))
    result.total.backward()
    torch.testing.assert_close(result.total, expected.float(), rtol=1e-5, atol=1e-5)
    for weight, gradient in zip(head.parameters(), gradients, strict=True):
        torch.testing.assert_close(weight.grad, gradient, rtol=1e-4, atol=1e-5)


def test_the_page_has_every_loss_and_every_method() -> None:
    assert list(table()) == list(LOSSES)
    assert all(set(said) == set(TRAINABLE) for said in table().values())
