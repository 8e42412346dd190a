"""Questions of evaluation files are found in chats: exactly, but for spelling, or by 13 words in a row."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from headstart.data.chats import Chat, chat_of, raw_rows
from headstart.data.overlap import RUN, Overlap, runs, words_of
from headstart.data.preview import PreviewSettings, preview
from headstart.data.sources import sources_of
from headstart.errors import UserError
from headstart.files import write_jsonl
from zoo import tokenizer

LONG = "How many of the seventeen red apples that lay under the old tree did Anna's brother carry home today?"
SHORT = "Why is the sky blue?"
CHINESE = "请问在公元前二百二十一年统一中国的皇帝叫什么名字呢"


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    rows: list[Any] = [{"turns": [LONG, SHORT]}, {"question": "2 + 2?", "answer": LONG[::-1]}, {"prompt": CHINESE}]
    write_jsonl(tmp_path / "eval.jsonl", rows)
    return tmp_path / "eval.jsonl"


def hit(questions: Path, *texts: str) -> tuple[str, str] | None:
    overlap = Overlap.of([questions])
    overlap.look(Chat([{"role": "user", "content": text} for text in texts], "", "a.jsonl", 7))
    return (overlap.hits[0].kind, overlap.hits[0].question) if overlap.hits else None


def test_kinds(questions: Path) -> None:
    words = LONG.split()
    for texts, expected in {
        (LONG,): ("exact", "eval.jsonl, row 1"),
        ("Hello!", f"\n{SHORT} "): ("exact", "eval.jsonl, row 1"),
        ("why is THE sky: blue",): ("normalised", "eval.jsonl, row 1"),
        ("2+2",): ("normalised", "eval.jsonl, row 2"),
        ("Tell me: " + " ".join(words[2 : 2 + RUN]).upper() + " or not",): ("13 words", "eval.jsonl, row 1"),
        ("我想知道" + CHINESE[3:18],): ("13 words", "eval.jsonl, row 3"),
        (" ".join(words[2 : 1 + RUN]),): None,
        (f"Say it in one word: {SHORT}",): None,
        (" ".join(words[:8]), " ".join(words[8:])): None,
        (LONG[::-1],): None,
        ("",): None,
    }.items():
        assert hit(questions, *texts) == expected, texts


def test_runs_as_a_naive_twin_has_them() -> None:
    words = words_of(LONG)
    assert list(runs(words)) == [" ".join(words[k : k + 13]) for k in range(len(words)) if k + 13 <= len(words)]
    assert words_of("It's 猫x, ok_no") == ["it", "s", "猫", "x", "ok", "no"]
    assert list(runs(words[:12])) == []


def test_preview_lists_them(questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reply = {"role": "assistant", "content": "red"}
    rows = [[{"role": "user", "content": text}, reply] for text in ("green", SHORT, LONG.lower())]
    write_jsonl(tmp_path / "a.jsonl", [*rows, [], {"text": LONG}])
    preview(tokenizer(), PreviewSettings([str(tmp_path / "a.jsonl")], against=[str(questions)]))
    out = capsys.readouterr().out
    assert "overlap: 3 of 4 chats hold a question of the evaluation files (2 exact, 1 normalised, 0 13 words)" in out
    assert f"a.jsonl, row 2: exact, eval.jsonl, row 1: '{SHORT}'" in out
    with pytest.raises(UserError, match="no such file"):
        preview(tokenizer(), PreviewSettings([str(tmp_path / "a.jsonl")], against=["missing.jsonl"]))


@pytest.mark.skipif("HEADSTART_TEST_DATA" not in os.environ, reason="needs HEADSTART_TEST_DATA, a folder of real files")
def test_real_files() -> None:
    """The training prompts are free of these questions (MBPP has a part for training), which find themselves."""
    folder = Path(os.environ["HEADSTART_TEST_DATA"])
    files = [folder / "eval" / f"{name}.jsonl" for name in ("gsm8k_test", "humaneval", "spec_bench")]
    overlap = Overlap.of(files)
    for raw in raw_rows(sources_of([folder / "train" / "prompts.jsonl.gz"])):
        if raw[1] % 10 == 0 and isinstance(one := chat_of(raw), Chat):
            overlap.look(one)
    assert overlap.seen > 3000
    assert not overlap.hits
    for line in (folder / "eval" / "spec_bench.jsonl").read_text(encoding="utf-8").splitlines()[::40]:
        turns = json.loads(line)["turns"]
        overlap.look(Chat([{"role": "user", "content": turns[-1]}], "", "spec_bench", 1))
        assert overlap.hits.pop().kind == "exact"
