"""Files of chats: every accepted shape gives the same messages; whatever is no chat is named with its row."""

from __future__ import annotations

import datetime
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from headstart.data.chats import Chat, Skipped, chat_of, counted, key_of, listed, read_chats
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
    "JSON in a cell": {"messages": json.dumps(MESSAGES)},
    "input and output": {"input": "Hi", "output": "Hello.\u2028You?"},
    "an empty list beside": {"messages": [], "conversations": TALK},
    "keys of both": [{"role": "user", "value": "Hi"}, {"from": "gpt", "content": MESSAGES[1]["content"]}],
    "question and answer": {"question": "Hi", "answer": "Hello.\u2028You?"},
    "prompt and completion as messages": {"prompt": MESSAGES[:1], "completion": MESSAGES[1:]},
    "instruction and output": {"instruction": "Hi", "input": "", "output": "Hello.\u2028You?"},
    "history": {"instruction": "Hi", "output": "Hello.\u2028You?", "history": []},
    "other names of the roles": [
        {"role": "prompter", "content": "Hi"},
        {"role": "ai", "content": MESSAGES[1]["content"]},
    ],
    "parts of the responses API": [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": MESSAGES[1]["content"]}]},
    ],
}

CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
CALLED = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "It is 2."},
]
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}

CALLS: dict[str, list[Any]] = {
    "arguments as a mapping": CALLED,
    "arguments as a text": [
        CALLED[0],
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}]},
        *CALLED[2:],
    ],
    "calls as a text": [CALLED[0], {"role": "assistant", "tool_calls": json.dumps([CALL])}, *CALLED[2:]],
    "one call as a mapping": [CALLED[0], {"role": "assistant", "content": "", "tool_calls": CALL}, *CALLED[2:]],
    "calls that are flat": [
        CALLED[0],
        {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {"x": 1}}]},
        *CALLED[2:],
    ],
    "function_call": [
        CALLED[0],
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}},
        {"role": "function", "content": "2"},
        CALLED[3],
    ],
    "roles of ShareGPT": [
        {"from": "human", "value": "Hi"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "It is 2."},
    ],
    "parts": [
        CALLED[0],
        {"role": "assistant", "content": [{"type": "tool_call", "value": '{"name": "f", "arguments": {"x": 1}}'}]},
        {"role": "tool", "content": [{"type": "text", "value": "2"}]},
        CALLED[3],
    ],
    "parts of another API": [
        CALLED[0],
        {"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": {"x": 1}}]},
        {"role": "tool", "content": [{"type": "tool_result", "content": [{"type": "text", "text": "2"}]}]},
        CALLED[3],
    ],
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
    (
        {"prompt": "Hi", "response": ["Hello", "Yo"]},
        "content is no text",
        "2 texts where one of the assistant",
    ),
    (MESSAGES[0], "unknown shape", "a message alone, where its chat is needed: keys role, content"),
    ({"messages": "Hi"}, "unknown shape", "messages holds text that is no JSON list: keys messages"),
    ({"id": 1, "messages": {"0": MESSAGES[0]}}, "unknown shape", "messages holds no list: keys id, messages"),
    ({}, "unknown shape", "keys none"),
    (7, "unknown shape", "a int"),
    (" ", "empty content", "the text"),
    ({"text": "<|im_start|>user\nHi<|im_end|>"}, "a rendered chat as plain text", "<|im_start|>"),
    (None, "unknown shape", "a NoneType"),
    (["Hi"], "unknown shape", "message 1 is a str"),
    ([{"role": "user", "text": "Hi"}], "unknown shape", "message 1 has keys role, text"),
    ([{"role": "wizard", "content": "Hi"}], "unknown role", "message 1 is of 'wizard'"),
    ([{"role": None, "content": "Hi"}], "unknown role", "message 1 is of None"),
    ([{"role": "user", "content": {"a": 1}}], "content is no text", "message 1 holds a dict"),
    ([{"role": "user", "content": 7}], "content is no text", "message 1 holds a int"),
    ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "content is no text", "parts image"),
    ([{"role": "user", "content": "\ud800"}], "broken text", "surrogate"),
    ([MESSAGES[0], {**MESSAGES[1], "tool_calls": [{"no": "name"}]}], "tool call", "message 2 has one without a name"),
    ([MESSAGES[0], {**MESSAGES[1], "tool_calls": "f("}], "tool call", "message 2 has one without a name: f("),
    ([MESSAGES[0], {**MESSAGES[1], "weight": 0.5}], "weight of a turn", "message 2 has weight 0.5"),
    ({"messages": MESSAGES, "tools": "f("}, "tools are no list of functions", "f("),
    ({"messages": MESSAGES, "tools": [{"type": "web_search"}]}, "tools are no list of functions", "web_search"),
    ({"messages": MESSAGES, "tools": {"get": {"description": "d"}}}, "tools are no list of functions", "get"),
    ({"messages": MESSAGES, "images": ["a.png"]}, "images, audio or video", "the row has images"),
    ({"prompt": "Hi", "chosen": "yes", "rejected": "no"}, "unknown shape", "keys prompt, chosen, rejected"),
    ({"instruction": "Hi", "output": "Ho", "history": [["a"]]}, "unknown shape", "history is no list of pairs"),
    ([{"role": "tool", "content": "2"}, MESSAGES[0]], "starts with a tool turn", "roles tool, user"),
    ([MESSAGES[0], {**MESSAGES[1], "reasoning_content": {"a": 1}}], "reasoning is no text", "message 2 holds a dict"),
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


@pytest.mark.parametrize("shape", CALLS)
def test_every_shape_of_a_call_gives_the_same_messages(tmp_path: Path, shape: str) -> None:
    """Five turns of rows that differ in the types of their fields, with tools as a list or a text."""
    rows = [
        {"messages": CALLS[shape], "tools": tools}
        for tools in ([FUNCTION], json.dumps([FUNCTION]), [{"type": "function", "function": FUNCTION}])
    ]
    chats, skipped = read_chats([written(tmp_path / "a.jsonl", [*rows, {"messages": CALLED, "functions": [FUNCTION]}])])
    assert not skipped
    for one in chats:
        assert one.messages == CALLED
        assert one.tools == ({"type": "function", "function": FUNCTION},)


def test_reasoning_in_any_field_or_part(tmp_path: Path) -> None:
    shapes = [{**MESSAGES[1], name: "hm"} for name in ("reasoning_content", "reasoning", "thinking", "thought")] + [
        {"role": "assistant", "content": [{"type": kind, "value": "hm"}, *PARTS]} for kind in ("reasoning", "thinking")
    ]
    chats, skipped = read_chats([written(tmp_path / "a.jsonl", [[MESSAGES[0], shape] for shape in shapes])])
    assert not skipped
    assert all(one.messages[1] == {**MESSAGES[1], "reasoning_content": "hm"} for one in chats)


def test_instruction_input_system_and_history(tmp_path: Path) -> None:
    row = {"instruction": "Add.", "input": "1 2", "output": "3", "system": "s", "history": [["Hi", "Ho"]]}
    (one,), _ = read_chats([written(tmp_path / "a.jsonl", [row])])
    assert [(message["role"], message["content"]) for message in one.messages] == [
        ("system", "s"),
        ("user", "Hi"),
        ("assistant", "Ho"),
        ("user", "Add.\n\n1 2"),
        ("assistant", "3"),
    ]


def test_roles_and_weights(tmp_path: Path) -> None:
    chat = [
        {"role": "developer", "content": "d"},
        MESSAGES[0],
        {**MESSAGES[1], "weight": 0},
        {"role": "assistant", "content": "more", "train": False},
        {"role": "user", "content": "so", "weight": 0},
        {**MESSAGES[1], "loss_weight": 1.0},
    ]
    (one,), _ = read_chats([written(tmp_path / "a.jsonl", [chat])])
    assert [message["role"] for message in one.messages] == [
        "developer",
        "user",
        *["assistant"] * 2,
        "user",
        "assistant",
    ]
    assert one.muted == (2, 3)
    assert not any(message.keys() - {"role", "content"} for message in one.messages)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])  # a table leaves null away
def test_thoughts_and_results_without_content(tmp_path: Path, kind: str) -> None:
    chat = [MESSAGES[0], {"role": "assistant", "content": None, "reasoning_content": "Hm"}]
    chat += [MESSAGES[0], {"role": "assistant", "content": None, "tool_calls": '{"name": "f"}'}]
    chat += [{"role": "tool", "content": None}, MESSAGES[1]]
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        written(path, [{"messages": chat}])
    else:
        import datasets

        datasets.Dataset.from_list([{"messages": chat}]).to_parquet(path)
    (one,), _ = read_chats([path])
    assert [message["content"] for message in one.messages] == ["Hi", "", "Hi", "", "", MESSAGES[1]["content"]]
    assert one.messages[1]["reasoning_content"] == "Hm"


def test_a_call_that_is_no_call_is_what_was_said(tmp_path: Path) -> None:
    chat = [{"from": "human", "value": "Hi"}, {"from": "function_call", "value": "I cannot."}]
    (one,), _ = read_chats([written(tmp_path / "a.jsonl", [{"conversations": chat}])])
    assert one.messages[1] == {"role": "assistant", "content": "I cannot."}


@pytest.mark.parametrize(("row", "reason", "detail"), BAD, ids=[f"{number}-{bad[1]}" for number, bad in enumerate(BAD)])
def test_a_row_that_is_no_chat_is_named(tmp_path: Path, row: Any, reason: str, detail: str) -> None:
    path = written(tmp_path / "a.jsonl", [MESSAGES, row, MESSAGES])
    chats, (fault,) = read_chats([path])
    assert [one.row for one in chats] == [1, 3]
    assert (fault.file, fault.row, fault.reason) == (str(path), 2, reason)
    assert detail in fault.detail
    with pytest.raises(UserError, match=re.escape(f"{path}, row 2: {reason}")) as refused:
        read_chats([path], strict=True)
    assert ("Accepted rows: messages" in str(refused.value)) is (reason == "unknown shape")


def test_all_rows_bad(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^no row is a chat; 38 rows not used: 11 unknown shape; 4 content is no"):
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


def test_plain_texts_are_no_prompts(tmp_path: Path) -> None:
    chats, (text,) = read_chats([written(tmp_path / "a.jsonl", [MESSAGES, "Once upon a time"])])
    assert len(chats) == 1
    assert text.reason == "plain text, no chat"


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
    assert lines[-2] == "  and 3 more"
    assert lines[-1].startswith("Accepted rows: messages (role, content), ")
    assert len(lines) == 13


@pytest.mark.skipif("HEADSTART_TEST_DATA" not in os.environ, reason="needs HEADSTART_TEST_DATA, a folder of real files")
def test_real_files_give_chats_or_reasons() -> None:
    folder = Path(os.environ["HEADSTART_TEST_DATA"])
    files = [path for name in ("messy", "train") for path in (folder / name).iterdir()]
    assert files
    for path in files:
        try:
            chats, skipped = read_chats([path])
        except UserError as error:
            assert "no row is a chat" in str(error)  # noqa: PT017
        else:
            assert len({(one.file, one.row) for one in (*chats, *skipped)}) == len(chats) + len(skipped)


@pytest.mark.parametrize("kind", [["text"], {"a": 1}, 5])
def test_parts_of_a_kind_that_is_no_word(kind: object) -> None:
    """Such a kind cannot be looked up: the row is told, as any other whose content is no text."""
    message = {"role": "user", "content": [{"type": kind, "text": "see"}]}
    found = chat_of(("a.jsonl", 1, {"messages": [message, {"role": "assistant", "content": "yes"}]}))
    assert isinstance(found, Skipped)
    assert found.reason == "content is no text"
    result = {"role": "tool", "content": [{"type": "tool_result", "content": [{"type": kind, "text": "see"}]}]}
    chat_of(("a.jsonl", 1, {"messages": [{"role": "user", "content": "hi"}, result]}))


def test_fields_of_a_table_that_json_does_not_know_are_left_away() -> None:
    """Logs of chats have the time of each message, which a Parquet file gives as a date."""
    when = datetime.datetime(2024, 1, 1)
    rows = [
        {"role": "user", "content": "Hi", "timestamp": when},
        {"role": "assistant", "content": "Hello", "raw": b"x"},
    ]
    found = chat_of(("a.parquet", 1, {"conversation": rows, "timestamp": when}))
    assert isinstance(found, Chat)
    assert found.messages == [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
