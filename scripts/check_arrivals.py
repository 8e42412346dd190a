"""Requests that arrive at random, greedy and drawn ones in turn, through an engine: each has its single-row tokens.

    python scripts/check_arrivals.py runs/eagle3/head spec_bench.jsonl [--requests 200] [--rate 2]

In fp32. First turns, spread over the suite; arrivals are a Poisson process, seeded. Single rows have the same head and
the same tree. Ends with 1 where an answer differs, failed or is lost.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import headstart as hs
from headstart.inference.dialogue import encode
from headstart.inference.suite import choose, read_suite
from headstart.inference.traffic import Ask, arrivals, served


def asks_of(backbone: hs.Backbone, suite: Path, count: int, limit: int) -> list[Ask]:
    """Every second one is drawn at temperature 1."""
    questions = read_suite(suite)
    questions = choose(questions, max(1, len(questions) // count), count)
    drawn: list[dict[str, Any]] = [{"do_sample": False}, {"temperature": 1.0, "top_k": 0, "top_p": 1.0}]
    return [
        Ask(
            encode(backbone, one, one.turns[0], raw=False), {"max_new_tokens": limit, "seed": place, **drawn[place % 2]}
        )
        for place, one in enumerate(questions)
    ]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path)
    parser.add_argument("suite", type=Path)
    parser.add_argument("--backbone", default="smollm2-135m")
    parser.add_argument("--tree", default="dynamic:3x3x6")
    for name, value in (("requests", 200), ("tokens", 32), ("rows", 8), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second")
    given = parser.parse_args(arguments)
    backbone = hs.load_backbone(given.backbone, dtype="float32")
    head = hs.load_head(given.head, backbone)
    asks = asks_of(backbone, given.suite, given.requests, given.tokens)
    slots = given.rows * (max(len(ask.ids) for ask in asks) + given.tokens + 32)
    engine = hs.Engine(backbone, head, max_rows=given.rows, max_tokens=slots, tree=given.tree)
    rows = served(engine, asks, times=arrivals(len(asks), given.rate, given.seed))
    left = (engine.running, engine.waiting)
    alone = hs.Generator(backbone, head, tree=given.tree)
    wrong = []
    for place, (ask, row) in enumerate(zip(asks, rows, strict=True)):
        if row.get("tokens") != alone.generate(ask.ids, **ask.options).tokens:
            wrong.append(
                f"request {place} ({len(ask.ids)} prompt tokens, {ask.options}): {row.get('failed', 'differs')}"
            )
    print("\n".join(wrong))
    print(f"{len(asks) - len(wrong)} of {len(asks)} requests have their single-row tokens; left in the engine: {left}")
    return int(bool(wrong) or any(left))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
