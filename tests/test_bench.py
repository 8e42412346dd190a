"""The comparison: same prompts for both sides, in turn; rows that survive an interruption; differences told."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from headstart.errors import UserError
from headstart.heads.backbone import Backbone
from headstart.heads.methods import METHODS
from headstart.inference import bench as module
from headstart.inference.bench import BenchSettings, Timed, bench
from headstart.inference.generator import Generator
from headstart.inference.rows import opened
from headstart.inference.suite import Question, question

NEW = 12
TIMED = ("plain", "ours")  # the fields of a row that hold times, beside tokens


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return zoo.backbone()


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., BenchSettings]:
    def make(**changes: Any) -> BenchSettings:
        return BenchSettings("suite.jsonl", **{"out": tmp_path / "out", "max_new_tokens": NEW, "warm_up": 0, **changes})

    return make


def questions(count: int = 4) -> list[Question]:
    """Every second one has two turns."""
    turns = (["red blue", f"{n}"] if n % 2 else [f"red blue {n}"] for n in range(count))
    return [question({"question_id": n, "category": "qa", "turns": said}, n + 1, "s") for n, said in enumerate(turns)]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def timeless(folder: Path) -> list[dict[str, Any]]:
    """The rows without their times."""
    return [{**row, **{side: row[side]["tokens"] for side in TIMED if side in row}} for row in rows_of(folder)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[int], int]]:
    """Who was asked what, in order; both sides do their work."""
    made: list[tuple[str, list[int], int]] = []

    def watched(side: str, ask: Callable[..., Timed]) -> Callable[..., Timed]:
        def asked(one: Any, ids: list[int], limit: int) -> Timed:
            made.append((side, list(ids), limit))
            return ask(one, ids, limit)

        return asked

    monkeypatch.setattr(module, "answer_plainly", watched("plain", module.answer_plainly))
    monkeypatch.setattr(module, "answer_ours", watched("ours", module.answer_ours))
    return made


@pytest.fixture(autouse=True)
def no_picture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures take longer than tiny models do; one test has them."""
    if request.node.name != "test_everything_lies_in_the_folder":
        monkeypatch.setattr("headstart.inference.report.draw", lambda made, path: False)


def test_both_sides_get_the_same_prompts_in_alternating_order(backbone, settings, calls):
    bench(backbone, "ngram", questions(), settings(repeats=2))
    assert [side for side, _, _ in calls[:8]] == ["plain", "ours", "ours", "plain", "ours", "plain", "plain", "ours"]
    for first, second in zip(calls[::2], calls[1::2], strict=True):
        assert {first[0], second[0]} == {"plain", "ours"}
        assert first[1:] == second[1:]


def test_a_later_turn_follows_the_plain_answer(backbone, settings, monkeypatch):
    asked = question({"turns": ["red blue", "more"]}, 1, "s")
    right = module.answer_ours

    def wrong(generator: Generator, ids: list[int], limit: int) -> Timed:
        found = right(generator, ids, limit)
        return found._replace(tokens=[*found.tokens[:3], (found.tokens[3] + 1) % zoo.VOCAB])

    monkeypatch.setattr(module, "answer_ours", wrong)
    report = bench(backbone, None, [asked], settings())
    first, second = rows_of(settings().out)
    chat = [{"role": "user", "content": "red blue"}]
    plain = Generator(backbone).generate(chat, max_new_tokens=NEW, temperature=0)
    assert first["plain"]["tokens"] == plain.tokens
    chat += [{"role": "assistant", "content": plain.text}, {"role": "user", "content": "more"}]
    assert second["prompt_tokens"] == len(backbone.encode(chat))
    assert report["all"]["overall"]["identical"] == 0


@pytest.mark.parametrize("drafter", ["none", "ngram", *METHODS])
def test_rows_say_what_happened(backbone, settings, drafter):
    head = METHODS[drafter].build(backbone) if drafter in METHODS else None if drafter == "none" else drafter
    report = bench(backbone, head, questions(), settings(head=drafter))
    rows = rows_of(settings().out)
    assert [(row["question"], row["turn"], row["turns"]) for row in rows] == [
        ("0", 1, 1), ("1", 1, 2), ("1", 2, 2), ("2", 1, 1), ("3", 1, 2), ("3", 2, 2)
    ]  # fmt: skip
    for row in rows:
        assert row["ours"]["tokens"] == row["plain"]["tokens"], "greedy in fp32"
        assert row["difference"] is None
        assert len(row["ours"]["tokens"]) == 1 + row["rounds"] + sum(row["accepted"])
        assert row["ours"]["seconds"][0] >= sum(row["ours"][part][0] for part in ("prefill", "draft", "verify"))
        assert row["plain"]["seconds"][0] > row["plain"]["prefill"][0] > 0
    overall = report["all"]["overall"]
    assert (overall["questions"], overall["answers"], overall["identical"]) == (4, 6, 6)
    assert overall["acceptance_length"] >= 1
    if drafter == "none":
        assert overall["acceptance_length"] == 1
    assert report["setup"]["drafter"] == (f"{drafter} ({drafter})" if drafter in METHODS else drafter)
    assert report["setup"]["dtype"] == "float32"
    assert json.loads((settings().out / "report.json").read_text()) == report


class Interrupted:
    """A drafter that is stopped at its n-th request."""

    taps: tuple[int, ...] = ()

    def __init__(self, at: int) -> None:
        self.left = at

    def start(self, prompt: list[int]) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt

    def advance(self, features: Any, next_ids: list[int]) -> None:
        self.last = next_ids[-1]

    def draft(self, budget: int) -> Any:
        from headstart.inference.tree import Tree

        return Tree.chain([self.last, 5, 6][: budget + 1])


def test_an_interrupted_bench_goes_on_as_if_undisturbed(backbone, settings, tmp_path, calls):
    asked = questions(6)
    whole = bench(backbone, Interrupted(0), asked, settings(out=tmp_path / "whole"))
    undisturbed = list(calls)
    calls.clear()
    with pytest.raises(KeyboardInterrupt):
        bench(backbone, Interrupted(6), asked, settings())  # in the second turn of question 3
    assert [row["question"] for row in rows_of(settings().out)] == ["0", "1", "1", "2"]
    assert not (settings().out / "report.md").exists()
    before = calls[:8]
    calls.clear()
    resumed = bench(backbone, Interrupted(0), asked, settings())
    assert before + calls == undisturbed, "nothing twice, nothing left out, and the same order within pairs"
    assert timeless(settings().out) == timeless(tmp_path / "whole")
    for figure in ("accepted", "rounds", "tokens", "plain_tokens", "acceptance_length", "identical", "acceptance"):
        assert resumed["all"]["overall"][figure] == whole["all"]["overall"][figure]


def test_a_torn_end_is_cut_off_and_measured_again(backbone, settings, calls):
    bench(backbone, "ngram", questions(), settings())
    path = settings().out / "rows.jsonl"
    whole, lines = path.read_bytes(), path.read_bytes().splitlines(keepends=True)
    kept = timeless(settings().out)
    for torn in (whole[:-1], whole[:-40], b"".join(lines[:-1]), b"".join(lines[:-1]) + b'{"que'):
        path.write_bytes(torn)
        calls.clear()
        bench(backbone, "ngram", questions(), settings())
        assert len(calls) == 4, "both turns of the last question, both sides"
        assert timeless(settings().out) == kept


def test_a_finished_bench_is_reported_again_without_work(backbone, settings, calls):
    first = bench(backbone, "ngram", questions(), settings(warm_up=1))
    (settings().out / "report.md").unlink()
    calls.clear()
    again = bench(backbone, "ngram", questions(), settings(warm_up=1))
    assert calls == []
    assert again == first
    assert (settings().out / "report.md").exists()


def test_a_higher_limit_adds_rows_and_a_lower_one_reports_fewer(backbone, settings, calls):
    bench(backbone, "ngram", questions(), settings(limit=2))
    calls.clear()
    assert bench(backbone, "ngram", questions(), settings(limit=3))["all"]["overall"]["questions"] == 3
    assert len(calls) == 2
    assert bench(backbone, "ngram", questions(), settings(every=2))["all"]["overall"]["questions"] == 2
    assert len(calls) == 2, "questions 0 and 2 are there"


def test_rows_of_another_setup_are_not_added_to(backbone, settings):
    bench(backbone, "ngram", questions(2), settings())
    before = (settings().out / "rows.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"max_new_tokens was 12, is now 9.*--restart"):
        bench(backbone, "ngram", questions(2), settings(max_new_tokens=9))
    with pytest.raises(UserError, match=r"drafter was 'ngram', is now 'none'; tree was 'chain:5', is now None"):
        bench(backbone, None, questions(2), settings())
    with pytest.raises(UserError, match="weights was"):
        bench(zoo.backbone(seed=1), "ngram", questions(2), settings())
    assert (settings().out / "rows.jsonl").read_bytes() == before
    bench(backbone, "ngram", questions(2), settings(max_new_tokens=9, restart=True))
    assert max(len(row["plain"]["tokens"]) for row in rows_of(settings().out)) <= 9


def test_a_head_trained_again_is_another_setup(backbone, settings):
    head = METHODS["medusa"].build(backbone)
    bench(backbone, head, questions(1), settings(head="run"))
    with torch.no_grad():
        next(iter(head.parameters()))[0] += 1
    with pytest.raises(UserError, match="drafter_weights was"):
        bench(backbone, head, questions(1), settings(head="run"))


def test_rows_of_unknown_setup_or_kind_are_refused(backbone, settings):
    bench(backbone, "ngram", questions(2), settings())
    record, path = settings().out / "setup.json", settings().out / "rows.jsonl"
    kept = record.read_text()
    record.unlink()
    with pytest.raises(UserError, match=r"setup\.json: cannot be read.*--restart"):
        bench(backbone, "ngram", questions(2), settings())
    record.write_text(kept)
    for line in ("not json\n", "[1]\n", '{"key": 1}\n'):
        path.write_text(line)
        with pytest.raises(UserError, match=r"rows\.jsonl, line 1: not a row that was written here"):
            bench(backbone, "ngram", questions(2), settings())


def test_one_folder_takes_one_bench_at_a_time(tmp_path):
    with (
        opened(tmp_path / "rows", tmp_path / "setup", {}),
        pytest.raises(UserError, match="another process"),
        opened(tmp_path / "rows", tmp_path / "setup", {}),
    ):
        pass
    with opened(tmp_path / "rows", tmp_path / "setup", {}):
        pass


def test_a_folder_that_cannot_be_is_told(backbone, settings, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        bench(backbone, None, questions(1), settings(out=tmp_path / "file"))


def test_a_difference_is_judged(backbone, settings, monkeypatch):
    right = module.answer_ours

    def wrong(generator: Generator, ids: list[int], limit: int) -> Timed:
        timed = right(generator, ids, limit)
        return timed._replace(tokens=[*timed.tokens[:5], (timed.tokens[5] + 1) % zoo.VOCAB, 3])

    monkeypatch.setattr(module, "answer_ours", wrong)
    report = bench(backbone, None, questions(2)[:1], settings())
    (found,) = report["differences"]
    assert (found["step"], found["kind"], found["allowed"]) == (5, "mismatch", 1e-4)
    assert found["gap"] > 1e-4
    assert report["verdict"] == "NOT equal: 1 mismatch"


def test_a_difference_in_any_repetition_counts(backbone, monkeypatch):
    generator, right = Generator(backbone), module.answer_ours
    ids = backbone.encode("red blue")
    made = []

    def unsteady(generator: Generator, ids: list[int], limit: int) -> Timed:
        made.append(right(generator, ids, limit))
        return made[-1] if len(made) != 2 else made[-1]._replace(tokens=made[-1].tokens[:-1])

    monkeypatch.setattr(module, "answer_ours", unsteady)
    row = module._measure(generator, ids, NEW, 3, 0)
    assert row["difference"]["step"] == NEW - 1
    assert len(row["ours"]["seconds"]) == len(row["plain"]["seconds"]) == 3


def test_loops_are_those_of_the_plain_answer(backbone, settings, monkeypatch):
    right = module.answer_plainly
    looping = [*range(10), 50, *range(10)]
    monkeypatch.setattr(module, "answer_plainly", lambda *given: right(*given)._replace(tokens=looping))
    report = bench(backbone, None, questions(2)[:1], settings())
    assert report["looping"] == 1
    assert report["without_loops"]["overall"]["answers"] == 0
    assert report["all"]["overall"]["answers"] == 1


def test_what_does_not_fit_is_not_asked_and_said(settings):
    small = zoo.backbone(max_position_embeddings=60)
    asked = [question({"turns": ["red", "blue " * 8, "one"]}, 1, "s"), question({"prompt": "one " * 60}, 2, "s")]
    report = bench(small, "ngram", asked, settings(max_new_tokens=30))
    assert [(one["question"], one["turn"]) for one in report["skipped"]] == [("1", 2), ("1", 3), ("2", 1)]
    assert "holds 60" in report["skipped"][0]["skipped"]
    assert report["all"]["overall"]["answers"] == 1
    assert report["all"]["overall"]["identical"] == 1


def test_the_context_bounds_both_sides_alike(settings):
    small = zoo.backbone(max_position_embeddings=40)
    report = bench(small, "ngram", [question("red", 1, "s")], settings(max_new_tokens=100))
    (row,) = rows_of(settings().out)
    assert row["prompt_tokens"] + len(row["plain"]["tokens"]) == 40
    assert report["all"]["overall"]["identical"] == 1


def test_the_model_s_own_generation_settings_do_not_make_it_sample(settings):
    sampling = zoo.backbone()
    sampling.model.generation_config.update(do_sample=True, temperature=0.7, top_p=0.9, repetition_penalty=1.3)
    report = bench(sampling, "ngram", questions(2), settings())
    assert report["all"]["overall"]["identical"] == report["all"]["overall"]["answers"]


def test_what_cannot_be_asked_is_told_before_any_work(settings, calls, tmp_path):
    bare = Backbone(zoo.model(), None, name="bare")
    with pytest.raises(UserError, match=r"question 0 \(row 1\): .*tokenizer"):
        bench(bare, None, questions(1), settings())
    untold = zoo.backbone()
    untold.tokenizer = type(untold.tokenizer)(tokenizer_object=untold.tokenizer.backend_tokenizer)
    with pytest.raises(UserError, match="no chat template"):
        bench(untold, None, questions(1), settings())
    assert calls == []
    assert not settings().out.exists()
    report = bench(untold, None, questions(2), settings(raw=True))
    assert report["setup"]["prompts"] == "as they stand"
    assert calls[0][1] == list(untold.tokenizer("red blue 0").input_ids)


def test_warm_up_runs_both_sides_and_leaves_no_rows(backbone, settings, calls):
    bench(backbone, "ngram", questions(1), settings(warm_up=2))
    assert [side for side, _, _ in calls] == ["plain", "ours"] * 3
    assert len(rows_of(settings().out)) == 1


def test_threads_are_set_and_given_back(backbone, settings, monkeypatch):
    now = [4]  # told, not used: tiny models on more threads than there are cores take very long
    monkeypatch.setattr(torch, "get_num_threads", lambda: now[-1])
    monkeypatch.setattr(torch, "set_num_threads", now.append)
    report = bench(backbone, "ngram", questions(1), settings(threads=3))
    assert report["setup"]["threads"] == 3
    assert now == [4, 3, 4]
    with pytest.raises(KeyboardInterrupt):
        bench(backbone, Interrupted(1), questions(1), settings(threads=2, restart=True))
    assert now == [4, 3, 4, 2, 4]


@pytest.mark.parametrize("wrong", [{"max_new_tokens": 0}, {"every": 0}, {"limit": 0}, {"repeats": 0}, {"threads": 0}])
def test_settings_out_of_range_are_named(wrong, settings):
    (name,) = wrong
    with pytest.raises(UserError, match=f"{name} is 0"):
        settings(**wrong)


def test_everything_lies_in_the_folder(backbone, settings, tmp_path):
    bench(backbone, "ngram", questions(1), settings(), command="headstart bench")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "report.json", "report.md", "report.png", "rows.jsonl", "setup.json"
    ]  # fmt: skip
    shutil.rmtree(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
