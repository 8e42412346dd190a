"""The comparison: transformers' `model.generate` and ours, in turn, on the same prompts, in one process.

Both get the same token ids, token limit, dtype, threads and attention, both are warmed up, and the time is that of the
whole call, prefill included. Who goes first alternates. Decoding is greedy. A later turn is asked behind the *plain*
answer to the one before, whatever ours was.

In the folder of a bench:

    setup.json                           what the figures depend on; rows of another setup are not added to
    rows.jsonl                           a row an answer, all rows of a question at once
    report.md, report.json, report.png   made of the rows (report.py, plots.py)

An interrupted bench goes on with the questions that have no rows yet, and so does one with a higher limit.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import UserError
from ..heads import chat
from ..heads.backbone import Backbone
from ..heads.base import DraftHead
from ..progress import Progress
from .detokenizer import decode as decode_text
from .drafters import DEFAULT_LOOKUP, DEFAULT_SHAPE
from .figures import Report, speedup
from .generator import Generator, Output
from .report import write_report
from .rows import Row, Rows, opened
from .stats import repeats_ngram
from .suite import Message, Question, choose
from .tree import Chain

LOOP = 10  # a plain answer in which a run of this many tokens occurs twice is a loop
WARM_UP_TOKENS = 32


@dataclass
class BenchSettings:
    """A comparison with transformers' generate on the same prompts, as a report."""

    suite: str
    """File of questions: Spec-Bench style (turns), HumanEval, GSM8K, prompts or chats in .jsonl or .json, or a .txt
    with a prompt a line; or `shipped`: those of the shipped conversations that recipes hold out."""
    out: Path
    """Folder for report.md, report.json, report.png and rows.jsonl; the same command goes on with what is there."""
    head: str = "none"
    """What drafts: the folder or Hub id of a head, ngram, or none (plain decoding in our loop)."""
    tree: str | None = None
    """Form of the drafts, such as chain:4 or dynamic:4x4x8 (depth, children of a node, nodes in all)."""
    max_new_tokens: int = 128
    """Stop each answer after this many tokens."""
    every: int = 1
    """Ask every K-th question only."""
    limit: int | None = None
    """Ask this many questions at most."""
    repeats: int = 1
    """Measure each answer this many times; times are averaged."""
    warm_up: int = 2
    """Short answers of each side before anything is measured."""
    threads: int | None = None
    """CPU threads of both sides; without it, what torch chooses."""
    raw: bool = False
    """Ask the texts as they stand, without the chat template."""
    restart: bool = False
    """Throw away the rows of an earlier bench in this folder."""

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "every", "limit", "repeats", "warm_up", "threads"):
            value, least = getattr(self, name), 0 if name == "warm_up" else 1
            if value is not None and value < least:
                raise UserError(f"{name} is {value}; it has to be at least {least}")


class Timed(NamedTuple):
    """One answer of one side."""

    tokens: list[int]
    seconds: dict[str, float]
    """`seconds`: all of the call. `prefill`; of ours also `draft` and `verify`: what these parts of it took."""
    output: Output | None = None
    """Of ours."""


def bench(
    backbone: Backbone, drafter: Any, questions: Sequence[Question], settings: BenchSettings, *, command: str = ""
) -> Report:
    """Measure what has no rows in `settings.out` yet, and write the report of all.

    Args:
        drafter: what `Generator` takes; `settings.head` is only its name.
        questions: of a suite; `settings.every` and `settings.limit` choose among them.
        command: how to run this again, for the report.

    Returns:
        The report, as in report.json.

    Raises:
        UserError: a question cannot be asked (no chat template, say), the head belongs to another backbone, or the
            folder holds rows of another setup or is in use.
    """
    asked = choose(questions, settings.every, settings.limit)
    with _threads(settings.threads):
        generator = Generator(backbone, drafter, tree=settings.tree)
        for question in asked:  # whatever is wrong with one is told before any work
            _encode(backbone, question, question.turns[0], settings.raw)
        setup = _setup(backbone, drafter, settings)
        with opened(settings.out, setup, settings.restart) as store:
            rows = _run(generator, asked, settings, store)
        return write_report(settings.out, rows, setup, command)


def _run(generator: Generator, asked: Sequence[Question], settings: BenchSettings, store: Rows) -> list[Row]:
    """The rows of all questions, in order; those that are missing are measured."""
    missing = [question for question in asked if question.key not in store.of]
    total, left = (sum(len(question.turns) for question in some) for some in (asked, missing))
    place = 0
    if missing:
        _warm_up(generator, missing[0], settings)
    with Progress(total, "answers", "bench", done=total - left) as progress:
        for question in asked:
            if question.key not in store.of:
                store.add(_measure_question(generator, question, settings, place))
                progress.note(speedup=speedup([row for q in asked for row in store.of.get(q.key, ())]))
                progress.advance(len(question.turns))
            place += len(question.turns)
    return [row for question in asked for row in store.of[question.key]]


def _warm_up(generator: Generator, question: Question, settings: BenchSettings) -> None:
    ids = _encode(generator.backbone, question, question.turns[0], settings.raw)
    limit = min(settings.max_new_tokens, WARM_UP_TOKENS, generator.backbone.max_positions - len(ids))
    for _ in range(settings.warm_up if limit > 0 else 0):
        answer_plainly(generator.backbone, ids, limit)
        answer_ours(generator, ids, limit)


# -- one question ----------------------------------------------------------------------------------------------------


def _measure_question(generator: Generator, question: Question, settings: BenchSettings, place: int) -> list[Row]:
    """The rows of all its turns. `place` counts the answers before it: it decides who goes first."""
    backbone = generator.backbone
    messages: list[Message] = []
    rows: list[Row] = []
    skipped = ""
    for turn, said in enumerate(question.turns):
        about = {"question": question.id, "key": question.key, "category": question.category, "group": question.group}
        row: Row = {**about, "turn": turn + 1, "turns": len(question.turns)}
        messages += said
        try:
            ids = [] if skipped else _encode(backbone, question, messages, settings.raw)
        except UserError as error:  # the template does not take the plain answer, which nobody could know before
            skipped = str(error)
        limit = 0 if skipped else min(settings.max_new_tokens, backbone.max_positions - len(ids))
        if limit < 1:
            skipped = skipped or f"the prompt has {len(ids)} tokens; {backbone.name} holds {backbone.max_positions}"
            rows.append({**row, "skipped": skipped})
            continue
        rows.append({**row, **_measure(generator, ids, limit, settings.repeats, place + turn)})
        answer = decode_text(backbone.tokenizer, rows[-1]["plain"]["tokens"])
        messages.append({"role": "assistant", "content": answer})
    return rows


def _measure(generator: Generator, ids: list[int], limit: int, repeats: int, place: int) -> Row:
    """What both sides did with one prompt, `repeats` times each."""
    plain: list[Timed] = []
    ours: list[Timed] = []
    for repeat in range(repeats):
        for side in (0, 1) if (place + repeat) % 2 == 0 else (1, 0):
            if side == 0:
                plain.append(answer_plainly(generator.backbone, ids, limit))
            else:
                ours.append(answer_ours(generator, ids, limit))
    pairs = list(zip(plain, ours, strict=True))
    a, b = next((pair for pair in pairs if pair[0].tokens != pair[1].tokens), pairs[0])
    assert b.output is not None, "ours comes with stats"
    stats = b.output.stats
    return {
        "prompt_tokens": len(ids),
        "plain": {"tokens": a.tokens, **_times(plain)},
        "ours": {"tokens": b.tokens, **_times(ours)},
        "rounds": stats.rounds,
        "drafted": stats.drafted,
        "offered": stats.offered,
        "accepted": stats.accepted,
        "loops": repeats_ngram(a.tokens, LOOP),
        "difference": _difference(generator.backbone, ids, a.tokens, b.tokens),
    }


def _times(answers: Sequence[Timed]) -> dict[str, list[float]]:
    """By part, the seconds of each repetition."""
    return {part: [round(answer.seconds[part], 6) for answer in answers] for part in answers[0].seconds}


def answer_plainly(backbone: Backbone, ids: list[int], limit: int) -> Timed:
    """Greedy `model.generate`: what everything is compared with."""
    first: list[float] = []

    def note(*_: Any) -> None:
        first.append(_now(backbone))
        hook.remove()  # later forwards are to cost nothing more

    hook = backbone.model.register_forward_hook(note)
    start = _now(backbone)
    prompt = torch.tensor([ids], device=backbone.device)  # (1, T)
    tokens = _generate(backbone, prompt, limit)[0, len(ids) :].tolist()
    end = _now(backbone)
    return Timed(tokens, {"seconds": end - start, "prefill": first[0] - start})


def answer_ours(generator: Generator, ids: list[int], limit: int) -> Timed:
    start = _now(generator.backbone)
    output = generator.generate(ids, max_new_tokens=limit, temperature=0)
    end = _now(generator.backbone)
    parts = {part: output.stats.seconds[part] for part in ("prefill", "draft", "verify")}
    return Timed(output.tokens, {"seconds": end - start, **parts}, output)


def _generate(backbone: Backbone, prompt: torch.Tensor, limit: int, **options: Any) -> Any:
    config = backbone.model.generation_config
    pad = config.pad_token_id if config.pad_token_id is not None else min(backbone.eos_token_ids, default=0)
    mask = torch.ones_like(prompt)
    return backbone.model.generate(
        prompt, attention_mask=mask, max_new_tokens=limit, do_sample=False, pad_token_id=pad, **options
    )


def _difference(backbone: Backbone, ids: list[int], plain: list[int], ours: list[int]) -> dict[str, Any] | None:
    """Where two answers part, and by what margin the plain run chose its token there; None if they do not part.

    `margin` is between the best two scores of the plain run at that step, `gap` from its best to the token of ours, and
    `spacing` that of neighbouring numbers of the backbone's dtype at the size of the best score.
    """
    if plain == ours:
        return None
    step = next((i for i, (a, b) in enumerate(zip(plain, ours, strict=False)) if a != b), min(len(plain), len(ours)))
    found: dict[str, Any] = {"step": step, "plain": None, "ours": None, "margin": None, "gap": None, "spacing": None}
    if step < len(ours):
        found["ours"] = ours[step]
    if step < len(plain):
        prompt = torch.tensor([ids], device=backbone.device)
        again = _generate(backbone, prompt, step + 1, output_scores=True, return_dict_in_generate=True)
        scores = again.scores[step][0].float()  # (V,)
        best, second = scores.topk(2).values.tolist()
        found |= {"plain": plain[step], "margin": best - second}
        found["spacing"] = torch.finfo(backbone.dtype).eps * 2.0 ** math.floor(math.log2(abs(best) or 1.0))
        if step < len(ours):
            found["gap"] = best - float(scores[ours[step]])
    return found


def _encode(backbone: Backbone, question: Question, messages: Sequence[Message], raw: bool) -> list[int]:
    try:
        if not raw:
            return backbone.encode(messages)
        if backbone.tokenizer is None:
            raise UserError("texts need a tokenizer: Backbone(model, tokenizer)")
        text = "\n\n".join(message["content"] for message in messages)
        return list(backbone.tokenizer(text)["input_ids"])
    except UserError as error:
        raise UserError(f"question {question.id} (row {question.row}): {error}") from error


def _now(backbone: Backbone) -> float:
    """The time, behind all that was asked of a GPU."""
    if backbone.device.type == "cuda":
        torch.cuda.synchronize(backbone.device)
    return perf_counter()


# -- what the figures depend on --------------------------------------------------------------------------------------


def _setup(backbone: Backbone, drafter: Any, settings: BenchSettings) -> dict[str, Any]:
    tokenizer = backbone.tokenizer
    cuda = backbone.device.type == "cuda"
    return {
        "backbone": backbone.name,
        "weights": backbone.fingerprint(),
        "prompts": "as they stand" if settings.raw else f"chat template {chat.fingerprint(tokenizer)['template']}",
        "drafter": _name(drafter, settings.head),
        "drafter_weights": _weights_hash(drafter) if isinstance(drafter, nn.Module) else None,
        "tree": _tree(drafter, settings.tree),
        "max_new_tokens": settings.max_new_tokens,
        "temperature": 0,
        "repeats": settings.repeats,
        "dtype": str(backbone.dtype).removeprefix("torch."),
        "attention": getattr(backbone.config, "_attn_implementation", None),
        "device": torch.cuda.get_device_name(backbone.device) if cuda else str(backbone.device),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("torch", "transformers", "headstart")},
    }


def _name(drafter: Any, name: str) -> str:
    if isinstance(drafter, DraftHead):
        return f"{name} ({drafter.method})"
    return "none" if drafter is None else drafter if isinstance(drafter, str) else type(drafter).__name__


def _tree(drafter: Any, tree: str | None) -> str | None:
    """The form that is asked for, the usual one where none is."""
    if isinstance(drafter, DraftHead):
        return tree or str(DEFAULT_SHAPE)
    return (tree or str(Chain(DEFAULT_LOOKUP))) if drafter == "ngram" else None


def _weights_hash(module: nn.Module) -> str:
    """16 hex digits of all tensors, so that a head trained again is not taken for the one before."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
