"""The figures of a bench against rows worked out by hand, and the report's three files."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from headstart.inference import plots
from headstart.inference.figures import figures, report, speedup
from headstart.inference.report import markdown, summary, write_report

SETUP = {"backbone": "tiny", "drafter": "ngram", "dtype": "bfloat16", "max_new_tokens": 32, "threads": 1, "tree": None}


def row(
    key: str,
    turn: int,
    plain: tuple[int, list[float], float],
    ours: tuple[int, list[float], float, float, float],
    rounds: int,
    accepted: list[int],
    **rest: Any,
) -> dict[str, Any]:
    """plain: tokens, seconds, prefill. ours: tokens, seconds, prefill, draft, verify."""
    repeats = len(plain[1])
    made = {
        "question": key, "key": key, "category": "writing", "group": "mt_bench", "turn": turn, "turns": 1,
        "prompt_tokens": 5, "rounds": rounds, "drafted": 3 * rounds, "offered": [rounds] * len(accepted),
        "accepted": accepted, "loops": False, "difference": None,
        "plain": {"tokens": [7] * plain[0], "seconds": plain[1], "prefill": [plain[2]] * repeats},
        "ours": {
            "tokens": [7] * ours[0], "seconds": ours[1], "prefill": [ours[2]] * repeats,
            "draft": [ours[3]] * repeats, "verify": [ours[4]] * repeats,
        },
    }  # fmt: skip
    assert ours[0] == 1 + rounds + sum(accepted), "the example itself has to add up"
    return {**made, **rest}


PARTED = {"kind": "rounding", "step": 2, "plain": 7, "ours": 8, "gap": 0.25, "margin": 0.125, "allowed": 0.5}
A = row("one", 1, (10, [2.0], 0.2), (10, [1.0], 0.2, 0.1, 0.5), 4, [3, 2])
B = row("one", 2, (21, [4.0], 0.3), (21, [4.0], 0.4, 0.6, 2.0), 10, [6, 4], loops=True)
C = row("two", 1, (5, [1.0], 0.1), (5, [0.8], 0.1, 0.1, 0.5), 4, [0, 0], category="qa", group="qa", difference=PARTED)
ROWS = [A, B, C]


def test_speeds_are_sums_and_the_macro_figure_is_a_mean_of_ratios():
    found = figures(ROWS)
    assert (found["questions"], found["answers"], found["identical"]) == (2, 3, 2)
    assert found["plain_tokens_per_second"] == pytest.approx(36 / 7.0)
    assert found["tokens_per_second"] == pytest.approx(36 / 5.8)
    assert found["speedup"] == pytest.approx(7.0 / 5.8)
    assert found["speedup_macro"] == pytest.approx(((31 / 5) / (31 / 6) + (5 / 0.8) / (5 / 1.0)) / 2)


def test_acceptance_counts_rounds():
    found = figures(ROWS)
    assert (found["rounds"], found["accepted"]) == (18, [9, 6])
    assert found["acceptance_length"] == pytest.approx((36 - 3) / 18)
    assert found["acceptance"] == pytest.approx([9 / 18, 6 / 18])
    assert found["conditional_acceptance"] == pytest.approx([9 / 18, 6 / 9])
    assert 1 + sum(found["acceptance"]) == pytest.approx(found["acceptance_length"])
    assert found["acceptance_length_macro"] == pytest.approx(((31 - 2) / 14 + (5 - 1) / 4) / 2)


def test_shares_and_costs():
    found = figures(ROWS)
    assert found["shares"] == pytest.approx(
        {"prefill": 0.7 / 5.8, "draft": 0.8 / 5.8, "verify": 3.0 / 5.8, "rest": 1.3 / 5.8}
    )
    costs, step = found["costs"], (7.0 - 0.6) / 33
    assert costs["plain_step_seconds"] == pytest.approx(step)
    each = [seconds / 18 / step for seconds in (0.8, 3.0, 1.3)]
    assert [costs["draft"], costs["verify"], costs["rest"]] == pytest.approx(each)
    assert costs["predicted_decode"] == pytest.approx((33 / 18) / sum(each))
    assert costs["predicted"] == pytest.approx(7.0 / 5.8), "equal tokens: the books have to give the measured figure"
    assert costs["bound"] == pytest.approx((33 / 18) / each[1])


def test_every_figure_stands_once_more_without_loops():
    made = report(ROWS, SETUP)
    assert made["looping"] == 1
    assert made["all"]["overall"] == figures(ROWS)
    assert made["without_loops"]["overall"] == figures([A, C])
    assert made["without_loops"]["overall"]["speedup"] == pytest.approx((15 / 1.8) / (15 / 3.0))
    assert set(made["all"]["groups"]) == {"mt_bench", "qa"}
    assert made["all"]["groups"]["mt_bench"] == figures([A, B])
    assert made["all"]["categories"] == {"writing": {"group": "mt_bench", **figures([A, B])}}
    assert made["without_loops"]["groups"]["mt_bench"] == figures([A])
    assert made["differences"] == [{"question": "two", "turn": 1, "category": "qa", **PARTED}]


def test_repetitions_are_averaged_and_shown():
    twice = row("one", 1, (10, [2.0, 4.0], 0.2), (10, [1.0, 1.0], 0.2, 0.1, 0.5), 4, [3, 2])
    found = figures([twice])
    assert found["tokens"] == 10
    assert (found["plain_seconds"], found["seconds"]) == pytest.approx((3.0, 1.0))
    assert found["speedup_by_repetition"] == pytest.approx([2.0, 4.0])
    assert found["speedup"] == pytest.approx(3.0)
    assert "2.00x, 4.00x" in markdown(report([twice], SETUP))
    assert figures([A])["speedup_by_repetition"] == []


def test_ours_may_be_slower_and_longer():
    """Unequal token counts: a rate, not a ratio of seconds."""
    slow = row("one", 1, (10, [1.0], 0.1), (12, [2.0], 0.1, 0.1, 0.5), 10, [1], difference=PARTED)
    assert speedup([slow]) == pytest.approx((12 / 2.0) / (10 / 1.0))
    assert "does not pay here" in summary(report([slow], SETUP))
    assert "does not pay here" not in summary(report([A], SETUP))


def test_the_summary_tells_loops_apart_where_there_are_any():
    text = summary(report(ROWS, SETUP))
    assert "speed-up           1.21x (5.1 -> 6.2 tokens/s); 1.67x without 1 looping answer\n" in text
    assert "loop" not in summary(report([A, C], SETUP))


def test_nothing_measured_has_no_figures():
    skipped = {"question": "9", "key": "9", "turn": 1, "turns": 1, "group": "a", "category": "a", "skipped": "too long"}
    for rows in ([skipped], [{**A, "loops": True}, skipped]):
        made = report(rows, SETUP)
        assert made["without_loops"]["overall"]["speedup"] is None
        assert made["skipped"] == [{"question": "9", "turn": 1, "skipped": "too long"}]
        text = markdown(made)
        assert "too long" in text
        assert "not asked          1 turn" in summary(made)
    one_token = row("one", 1, (1, [0.5], 0.5), (1, [0.5], 0.4, 0.0, 0.0), 0, [])
    found = figures([one_token])
    assert (found["acceptance_length"], found["costs"], found["acceptance"]) == (None, None, [])
    assert "Nothing was drafted" in markdown(report([one_token], SETUP))


def test_the_page_holds_what_it_has_to(tmp_path):
    made = write_report(tmp_path, ROWS, {**SETUP, "backbone": "a|b"}, "headstart bench --suite x")
    text = (tmp_path / "report.md").read_text()
    assert json.loads((tmp_path / "report.json").read_text()) == made
    for told in (
        "# a|b with ngram: 1.21x", "| identical to `model.generate` | 2/3 | 1/2 |",
        "| **speed-up** | **1.21x** | **1.67x** |",
        "| 0 | 18 | 9 | 50.0% | 50.0% | 37.5% | 37.5% |", "| prefill | 12.1% |", "&nbsp;&nbsp;writing | 2 | 2/2 |",
        "| two | 1 | 2 | 7 | 8 | rounding | 0.25000 | 0.50000 | 0.12500 |",
        "headstart bench --suite x", "| backbone | a\\|b |",
        "(largest gap 0.25, of 0.5 that rounding in bfloat16 explains)", "![", "| measured speed-up | 1.21 | 1.67 |",
    ):  # fmt: skip
        assert told in text
    assert "tree" not in text.partition("How it was measured")[2], "what is not set is not listed"
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")], "nothing half-written is left"


def test_the_first_differences_are_listed_and_the_rest_counted():
    rows = [{**C, "key": str(n), "question": f"q{n}"} for n in range(25)]
    text = markdown(report(rows, SETUP))
    assert "| q19 |" in text
    assert "| q20 |" not in text
    assert "5 more are in report.json" in text


def test_without_matplotlib_the_report_still_appears(tmp_path, monkeypatch):
    (tmp_path / "report.png").write_bytes(b"of an earlier run")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.warns(UserWarning, match="no picture: matplotlib is missing; pip install"):
        write_report(tmp_path, ROWS, SETUP)
    assert "![" not in (tmp_path / "report.md").read_text()
    assert not (tmp_path / "report.png").exists()


def test_pictures_of_odd_reports(tmp_path):
    """Many groups, names that matplotlib would read as formulas, no drafts, no answer without a loop."""
    many = [{**A, "key": str(n), "group": f"$group_{n}^" + "x" * 40, "loops": True} for n in range(40)]
    nothing = {**A, "accepted": [], "offered": [], "rounds": 9}
    for rows in (many, [nothing], []):
        assert plots.draw(report(rows, SETUP), tmp_path / "report.png")
    assert len(plots._names(report(many, SETUP))) == plots.MOST + 1
