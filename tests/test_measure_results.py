"""scripts/measure_results.sh with a `headstart` that only notes what it is asked: parts, trees, what is skipped."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headstart import cli

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "measure_results.sh"
STAND_IN = """#!{python}
import json, os, sys
open(os.environ["ASKED"], "a").write(json.dumps(sys.argv[1:]) + chr(10))
if os.environ.get("BREAKS", "nothing") in " ".join(sys.argv):
    sys.exit(130)
if sys.argv[1] == "tune":
    runs = {{"none": 9, "auto": 9, "chain:2": 1, "dynamic:3x4x8": 2}}
    print(json.dumps({{"runs": {{name: [{{"tokens": n, "seconds": 1}}] for name, n in runs.items()}}}}))
"""
Measure = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def measure(tmp_path: Path) -> Measure:
    (tmp_path / "bin").mkdir()
    for name, text in (("headstart", STAND_IN.format(python=sys.executable)), ("python", "")):
        path = tmp_path / "bin" / name
        path.write_text(text) if text else path.symlink_to(sys.executable)
        path.chmod(0o755)
    for head in ("three", "one", "medusa", "peers"):
        (tmp_path / head).mkdir()
        (tmp_path / head / "config.json").write_text("{}")
    (tmp_path / "suites").mkdir()
    for suite, rows in (("spec_bench", 480), ("humaneval", 164), ("gsm8k_test", 1319)):
        (tmp_path / "suites" / f"{suite}.jsonl").write_text("".join(f"{row}\n" for row in range(1, rows + 1)))
    heads = {"EAGLE3": "three", "EAGLE1": "one", "MEDUSA": "medusa"}

    def run(**given: str) -> subprocess.CompletedProcess[str]:
        paths = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "ASKED": str(tmp_path / "asked")}
        clean = {name: value for name, value in os.environ.items() if name not in ("PARTS", "TREE", "PEERS")}
        environment = {**clean, **paths, **heads, **given}
        command = ["bash", str(SCRIPT), "suites", "out"]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)

    return run


def asked(folder: Path) -> list[list[str]]:
    """What was asked since the last look."""
    path = folder / "asked"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    path.unlink(missing_ok=True)
    return found


def test_the_default_parts_are_run_once_with_the_tree_that_was_found(measure: Measure, tmp_path: Path) -> None:
    done = measure()
    assert done.returncode == 0, done.stderr
    ran = asked(tmp_path)
    outs = [one[one.index("--out") + 1] for one in ran]
    assert outs == [
        "trees/eagle3/tune", "greedy/spec_bench", "greedy/humaneval", "greedy/gsm8k", "drawn/spec_bench",
        "batches/spec_bench",
    ]  # fmt: skip
    for words in ran:
        cli.read(words)  # as the command line would
        assert str(tmp_path) not in shlex.join(words), "a report shows its command"
    greedy = ran[1]
    assert greedy[greedy.index("--every") + 1] == "8"  # 60 of 480, ten of each group
    assert greedy[greedy.index("--tree") + 1] == "dynamic:3x4x8"
    assert greedy[greedy.index("--also") + 1 :] == [
        "heads/eagle3@auto", "hybrid:heads/eagle3@auto", "heads/eagle1@dynamic:3x3x6",
        "heads/medusa@dynamic:3x3x6", "none", "suffix", "lookup",
    ]  # fmt: skip
    drawn = ran[4]
    assert drawn[drawn.index("--also") + 1 :][:2] == ["hybrid:heads/eagle3@auto", "heads/medusa@dynamic:3x3x6"]
    assert drawn[drawn.index("--also") + 3] == "--temperature"
    for words, limit, every in ((ran[2], "20", "8"), (ran[3], "20", "65")):
        assert (words[words.index("--limit") + 1], words[words.index("--every") + 1]) == (limit, every)
    for link, head in (("eagle3", "three"), ("eagle1", "one"), ("medusa", "medusa")):
        assert (tmp_path / "out" / "heads" / link).resolve() == tmp_path / head
    asked_for_trees = (tmp_path / "out" / "suites" / "other.jsonl").read_text().split()
    assert len(asked_for_trees) == 12
    assert all(int(row) % every != 1 for row in asked_for_trees for every in (4, 8, 16, 40)), "asked in no other part"
    again = measure()
    assert again.returncode == 0
    assert asked(tmp_path) == []
    command = (tmp_path / "out" / "trees" / "eagle3" / "done").read_text()
    cli.read(shlex.split(command)[1:])
    assert command.startswith("headstart tune --backbone smollm2-135m")


def test_an_interrupted_part_goes_on_and_others_settings_are_run_anew(measure: Measure, tmp_path: Path) -> None:
    broken = measure(PARTS="greedy", BREAKS="humaneval", TREE="chain:3")
    assert broken.returncode == 130
    assert len(asked(tmp_path)) == 2
    assert measure(PARTS="greedy").returncode == 0
    assert [one[one.index("--out") + 1] for one in asked(tmp_path)] == ["greedy/humaneval", "greedy/gsm8k"]
    assert measure(PARTS="greedy", TOKENS="32").returncode == 0
    assert len(asked(tmp_path)) == 3, "the bench itself says that these are others"
    other = measure(PARTS="greedy", TREE="chain:4")
    assert other.returncode == 2
    assert "were measured with chain:3, not chain:4" in other.stderr


def test_longer_answers_are_a_part_of_their_own(measure: Measure, tmp_path: Path) -> None:
    assert measure(PARTS="long all480", LONG="300").returncode == 0
    longer, whole = asked(tmp_path)
    assert longer[longer.index("--max-new-tokens") + 1] == "300"
    assert longer[longer.index("--also") + 1 :] == ["hybrid:heads/eagle3@auto", "suffix", "lookup"]
    assert whole[whole.index("--max-new-tokens") + 1] == "96", "of that part alone"
    cli.read(longer)


def test_heads_of_a_curve_are_measured_on_the_questions_of_trees(measure: Measure, tmp_path: Path) -> None:
    assert measure(PARTS="curve", CURVE="1000=one 2000=three").returncode == 0
    (words,) = asked(tmp_path)
    assert words[words.index("--suite") + 1] == "suites/other.jsonl"
    assert words[words.index("--head") + 1] == "heads/curve-1000"
    assert words[words.index("--also") + 1 :] == ["heads/curve-2000@dynamic:3x3x6"]
    assert len((tmp_path / "out" / "suites" / "other.jsonl").read_text().split()) == 12
    cli.read(words)


def test_peers_and_heads_of_others_take_part(measure: Measure, tmp_path: Path) -> None:
    done = measure(PARTS="peers all480 compiled", PEERS="a.b:c d:e", HEADS="speculators=peers", EAGLE1="", MEDUSA="")
    assert done.returncode == 0, done.stderr
    first, whole, compiled = asked(tmp_path)
    assert first[first.index("--also") + 1 :] == [
        "heads/eagle3@auto", "suffix", "lookup", "hybrid:heads/eagle3@auto", "heads/speculators@dynamic:3x3x6",
        "peer:a.b:c", "peer:d:e",
    ]  # fmt: skip
    assert "--every" not in whole
    assert whole[whole.index("--limit") + 1] == "480"
    assert compiled[compiled.index("--also") + 1 :] == ["peer:rivals.compiled:generate"]
    for words in (first, whole, compiled):
        cli.read(words)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"PARTS": "greedi"}, "there is no part greedi"),
        ({"EAGLE3": ""}, "EAGLE3 has to name"),
        ({"MEDUSA": "nowhere"}, "MEDUSA: nowhere holds no config.json"),
        ({"PARTS": "peers"}, "PEERS names no function"),
        ({"PARTS": "curve"}, "CURVE names no head"),
        ({"CURVE": "many=one"}, "CURVE: many is no number of tokens"),
        ({"CURVE": "5=nowhere"}, "CURVE: nowhere holds no config.json"),
        ({"HEADS": "x=nowhere"}, "HEADS: nowhere holds no config.json"),
    ],
)
def test_what_is_missing_is_told(measure: Measure, tmp_path: Path, given: dict[str, str], said: str) -> None:
    done = measure(**given)
    assert done.returncode == 2
    assert said in done.stderr
    assert asked(tmp_path) == []


def test_the_parts_are_told() -> None:
    done = subprocess.run(["bash", str(SCRIPT), "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    for part in ("trees", "greedy", "long", "drawn", "batches", "compiled", "peers", "all480", "curve"):
        assert f"\n  {part} " in done.stdout
