"""The scripts that measure rounds, on a tiny model: parts add up, and nothing of a prefill is among them."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import zoo
from headstart.heads.cache import Cache
from headstart.heads.format import save_head
from headstart.heads.methods import METHODS
from headstart.inference import generator
from headstart.inference.tree import Tree

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A backbone, a head and a suite in files."""
    made = tmp_path_factory.mktemp("profile")
    zoo.model().save_pretrained(made / "backbone")
    zoo.tokenizer().save_pretrained(made / "backbone")
    save_head(METHODS["eagle3"].build(zoo.backbone()), made / "head")
    rows = [json.dumps({"prompt": text}) + "\n" for text in ("red sun", "blue moon")]
    (made / "suite.jsonl").write_text("".join(rows))
    return made


@pytest.fixture
def script(request: pytest.FixtureRequest) -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location(request.param, SCRIPTS / f"{request.param}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[request.param] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[request.param]


@pytest.mark.parametrize("script", ["profile_round"], indirect=True)
@pytest.mark.parametrize("compiled", [False, True])
def test_parts_add_up(
    script: Any, folder: Path, compiled: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("headstart.heads.compiled.BACKEND", None)
    before = Cache.commit, Tree.check, generator.prefill
    given = {"backbone": folder / "backbone", "head": folder / "head", "tree": "dynamic:3x3x8"}
    given |= {"suite": folder / "suite.jsonl", "max-new-tokens": 8}
    flags = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    script.main([*flags, *(["--compile"] if compiled else [])])
    assert (Cache.commit, Tree.check, generator.prefill) == before, "the clocks are gone"
    said = capsys.readouterr().out
    rows = re.findall(r"^\| (.+?) \| ([\d.-]+) \| ([\d.-]+) \|$", said, re.MULTILINE)
    shares = {name: float(share) for name, _, share in rows}
    outside = shares.pop("**outside**")
    inside = sum(shares[name] for name in ("backbone", "drafter: extend", "drafter: step"))
    assert abs(sum(shares.values()) - 100) < 1
    assert abs(outside + inside - 100) < 0.4
    assert min(shares.values()) > -1
    assert shares["backbone"] > 5
    assert "nodes, " in said
    assert ("compiled" in said) == compiled
    assert len(re.findall(r"One call of .*: [\d.]+ ms, [\d.]+% of a plain step", said)) == 3


@pytest.mark.parametrize("script", ["profile_plain"], indirect=True)
def test_plain_decoding_is_compared(script: Any, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--lengths", "5,20", "--max-new-tokens", "3", "--repeats", "2"]
    script.main(["--backbone", str(folder / "backbone"), *sizes])
    found = re.findall(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", capsys.readouterr().out, re.MULTILINE)
    assert [length for length, *_ in found] == ["5", "20"]
    assert all(float(ratio) > 0 for *_, ratio in found)
