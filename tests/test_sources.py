"""Every kind of file and data set gives the same rows; what cannot be read is told before anything is done."""

from __future__ import annotations

import csv
import gzip
import json
import os
import random
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest

from headstart.data import sources
from headstart.data.chats import Chat, chat_of, files_of, raw_rows, read_chats
from headstart.data.sources import sources_of
from headstart.errors import UserError

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello.\u2028You?"}]
ROWS: list[Any] = [{"messages": MESSAGES}, {"messages": [*MESSAGES, *MESSAGES]}, {"messages": MESSAGES[:1]}]


def chats(name: str | Path) -> list[tuple[int, Any]]:
    """(row, messages) of what a name stands for."""
    found = [chat_of(raw) for raw in raw_rows(sources_of([name]))]
    assert all(isinstance(one, Chat) for one in found), found
    return [(one.row, one.messages) for one in found if isinstance(one, Chat)]


EXPECTED = [(number, row["messages"]) for number, row in enumerate(ROWS, 1)]


def zst(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as handle:
        handle.write(content)
    return bytes(sink.getvalue())


LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
WHOLE = json.dumps(ROWS, indent=1).encode()
FILES = {
    "a.jsonl": LINES,
    "a.JSONL": LINES,
    "a.jsonl.gz": gzip.compress(LINES),
    "a.jsonl.zst": zst(LINES),
    "a.json": WHOLE,
    "one line.json": json.dumps(ROWS).encode(),
    "b.json.gz": gzip.compress(WHOLE),
    "b.json.zst": zst(WHOLE),
    "lines.json": LINES,
    "mark.json": b"\xef\xbb\xbf" + WHOLE,
    "bare lists in lines.json": b"".join(json.dumps(row["messages"]).encode() + b"\n" for row in ROWS),
    "two members.jsonl.gz": gzip.compress(LINES[:50]) + gzip.compress(LINES[50:]),
    "a\nb:c 'd'.jsonl": LINES,
}


@pytest.mark.parametrize("name", FILES)
def test_files_of_json(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    assert chats(tmp_path / name) == EXPECTED


def test_one_value_alone(tmp_path: Path) -> None:
    for content in (json.dumps(ROWS[0]), json.dumps(ROWS[0], indent=2), json.dumps(ROWS[0]) + "\n"):
        (tmp_path / "one.json").write_text(content)
        assert chats(tmp_path / "one.json") == EXPECTED[:1]


@pytest.mark.parametrize("seed", range(10))
def test_a_list_is_read_piece_by_piece(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of the pieces, the values are those of a parser that has the whole text."""
    source = random.Random(seed)
    kinds: list[Any] = [source.random, lambda: source.randrange(10**9), lambda: [{"]": None}], lambda: 'é🙂\\"\n,]']
    values = [source.choice(kinds)() for _ in range(20)]
    monkeypatch.setattr(sources, "CHUNK", source.randrange(1, 9))
    (tmp_path / "a.json").write_text(json.dumps(values, ensure_ascii=False, indent=source.choice([None, 1])))
    assert [value for _, value in sources_of([tmp_path / "a.json"])[0].rows()] == values


def test_csv(tmp_path: Path) -> None:
    with open(tmp_path / "a.csv", "w", newline="", encoding="utf-8-sig") as handle:
        table = csv.writer(handle)
        table.writerow(["id", "prompt", "response"])
        table.writerow(["007", "What is\n2, or 3?", 'It is "2".'])
        table.writerow(["008", "12", "13"])
        table.writerow(["009", "short"])
    found = chats(tmp_path / "a.csv")
    assert [[message["content"] for message in messages] for _, messages in found] == [
        ["What is\n2, or 3?", 'It is "2".'],
        ["12", "13"],
        ["short"],
    ]
    (tmp_path / "b.csv").write_text("messages\n" + f'"{json.dumps(MESSAGES)}"'.replace('"', '""')[1:-1] + "\n")
    assert chats(tmp_path / "b.csv") == EXPECTED[:1]
    (tmp_path / "c.csv").write_bytes(b"prompt,response\na,\xff\n")
    assert reason(tmp_path / "c.csv") == "broken text"
    (tmp_path / "d.csv").write_text("prompt,response\na,half, and half\n")  # which half would be trained on?
    assert reason(tmp_path / "d.csv") == "more cells than names"
    for sign in ";\t":
        (tmp_path / "e.csv").write_text(f"prompt{sign}response\na, b{sign}c\n")
        ((_, said),) = chats(tmp_path / "e.csv")
        assert [message["content"] for message in said] == ["a, b", "c"]


def reason(path: Path) -> str:
    """Why the first row of a file is no chat."""
    return getattr(chat_of(next(raw_rows(sources_of([path])))), "reason", "")


def test_an_empty_table_has_no_rows(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"prompt": [], "response": []}).to_parquet(tmp_path / "a.parquet")
    assert chats(tmp_path / "a.parquet") == []


CALLS = [{"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {name: 1}}]} for name in "ab"]
MIXED: list[Any] = [  # of one type by column, as a table wants it
    {"messages": [*MESSAGES, {"role": "tool", "content": "x", "name": "f"}]},
    *({"messages": [MESSAGES[0], call]} for call in CALLS),
]


@pytest.mark.parametrize("kind", ["parquet", "saved", "splits", "one split"])
def test_tables(tmp_path: Path, kind: str) -> None:
    """A table fills up every mapping with the fields of the others; what is empty there was never written."""
    made, name = datasets.Dataset.from_list(MIXED), str(tmp_path / "saved")
    if kind == "parquet":
        name = str(tmp_path / "a.parquet")
        made.to_parquet(name)
    elif kind == "saved":
        made.save_to_disk(name)
    else:
        split = {"train": made} if kind == "splits" else {}
        datasets.DatasetDict({**split, "odd": datasets.Dataset.from_list(MIXED[:1])}).save_to_disk(name)
        assert len(chats(f"{name}:odd")) == 1
        with pytest.raises(UserError, match=r"saved:no: has the splits .*odd; name one as .*/saved:SPLIT"):
            chats(f"{name}:no")
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in MIXED))
    assert chats(name) == chats(path)[: 1 if kind == "one split" else 3]


def test_a_data_set_of_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def load(*names: Any, **options: Any) -> Any:
        asked.append((names, options))
        return iter(ROWS) if options["split"] else {"train": iter(ROWS)}

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", load)
    assert chats("user/name") == EXPECTED
    assert chats("user/name/config@v1:train_sft") == EXPECTED
    assert asked == [
        (("user/name", None), {"revision": None, "split": None, "streaming": True}),
        (("user/name", "config"), {"revision": "v1", "split": "train_sft", "streaming": True}),
    ]

    def fail(*_: Any, **__: Any) -> Any:
        raise ConnectionError("cannot reach it\nmore")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(UserError, match=r"^user/name: cannot be read as a data set of the Hub.*\(cannot reach it\)$"):
        chats("user/name")


def test_what_cannot_be_read(tmp_path: Path) -> None:
    contents = {
        "a.txt": b"a,b\n",
        "broken.json": b'[{"messages": ',
        "more.json": b"[1, 2] x",
        "half.json": b'[{"a": 1}, {"b" 2}]',
        "deep.json": b"[" * 100_000,
        "cut.jsonl.gz": gzip.compress(os.urandom(10_000))[:5000],
        "cut.jsonl.zst": zst(os.urandom(10_000))[:5000],
        "plain.jsonl.gz": b"[]",
        "plain.parquet": b"PAR1",
        "open.csv": b'prompt,response\na,b\nc,"d\ne,f\ng,h\n',
        "one.json": b'{"prompt": "a"} {',
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "prepared").mkdir()
    (tmp_path / "prepared" / "meta.json").write_text("{}")
    for name, message in {
        "missing.jsonl": "no such file",
        "missing/x.jsonl": "no such file",
        "": "not a file of chats, and no folder that `datasets` saved",
        "prepared": "holds chats that are prepared already",
        "a.txt": "not a file of chats; .jsonl, ",
        "broken.json": r"not JSON: .* \(behind row 1\)",
        "more.json": r"not JSON: 'x' follows \(behind row 2\)",
        "half.json": r"not JSON: .* \(behind row 2\)",
        "deep.json": "not JSON: maximum recursion",
        "cut.jsonl.gz": "cannot be read",
        "cut.jsonl.zst": "cannot be read",
        "plain.jsonl.gz": "cannot be read",
        "plain.parquet": "cannot be read as Parquet",
        "open.csv": r"not CSV \(unexpected end of data, behind row 1\)",
        "one.json": r"not JSON: '\{' follows \(behind row 1\)",
    }.items():
        path = tmp_path / name
        with pytest.raises(UserError, match=f"^{path}: {message}"):
            read_chats([path])
    with pytest.raises(UserError, match="no file of chats is given"):
        read_chats([])


def test_files_and_their_hashes(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "b.jsonl").write_bytes(LINES)
    assert files_of([tmp_path / "a.jsonl"]) == [tmp_path / "a.jsonl"]
    one, same = sources_of([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
    assert one.hash() == same.hash()
    assert one.identity() == f"a.jsonl {one.hash()[:16]}"
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    (saved,) = sources_of([tmp_path / "saved"])
    before = saved.hash()
    datasets.Dataset.from_list(ROWS[:2]).save_to_disk(tmp_path / "saved")
    assert saved.hash() != before
    with pytest.raises(UserError, match="is no file"):
        files_of([tmp_path / "saved"])


def test_shipped_is_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "__file__", str(tmp_path / "sources.py"))
    (tmp_path / "shipped").mkdir()
    with pytest.raises(UserError, match="holds no conversations"):
        files_of(["shipped"])
    (tmp_path / "shipped" / "README.md").write_text("card")
    (tmp_path / "shipped" / "a.jsonl").write_bytes(LINES)
    (tmp_path / "shipped" / "long").mkdir()
    (tmp_path / "shipped" / "long" / "b.jsonl").write_bytes(LINES)
    assert files_of(["shipped"]) == [tmp_path / "shipped" / "a.jsonl"]
    assert files_of(["shipped-long"]) == [tmp_path / "shipped" / "long" / "b.jsonl"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_utf16_is_told_once_for_the_file(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text('{"prompt": "Hi", "response": "Hello"}\n', encoding="utf-16")
    with pytest.raises(UserError, match=f"{name}: is UTF-16 text; save it as UTF-8"):
        list(sources_of([tmp_path / name])[0].rows())


@pytest.mark.parametrize("text", ["", " \n", "\ufeff"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_a_file_without_anything_has_no_rows(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    found = list(sources_of([tmp_path / name])[0].rows())
    assert found == [] or name == "a.jsonl"  # a line with a mark alone is told as no JSON
