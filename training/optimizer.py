"""Optimizers of a head: AdamW, or Muon for its inner matrices with AdamW for the rest.

Every parameter group has a `share`: its learning rate is that of the schedule times this. Those that a head asks for
are for AdamW: with them, Muon's steps are too short in the long run (docs/compare.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import UserError
from ..heads.base import DraftHead
from .recipe import OptimSettings

Group = dict[str, Any]
BY_TOKEN = ("lm_head", "projections", "embed_tokens")  # first parts of the names of matrices with a row for each token


def build_optimizer(
    head: DraftHead, settings: OptimSettings, adapter: Sequence[nn.Parameter] = (), share: float = 1.0
) -> Optimizer:
    """An optimizer over the trained parameters of a head, and over nothing else but an adapter's.

    Args:
        adapter: parameters of one that learns beside the head; AdamW moves them, in a group named so.
        share: their learning rate, as a multiple of the head's.

    Raises:
        UserError: the installed torch has no Muon.
    """
    named = {name: one for name, one in head.named_parameters() if one.requires_grad}
    inner = {name: one for name, one in named.items() if by_muon(settings, name, one)}
    shares = head.shares()
    others = _groups({name: one for name, one in named.items() if name not in inner}, shares, settings)
    others.append({"params": list(adapter), "weight_decay": 0.0, "share": share, "adapter": True})
    if settings.name == "adamw":
        return _adamw(others, settings)
    return Joint(_muon(_groups(inner, {}, settings), settings), _adamw(others, settings))


def by_muon(settings: OptimSettings, name: str, weight: nn.Parameter) -> bool:
    """Does Muon move this weight of a head? It moves matrices from states to states, if it is asked for; those with a
    row for each token are AdamW's."""
    return settings.name == "muon" and weight.ndim == 2 and not name.startswith(BY_TOKEN)


class Joint(Optimizer):
    """Two optimizers as one: their groups side by side, their states one behind the other."""

    def __init__(self, *parts: Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        for part in parts:  # one set of groups: a learning rate set here is set there
            count = len(part.param_groups)
            part.param_groups = self.param_groups[:count]
            self.param_groups = self.param_groups[count:] + part.param_groups

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def _groups(named: Mapping[str, nn.Parameter], shares: Mapping[str, float], settings: OptimSettings) -> list[Group]:
    """Parameters by their learning rates; weight decay is for matrices."""
    groups: list[Group] = [
        {"params": [one for name, one in named.items() if name not in shares and one.ndim > 1], "share": 1.0},
        {"params": [one for one in named.values() if one.ndim <= 1], "weight_decay": 0.0, "share": 1.0},
        *({"params": [named[name]], "share": share} for name, share in shares.items() if name in named),
    ]
    return [{"weight_decay": settings.weight_decay, **one} for one in groups if one["params"]]


def _adamw(groups: list[Group], settings: OptimSettings) -> Optimizer:
    return torch.optim.AdamW([one for one in groups if one["params"]], lr=settings.lr, betas=settings.betas, fused=True)


def _muon(groups: list[Group], settings: OptimSettings) -> Optimizer:
    """Momentum that is orthogonalised before it moves a matrix (Jordan et al. 2024), by torch's own implementation.

    The update is scaled to the size of AdamW's (Liu et al., arXiv 2502.16982, section 2.2), so that learning rates of
    the two compare.
    """
    muon = getattr(torch.optim, "Muon", None)
    if muon is None:
        raise UserError(
            f"optim.name is muon, which torch {torch.__version__} does not have; torch 2.9 does, or use adamw"
        )
    groups = [{**one, "share": one["share"] * settings.muon_share} for one in groups]
    made: Optimizer = muon(
        groups, lr=settings.lr, weight_decay=settings.weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    return made
