"""The proof of equality: both comparisons, rows that survive an interruption, plain answers kept; real text."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import zoo
from headstart import cli
from headstart.errors import UserError
from headstart.files import cache_folder, read_jsonl
from headstart.heads.backbone import Backbone
from headstart.heads.load import load_backbone
from headstart.heads.methods import METHODS
from headstart.inference import proof as module
from headstart.inference.generator import Generator, Output
from headstart.inference.kept import Kept
from headstart.inference.proof import ProofSettings, prove, told
from headstart.inference.suite import Question, question, read_suite

DATA = os.environ.get("HEADSTART_TEST_DATA", "")
SMOLLM2 = cache_folder() / "backbones" / "smollm2-135m"
needs_data = pytest.mark.skipif(not DATA, reason="HEADSTART_TEST_DATA names no folder with eval/spec_bench.jsonl")
needs_smollm2 = pytest.mark.skipif(not SMOLLM2.exists(), reason="not in the cache yet: headstart fetch smollm2-135m")

TEXTS = [["red sun", "and the moon"], ["blue"], ["one two three"], ["up down"]]
QUESTIONS: list[Question] = [question({"turns": turns}, row, "suite") for row, turns in enumerate(TEXTS, 1)]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def settings(**given: Any) -> ProofSettings:
    return ProofSettings(**{"suite": "suite", "head": "ngram", "max_new_tokens": 12, **given})


def test_both_comparisons_over_all_turns(cache: Path) -> None:
    rows = prove(zoo.backbone(), "ngram", QUESTIONS, settings(draws=2))
    greedy, drawn = ([row for row in rows if row["kind"] == kind] for kind in ("greedy", "drawn"))
    assert [(row["question"], row["turn"]) for row in greedy] == [("1", 1), ("1", 2), ("2", 1), ("3", 1), ("4", 1)]
    assert [(row["question"], row["seed"]) for row in drawn] == [("1", 1), ("1", 1), ("3", 3)]  # spread evenly
    assert all(row["parting"] is None for row in rows)
    assert all(row["tokens"] == 1 + row["rounds"] + row["accepted"] for row in rows)
    text, code = told(rows)
    assert code == 0
    assert "greedy: 5 of 5 answers to 4 questions" in text
    assert "drawn: 3 of 3 answers to 2 questions" in text
    assert text.endswith("\nverdict: equal")


def test_kept_answers_are_those_of_one_switch_of_an_adapter(cache: Path) -> None:
    backbone, seen = zoo.backbone(), []
    layer = backbone.model.model.layers[0].mlp
    layer.active_adapters = ["default"]  # as peft's layers say it
    for off in (False, True, False):
        layer.disable_adapters = off
        seen.append(Kept(backbone).folder)
    assert seen[0] == seen[2] != seen[1]


def test_without_draws_and_with_fewer_questions(cache: Path) -> None:
    rows = prove(zoo.backbone(), None, QUESTIONS, settings(head="none", draws=0, every=2, limit=1))
    assert [(row["question"], row["kind"]) for row in rows] == [("1", "greedy")] * 2


def spoiled(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Our answers with a drafter are wrong at one step."""
    right = Generator.generate

    def generate(self: Generator, ids: list[int], **options: Any) -> Output:
        output: Output = right(self, ids, **options)
        if self.spoiled:  # type: ignore[attr-defined]
            output.tokens[step] = (output.tokens[step] + 1) % zoo.VOCAB
        return output

    monkeypatch.setattr(Generator, "generate", generate)
    made = Generator.__init__

    def init(self: Generator, backbone: Backbone, drafter: Any = None, **rest: Any) -> None:
        made(self, backbone, drafter, **rest)
        self.spoiled = drafter is not None  # type: ignore[attr-defined]

    monkeypatch.setattr(Generator, "__init__", init)


def test_a_wrong_token_is_found_in_both(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoiled(monkeypatch, 5)
    text, code = told(prove(zoo.backbone(), "ngram", QUESTIONS[1:3], settings(head="ngram")))
    assert code == 1
    assert "greedy: 0 of 2 answers" in text
    assert "drawn: 0 of 2 answers" in text
    assert "  question 2, turn 1, step 5: mismatch, token" in text
    assert "of 0.0001 that rounding explains; the two best are" in text
    assert text.endswith("verdict: NOT equal: 4 mismatches")


def test_a_tie_is_listed_and_passes(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twins = zoo.backbone()
    own = Generator(twins).generate("blue", max_new_tokens=12, do_sample=False).tokens[5]
    twins.model.lm_head.weight.data[(own + 1) % zoo.VOCAB] = twins.model.lm_head.weight.data[own]
    first = Generator(twins).generate("blue", max_new_tokens=12, do_sample=False).tokens[5]
    assert first == min(own, (own + 1) % zoo.VOCAB)
    spoiled(monkeypatch, 5)
    text, code = told(prove(twins, "ngram", QUESTIONS[1:2], settings(draws=0)))
    assert code == 0, text
    assert "question 2, turn 1, step 5: tie, token" in text
    assert "gap 0, of 0.0001 that rounding explains" in text
    assert text.endswith("verdict: equal but for 1 tie")


def test_it_goes_on_with_what_is_there(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone, out = zoo.backbone(), tmp_path / "out" / "rows.jsonl"
    compared = module.Proof._compared
    asked: list[str] = []

    def counted(self: Any, job: Any, *rest: Any) -> Any:
        asked.append(job.key)
        if len(asked) == 4:
            raise KeyboardInterrupt
        return compared(self, job, *rest)

    monkeypatch.setattr(module.Proof, "_compared", counted)
    with pytest.raises(KeyboardInterrupt):
        prove(backbone, "ngram", QUESTIONS, settings(out=out))
    assert [row["question"] for row in read_jsonl(out)] == ["1", "1", "2"]  # whole questions
    monkeypatch.undo()
    monkeypatch.setenv("HEADSTART_CACHE", str(cache))
    monkeypatch.setattr(module, "own_answer", None)  # plain answers are kept
    rows = prove(backbone, "ngram", QUESTIONS, settings(out=out))
    assert sorted(map(json.dumps, read_jsonl(out))) == sorted(map(json.dumps, rows))
    assert len(rows) == 10
    with pytest.raises(
        UserError, match=r"rows\.jsonl: holds rows of another setup \(max_new_tokens was 12, is now 9\)"
    ):
        prove(backbone, "ngram", QUESTIONS, settings(out=out, max_new_tokens=9))
    with pytest.raises(UserError, match="seed was 0, is now 1"):
        prove(backbone, "ngram", QUESTIONS, settings(out=out, seed=1))
    monkeypatch.undo()
    monkeypatch.setenv("HEADSTART_CACHE", str(cache))
    assert len(prove(backbone, "ngram", QUESTIONS[:1], settings(out=out, seed=1, restart=True))) == 4


def test_plain_answers_are_computed_once_for_all_drafters(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prove(zoo.backbone(), "ngram", QUESTIONS, settings())
    files = list((cache / "answers").rglob("*.json"))
    assert len(files) == 10
    right, made = module.own_answer, list[int]()

    def counted(backbone: Backbone, ids: list[int], limit: int) -> list[int]:
        made.append(len(ids))
        return right(backbone, ids, limit)

    monkeypatch.setattr(module, "own_answer", counted)
    prove(zoo.backbone(), METHODS["eagle3"].build(zoo.backbone()), QUESTIONS, settings(head="eagle3"))
    assert not made
    assert len(list((cache / "answers").rglob("*.json"))) == 10
    others = [zoo.backbone(seed=1), zoo.backbone(attention="eager"), zoo.backbone()]
    others[2].model.generation_config.repetition_penalty = 1.3
    for other in others:  # other weights, another attention, other settings of the model's own
        made.clear()
        text, code = told(prove(other, "ngram", QUESTIONS[1:2], settings(draws=0)))
        assert (len(made), code) == (1, 0), text
    one = zoo.backbone()
    one.model.model.layers[0].mlp.down_proj.weight.data[5, 7] += 1e-3  # a single weight, which no sample sees
    made.clear()
    prove(one, "ngram", QUESTIONS[1:2], settings(draws=0))
    assert made


def test_what_cannot_be_asked_is_told(cache: Path) -> None:
    small = zoo.backbone(max_position_embeddings=64)
    long = question({"turns": ["blue", "red " * 40]}, 5, "suite")
    rows = prove(small, "ngram", [QUESTIONS[1], long], settings(draws=0))
    text, code = told(rows)
    assert code == 0
    assert "  not asked: question 5, turn 2: the prompt has" in text
    with pytest.raises(UserError, match="nothing could be compared: the prompt has"):
        told(prove(small, "ngram", [question({"turns": ["red " * 40]}, 6, "suite")], settings(draws=0)))
    with pytest.raises(UserError, match="draws is -1; it has to be at least 0"):
        settings(draws=-1)


def test_the_verb_and_its_exit_code(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, suite = tmp_path / "tiny", tmp_path / "suite.jsonl"
    zoo.model().save_pretrained(folder)
    zoo.tokenizer().save_pretrained(folder)
    suite.write_text('{"turns": ["red sun"]}\n{"turns": ["blue"]}\n')
    command = f"verify --backbone {folder} --head ngram --suite {suite} --max-new-tokens 9 --out {tmp_path}/o.jsonl"
    assert cli.main(command.split()) == 0
    assert capsys.readouterr().out.endswith("\nverdict: equal\n")
    spoiled(monkeypatch, 3)
    assert cli.main([*command.split(), "--restart"]) == 1
    assert "verdict: NOT equal: 4 mismatches" in capsys.readouterr().out
    assert cli.main([*command.split(), "--seed", "4"]) == 2
    assert "seed was 0, is now 4" in capsys.readouterr().err


# -- real text -------------------------------------------------------------------------------------------------------


@needs_data
@needs_smollm2
def test_three_short_questions_with_smollm2(tmp_path: Path) -> None:
    suite = read_suite(Path(DATA) / "eval" / "spec_bench.jsonl")[::12]
    short = sorted((one for one in suite if len(one.turns) == 1), key=lambda one: len(one.turns[0][0]["content"]))[:3]
    backbone = load_backbone("smollm2-135m", dtype="float32")
    text, code = told(prove(backbone, "ngram", short, settings(max_new_tokens=24, draws=1)))
    assert code == 0, text


@pytest.mark.slow
@needs_data
@needs_smollm2
@pytest.mark.parametrize("drafter", ["ngram", *METHODS])
def test_questions_with_smollm2(drafter: str) -> None:
    """A few of the forty; `headstart verify` does them all."""
    backbone = load_backbone("smollm2-135m", dtype="float32")
    helper = METHODS[drafter].build(backbone) if drafter in METHODS else drafter
    questions = read_suite(Path(DATA) / "eval" / "spec_bench.jsonl")
    text, code = told(prove(backbone, helper, questions, settings(every=120, draws=2, max_new_tokens=128)))
    assert code == 0, text
