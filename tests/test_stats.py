"""Stats: what they count, how they merge, and the formulas against known values."""

from __future__ import annotations

import itertools
import json

import pytest

from headstart.inference.stats import (
    Stats,
    Watch,
    expected_speedup,
    expected_tokens,
    expected_tokens_iid,
    merge,
    repeats_ngram,
)


@pytest.mark.parametrize(
    ("a", "depth", "tokens"),
    [(0.8, 1, 1.8), (0.8, 2, 2.44), (0.8, 3, 2.952), (0.8, 4, 3.3616), (0.8, 5, 3.68928), (0.6, 3, 2.176)]
    + [(0.0, 4, 1.0), (1.0, 4, 5.0)],
)
def test_expected_tokens(a: float, depth: int, tokens: float) -> None:
    assert expected_tokens_iid(a, depth) == pytest.approx(tokens)
    assert expected_tokens([a] * depth) == pytest.approx(tokens)


def test_expected_tokens_is_the_mean_over_all_outcomes() -> None:
    """Enumerated: which drafts would be right, and how long the run then is."""
    acceptance = [0.9, 0.5, 0.7]
    mean = 0.0
    for right in itertools.product([True, False], repeat=3):
        weight = 1.0
        for a, yes in zip(acceptance, right, strict=True):
            weight *= a if yes else 1 - a
        mean += weight * (1 + len(list(itertools.takewhile(bool, right))))
    assert expected_tokens(acceptance) == pytest.approx(mean)
    assert expected_tokens([0.8] * 4) != pytest.approx(1 + 4 * 0.8)  # one rejection ends the run


def test_expected_speedup() -> None:
    assert expected_speedup(3.3616, 4, 0.05) == pytest.approx(2.8013, abs=1e-4)
    assert expected_speedup(5.0, 4, 0.05, verify_cost=1.5, overhead=0.3) == pytest.approx(2.5)


def counted(*rounds: tuple[int, int, int]) -> Stats:
    stats = Stats(prompt_tokens=7, tokens=1)
    for depth, drafted, accepted in rounds:
        stats.count_round(depth, drafted, accepted)
    return stats


def test_a_round_is_counted_by_depth() -> None:
    stats = counted((3, 8, 2), (3, 8, 0), (2, 5, 2), (0, 0, 0))
    assert (stats.tokens, stats.rounds, stats.drafted) == (1 + 4 + 4, 4, 21)
    assert stats.offered == [3, 3, 2]
    assert stats.accepted == [2, 2, 0]
    assert stats.acceptance == [2 / 3, 2 / 3, 0.0]
    assert stats.conditional_acceptance == [2 / 4, 1.0, 0.0]
    assert stats.acceptance_length == pytest.approx((stats.tokens - 1) / stats.rounds)
    assert expected_tokens(stats.conditional_acceptance) == pytest.approx(stats.acceptance_length)


def test_nothing_is_divided_by_no_round() -> None:
    stats = Stats(tokens=1)
    assert (stats.acceptance_length, stats.acceptance, stats.conditional_acceptance) == (0.0, [], [])
    assert stats.tokens_per_second == 0.0


def test_merging_is_a_micro_average() -> None:
    long, short = counted(*[(2, 2, 2)] * 9), counted((4, 4, 0))
    long.seconds["verify"], short.seconds["verify"] = 2.0, 1.0
    total = merge([long, short])
    assert (total.outputs, total.prompt_tokens, total.tokens, total.rounds) == (2, 14, 30, 10)
    assert total.tokens == total.outputs + total.rounds + sum(total.accepted)
    assert total.offered == [10, 10, 1, 1]
    assert total.accepted == [9, 9, 0, 0]
    assert total.acceptance_length == pytest.approx(28 / 10)  # and not the mean of 3 and 1
    assert total.seconds["verify"] == 3.0
    assert long.offered == [9, 9], "the parts stay as they are"
    assert merge([]).outputs == 0


def test_stats_are_json() -> None:
    found = json.loads(json.dumps(counted((2, 2, 1)).as_dict()))
    assert found["tokens"] == 3
    assert found["acceptance_length"] == 2.0
    assert set(found["seconds"]) == {"prefill", "draft", "verify", "rest"}


def test_a_watch_counts_every_lap_once() -> None:
    seconds = {"a": 0.0, "b": 0.0}
    watch = Watch(seconds)
    started = watch.mark
    watch.lap("a")
    first = watch.mark
    watch.lap(None)
    skipped = watch.mark - first
    watch.lap("b")
    watch.lap("a")
    assert sum(seconds.values()) == pytest.approx(watch.mark - started - skipped)


@pytest.mark.parametrize(
    ("tokens", "loops"),
    [
        ([], False),
        (range(100), False),
        ([*range(10), *range(9)], False),
        ([*range(10), *range(10)], True),
        ([7] * 10, False),
        ([7] * 11, True),
        ([50, *range(10), 60, 61, *range(10)], True),
    ],
)
def test_loops(tokens: list[int], loops: bool) -> None:
    assert repeats_ngram(list(tokens)) == loops


def test_loops_by_definition() -> None:
    text = [1, 2, 1, 3, 1, 2, 2, 1, 3]
    for n in range(1, 6):
        grams = [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]
        assert repeats_ngram(text, n) == (len(set(grams)) < len(grams))
