"""Files and folders appear whole or not at all."""

from __future__ import annotations

import errno
import gzip
import os
from pathlib import Path

import pytest

from headstart.errors import UserError
from headstart.files import (
    cache_folder,
    file_hash,
    read_jsonl,
    text_hash,
    whole_file,
    whole_folder,
    write_jsonl,
    write_whole,
)

ROWS = [{"text": "größe \u2028 \x85 \n"}, [1, None], "", 3.5, {"half": "\ud83d"}]


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_a_file_appears_whole(tmp_path):
    path = tmp_path / "deep" / "er" / "a.txt"
    write_whole(path, "größe")
    assert path.read_bytes() == "größe".encode()
    write_whole(path, b"\x00")
    assert path.read_bytes() == b"\x00"
    assert names(path.parent) == ["a.txt"]


@pytest.mark.parametrize("interruption", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_interrupted_file_leaves_the_old_one(tmp_path, interruption):
    path = tmp_path / "a.txt"
    write_whole(path, "old")
    with pytest.raises(interruption), whole_file(path) as temporary:
        temporary.write_text("half")
        raise interruption
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_a_folder_appears_whole_and_replaces(tmp_path):
    path = tmp_path / "head"
    for content in ("one", "two"):
        with whole_folder(path) as temporary:
            (temporary / "a.txt").write_text(content)
            assert not path.exists() or (path / "a.txt").read_text() == "one"
        assert (path / "a.txt").read_text() == content
        assert names(tmp_path) == ["head"]
    assert path.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("interruption", [ValueError, KeyboardInterrupt])
def test_an_interrupted_folder_leaves_the_old_one(tmp_path, interruption):
    path = tmp_path / "head"
    with whole_folder(path) as temporary:
        (temporary / "a.txt").write_text("old")
    with pytest.raises(interruption), whole_folder(path) as temporary:
        (temporary / "a.txt").write_text("half")
        raise interruption
    assert (path / "a.txt").read_text() == "old"
    assert names(tmp_path) == ["head"]


def test_a_folder_that_cannot_be_renamed_in_keeps_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "head"
    (path / "sub").mkdir(parents=True)
    original = os.replace

    def failing(source, target):
        if str(source).endswith(".part"):
            raise OSError(errno.ENOSPC, "No space left on device")
        original(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(UserError, match="head: cannot be written .No space left"), whole_folder(path) as temporary:
        (temporary / "a.txt").write_text("new")
    assert names(tmp_path) == ["head"]
    assert names(path) == ["sub"]


def test_nothing_of_somebody_else_is_deleted(tmp_path, monkeypatch):
    path = tmp_path / "models"
    for round in range(2):
        path.mkdir(exist_ok=True)
        (path / "thesis.tex").write_text(str(round))
        with whole_folder(path) as temporary:
            (temporary / "a.txt").write_text("new")
    assert names(tmp_path) == ["models", "models.old", "models.old2"]
    assert (tmp_path / "models.old" / "thesis.tex").read_text() == "0"
    (tmp_path / "work" / "inside").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work" / "inside")
    for place in (".", "..", tmp_path, Path.home()):
        with pytest.raises(UserError, match="a folder of its own"), whole_folder(place):
            pytest.fail("was let in")
    (tmp_path / "plain").write_text("x")
    with pytest.raises(UserError, match="is a file"), whole_folder(tmp_path / "plain"):
        pytest.fail("was let in")


def test_a_link_leads_to_the_folder_that_is_replaced(tmp_path):
    (tmp_path / "disk" / "run").mkdir(parents=True)
    (tmp_path / "run").symlink_to(tmp_path / "disk" / "run")
    with whole_folder(tmp_path / "run") as temporary:
        (temporary / "a.txt").write_text("new")
    assert (tmp_path / "run").is_symlink()
    assert names(tmp_path / "disk") == ["run"]
    assert names(tmp_path / "run") == ["a.txt"]


def test_a_place_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "plain").write_text("x")
    for path in (tmp_path / "plain" / "a.txt", tmp_path / "plain" / "deep" / "a.txt"):
        with pytest.raises(UserError, match="cannot be written"):
            write_whole(path, "x")
        with pytest.raises(UserError, match="cannot be written"), whole_folder(path):
            pytest.fail("was let in")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="cannot be written"):
        write_whole(tmp_path / "folder", "x")

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left"):
        write_whole(tmp_path / "a.txt", "x")
    assert names(tmp_path) == ["folder", "plain"]


def test_an_error_of_the_content_is_no_error_of_the_place(tmp_path):
    for fault in (PermissionError("a library says no"), OSError("no number"), FileNotFoundError(errno.ENOENT, "gone")):
        with pytest.raises(type(fault)) as caught, whole_folder(tmp_path / "head"):
            raise fault
        assert caught.value is fault
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_json_lines_there_and_back(tmp_path, name):
    assert write_jsonl(tmp_path / name, iter(ROWS)) == len(ROWS)
    assert list(read_jsonl(tmp_path / name)) == ROWS
    before = file_hash(tmp_path / name)
    write_jsonl(tmp_path / "sub" / name, ROWS)
    assert file_hash(tmp_path / "sub" / name) == before  # equal rows, equal bytes: no time, no name inside


def test_json_lines_that_break_off(tmp_path):
    def rows():
        yield 1
        raise ValueError("row 2")

    with pytest.raises(ValueError, match="row 2"):
        write_jsonl(tmp_path / "rows.jsonl", rows())
    assert names(tmp_path) == []


def test_json_lines_that_cannot_be_read(tmp_path):
    def refusal(content: bytes, name: str = "rows.jsonl") -> str:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError) as caught:
            list(read_jsonl(tmp_path / name))
        return str(caught.value)

    assert "rows.jsonl, line 3: not JSON" in refusal(b'{"a": 1}\n\n{"a": }\n')
    assert "line 1: not JSON" in refusal(b"[" * 100_000)
    assert "line 1: not JSON" in refusal(b"9" * 5_000)
    assert "cannot be read" in refusal(b"\xff\xfe1\n")
    assert "cannot be read" in refusal(b"no gzip", "a.jsonl.gz")
    assert "cannot be read" in refusal(gzip.compress(b"1\n" * 10_000)[:-20], "b.jsonl.gz")
    assert "cannot be read" in refusal(gzip.compress(b"123\n")[:12] + b"\xff" * 20, "c.jsonl.gz")
    for path, word in ((tmp_path / "none.jsonl", "no such file"), (tmp_path, "cannot be read")):
        with pytest.raises(UserError, match=word):
            list(read_jsonl(path))
    (tmp_path / "marked.jsonl").write_bytes(b"\xef\xbb\xbf1\r\n2")
    assert list(read_jsonl(tmp_path / "marked.jsonl")) == [1, 2]


def test_hashes(tmp_path):
    write_whole(tmp_path / "a", "größe")
    assert file_hash(tmp_path / "a") == text_hash("größe")
    assert text_hash("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert len(text_hash("\ud83d")) == 64


def test_the_cache_moves(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.setenv("HEADSTART_CACHE", "~/there")
    assert cache_folder() == Path.home() / "there"
    monkeypatch.delenv("HEADSTART_CACHE")
    assert cache_folder() == Path.home() / ".cache" / "headstart"
