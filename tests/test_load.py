"""The bench under load: percentiles, arrivals, clients, equality, what is kept, what got slower."""

from __future__ import annotations

import json
import math
import random
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
from headstart.inference import against, latency, load_report, traffic
from headstart.inference import load as module
from headstart.inference.bench import BenchSettings
from headstart.inference.costs import CostModel, Costs
from headstart.inference.engine import Engine
from headstart.inference.load import under_load
from headstart.inference.load_settings import LoadSettings
from headstart.inference.suite import Question, question
from headstart.inference.traffic import Ask, arrivals, served

NEW = 8
COSTS = CostModel({1: Costs({1: 1.0, 3: 1.5}, {1: 0.25, 3: 0.75})})


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return zoo.backbone()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither costs nor pictures of tiny models."""
    monkeypatch.setattr(module, "costs_of", lambda *given: COSTS)
    monkeypatch.setattr("headstart.inference.load_page._drawn", lambda runs: "")


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., BenchSettings]:
    def make(**changes: Any) -> BenchSettings:
        return BenchSettings("s.jsonl", **{"out": tmp_path / "out", "max_new_tokens": NEW, "warm_up": 0, **changes})

    return make


def questions(count: int = 5) -> list[Question]:
    rows = [{"question_id": n, "category": "ab"[n % 2], "turns": ["red blue " * (n + 1)]} for n in range(count)]
    return [question(row, n + 1, "s") for n, row in enumerate(rows)]


def runs_of(report: dict[str, Any]) -> dict[tuple[str, str, float], dict[str, Any]]:
    return {(run["side"], run["load"], run["temperature"]): run for run in report["runs"]}


# -- figures by hand -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([7.0], 99, 7.0),
        ([4.0, 1.0, 3.0, 2.0], 50, 2.5),
        ([4.0, 1.0, 3.0, 2.0], 90, 3.7),  # place 2.7 of 0..3
        ([1.0, 2.0, 3.0, 4.0, 5.0], 0, 1.0),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 100, 5.0),
        (list(map(float, range(1, 102))), 99, 100.0),
        ([], 50, None),
    ],
)
def test_percentiles(values: list[float], percent: float, expected: float | None) -> None:
    found = latency.percentile(values, percent)
    assert found == (expected if expected is None else pytest.approx(expected))


def row(came: list[list[float]], asked: float = 1.0, rounds: int = 2, **more: Any) -> dict[str, Any]:
    tokens = [5] * int(sum(count for _, count in came))
    known = {"key": "u", "stretch_seconds": 10.0, "group": "g", "peak_bytes": 2**20, "slot_bytes": 0}
    about = {"rounds": rounds, "accepted": len(tokens) - 1 - rounds, "same": True, "difference": None}
    return {**known, "asked": asked, "came": came, "tokens": tokens, **about, **more}


def test_latencies_acceptance_and_throughput_by_hand() -> None:
    one = row([[1.5, 1], [2.0, 3], [2.5, 1]])  # first 0.5, end 1.5, 4 tokens in 1.0 s, gaps 0.5 and 0.5
    two = row([[3.0, 1], [4.0, 1]], asked=2.0, rounds=1)  # first 1.0, end 2.0, 1 token in 1.0 s, a gap of 1.0
    found = latency.run_figures([one, two, row([[2.0, 1]], rounds=0)])  # first = end = 1.0, no pace
    assert (found["requests"], found["tokens"], found["seconds"]) == (3, 8, 10.0)
    assert (found["requests_per_second"], found["tokens_per_second"]) == (0.3, 0.8)
    assert found["first"] == pytest.approx({"p50": 1.0, "p90": 1.0, "p99": 1.0})
    assert found["between"] == pytest.approx({"p50": 0.625, "p90": 0.925, "p99": 0.9925})
    assert found["pieces"] == pytest.approx({"p50": 0.5, "p90": 0.9, "p99": 0.99})
    assert found["end"] == pytest.approx({"p50": 1.5, "p90": 1.9, "p99": 1.99})
    assert found["acceptance_length"] == pytest.approx(1 + 2 / 3)  # sums: 2 accepted in 3 rounds
    assert found["acceptance_length_macro"] == pytest.approx((2.0 + 1.0) / 2)
    assert found["groups"]["g"]["stream_tokens_per_second"] == pytest.approx(8 / 4.5)


def test_the_formula_by_hand() -> None:
    """Two nodes and one depth a round: verification 1.25, drafting 0.25, 1.5 tokens: as fast as plain."""
    parts = {"prefill": 1.0, "draft": 1.0, "verify": 5.0, "rest": 0.0}
    ours = row([[2.0, 1], [3.0, 6]], rounds=4, drafted=4, depths=4, drafting=4, seconds=parts)  # 2 accepted
    plain = row([[2.0, 1], [3.0, 3]], rounds=3, drafted=0, depths=0, seconds={**parts, "draft": 0.0, "verify": 4.0})
    found = latency.formula([ours], [plain], COSTS, 1)
    assert found is not None
    assert (found["nodes"], found["depth"], found["acceptance_length"]) == (2.0, 1.0, 1.5)
    assert (found["verify_steps"], found["draft_steps"]) == (1.25, 0.25)
    assert found["predicted_decode"] == pytest.approx(1.0)
    assert found["measured_decode"] == pytest.approx((4.0 / 3 * 6) / 6)  # plain takes 8 s for 6 tokens, ours 6
    assert found["predicted"] == pytest.approx((1 + 8) / (1 + 8))
    assert found["measured"] == pytest.approx((1 + 8) / (1 + 6))
    seldom = latency.formula([{**ours, "drafting": 2, "drafted": 2, "depths": 2}], [plain], COSTS, 1)
    assert seldom is not None
    assert (seldom["drafting"], seldom["nodes"], seldom["depth"]) == (0.5, 2.0, 1.0)
    assert seldom["predicted_decode"] == pytest.approx(1.5 / (0.5 * 1.5 + 0.5))  # every second round is a plain one


# -- requests come ---------------------------------------------------------------------------------------------------


def test_arrivals_are_seeded_and_poisson() -> None:
    times = arrivals(4000, 2.0, 3)
    assert times == arrivals(4000, 2.0, 3) != arrivals(4000, 2.0, 4)
    assert times[:5] == arrivals(5, 2.0, 3), "more requests change nothing of the first ones"
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    assert min(gaps) > 0
    assert mean == pytest.approx(0.5, rel=0.06)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.15)  # exponential
    assert sum(gap > 0.5 for gap in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.03)  # e^-1


def asks(backbone: Backbone, count: int) -> list[Ask]:
    return [Ask(backbone.encode("red " * (n + 1)), {"max_new_tokens": 3 + n, "do_sample": False}) for n in range(count)]


def test_a_closed_loop_has_so_many_requests_on_their_way(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, seen, right = Engine(backbone, max_rows=8), [], Engine.step

    def step(self: Engine) -> bool:
        seen.append(self.running + self.waiting)
        return right(self)

    monkeypatch.setattr(Engine, "step", step)
    ticks: list[int] = []
    rows = served(engine, asks(backbone, 7), clients=3, tick=lambda: ticks.append(1))
    assert len(rows) == len(ticks) == 7
    assert max(seen) == 3
    assert seen[0] == 3
    for one in rows:
        assert one["asked"] <= one["came"][0][0] <= one["came"][-1][0]
        assert sum(count for _, count in one["came"]) == len(one["tokens"]) == 1 + one["rounds"] + one["accepted"]


def test_an_open_loop_counts_from_when_requests_were_due(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    right = Engine.step

    def step(self: Engine) -> bool:
        now[0] += 1.0
        return right(self)

    monkeypatch.setattr(traffic, "perf_counter", lambda: now[0])
    monkeypatch.setattr("headstart.inference.request.perf_counter", lambda: now[0])
    monkeypatch.setattr(traffic, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(Engine, "step", step)
    rows = served(Engine(backbone, max_rows=1), asks(backbone, 2), times=[0.25, 0.5])
    assert [one["asked"] for one in rows] == [0.25, 0.5]
    first, second = (one["came"] for one in rows)
    assert first[0][0] == 1.25, "it slept until the first was due, and a step takes a second"
    assert second[0][0] > first[-1][0], "the second waits for the only row"


# -- the whole bench -------------------------------------------------------------------------------------------------


def test_every_side_has_the_answers_of_each_request_alone(backbone: Backbone, settings: Any) -> None:
    torch.manual_seed(1)
    head = METHODS["eagle3"].build(backbone).eval()
    load = LoadSettings("1,3", "200", "0,1", stretch=5, max_rows=2)
    report = under_load(backbone, head, questions(), settings(head="h"), load, assistant="exit:2")
    runs = runs_of(report)
    both = {("alone", "closed:1"), ("lookup", "closed:1"), ("assisted", "closed:1"), ("generate", "closed:1")}
    both |= {("generate", "closed:3"), *((side, at) for side in ("plain", "engine") for at in ("closed:1", "closed:3"))}
    both |= {("plain", "open:200"), ("engine", "open:200")}
    assert runs.keys() == {(*pair, temperature) for pair in both for temperature in (0.0, 1.0)}
    for (side, _, temperature), run in runs.items():
        assert run["failed"] == []
        assert run["requests"] == 5
        comparable = side != "alone" and (not temperature or side in ("plain", "engine"))
        assert (run["compared"], run["identical"]) == ((5, 5) if comparable else (0, 0)), side
        assert run["groups"].keys() == {"a", "b"}
    assert runs["plain", "closed:3", 0.0]["acceptance_length"] == 1
    assert runs["generate", "closed:1", 0.0]["over_generate"] == 1
    assert runs["engine", "closed:1", 0.0]["formula"]["predicted"] > 0
    assert report["measured"] == report["units"]
    text = load_report.summary(report)
    assert "predicted" in text
    page = (settings().out / "load.html").read_text()
    assert "By category" in page
    assert "closed:3" in page
    assert json.loads((settings().out / "load_report.json").read_text()) == report


def test_a_wrong_answer_is_seen_and_judged(backbone: Backbone, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = module.served

    def wrong(*given: Any, **more: Any) -> list[dict[str, Any]]:
        rows = right(*given, **more)
        rows[1]["tokens"][3] = (rows[1]["tokens"][3] + 1) % zoo.VOCAB
        return rows

    monkeypatch.setattr(module, "served", wrong)
    report = under_load(backbone, "ngram", questions(3), settings(), LoadSettings("2", sides="engine"))
    run = runs_of(report)["engine", "closed:2", 0.0]
    assert (run["compared"], run["identical"], run["mismatches"]) == (3, 2, 1)
    assert "2/3, 1 wrong" in load_report.summary(report)


def test_an_interrupted_bench_keeps_what_is_done(backbone: Backbone, settings: Any, monkeypatch: Any) -> None:
    right, made = module.Bench._answers, list[str]()

    def watched(self: Any, unit: Any, *given: Any) -> Any:
        made.append(unit.key)
        if len(made) == 5:
            raise KeyboardInterrupt
        return right(self, unit, *given)

    monkeypatch.setattr(module.Bench, "_answers", watched)
    load = LoadSettings("2", stretch=2, sides="plain,engine")
    ask = lambda: under_load(backbone, "ngram", questions(), settings(), load)  # noqa: E731
    with pytest.raises(KeyboardInterrupt):
        ask()
    kept = json.loads((settings().out / "load_report.json").read_text())
    assert (kept["measured"], kept["units"]) == (4, 9)  # 3 stretches of 3 sides
    assert "interrupted: 4 of 9" in load_report.summary(kept)
    report = ask()
    assert len(made) == len(set(made)) + 1 == 10
    assert report["measured"] == 9
    assert all(run["requests"] == 5 for run in report["runs"])
    made.clear()
    ask()
    assert made == []


def test_a_peer_and_a_side_that_fails(backbone: Backbone, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = ModuleType("mine")

    def decode(model: Any, tokenizer: Any, ids: list[int], max_new_tokens: int, temperature: float) -> Any:
        assert temperature == 0
        found = model.generate(torch.tensor([ids]), max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0)
        return found[0, len(ids) :].tolist()

    def broken(*given: Any, **more: Any) -> Any:
        raise RuntimeError("no kernel")

    mine.decode, mine.broken = decode, broken  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mine", mine)
    load = LoadSettings("1", sides="generate", peer=["mine:decode", "mine:broken"])
    report = under_load(backbone, None, questions(2), settings(), load)
    runs = runs_of(report)
    assert runs["peer mine:decode", "closed:1", 0.0]["identical"] == 2
    failed = runs["peer mine:broken", "closed:1", 0.0]
    assert (failed["requests"], failed["failed"]) == (0, ["RuntimeError: no kernel"])
    assert "no kernel" in load_report.summary(report)
    with pytest.raises(UserError, match="peer: mine:nothing"):
        under_load(backbone, None, questions(1), settings(), LoadSettings(peer=["mine:nothing"]))


def test_questions_that_do_not_fit_are_left_out(settings: Any) -> None:
    small = zoo.backbone(max_position_embeddings=48)
    asked = [question("red", 1, "s"), question("red " * 60, 2, "s")]
    report = under_load(small, None, asked, settings(), LoadSettings("1", sides="plain"))
    assert report["left_out"] == 1
    assert "1 questions are longer" in load_report.summary(report)
    with pytest.raises(UserError, match="engines run no compiled rounds"):
        under_load(small, None, asked, settings(compile=True), LoadSettings("1"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"concurrency": "1,x"}, "concurrency is 1,x"),
        ({"concurrency": "0"}, "1 or more"),
        ({"concurrency": "1.5"}, "no whole number"),
        ({"rate": "0"}, "above 0"),
        ({"temperature": "-1"}, "0 or more"),
        ({"sides": "plain,vllm"}, "there is no vllm"),
        ({"stretch": 0}, "stretch is 0"),
    ],
)
def test_flags_out_of_range_are_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        LoadSettings(**given)


# -- against an earlier one ------------------------------------------------------------------------------------------


def made(
    slower: float | list[float] = 1.0, machine: list[float] | None = None, count: int = 30, repeats: int = 2
) -> dict[str, Any]:
    """A report with two sides, whose answers take 1 to 1.5 seconds for 10 tokens, times that in each repetition."""
    repeats = len(slower) if isinstance(slower, list) else len(machine or [1.0] * repeats)
    machine = machine or [1.0] * repeats
    slow = slower if isinstance(slower, list) else [slower] * repeats

    def answers(factors: list[float]) -> list[Any]:
        return [
            [f"q{n}", repeat, 10, 0.1 * factor, 0.1 * factor, (1 + n % 6 / 10) * factor]
            for repeat, factor in enumerate(factors)
            for n in range(count)
        ]

    sides = {"generate": answers(machine), "engine": answers([a * b for a, b in zip(machine, slow, strict=True)])}
    runs = [{"side": side, "load": "closed:1", "temperature": 0.0, "answers": some} for side, some in sides.items()]
    return {"date": "2026-01-01", "setup": {"torch": "1"}, "runs": runs}


def whole(now: dict[str, Any], before: dict[str, Any]) -> against.Change:
    """What became of the engine's seconds a token."""
    (found,) = [one for one in against.changes(now, before) if one.name[0] == "engine" and one.figure == "a token"]
    return found


def test_what_got_slower_is_told_and_what_did_not_is_not() -> None:
    assert {one.verdict for one in against.changes(made(), made())} == {"same"}
    slow = [one for one in against.changes(made(1.3), made()) if one.verdict == "slower"]
    assert {one.name[0] for one in slow} == {"engine"}
    assert "a token" in {one.figure for one in slow}
    assert next(one for one in slow if one.figure == "a token").ratio == pytest.approx(1.3)
    assert {one.verdict for one in against.changes(made(0.7), made()) if one.name[0] == "engine"} == {"faster"}
    text = against.told({**made(1.3), "setup": {"torch": "2"}}, made())
    assert "slower beyond noise:\n  engine, closed:1, temperature 0: a token 1.30 times the time" in text
    assert "torch: was '1', is '2'" in text


def test_a_slow_machine_is_told_and_held_against_nobody() -> None:
    found = against.changes(made(machine=[1.5, 1.5]), made())
    assert {one.verdict for one in found if one.name[0] == "engine"} == {"same"}
    assert "the machine, by generate alone: 1.50 times" in against.told(made(machine=[1.5, 1.5]), made())


def test_scatter_is_no_slowness() -> None:
    """A few answers that took twice as long, others half as long, are within the band of chance."""
    now = made()
    for n, answer in enumerate(now["runs"][1]["answers"]):
        answer[5] *= 2.0 if n % 5 == 0 else 0.82
    found = whole(now, made())
    assert found.low < 1 < found.high
    assert found.verdict == "same"


def test_one_repetition_cannot_tell() -> None:
    """Two runs of the same code on a busy machine were 1.46 times apart."""
    for now, before in ((made(1.46, repeats=1), made()), (made(1.46), made(repeats=1))):
        assert whole(now, before).verdict == "unknown"
        text = against.told(now, before)
        assert "nothing slower beyond noise" in text
        assert "cannot tell, as one of the runs has no repetitions" in text
        assert "engine, closed:1, temperature 0: a token 1.46 times" in text
    assert whole(made(repeats=1), made(repeats=1)).verdict == "same"
    assert "cannot tell" not in against.told(made(repeats=1), made(repeats=1))


def test_repetitions_that_lie_apart_are_noise() -> None:
    """Student's t by hand: logarithms 0 and ln 1.5 in both runs, the means ln 1.4 apart."""
    restless, other = made([1.0, 1.5]), made([1.4, 2.1])
    found = whole(other, restless)
    half = 4.30 * math.log(1.5) / math.sqrt(2)  # spread sqrt(2 (ln 1.5 / 2)^2), two repetitions each
    assert (found.ratio, found.verdict) == (pytest.approx(1.4), "same")
    assert (found.low, found.high) == (pytest.approx(1.4 / math.exp(half)), pytest.approx(1.4 * math.exp(half)))
    assert whole(made([1.40, 1.42, 1.41]), made([1.0, 1.02, 1.01])).verdict == "slower"
    assert whole(made([0.70, 0.72, 0.71]), made([1.0, 1.02, 1.01])).verdict == "faster"


def test_a_machine_whose_speed_changes_between_repetitions_is_no_noise() -> None:
    busy, calm = [1.0, 1.9, 1.3], [1.1, 0.8, 1.0]
    assert whole(made(1.2, busy), made(1.0, calm)).verdict == "slower"
    same = whole(made(1.0, busy), made(1.0, calm))
    assert (same.ratio, same.verdict) == (pytest.approx(1.0), "same")


def test_the_same_code_on_a_restless_machine_is_seldom_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(against, "DRAWS", 20)  # all questions fare alike here
    chance, wrong = random.Random(0), 0
    for _ in range(40):
        runs = [made([math.exp(chance.gauss(0, 0.2)) for _ in range(3)], count=8) for _ in range(2)]
        wrong += whole(*runs).verdict != "same"
    assert wrong <= 4  # 5% are to be expected


def test_drift_at_a_side_of_transformers_is_noise_for_ours() -> None:
    def drifting(factor: float) -> dict[str, Any]:
        other = made(slower=factor)["runs"][1]["answers"]
        now = made(slower=1.15 if factor > 1 else 1.0)
        return {**now, "runs": [*now["runs"], {**now["runs"][0], "load": "closed:4", "answers": other}]}

    found = [one for one in against.changes(drifting(1.2), drifting(1.0)) if one.figure == "a token"]
    assert {one.name[:2]: one.verdict for one in found} == {
        ("generate", "closed:1"): "same", ("generate", "closed:4"): "slower", ("engine", "closed:1"): "same",
    }  # fmt: skip


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    assert "nothing to compare" in against.told(made(count=3), made(count=3))
    with pytest.raises(UserError, match="no report of a bench"):
        against.read_report(tmp_path)
    (tmp_path / "report.json").write_text('{"all": {}}')
    with pytest.raises(UserError, match="holds no answers"):
        against.read_report(tmp_path)
    (tmp_path / "report.json").write_text(json.dumps(made()))
    assert against.read_report(tmp_path) == made()
