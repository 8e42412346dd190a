"""scripts/measure_adapter.py on a tiny model: what it prints is what the two backbones say."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from headstart.errors import UserError
from headstart.heads.format import save_head
from headstart.heads.methods import METHODS

PATH = Path(__file__).resolve().parent.parent / "scripts" / "measure_adapter.py"
with_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft, an extra of headstart")


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("measure_adapter", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    zoo.model().save_pretrained(tmp_path / "backbone")
    zoo.tokenizer().save_pretrained(tmp_path / "backbone")
    torch.manual_seed(0)
    save_head(METHODS["eagle3"].build(zoo.backbone()), tmp_path / "head")
    (tmp_path / "s.txt").write_text("red sun\nblue moon\none two\n")
    rows = [json.dumps({"messages": chat}) + "\n" for chat in zoo.chats(4)]
    (tmp_path / "chats.jsonl").write_text("".join(rows))
    given = {"backbone": "backbone", "head": "head", "suite": "s.txt", "chats": "chats.jsonl"}
    named = [text for name, value in given.items() for text in (f"--{name}", str(tmp_path / value))]
    return [*named, "--max-new-tokens", "10", "--limit", "2"]


@with_peft
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
def test_both_backbones_are_measured(
    script: Any, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = ["--save", str(tmp_path / "adapter"), "--steps", "6", "--rows", "2", "--lr", "0.05", "--rank", "4"]
    assert script.main([*flags, *saved]) == 0
    said = capsys.readouterr()
    assert len(re.findall(r"^\| (original|with the adapter) \| 1\.\d+ \| [\d.]+% \| 2 of 2 \|$", said.out, re.M)) == 2
    assert "2 of 2 plain answers differ between the two." in said.out
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", said.err)]
    assert losses[-1] < losses[0]
    assert script.main([*flags, "--adapter", str(tmp_path / "adapter")]) == 0
    assert capsys.readouterr().out == said.out


@with_peft
def test_an_answer_that_is_another_one_is_told(
    script: Any, flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = script.answers

    def wrong(*given: Any) -> Any:
        side = right(*given)
        return side._replace(drafted=[side.drafted[0][:-1], *side.drafted[1:]])

    monkeypatch.setattr(script, "answers", wrong)
    assert script.main([*flags, "--steps", "1", "--rows", "1"]) == 1
    assert "1 of 2 |" in capsys.readouterr().out


def test_chats_without_a_reply_are_refused(script: Any, tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").write_text('{"messages": [{"role": "user", "content": "red"}]}\n')
    with pytest.raises(UserError, match="no chat with a reply in its first 8 tokens"):
        script.supervised(zoo.backbone(), str(tmp_path / "none.jsonl"), 8, 2)
