"""Losses: the chunked form against the plain formula and its gradients, and an objective that knows where it stands."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zoo
from headstart.errors import UserError
from headstart.heads import methods
from headstart.heads.backbone import Features
from headstart.heads.vocab import DraftVocab
from headstart.training import summed as walk
from headstart.training.batches import Batch, anchors
from headstart.training.losses import LOSSES, Mixture
from headstart.training.objective import Objective
from headstart.training.recipe import LossSettings
from headstart.training.summed import Terms, summed

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


MIXTURES = [
    *({"name": name} for name in LOSSES),
    {"name": "top_k", "k": 3},
    {"name": "lk_lambda", "eta": 0.5},
    {"terms": {"smooth_l1": 1.0, "soft": 0.1, "top_k": 0.7}},  # HASS
    {"terms": {"hard": 0.1, "tv": 0.9}},
]
PLAIN = {  # one position: q and p (Vd,), label, guess f and truth g (H,)
    "soft": lambda q, p, y, f, g: -(p * q.log()).sum(),
    "hard": lambda q, p, y, f, g: -q[y].log() if y >= 0 else 0 * q.sum(),
    "kl": lambda q, p, y, f, g: (p * (p / q).log()).sum(),
    "reverse_kl": lambda q, p, y, f, g: (q * (q / p).log()).sum(),
    "tv": lambda q, p, y, f, g: ((p - q).abs().sum() + 1 - p.sum()) / 2,
    "lk_alpha": lambda q, p, y, f, g: -torch.where(p < q, p, q).sum().log(),
    "smooth_l1": lambda q, p, y, f, g: torch.stack([d**2 / 2 if d < 1 else d - 0.5 for d in abs(f - g)]).mean(),
}


def plain_value(settings, z, p, y, f, g):
    """A position's loss, by the formulas as they are printed."""
    q, total = torch.exp(z) / torch.exp(z).sum(), 0 * z.sum()
    for name, weight in (settings.terms or {settings.name: 1.0}).items():
        if name == "top_k":
            best = sorted(range(len(z)), key=lambda v: -float(p[v]))[: settings.k]
            value = -(p * q.log())[best].sum()
        elif name == "lk_lambda":
            share = math.exp(-settings.eta * float(torch.where(p < q, p, q).sum().detach()))
            value = share * PLAIN["kl"](q, p, y, f, g) + (1 - share) * PLAIN["tv"](q, p, y, f, g)
        else:
            value = PLAIN[name](q, p, y, f, g)
        total = total + weight * value
    return total


def terms_of(settings, count=37, seed=0, dtype=torch.float64):
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

    truth = 1.5 * torch.randn(count, WIDTH, generator=generator, dtype=dtype)
    loss = Mixture.of(settings)
    return Terms(loss, hidden, places, labels, project, teach, count, VD, truth=truth), project, teacher, calls


def plain(settings, terms, project, teacher, weights, mass=None):
    """Position by position, and autograd through everything."""
    total, sums = 0.0, []
    p = teacher.softmax(-1) if mass is None else torch.exp(teacher) / torch.exp(mass)[:, None]
    for depth, hidden in enumerate(terms.hidden):
        logits = project(hidden, depth)
        places, labels = terms.places[depth].tolist(), terms.labels[depth].tolist()
        values = [
            plain_value(settings, logits[i], p[at], labels[i], hidden[i], terms.truth[at])
            for i, at in enumerate(places)
        ]
        sums.append(sum(values))
        total = total + weights[depth] * sums[-1]
    return total, torch.stack(sums)


@pytest.fixture(params=[(1 << 19, 1 << 23), (VD, VD), (5 * VD, 10 * VD), (3 * VD, 7 * VD)], ids=str)
def sizes(request, monkeypatch):
    """From all in one block down to one position at a time."""
    monkeypatch.setitem(walk.BLOCK, "cpu", request.param[0])
    monkeypatch.setitem(walk.CHUNK, "cpu", request.param[1])
    return request.param


@pytest.mark.parametrize("over", ["draft", "all"])
@pytest.mark.parametrize("settings", MIXTURES, ids=str)
def test_values_and_gradients_are_those_of_the_plain_formula(settings, over, sizes):
    settings = LossSettings(**settings)
    weights = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    terms, project, teacher, _ = terms_of(settings, count=17)
    mass = None
    if over == "all":  # the tokens outside have e^0.3 in all
        mass = torch.logaddexp(teacher.logsumexp(-1), torch.tensor(0.3, dtype=torch.float64))
        terms.mass = lambda start, stop: mass[start:stop]
    expected, sums = plain(settings, terms, project, teacher, weights, mass)
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
    terms, project, teacher, calls = terms_of(LossSettings(name=name))
    found = summed(terms, torch.ones(D, dtype=torch.float64), list(project.parameters()))
    asked = [place for start, stop in calls for place in range(start, stop)]
    if name != "hard":
        assert asked == list(range(terms.count))
        assert found.teacher_tops.tolist() == teacher.argmax(-1).tolist()
    else:
        assert asked == []
        assert found.teacher_tops.tolist() == [-1] * terms.count


def test_no_logits_of_a_whole_batch_are_ever_made(monkeypatch):
    monkeypatch.setitem(walk.BLOCK, "cpu", 2 * VD)
    monkeypatch.setitem(walk.CHUNK, "cpu", 6 * VD)
    terms, project, _, calls = terms_of(LossSettings(), count=100)
    seen = []
    terms.project = lambda hidden, depth: seen.append(len(hidden)) or project(hidden, depth)
    summed(terms, torch.ones(D, dtype=torch.float64), list(project.parameters()))
    assert max(seen) == max(stop - start for start, stop in calls) == 6


def test_without_gradients_only_values_are_made():
    terms, project, teacher, _ = terms_of(LossSettings())
    weights = torch.ones(D, dtype=torch.float64)
    with torch.no_grad():
        found = summed(terms, weights, list(project.parameters()))
    torch.testing.assert_close(found.total, plain(LossSettings(), terms, project, teacher, weights)[0].detach())
    assert not found.total.requires_grad


def test_nothing_at_all_gives_zeros_and_leaves_no_matrix_without_a_gradient():
    """A process without a row of its own still has to hand every gradient in."""
    terms, project, _, _ = terms_of(LossSettings(), count=0)
    found = summed(terms, torch.ones(D, dtype=torch.float64), list(project.parameters()))
    found.total.backward()
    assert found.total == 0
    for matrix in project.matrices:
        assert matrix.weight.grad is not None
        assert not matrix.weight.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_at_least_fp32(name, dtype):
    logits, p, labels = torch.randn(3, VD).to(dtype), torch.rand(3, VD).softmax(-1), torch.tensor([1, -1, 2])
    values = LOSSES[name].values(logits, p, labels)
    assert values.dtype == torch.float32
    assert values.shape == (3,)
    assert (name == "hard") == (values[1] == 0)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "hard"])
def test_losses_are_finite_and_teach_where_the_two_have_nothing_in_common(name):
    """p is 0 where q is all, in fp32: no logarithm of 0, and a way down for all but the overlap itself."""
    logits = torch.full((1, VD), -200.0)
    logits[0, 3] = 200.0
    logits.requires_grad_()
    p = F.one_hot(torch.tensor([5]), VD).float()
    value = LOSSES[name].values(logits, p, torch.tensor([5]))
    value.sum().backward()
    assert value.isfinite().all()
    assert logits.grad.isfinite().all()
    if name not in ("tv", "smooth_l1"):
        assert logits.grad[0, 5] < 0 or name == "reverse_kl"


def test_kl_is_zero_and_total_variation_too_where_the_drafter_is_the_target():
    logits = torch.randn(4, VD, dtype=torch.float64)
    p, labels = logits.softmax(-1), torch.zeros(4, dtype=torch.long)
    for name in ("kl", "reverse_kl", "tv", "lk_alpha", "lk_lambda"):
        torch.testing.assert_close(LOSSES[name].values(logits, p, labels), torch.zeros(4, dtype=torch.float64))


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


METHODS = {name: method for name, method in methods.METHODS.items() if method.trainable}
ALL = [(method, name) for method in METHODS for name in LOSSES]


def objective_of(method, name="soft", draft_vocab=None, depths=None, **settings):
    backbone = zoo.backbone()
    backbone.model.requires_grad_(False)
    vocab = None if draft_vocab is None else DraftVocab(range(0, 2 * draft_vocab, 2), zoo.VOCAB)
    torch.manual_seed(5)
    head = METHODS[method].build(backbone, vocab=vocab, **({"num_heads": 3} if method == "medusa" else {}))
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    loss = LossSettings(name=name, depths=depths, **settings)
    if LOSSES[name].features and not head.regresses:
        with pytest.raises(UserError, match=f"{name}, which compares guessed features .* this {method} head"):
            Objective(head, loss)
        pytest.skip("refused, as it has to be")
    return Objective(head, loss)


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


@pytest.mark.parametrize(("method", "name"), ALL)
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


@pytest.mark.parametrize(("method", "name"), ALL)
@pytest.mark.parametrize(("draft_vocab", "over"), [(None, "all"), (40, "draft"), (40, "all")])
def test_the_objective_is_the_plain_formula(method, name, draft_vocab, over):
    """Full logits of the backbone and of the head, position by position."""
    settings = LossSettings(name=name, over=over)
    objective = objective_of(method, name, draft_vocab, over=over)
    head, backbone = objective.head, objective.backbone
    batch = batch_of([14, 10], seed=3)
    features = objective.features(batch)
    vocab = head.vocab
    full = backbone.model(batch.ids, attention_mask=_true(batch)).logits
    p = full.softmax(-1)[..., vocab.ids] if over == "all" else full[..., vocab.ids].softmax(-1)
    total, hits = 0.0, []
    found = anchors(batch.mask, 3)
    for depth, hidden in enumerate(head.unroll(features, batch.ids, found)):
        logits = head.project(hidden, depth)
        values, hit = [], 0
        for place, at in enumerate(found[depth].tolist()):
            b, t = divmod(at, batch.ids.shape[1])
            aim = p[b, t + 1 + depth]
            label = int(vocab.to_draft(batch.ids[b, t + 2 + depth]))
            if name != "hard" or label >= 0:
                truth = features.last[b, t + 1 + depth]
                values.append(plain_value(settings, logits[place], aim, label, hidden[place], truth))
                hit += int(logits[place].argmax() == (label if name == "hard" else aim.argmax()))
        total = total + torch.stack(values).mean() * 0.8**depth / (1 + 0.8 + 0.64)
        hits.append(hit)
    expected = torch.autograd.grad(total, list(head.parameters()), materialize_grads=True)
    result = objective(batch, features, 1 / objective.counts(batch))
    result.total.backward()
    torch.testing.assert_close(result.total, total, rtol=1e-5, atol=1e-6)
    assert result.hits.tolist() == hits
    for weight, gradient in zip(head.parameters(), expected, strict=True):
        torch.testing.assert_close(weight.grad, gradient, rtol=1e-4, atol=1e-6)


def _true(batch):
    """The attention mask of transformers: the two rows of the test are 14 and 10 long."""
    return (torch.arange(batch.ids.shape[1]) < torch.tensor([[14], [10]])).long()


@pytest.mark.parametrize(("method", "name"), ALL)
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

    max_depth, taps, method, regresses = 3, (), "oracle", True

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


@pytest.mark.parametrize("over", ["draft", "all"])
def test_the_smooth_l1_loss_is_zero_for_the_features_of_t_1_d_alone(over):
    backbone = zoo.backbone()
    batch = batch_of([20, 15])
    features = Features(backbone.forward(batch.ids).last, None)
    for offset in (-1, 0, 1):
        oracle = Oracle(backbone, offset)
        oracle.unroll = lambda features, ids, found, offset=offset: (
            features.last.flatten(0, 1)[at + 1 + depth + offset] for depth, at in enumerate(found)
        )
        oracle.project = lambda hidden, depth: backbone.logits(hidden)
        settings = LossSettings(terms={"smooth_l1": 1.0, "kl": 0.1}, over=over)
        losses = Objective(oracle, settings)(batch, features, torch.ones(3)).losses
        assert (losses.abs() < 1e-4).all() if offset == 0 else (losses > 1).all()


def test_weights_of_the_depths():
    assert objective_of("eagle3", depths=3).shares.tolist() == pytest.approx([1 / 2.44, 0.8 / 2.44, 0.64 / 2.44])
    assert objective_of("eagle3", depths=2, weights=[3.0, 1.0]).shares.tolist() == [0.75, 0.25]
    with pytest.raises(UserError, match=r"loss.weights has 2 weights; the depths trained are 3"):
        objective_of("medusa", weights=[1.0, 1.0])


def test_more_tokens_than_there_are_cannot_be_compared():
    with pytest.raises(UserError, match=r"loss.k is 30; the head proposes 24 tokens"):
        objective_of("eagle3", "top_k", draft_vocab=24, k=30)
    assert objective_of("eagle3", draft_vocab=24, k=30).loss.logits


@pytest.mark.parametrize("method", METHODS)
def test_noise_is_on_what_the_head_reads_alone_and_belongs_to_the_row(method):
    objective = objective_of(method, noise=0.5)
    read = []
    unroll = objective.head.unroll
    objective.head.unroll = lambda features, *rest: read.append(features) or unroll(features, *rest)
    batch = batch_of([17, 12, 9])
    clean = objective.features(batch)
    before = clean.last.clone()
    scale = torch.ones(objective.depths)
    objective(batch, clean, scale)
    noisy = read[-1]
    assert torch.equal(clean.last, before)
    for row, length in enumerate([17, 12, 9]):
        for one, other in ((noisy.last, clean.last), (noisy.taps, clean.taps)):
            if one is not None:
                noise = (one - other)[row]
                assert noise[:length].abs().max() <= 0.25 * 512 / length
                assert noise[:length].std().item() == pytest.approx(0.5 * 512 / length / 12**0.5, rel=0.15)
                assert not noise[length:].any()
    alone = Batch(batch.ids[1:2, :12], batch.mask[1:2, :12], [1], 12)
    objective(alone, objective.features(alone), scale)
    torch.testing.assert_close(read[-1].last[0], noisy.last[1, :12])  # whatever it is batched and padded with
    objective.seed = 1
    objective(batch, clean, scale)
    assert not torch.equal(read[-1].last, noisy.last)  # another step
    objective.head.eval()
    objective(batch, clean, scale)
    assert read[-1] is clean  # none where it is measured


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
