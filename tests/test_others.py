"""Further sides of a bench: who they are, what is kept of them, what fails."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import zoo
from headstart.errors import UserError
from headstart.heads.backbone import Backbone
from headstart.heads.methods import METHODS
from headstart.inference import load_report, report
from headstart.inference.bench import BenchSettings, bench
from headstart.inference.load import under_load
from headstart.inference.load_settings import LoadSettings
from headstart.inference.others import _counts, is_rival, parted
from headstart.inference.suite import Question, question

NEW = 10


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return zoo.backbone()


@pytest.fixture(autouse=True)
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.inference.report.draw", lambda made, path: False)
    monkeypatch.setattr("headstart.inference.load_page._drawn", lambda runs: "")


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., BenchSettings]:
    def make(**changes: Any) -> BenchSettings:
        return BenchSettings("s.jsonl", **{"out": tmp_path / "out", "max_new_tokens": NEW, "warm_up": 0, **changes})

    return make


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A module `mine` with a decoder that gives runs of two, one that gives all at once, and one that breaks."""
    made, asked = ModuleType("mine"), list[int]()

    def decode(model: Any, tokenizer: Any, ids: list[int], max_new_tokens: int, temperature: float) -> Any:
        found = model.generate(torch.tensor([ids]), max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0)
        return found[0, len(ids) :].tolist()

    def runs(*given: Any, **more: Any) -> Any:
        tokens = decode(*given, **more)
        yield from (tokens[at : at + 2] for at in range(0, len(tokens), 2))

    def broken(*given: Any, **more: Any) -> Any:
        asked.append(1)
        if len(asked) == 2:
            raise RuntimeError("no kernel")
        return decode(*given, **more)

    made.decode, made.runs, made.broken = decode, runs, broken  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mine", made)
    return asked


def questions(count: int = 3) -> list[Question]:
    return [question({"turns": [f"red blue {n} red blue"], "category": "ab"[n % 2]}, n + 1, "s") for n in range(count)]


def test_names_are_taken_apart(tmp_path):
    assert parted("ngram") == ("ngram", None)
    assert parted("runs/a/head@dynamic:3x3x6") == ("runs/a/head", "dynamic:3x3x6")
    assert parted("hybrid:runs/a@auto") == ("hybrid:runs/a", "auto")
    odd = tmp_path / "a@b"
    odd.mkdir()
    assert parted(str(odd)) == (str(odd), None)
    assert [is_rival(name) for name in ("lookup", "peer:a:b", "ngram", "none")] == [1, 1, 0, 0]


def test_runs_tell_what_was_accepted():
    assert _counts([1, 3, 2, 1]) == {"rounds": 4, "drafted": 0, "offered": [], "accepted": [2, 1]}
    assert _counts([1, 1])["accepted"] == []
    assert _counts([7]) == {"rounds": 0, "drafted": 0, "offered": [], "accepted": []}, "all at once tells nothing"


def test_every_side_takes_part_and_has_the_figures_of_a_bench(backbone, settings, peers):
    torch.manual_seed(1)
    head = METHODS["eagle3"].build(backbone).eval()
    names = ["none", "suffix", "h@chain:2", "lookup", "peer:mine:decode", "peer:mine:runs"]
    others = {"none": None, "suffix": "suffix", "h@chain:2": head}
    made = bench(backbone, "ngram", questions(), settings(head="ngram", also=names, repeats=2), others=others)
    assert list(made["also"]) == names
    assert made["setup"]["also"]["h@chain:2"]["tree"] == "chain:2"
    assert made["setup"]["also"]["h@chain:2"]["drafter"] == "h (eagle3)"
    alone = bench(backbone, head, questions(), settings(head="h", tree="chain:2", out=settings().out / "b"))
    for name, one in made["also"].items():
        whole = one["all"]["overall"]
        assert (whole["answers"], whole["identical"], one["mismatches"], one["failed"]) == (3, 3, 0, []), name
        assert whole["plain_seconds"] == made["all"]["overall"]["plain_seconds"]
        assert whole["tokens"] == whole["plain_tokens"]
        assert whole["speedup"] > 0
        assert len(whole["speedup_by_repetition"]) == 2
        assert one["all"]["groups"].keys() == {"a", "b"}
        assert (whole["costs"] is None) == is_rival(name)
    for figure in ("rounds", "accepted", "offered", "drafted", "acceptance_length"):
        assert made["also"]["h@chain:2"]["all"]["overall"][figure] == alone["all"]["overall"][figure]
    assert made["also"]["peer:mine:decode"]["all"]["overall"]["acceptance_length"] is None
    assert made["also"]["peer:mine:runs"]["all"]["overall"]["acceptance_length"] == 2
    text = report.markdown(made)
    assert "## Further sides of the same run" in text
    assert "| h@chain:2 | chain:2 |" in text
    assert "peer:mine:runs: " in report.summary(made)
    assert {run["side"] for run in made["runs"]} == {"generate", "headstart", *names}
    assert json.loads((settings().out / "report.json").read_text()) == made


def test_who_goes_first_changes_among_all(backbone, settings, monkeypatch):
    order: list[str] = []
    module = sys.modules[bench.__module__]
    right = module.answer_ours, module.answer_plainly
    monkeypatch.setattr(module, "answer_plainly", lambda *given: order.append("generate") or right[1](*given))
    monkeypatch.setattr(
        module, "answer_ours", lambda one, *given: order.append(str(one._intake.drafter)) or right[0](one, *given)
    )
    bench(backbone, "ngram", questions(3), settings(also=["suffix"]), others={"suffix": "suffix"})
    assert order[0:9:3] == ["generate", "ngram", "suffix"]
    assert [sorted(order[at : at + 3]) for at in (0, 3, 6)] == [["generate", "ngram", "suffix"]] * 3


def test_a_side_that_fails_is_told_and_left_out(backbone, settings, peers):
    made = bench(backbone, None, questions(), settings(also=["peer:mine:broken"]))
    one = made["also"]["peer:mine:broken"]
    assert one["failed"] == ["RuntimeError: no kernel"]
    assert one["all"]["overall"]["answers"] == 2
    assert made["all"]["overall"]["answers"] == 3
    assert "peer:mine:broken failed: RuntimeError: no kernel" in report.markdown(made)
    assert "no kernel" in report.summary(made)


def test_other_sides_are_another_setup_and_none_twice(backbone, settings):
    others = {"suffix": "suffix", "none": None}
    bench(backbone, "ngram", questions(1), settings(also=["suffix"]), others=others)
    with pytest.raises(UserError, match="also was"):
        bench(backbone, "ngram", questions(1), settings(also=["none"]), others=others)
    bench(backbone, "ngram", questions(2), settings(also=["suffix"]), others=others)
    with pytest.raises(UserError, match="suffix is named twice"):
        bench(backbone, "ngram", questions(1), settings(also=["suffix", "suffix"]), others=others)
    with pytest.raises(UserError, match="peer: nothing:here"):
        bench(backbone, "ngram", questions(1), settings(also=["peer:nothing:here"]), others=others)


def test_half_precision_is_compared_and_not_judged(settings, monkeypatch):
    half = zoo.backbone()
    half = Backbone(half.model.to(torch.bfloat16), half.tokenizer, name="half")
    module = sys.modules[bench.__module__]
    right = module.answer_ours

    def wrong(one: Any, ids: list[int], limit: int) -> Any:
        found = right(one, ids, limit)
        return found._replace(tokens=[*found.tokens[:-1], 90]) if one._intake.drafter == "suffix" else found

    monkeypatch.setattr(module, "answer_ours", wrong)
    made = bench(half, None, questions(1), settings(also=["suffix"]), others={"suffix": "suffix"})
    one = made["also"]["suffix"]
    assert one["mismatches"] is None
    assert one["all"]["overall"]["identical"] == 0


def test_further_engines_under_load(backbone, settings, peers):
    load = LoadSettings("2", temperature="1", sides="plain")
    asked = settings(head="ngram", also=["suffix", "ngram@chain:1", "peer:mine:runs"])
    others = {"suffix": "suffix", "ngram@chain:1": "ngram"}
    made = under_load(backbone, "ngram", questions(), asked, load, others=others)
    runs = {(run["side"], run["load"]): run for run in made["runs"]}
    assert runs.keys() == {
        ("alone", "closed:1"), ("plain", "closed:2"), ("suffix", "closed:2"), ("ngram@chain:1", "closed:2"),
        ("peer:mine:runs", "closed:1"),
    }  # fmt: skip
    assert (runs["suffix", "closed:2"]["identical"], runs["suffix", "closed:2"]["compared"]) == (3, 3)
    assert made["setup"]["also"]["ngram@chain:1"]["tree"] == "chain:1"


def test_looping_answers_are_left_out_under_load():
    def row(side: str, of: str, tokens: list[int], seconds: float) -> dict[str, Any]:
        at = {"side": side, "load": "closed:1", "temperature": 0.0, "key": side, "stretch_seconds": 9.0, "repeat": 0}
        rest = {"of": of, "group": "g", "asked": 0.0, "came": [[seconds, len(tokens)]], "rounds": 5, "accepted": 5}
        return {**at, **rest, "tokens": tokens, "slot_bytes": 0, "peak_bytes": None}

    loop, fine = [*range(10), *range(10)], list(range(20))
    rows = [row(side, of, said, took) for side, took in (("alone", 4.0), ("generate", 4.0), ("engine", 2.0))
            for of, said, took in (("a", loop, took / 4), ("b", fine, took))]  # fmt: skip
    made = load_report.report(rows, {"backbone": "b"}, None, {"units": 1, "measured": 1})
    engine = next(run for run in made["runs"] if run["side"] == "engine")
    assert made["looping"] == 1
    assert (engine["seen"]["requests"], engine["without_loops"]["requests"]) == (2, 1)
    assert engine["seen"]["stream_tokens_per_second"] == pytest.approx(40 / 2.5)
    assert engine["without_loops"]["stream_tokens_per_second"] == pytest.approx(10)
    assert engine["without_loops"]["over_generate"] == pytest.approx(2)
    assert engine["without_loops"]["groups"]["g"]["requests"] == 1
