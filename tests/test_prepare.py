"""Prepared folders: what they hold, when they are made anew, and what is refused."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headstart.data import prepare as module
from headstart.data.chats import key_of
from headstart.data.groups import locked
from headstart.data.masks import Masker
from headstart.data.prepare import PrepareSettings, load_prepared, prepare, read_meta
from headstart.errors import UserError
from headstart.files import read_jsonl, write_jsonl
from zoo import backbone, chats, tokenizer

PROMPT = {"prompt": "red"}
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' and m.content != 'sun' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "chats.jsonl", [{"messages": chat} for chat in chats(6)])
    return tmp_path / "chats.jsonl"


def tokenizer_with(template: str) -> Any:
    changed = copy.deepcopy(tokenizer())
    changed.chat_template = template
    return changed


def stamps(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_rows_are_what_the_masker_makes(source: Path, tmp_path: Path) -> None:
    meta = prepare(backbone(), PrepareSettings([str(source)], tmp_path / "out"))
    rows = load_prepared(tmp_path / "out", backbone())
    masked = [Masker(tokenizer())(chat) for chat in chats(6)]
    assert [row["ids"].tolist() for row in rows] == [one.ids for one in masked]
    assert [row["mask"].tolist() for row in rows] == [list(one.mask) for one in masked]
    assert rows["key"] == [key_of(chat) for chat in chats(6)]
    assert rows["place"] == [f"{source}, row {number}" for number in range(1, 7)]
    assert meta == read_meta(tmp_path / "out")
    counts = meta["counts"]
    assert counts["tokens"] == sum(len(one.ids) for one in masked)
    assert counts["supervised"] == sum(sum(one.mask) for one in masked)
    assert meta["template"] == tokenizer().chat_template
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chats.jsonl", "out"]


def test_the_columns_are_small(source: Path, tmp_path: Path) -> None:
    prepare(tokenizer(), PrepareSettings([str(source)], tmp_path / "out"))
    stored = load_prepared(tmp_path / "out").features
    assert stored["ids"].feature.dtype == "int32"
    assert stored["mask"].feature.dtype == "uint8"


def test_the_same_again_is_there_already(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = PrepareSettings([str(source)], tmp_path / "out")
    first = prepare(tokenizer(), settings)
    before = stamps(tmp_path / "out")
    assert prepare(tokenizer(), settings) == first
    assert stamps(tmp_path / "out") == before
    assert "already there" in capsys.readouterr().out


@pytest.mark.parametrize("change", ["max_length", "drop_empty", "template", "vocabulary", "special token", "content"])
def test_every_change_makes_it_anew(source: Path, tmp_path: Path, change: str) -> None:
    """The folder with a history equals one made in a fresh place."""
    mine, settings = copy.deepcopy(tokenizer()), PrepareSettings([str(source)], tmp_path / "out")
    mine.chat_template = "{{ bos_token }}" + mine.chat_template
    prepare(mine, settings)
    before = stamps(tmp_path / "out")
    if change == "max_length":
        settings.max_length = 40
    elif change == "drop_empty":
        settings.drop_empty = True
    elif change == "template":
        mine.chat_template = "{{ bos_token }}" + mine.chat_template
    elif change == "vocabulary":
        mine.add_tokens(["red"])
    elif change == "special token":
        mine.bos_token = "<pad>"
    else:
        write_jsonl(source, [{"messages": chat} for chat in chats(6, seed=1)])
    prepare(mine, settings)
    assert stamps(tmp_path / "out") != before
    prepare(mine, replace(settings, out=tmp_path / "fresh"))
    made, fresh = load_prepared(tmp_path / "out", mine), load_prepared(tmp_path / "fresh", mine)
    assert list(made.with_format(None)) == list(fresh.with_format(None))


@pytest.mark.parametrize(
    ("rows", "template", "named"),
    [
        ([*chats(1), PROMPT, PROMPT], None, r"2 rows not used: 2 nothing.*\n.*row 2: .*no assistant turn.*\n.*row 3"),
        ([[{"role": "user", "content": "a"}, {"role": "assistant", "content": c}] for c in ("red", "sun")], MARKED,
         r"row 2: nothing to learn .the template marks no reply"),
    ],
)  # fmt: skip
def test_a_row_with_nothing_to_learn_refuses_the_set(
    tmp_path: Path, rows: list[Any], template: str | None, named: str
) -> None:
    write_jsonl(tmp_path / "a.jsonl", rows)
    mine = tokenizer_with(template or tokenizer().chat_template)
    settings = PrepareSettings([str(tmp_path / "a.jsonl")], tmp_path / "out")
    with pytest.raises(UserError, match=named):
        prepare(mine, settings)
    assert not settings.out.exists()
    settings.drop_empty = True
    assert prepare(mine, settings)["counts"]["rows"] == 1
    assert next(read_jsonl(settings.out / "skipped.jsonl"))["reason"] == "nothing to learn"


def test_rows_are_cut_at_max_length_and_dropped_without_a_reply(source: Path, tmp_path: Path) -> None:
    masked = [Masker(tokenizer())(chat) for chat in chats(6)]
    starts = [one.mask.index(1) for one in masked]
    limit = sorted(starts)[2] + 1  # one token of the third reply
    meta = prepare(tokenizer(), PrepareSettings([str(source)], tmp_path / "out", max_length=limit))
    kept = [one for one, start in zip(masked, starts, strict=True) if start < limit]
    rows = load_prepared(tmp_path / "out")
    assert [row["ids"].tolist() for row in rows] == [one.ids[:limit] for one in kept]
    assert [row["mask"].tolist() for row in rows] == [list(one.mask[:limit]) for one in kept]
    assert all(np.any(row["mask"]) for row in rows)
    assert 0 < len(kept) < 6
    assert meta["counts"]["truncated"] == len(kept)
    assert meta["counts"]["skipped"] == {"no reply within max_length": 6 - len(kept)}
    with pytest.raises(UserError, match=r"no row is left to train on; 6 rows not used: 6 no reply within max_length"):
        prepare(tokenizer(), PrepareSettings([str(source)], tmp_path / "out", max_length=2))


def test_bad_rows_are_listed_or_fatal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that are no chat, and those that the template refuses, by file, row and roles."""
    system = [{"role": "system", "content": "s"}, *chats(1)[0]]
    write_jsonl(tmp_path / "a.jsonl", [chats(1)[0], [], system, chats(1)[0]])
    mine = tokenizer_with("{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + MARKED)
    settings = PrepareSettings([str(tmp_path / "a.jsonl")], tmp_path / "out")
    meta = prepare(mine, settings)
    assert load_prepared(settings.out)["place"] == [f"{tmp_path / 'a.jsonl'}, row {row}" for row in (1, 4)]
    assert meta["counts"]["skipped"] == {"empty chat": 1, "the template refuses it": 1}
    assert meta["counts"]["duplicates"] == 1
    assert [row["row"] for row in read_jsonl(settings.out / "skipped.jsonl")] == [2, 3]
    assert "a.jsonl, row 3: the template refuses it (no system)" in capsys.readouterr().out
    with pytest.raises(UserError, match="row 2: empty chat"):
        prepare(mine, PrepareSettings(settings.input, settings.out, strict=True))
    write_jsonl(tmp_path / "a.jsonl", [chats(1)[0], system])
    with pytest.raises(UserError, match="row 2: the template refuses it"):
        prepare(mine, PrepareSettings(settings.input, settings.out, strict=True))
    assert read_meta(settings.out) == meta  # a refusal leaves what is there


def test_other_things_are_not_replaced(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "meta.json").write_text('{"mine": 1}')
    for name in ("file", "folder"):
        with pytest.raises(UserError, match=f"{name}: holds something else"):
            prepare(tokenizer(), PrepareSettings([str(source)], tmp_path / name))
    with pytest.raises(UserError, match="cannot be written"):
        prepare(tokenizer(), PrepareSettings([str(source)], tmp_path / "file" / "out"))
    assert (tmp_path / "folder" / "meta.json").read_text() == '{"mine": 1}'
    (tmp_path / "empty").mkdir()
    prepare(tokenizer(), PrepareSettings([str(source)], tmp_path / "empty"))


def test_an_interruption_leaves_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = PrepareSettings([str(source)], tmp_path / "out")
    (tmp_path / ".out.killed.part").mkdir()  # what a killed run leaves

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_jsonl", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare(tokenizer(), settings)
    assert [path.name for path in tmp_path.iterdir()] == ["chats.jsonl"]
    with locked(settings.out), pytest.raises(UserError, match="another process"):
        prepare(tokenizer(), settings)
    prepare(tokenizer(), settings)
    assert len(load_prepared(settings.out)) == 6


def test_a_folder_of_another_tokenizer_is_refused(source: Path, tmp_path: Path) -> None:
    prepare(tokenizer(), PrepareSettings([str(source)], tmp_path / "out"))
    with pytest.raises(UserError, match=r"another template \(.{16}, not .{16}\)"):
        load_prepared(tmp_path / "out", tokenizer_with(MARKED))
    other = copy.deepcopy(tokenizer())
    other.add_tokens(["red"])
    with pytest.raises(UserError, match=r"another tokenizer \("):
        load_prepared(tmp_path / "out", other)
    with pytest.raises(UserError, match="no prepared chats are there"):
        load_prepared(tmp_path / "missing")
    with pytest.raises(UserError, match="holds something else"):
        load_prepared(tmp_path)


def test_what_cannot_begin(source: Path, tmp_path: Path) -> None:
    without = backbone()
    without.tokenizer = None
    with pytest.raises(UserError, match="no tokenizer"):
        prepare(without, PrepareSettings([str(source)], tmp_path / "out"))
    with pytest.raises(UserError, match="no chat template"):
        prepare(tokenizer_with(""), PrepareSettings([str(source)], tmp_path / "out"))
    with pytest.raises(UserError, match="no such file"):
        prepare(tokenizer(), PrepareSettings([str(tmp_path / "missing.jsonl")], tmp_path / "out"))
    with pytest.raises(UserError, match="max_length is 1"):
        PrepareSettings([str(source)], tmp_path / "out", max_length=1)


def test_meta_is_written_for_people(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(tokenizer(), PrepareSettings([str(source)], tmp_path / "out"))
    meta = json.loads((tmp_path / "out" / "meta.json").read_text(encoding="utf-8"))
    assert meta["source"]["files"][0][0] == str(source)
    printed = capsys.readouterr().out
    counts = meta["counts"]
    share = 100 * counts["supervised"] / counts["tokens"]
    assert f"6 rows, {counts['tokens']} tokens, {counts['supervised']} supervised ({share:.1f}%)" in printed
    assert f"template {meta['source']['template']}" in printed
