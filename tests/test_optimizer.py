"""Optimizers: what is moved by which, one schedule for all, and a state that comes back."""

from __future__ import annotations

import copy

import pytest
import torch

import zoo
from headstart.heads.methods import TRAINABLE
from headstart.training.optimizer import Joint, build_optimizer
from headstart.training.recipe import OptimSettings


def head(method: str = "eagle3"):
    torch.manual_seed(0)
    return TRAINABLE[method].build(zoo.backbone()).train()


def pushed(one, optimizer, steps: int = 3) -> None:
    """Steps with gradients that depend on the step alone."""
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in one.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("method", list(TRAINABLE))
def test_every_parameter_is_moved_once(method: str, name: str) -> None:
    one = head(method)
    before = copy.deepcopy(one.state_dict())
    optimizer = build_optimizer(one, OptimSettings(name=name, lr=1e-2))
    owned = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(owned) == sorted(id(p) for p in one.parameters() if p.requires_grad)
    pushed(one, optimizer, 1)
    for key, parameter in one.named_parameters():
        assert not torch.equal(parameter, before[key]), key


def test_muon_moves_inner_matrices_by_an_orthogonal_step() -> None:
    one = head()
    before = one.midlayer.mlp.gate_proj.weight.detach().clone()
    optimizer = build_optimizer(one, OptimSettings(name="muon", lr=1e-2, muon_share=1.0))
    pushed(one, optimizer, 1)
    moved = one.midlayer.mlp.gate_proj.weight.detach() - before
    spectrum = torch.linalg.svdvals(moved)
    assert spectrum.max() / spectrum.min() < 2.5  # a Gaussian gradient of this shape has a ratio above 5
    assert {len(part.param_groups[0]["params"]) for part in optimizer.parts} != {0}


@pytest.mark.parametrize(
    ("method", "fields"),
    [("eagle3", {"embedding": "own"}), ("medusa", {"projection": "own"}), ("hydra", {"projection": "own"})],
)
def test_matrices_with_a_row_for_each_token_are_not_muons(method: str, fields: dict[str, str]) -> None:
    one = TRAINABLE[method].build(zoo.backbone(), **fields)
    muon, adamw = build_optimizer(one, OptimSettings(name="muon")).parts
    rows = [{len(p) for group in part.param_groups for p in group["params"] if p.ndim == 2} for part in (muon, adamw)]
    assert zoo.VOCAB not in rows[0]
    assert rows[1] == {zoo.VOCAB}


def test_a_rate_set_on_the_whole_reaches_its_parts() -> None:
    one = head()
    optimizer = build_optimizer(one, OptimSettings(name="muon"))
    assert isinstance(optimizer, Joint)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = copy.deepcopy(one.state_dict())
    pushed(one, optimizer, 1)
    for key, value in one.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_state_comes_back(name: str, tmp_path) -> None:
    settings = OptimSettings(name=name, lr=1e-2)
    whole = head()
    pushed(whole, build_optimizer(whole, settings), 3)
    first = head()
    optimizer = build_optimizer(first, settings)
    pushed(first, optimizer, 2)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    second = head()
    second.load_state_dict(first.state_dict())
    resumed = build_optimizer(second, settings)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for group in resumed.param_groups:
        assert group["share"] > 0
    generator = torch.Generator().manual_seed(2)
    for parameter in second.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    resumed.step()
    for key, value in whole.state_dict().items():
        assert torch.equal(value, second.state_dict()[key]), key
