"""How many tokens of a round, and which tree, are fastest for economize here; written as variables to be sourced.

    python scripts/rivals/choose.py OUT.env [--prompts 12] [--tokens 64] [--threads 2]

Prompts are the shipped ones that recipes hold out; every setting answers all of them, prompt by prompt in turn. A head
takes part where its variable is set (`economized.py`).
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections import defaultdict
from pathlib import Path

import economized
import torch

from headstart import load_backbone
from headstart.verbs_inference import questions_of

Setting = tuple[tuple[str, str], ...]
SETTINGS: dict[str, list[Setting]] = {
    "lookup": [(("PEER_LOOKUP_CYCLE", str(cycle)),) for cycle in (3, 4, 6, 9, 11)],
    "eagle3": [(("PEER_EAGLE3_CYCLE", str(cycle)),) for cycle in (2, 3, 4, 5, 6)],
    "medusa": [
        (("PEER_MEDUSA_TREE", tree), ("PEER_MEDUSA_CYCLE", str(cycle)))
        for tree in ("chain", "small")
        for cycle in (2, 3, 4, 5)
    ],
}


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("out", type=Path)
    made.add_argument("--prompts", type=int, default=12)
    made.add_argument("--tokens", type=int, default=64)
    made.add_argument("--threads", type=int, default=2)
    given = made.parse_args()
    torch.set_num_threads(given.threads)
    warnings.filterwarnings("ignore", category=FutureWarning)  # of transformers, about economize
    backbone = load_backbone("smollm2-135m", dtype="bfloat16")
    asked = [backbone.encode([dict(one) for one in question.turns[0]]) for question in questions_of("shipped")]
    lines = []
    for kind, settings in SETTINGS.items():
        if kind in economized.HEADS and not os.environ.get(economized.HEADS[kind]):
            continue
        speeds = measured(kind, backbone.model, asked[: given.prompts], given.tokens, settings)
        for setting, speed in speeds.items():
            print(f"{kind} {' '.join(value for _, value in setting)}: {speed:.2f} tokens/s", flush=True)
        lines += [f"export {name}={value}" for name, value in max(speeds, key=lambda one: speeds[one])]
    given.out.write_text("\n".join(lines) + "\n")
    print(given.out.read_text())


def measured(
    kind: str, model: object, asked: list[list[int]], tokens: int, settings: list[Setting]
) -> dict[Setting, float]:
    """Tokens a second of each setting over all prompts, after one that is not counted."""
    seconds, counts = defaultdict[Setting, float](float), defaultdict[Setting, int](int)
    for place, ids in enumerate([asked[0], *asked]):
        for setting in settings:
            os.environ.update(dict(setting))
            if kind == "medusa":
                economized.attached.cache_clear()
                economized.attached(kind, model)  # another tree is another model, made before the clock starts
            begun = time.perf_counter()
            found = sum(map(len, economized.answer(kind, model, ids, tokens, 0.0)))
            if place:
                seconds[setting] += time.perf_counter() - begun
                counts[setting] += found
    return {setting: counts[setting] / seconds[setting] for setting in settings}


if __name__ == "__main__":
    main()
