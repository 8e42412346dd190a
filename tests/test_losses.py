"""Losses: the chunked form against the plain formula and its gradients, and an objective that knows where it stands."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zoo
from headstart.errors import UserError
from headstart.heads.backbone import Features
from headstart.heads.methods import METHODS
from headstart.heads.vocab import DraftVocab
from headstart.training import losses
from headstart.training.batches import Batch, anchors
from headstart.training.losses import LOSSES, Terms, hard, soft, summed
from headstart.training.objective import Objective
from headstart.training.recipe import LossSettings

D, WIDTH, VD = 3, 8, 24


class Projection(nn.Module):
    """One matrix for each depth and a norm for all, as a head might have them."""

    def __init__(self):
        super().__init__()
        self.matrices = nn.ModuleList(nn.Linear(WIDTH, VD) for _ in range(D))
        self.norm = nn.LayerNorm(WIDTH)
        self.unused = nn.Linear(2, 2)

    def forward(self, hidden, depth):
        return self.matrices[depth](self.norm(hidden))


def terms_of(name, count=37, seed=0, dtype=torch.float64):
    """Some teacher's positions, of which each depth has fewer, as anchors do."""
    generator = torch.Generator().manual_seed(seed)
    project = Projection().to(dtype)
    teacher = 2 * torch.randn(count, VD, generator=generator, dtype=dtype)
    places = [torch.arange(count)]
    for _ in range(D - 1):
        places.append(places[-1][torch.rand(len(places[-1]), generator=generator) < 0.7])
    hidden = [torch.randn(len(at), WIDTH, generator=generator, dtype=dtype, requires_grad=True) for at in places]
    labels = [torch.randint(-1, VD, (len(at),), generator=generator) for at in places]
    calls = []

    def teach(start, stop):
        calls.append((start, stop))
        return teacher[start:stop]

    return Terms(LOSSES[name], hidden, places, labels, project, teach, count, VD), project, teacher, calls


def plain(terms, project, teacher, weights):
    """All logits at once, and autograd through everything."""
    total, sums = 0.0, []
    for depth, hidden in enumerate(terms.hidden):
        log_q = project(hidden, depth).log_softmax(-1)
        if terms.loss.teacher:
            values = -(teacher[terms.places[depth]].softmax(-1) * log_q).sum(-1)
        else:
            known = terms.labels[depth] >= 0
            values = -log_q[known, terms.labels[depth][known]]
        sums.append(values.sum())
        total = total + weights[depth] * values.sum()
    return total, torch.stack(sums)


@pytest.fixture(params=[(1 << 19, 1 << 23), (VD, VD), (5 * VD, 10 * VD), (3 * VD, 7 * VD)], ids=str)
def sizes(request, monkeypatch):
    """From all in one block down to one position at a time."""
    monkeypatch.setitem(losses.BLOCK, "cpu", request.param[0])
    monkeypatch.setitem(losses.CHUNK, "cpu", request.param[1])
    return request.param


@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients_are_those_of_the_plain_formula(name, sizes):
    weights = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    terms, project, teacher, _ = terms_of(name)
    expected, sums = plain(terms, project, teacher, weights)
    wanted = torch.autograd.grad(expected, [*terms.hidden, *project.parameters()], allow_unused=True)
    found = summed(terms, weights, list(project.parameters()))
    (3 * found.total).backward()
    torch.testing.assert_close(found.total, expected)
    torch.testing.assert_close(found.losses, sums)
    for one, other in zip([*terms.hidden, *project.parameters()], wanted, strict=True):
        if other is None:
            assert one.grad is None
        else:
            torch.testing.assert_close(one.grad, 3 * other)
    assert [top.tolist() for top in found.tops] == [
        project(hidden, depth).argmax(-1).tolist() for depth, hidden in enumerate(terms.hidden)
    ]


@pytest.mark.parametrize("name", LOSSES)
def test_the_teacher_is_asked_once_a_position_or_never(name, sizes):
    """B148."""
    terms, project, teacher, calls = terms_of(name)
    found = summed(terms, torch.ones(D, dtype=torch.float64), list(project.parameters()))
    asked = [place for start, stop in calls for place in range(start, stop)]
    if name == "soft":
        assert asked == list(range(terms.count))
        assert found.teacher_tops.tolist() == teacher.argmax(-1).tolist()
    else:
        assert asked == []
        assert found.teacher_tops.tolist() == [-1] * terms.count


def test_no_logits_of_a_whole_batch_are_ever_made(monkeypatch):
    monkeypatch.setitem(losses.BLOCK, "cpu", 2 * VD)
    monkeypatch.setitem(losses.CHUNK, "cpu", 6 * VD)
    terms, project, _, calls = terms_of("soft", count=100)
    seen = []
    terms.project = lambda hidden, depth: seen.append(len(hidden)) or project(hidden, depth)
    summed(terms, torch.ones(D, dtype=torch.float64), list(project.parameters()))
    assert max(seen) == max(stop - start for start, stop in calls) == 6


def test_without_gradients_only_values_are_made():
    terms, project, teacher, _ = terms_of("soft")
    weights = torch.ones(D, dtype=torch.float64)
    with torch.no_grad():
        found = summed(terms, weights, list(project.parameters()))
    torch.testing.assert_close(found.total, plain(terms, project, teacher, weights)[0].detach())
    assert not found.total.requires_grad


def test_nothing_at_all_gives_zeros_and_leaves_no_matrix_without_a_gradient():
    """A process without a row of its own still has to hand every gradient in."""
    terms, project, _, _ = terms_of("soft", count=0)
    found = summed(terms, torch.ones(D, dtype=torch.float64), list(project.parameters()))
    found.total.backward()
    assert found.total == 0
    for matrix in project.matrices:
        assert matrix.weight.grad is not None
        assert not matrix.weight.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_losses_are_at_least_fp32(dtype):
    logits, p, labels = torch.randn(3, VD).to(dtype), torch.rand(3, VD).softmax(-1), torch.tensor([1, -1, 2])
    assert soft(logits, p, labels).dtype == hard(logits, p, labels).dtype == torch.float32
    assert hard(logits, p, labels)[1] == 0


# --- the objective --------------------------------------------------------------------------------------------------


def batch_of(lengths, width=None, seed=0, replies=True):
    """Rows with a reply each, padded to `width`; what is behind a row is no token that it contains."""
    generator = torch.Generator().manual_seed(seed)
    width = width or max(lengths)
    ids = torch.full((len(lengths), width), 2)
    mask = torch.zeros(len(lengths), width, dtype=torch.bool)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.randint(3, zoo.VOCAB, (length,), generator=generator)
        mask[row, length // 3 : length] = replies
    return Batch(ids, mask, list(range(len(lengths))), sum(lengths))


def objective_of(method, name="soft", draft_vocab=None, depths=None):
    backbone = zoo.backbone()
    backbone.model.requires_grad_(False)
    vocab = None if draft_vocab is None else DraftVocab(range(0, 2 * draft_vocab, 2), zoo.VOCAB)
    torch.manual_seed(5)
    head = METHODS[method].build(backbone, vocab=vocab, **({"num_heads": 3} if method == "medusa" else {}))
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    return Objective(head, LossSettings(name=name, depths=depths))


def gradients_of(objective, batches):
    counts = sum(objective.counts(batch) for batch in batches)
    objective.zero_grad()
    total = 0.0
    for batch in batches:
        result = objective(batch, objective.features(batch), 1 / counts.clamp(min=1))
        result.total.backward()
        total += result.total.item()
    return total, {name: weight.grad.clone() for name, weight in objective.head.named_parameters()}


def assert_same(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    for name, gradient in expected[1].items():
        assert gradient.any(), f"{name} is not trained at all"
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", LOSSES)
def test_neither_padding_nor_forwards_change_loss_or_gradients(method, name):
    """B045, B034: the same rows padded to other widths, and split over other forwards."""
    objective = objective_of(method, name, draft_vocab=40)
    lengths = [17, 12, 9]
    whole = gradients_of(objective, [batch_of(lengths)])
    assert_same(gradients_of(objective, [batch_of(lengths, width=32)]), whole)
    wide = batch_of(lengths)
    each = [Batch(wide.ids[i : i + 1, :n], wide.mask[i : i + 1, :n], [i], n) for i, n in enumerate(lengths)]
    assert_same(gradients_of(objective, each), whole)
    assert_same(gradients_of(objective, [each[2], batch_of(lengths[:2])]), whole)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("draft_vocab", [None, 40])
def test_the_objective_is_the_plain_formula(method, name, draft_vocab):
    """Full logits of the backbone and of the head, position by position."""
    objective = objective_of(method, name, draft_vocab)
    head, backbone = objective.head, objective.backbone
    batch = batch_of([14, 10], seed=3)
    features = objective.features(batch)
    vocab = head.vocab
    p = backbone.model(batch.ids, attention_mask=_true(batch)).logits[..., vocab.ids].softmax(-1)
    total, hits = 0.0, []
    found = anchors(batch.mask, 3)
    for depth, hidden in enumerate(head.unroll(features, batch.ids, found)):
        log_q = head.project(hidden, depth).log_softmax(-1)
        values, hit = [], 0
        for place, at in enumerate(found[depth].tolist()):
            b, t = divmod(at, batch.ids.shape[1])
            aim = p[b, t + 1 + depth]
            label = int(vocab.to_draft(batch.ids[b, t + 2 + depth]))
            if name == "soft":
                values.append(-(aim * log_q[place]).sum())
                hit += int(log_q[place].argmax() == aim.argmax())
            elif label >= 0:
                values.append(-log_q[place, label])
                hit += int(log_q[place].argmax() == label)
        total = total + torch.stack(values).mean() * 0.8**depth / (1 + 0.8 + 0.64)
        hits.append(hit)
    expected = torch.autograd.grad(total, list(head.parameters()))
    result = objective(batch, features, 1 / objective.counts(batch))
    result.total.backward()
    torch.testing.assert_close(result.total, total, rtol=1e-5, atol=1e-6)
    assert result.hits.tolist() == hits
    for weight, gradient in zip(head.parameters(), expected, strict=True):
        torch.testing.assert_close(weight.grad, gradient, rtol=1e-4, atol=1e-6)


def _true(batch):
    """The attention mask of transformers: the two rows of the test are 14 and 10 long."""
    return (torch.arange(batch.ids.shape[1]) < torch.tensor([[14], [10]])).long()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", LOSSES)
def test_a_batch_with_nothing_supervised_gives_every_weight_a_gradient_of_zero(method, name):
    """Else the processes that have rows would wait for ever for those that have none."""
    objective = objective_of(method, name)
    batch = batch_of([8, 5], replies=False)
    result = objective(batch, objective.features(batch), torch.ones(3))
    result.total.backward()
    assert result.total == 0
    for weight in objective.head.parameters():
        assert weight.grad is not None
        assert not weight.grad.any()


class Oracle(nn.Module):
    """A head that says, at every depth, the token `offset` behind where that depth should be."""

    max_depth, taps = 3, ()

    def __init__(self, backbone, offset):
        super().__init__()
        self.backbone, self.offset = backbone, offset
        self.vocab = DraftVocab(None, backbone.vocab_size)
        self.strength = nn.Parameter(torch.tensor(30.0))

    def unroll(self, features, ids, found):
        for depth, at in enumerate(found):
            yield F.one_hot(ids.flatten()[at + 2 + depth + self.offset], zoo.VOCAB).float()

    def project(self, hidden, depth):
        return self.strength * hidden


@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_the_hard_loss_wants_token_t_2_d_and_no_other(offset):
    """B018: tokens that are all different; only the documented offset has no loss, at each depth."""
    backbone = zoo.backbone()
    ids = torch.arange(3, 23)[None]
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[0, 4:18] = True
    batch = Batch(ids, mask, [0], 20)
    objective = Objective(Oracle(backbone, offset), LossSettings(name="hard"))
    result = objective(batch, objective.features(batch), torch.ones(3))
    each = result.losses / objective.counts(batch)
    assert (each < 1e-6).all() if offset == 0 else (each > 20).all()
    assert result.hits.tolist() == (objective.counts(batch).tolist() if offset == 0 else [0, 0, 0])


@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_the_soft_loss_is_taught_by_the_logits_of_t_1_d(offset):
    """The oracle says the backbone's own logits, read at the position that depth d is compared with, or one off."""
    backbone = zoo.backbone()
    batch = batch_of([20, 15])
    features = Features(backbone.forward(batch.ids).last, None)
    oracle = Oracle(backbone, offset)
    oracle.unroll = lambda features, ids, found: (
        features.last.flatten(0, 1)[at + 1 + depth + offset] for depth, at in enumerate(found)
    )
    oracle.project = lambda hidden, depth: backbone.logits(hidden)
    objective = Objective(oracle, LossSettings())
    result = objective(batch, features, torch.ones(3))
    assert (result.hits.tolist() == objective.counts(batch).tolist()) == (offset == 0)


def test_only_the_rows_of_the_draft_vocabulary_are_asked_of_the_backbone(monkeypatch):
    """B146."""
    objective = objective_of("eagle3", draft_vocab=20)
    monkeypatch.setattr(objective.backbone, "logits", lambda hidden: pytest.fail("full logits in training"))
    batch = batch_of([12])
    assert objective(batch, objective.features(batch), torch.ones(3)).total.isfinite()


@pytest.mark.parametrize("depths", [2, 9])
def test_depths_that_would_leave_a_head_untrained_or_without_one_are_refused(depths):
    with pytest.raises(UserError, match=rf"loss.depths is {depths}; the medusa head has 3 depths"):
        objective_of("medusa", depths=depths)
    assert objective_of("eagle3", depths=depths).depths == depths
