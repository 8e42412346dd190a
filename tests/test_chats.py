"""Files of chats: every accepted shape gives the same messages; whatever is no chat is named with its row."""

from __future__ import annotations

import gzip
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from headstart.data import chats as module
from headstart.data.chats import counted, files_of, key_of, listed, read_chats
from headstart.errors import UserError

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello.\u2028You?"}]
TALK = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello.\u2028You?"}]
PARTS = [{"type": "text", "text": "Hel"}, {"type": "text", "value": "lo.\u2028"}, "You?"]

SHAPES: dict[str, Any] = {
    "messages": {"id": 3, "messages": MESSAGES},
    "messages beside empty fields": {"messages": MESSAGES, "tools": [], "images": None},
    "conversations": {"conversations": TALK},
    "conversations with roles": {"conversations": MESSAGES},
    "messages with from": {"messages": TALK},
    "prompt and response": {"prompt": "Hi", "response": "Hello.\u2028You?"},
    "prompt and completion": {"prompt": MESSAGES[:1], "completion": "Hello.\u2028You?"},
    "bare list": MESSAGES,
    "parts": [MESSAGES[0], {"role": "assistant", "content": PARTS}],
    "other keys": [{"content": "Hi", "role": "USER", "name": None}, {**MESSAGES[1], "weight": 1}],
}

BAD: list[tuple[Any, str, str]] = [
    ([], "empty chat", ""),
    ({"messages": []}, "empty chat", ""),
    ([{"role": "system", "content": "s"}], "no user turn", "roles system"),
    ([MESSAGES[1], MESSAGES[0]], "starts with an assistant turn", "roles assistant, user"),
    (
        [{"role": "system", "content": "s"}, MESSAGES[1], MESSAGES[0]],
        "starts with an assistant turn",
        "system, assistant",
    ),
    ([MESSAGES[0], {"role": "assistant", "content": None}], "null content", "message 2"),
    ([MESSAGES[0], {"role": "assistant", "content": " \n"}], "empty content", "message 2, of the assistant"),
    ({"prompt": ""}, "empty content", "message 1, of the user"),
    ({"prompt": None}, "null content", "message 1"),
    ({"question": "Hi", "reply": "Hello"}, "unknown shape", "keys question, reply"),
    ({"messages": "Hi"}, "unknown shape", "keys messages"),
    ({}, "unknown shape", "keys none"),
    ("Hi", "unknown shape", "a str"),
    (None, "unknown shape", "a NoneType"),
    (["Hi"], "unknown shape", "message 1 is a str"),
    ([{"role": "user", "text": "Hi"}], "unknown shape", "message 1 has keys role, text"),
    ([{"role": "wizard", "content": "Hi"}], "unknown role", "message 1 is of 'wizard'"),
    ([{"role": None, "content": "Hi"}], "unknown role", "message 1 is of None"),
    ([{"role": "user", "content": {"a": 1}}], "content is no text", "message 1 holds a dict"),
    ([{"role": "user", "content": 7}], "content is no text", "message 1 holds a int"),
    ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "content is no text", "parts image"),
    ([{"role": "user", "content": "\ud800"}], "broken text", "surrogate"),
    (
        [MESSAGES[0], {**MESSAGES[1], "tool_calls": [{"name": "f"}]}],
        "tools, images or weights",
        "message 2 has tool_calls",
    ),
    ([MESSAGES[0], {**MESSAGES[1], "weight": 0}], "tools, images or weights", "message 2 has weight"),
    ({"messages": MESSAGES, "tools": '[{"name": "f"}]'}, "tools, images or weights", "the row has tools"),
]


def written(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_gives_the_same_messages(tmp_path: Path, shape: str) -> None:
    chats, skipped = read_chats([written(tmp_path / "a.jsonl", [SHAPES[shape]])])
    assert not skipped
    (one,) = chats
    assert [{key: message[key] for key in ("role", "content")} for message in one.messages] == MESSAGES
    if shape != "other keys":
        assert one.key == key_of(MESSAGES)


@pytest.mark.parametrize(("row", "reason", "detail"), BAD, ids=[f"{number}-{bad[1]}" for number, bad in enumerate(BAD)])
def test_a_row_that_is_no_chat_is_named(tmp_path: Path, row: Any, reason: str, detail: str) -> None:
    path = written(tmp_path / "a.jsonl", [MESSAGES, row, MESSAGES])
    chats, (fault,) = read_chats([path])
    assert [one.row for one in chats] == [1, 3]
    assert (fault.file, fault.row, fault.reason) == (str(path), 2, reason)
    assert detail in fault.detail
    for message in (f"{path}, row 2: {reason}", "Accepted rows: messages"):
        with pytest.raises(UserError, match=re.escape(message)):
            read_chats([path], strict=True)


def test_all_rows_bad(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^no row is a chat; 25 rows not used: 7 unknown shape; 3 content is no text"):
        read_chats([written(tmp_path / "a.jsonl", [row for row, _, _ in BAD])])
    with pytest.raises(UserError, match=r"a\.jsonl: holds no row"):
        read_chats([written(tmp_path / "a.jsonl", [])])


def test_lines_that_are_broken_are_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    good = json.dumps(MESSAGES, ensure_ascii=False).encode()
    number = b'[{"role": "user", "content": ' + b"1" * 5000 + b"}]"
    path.write_bytes(
        b"\n".join([b"\xef\xbb\xbf" + good, b"{'a': 1}", b"", b"\xff" + good, b"[" * 100_000, number, good])
    )
    chats, skipped = read_chats([path])
    assert [one.row for one in chats] == [1, 7]
    assert [(one.row, one.reason) for one in skipped] == [
        (2, "not JSON"),
        (4, "not UTF-8 text"),
        (5, "not JSON"),
        (6, "not JSON"),
    ]
    assert chats[0].messages == MESSAGES  # a line separator within a text does not end the line


def test_json_files_and_zipped_ones(tmp_path: Path) -> None:
    rows = [MESSAGES, {"conversations": TALK}]
    whole, lines = json.dumps(rows, indent=1).encode(), b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    (tmp_path / "a.json").write_bytes(whole)
    (tmp_path / "lines.json").write_bytes(lines)
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(whole))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "one.json").write_bytes(json.dumps({"messages": MESSAGES}).encode())
    for name, count in {"a.json": 2, "lines.json": 2, "b.json.gz": 2, "c.jsonl.gz": 2, "one.json": 1}.items():
        chats, skipped = read_chats([tmp_path / name])
        assert [(one.row, one.messages) for one in chats] == [(n + 1, MESSAGES) for n in range(count)], name
        assert not skipped


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n")
    (tmp_path / "broken.json").write_text('[{"messages": ')
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(os.urandom(10_000))[:5000])
    (tmp_path / "plain.jsonl.gz").write_text("[]")
    for path, message in {
        tmp_path / "missing.jsonl": "no such file",
        tmp_path: "not a file of chats",
        tmp_path / "a.csv": "not a file of chats; .jsonl",
        tmp_path / "broken.json": "not JSON",
        tmp_path / "cut.jsonl.gz": "cannot be read",
        tmp_path / "plain.jsonl.gz": "cannot be read",
    }.items():
        with pytest.raises(UserError, match=f"{path}: {message}"):
            read_chats([path])
    with pytest.raises(UserError, match="no file of chats is given"):
        read_chats([])


def test_shipped_is_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "__file__", str(tmp_path / "chats.py"))
    (tmp_path / "shipped").mkdir()
    with pytest.raises(UserError, match="holds no conversations"):
        files_of(["shipped"])
    (tmp_path / "shipped" / "README.md").write_text("card")
    path = written(tmp_path / "shipped" / "a.jsonl", [MESSAGES])
    assert files_of(["shipped"]) == [path]


def test_what_a_message_has_besides_is_kept(tmp_path: Path) -> None:
    thought = [MESSAGES[0], {**MESSAGES[1], "reasoning_content": "hm", "name": None}]
    (one,), _ = read_chats([written(tmp_path / "a.jsonl", [thought])])
    assert one.messages[1] == {**MESSAGES[1], "reasoning_content": "hm"}
    assert one.key != key_of(MESSAGES)


def test_keys_stand_for_content(tmp_path: Path) -> None:
    turned = [dict(reversed(message.items())) for message in MESSAGES]
    other = [MESSAGES[0], {"role": "assistant", "content": "Hello"}]
    first, _ = read_chats([written(tmp_path / "a.jsonl", [MESSAGES, other])])
    second, _ = read_chats([written(tmp_path / "b.jsonl", [turned, other])])
    assert [one.key for one in first] == [one.key for one in second]
    assert len({one.key for one in first}) == 2


def test_faults_are_counted_and_the_list_is_short(tmp_path: Path) -> None:
    _, skipped = read_chats([written(tmp_path / "a.jsonl", [MESSAGES, *[[]] * 12, {"a": 1}])])
    assert counted(skipped) == {"empty chat": 12, "unknown shape": 1}
    lines = listed(skipped).splitlines()
    assert lines[0] == "13 rows not used: 12 empty chat; 1 unknown shape"
    assert lines[-1] == "  and 3 more"
    assert len(lines) == 12


@pytest.mark.skipif("HEADSTART_TEST_DATA" not in os.environ, reason="needs HEADSTART_TEST_DATA, a folder of real files")
def test_real_files_give_chats_or_reasons() -> None:
    folder = Path(os.environ["HEADSTART_TEST_DATA"])
    files = [
        path for name in ("messy", "train") for path in (folder / name).iterdir() if path.name.endswith(module.SUFFIXES)
    ]
    assert files
    for path in files:
        try:
            chats, skipped = read_chats([path])
        except UserError as error:
            assert "no row is a chat" in str(error)  # noqa: PT017
        else:
            assert len({(one.file, one.row) for one in (*chats, *skipped)}) == len(chats) + len(skipped)
