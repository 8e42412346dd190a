"""Training, equality, sampling, devices: what has to hold.

Letters: N nodes, V vocabulary. p is the target's probability.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu.models import Scripted, Subject, write_chats
from gpu.record import Run
from headstart.data.prepare import PrepareSettings, prepare
from headstart.heads.backbone import Backbone
from headstart.heads.format import load_head
from headstart.heads.load import load_backbone
from headstart.heads.methods import METHODS
from headstart.inference.bench import answer_plainly
from headstart.inference.generator import Generator
from headstart.inference.judge import Judge, Parting
from headstart.inference.plain import decode_group
from headstart.inference.proof import DRAWN
from headstart.training.loop import train
from headstart.training.recipe import Recipe

TREES = {
    "chain": "chain:4",
    "static tree": "static:0,1,2,0.0,0.1,1.0,0.0.0,0.0.1,0.0.0.0",
    "dynamic tree": "dynamic:4x4x12",
}
STORY = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
"""What stories260K makes of nothing; another one where the conversion is wrong, and no English."""
STEPS = 50


# -- the real model --------------------------------------------------------------------------------------------------


def story(run: Run, subject: Subject) -> None:
    """The converted model writes the story that it is known for."""
    backbone = subject.exact
    tokens = answer_plainly(backbone, [1], 40 if run.quick else 200).tokens
    text = backbone.tokenizer.decode(tokens, skip_special_tokens=True).strip()
    run.check(f"{subject.name} writes English", text.startswith(STORY), repr(text))
    other = Generator(backbone).generate([1], max_new_tokens=len(tokens), temperature=0)
    run.check(f"{subject.name}: the same story without model.generate", other.tokens == tokens)


# -- training --------------------------------------------------------------------------------------------------------


def prepared(run: Run, subject: Subject) -> Path:
    """The folder of prepared chats that the subject has written itself; made once."""
    folder = run.work / subject.name.replace(" ", "-")
    if not folder.exists():
        chats = folder.with_suffix(".jsonl")
        write_chats(chats, subject.half, subject.openings, 24 if run.quick else 128)
        prepare(subject.half, PrepareSettings(input=[str(chats)], out=folder, drop_empty=True))
    return folder


def training(run: Run, subject: Subject, method: str) -> None:
    """A head learns in bf16 on the device, and nothing else changes."""
    steps, backbone = 8 if run.quick else STEPS, subject.half
    folder = run.work / f"{subject.name}-{method}".replace(" ", "-")
    minutes = max(run.left, 1) / 60 / 6  # a slow device is to come to the other parts, too
    overrides: dict[str, Any] = {
        "data.train": [str(prepared(run, subject))], "data.max_length": 256, "data.held_out": 0.1,
        "optim.lr": 0.05 / backbone.hidden_size**0.5, "optim.max_steps": steps, "optim.max_minutes": minutes,
        "log.every": steps // 4, "evaluate.rows": 16, "evaluate.prompts": 2, "precision.autocast": "bf16",
        "evaluate.max_new_tokens": 8 if run.quick else 32, "batch.rows": 8 if run.quick else 16,
    }  # fmt: skip
    recipe = Recipe(backbone=subject.name, run=folder, method=method)
    before = [tensor.detach().clone() for tensor in _tensors(backbone)]
    subject.heads[method] = train(recipe, overrides, backbone=backbone)
    name = f"{method} on {subject.name}"
    same = all(torch.equal(a, b) for a, b in zip(before, _tensors(backbone), strict=True))
    run.check(f"{name}: the backbone stays as it was", same and not _learning(backbone), f"{len(before)} tensors")
    _check_weights(run, name, subject.heads[method], method, backbone)
    _check_loss(run, name, folder, steps)


def _check_weights(run: Run, name: str, folder: Path, method: str, backbone: Backbone) -> None:
    """Every weight of the head is another than at the start."""
    torch.manual_seed(0)  # the recipe's
    start = METHODS[method].build(backbone)
    head = load_head(folder, backbone, dtype=torch.float32)
    pairs = zip(start.named_parameters(), head.parameters(), strict=True)
    still = [label for (label, one), other in pairs if torch.equal(one, other)]
    total = sum(1 for _ in head.parameters())
    run.check(f"{name}: all of the head learns", not still, f"{total} tensors" if not still else f"unmoved: {still}")


def _check_loss(run: Run, name: str, folder: Path, steps: int) -> None:
    """The loss falls; and what it cost."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [row for row in rows if "loss" in row]
    first, last, taken = losses[0], losses[-1], rows[-1]["step"]
    if taken < steps:
        run.omit(f"{name}: steps {taken + 1} to {steps}, for lack of time")
    if taken >= steps // 2:
        falls = last["loss"] < 0.98 * first["loss"]
        run.check(f"{name}: the loss falls", falls, f"{first['loss']:.3f} to {last['loss']:.3f}")
    title = "Training in bf16"
    tables = [table for table in run.record.tables if table.title == title]
    columns = ("head", "steps", "loss", "tokens/s", "peak memory, GiB", "tokens a round, held out")
    table = tables[0] if tables else run.table(title, *columns, note=TRAINING_NOTE)
    measured = next((row["held_out"].get("acceptance_length") for row in rows if "held_out" in row), None)
    loss = f"{first['loss']:.3f} to {last['loss']:.3f}"
    table.rows.append((name, taken, loss, last["tokens_per_second"], last["memory_gib"], measured))


TRAINING_NOTE = (
    "Loss: mean of the first and of the last quarter of the steps. Tokens/s: of the last quarter, the backbone's "
    "forward included. The texts are the backbone's own."
)


def _tensors(backbone: Backbone) -> Iterator[Tensor]:
    yield from backbone.model.parameters()
    yield from backbone.model.buffers()


def _learning(backbone: Backbone) -> bool:
    return any(one.requires_grad or one.grad is not None for one in backbone.model.parameters())


# -- equality --------------------------------------------------------------------------------------------------------


def equality(run: Run, subject: Subject, half: bool) -> None:
    """Greedy tokens are those of `model.generate`, with every drafter and form of tree."""
    backbone = subject.half if half else subject.exact
    kind, limit = "bf16" if half else "fp32", 12 if run.quick else 64
    prompts = subject.prompts[: 2 if run.quick else 3]
    own = [answer_plainly(backbone, prompt, limit).tokens for prompt in prompts]
    judge, partings = Judge(backbone), list[tuple[str, int, Parting]]()
    columns = ("drafter", "equal", "parted", "not explained", "tokens a round")
    note = f"{len(prompts)} prompts, {limit} new tokens. Trees: {', '.join(TREES.values())}."
    table = run.table(f"Greedy answers against model.generate: {subject.name} in {kind}", *columns, note=note)
    for name, generators in _drafted(subject, backbone, prompts, own):
        if run.left < 5:
            run.omit(f"equality of {subject.name} in {kind}, from {name} on, for lack of time")
            break
        pairs = zip(generators, prompts, strict=True)
        outputs = [one.generate(ids, max_new_tokens=limit, temperature=0) for one, ids in pairs]
        found = [
            judge.parting(*three, temperature=0)
            for three in zip(prompts, own, (o.tokens for o in outputs), strict=True)
        ]
        partings += [(name, place, one) for place, one in enumerate(found) if one]
        wrong = sum(one is not None and not one.explained for one in found)
        rounds, accepted = sum(o.stats.rounds for o in outputs), sum(sum(o.stats.accepted) for o in outputs)
        table.rows.append((name, found.count(None), sum(map(bool, found)), wrong, 1 + accepted / max(rounds, 1)))
    wrong = sum(not one.explained for _, _, one in partings)
    answers = len(table.rows) * len(prompts)
    detail = f"{answers - len(partings)} of {answers} answers of {limit} tokens, {len(partings) - wrong} ties"
    run.check(f"{subject.name} in {kind}: greedy tokens are those of model.generate", not wrong, detail)
    _list(run, f"Where they parted: {subject.name} in {kind}", partings)


def _list(run: Run, title: str, partings: Sequence[tuple[str, int, Parting]]) -> None:
    if partings:
        table = run.table(title, "drafter", "prompt", "step", "gap", "explained")
        table.rows += [(name, place + 1, one.step, one.gap, one.allowed) for name, place, one in partings]


def _drafted(
    subject: Subject, backbone: Backbone, prompts: Sequence[list[int]], own: Sequence[list[int]]
) -> Iterator[tuple[str, list[Generator]]]:
    """Name and generators, one a prompt, of all that drafts: every head in every tree, lookup, and right answers."""
    yield "none", [Generator(backbone)] * len(prompts)
    yield "ngram", [Generator(backbone, "ngram")] * len(prompts)
    for siblings in (False, True):
        known = [Generator(backbone, Scripted(answer, 4, siblings=siblings, wavering=True)) for answer in own]
        yield f"the answer, {'behind wrong siblings' if siblings else 'as a chain'}", known
    for method, folder in subject.heads.items():
        head = load_head(folder, backbone)
        for kind, tree in TREES.items():
            yield f"{method}, {kind}", [Generator(backbone, head, tree=tree)] * len(prompts)


# -- sampling --------------------------------------------------------------------------------------------------------


def sampling(run: Run, subject: Subject) -> None:
    """A seed gives the same tokens with any drafter, and on CPU and GPU, but for draws that fp32 cannot tell apart."""
    backbone, limit = subject.exact, 12 if run.quick else 32
    judge, partings, answers = Judge(backbone), list[tuple[str, int, Parting]](), 0
    reference = Backbone(copy.deepcopy(backbone.model).cpu(), backbone.tokenizer, subject.name)
    sides = {"none": Generator(backbone)}
    for method, folder in subject.heads.items():
        sides[method] = Generator(backbone, load_head(folder, backbone), tree=TREES["dynamic tree"])
    for seed, prompt in enumerate(subject.prompts[: 1 if run.quick else 2]):
        options = {**DRAWN, "max_new_tokens": limit, "seed": seed}
        own = Generator(reference).generate(prompt, **options).tokens
        for name, generator in sides.items():
            found = judge.parting(prompt, own, generator.generate(prompt, **options).tokens, **options)
            partings += [(name, seed, found)] if found else []
            answers += 1
    wrong = sum(not one.explained for _, _, one in partings)
    detail = f"{answers - len(partings)} of {answers} answers of {limit} tokens equal, {len(partings) - wrong} ties"
    where = "on CPU and GPU, " if run.device.type == "cuda" else ""
    run.check(f"{subject.name}: a seed draws the same {where}with and without heads", not wrong, detail)
    _list(run, f"Where draws parted: {subject.name}", partings)


# -- devices ---------------------------------------------------------------------------------------------------------


def devices(run: Run, subject: Subject) -> None:
    """Prompts, heads and files come from the CPU; the work is done on the device."""
    backbone, prompt, limit = subject.exact, subject.prompts[0], 12
    plain = Generator(backbone)
    expected = plain.generate(prompt, max_new_tokens=limit, temperature=0).tokens

    def same(name: str, generator: Generator, given: Any) -> None:
        tokens = generator.generate(given, max_new_tokens=limit, temperature=0).tokens
        run.check(f"devices: {name}", tokens == expected)

    run.check("devices: the backbone is there", backbone.device.type == run.device.type, str(backbone.device))
    same("a prompt as a tensor on the CPU", plain, torch.tensor(prompt))
    same("a prompt as a tensor on the device, (1, T)", plain, torch.tensor([prompt], device=run.device))
    for method in METHODS:
        head = METHODS[method].build(backbone).cpu()
        same(f"a head from the CPU ({method})", Generator(backbone, head), prompt)
        moved = {one.device.type for one in head.parameters()} == {run.device.type}
        run.check(f"devices: which has moved to the backbone ({method})", moved)
    pieces = list(plain.stream(prompt, max_new_tokens=limit, temperature=0))
    run.check("devices: a stream", [token for piece in pieces for token in piece.tokens] == expected)
    rows = decode_group(backbone, subject.prompts, max_new_tokens=limit)
    judge = Judge(backbone)
    alone = [plain.generate(one, max_new_tokens=limit, temperature=0).tokens for one in subject.prompts]
    partings = [judge.parting(*three, temperature=0) for three in zip(subject.prompts, alone, rows, strict=True)]
    run.check("devices: a batch answers as its rows alone", all(one is None or one.explained for one in partings))
    _files(run, subject)


def _files(run: Run, subject: Subject) -> None:
    """A backbone and its head through files."""
    folder = run.work / "saved"
    subject.exact.model.save_pretrained(folder)
    subject.exact.tokenizer.save_pretrained(folder)
    loaded = load_backbone(str(folder), dtype="bfloat16", device=run.device)
    wanted = (run.device.type, torch.bfloat16)
    run.check("devices: a folder loaded there in bf16", (loaded.device.type, loaded.dtype) == wanted)
    run.check("devices: with the same weights", loaded.fingerprint() == subject.half.fingerprint())
    for method, place in subject.heads.items():
        head = load_head(place, loaded)
        found = {(one.device.type, one.dtype) for one in head.parameters()}
        run.check(f"devices: its {method} head, too", found == {wanted})
        text = Generator(loaded, head).generate(subject.prompts[0], max_new_tokens=8, temperature=0).text
        run.check(f"devices: and both generate ({method})", bool(text), repr(text))
