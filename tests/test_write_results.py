"""scripts/write_results.py on made-up reports: figures are those of the reports, targets are judged, gaps are said."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_docs

from headstart.inference import figures, load_report

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import write_results
from results import read, tables, targets

Report = dict[str, Any]
SETUP = {
    "backbone": "/somewhere/smollm2-135m", "weights": "aa", "prompts": "chat template", "max_new_tokens": 96,
    "dtype": "bfloat16", "attention": "sdpa", "device": "cpu", "torch": "2.13.0", "transformers": "5.24.0",
    "headstart": "0.1.0", "cpu": "AMD EPYC", "cores": 2, "threads": 2, "python": "3.11.7",
}  # fmt: skip
GROUPS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
ALSO = {
    "heads/eagle3@auto": {"drafter": "heads/eagle3 (eagle3)", "tree": "auto"},
    "hybrid:heads/eagle3@chain:5": {"drafter": "hybrid:heads/eagle3", "tree": "chain:5"},
    "heads/eagle1@chain:3": {"drafter": "heads/eagle1 (eagle1)", "tree": "chain:3"},
    "heads/medusa@chain:3": {"drafter": "heads/medusa (medusa)", "tree": "chain:3"},
    "none": {"drafter": "none", "tree": None}, "suffix": {"drafter": "suffix", "tree": "dynamic:8x3x8"}, "lookup": {},
}  # fmt: skip
SPEEDS = {"heads/eagle3@auto": 2.3, "hybrid:heads/eagle3@chain:5": 2.6, "heads/eagle1@chain:3": 1.9,
          "heads/medusa@chain:3": 1.6, "none": 1.05, "suffix": 1.4, "lookup": 1.25}  # fmt: skip
FIRST = {"drafter": "heads/eagle3 (eagle3)", "tree": "chain:5"}


def side(speed: float, own: bool = True) -> dict[str, Any]:
    """100 tokens: 1 by prefill, 33 rounds of 3; a plain step takes 0.01 s, so that they take 1 / speed s."""
    rest = 1 / speed - 0.01
    parts = {"draft": [0.1 * rest], "verify": [0.8 * rest]} if own else {}
    ours = {"tokens": list(range(100)), "seconds": [1 / speed], "prefill": [0.01], **parts}
    counts = {"rounds": 33, "drafted": 165, "offered": [33] * 5 if own else [], "accepted": [30, 20, 10, 5, 1]}
    return {"ours": ours, **counts, "difference": None}


def bench(setup: Report, speeds: dict[str, float], first: float = 2.4, worst: float = 1.0) -> Report:
    """Two answers a group, of which the second one loops and is twice as fast; `worst` is for the last group."""
    rows = []
    for group in GROUPS:
        for loops in (False, True):
            factor = (2 if loops else 1) * (worst if group == GROUPS[-1] else 1)
            plain = {"tokens": list(range(100)), "seconds": [1.0], "prefill": [0.01]}
            about = {
                "question": group,
                "key": f"{group}{loops}",
                "category": group,
                "group": group,
                "turn": 1,
                "turns": 1,
            }
            also = {name: side(factor * speed, name != "lookup") for name, speed in speeds.items()}
            rows.append({**about, "prompt_tokens": 9, "plain": plain, **side(factor * first), "loops": loops,
                         **({"also": also} if also else {})})  # fmt: skip
    return figures.report(rows, setup, "headstart bench --backbone /x/smollm2-135m --suite suites/s.jsonl --out o")


def load(setup: dict[str, Any], temperature: float, speeds: dict[tuple[str, int], float]) -> dict[str, Any]:
    rows = []
    for (name, clients), speed in speeds.items():
        for place, group in enumerate(GROUPS):
            tokens = list(range(20)) if place else [*range(10), *range(10)]
            rows.append({
                "side": name, "load": f"closed:{clients}", "temperature": temperature, "key": f"{name}{clients}",
                "stretch_seconds": 6 * 20 / speed, "repeat": 0, "of": group, "group": group, "asked": 0.0,
                "came": [[0.1, 1], [clients * 20 / speed, 19]], "rounds": 10, "accepted": 10, "tokens": tokens,
                "slot_bytes": 0, "peak_bytes": None, "same": True, "difference": None,
            })  # fmt: skip
    return load_report.report(
        rows, setup, None, {"units": 1, "measured": 1}, "headstart bench --backbone b --suite s --out o"
    )


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., None]:
    def put(name: str, made: Any) -> None:
        path = tmp_path / "out" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(made if isinstance(made, str) else json.dumps(made))

    return put


def everything(write: Callable[..., None], first: float = 2.4, worst: float = 1.0) -> None:
    setup = {**SETUP, **FIRST, "also": ALSO}
    for suite in read.SUITES:
        write(f"greedy/{suite}/report.json", bench(setup, SPEEDS, first, worst))
    drawn = {("alone", 1): 42.0, ("generate", 1): 40.0, ("engine", 1): 64.0, ("hybrid:heads/eagle3@chain:5", 1): 50.0}
    write("drawn/spec_bench/load_report.json", load(setup, 1.0, drawn))
    many = {("alone", 1): 42.0, ("generate", 1): 40.0, ("generate", 4): 80.0, ("plain", 4): 90.0, ("engine", 4): 100.0}
    write("batches/spec_bench/load_report.json", load({**SETUP, **FIRST, "tree": "auto"}, 0.0, many))
    write("long/spec_bench/report.json", bench({**setup, "max_new_tokens": 256}, SPEEDS, 3.0))
    plain = {**SETUP, "drafter": "none", "tree": None, "also": {read.COMPILED: {}}}
    write("compiled/spec_bench/report.json", bench(plain, {read.COMPILED: 1.1}, 1.05))
    peers = {"peer:rivals.economize:lookup": 1.3, "peer:rivals.vllm:eagle3": 1.5, "heads/speculators@chain:5": 1.8}
    facts = {name: {} for name in peers} | {
        "heads/speculators@chain:5": {"drafter": "heads/speculators (eagle3)", "tree": "chain:5"}
    }
    write("peers/spec_bench/report.json", bench({**setup, "also": {**ALSO, **facts}}, {**SPEEDS, **peers}))
    write("all480/spec_bench/report.json", bench({**SETUP, **FIRST}, {}, 2.0))
    settings = [
        {"tree": tree, "nodes": nodes, "acceptance_length": 2.0, "expected_speedup": speed,
         "expected_tokens_per_second": 40 * speed, "measured_tokens_per_second": run}
        for tree, nodes, speed, run in (("none", 1, 1, 40), ("chain:3", 4, 1.5, 61), ("dynamic:3x3x6", 7, 1.6, None))
    ]  # fmt: skip
    write("trees/eagle3/found.json", {"settings": settings})
    write("trees/eagle3/done", "headstart tune --suite suites/other.jsonl --backbone b\n")
    heads = {
        f"heads/curve-{n}": {"drafter": f"heads/curve-{n} (eagle3)", "tree": "chain:5"} for n in (1_000_000, 250_000)
    }
    first = {"drafter": "heads/curve-500000 (eagle3)", "tree": "chain:5"}
    write(
        "curve/report.json", bench({**SETUP, **first, "also": heads}, dict(zip(heads, (1.75, 1.25), strict=True)), 1.5)
    )


def written(tmp_path: Path) -> str:
    write_results.main([str(tmp_path / "out"), "--docs", str(tmp_path / "docs")])
    return (tmp_path / "docs" / "results.md").read_text(encoding="utf-8")


def verdicts(folder: Path) -> dict[str, targets.Target]:
    return {one.text: one for one in targets.targets(read.read(folder))}


def test_a_whole_page_has_the_figures_and_passes_as_a_page(write, tmp_path):
    everything(write)
    text = written(tmp_path)
    assert "Not measured yet" not in text
    assert "not measured." in text  # the count, which is 1: no peer's Medusa
    assert "| EAGLE-3, chain:5 | 320.0 (240.0) | 3.20 (2.40) | 3.00 (3.00) | 12/12 |" in text
    assert "| `generate`, eager | 100.0 (100.0) | 1.00 (1.00) | - | - |" in text
    assert "EAGLE-3 head `speculators`, chain:5" in text
    assert "| `generate`, static cache, compiled | 146.7 (110.0) |" in text
    assert "peer `rivals.vllm:eagle3`" in text
    assert "| 4 | EAGLE-3, auto | 100.0 | 2.50 | 1.25 (1.25) | 2.00 (2.00) | 6/6 |" in text
    assert "| 1 | EAGLE-3, chain:5 | 64.0 | 1.60 (1.60) | 2.00 (2.00) | 6/6 |" in text
    lines = [line for line in text.splitlines() if re.match(r"\| [\d,]+0,000 \| EAGLE-3 \|", line)]
    assert [line.split(" | ")[0][2:] for line in lines] == ["250,000", "500,000", "1,000,000"]
    assert [line.split(" | ")[4][:4] for line in lines] == ["1.67", "2.00", "2.33"], "both answers, one twice as fast"
    assert "5.24.0" in text
    assert "/somewhere" not in text
    assert "/x/" not in text
    pictures = re.findall(r"images/(\S+)\)", text)
    assert sorted(pictures) == ["results-curve.png", "results-depth.png", "results-trees.png"]
    assert all((tmp_path / "docs" / "images" / name).stat().st_size > 5000 for name in pictures)
    commands = [words for language, _, block in test_docs.blocks(text) if language == "sh"
                for words in test_docs.commands(block)]  # fmt: skip
    assert len(commands) == 11  # ten benches and tune
    assert "12 of these questions with answers of up to 256 tokens; 6 of\n12 answers loop." in text
    for words in commands:
        test_docs.check(words)
    (tmp_path / "docs" / "bench.md").write_text("")
    test_docs.test_links_lead_somewhere(tmp_path / "docs" / "results.md")


def test_targets_are_judged_by_the_reports(write, tmp_path):
    everything(write)
    found = verdicts(tmp_path / "out")
    best = found["the same: speed-up on Spec-Bench"]
    assert (best.by, best.verdict) == ("EAGLE-3 with lookup, chain:5", "reached")
    assert best.clean == pytest.approx(2.6)
    assert best.all == pytest.approx(2.6 * 2 / 1.5)
    assert found["EAGLE-3, alone or with lookup: tokens a round on Spec-Bench"].verdict == "not reached"  # 3.0
    assert found["the same: speed-up of every group of Spec-Bench"].verdict == "reached"
    assert found["the same: speed-up on HumanEval"].verdict == "reached"
    assert found["Medusa: speed-up on Spec-Bench"].verdict == "reached"
    assert found["EAGLE-1: speed-up between those of Medusa and EAGLE-3"].verdict == "reached"
    drawn = found["temperature 1: speed-up of EAGLE-3 on Spec-Bench"]
    assert (drawn.all, drawn.by, drawn.verdict) == (pytest.approx(1.6), "alone", "reached")
    lookup = found["our lookup over the best peer's"]
    assert lookup.all == pytest.approx(1.4 / 1.3)
    assert lookup.verdict == "not reached"
    eagle3 = found["our EAGLE-3 over the best peer's"]
    assert eagle3.by == "EAGLE-3, chain:5; EAGLE-3 head `speculators`, chain:5"
    assert eagle3.all == pytest.approx(2.4 / 1.8)
    assert found["our Medusa over the best peer's"].verdict == "not measured"
    assert found["EAGLE-3 with lookup over `generate` with prompt lookup"].all == pytest.approx(2.6 / 1.25)
    assert found["share of the limit on Spec-Bench"].all == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("peer:rivals.economized:lookup", "lookup"), ("peer:rivals.economized:medusa", "medusa"),
        ("peer:rivals.economized:eagle3", "eagle3"), ("peer:elsewhere:speculators", "eagle3"),
        ("peer:elsewhere:specforge", "eagle3"), (read.COMPILED, "compiled"), ("peer:a:b", "other"),
    ],
)  # fmt: skip
def test_peers_are_compared_by_kind(name, kind):
    role, label, own = read.told(name, {})
    assert not own
    assert read.Side(role, label, None, own, {}, {}).kind == kind


def test_a_head_of_ours_that_was_trained_as_the_others_is_ours():
    role, label, own = read.told("heads/headstart@chain:5", {"drafter": "heads/headstart (eagle3)", "tree": "chain:5"})
    assert (role, label, own) == ("eagle3", "EAGLE-3 head `headstart`, chain:5", True)
    assert read.told("", {"drafter": "heads/specforge (eagle3)", "tree": "chain:5"})[2] is False


def test_loops_and_one_slow_group_are_not_hidden(write, tmp_path):
    everything(write, worst=0.4)
    group = verdicts(tmp_path / "out")["the same: speed-up of every group of Spec-Bench"]
    assert (group.by, group.verdict) == ("least: rag", "reached; not without loops")
    assert group.clean == pytest.approx(0.4 * 2.6)
    everything(write, worst=0.2)
    assert verdicts(tmp_path / "out")["the same: speed-up of every group of Spec-Bench"].verdict == "not reached"


def test_the_limit_is_acceptance_over_verification(write, tmp_path):
    everything(write)
    made = read.read(tmp_path / "out").greedy["spec_bench"]
    one = targets.drafted(read.sides(made))[0]
    costs = one.all["overall"]["costs"]
    assert costs["bound"] == pytest.approx(3.0 / costs["verify"])
    assert targets.share(one) == pytest.approx(costs["verify"] / (costs["draft"] + costs["verify"] + costs["rest"]))
    assert "| EAGLE-3, chain:5 | 6.0 | 3.00 |" in tables.limit(made)
    assert "lookup` |" not in tables.limit(made), "nobody took rounds of others apart"


def test_what_is_missing_is_said(write, tmp_path):
    write("greedy/humaneval/report.json", bench({**SETUP, **FIRST}, {}))
    old = tmp_path / "docs" / "images" / "results-depth.png"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"of an earlier page")
    text = written(tmp_path)
    for part in ("greedy", "long", "drawn", "batches", "compiled", "peers", "all480", "trees", "curve"):
        assert f"Not measured yet: part `{part}`" in text
    assert "0 reached, 0 not reached, 12 not measured." in text
    assert "images/" not in text
    assert not old.exists()
    assert "### HumanEval\n\n12 questions, 12 answers, 6 of them loops. " in text


def test_notes_go_in_as_they_stand_and_broken_files_are_told(write, tmp_path, capsys):
    write("notes.md", "It was **warm** that day.\n")
    with pytest.raises(SystemExit, match="2"):
        written(tmp_path)
    assert "no report is there" in capsys.readouterr().err
    everything(write)
    assert "\n\nIt was **warm** that day.\n\n" in written(tmp_path)
    write("curve/report.json", "{")
    with pytest.raises(SystemExit, match="2"):
        written(tmp_path)
    assert "curve/report.json: not JSON" in capsys.readouterr().err


def test_a_side_that_failed_is_told(write, tmp_path):
    rows = bench({**SETUP, **FIRST, "also": {"peer:a:b": {}}}, {"peer:a:b": 2.0})
    rows["also"]["peer:a:b"]["failed"] = ["RuntimeError: no kernel"]
    write("peers/spec_bench/report.json", rows)
    assert "peer `a:b` failed: RuntimeError: no kernel" in written(tmp_path)
