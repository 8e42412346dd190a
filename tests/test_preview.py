"""What is printed of rows that are trained on."""

from __future__ import annotations

import copy
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from headstart.data.masks import Masker
from headstart.data.page import page, pieces, row_html
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
    assert "chats.jsonl, row 5: no reply (no assistant turn)" in out
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
    assert rows == direct.partition("1 row not used")[0]
    assert "whole folder: 3 rows" in out
    other = copy.deepcopy(tokenizer())
    other.chat_template = "{{ messages }}"
    with pytest.raises(UserError, match="another template"):
        preview(other, PreviewSettings([str(tmp_path / "out")]))


class Elements(HTMLParser):
    """The classes and texts of the boxes of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.boxes: list[tuple[str, str]] = []
        self.open = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open = tag == "span"
        if self.open:
            self.boxes.append((dict(attrs).get("class") or "", ""))

    def handle_endtag(self, tag: str) -> None:
        self.open = False

    def handle_data(self, data: str) -> None:
        if self.open:
            self.boxes[-1] = (self.boxes[-1][0], self.boxes[-1][1] + data)


def test_a_page_has_a_box_for_each_token(capsys: pytest.CaptureFixture[str], source: str, tmp_path: Path) -> None:
    out = printed(capsys, source, rows=1, html=tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "page.html: 1 rows as a page" in out
    (row,) = Masker(tokenizer())(CHAT).rows
    boxes = Elements(text).boxes
    assert [kind == "on" for kind, _ in boxes] == [bool(one) for one in row.mask]
    assert "".join(piece.replace("↵\n", "\n") for _, piece in boxes) == tokenizer().decode(row.ids)
    assert f'title="0: {row.ids[0]}"' in text
    assert "<script" not in text.replace("&lt;script", "")


def test_a_page_shows_markup_as_text(tmp_path: Path) -> None:
    class Fixed:
        def decode(self, ids: list[int], **_: Any) -> str:
            return "".join("<b>&\"'</b><script>" if token else "x" for token in ids)

    body = row_html(Fixed(), [0, 1], [0, 1])
    assert "<script" not in body
    assert "&lt;script&gt;" in body
    made = page("<t>", ["<f>"], "<c>", [("<p>", body)])
    for sign in "tfcp":
        assert f"<{sign}>" not in made.replace("<p>", "<p>", 0)


def test_pieces_add_up_with_letters_of_several_tokens() -> None:
    """Bytes of a letter stand at its last token, in rows longer than the window, too."""

    class Bytes:
        def decode(self, ids: list[int], **_: Any) -> str:
            return bytes(ids).decode(errors="replace")

    text = "日本 é🙂 abc " * 20
    found = list(pieces(Bytes(), list(text.encode())))
    assert len(found) == len(text.encode())
    assert "".join(found) == text


def test_statistics_of_all_rows(capsys: pytest.CaptureFixture[str], source: str, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "more.jsonl", [CHAT, CHAT, CHAT[:2]])
    preview(tokenizer(), PreviewSettings([source, str(tmp_path / "more.jsonl")], rows=1, statistics=True))
    out = capsys.readouterr().out
    rows = [row for chat in (CHAT, CHAT[2:], CHAT[:2], CHAT, CHAT, CHAT[:2]) for row in Masker(tokenizer())(chat).rows]
    lengths, supervised = [len(row.ids) for row in rows], [sum(row.mask) for row in rows]
    assert f"6 rows of 6 chats, {sum(lengths)} tokens, {sum(supervised)} supervised" in out
    assert f"{min(lengths):>9}" in out
    assert f"{max(lengths):>9}\n" in out
    assert "chats that are there more than once: 2, up to 3 times" in out
    assert "languages (guessed): other 6 (100.0%)" in out
    assert tokenizer().chat_template in out
    assert out.count("⟦") == 2
    prepare(tokenizer(), PrepareSettings([source, str(tmp_path / "more.jsonl")], tmp_path / "out"))
    capsys.readouterr()
    assert "6 rows of 6 chats" in printed(capsys, str(tmp_path / "out"), statistics=True)


def test_options_are_those_of_prepare(capsys: pytest.CaptureFixture[str], source: str, tmp_path: Path) -> None:
    assert printed(capsys, source, rows=1, last_turn=True).count("⟦") == 1
    (tmp_path / "a.jinja").write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    assert "<red>⟦<blue>⟧<up>⟦<down>⟧" in printed(capsys, source, rows=1, chat_template=str(tmp_path / "a.jinja"))


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


def test_a_file_without_rows_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(UserError, match=r"a\.jsonl: holds no row"):
        preview(tokenizer(), PreviewSettings([str(tmp_path / "a.jsonl")]))
