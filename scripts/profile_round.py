"""A round taken apart: what the backbone and the drafter take, and what is done outside of them.

    python scripts/profile_round.py --head runs/eagle3/head --tree dynamic:4x4x15 --suite shipped

Backbone: the call of its decoder (or of the compiled graph in its place) and of its output projection alone. Drafter:
calls of the head's `extend` and `step` alone. The rest of a round is outside: masks, trees, gathers, sampling, copies.
Rounds alone count, prefill does not.
"""

from __future__ import annotations

import argparse
import functools
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from headstart import Generator, load_backbone
from headstart.heads import backbone as backbone_module
from headstart.heads import cached
from headstart.heads.base import DraftHead
from headstart.heads.cache import Cache
from headstart.inference import generator as generator_module
from headstart.inference import growth, ruling
from headstart.inference.dialogue import encode
from headstart.inference.drafter import HeadDrafter
from headstart.inference.timing import now
from headstart.inference.tree import Tree
from headstart.options import drafter_of, silence
from headstart.verbs_inference import questions_of

DRAFTER = ("drafter: extend", "drafter: step")
INSIDE = ("backbone", *DRAFTER)


class Clock:
    """Seconds by part; what a part calls is taken from its own."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self.device, self.open = device, list[float]()
        self._undo: list[Callable[[], None]] = []

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **more: Any) -> Any:
            begun = now(self.device)
            self.open.append(0.0)
            try:
                return function(*arguments, **more)
            finally:
                taken = now(self.device) - begun
                self.seconds[part] += taken - self.open.pop()
                self.calls[part] += 1
                if self.open:
                    self.open[-1] += taken

        return call

    def watch(self, part: str, owner: Any, *names: str) -> None:
        for name in names:
            own, before = name in vars(owner), getattr(owner, name)
            self._undo.append(
                functools.partial(setattr, owner, name, before) if own else functools.partial(delattr, owner, name)
            )
            setattr(owner, name, self.timed(part, before))

    def restore(self) -> None:
        """Take all clocks away."""
        while self._undo:
            self._undo.pop()()


def watched(generator: Generator, drafter: Any) -> Clock:
    """The parts of a round, each with a clock around it."""
    backbone = generator.backbone
    clock = Clock(backbone.device)
    graphs = {} if generator._compiled is None else generator._compiled._graphs
    graphs.update({taps: clock.timed("backbone", graph) for taps, graph in graphs.items()})
    if not graphs:
        clock.watch("backbone", backbone.decoder, "forward")
    clock.watch("backbone", backbone, "_projected")
    if isinstance(drafter, DraftHead):
        for part, name in zip(DRAFTER, ("extend", "step"), strict=True):
            clock.watch(part, drafter, name)
    clock.watch("masks and positions", backbone_module, "attention_mask", "positions", "causal")
    clock.watch("masks of the head", cached, "attention_mask")
    clock.watch("cache: commit", Cache, "commit")
    clock.watch("tree: growing", HeadDrafter, "draft", "advance")
    clock.watch("tree: pool", growth._Pool, "add", "best")
    clock.watch("tree: check", Tree, "check")
    clock.watch("walk", ruling, "match")
    clock.watch("forward: around the call", backbone, "forward", "logits")
    return clock


def table(clock: Clock, total: float, rounds: int, plain: float) -> str:
    """Markdown: milliseconds of a round and percent, by part."""
    seconds = dict(clock.seconds)
    seconds["loop and rest"] = total - sum(seconds.values())
    outside = total - sum(seconds.get(part, 0.0) for part in INSIDE)
    inner = [part for part in INSIDE if part in seconds]
    order = inner + sorted(seconds.keys() - set(inner), key=lambda part: -seconds[part])
    lines = ["| part | ms a round | % of a round |", "|---|---|---|"]
    for part in order:
        lines.append(f"| {part} | {1000 * seconds[part] / rounds:.2f} | {100 * seconds[part] / total:.1f} |")
    lines.append(f"| **outside** | {1000 * outside / rounds:.2f} | {100 * outside / total:.1f} |")
    lines.append("")
    for title, parts in (*((part, (part,)) for part in DRAFTER), ("either", DRAFTER)):
        if calls := sum(clock.calls[part] for part in parts):
            each = sum(seconds[part] for part in parts) / calls
            share = f"{1000 * each:.2f} ms, {100 * each / plain:.1f}% of a plain step ({1000 * plain:.2f} ms)"
            lines.append(f"One call of {title}: {share}.")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backbone", default="smollm2-135m")
    parser.add_argument("--head", required=True)
    parser.add_argument("--tree", default="dynamic:4x4x15")
    parser.add_argument("--suite", default="shipped")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--device", default=None)
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--plain-weights", action="store_true", help="lay out none of them for the CPU")
    options = parser.parse_args(arguments)
    silence()
    backbone = load_backbone(options.backbone, dtype=options.dtype, device=options.device)
    backbone.packs = not options.plain_weights
    drafter = drafter_of(options.head, backbone)
    prompts = [encode(backbone, one, one.turns[0], False) for one in questions_of(options.suite)[: options.limit]]
    asked = {"max_new_tokens": options.max_new_tokens, "do_sample": False}
    steps = []
    for ids in prompts[:3]:
        stats = Generator(backbone).generate(ids, **asked).stats
        steps.append((stats.total_seconds - stats.seconds["prefill"]) / max(1, stats.rounds))
    generator = Generator(backbone, drafter, tree=options.tree, compile=options.compile)
    for ids in prompts if options.compile else prompts[:1]:  # warms up
        generator.generate(ids, **asked)
    clock = watched(generator, drafter)
    prefill = clock.timed("prefill", generator_module.prefill)
    rounds, total, nodes = 0, 0.0, 0

    def apart(*arguments: Any) -> Any:
        """The prefill, whose parts are not those of a round."""
        before, counted = dict(clock.seconds), dict(clock.calls)
        try:
            return prefill(*arguments)
        finally:
            clock.seconds, clock.calls = defaultdict(float, before), defaultdict(int, counted)

    generator_module.prefill = apart
    try:
        for ids in prompts:
            stats = generator.generate(ids, **asked).stats
            rounds, total, nodes = (
                rounds + stats.rounds, total + stats.total_seconds - stats.seconds["prefill"], nodes + stats.drafted,
            )  # fmt: skip
    finally:
        generator_module.prefill = prefill.__wrapped__  # type: ignore[attr-defined]
        clock.restore()
    facts = f"{rounds:,} rounds of {1 + nodes / rounds:.1f} nodes, {backbone.name}, {backbone.dtype}, {backbone.device}"
    how = "compiled, " if options.compile else ""
    print(f"{facts}, {how}{torch.get_num_threads()} threads, {options.tree}\n")
    print(table(clock, total, rounds, median(steps)))


if __name__ == "__main__":
    main()
