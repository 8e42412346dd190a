"""Plain decoding through our loop beside `model.generate` of transformers: the same prompt, tokens and dtype, in turn.

    python scripts/profile_plain.py --dtype bfloat16 --lengths 100,3000

A ratio is seconds of ours by seconds of theirs for one answer, prefill included; the median of some pairs is printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from headstart import Backbone, Generator, load_backbone
from headstart.inference.timing import now
from headstart.options import silence


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backbone", default="smollm2-135m")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--device", default=None)
    parser.add_argument("--lengths", default="100,3000", help="tokens of the prompts")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--plain-weights", action="store_true", help="lay out none of them for the CPU")
    options = parser.parse_args(arguments)
    silence()
    backbone = load_backbone(options.backbone, dtype=options.dtype, device=options.device)
    backbone.packs = not options.plain_weights
    generator = Generator(backbone, compile=options.compile)
    how = f"{'compiled, ' if options.compile else ''}{torch.get_num_threads()} threads"
    print(f"{backbone.name}, {backbone.dtype}, {backbone.device}, {how}, {options.max_new_tokens} new tokens\n")
    print("| prompt | ours, s | generate, s | ratio | of all pairs |\n|---|---|---|---|---|")
    for length in map(int, options.lengths.split(",")):
        print(row(backbone, generator, length, options.max_new_tokens, options.repeats), flush=True)


def row(backbone: Backbone, generator: Generator, length: int, new: int, repeats: int) -> str:
    """Markdown: both sides' seconds, and the ratio with its range."""
    ids = torch.randint(3, backbone.vocab_size, (1, length), generator=torch.Generator().manual_seed(length))
    ids, asked = ids.to(backbone.device), {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    sides: list[Callable[[], Any]] = [
        lambda: generator.generate(ids, **asked),
        lambda: backbone.model.generate(ids, attention_mask=torch.ones_like(ids), **asked),
    ]
    pairs = [(seconds(backbone, sides[0]), seconds(backbone, sides[1])) for _ in range(repeats + 1)][1:]
    ratios = sorted(ours / theirs for ours, theirs in pairs)
    ours, theirs = (median(column) for column in zip(*pairs, strict=True))
    span = f"{ratios[0]:.3f} to {ratios[-1]:.3f}"
    return f"| {length:,} | {ours:.2f} | {theirs:.2f} | {median(ratios):.3f} | {span} |"


def seconds(backbone: Backbone, side: Callable[[], Any]) -> float:
    begun = now(backbone.device)
    side()
    return now(backbone.device) - begun


if __name__ == "__main__":
    main()
