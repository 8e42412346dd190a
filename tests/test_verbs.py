"""Every verb, run on a tiny backbone from files to files: the path of the README in seconds."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

import zoo
from headstart import cli
from headstart.verbs import VERBS

RECIPE = """# a test
backbone: backbone
run: runs/one
data: {train: [chats.jsonl], held_out: 0.2}
loss: {depths: 2}
optim: {max_steps: 2}
precision: {backbone: float32, autocast: "no"}
evaluate: {prompts: 1, rows: 4, max_new_tokens: 4}
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """A folder with a backbone, chats, questions and a recipe."""
    folder = tmp_path_factory.mktemp("work")
    zoo.model(max_position_embeddings=1024).save_pretrained(folder / "backbone")
    zoo.tokenizer().save_pretrained(folder / "backbone")
    lines = [json.dumps({"messages": chat}) for chat in zoo.chats(24)]
    (folder / "chats.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (folder / "questions.txt").write_text("red blue\ngreen one two\n", encoding="utf-8")
    (folder / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    return folder


@pytest.fixture
def run(work, monkeypatch, capsys):
    """Run a command in the folder; its standard output."""
    monkeypatch.chdir(work)
    monkeypatch.setenv("HEADSTART_CACHE", str(work / "cache"))
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)

    def ran(*arguments: str, code: int = 0) -> str:
        assert cli.main(arguments) == code, capsys.readouterr().err
        captured = capsys.readouterr()
        return captured.out if code == 0 else captured.err

    return ran


def test_every_verb_is_tried_here():
    text = Path(__file__).read_text(encoding="utf-8")
    for name in VERBS:
        words = ", ".join(f'"{word}"' for word in name.split())
        assert f"run({words}" in text, f"headstart {name} is not run"


def test_fetch(run, work):
    folder = work / "cache" / "backbones" / "smollm2-135m"
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text("{}")
    assert run("fetch", "smollm2-135m") == f"{folder}\n"
    assert "no built-in backbone" in run("fetch", "smollm", code=2)


def test_data(run, work):
    supervised = run("data", "preview", "--backbone", "backbone", "--input", "chats.jsonl", "--rows", "1")
    assert "⟦" in supervised
    assert "24 rows" in run("data", "prepare", "--backbone", "backbone", "--input", "chats.jsonl", "--out", "rows")
    options = ("--backbone", "backbone", "--input", "chats.jsonl", "--out", "rows")
    assert "already there" in run("data", "prepare", *options)
    covered = run("data", "vocab", "--backbone", "backbone", "--input", "rows", "--held-out", "0.1", "--sizes", "20")
    assert [line.split()[0] for line in covered.splitlines()[-2:]] == ["20", "96"]
    options = ("--input", "chats.jsonl", "--out", "answered.jsonl", "--max-new-tokens", "8", "--keep-cut")
    run("data", "regenerate", "--backbone", "backbone", *options)
    assert (work / "answered.jsonl").read_text().count("\n") == 24
    assert "24 rows" in run("data", "cache", "--backbone", "backbone", "--input", "rows", "--out", "features")
    # what a random model writes is hardly ever a conversation, which has to be told
    options = ("--out", "made.jsonl", "--count", "1", "--group-size", "2", "--max-user-tokens", "4")
    assert "headstart: " in run("data", "synthesize", "--backbone", "backbone", *options, code=2)
    assert "no such file" in run("data", "preview", "--backbone", "backbone", "--input", "none.jsonl", code=2)
    assert "no such folder" in run("data", "preview", "--backbone", "./none", "--input", "chats.jsonl", code=2)


def test_train_generate_bench_verify(run, work):
    assert "largest forward" in run("plan", "recipe.yaml")
    assert "trainable parameters" in run("train", "recipe.yaml", "--check")
    assert not (work / "runs").exists()
    assert run("train", "recipe.yaml", "optim.lr=1e-3").endswith("\nruns/one/head\n")
    assert run("export", "--head", "runs/one/head", "--to", "vllm", "--out", "exported") == "exported\n"
    assert "eagle3" in run("inspect", "exported", "--backbone", "backbone")
    assert "nowhere" in run("inspect", "nowhere", code=2)
    assert run("push", "--head", "runs/one", "user/name", "--out", "pushed") == "pushed\n"
    assert "user is no" in run("push", "runs/one", "--repo", "user", code=2).replace(":", "")
    assert "did you mean optim.lr?" in run("train", "recipe.yaml", "optim.lrr=1", code=2)
    pytest.importorskip("matplotlib")
    assert run("plot", "runs/one").endswith("\ncurves.png\n")
    options = ("--backbone", "backbone", "--max-new-tokens", "12", "red blue")
    plain = run("generate", *options)
    assert run("generate", *options, "--head", "runs/one/head") == plain
    assert run("generate", *options, "--head", "ngram", "--no-stream") == plain
    seeded = run("generate", *options, "--temperature", "2", "--seed", "1")
    assert seeded == run("generate", *options, "--temperature", "2", "--seed", "1", "--head", "runs/one/head")
    assert "no such folder" in run("generate", *options, "--head", "./none", code=2)
    options = ("--suite", "questions.txt", "--out", "report", "--max-new-tokens", "4")
    assert "report/report.md" in run("bench", "--backbone", "backbone", "--head", "runs/one/head", *options)
    assert "2 of 2 answers are identical" in (work / "report" / "report.md").read_text(encoding="utf-8")
    options = ("--prompts", "questions.txt", "--max-new-tokens", "6", "--confirm", "1", "--rows", "2")
    text = run("tune", "--backbone", "backbone", "--head", "runs/one/head", *options)
    assert "Kept in runs/one/head/tuning.json" in text
    options = ("--suite", "questions.txt", "--out", "rows.jsonl", "--max-new-tokens", "4")
    assert run("verify", "--backbone", "backbone", "--head", "runs/one/head", *options).endswith("verdict: equal\n")
