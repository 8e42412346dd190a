"""Question files: every shape is told by its keys, and what is no question is refused by file, row and keys."""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from headstart.errors import UserError
from headstart.inference.suite import MT_BENCH, choose, question, read_suite

DATA = os.environ.get("HEADSTART_TEST_DATA")


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_spec_bench_keeps_ids_categories_and_turns(tmp_path):
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["a", "b"], "reference": ["x"]},
        {"question_id": 161, "category": "translation", "turns": ["c"]},
    ]
    first, second = read_suite(jsonl(tmp_path / "s.jsonl", rows))
    assert (first.id, first.category, first.group, first.row) == ("81", "writing", "mt_bench", 1)
    assert first.turns == ((user("a"),), (user("b"),))
    assert (second.id, second.category, second.group) == ("161", "translation", "translation")


def test_the_eight_categories_are_one_group_for_turns_only():
    for category in MT_BENCH:
        assert question({"turns": ["a"], "category": category}, 1, "s").group == "mt_bench"
        assert question({"prompt": "a", "category": category}, 1, "s").group == category


HUMAN = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
SYSTEM = {"role": "system", "content": "be brief"}
REPLY = {"role": "assistant", "content": "yes"}


@pytest.mark.parametrize(
    ("row", "id", "category", "turn"),
    [
        ({"task_id": "HumanEval/3", "prompt": "def f():"}, "HumanEval/3", "humaneval", (user("def f():"),)),
        ({"question": "how many?", "answer": "#### 3"}, "7", "stem", (user("how many?"),)),
        ({"text": "write it", "code": "x", "task_id": 11}, "11", "stem", (user("write it"),)),
        ({"prompt": "hello", "category": "chat", "id": "p"}, "p", "chat", (user("hello"),)),
        ({"prompt": [SYSTEM, user("hello")]}, "7", "stem", (SYSTEM, user("hello"))),
        ({"messages": [SYSTEM, user("a"), REPLY, user("b"), REPLY]}, "7", "stem", (SYSTEM, user("a"))),
        ({"messages": [user("a"), REPLY, user("b")]}, "7", "stem", (user("a"), REPLY, user("b"))),
        ({"conversations": HUMAN}, "7", "stem", (user("a"),)),
        ({"messages": [user("a"), {"role": "assistant", "tool_calls": []}]}, "7", "stem", (user("a"),)),
        ([user("a"), REPLY], "7", "stem", (user("a"),)),
        ("plain", "7", "stem", (user("plain"),)),
    ],
)  # fmt: skip
def test_shapes_are_told_by_their_keys(row, id, category, turn):
    found = question(row, 7, "stem")
    assert (found.id, found.category, found.group, found.turns) == (id, category, category, (turn,))


def test_files_of_every_kind(tmp_path):
    rows = [{"prompt": "a"}, {"prompt": "b\u2028c"}]
    lines = jsonl(tmp_path / "mine.jsonl", rows)
    (tmp_path / "mine.jsonl.gz").write_bytes(gzip.compress(lines.read_bytes()))
    (tmp_path / "mine.json").write_text(json.dumps(rows, indent=2))
    (tmp_path / "mine.txt").write_bytes("a\r\n\n  \nb\u2028c\n".encode())
    suites = [read_suite(tmp_path / f"mine.{end}") for end in ("jsonl", "jsonl.gz", "json", "txt")]
    for suite in suites:
        assert [one.turns[0][0]["content"] for one in suite] == ["a", "b\u2028c"]
        assert {one.category for one in suite} == {"mine"}
    assert [one.row for one in suites[3]] == [1, 4], "a line keeps its number"


def test_keys_tell_questions_apart():
    same = [question({"prompt": "a", "id": 1}, row, "s").key for row in (1, 1, 2)]
    assert same[0] == same[1] != same[2]
    assert question({"prompt": "b", "id": 1}, 1, "s").key != same[0]


def test_choose_takes_every_kth_then_the_first(tmp_path):
    questions = read_suite(jsonl(tmp_path / "s.jsonl", [{"prompt": str(n)} for n in range(10)]))
    assert [one.row for one in choose(questions, 3)] == [1, 4, 7, 10]
    assert [one.row for one in choose(questions, 3, 2)] == [1, 4]
    assert [one.row for one in choose(questions, limit=99)] == list(range(1, 11))
    for wrong in ({"every": 0}, {"limit": 0}):
        with pytest.raises(UserError, match="1 or more"):
            choose(questions, **wrong)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"instruction": "a", "output": "b"}, "keys instruction, output"),
        ({}, r"keys \(none\)"),
        ({"turns": []}, "at least one"),
        ({"turns": "a"}, "list"),
        ({"turns": ["a", 3]}, "turn 2 holds a number"),
        ({"turns": ["a", " "]}, "turn 2 holds an empty text"),
        ({"question": None}, "question holds null"),
        ({"prompt": {"a": 1}}, "prompt holds a mapping"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "assistant", "content": "b"}]}, "no user turn; its roles are assistant"),
        ({"messages": [{"role": "user", "content": None}]}, "message 1 .* keys role, content"),
        ({"messages": [3, {"role": "user", "content": "a"}]}, "message 1 is a number"),
        (3, "messages has to be a list"),
    ],
)
def test_a_row_that_is_no_question_is_named(tmp_path, row, says):
    path = jsonl(tmp_path / "s.jsonl", [{"prompt": "fine"}, row])
    with pytest.raises(UserError, match=rf"s\.jsonl, row 2: .*{says}"):
        read_suite(path)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("none.jsonl", None, "no such file"),
        ("empty.jsonl", "", "holds no question"),
        ("empty.txt", "\n \n", "holds no question"),
        ("list.json", "[]", "holds no question"),
        ("rows.csv", "a,b\n", "not a file of questions"),
        ("broken.jsonl", '{"prompt": "a"}\n{"prompt": \n', "line 2"),
        ("broken.json", '{"prompt": "a"}\n{"prompt": "b"}\n', "line 2: not JSON .*jsonl"),
        ("long.json", f'{{"prompt": {"9" * 5000}}}', "not JSON .*4300"),
        ("deep.json", "[" * 200_000, "not JSON"),
        ("cut.txt.gz", "no gzip", "cannot be read"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, name, content, says):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=rf"{name}.*{says}"):
        read_suite(tmp_path / name)


def test_a_folder_is_no_file_of_questions(tmp_path):
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(UserError, match="not a file of questions"):
        read_suite(tmp_path / "folder.jsonl")


@pytest.mark.skipif(not DATA, reason="HEADSTART_TEST_DATA names no folder of test data")
def test_the_real_sets_are_read():
    spec = read_suite(Path(str(DATA)) / "eval" / "spec_bench.jsonl")
    assert len(spec) == 480
    assert set(Counter(one.group for one in spec).values()) == {80}
    assert sum(len(one.turns) for one in choose(spec, 12)) > 40
    sizes = {"humaneval": 164, "gsm8k_test": 1319, "mbpp": 974}
    for name, size in sizes.items():
        suite = read_suite(Path(str(DATA)) / "eval" / f"{name}.jsonl")
        assert (len(suite), {one.category for one in suite}) == (size, {name})
