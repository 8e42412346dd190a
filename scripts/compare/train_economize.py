"""Trains a head of economize 0.3.2 by its own `fit`, on prepared rows, for a number of steps or of minutes.

    python train_economize.py eagle3|medusa ROWS OUT --steps 1000
    python train_economize.py eagle3|medusa ROWS OUT --minutes 30

ROWS is a folder of `headstart data prepare`; a share of 0.12 is held out as scripts/compare_peers.py does. The same
command goes on from the last checkpoint in OUT; the head is in OUT/final, and the folder holds OUT/found.json.
Minutes become steps by the first steps' pace, since the schedule has to know its end. EAGLE-3: a draft vocabulary of
the most frequent tokens, like all others here. Medusa: `head="shared"`, the model's own projection. Objectives,
optimizer and learning rates are its defaults, unless --lr says another.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import time
import warnings
from pathlib import Path
from typing import Any

import economize
import torch
from economize.techniques.eagle3 import Eagle3Config
from economize.techniques.medusa import MedusaConfig
from economize.train import fit
from economize.train.data import Example, SequenceSource

from headstart import load_backbone
from headstart.data.prepare import load_prepared
from headstart.training.batches import Rows
from headstart.training.start import counted

PROBE = 4  # steps whose pace is taken; the first one is left out


def main() -> None:
    given = parsed()
    claim(given)
    torch.set_num_threads(given.threads)
    warnings.filterwarnings("ignore", category=FutureWarning)  # of transformers, about economize
    backbone = load_backbone(given.backbone, dtype="bfloat16")
    rows, _ = Rows.of(load_prepared(given.rows, backbone)).parted(given.held_out, given.length)
    examples = [example(*rows[row]) for row in range(len(rows))]
    model = economize.apply(backbone.model, config(given.kind, given.vocab, given.depths))
    if given.kind == "eagle3":
        vocab = counted(rows, backbone.vocab_size, given.vocab)
        model.techniques["eagle3"].set_draft_vocab(vocab.d2t + torch.arange(len(vocab.d2t)))
    settings: dict[str, Any] = {"batch_size": given.rows_a_step, "autocast": "bfloat16", "seed": 0}
    if given.lr:
        settings["lr"] = given.lr
    steps = given.steps or paced(model, examples, settings, given)
    settings |= {"warmup_steps": max(1, steps // 20), "schedule": "cosine"}
    begun = time.monotonic()
    result = fit(
        model, SequenceSource(examples, given.rows_a_step), steps=steps, output_dir=given.out, resume=True,
        save_every=max(1, min(200, steps // 4)), log_every=max(1, min(20, steps // 10)), callbacks=[tell], **settings,
    )  # fmt: skip
    taken = {"steps": steps, "minutes": (time.monotonic() - begun) / 60, "rows": len(rows), "kind": given.kind}
    taken |= {"tokens": int(rows.lengths.sum()), "loss": result.losses[-1] if result.losses else None}
    taken["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 2**10
    (given.out / "found.json").write_text(json.dumps(taken))
    print(taken)


def claim(given: argparse.Namespace) -> None:
    """The folder is of one run alone: what it was asked for is written down, and nothing else is resumed."""
    kept = given.out / "asked.json"
    asked = {name: str(value) for name, value in vars(given).items() if name not in ("threads", "out")}
    if kept.exists() and (before := json.loads(kept.read_text())) != asked:
        changed = [f"{name} {before.get(name)}, now {asked[name]}" for name in asked if before.get(name) != asked[name]]
        raise SystemExit(f"{given.out} holds another run ({'; '.join(changed)}); remove it, or ask for the same")
    given.out.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(asked))


def config(kind: str, vocab: int, depths: int) -> Any:
    """As its authors have it, with our draft vocabulary and projection."""
    if kind == "eagle3":
        return Eagle3Config(draft_vocab=vocab, train_steps=depths)
    return MedusaConfig(head="shared")


def example(ids: Any, mask: Any) -> Example:
    """A row as economize wants it: its mask is 1 where the *next* token is learned."""
    learned = torch.zeros(len(ids), dtype=torch.long)
    learned[:-1] = torch.from_numpy(mask[1:].astype("int64"))
    return Example(torch.from_numpy(ids.astype("int64")), learned)


def paced(model: Any, examples: list[Example], settings: dict[str, Any], given: argparse.Namespace) -> int:
    """Steps that fit into the minutes, written down so that a resumed run has the same end."""
    kept: Path = given.out / "steps"
    if not kept.exists():
        moments: list[float] = []
        before = {name: value.clone() for name, value in model.techniques.state_dict().items()}
        fit(
            model, SequenceSource(examples, given.rows_a_step), steps=PROBE, log_every=1,
            callbacks=[lambda _: moments.append(time.monotonic())], **settings,
        )  # fmt: skip
        model.techniques.load_state_dict(before)
        pace = (moments[-1] - moments[0]) / (len(moments) - 1)
        kept.write_text(str(max(1, math.floor(60 * given.minutes / pace))))
        print(f"{pace:.2f} s a step: {kept.read_text()} steps", flush=True)
    return int(kept.read_text())


def tell(record: dict[str, Any]) -> None:
    print(" ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in record.items()), flush=True)


def parsed() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("kind", choices=("eagle3", "medusa"))
    made.add_argument("rows", type=Path)
    made.add_argument("out", type=Path)
    made.add_argument("--steps", type=int)
    made.add_argument("--minutes", type=float, default=10)
    made.add_argument("--rows-a-step", type=int, default=2)
    made.add_argument("--length", type=int, default=576, help="tokens of a row")
    made.add_argument("--vocab", type=int, default=4096)
    made.add_argument("--depths", type=int, default=3, help="unrolled steps of EAGLE-3")
    made.add_argument("--held-out", type=float, default=0.12)
    made.add_argument("--lr", type=float)
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--backbone", default="smollm2-135m")
    return made.parse_args()


if __name__ == "__main__":
    main()
