"""Packed conversations see themselves alone; layers computed twice give the same gradients, and keep less."""

from __future__ import annotations

import itertools

import pytest
import torch

import zoo
from headstart.heads.methods import TRAINABLE
from headstart.training.batches import Rows, forwards
from headstart.training.objective import Objective
from headstart.training.packing import packed_features, places_of
from headstart.training.recipe import BatchSettings, LossSettings

LENGTHS = [30, 21, 17, 12, 9, 7, 5]


def rows_of(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(3, zoo.VOCAB, (length,), generator=generator).tolist() for length in lengths]
    # supervised from the first token to the last: nothing but the packing keeps neighbours apart
    return Rows.from_lists(ids, [[1] * length for length in lengths])


def gradients(head, batches, **fields):
    objective = Objective(head, LossSettings(**fields))
    counts = sum(objective.counts(batch) for batch in batches)
    total = 0.0
    for batch in batches:
        result = objective(batch, objective.features(batch), 1 / counts)
        result.total.backward()
        total += result.total.item()
    found = {name: weight.grad.clone() for name, weight in head.named_parameters()}
    head.zero_grad()
    return total, found


def assert_equal(one, other):
    assert one[0] == pytest.approx(other[0], rel=1e-5)
    for name, gradient in other[1].items():
        torch.testing.assert_close(one[1][name], gradient, rtol=1e-5, atol=1e-5 * float(gradient.abs().max() + 1e-3))


def test_no_two_conversations_overlap_and_none_leaves_its_row():
    placed = places_of(LENGTHS, 30)
    taken = [(row, start + k) for (row, start), length in zip(placed, LENGTHS, strict=True) for k in range(length)]
    assert len(set(taken)) == sum(LENGTHS)
    assert max(at for _, at in taken) < 30
    assert 1 + max(row for row, _ in placed) == 4  # of 101 tokens in rows of 30: no fewer would do
    assert places_of([5], 5) == [(0, 0)]


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_features_are_those_of_rows_of_their_own(family):
    """Windows count from the beginning of each conversation, too."""
    backbone = zoo.backbone(family)
    (batch,) = forwards(rows_of(), range(len(LENGTHS)), BatchSettings(pack=True))
    seen, plain = [], backbone.forward
    backbone.forward = lambda ids, **options: seen.append(ids.shape) or plain(ids, **options)
    packed = packed_features(backbone, batch.ids, batch.lengths, (0, 2))
    assert seen == [(4, 30)]
    for row, length in enumerate(batch.lengths):
        alone = plain(batch.ids[row : row + 1, :length], taps=(0, 2))
        torch.testing.assert_close(packed.last[row, :length], alone.last[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(packed.taps[row, :length], alone.taps[0], rtol=1e-4, atol=1e-5)
        assert not packed.last[row, length:].any()


@pytest.mark.parametrize("method", TRAINABLE)
def test_packing_changes_neither_loss_nor_gradient(method):
    backbone, rows = zoo.backbone(), rows_of()
    torch.manual_seed(0)
    head = TRAINABLE[method].build(backbone).train()
    settings = itertools.product((True, False), (60, 4096))
    packed, *others = [
        gradients(head, forwards(rows, range(len(LENGTHS)), BatchSettings(pack=pack, forward_tokens=tokens)))
        for pack, tokens in settings
    ]
    for other in others:
        assert_equal(packed, other)


class Saved(torch.autograd.graph.saved_tensors_hooks):
    """Counts the numbers that are kept for the backward pass."""

    def __init__(self):
        self.count = 0
        super().__init__(self._pack, lambda tensor: tensor)

    def _pack(self, tensor):
        self.count += tensor.numel()
        return tensor


@pytest.mark.parametrize("method", TRAINABLE)
def test_checkpointing_changes_neither_loss_nor_gradient(method):
    """B050: with three steps of a head that unrolls."""
    backbone = zoo.backbone()
    (batch,) = forwards(rows_of(), range(len(LENGTHS)), BatchSettings())
    torch.manual_seed(0)
    head = TRAINABLE[method].build(backbone).train()
    depths = head.max_depth or 3
    plain = gradients(head, [batch], depths=depths)
    head.checkpointing = True
    again = gradients(head, [batch], depths=depths)
    assert again[0] == plain[0]
    for name, gradient in plain[1].items():
        assert torch.equal(again[1][name], gradient), name


@pytest.mark.parametrize("method", ["eagle3", "eagle1"])
def test_checkpointing_keeps_less(method):
    backbone = zoo.backbone(intermediate_size=256)
    (batch,) = forwards(rows_of(), range(len(LENGTHS)), BatchSettings())
    head, kept = TRAINABLE[method].build(backbone).train(), []
    for head.checkpointing in (False, True):
        objective, saved = Objective(head, LossSettings(depths=3)), Saved()
        features = objective.features(batch)
        with saved:
            objective(batch, features, torch.ones(3))
        kept.append(saved.count)
    assert kept[1] < 0.5 * kept[0]
