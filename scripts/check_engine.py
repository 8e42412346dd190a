"""Throughput of `Engine` on a suite: against one row at a time with the same head, and against batched `generate`.

    python scripts/check_engine.py --head runs/eagle3/head --suite spec_bench.jsonl --out engine.jsonl --limit 16

For each concurrency, groups of questions are answered by both sides in turn: transformers' `model.generate` on a
left-padded batch of that many, and an `Engine` with that many rows; then by the engine with one row. The first turn of
each question is asked, decoding is greedy, and a side's throughput is its tokens over its seconds, prefill included.
It goes on where it was.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from headstart import Engine, load_backbone
from headstart.heads.backbone import Backbone
from headstart.inference.dialogue import encode
from headstart.inference.stats import merge
from headstart.inference.tune import spread
from headstart.options import drafter_of, silence
from headstart.verbs_inference import questions_of

GROUP = 8
Row = dict[str, Any]
Side = Callable[[Sequence[list[int]]], Row]


def batched(backbone: Backbone, rows: int, limit: int) -> Side:
    """transformers, `rows` prompts at a time."""
    pad = min(backbone.eos_token_ids, default=0)
    ends = backbone.eos_token_ids

    def answer(prompts: Sequence[list[int]]) -> Row:
        tokens, begun = 0, perf_counter()
        for start in range(0, len(prompts), rows):
            group = prompts[start : start + rows]
            width = max(map(len, group))
            ids = torch.tensor([[pad] * (width - len(one)) + one for one in group])
            mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in group])
            found = backbone.model.generate(
                ids.to(backbone.device), attention_mask=mask.to(backbone.device), max_new_tokens=limit, do_sample=False,
                pad_token_id=pad,
            )[:, width:].tolist()  # fmt: skip
            for answer in found:
                end = next((place + 1 for place, token in enumerate(answer) if token in ends), len(answer))
                tokens += end
        return {"tokens": tokens, "seconds": perf_counter() - begun}

    return answer


def ours(engine: Engine, limit: int) -> Side:
    """An engine that is full as long as there are questions."""

    def answer(prompts: Sequence[list[int]]) -> Row:
        begun = perf_counter()
        requests = [engine.submit(ids, max_new_tokens=limit, do_sample=False) for ids in prompts]
        engine.run()
        seconds = perf_counter() - begun
        stats = merge(request.stats for request in requests)
        return {"tokens": stats.tokens, "seconds": seconds, "rounds": stats.rounds, "parts": stats.seconds}

    return answer


def report(rows: Sequence[Row]) -> str:
    """Markdown: tokens a second by concurrency."""
    speeds: dict[tuple[str, int], float] = {}
    for key in dict.fromkeys((row["side"], row["rows"]) for row in rows):
        mine = [row for row in rows if (row["side"], row["rows"]) == key]
        speeds[key] = sum(row["tokens"] for row in mine) / sum(row["seconds"] for row in mine)
    single = speeds.get(("engine", 1), float("nan"))
    lines = [
        "| rows | generate, tokens/s | engine, tokens/s | engine / generate | engine / its one row |",
        "|" + "---|" * 5,
    ]
    for count in sorted({count for _, count in speeds}):
        theirs, mine = speeds.get(("generate", count), float("nan")), speeds.get(("engine", count), float("nan"))
        lines.append(f"| {count} | {theirs:.1f} | {mine:.1f} | {mine / theirs:.2f} | {mine / single:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backbone", default="smollm2-135m")
    parser.add_argument("--head", required=True)
    parser.add_argument("--tree", default="auto")
    parser.add_argument("--suite", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 7, 8])
    parser.add_argument("--limit", type=int, default=48)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args()
    silence()
    backbone = load_backbone(options.backbone, dtype=options.dtype)
    drafter = drafter_of(options.head, backbone)
    asked = spread(questions_of(options.suite), options.limit)
    prompts = [encode(backbone, one, one.turns[0], False) for one in asked]
    longest = max(map(len, prompts)) + options.max_new_tokens + 40
    done = [json.loads(line) for line in options.out.open()] if options.out.exists() else []
    keys = {(row["side"], row["rows"], row["group"]) for row in done}
    sides: dict[tuple[str, int], Side] = {}
    for count in options.rows:
        engine = Engine(backbone, drafter, max_rows=count, max_tokens=count * longest, tree=options.tree)
        sides["generate", count] = batched(backbone, count, options.max_new_tokens)
        sides["engine", count] = ours(engine, options.max_new_tokens)
    for side in sides.values():  # warms up
        side(prompts[:2])
    with options.out.open("a") as file:
        for group in range(0, len(prompts), GROUP):
            for place, ((name, count), side) in enumerate(sides.items()):
                if (name, count, group) in keys:
                    continue
                row = {
                    "side": name,
                    "rows": count,
                    "group": group,
                    "place": place,
                    **side(prompts[group : group + GROUP]),
                }
                file.write(json.dumps(row) + "\n")
                file.flush()
                done.append(row)
    print(report(done))


if __name__ == "__main__":
    main()
