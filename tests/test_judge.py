"""Where answers part, and which differences rounding explains."""

from __future__ import annotations

import copy

import pytest
import torch

import zoo
from headstart.heads.backbone import Backbone
from headstart.inference.generator import Generator
from headstart.inference.judge import TIE, Judge, Parting, verdict

PROMPT = [1, 5, 6]
GREEDY = {"max_new_tokens": 8, "do_sample": False}
DRAWN = {"max_new_tokens": 8, "do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 3}


def parting(judge: Judge, one: list[int], other: list[int], **options: object) -> Parting:
    found = judge.parting(PROMPT, one, other, **(options or GREEDY))
    assert found is not None
    return found


def test_ties_and_mismatches() -> None:
    backbone = zoo.backbone()
    judge = Judge(backbone)
    own = Generator(backbone).generate(PROMPT, **GREEDY).tokens
    assert judge.parting(PROMPT, own, list(own), **GREEDY) is None
    other = [*own[:3], (own[3] + 1) % zoo.VOCAB, *own[4:]]
    found = parting(judge, own, other)
    assert (found.kind, found.step, found.plain, found.ours) == ("mismatch", 3, own[3], other[3])
    assert found.allowed == TIE
    with torch.no_grad():
        logits = copy.deepcopy(backbone.model).double()(torch.tensor([PROMPT + own[:3]])).logits[0, -1]
    best, second = logits.topk(2).values.tolist()
    assert found.gap == pytest.approx(float(best - logits[other[3]]), rel=1e-9)
    assert found.margin == pytest.approx(best - second, abs=1e-4)
    for below, kind in ((0.9e-4, "tie"), (1.1e-4, "mismatch")):
        with torch.no_grad():  # the second best token of this step, so far below the best one
            hidden = backbone.forward(torch.tensor([PROMPT + own[:3]])).last[0, -1].double()
            weight, row = backbone.model.lm_head.weight, backbone.model.lm_head.weight[own[3]].double()
            weight[other[3]] = (row - below * hidden / hidden.square().sum()).float()
        found = parting(Judge(backbone), own, other)
        assert (found.kind, found.gap) == (kind, pytest.approx(below, rel=0.05))


def test_one_of_three_near_the_best_is_not_enough() -> None:
    """Both tokens have to be near the best one, not near each other."""
    backbone = zoo.backbone()
    own = Generator(backbone).generate(PROMPT, **GREEDY).tokens
    low, lower = ((own[2] + k) % zoo.VOCAB for k in (1, 2))
    with torch.no_grad():
        backbone.model.lm_head.weight[lower] = backbone.model.lm_head.weight[low]
    assert parting(Judge(backbone), [*own[:2], low], [*own[:2], lower]).kind == "mismatch"


def test_an_answer_that_ends_early_is_a_mismatch() -> None:
    backbone = zoo.backbone()
    own = Generator(backbone).generate(PROMPT, **GREEDY).tokens
    short, long = parting(Judge(backbone), own, own[:5]), parting(Judge(backbone), own, [*own, 9])
    assert short == Parting("mismatch", 5, own[5], None)
    assert long == Parting("mismatch", 8, None, 9)


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_float64_logits_are_those_of_a_model_in_float64(family: str) -> None:
    backbone = zoo.backbone(family)
    before = {name: (weight, weight.data_ptr()) for name, weight in backbone.model.state_dict(keep_vars=True).items()}
    with torch.no_grad():
        found = Judge(backbone).logits(PROMPT, exactly=True)
        expected = copy.deepcopy(backbone.model).double()(torch.tensor([PROMPT])).logits[0, -1]
        rounded = backbone.model(torch.tensor([PROMPT])).logits[0, -1]
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert not torch.equal(found, rounded.double())
    after = backbone.model.state_dict(keep_vars=True)
    assert all(after[name] is weight and weight.data_ptr() == place for name, (weight, place) in before.items())


def test_weights_are_restored_when_the_model_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = zoo.backbone()
    monkeypatch.setattr(backbone.model.model.layers[2].mlp, "forward", lambda hidden: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Judge(backbone).logits(PROMPT, exactly=True)
    assert {weight.dtype for weight in backbone.model.parameters()} == {torch.float32}


def test_in_half_precision_the_gap_allowed_is_what_rounding_does() -> None:
    model = zoo.model().to(torch.bfloat16)
    backbone = Backbone(model)
    own = Generator(backbone).generate(PROMPT, **GREEDY).tokens
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(torch.tensor([PROMPT])).logits[0, -1]
        errors = model(torch.tensor([PROMPT])).logits[0, -1].double() - exact
    spacing = 2.0 ** (int(exact.max().log2().floor()) - 7)
    order = exact.argsort(descending=True).tolist()
    found = parting(Judge(backbone), own, [order[-1]])
    assert found.allowed == pytest.approx(6 * float(errors.std()) + spacing)
    assert found.allowed < 0.2 * float(exact.std())
    assert found.gap == pytest.approx(float(exact.max() - exact.min()))
    assert found.kind == "mismatch"
    near = next(token for token in order if token != own[0])
    with torch.no_grad():
        model.lm_head.weight[near] = model.lm_head.weight[own[0]]
    assert parting(Judge(backbone), own, [near]).kind == "rounding"


def test_draws_are_judged_with_their_noise() -> None:
    backbone = zoo.backbone()
    judge, own = Judge(backbone), Generator(backbone).generate(PROMPT, **DRAWN).tokens
    others = [[*own[:2], token] for token in range(zoo.VOCAB) if token != own[2]]
    gaps = [parting(judge, own, other, **DRAWN).gap for other in others]
    assert min(gaps) > 0  # type: ignore[type-var]  # the token drawn is the best one, noise included
    assert parting(judge, own, others[0], **{**DRAWN, "seed": 4}).gap != gaps[0]
    assert parting(judge, own, others[0], **{**DRAWN, "sample": 1}).gap != gaps[0]


def test_scores_are_those_behind_the_processors() -> None:
    backbone = zoo.backbone()
    options = {**GREEDY, "suppress_tokens": [7]}
    own = Generator(backbone).generate(PROMPT, **options).tokens
    found = parting(Judge(backbone), own, [*own[:2], 7], **options)
    assert (found.kind, found.gap) == ("mismatch", None)


def test_verdicts() -> None:
    tie, rounding, wrong = ({"kind": kind} for kind in ("tie", "rounding", "mismatch"))
    assert verdict([None, None]) == "equal"
    assert verdict([]) == "nothing was compared"
    assert verdict([None, tie]) == "equal but for 1 tie"
    assert verdict([rounding, tie, tie]) == "equal but for 2 ties and 1 near-tie of this precision"
    assert verdict([None, wrong]) == "NOT equal: 1 mismatch"
    assert verdict([wrong, tie, wrong]) == "NOT equal: 2 mismatches, besides 1 tie"
