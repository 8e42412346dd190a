"""One head beside a backbone and beside the same backbone with a LoRA: what the adapter takes from acceptance.

    python scripts/measure_adapter.py --head runs/eagle3/head --suite questions.jsonl --chats other_style.jsonl

The adapter is trained here by cross-entropy on the replies of some chats, or read from a folder of peft. Both backbones
answer the same questions plainly and with the head, greedily; the head's answers have to be the plain ones of each. The
adapter is then taken into the weights: as many backbones as there are adapters, and one head.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from headstart import Backbone, Generator, UserError, load_backbone
from headstart.data.chats import read_chats
from headstart.data.masks import Masked, Masker
from headstart.data.replies import Unmaskable
from headstart.heads.adapter import FILES, Adapter, AdapterSettings, stored
from headstart.inference.dialogue import encode
from headstart.inference.stats import Stats, merge
from headstart.inference.suite import choose
from headstart.options import drafter_of, silence
from headstart.verbs_inference import questions_of


class Side(NamedTuple):
    """What one backbone answered."""

    plain: list[list[int]]
    """Tokens of each plain answer."""
    drafted: list[list[int]]
    """The same with the head."""
    stats: Stats
    """Of all answers with the head."""


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 1 where an answer with the head was not the plain one."""
    options = parsed(arguments)
    silence()
    backbone = load_backbone(options.backbone, dtype=options.dtype, device=options.device)
    if options.adapter:
        adapter = Adapter(backbone, stored(options.adapter))
        adapter.load(load_file(options.adapter / FILES[1]))
    else:
        adapter = Adapter(backbone, AdapterSettings(rank=options.rank, alpha=options.rank))
        rows = supervised(backbone, options.chats, options.max_length, options.steps * options.rows)
        fit(adapter, rows, options.steps, options.lr)
        if options.save:
            adapter.save(options.save)
    questions = choose(questions_of(options.suite), options.every, options.limit)
    prompts = [encode(backbone, one, one.turns[0], raw=False) for one in questions]
    with adapter.off():  # so that both sides pass through the same layers until the adapter is taken in
        before = answers(backbone, options, prompts)
    after = answers(adapter.merge(), options, prompts)
    print(table(before, after))
    return 0 if all(side.plain == side.drafted for side in (before, after)) else 1


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add: Callable[..., Any] = parser.add_argument
    add("--backbone", default="smollm2-135m")
    add("--head", required=True, help="what drafts: a folder, or a name such as ngram")
    add("--dtype", default="float32", help="of the backbone; in bfloat16, answers may part at near-ties")
    add("--device", default=None)
    add("--suite", default="shipped", help="file of questions; their first turns are asked")
    add("--every", type=int, default=1, help="every K-th question")
    add("--limit", type=int, default=20, help="at most so many questions")
    add("--max-new-tokens", type=int, default=48)
    add("--tree", default="dynamic:3x3x6")
    add("--adapter", type=Path, default=None, help="folder of a LoRA by peft, in place of training one")
    add("--chats", default="shipped", help="file of chats on whose replies a LoRA is trained")
    add("--rank", type=int, default=16)
    add("--steps", type=int, default=120)
    add("--rows", type=int, default=4, help="chats of a step")
    add("--max-length", type=int, default=256, help="tokens of a chat; what lies behind them is cut off")
    add("--lr", type=float, default=5e-4)
    add("--save", type=Path, default=None, help="new folder for the trained LoRA")
    return parser.parse_args(arguments)


def supervised(backbone: Backbone, source: str, max_length: int, count: int) -> list[Masked]:
    """The first `count` rows with a reply in them, again from the first where there are fewer."""
    masker, rows = Masker(backbone.tokenizer), list[Masked]()
    for chat in read_chats([source])[0]:
        try:
            rows += [row for row in masker(chat.messages).rows if any(row.mask[1:max_length])] if chat.messages else []
        except Unmaskable:
            continue
        if len(rows) >= count:
            break
    if not rows:
        raise UserError(f"{source}: holds no chat with a reply in its first {max_length} tokens")
    cut = [Masked(row.ids[:max_length], row.mask[:max_length]) for row in rows]
    return [cut[place % len(cut)] for place in range(count)]


def fit(adapter: Adapter, rows: list[Masked], steps: int, lr: float) -> None:
    """Cross-entropy of the replies, a step for as many rows; the rate falls to zero in a line."""
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=lr, weight_decay=0.0)
    share = len(rows) // steps
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
        losses = []
        for row in rows[step * share : (step + 1) * share]:
            loss = cross_entropy(adapter.backbone, row)
            (loss / share).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if step % max(steps // 6, 1) == 0 or step == steps - 1:
            print(f"step {step}: loss {sum(losses) / share:.3f}", file=sys.stderr, flush=True)


def cross_entropy(backbone: Backbone, row: Masked) -> torch.Tensor:
    """() mean over the supervised tokens of a row."""
    ids = torch.tensor(row.ids, device=backbone.device)  # (T,)
    marked = torch.tensor(list(row.mask), device=backbone.device).bool()  # (T,)
    logits = backbone.model(ids[None]).logits[0, :-1].float()  # (T - 1, V)
    return F.cross_entropy(logits[marked[1:]], ids[1:][marked[1:]])


def answers(backbone: Backbone, options: argparse.Namespace, prompts: Iterable[list[int]]) -> Side:
    """Every prompt, plainly and with the head."""
    plain, drafting = Generator(backbone), Generator(backbone, drafter_of(options.head, backbone), tree=options.tree)
    asked = {"max_new_tokens": options.max_new_tokens, "do_sample": False}
    pairs = [(plain.generate(ids, **asked), drafting.generate(ids, **asked)) for ids in prompts]
    return Side([a.tokens for a, _ in pairs], [b.tokens for _, b in pairs], merge(b.stats for _, b in pairs))


def table(before: Side, after: Side) -> str:
    """Markdown: both backbones, and what is left of the drafts."""
    lines = ["| backbone | tokens a round | best guess | answers as plain |", "|---|---|---|---|"]
    for name, side in (("original", before), ("with the adapter", after)):
        same = sum(a == b for a, b in zip(side.plain, side.drafted, strict=True))
        first = side.stats.accepted[0] / side.stats.rounds if side.stats.accepted else 0.0
        length = side.stats.acceptance_length
        lines.append(f"| {name} | {length:.3f} | {first:.1%} | {same} of {len(side.plain)} |")
    changed = sum(a != b for a, b in zip(before.plain, after.plain, strict=True))
    kept, had = after.stats.acceptance_length - 1, before.stats.acceptance_length - 1
    lines.append(f"\n{changed} of {len(before.plain)} plain answers differ between the two.")
    if had:
        lines.append(f"Accepted drafts a round: {had:.3f} -> {kept:.3f}, {kept / had:.0%} of before.")
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"{error}")
