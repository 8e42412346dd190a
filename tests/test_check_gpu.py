"""The check for the day a GPU is at hand: its judge, its models and its record, and all of it once on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from headstart.heads.backbone import Backbone
from headstart.inference.generator import Generator

SCRIPTS = Path(__file__).parent.parent / "scripts"
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")

sys.path.insert(0, str(SCRIPTS))
import check_gpu  # noqa: E402
from gpu import checkout, checks, llama2c, models, plan, record, report, timings  # noqa: E402

STORIES = models.stories_folder()
needs_stories = pytest.mark.skipif(STORIES is None, reason="HEADSTART_TEST_DATA names no folder with stories260k/")

# -- what answers are judged by --------------------------------------------------------------------------------------


@pytest.mark.parametrize("siblings", [False, True])
def test_a_scripted_drafter_is_right_and_wavers(siblings: bool) -> None:
    backbone, prompt = zoo.backbone(), [1, 5, 6, 7]
    options = {"max_new_tokens": 21, "temperature": 0}
    own = Generator(backbone).generate(prompt, **options).tokens
    plain = Generator(backbone, models.Scripted(own, 4, siblings=siblings)).generate(prompt, **options)
    assert plain.tokens == own
    assert (plain.stats.rounds, plain.stats.acceptance_length) == (4, 5.0)  # 1 + 4 x 5
    wavering = models.Scripted(own, 4, siblings=siblings, wavering=True)
    output = Generator(backbone, wavering).generate(prompt, **options)
    assert output.tokens == own
    assert output.stats.rounds == 6  # 1 + 5 + 4 + 3 + 2 + 1 + 5
    assert output.stats.drafted == sum(output.stats.accepted) * (2 if siblings else 1)


# -- models ----------------------------------------------------------------------------------------------------------


def test_a_random_model_speaks_words_that_survive_as_text(tmp_path: Path) -> None:
    subject = models.random_subject(models.TINY, torch.device("cpu"), 5)
    assert sum(one.numel() for one in subject.exact.model.parameters() if one.ndim > 1) == models.TINY.parameters
    assert (subject.exact.dtype, subject.half.dtype) == (torch.float32, torch.bfloat16)
    frequencies = [name for name, one in subject.half.model.named_buffers() if one.dtype == torch.float32]
    assert frequencies, "the rotary frequencies are to stay fp32"
    tokens = Generator(subject.exact).generate(subject.prompts[0], max_new_tokens=30, temperature=0).tokens
    assert set(tokens) <= set(range(3, models.WORDS))
    assert len(set(tokens)) > 5
    text = subject.exact.tokenizer.decode(tokens)
    assert subject.exact.tokenizer(text, add_special_tokens=False)["input_ids"] == tokens
    assert models.write_chats(tmp_path / "chats.jsonl", subject.exact, subject.openings, 6) == 30
    rows = [json.loads(line)["messages"] for line in (tmp_path / "chats.jsonl").read_text().splitlines()]
    assert [[len(turn["content"].split()) for turn in row] for row in rows] == [[8, 6]] * 5


def test_the_largest_size_that_fits_is_taken() -> None:
    assert [size and size.name for size in map(models.largest, (1e9, 12e9, 47e9, 140e9))] == [None, "1B", "1B", "8B"]
    assert models.LARGE[0].parameters == pytest.approx(1.1e9, rel=0.1)
    assert models.LARGE[1].parameters == pytest.approx(8e9, rel=0.05)


# -- the run ---------------------------------------------------------------------------------------------------------


def new_run(tmp_path: Path, minutes: float = 1.0) -> record.Run:
    return record.Run(torch.device("cpu"), tmp_path, minutes, quick=True)


def test_what_goes_wrong_is_noted_and_the_rest_goes_on(tmp_path: Path) -> None:
    run, done = new_run(tmp_path), list[str]()

    def wrong(run: record.Run) -> None:
        raise ValueError("no such\nthing")

    def full(run: record.Run) -> None:
        raise torch.OutOfMemoryError("all full")

    run.go([
        record.Part("one", wrong, 0), record.Part("two", full, 0), record.Part("three", full, 0, timing=True),
        record.Part("long", lambda run: done.append("long"), 100),
        record.Part("last", lambda run: done.append("last"), 1),
    ])  # fmt: skip
    assert done == ["last"]
    assert [(check.name, check.detail) for check in run.record.failed] == [
        ("one", "ValueError: no such"), ("two", "OutOfMemoryError: all full"),
    ]  # fmt: skip
    assert "in wrong" in run.record.checks[0].trace
    assert run.record.omitted[0] == "three: OutOfMemoryError: all full"
    assert run.record.omitted[1].startswith("long: takes about 100 s, and ")
    assert [row[0] for row in run.parts.rows] == ["one", "two", "three", "last"]


def test_the_report_says_all_of_it(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.record.facts = {"device": "a | b"}
    run.check("this", True, "3 of 3")
    run.check("that", False)
    run.table("Figures", "name", "value", note="A note.").rows += [("x", 1234.5), ("y", float("inf")), ("z", None)]
    run.omit("the moon")
    path = report.write(run.record, tmp_path / "out")
    text = path.read_text()
    for line in (
        "**1 of 2 checks passed, 1 FAILED**",
        "| device | a \\| b |",
        "- passed: this (3 of 3)",
        "- **FAILED**: that",
        "| x | 1,234 |",
        "| y | inf |",
        "| z | - |",
        "A note.",
        "- the moon",
    ):
        assert line in text.splitlines()
    found = json.loads((tmp_path / "out" / "report.json").read_text())
    assert found["checks"][1]["passed"] is False
    assert found["tables"][0]["rows"] == [["x", 1234.5], ["y", None], ["z", None]]


def test_wrong_tokens_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a generator that errs at one step of one form of drafts."""
    run = new_run(tmp_path)
    subject = models.random_subject(models.TINY, torch.device("cpu"), 4)
    checks.equality(run, subject, half=False)
    assert not run.record.failed
    right = Generator.generate

    def wrong(self: Generator, prompt: Any, **options: Any) -> Any:
        output = right(self, prompt, **options)
        output.tokens[5] = output.tokens[4]
        return output

    monkeypatch.setattr(Generator, "generate", wrong)
    for half in (False, True):
        checks.equality(run, subject, half=half)
    assert [check.name for check in run.record.failed] == [
        f"random Llama tiny in {kind}: greedy tokens are those of model.generate" for kind in ("fp32", "bf16")
    ]
    parted = next(table for table in run.record.tables if table.title == "Where they parted: random Llama tiny in fp32")
    assert {row[2] for row in parted.rows} == {5}


def test_a_backbone_that_changes_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run(tmp_path)
    subject = models.random_subject(models.TINY, torch.device("cpu"), 8)
    right = checks.train

    def wrong(recipe: Any, overrides: Any, *, backbone: Backbone) -> Path:
        with torch.no_grad():
            backbone.model.get_parameter("model.norm.weight")[3] += 0.5
        return right(recipe, {**overrides, "optim.lr": 1e-12}, backbone=backbone)

    monkeypatch.setattr(checks, "train", wrong)
    checks.training(run, subject, "medusa")
    failed = [check.name.partition(": ")[2] for check in run.record.failed]
    assert "the backbone stays as it was" in failed
    assert "the loss falls" in failed


@needs_stories
def test_a_wrong_conversion_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The story is told by the right model alone: here the rotary pairs stay as they were."""
    assert STORIES is not None
    run = new_run(tmp_path)
    checks.story(run, models.stories(STORIES, run.device, 1))
    assert [check.passed for check in run.record.checks] == [True, True]
    monkeypatch.setattr(llama2c, "halves", lambda weight, heads: weight)
    checks.story(run, models.stories(STORIES, run.device, 1))
    assert [check.passed for check in run.record.checks[2:]] == [False, True]


def test_a_large_model_is_timed_with_untrained_heads(tmp_path: Path) -> None:
    run, freed = new_run(tmp_path), list[str]()
    plan._large(models.TINY, lambda: freed.append("middle"), run)
    assert freed == ["middle"]
    drafts = next(table for table in run.record.tables if table.title.startswith("Drafting"))
    assert [row[0] for row in drafts.rows] == list(plan.METHODS)
    assert all(time > 0 for row in drafts.rows for time in row[1:-1])
    answers = next(table for table in run.record.tables if table.title.startswith("Answers"))
    rounds = {row[0]: row[3] for row in answers.rows}
    assert rounds["ours, the answer, chain:4"] > 3  # bf16 may part from the answer that the drafter knows


def test_a_gpu_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "mem_get_info": (40 << 30, 80 << 30), "get_device_name": "Big GPU", "get_device_capability": (9, 0),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    found = check_gpu.facts(torch.device("cuda", 0))
    assert (found["device"], found["compute capability"]) == ("Big GPU", "9.0")
    assert found["GPU memory"] == "80.0 GiB, 40.0 of them free at first"
    parts = plan.parts(record.Run(torch.device("cuda", 0), Path(), 8))
    assert parts[-1].name == "random Llama 1B: timings"  # 40 GiB are not enough for the other one
    assert any("random Llama middle" in part.name for part in parts)


def run_script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPTS / "check_gpu.sh"), *arguments]
    given = {**os.environ, "PYTHON": sys.executable, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=given)


def test_help_teaches_and_bad_options_are_refused() -> None:
    done = run_script("--help")
    assert done.returncode == 0
    for word in ("--device", "--minutes", "--quick", "--out", "HEADSTART_TEST_DATA", "exit code"):
        assert word in done.stdout
    done = run_script("--minutes", "0")
    assert done.returncode == 2
    assert "invalid minutes value: '0'" in done.stderr


def test_without_a_python_one_line_says_so() -> None:
    done = run_script(PYTHON="no-such-python")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "no-such-python is no Python of 3.11 or newer" in done.stderr


@needs_no_gpu
def test_without_a_gpu_one_line_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert check_gpu.main(["--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert "finds no GPU" in told.err
    assert not (tmp_path / "out").exists()


def test_a_python_that_lacks_packages_is_told(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkout, "NEEDED", ("torch", "no_such_package"))
    assert check_gpu.main([]) == 2
    assert "lacks no_such_package; run scripts/setup.sh" in capsys.readouterr().err


def test_the_checkout_is_found_without_being_installed(tmp_path: Path) -> None:
    """As with a Python that has torch and the rest, but not headstart."""
    code = (
        "import sys; sys.meta_path = [one for one in sys.meta_path if 'editable' not in repr(one).lower()]\n"
        "from gpu import checkout; checkout.make_importable()\n"
        "from importlib import metadata; import headstart.heads.cache, headstart.training.recipe\n"
        "print(headstart.heads.cache.__file__, metadata.version('headstart'))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    path, version = done.stdout.split()
    assert Path(path).resolve() == checkout.ROOT / "heads" / "cache.py"
    assert version == "0.1.0"


@pytest.fixture
def without_stories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADSTART_TEST_DATA", raising=False)


def test_all_of_it_once(tmp_path: Path, capsys: pytest.CaptureFixture[str], without_stories: None) -> None:
    code = check_gpu.main(["--device", "cpu", "--quick", "--out", str(tmp_path)])
    told = capsys.readouterr()
    assert code == 0, told.err
    assert told.out.count("\n") == 1
    assert "checks passed" in told.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "report.md"]
    found = json.loads((tmp_path / "report.json").read_text())
    titles = [table["title"] for table in found["tables"]]
    tables = {table["title"]: table for table in found["tables"]}
    assert len(tables) == len(titles)
    assert [row[0] for row in tables["Forward by tree nodes: random Llama tiny"]["rows"]] == list(timings.NODES)
    assert {row[0] for row in tables["Training in bf16"]["rows"]} == {
        f"{m} on random Llama tiny" for m in plan.TRAINABLE
    }
    drafted = tables["Greedy answers against model.generate: random Llama tiny in fp32"]["rows"]
    assert len(drafted) == 4 + 3 * len(plan.TRAINABLE)
    assert all(row[1:3] == [2, 0] for row in drafted)
    assert any("stories260K" in what for what in found["omitted"])
    assert set(plan.NEVER) <= set(found["omitted"])


def test_a_budget_that_is_over_leaves_everything_out(tmp_path: Path, capsys: Any, without_stories: None) -> None:
    assert check_gpu.main(["--device", "cpu", "--minutes", "0.0001", "--out", str(tmp_path)]) == 2
    assert "nothing was checked" in capsys.readouterr().out
    omitted = json.loads((tmp_path / "report.json").read_text())["omitted"]
    assert sum("were left" in what for what in omitted) == len(plan.TRAINABLE) + 7
