"""Estimated acceptance lengths of trees, against trees that are really grown at every anchor."""

from __future__ import annotations

import pytest
import torch
from test_evaluate import batch_of

import zoo
from headstart.heads.methods import METHODS
from headstart.inference.drafter import HeadDrafter
from headstart.inference.tree import parse_shape
from headstart.training.batches import anchors
from headstart.training.estimate import Estimate, inside, walk
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
    """Anchor by anchor: the tree that the drafter makes there, and how far the backbone's choices lie in it; then the
    rounds of each reply, token by token."""
    backbone, head = objective.backbone, objective.head
    accepted = {}
    features = backbone.forward(batch.ids, taps=head.taps)
    choices = backbone.logits(features.last).argmax(-1)
    width = batch.ids.shape[1]
    found = [set(one.tolist()) for one in anchors(batch.mask, depths)]
    for at in sorted(found[0]):
        row, t = divmod(at, width)
        drafter = HeadDrafter(head, shape, backbone.device)
        drafter.start([])
        drafter.advance(features[row : row + 1, : t + 1], batch.ids[row, 1 : t + 2].tolist())
        tree, node, accepted[at] = drafter.draft(depths), 0, 0
        for depth in range(depths):
            node = tree.child(node, int(choices[row, t + 1 + depth])) if at in found[depth] else None
            if node is None:
                break
            accepted[at] += 1
    return taken(accepted)


def taken(accepted):
    """Rounds and tokens, token by token."""
    rounds = tokens = due = 0
    for at in sorted(accepted):
        if at - 1 not in accepted:
            due = at  # a reply begins
        tokens += 1
        if at == due:
            rounds, due = rounds + 1, at + accepted[at] + 1
    return rounds, tokens


@pytest.mark.parametrize("shape", ["chain:3", "static:0,1,2,0.0,0.1,1.0,0.0.0,1.0.2", "dynamic:3x3x6", "dynamic:2x5x4"])
def test_for_medusa_heads_the_estimate_is_a_count(shape):
    """Their guesses depend on the anchor alone, so that the tree here is the tree there."""
    objective, shape, batch = trained(zoo.backbone(), "medusa", num_heads=3), parse_shape(shape), TEXT
    estimate = Estimate(shape, shape.depth)
    count(objective, [batch], estimate)
    rounds, tokens = grown(objective, batch, shape, shape.depth)
    assert estimate.walked[1] == tokens
    # q of a late anchor at depths behind its reply is carried on, where the drafter has its own: a handful of anchors
    assert estimate.walked[0] == pytest.approx(rounds, abs=2 if str(shape).startswith("dynamic") else 0)
    assert estimate.length == pytest.approx(tokens / rounds, abs=0.05)
    assert 1.05 < estimate.length < 1 + shape.depth


@pytest.mark.parametrize("method", ["eagle3", "hydra"])
def test_for_a_chain_it_is_a_count_along_the_text(method):
    objective, batches = trained(zoo.backbone(), method), [TEXT, batch_of(8, (9, 30, 12))]
    shape = parse_shape(f"chain:{objective.depths}")
    estimate = Estimate(shape, shape.depth)
    count(objective, batches, estimate)
    rounds = tokens = 0
    for batch in batches:
        head, features, found = objective.head, objective.features(batch), anchors(batch.mask, shape.depth)
        choices = objective.backbone.logits(features.last).argmax(-1).flatten()
        accepted = dict.fromkeys(found[0].tolist(), 0)
        for depth, hidden in enumerate(head.unroll(features, batch.ids, found)):
            hits = head.vocab.ids[head.project(hidden, depth).argmax(-1)] == choices[found[depth] + 1 + depth]
            for at, hit in zip(found[depth].tolist(), hits.tolist(), strict=True):
                accepted[at] += hit and accepted[at] == depth
        more = taken(accepted)
        rounds, tokens = rounds + more[0], tokens + more[1]
    assert estimate.walked.tolist() == [rounds, tokens]


def test_rounds_begin_where_the_one_before_has_ended():
    assert walk([3, 4, 5, 6, 7, 20, 21, 40], [2, 9, 9, 0, 3, 0, 5, 1]) == (6, 8)
    assert walk([], []) == (0, 0)
    assert Estimate(parse_shape("chain:2"), 2).length == 1.0


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
