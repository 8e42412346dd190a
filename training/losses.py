"""Losses, one value a position. They know no head.

- On logits: cross-entropy with the backbone or with the data, the divergences, and what acceptance is made of.
- On features: smooth-L1, for heads that guess the backbone's features.
- `Mixture`: several of them, by weight.

The overlap of two distributions, the sum over v of min(p(v), q(v)), is the chance that a token sampled from q is
accepted (Leviathan et al. 2023, arXiv 2211.17192, section 3.2). p may sum to less than 1 over the draft vocabulary,
where it is the backbone's over all tokens; all formulas then hold as they stand, and the overlap stays that chance.

Letters: m positions, H width, Vd draft vocabulary, V vocabulary. p is the target's distribution, q the drafter's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from .recipe import LossSettings

Values = Callable[[Tensor, "Tensor | None", Tensor], Tensor]


def soft(logits: Tensor, p: Tensor | None, labels: Tensor) -> Tensor:
    """Cross-entropy of q against p over the draft vocabulary (Li et al. 2025, EAGLE-3, arXiv 2503.01840, section 3).

    Args:
        logits: (m, Vd) of the drafter.
        p: (m, Vd) of the target.
        labels: (m,) unused.

    Returns:
        (m,) - sum over v of p(v) log q(v), fp32 (float64 for logits of that kind).
    """
    return -(_given(p) * _log(logits)).sum(-1)


def hard(logits: Tensor, p: Tensor | None, labels: Tensor) -> Tensor:
    """Cross-entropy of q against the token of the data; 0 where that lies outside the draft vocabulary.

    Args:
        logits: (m, Vd) of the drafter.
        p: unused.
        labels: (m,) draft ids, -1 outside.
    """
    return F.nll_loss(_log(logits), labels, ignore_index=-1, reduction="none")


def kl(logits: Tensor, p: Tensor | None, labels: Tensor) -> Tensor:
    """KL(p || q), the sum over v of p(v) log(p(v) / q(v)): `soft` less the entropy of p, with the same gradient."""
    p = _given(p)
    return (torch.xlogy(p, p) - p * _log(logits)).sum(-1)


def reverse_kl(logits: Tensor, p: Tensor | None, labels: Tensor) -> Tensor:
    """KL(q || p), the sum over v of q(v) log(q(v) / p(v)): the drafter keeps away from what the target never says
    (Gu et al. 2023, MiniLLM, arXiv 2306.08543, section 2.1). A p that is 0 counts as the smallest normal number."""
    log_q, p = _log(logits), _given(p)
    return (log_q.exp() * (log_q - p.clamp(min=torch.finfo(p.dtype).tiny).log())).sum(-1)


def top_k(logits: Tensor, p: Tensor | None, labels: Tensor, *, k: int = 10) -> Tensor:
    """Cross-entropy over the k tokens that p is largest at (Zhang et al. 2024, HASS, arXiv 2408.15766, section 3.1)."""
    weights, places = _given(p).topk(k, -1)  # (m, k) each
    return -(weights * _log(logits).gather(-1, places)).sum(-1)


def tv(logits: Tensor, p: Tensor | None, labels: Tensor) -> Tensor:
    """Total variation, 1 - overlap: half the sum of |p - q|, tokens outside the draft vocabulary included."""
    return 1 - torch.minimum(_given(p), _log(logits).exp()).sum(-1)


def lk_alpha(logits: Tensor, p: Tensor | None, labels: Tensor) -> Tensor:
    """- log overlap (Samarin et al. 2026, LK losses, arXiv 2602.23881): total variation, steeper where little is
    accepted. Computed from logarithms, so that no overlap is too small for a gradient."""
    log_p = _given(p).log().clamp(min=-1e4)
    return -torch.minimum(log_p, _log(logits)).logsumexp(-1)


def lk_lambda(logits: Tensor, p: Tensor | None, labels: Tensor, *, eta: float = 3.0) -> Tensor:
    """L KL(p || q) + (1 - L) TV(p, q) with L = exp(-eta overlap), which has no gradient (LK losses, as above).

    L is taken at each position by itself, so that a loss does not depend on what else is in its batch.
    """
    distance = tv(logits, p, labels)
    share = torch.exp(-eta * (1 - distance.detach()))
    return share * kl(logits, p, labels) + (1 - share) * distance


def smooth_l1(guesses: Tensor, truth: Tensor | None, labels: Tensor) -> Tensor:
    """Smooth-L1 between features, the mean over their width (Li et al. 2024, EAGLE, arXiv 2401.15077, section 4.2).

    Args:
        guesses: (m, H) of the drafter.
        truth: (m, H) the backbone's own.
        labels: (m,) unused.

    Returns:
        (m,) the mean over the width of d^2 / 2 where d = |guess - truth| is below 1, else of d - 1/2; fp32 or better.
    """
    dtype = exact(guesses)
    return F.smooth_l1_loss(guesses.to(dtype), _given(truth).to(dtype), reduction="none").mean(-1)


@dataclass(frozen=True)
class Loss:
    """A loss, and what it is computed from."""

    values: Values
    """(logits, p, labels) to one value a position; of features: (guesses, truth, labels)."""
    teacher: bool
    """Whether it reads p; if not, it learns only where there is a label."""
    features: bool = False
    """Whether it compares features, and no logits."""


LOSSES = {
    "soft": Loss(soft, teacher=True),
    "hard": Loss(hard, teacher=False),
    "kl": Loss(kl, teacher=True),
    "reverse_kl": Loss(reverse_kl, teacher=True),
    "top_k": Loss(top_k, teacher=True),
    "tv": Loss(tv, teacher=True),
    "lk_alpha": Loss(lk_alpha, teacher=True),
    "lk_lambda": Loss(lk_lambda, teacher=True),
    "smooth_l1": Loss(smooth_l1, teacher=True, features=True),
}


@dataclass(frozen=True)
class Mixture:
    """A weighted sum of losses."""

    logits: tuple[tuple[float, Values], ...] = ()
    """Weights and losses on logits."""
    features: tuple[tuple[float, Values], ...] = ()
    """Weights and losses on features."""
    teacher: bool = True
    """Whether every anchor counts; if not, only those whose token can be proposed."""

    @classmethod
    def of(cls, settings: LossSettings) -> Mixture:
        """What the settings ask for."""
        options: dict[str, dict[str, float]] = {"top_k": {"k": settings.k}, "lk_lambda": {"eta": settings.eta}}
        parts = [(weight, name, LOSSES[name]) for name, weight in named(settings).items()]
        made = [(weight, partial(loss.values, **options.get(name, {})), loss) for weight, name, loss in parts]
        return cls(
            tuple((weight, values) for weight, values, loss in made if not loss.features),
            tuple((weight, values) for weight, values, loss in made if loss.features),
            any(loss.teacher for _, _, loss in parts),
        )

    def values(self, logits: Tensor, p: Tensor | None, labels: Tensor) -> Tensor:
        """(m, Vd) logits to (m,) values."""
        return self._sum(self.logits, logits, p, labels)

    def feature_values(self, guesses: Tensor, truth: Tensor, labels: Tensor) -> Tensor:
        """(m, H) features to (m,) values."""
        return self._sum(self.features, guesses, truth, labels)

    @staticmethod
    def _sum(parts: tuple[tuple[float, Values], ...], ours: Tensor, theirs: Tensor | None, labels: Tensor) -> Tensor:
        if len(parts) == 1 and parts[0][0] == 1:
            return parts[0][1](ours, theirs, labels)
        return sum((weight * values(ours, theirs, labels) for weight, values in parts), 0 * ours.sum(-1))


def named(settings: LossSettings) -> Mapping[str, float]:
    """Weights of the losses that the settings ask for, by name."""
    return settings.terms or {settings.name: 1.0}


def wording(settings: LossSettings) -> str:
    """The losses in words, such as `smooth_l1 + 0.1 soft`."""
    return " + ".join(name if weight == 1 else f"{weight:g} {name}" for name, weight in named(settings).items())


def exact(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _log(logits: Tensor) -> Tensor:
    """log q, fp32 or better."""
    return logits.log_softmax(-1, dtype=exact(logits))


def _given(p: Tensor | None) -> Tensor:
    assert p is not None, "this loss reads the target's distribution or features"
    return p
