"""Estimated acceptance lengths of trees, against trees that are really grown at every anchor."""

from __future__ import annotations

import pytest
import torch
from test_evaluate import batch_of

import zoo
from headstart.heads.methods import METHODS
from headstart.inference.drafter import HeadDrafter
from headstart.inference.stats import expected_tokens
from headstart.inference.tree import parse_shape
from headstart.training.batches import anchors
from headstart.training.estimate import Estimate, inside
from headstart.training.evaluate import count
from headstart.training.objective import Objective
from headstart.training.recipe import LossSettings

TEXT = batch_of(7, (30, 26))


def trained(backbone, method, **fields):
    """A head that knows something of `TEXT`: guesses of every rank are right now and then."""
    torch.manual_seed(1)
    objective = Objective(METHODS[method].build(backbone, **fields).train(), LossSettings(depths=None))
    optimizer = torch.optim.Adam(objective.parameters(), lr=1e-2)
    for step in range(24):
        batch = TEXT if step % 2 else batch_of(step % 4)
        result = objective(batch, objective.features(batch), 1 / objective.counts(batch))
        result.total.backward()
        optimizer.step()
        optimizer.zero_grad()
    objective.head.eval()
    return objective


def grown(objective, batch, shape, depths):
    """Anchor by anchor: the tree that the drafter makes there, and how far the backbone's choices lie in it."""
    backbone, head = objective.backbone, objective.head
    reached, kept = torch.zeros(2, depths).unbind()
    features = backbone.forward(batch.ids, taps=head.taps)
    choices = backbone.logits(features.last).argmax(-1)
    width = batch.ids.shape[1]
    found = [set(one.tolist()) for one in anchors(batch.mask, depths)]
    for at in sorted(found[0]):
        row, t = divmod(at, width)
        drafter = HeadDrafter(head, shape, backbone.device)
        drafter.start([])
        drafter.advance(features[row : row + 1, : t + 1], batch.ids[row, 1 : t + 2].tolist())
        tree, node = drafter.draft(depths), 0
        for depth in range(depths):
            if at not in found[depth] or node is None:
                break
            reached[depth] += 1
            node = tree.child(node, int(choices[row, t + 1 + depth]))
            kept[depth] += node is not None
    return reached, kept


@pytest.mark.parametrize("shape", ["chain:3", "static:0,1,2,0.0,0.1,1.0,0.0.0,1.0.2", "dynamic:3x3x6", "dynamic:2x5x4"])
def test_for_medusa_heads_the_estimate_is_a_count(shape):
    """Their guesses depend on the anchor alone, so that the tree here is the tree there."""
    objective, shape, batch = trained(zoo.backbone(), "medusa", num_heads=3), parse_shape(shape), TEXT
    estimate = Estimate(shape, shape.depth)
    count(objective, [batch], estimate)
    # q of a late anchor at depths behind its reply is carried on, where the drafter has its own: a handful of anchors
    whole = (estimate.reached[-1] / estimate.reached[0]).item()
    reached, kept = grown(objective, batch, shape, shape.depth)
    assert estimate.reached[0] == reached[0]
    if not str(shape).startswith("dynamic"):
        assert (estimate.reached.tolist(), estimate.kept.tolist()) == (reached.tolist(), kept.tolist())
    assert estimate.length == pytest.approx(expected_tokens((kept / reached.clamp(min=1)).tolist()), abs=0.05)
    assert 1.1 < estimate.length < 1 + shape.depth
    assert whole < 1


@pytest.mark.parametrize("method", ["eagle3", "hydra"])
def test_for_a_chain_it_is_the_count_of_first_choices(method):
    objective, batches = trained(zoo.backbone(), method), [TEXT, batch_of(8, (9, 30, 12))]
    shape = parse_shape(f"chain:{objective.depths}")
    estimate = Estimate(shape, shape.depth)
    sums = count(objective, batches, estimate)
    assert (estimate.reached.tolist(), estimate.kept.tolist()) == (sums.reached.tolist(), sums.kept.tolist())
    assert estimate.length == sums.figures(objective.shares)["estimated_acceptance_length"]


def test_a_wider_tree_is_never_worse():
    objective, batch = trained(zoo.backbone(), "eagle3"), TEXT
    lengths = []
    for text in ("chain:3", "dynamic:3x2x4", "dynamic:3x4x12", "dynamic:3x8x100", "gain:3x8"):
        estimate = Estimate(parse_shape(text), 3)
        count(objective, [batch], estimate)
        lengths.append(estimate.length)
    assert lengths[:4] == sorted(lengths[:4])
    assert lengths[3] > lengths[0] + 0.2
    assert 1 <= lengths[4] <= lengths[3]


def test_trees_by_probability_on_numbers_that_are_easily_followed():
    q = torch.tensor([[[0.6, 0.3], [0.9, 0.05]]])  # depth 0: 0.6, 0.3; depth 1: 0.54, 0.03, 0.27, 0.015
    paths = {(0, 0): 2, (0, 1): 5, (1, 0): 4, (1, 1): 6, (2, 0): 99}
    for nodes in range(1, 7):
        shape = parse_shape(f"dynamic:2x2x{nodes}")
        for path, place in paths.items():
            found = inside(shape, q, torch.tensor([path]))[0].tolist()
            first = {0: 1, 1: 3, 2: 99}[path[0]]
            assert found == [first <= nodes, place <= nodes], (path, nodes)
