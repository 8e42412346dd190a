"""What is printed of rows that are trained on."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from headstart.data.prepare import PrepareSettings, prepare
from headstart.data.preview import PreviewSettings, marked, preview
from headstart.errors import UserError
from headstart.files import write_jsonl
from zoo import backbone, tokenizer

CHAT = [
    {"role": "user", "content": "red"},
    {"role": "assistant", "content": "blue"},
    {"role": "user", "content": "up"},
    {"role": "assistant", "content": "down"},
]
OPENING = "<|im_start|>assistant\n"


@pytest.fixture
def source(tmp_path: Path) -> str:
    write_jsonl(tmp_path / "chats.jsonl", [CHAT, [], CHAT[2:], CHAT[:2], CHAT[:1]])
    return str(tmp_path / "chats.jsonl")


def printed(capsys: pytest.CaptureFixture[str], source: str, **options: Any) -> str:
    preview(backbone(), PreviewSettings([source], **options))
    return capsys.readouterr().out


def test_marks_stand_around_what_is_supervised(capsys: pytest.CaptureFixture[str], source: str) -> None:
    out = printed(capsys, source, rows=1)
    assert f"<|im_start|>user\nred<|im_end|>\n{OPENING}⟦blue<|im_end|>⟧\n<|im_start|>user\nup<|im_end|>\n" in out
    assert f"{OPENING}⟦down<|im_end|>⟧\n" in out
    assert "\x1b" not in out
    assert out.count("⟦") == 2  # one row of five


def test_colour_is_asked_for_or_follows_the_terminal(
    capsys: pytest.CaptureFixture[str], source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    green = f"{OPENING}\x1b[32mblue<|im_end|>\x1b[0m\n"
    assert green in printed(capsys, source, rows=1, color=True)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert green in printed(capsys, source, rows=1)
    assert "\x1b" not in printed(capsys, source, rows=1, color=False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in printed(capsys, source, rows=1)


def test_counts_and_faults_are_named(capsys: pytest.CaptureFixture[str], source: str) -> None:
    out = printed(capsys, source, rows=9)
    row = len("<|im_start|>user\nred<|im_end|>\n<|im_start|>assistant\nblue<|im_end|>\n")
    tokens = (
        row - 2 * len("<|im_start|>") - 2 * len("<|im_end|>") + 4
    )  # one for each special token, one for each letter
    assert f"chats.jsonl, row 4: {tokens} tokens, 5 supervised ({500 / tokens:.1f}%)" in out
    assert "chats.jsonl, row 2: empty chat" in out
    assert "chats.jsonl, row 5: not used, no reply (no assistant turn)" in out
    assert "shown: " in out
    assert "template " in out


def test_rows_are_cut_as_prepare_cuts_them(capsys: pytest.CaptureFixture[str], source: str) -> None:
    out = printed(capsys, source, rows=1, max_length=30)
    assert "row 1: 30 tokens" in out
    assert "⟦blue" not in out or "down" not in out


def test_a_prepared_folder_is_shown_as_it_is(capsys: pytest.CaptureFixture[str], source: str, tmp_path: Path) -> None:
    prepare(tokenizer(), PrepareSettings([source], tmp_path / "out", drop_empty=True))
    capsys.readouterr()
    out = printed(capsys, str(tmp_path / "out"), rows=2)
    direct = printed(capsys, source, rows=2)
    rows = out.partition("--- shown")[0]
    assert rows == direct.partition("--- ")[1] + direct.partition("--- ")[2].partition("--- shown")[0]
    assert "whole folder: 3 rows" in out
    other = copy.deepcopy(tokenizer())
    other.chat_template = "{{ messages }}"
    with pytest.raises(UserError, match="another template"):
        preview(other, PreviewSettings([str(tmp_path / "out")]))


def test_a_row_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ids, mask = [1, 2, 3], [0, 1, 1]

    class Fixed:
        def decode(self, ids: list[int], **_: Any) -> str:
            return "a\x1b[2J\x07 é\n\t"[: 3 * len(ids)]

    assert marked(Fixed(), ids, mask, ("⟦", "⟧")) == "a\\x1b[⟦2J\\x07 é\n⟧"


def test_text_is_whole_where_a_letter_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    """Runs are decoded with what stands before them: nothing is lost where a tokenizer drops an opening space."""

    class Dropping:
        def decode(self, ids: list[int], **_: Any) -> str:
            return "".join(f" {token}" for token in ids).lstrip()

    assert marked(Dropping(), [1, 2, 3, 4], [0, 1, 0, 1], ("⟦", "⟧")) == "1⟦ 2⟧ 3⟦ 4⟧"
