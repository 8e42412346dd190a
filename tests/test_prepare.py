"""Prepared folders: what they hold, when they are made anew, and what is refused."""

from __future__ import annotations

import copy
import json
import os
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headstart.data import pool
from headstart.data import prepare as module
from headstart.data.chats import key_of, raw_rows
from headstart.data.groups import locked
from headstart.data.masks import Masker
from headstart.data.prepare import PrepareSettings, load_prepared, prepare, read_meta
from headstart.data.sources import sources_of
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
    masked = [one for chat in chats(6) for one in Masker(tokenizer())(chat).rows]
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


CHANGES: dict[str, dict[str, Any]] = {
    "max_length": {"max_length": 40},
    "drop_empty": {"drop_empty": True},
    "last_turn": {"last_turn": True},
    "thinking": {"thinking": False},
    "chat_template": {"chat_template": "chatml"},
}


@pytest.mark.parametrize("change", [*CHANGES, "template", "vocabulary", "special token", "content"])
def test_every_change_makes_it_anew(source: Path, tmp_path: Path, change: str) -> None:
    """The folder with a history equals one made in a fresh place."""
    mine, settings = copy.deepcopy(tokenizer()), PrepareSettings([str(source)], tmp_path / "out")
    mine.chat_template = "{{ bos_token }}" + mine.chat_template
    prepare(mine, settings)
    before = stamps(tmp_path / "out")
    if change in CHANGES:
        settings = replace(settings, **CHANGES[change])
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
    made, fresh = load_prepared(tmp_path / "out"), load_prepared(tmp_path / "fresh")
    assert list(made.with_format(None)) == list(fresh.with_format(None))


@pytest.mark.parametrize(
    ("rows", "template", "named"),
    [
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


def test_prompts_without_a_reply_are_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(tmp_path / "a.jsonl", [*chats(1), PROMPT, PROMPT])
    meta = prepare(tokenizer(), PrepareSettings([str(tmp_path / "a.jsonl")], tmp_path / "out"))
    assert meta["counts"]["rows"] == 1
    assert meta["counts"]["skipped"] == {"no reply": 2}
    assert "2 rows not used: 2 no reply" in capsys.readouterr().out
    write_jsonl(tmp_path / "b.jsonl", [PROMPT])
    with pytest.raises(UserError, match="no row is left to train on; 1 row not used: 1 no reply"):
        prepare(tokenizer(), PrepareSettings([str(tmp_path / "b.jsonl")], tmp_path / "none"))
    assert not (tmp_path / "none").exists()


THOUGHTS = (  # an empty thought stands before the last reply alone
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ 'hm\n' if m.role == 'assistant' and loop.last }}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_chat_that_one_text_cannot_hold_gets_a_row_for_each_reply(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", chats(2))
    meta = prepare(tokenizer_with(THOUGHTS), PrepareSettings([str(tmp_path / "a.jsonl")], tmp_path / "out"))
    rows = load_prepared(tmp_path / "out")
    place = f"{tmp_path / 'a.jsonl'}, row"
    assert rows["place"] == [f"{place} 1", f"{place} 2, part 1", f"{place} 2, part 2"]
    assert rows["key"] == [key_of(chats(2)[0]), *[key_of(chats(2)[1])] * 2]
    assert (meta["counts"]["chats"], meta["counts"]["split"], meta["counts"]["duplicates"]) == (2, 1, 0)


def test_turns_that_cannot_be_supervised_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    template = THOUGHTS.replace("assistant\n{% endif %}", "assistant\n{{ 'oh' if messages|length > 1 }}{% endif %}")
    write_jsonl(tmp_path / "a.jsonl", chats(2))
    meta = prepare(tokenizer_with(template), PrepareSettings([str(tmp_path / "a.jsonl")], tmp_path / "out"))
    assert meta["counts"]["rows"] == 2
    assert meta["counts"]["lost"] == 1
    printed = capsys.readouterr().out
    assert "1 turns not supervised" in printed
    assert "row 2: the template writes a reply otherwise than a server would open it (message 4 of 4" in printed
    assert len(list(read_jsonl(tmp_path / "out" / "skipped.jsonl"))) == 1
    assert "--thinking" not in printed


def test_a_template_that_knows_of_thinking_is_asked_how(tmp_path: Path) -> None:
    """It closes an empty thought for replies to come unless thinking is on, and writes none."""
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{{ '' if enable_thinking else '<none>' }}{% endif %}"
    write_jsonl(tmp_path / "a.jsonl", chats(1))
    settings = PrepareSettings([str(tmp_path / "a.jsonl")], tmp_path / "out")
    with pytest.raises(UserError, match=r"a server sends '<none>'.*\nThe template knows of thinking: .*--thinking"):
        prepare(tokenizer_with(template), settings)
    assert prepare(tokenizer_with(template), replace(settings, thinking=True))["counts"]["rows"] == 1


def test_another_template_is_recorded_and_warned_of(source: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text(MARKED)
    settings = PrepareSettings([str(source)], tmp_path / "out", chat_template=str(tmp_path / "mine.jinja"))
    meta = prepare(tokenizer(), settings)
    assert meta["template"] == MARKED
    with pytest.warns(UserWarning, match=r"with the template .*mine.jinja"):
        rows = load_prepared(tmp_path / "out", tokenizer())
    expected = [one.ids for chat in chats(6) for one in Masker(tokenizer_with(MARKED))(chat).rows]
    assert [row["ids"].tolist() for row in rows] == expected
    for name, message in (("chatmll", "did you mean chatml"), ("no/such.jinja", "no such template file")):
        with pytest.raises(UserError, match=message):
            prepare(tokenizer(), replace(settings, chat_template=name))


def test_the_number_of_workers_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "CHUNK", 3)
    monkeypatch.setattr(pool, "SMALL", 1)
    bad: list[Any] = [[], {"a": 1}, [chats(1)[0][1]], PROMPT, {"text": "red one"}]
    write_jsonl(tmp_path / "a.jsonl", [row for chat in chats(10) for row in (chat, bad[len(chat[0]["content"]) % 5])])
    made = {}
    for workers in (1, 2, 4):
        out = tmp_path / f"out{workers}"
        prepare(tokenizer_with(THOUGHTS), PrepareSettings([str(tmp_path / "a.jsonl")], out, workers=workers))
        made[workers] = {path.name: path.read_bytes() for path in out.iterdir()}
    assert made[1] == made[2] == made[4]


def spent() -> float:
    """Processor time of this process and of those that have ended, in seconds."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@pytest.mark.slow
def test_two_workers_spend_little_more_than_one(tmp_path: Path) -> None:
    """So that two of them, with a core each, are never slower than one."""
    write_jsonl(tmp_path / "a.jsonl", chats(10_000))
    seconds, made = {}, {}
    for workers in (1, 2):
        out, before = tmp_path / f"out{workers}", spent()
        prepare(tokenizer(), PrepareSettings([str(tmp_path / "a.jsonl")], out, workers=workers))
        seconds[workers] = spent() - before
        made[workers] = {path.name: path.read_bytes() for path in out.iterdir()}
    assert made[1] == made[2]
    assert seconds[2] <= 1.3 * seconds[1]


def test_plain_texts_are_rows(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["red one", {"text": "two"}, {"text": "<|im_start|>user\nred<|im_end|>"}])
    meta = prepare(tokenizer(), PrepareSettings([str(tmp_path / "a.jsonl")], tmp_path / "out"))
    assert [row["ids"].tolist() for row in load_prepared(tmp_path / "out")] == [
        tokenizer()(text)["input_ids"] for text in ("red one", "two")
    ]
    assert meta["counts"]["supervised"] == meta["counts"]["tokens"]
    assert meta["counts"]["skipped"] == {"a rendered chat as plain text": 1}


@pytest.mark.skipif("HEADSTART_TEST_DATA" not in os.environ, reason="needs HEADSTART_TEST_DATA, a folder of real files")
def test_real_files_are_used_or_listed(tmp_path: Path) -> None:
    """Every row of every file is used, or listed with a reason."""
    for path in sorted((Path(os.environ["HEADSTART_TEST_DATA"]) / "messy").iterdir()):
        out, rows = tmp_path / path.stem, sum(1 for _ in raw_rows(sources_of([path])))
        try:
            prepare(backbone(), PrepareSettings([str(path)], out, drop_empty=True))
        except UserError as error:
            assert f"{rows} rows not used" in str(error)  # noqa: PT017
            continue
        used = {place.partition(", part")[0] for place in load_prepared(out)["place"]}
        skipped = {f"{row['file']}, row {row['row']}" for row in read_jsonl(out / "skipped.jsonl")}
        assert len(used | skipped) == rows


def test_rows_are_cut_at_max_length_and_dropped_without_a_reply(source: Path, tmp_path: Path) -> None:
    masked = [one for chat in chats(6) for one in Masker(tokenizer())(chat).rows]
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
    assert (
        "a.jsonl, row 3: the template refuses it (no system; roles system, user, assistant)" in capsys.readouterr().out
    )
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
        patch.setattr(module.RowWriter, "close", interrupted)
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


def test_a_damaged_folder_is_named(source: Path, tmp_path: Path) -> None:
    prepare(tokenizer(), PrepareSettings([str(source)], tmp_path / "out"))
    for table in (tmp_path / "out").glob("*.arrow"):
        table.write_bytes(table.read_bytes()[:200])
    with pytest.raises(UserError, match="out: is damaged"):
        load_prepared(tmp_path / "out")


def test_meta_is_written_for_people(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(tokenizer(), PrepareSettings([str(source)], tmp_path / "out"))
    meta = json.loads((tmp_path / "out" / "meta.json").read_text(encoding="utf-8"))
    assert meta["source"]["files"][0][0] == str(source)
    printed = capsys.readouterr().out
    counts = meta["counts"]
    share = 100 * counts["supervised"] / counts["tokens"]
    assert f"6 rows, {counts['tokens']} tokens, {counts['supervised']} supervised ({share:.1f}%)" in printed
    assert f"template {meta['source']['template']}" in printed
