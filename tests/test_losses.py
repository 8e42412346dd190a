"""Losses: the chunked form against the plain formula and its gradients, and an objective that knows where it stands."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from formulas import plain_value
from torch import nn

from headstart.training import summed as walk
from headstart.training.losses import LOSSES, Mixture
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
