"""How long it takes: forwards by tree nodes, drafts, and whole answers beside `model.generate`.

Every time is a median, taken with the device idle before and after.

Letters: B rows, T positions, N tree nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch

from gpu.models import WORDS, Scripted
from gpu.record import Run
from headstart.heads.backbone import Backbone, Features
from headstart.heads.base import DraftHead
from headstart.inference.bench import answer_ours, answer_plainly
from headstart.inference.drafter import HeadDrafter
from headstart.inference.generator import Generator
from headstart.inference.stats import Stats
from headstart.inference.tree import Tree, parse_shape

NODES = (1, 4, 8, 16, 32, 64)
CONTEXT = 256  # cached tokens behind which trees are verified
DRAFTS = ("chain:1", "chain:4", "dynamic:4x4x8", "dynamic:4x8x32")
Heads = dict[str, DraftHead]


def milliseconds(run: Run, call: Callable[[], Any]) -> float:
    """Median time of a call, within a second or two."""
    repeats, seconds = (3, 0.2) if run.quick else (30, 1.5)
    times: list[float] = []
    for _ in range(2):
        call()
    ends = time.monotonic() + min(seconds, max(run.left, 0))
    while len(times) < 3 or (len(times) < repeats and time.monotonic() < ends):
        _wait(run.device)
        began = time.perf_counter()
        call()
        _wait(run.device)
        times.append(1000 * (time.perf_counter() - began))
    return median(times)


def forwards(run: Run, backbone: Backbone) -> None:
    """One verification forward, logits included, by the number of nodes; and whole texts, as training reads them."""
    note = f"Behind {CONTEXT} cached tokens, logits of all nodes included, 1 row, {_dtype(backbone)}."
    table = run.table(f"Forward by tree nodes: {backbone.name}", "nodes", "ms", "in forwards of 1 node", note=note)
    cache = backbone.new_cache(capacity=CONTEXT + max(NODES))
    backbone.forward(_words(backbone, 1, CONTEXT), cache=cache)
    cache.commit_all()
    first = 0.0
    for nodes in NODES:
        tree = Tree([3] * nodes, [(node - 1) // 2 for node in range(nodes)] if nodes > 1 else [-1])
        ids = _words(backbone, 1, nodes)  # (1, N)
        ancestors = None if nodes == 1 else tree.ancestors.to(backbone.device)

        def verify(ids: torch.Tensor = ids, ancestors: torch.Tensor | None = ancestors) -> None:
            backbone.logits(backbone.forward(ids, cache=cache, ancestors=ancestors).last)

        with torch.no_grad():
            taken = milliseconds(run, verify)
        first = first or taken
        table.rows.append((nodes, taken, taken / first))
    rows, width = (2, 32) if run.quick else (8, 512)
    ids = _words(backbone, rows, width)  # (B, T)
    with torch.no_grad():
        taken = milliseconds(run, lambda: backbone.forward(ids))
    whole = run.table(f"Forward of whole texts: {backbone.name}", "rows", "tokens each", "ms", "tokens/s")
    whole.rows.append((rows, width, taken, 1000 * rows * width / taken))


def drafts(run: Run, backbone: Backbone, heads: Heads) -> None:
    """What a round's draft costs: taking in what was accepted, and growing a tree."""
    note = (
        "Behind 32 tokens; taking in two accepted tokens and the next one is included, and is all of the first column. "
        f"A step: a third of what chain:4 takes over chain:1. Head and backbone in {_dtype(backbone)}."
    )
    columns = ("head", "no draft, ms", *(f"{shape}, ms" for shape in DRAFTS), "a step, ms")
    table = run.table(f"Drafting: {backbone.name}", *columns, note=note)
    for name, head in heads.items():
        prompt = _words(backbone, 1, 32)  # (1, T)
        with torch.no_grad():
            features = backbone.forward(prompt, taps=head.taps)
        times = [milliseconds(run, _round(backbone, head, shape, prompt, features)) for shape in (None, *DRAFTS)]
        table.rows.append((name, *times, (times[2] - times[1]) / 3))


def _round(
    backbone: Backbone, head: DraftHead, shape: str | None, prompt: torch.Tensor, features: Features
) -> Callable[[], None]:
    """What drafts a tree of this shape, or none, each time behind three true tokens more."""
    drafter = HeadDrafter(head, parse_shape(shape or "chain:1"), backbone.device)
    text: list[int] = prompt[0].tolist()
    drafter.start(text[:-1])
    drafter.advance(features[:, :-1], text[1:])

    def call() -> None:
        drafter.advance(features[:, -3:], text[-3:])
        if shape is not None:
            drafter.draft(8)

    return call


def answers(run: Run, backbone: Backbone, heads: Heads, prompt: list[int]) -> None:
    """Whole greedy answers: `model.generate`, and ours with every drafter."""
    limit = 16 if run.quick else 96
    note = (
        f"{len(prompt)} tokens of prompt, {limit} new ones, 1 row, {_dtype(backbone)}, prefill included. “The answer” "
        "is a drafter that knows it: the most that chains of 4 could bring. Other acceptance is that of a random model "
        "and of heads with little or no training, and says nothing of real ones."
    )
    columns = ("", "tokens/s", "in model.generate", "tokens a round", "ms a round")
    table = run.table(f"Answers: {backbone.name}", *columns, note=note)
    answer_plainly(backbone, prompt, 8)
    plain = min((answer_plainly(backbone, prompt, limit) for _ in range(2)), key=lambda one: one.seconds["seconds"])
    base = len(plain.tokens) / plain.seconds["seconds"]
    table.rows.append(("model.generate", base, 1.0, 1.0, 1000 / base))
    for name, generator in _sides(backbone, heads, plain.tokens):
        if run.left < 5:
            run.omit(f"answers of {backbone.name}, from {name} on, for lack of time")
            return
        answer_ours(generator, prompt, 8)
        ours = min((answer_ours(generator, prompt, limit) for _ in range(2)), key=lambda one: one.seconds["seconds"])
        stats, rate = Stats(**ours.counts), len(ours.tokens) / ours.seconds["seconds"]
        rounds = 1000 * (ours.seconds["seconds"] - ours.seconds["prefill"]) / max(stats.rounds, 1)
        table.rows.append((name, rate, rate / base, stats.acceptance_length, rounds))


def _sides(backbone: Backbone, heads: Heads, answer: list[int]) -> Iterator[tuple[str, Generator]]:
    yield "ours, no drafter", Generator(backbone)
    yield "ours, ngram", Generator(backbone, "ngram")
    yield "ours, the answer, chain:4", Generator(backbone, Scripted(answer, 4))
    for name, head in heads.items():
        for tree in ("chain:4", "dynamic:4x4x8"):
            yield f"ours, {name}, {tree}", Generator(backbone, head, tree=tree)


def _words(backbone: Backbone, rows: int, width: int) -> torch.Tensor:
    """(rows, width) random words."""
    generator = torch.Generator().manual_seed(2)
    return torch.randint(3, WORDS, (rows, width), generator=generator).to(backbone.device)


def _dtype(backbone: Backbone) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}[backbone.dtype]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
