"""`headstart tune`: what is replayed is what a run does, and what it chose is found again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from headstart.cli import main
from headstart.errors import UserError
from headstart.heads.format import load_head, save_head
from headstart.heads.methods import METHODS
from headstart.heads.vocab import DraftVocab
from headstart.inference import tune as module
from headstart.inference import tuned
from headstart.inference.advice import acceptance, findings, told
from headstart.inference.costs import CostModel, Costs
from headstart.inference.drafters import drafter_factory
from headstart.inference.generator import Generator
from headstart.inference.record import moments, replay
from headstart.inference.suite import read_suite
from headstart.inference.tree import Chain, Dynamic, Shape, parse_shape
from headstart.inference.tune import (
    AUTO,
    PLAIN,
    Run,
    Setting,
    TuneSettings,
    Tuning,
    candidates,
    choice,
    rates_of,
    spread,
    tune,
)

COSTS = CostModel(
    {rows: Costs({1: 1.0, 32: 1.5 * rows}, {1: 0.05, 8: 0.4}) for rows in (1, 2, 4, 8)}, read=0.001
)  # of a machine that nobody has to wait for


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "costs_of", lambda *arguments, **more: COSTS)
    monkeypatch.setattr("headstart.inference.auto.costs_of", lambda *arguments, **more: COSTS)


def lucky(method: str = "eagle3") -> tuple[Any, Any]:
    """A backbone and a head of random weights some of whose drafts are right: few tokens are ever chosen."""
    torch.manual_seed(3)
    backbone = zoo.backbone()
    with torch.no_grad():
        backbone.model.lm_head.weight[12:] *= 0.05
    return backbone, METHODS[method].build(backbone).eval()


FORMS = ["chain:1", "chain:3", "static:0,1,2,0.0,0.1,0.0.0,1.0", "dynamic:2x3x4", "dynamic:3x3x6", "dynamic:3x4x12"]


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
@pytest.mark.parametrize("options", [{"do_sample": False}, {"temperature": 1.0, "seed": 5}])
def test_what_is_replayed_is_what_a_run_does(method: str, options: dict[str, Any]) -> None:
    backbone, head = lucky(method)
    make = drafter_factory(backbone, head, Dynamic(3, 4, 24))
    accepted = 0
    for prompt in ([5, 6, 7, 8], [9, 9, 4]):
        asked: dict[str, Any] = {"max_new_tokens": 40, "eos_token_id": None, **options}
        text = Generator(backbone).generate(prompt, **asked).tokens
        known = moments(backbone, make, prompt, text, 3, (3, 4))
        for form in FORMS:
            stats = Generator(backbone, head, tree=form).generate(prompt, **asked).stats
            found = replay([known], parse_shape(form))
            assert (found.tokens, found.rounds) == (stats.tokens, stats.rounds), form
            assert list(found.accepted) == stats.accepted, form
            assert found.nodes == stats.drafted, form
            accepted += sum(found.accepted)
    assert accepted > 20, "a test with luck"


def test_a_head_is_replayed_no_further_than_it_was_trained() -> None:
    backbone, _ = lucky()
    head = METHODS["eagle3"].build(backbone, trained_positions=20).eval()
    make = drafter_factory(backbone, head, Dynamic(3, 4, 24))
    texts = []
    for prompt in ([5, 6, 7, 8], [9] * 18, [4, 5] * 15):  # it ends within the answer, within a draft, before both
        text = Generator(backbone).generate(prompt, max_new_tokens=24, eos_token_id=None, do_sample=False).tokens
        texts.append(moments(backbone, make, prompt, text, 3, (3, 4)))
        for form in FORMS:
            stats = (
                Generator(backbone, head, tree=form)
                .generate(prompt, max_new_tokens=24, eos_token_id=None, do_sample=False)
                .stats
            )
            found = replay(texts[-1:], parse_shape(form))
            assert (found.tokens, found.rounds) == (stats.tokens, stats.rounds), form
            assert (list(found.accepted[: len(stats.accepted)]), found.nodes) == (stats.accepted, stats.drafted), form
    assert sum(replay(texts, Chain(3)).accepted) > 0
    assert (acceptance(texts[2:]), rates_of(texts[2:], 1)) == ([], [[0.0]])
    assert acceptance(texts[:1]) != []


def test_other_drafters_are_replayed_as_chains() -> None:
    backbone, _ = lucky()
    prompt = [5, 6, 7, 5, 6, 7]
    text = Generator(backbone).generate(prompt, max_new_tokens=40, do_sample=False).tokens
    for name in ("ngram", "exit:3"):
        known = moments(backbone, drafter_factory(backbone, name, Chain(6)), prompt, text, 6)
        for depth in (1, 2, 5):
            stats = (
                Generator(backbone, name, tree=Chain(depth)).generate(prompt, max_new_tokens=40, do_sample=False).stats
            )
            found = replay([known], Chain(depth))
            assert (found.rounds, sum(found.accepted)) == (stats.rounds, sum(stats.accepted))


def test_rates_and_acceptance_by_hand() -> None:
    texts = [[{"ranks": [0, 1]}, {"ranks": [2]}, {"ranks": []}], [{"ranks": [0]}]]
    rates = rates_of(texts, 2)
    assert rates[0][:3] == [2 / 4, 0, 1 / 4]
    assert rates[1][:2] == [0, 1 / 2]  # the last places of a text have nothing deeper
    assert acceptance(texts) == pytest.approx([2 / 4, 0.0])
    assert replay(texts, None).rounds == 4
    found = replay(texts, Chain(1))
    assert (found.rounds, found.accepted) == (3, (1,))  # the last token of a text is nobody's draft


def test_the_choice() -> None:
    def runs(**speeds: float) -> dict[str, list[Run]]:
        return {name: [Run("one", 100, 100 / speed, 0.0)] for name, speed in speeds.items()}

    assert choice(runs(none=10, chain=15, auto=12)) == "chain"
    assert choice(runs(none=10, chain=15, auto=14.9)) == AUTO
    assert choice(runs(none=10, chain=9, auto=9.9)) == PLAIN
    assert list(spread(list(range(10)), 3)) == [0, 3, 6]  # type: ignore[arg-type]


def prompts_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": text, "category": kind} for kind in ("red", "blue") for text in ("one two", "up down", "sun")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_from_prompts_to_a_default_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone, head = lucky()
    save_head(head, tmp_path / "head")
    head = load_head(tmp_path / "head", backbone)
    questions = read_suite(prompts_file(tmp_path))
    settings = TuneSettings(
        prompts="prompts.jsonl", head="head", limit=4, max_new_tokens=12, runs=2, out=tmp_path / "out"
    )
    found = tune(backbone, head, questions, settings)
    assert len(found.texts) == 4
    assert found.place == tmp_path / "head" / "tuning.json"
    assert set(found.runs) >= {PLAIN, AUTO}
    assert len(found.runs) == 5
    assert all(len(run) == 2 for run in found.runs.values())
    expected = AUTO if found.chosen == PLAIN else found.chosen
    assert str(Generator(backbone, load_head(tmp_path / "head", backbone)).tuned) == expected
    assert tuned.entry(backbone, head)["survival"]
    text, figures = told(found), json.loads(json.dumps(findings(found)))
    assert "| red |" in text
    assert "Kept in" in text
    assert set(figures["prompts"]) == {"red", "blue"}
    assert figures["chosen"] == found.chosen
    assert {one["tree"] for one in figures["settings"]} >= {PLAIN, "chain:1"} - {"chain:1"}

    monkeypatch.setattr(module, "moments", None)  # nothing is recorded twice
    again = tune(backbone, head, questions, settings)
    assert [row["moments"] for row in again.texts] == [row["moments"] for row in found.texts]


def test_an_interruption_loses_one_answer_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone, head = lucky()
    questions = read_suite(prompts_file(tmp_path))
    settings = TuneSettings(
        prompts="p", head="head", limit=6, max_new_tokens=6, runs=1, out=tmp_path / "out", save=False
    )
    real, calls = module.moments, 0

    def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(module, "moments", counted)
    with pytest.raises(KeyboardInterrupt):
        tune(backbone, head, questions, settings)
    tune(backbone, head, questions, settings)
    assert calls == 4 + 3
    with pytest.raises(UserError, match="another setup"):
        tune(backbone, head, questions, TuneSettings(**{**vars(settings), "max_new_tokens": 7}))


def test_lookups_are_tuned_by_name_and_other_drafters_not_kept(tmp_path: Path) -> None:
    backbone, _ = lucky()
    questions = read_suite(prompts_file(tmp_path))
    for name, kept in (("ngram", True), ("exit:2", False)):
        found = tune(
            backbone, name, questions, TuneSettings(prompts="p", head=name, limit=2, max_new_tokens=20, runs=1)
        )
        assert (found.place is not None) == kept
        assert {type(one.shape) for one in found.settings} == {type(None), Chain}
        assert (Generator(backbone, name).tuned is not None) == kept
        assert ("--tree" in told(found)) == (not kept and found.chosen != PLAIN)


@pytest.mark.parametrize("kind", ["one Medusa head", "one draft token"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_smallest_heads_are_tuned(kind: str, temperature: float, tmp_path: Path) -> None:
    backbone, _ = lucky()
    if kind == "one Medusa head":
        head = METHODS["medusa"].build(backbone, num_heads=1)
    else:
        head = METHODS["eagle3"].build(backbone, vocab=DraftVocab([5], zoo.VOCAB))
    settings = TuneSettings(
        prompts="p", head="head", limit=2, max_new_tokens=8, runs=1, rows=2, out=tmp_path / "out",
        temperature=temperature, save=False,
    )  # fmt: skip
    found = tune(backbone, head.eval(), read_suite(prompts_file(tmp_path)), settings)
    depth = 1 if kind == "one Medusa head" else 6
    assert max(one.shape.depth for one in found.settings if one.shape is not None) == depth
    assert set(found.runs) >= {PLAIN, AUTO}
    assert "Acceptance by prompt type" in told(found)


def tuning(plain: float, other: float, **about: Any) -> Tuning:
    """What was found where plain decoding and another setting have these speeds."""
    row = {"group": "one", "prompt_tokens": 9, "tokens": 50, "prefill": 0.1, "moments": [{"ranks": []}] * 49, **about}
    shapes: list[tuple[str, Shape | None]] = [(PLAIN, None), ("chain:1", Chain(1))]
    settings = [Setting(name, shape, replay([row["moments"]], shape), 1.0) for name, shape in shapes]
    runs = {
        name: [Run("one", 100, 100 / speed, 0.0)]
        for name, speed in ((PLAIN, plain), ("chain:1", other), (AUTO, 0.99 * plain))
    }
    return Tuning([row, {**row, "group": "two"}], COSTS, settings, runs, choice(runs), None)


def test_it_says_in_words_when_drafting_does_not_pay() -> None:
    found = " ".join(findings(tuning(10, 8))["advice"])
    assert "not worth it" in found
    assert "0.99 times the speed of plain decoding (1% slower)" in found
    assert "high entropy" in found
    assert "0% of first guesses" in found
    assert "At 2 requests at once nothing pays" in found
    assert "25% faster" in " ".join(findings(tuning(10, 12.5))["advice"])
    assert "answers have 5 tokens" in " ".join(findings(tuning(10, 8, tokens=5))["advice"])
    far = " ".join(findings(tuning(10, 8, moments=[{"ranks": [], "room": 0}] * 49))["advice"])
    assert "one: 100% of the tokens stand behind a longer text" in far
    assert "high entropy" not in far
    reading = " ".join(findings(tuning(10, 8, prefill=49.0, prompt_tokens=900))["advice"])
    assert "50% of the time goes into reading prompts of 900 tokens" in reading


def test_what_cannot_be_tuned_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--head", "ngram"], ["--head", "ngram", "--suite", "a", "--prompts", "b"]):
        assert main(["tune", "--backbone", "nowhere", *words]) == 2
        assert "--suite FILE or --prompts FILE" in capsys.readouterr().err
    for form, message in (("auto", "always run"), ("gain:2x2", "always run"), ("bush", "expected chain")):
        with pytest.raises(UserError, match=message):
            TuneSettings(prompts="p", settings=[form])
    for form, message in (("dynamic:2x5x6", "3 and 4"), ("chain:9", "deeper")):
        with pytest.raises(UserError, match=message):
            candidates([], TuneSettings(prompts="p", settings=[form]), head=True, depth=6)
    with pytest.raises(UserError, match="for heads"):
        candidates([], TuneSettings(prompts="p", settings=["static:0,1"]), head=False, depth=6)
    assert candidates([], TuneSettings(prompts="p", settings=["chain:2"]), head=False, depth=6) == [None, Chain(2)]
    with pytest.raises(UserError, match="for heads"):  # before anything is measured or recorded
        tune(zoo.backbone(), "ngram", [], TuneSettings(prompts="p", head="ngram", settings=["static:0,1"]))
    with pytest.raises(UserError, match="what drafts"):
        tune(zoo.backbone(), None, [], TuneSettings(prompts="p"))
