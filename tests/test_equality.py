"""The proof of equality: the script that gives it, and where they are at hand SmolLM2 and real questions."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import zoo
from headstart.errors import UserError
from headstart.files import cache_folder, read_jsonl
from headstart.heads.backbone import Backbone
from headstart.heads.load import load_backbone
from headstart.heads.methods import METHODS
from headstart.inference.generator import Generator

DATA = os.environ.get("HEADSTART_TEST_DATA", "")
SMOLLM2 = cache_folder() / "backbones" / "smollm2-135m"
needs_data = pytest.mark.skipif(not DATA, reason="HEADSTART_TEST_DATA names no folder with eval/spec_bench.jsonl")
needs_smollm2 = pytest.mark.skipif(not SMOLLM2.exists(), reason="not in the cache yet: headstart fetch smollm2-135m")


def script() -> ModuleType:
    path = Path(__file__).parent.parent / "scripts" / "check_equality.py"
    spec = importlib.util.spec_from_file_location("check_equality", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


QUESTIONS = [("a", ["red sun", "and the moon"]), ("b", ["blue"]), ("c", ["one two three"])]
SETTINGS = {"backbone": "tiny", "new_tokens": 12}


def test_the_script_compares_resumes_and_judges(tmp_path: Path) -> None:
    check_equality, backbone, out = script(), zoo.backbone(), tmp_path / "out.jsonl"
    check = check_equality.Check(backbone, Generator(backbone, "ngram"), 12)
    rows = check_equality.run(check, QUESTIONS[:2], out, SETTINGS)
    assert [len(row["turns"]) for row in rows] == [2, 1]
    check.question = lambda turns: [{"tokens": 12, "rounds": 5, "accepted": 6}]  # what is done is not done again
    rows = check_equality.run(check, QUESTIONS, out, SETTINGS)
    assert [row["question"] for row in rows] == ["a", "b", "c"]
    assert rows[2]["turns"][0]["rounds"] == 5
    assert list(read_jsonl(out)) == [SETTINGS, *rows]
    text, code = check_equality.verdict(rows)
    assert code == 0
    assert "3 questions, 4 answers" in text
    assert "4 equal, 0 ties, 0 mismatches" in text
    with pytest.raises(UserError, match=r"made with \{'new_tokens': 12\}"):
        check_equality.run(check, QUESTIONS, out, {**SETTINGS, "new_tokens": 99})


class Wrong:
    """A generator that is wrong at one step."""

    def __init__(self, backbone: Backbone, step: int, token: int | None) -> None:
        self.right, self.step, self.token = Generator(backbone), step, token

    def generate(self, ids: list[int], **options: Any) -> Any:
        output = self.right.generate(ids, **options)
        output.tokens[self.step :] = [] if self.token is None else [self.token]
        return output


def test_the_script_tells_ties_from_mismatches() -> None:
    check_equality, backbone = script(), zoo.backbone()
    own = Generator(backbone).generate("red", max_new_tokens=8)
    other = (own.tokens[3] + 1) % zoo.VOCAB
    for generator in (Wrong(backbone, 3, other), Wrong(backbone, 3, None)):
        (turn,) = check_equality.Check(backbone, generator, 8).question(["red"])
        assert (turn["kind"], turn["step"]) == ("mismatch", 3)
        assert check_equality.verdict([{"question": "q", "turns": [turn]}])[1] == 1
    weight = backbone.model.lm_head.weight
    with torch.no_grad():
        weight[other] = weight[own.tokens[3]] + 1e-8  # twins, to 1e-4 and beyond
    own = Generator(backbone).generate("red", max_new_tokens=8)
    step = next(k for k, token in enumerate(own.tokens) if token in (other, own.tokens[3]))
    twin = other if own.tokens[step] != other else own.tokens[3]
    (turn,) = check_equality.Check(backbone, Wrong(backbone, step, twin), 8).question(["red"])
    assert (turn["kind"], turn["step"]) == ("tie", step)
    assert 0 <= turn["gap"] < 1e-4
    text, code = check_equality.verdict([{"question": "q", "turns": [turn]}])
    assert code == 0
    assert f"tie: question q, turn 1, step {step}, gap" in text


def test_questions_are_chosen_by_number(tmp_path: Path) -> None:
    check_equality, suite = script(), tmp_path / "suite.jsonl"
    rows = [{"question_id": 80 + number, "turns": [f"question {number}"]} for number in range(30)]
    suite.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [name for name, _ in check_equality.chosen(suite, 12, None)] == ["80", "92", "104"]
    assert check_equality.chosen(suite, 12, 1) == [("80", ["question 0"])]
    suite.write_text('{"turns": "text"}\n')
    with pytest.raises(UserError, match="question 1: expected a list of texts under 'turns'"):
        check_equality.chosen(suite, 1, None)


# -- real text -------------------------------------------------------------------------------------------------------


@needs_data
@needs_smollm2
def test_three_short_questions_with_smollm2() -> None:
    check_equality = script()
    backbone = load_backbone("smollm2-135m", dtype="float32")
    questions = check_equality.chosen(Path(DATA) / "eval" / "spec_bench.jsonl", 12, None)
    short = [(name, turns[:1]) for name, turns in sorted(questions, key=lambda question: len(question[1][0]))]
    rows = check_equality.run(check_equality.Check(backbone, Generator(backbone, "ngram"), 24), short[:3], None, {})
    text, code = check_equality.verdict(rows)
    assert code == 0, text


@pytest.mark.slow
@needs_data
@needs_smollm2
@pytest.mark.parametrize("drafter", ["ngram", *METHODS])
def test_questions_with_smollm2(drafter: str) -> None:
    """A few of the forty; the script itself does them all."""
    check_equality = script()
    backbone = load_backbone("smollm2-135m", dtype="float32")
    helper = METHODS[drafter].build(backbone) if drafter in METHODS else drafter
    questions = check_equality.chosen(Path(DATA) / "eval" / "spec_bench.jsonl", 120, None)
    rows = check_equality.run(check_equality.Check(backbone, Generator(backbone, helper), 128), questions, None, {})
    text, code = check_equality.verdict(rows)
    assert code == 0, text
