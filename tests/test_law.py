"""Plain seeded decoding has the law that transformers samples from: step by step, for every warper and their order.

transformers' own loop hands its probabilities to `torch.multinomial`: there they are caught, over the whole vocabulary,
and compared with ours at the same prefix. That the keyed noise draws by these probabilities, and independently from
position to position, is a test of counts with fixed seeds, which draws of a wrong law fail.

Letters: V vocabulary.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from headstart.heads.backbone import Backbone
from headstart.inference import sampler as module
from headstart.inference.sampler import Sampler

STEPS = 5
PROMPT = [5, 6, 7, 8, 5, 6]

WARPERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6}, "top_k": {"top_k": 9}, "top_p": {"top_p": 0.7}, "min_p": {"min_p": 0.2},
    "typical_p": {"typical_p": 0.6}, "epsilon_cutoff": {"epsilon_cutoff": 0.02}, "eta_cutoff": {"eta_cutoff": 0.1},
    "top_h": {"top_h": 0.6},
}  # fmt: skip
PROCESSORS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.5}, "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "bad_words": {"bad_words_ids": [[9], [6, 7]]}, "suppress": {"suppress_tokens": [10, 11, 12]},
    "begin_suppress": {"begin_suppress_tokens": list(range(20, 40))}, "min_new_tokens": {"min_new_tokens": 3},
    "min_length": {"min_length": 9}, "bias": {"sequence_bias": {(13,): 3.0, (6, 14): -4.0}},
    "prefix": {"prefix_allowed_tokens_fn": lambda row, ids: list(range(4, 60))},
    "decay": {"exponential_decay_length_penalty": (1, 1.5)}, "forced_eos": {"forced_eos_token_id": 3},
    "renormalize": {"renormalize_logits": True}, "encoder": {"encoder_repetition_penalty": 1.3},
}  # fmt: skip
ALONE = {**WARPERS, **PROCESSORS}
PAIRS = {f"{a} and {b}": {**WARPERS[a], **WARPERS[b]} for a, b in itertools.combinations(WARPERS, 2)}
MIXED = {f"{a} and {b}": {**PROCESSORS[a], **WARPERS[b]} for a, b in itertools.product(PROCESSORS, ("top_p", "top_k"))}
# all but the decay, which 5.17 multiplies with the -inf that min_new_tokens gives: NaN
JOINED = {name: given for name, given in PROCESSORS.items() if name != "decay"}
TOGETHER = {
    "all warpers": {name: value for one in WARPERS.values() for name, value in one.items()},
    "all processors": {name: value for one in JOINED.values() for name, value in one.items()},
    "everything": {name: value for one in {**WARPERS, **JOINED}.values() for name, value in one.items()},
}


@functools.cache
def backbone() -> Backbone:
    """Peaked laws, so that every warper cuts something off."""
    made = zoo.backbone(num_hidden_layers=2, initializer_range=0.3)
    made.model.lm_head.weight.data *= 2
    return made


def theirs(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[Tensor]]:
    """A text that transformers sampled, and the probabilities (V,) that each token was drawn from."""
    laws: list[Tensor] = []
    draw = torch.multinomial

    def caught(probabilities: Tensor, *rest: Any, **more: Any) -> Tensor:
        laws.append(probabilities[0].clone())
        return draw(probabilities, *rest, **more)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "multinomial", caught)
        torch.manual_seed(1)
        ids = torch.tensor([PROMPT])
        settings = {"do_sample": True, "max_new_tokens": STEPS, "top_k": 0, **options}
        text = backbone().model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0].tolist()
    assert len(laws) == len(text) - len(PROMPT)
    return text, laws


def ours(options: dict[str, Any], text: list[int], change: Callable[[Sampler], None] | None = None) -> list[Tensor]:
    """Our probabilities (V,) at the same prefixes."""
    settings = {"do_sample": True, "max_new_tokens": STEPS, "top_k": 0, **options}
    sampler = Sampler.from_options(backbone(), PROMPT, seed=0, **settings)
    if change is not None:
        change(sampler)
    with torch.no_grad():
        logits = backbone().logits(backbone().forward(torch.tensor([text])).last[0])  # (T, V)
    prefixes = range(len(PROMPT), len(text))
    return [sampler.scored(logits[length - 1], text[:length]).softmax(-1) for length in prefixes]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    pairs = list(zip(one, other, strict=True))
    return all(a.gt(0).equal(b.gt(0)) and torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in pairs)


@pytest.mark.parametrize("group", [ALONE, PAIRS, MIXED, TOGETHER], ids=["alone", "pairs", "mixed", "together"])
def test_the_law_is_that_of_transformers(group: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, options in group.items():
        text, laws = theirs(options, monkeypatch)
        assert same(ours(options, text), laws), name


def test_each_option_changes_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the comparison above would say nothing about it."""
    for name, options in ALONE.items():
        if name not in ("renormalize", "forced_eos", "min_new_tokens", "min_length"):
            text, laws = theirs(options, monkeypatch)
            assert not same(ours({}, text), laws), name


def test_a_wrong_order_and_a_missing_warper_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    options = TOGETHER["all warpers"]
    text, laws = theirs(options, monkeypatch)
    assert same(ours(options, text), laws)
    assert not same(ours(options, text, lambda sampler: sampler.processors.reverse()), laws)
    without = {name: value for name, value in options.items() if name != "temperature"}
    assert not same(ours(without, text), laws)
    hot = {"temperature": 2.0, "top_p": 0.7}
    text, laws = theirs(hot, monkeypatch)
    assert same(ours(hot, text), laws)
    assert not same(ours(hot, text, lambda sampler: sampler.processors.reverse()), laws), "top_p before temperature"


# -- draws -------------------------------------------------------------------------------------------------------------

P = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])
DRAWS = 6000


def statistics(law: Tensor, noise: Callable[[int, int, int, int], Tensor] | None = None) -> tuple[float, float]:
    """Chi-square of the drawn tokens against `law`, and of neighbouring pairs against its square."""
    sampler = Sampler(greedy=False, seed=11)
    kept, module.gumbel_noise = module.gumbel_noise, noise or module.gumbel_noise
    try:
        logits = P.log()
        drawn = torch.tensor([sampler.token(logits, [0] * (1 + t)) for t in range(DRAWS)])
    finally:
        module.gumbel_noise = kept
    single = torch.bincount(drawn, minlength=5).double()
    pairs = torch.bincount(5 * drawn[:-1] + drawn[1:], minlength=25).double()
    joint = (law[:, None] * law).flatten()
    return tuple(  # type: ignore[return-value]
        float(((counts - counts.sum() * p) ** 2 / (counts.sum() * p)).sum())
        for counts, p in ((single, law), (pairs, joint))
    )


SINGLE, PAIR = 23.5, 51.2  # 4 and 24 degrees of freedom, one in 10,000 and one in 1,000
"""Bounds of the statistics; the seed is fixed, so that a right law never fails by chance."""


def test_keyed_noise_draws_by_the_law_and_independently() -> None:
    single, pairs = statistics(P.double())
    assert single < SINGLE
    assert pairs < PAIR


def test_wrong_laws_and_wrong_noise_fail_the_same_test() -> None:
    off = torch.tensor([0.37, 0.33, 0.15, 0.1, 0.05]).double()
    assert statistics(off)[0] > SINGLE, "three hundredths are seen"

    def uniform(seed: int, sample: int, position: int, size: int) -> Tensor:
        return torch.rand(size, generator=torch.Generator().manual_seed(position), dtype=torch.float64)

    def halved(seed: int, sample: int, position: int, size: int) -> Tensor:
        return right(seed, sample, position // 2, size)

    def flipped(seed: int, sample: int, position: int, size: int) -> Tensor:
        return -right(seed, sample, position, size)

    right = module.gumbel_noise
    assert statistics(P.double(), uniform)[0] > SINGLE
    assert statistics(P.double(), flipped)[0] > SINGLE
    assert statistics(P.double(), halved)[1] > PAIR, "noise used twice"


def test_the_best_of_noisy_scores_has_the_law_p() -> None:
    """Gumbel-max by quadrature: P(x is best) = integral of f(g - log p_x) prod_{y != x} F(g - log p_y) dg = p_x."""
    g = torch.linspace(-12.0, 30.0, 200_001, dtype=torch.float64)  # (G,)
    shifted = g[:, None] - P.double().log()  # (G, V)
    density, below = torch.exp(-shifted - torch.exp(-shifted)), torch.exp(-torch.exp(-shifted))
    for x in range(len(P)):
        others = below[:, [y for y in range(len(P)) if y != x]].prod(-1)
        assert math.isclose(float(torch.trapezoid(density[:, x] * others, g)), float(P[x]), rel_tol=1e-6)
