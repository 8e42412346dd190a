"""The product with few rows, against `F.linear`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from headstart.heads import linear as module
from headstart.heads.linear import FEW, Linear, linear


@pytest.mark.parametrize("shape", [(1, 1, 12), (1, 4, 12), (12,), (2, 3, 12), (FEW, 12), (FEW + 1, 12), (0, 12)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_it_is_that_of_torch(shape: tuple[int, ...], biased: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    states, weight = torch.randn(shape, dtype=dtype), torch.randn(7, 12, dtype=dtype)
    bias = torch.randn(7, dtype=dtype) if biased else None
    with torch.no_grad():
        torch.testing.assert_close(linear(states, weight, bias), F.linear(states, weight, bias))


def test_training_keeps_the_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients and autocast are those of `nn.Linear`."""
    layer, states = Linear(5, 3), torch.randn(2, 5)
    asked: list[int] = []
    monkeypatch.setattr(module.F, "linear", lambda *given: asked.append(1) or given[0] @ given[1].T)
    layer(states)
    assert asked == [1]
    with torch.no_grad():
        layer(states)
    assert asked == [1]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        layer(states)
    assert asked == [1, 1]
