"""The losses as they are printed, one position at a time: what the tests compare with."""

from __future__ import annotations

import math

import torch

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
