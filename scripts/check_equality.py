"""The proof that a backbone answers the same with a drafter as without: greedy, fp32, against `model.generate`.

    python scripts/check_equality.py --backbone smollm2-135m --drafter runs/eagle3 --suite spec_bench.jsonl \
        --every 12 --new-tokens 128 --out equality.jsonl

Every chosen question is asked turn by turn, each turn behind the backbone's own answers to those before. A difference
counts as a tie only if float64 logits at that prefix put both tokens less than 1e-4 below the best; ties are listed
with their step and gap. Finished questions stay in `--out`, and a second call goes on behind them. Exit code 1: a real
mismatch.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from headstart import Backbone, Generator, load_backbone, load_head
from headstart.errors import UserError
from headstart.files import read_jsonl, write_jsonl
from headstart.progress import Progress

TIE = 1e-4


class Check:
    """Compares a generator's greedy tokens with those of its backbone's own generate."""

    def __init__(self, backbone: Backbone, generator: Generator, new_tokens: int) -> None:
        self.backbone, self.generator, self.new_tokens = backbone, generator, new_tokens
        self.double: Any = None

    def question(self, turns: Iterable[str]) -> list[dict[str, Any]]:
        """One result a turn: tokens, rounds, and where and how the two differ, if they do."""
        chat: list[dict[str, str]] = []
        results = []
        for turn in turns:
            chat.append({"role": "user", "content": turn})
            ids = self.backbone.encode(chat)
            own = self._own(ids)
            output = self.generator.generate(ids, do_sample=False, max_new_tokens=self.new_tokens)
            found = {"tokens": len(own), "rounds": output.stats.rounds, "accepted": sum(output.stats.accepted)}
            results.append({**found, **self._difference(ids, own, output.tokens)})
            chat.append({"role": "assistant", "content": self.backbone.tokenizer.decode(own, skip_special_tokens=True)})
        return results

    def _own(self, ids: list[int]) -> list[int]:
        prompt = torch.tensor([ids], device=self.backbone.device)
        options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": self.new_tokens}
        found: list[int] = self.backbone.model.generate(prompt, **options)[0, len(ids) :].tolist()
        return found

    def _difference(self, ids: list[int], own: list[int], ours: list[int]) -> dict[str, Any]:
        """Nothing, or the first step at which two answers differ, with the float64 gap there."""
        if own == ours:
            return {}
        step = next((k for k, (a, b) in enumerate(zip(own, ours, strict=False)) if a != b), min(len(own), len(ours)))
        if step in (len(own), len(ours)):
            return {"kind": "mismatch", "step": step, "lengths": [len(own), len(ours)]}
        gap = self._gap(ids + own[:step], (own[step], ours[step]))
        kind = "tie" if gap < TIE else "mismatch"
        return {"kind": kind, "step": step, "gap": gap, "instead": [own[step], ours[step]]}

    @torch.no_grad()
    def _gap(self, prefix: list[int], tokens: tuple[int, int]) -> float:
        """How far the lower of the two tokens lies below the best one, in float64 logits."""
        if self.double is None:
            self.double = copy.deepcopy(self.backbone.model).double()
        logits = self.double(torch.tensor([prefix], device=self.backbone.device)).logits[0, -1]  # (V,)
        return float(logits.max() - logits[list(tokens)].min())


def chosen(suite: str | Path, every: int, limit: int | None) -> list[tuple[str, list[str]]]:
    """Name and turns of every n-th question of a file.

    Raises:
        UserError: a row has no turns.
    """
    questions = []
    for number, row in enumerate(read_jsonl(suite)):
        if number % every == 0:
            turns = row.get("turns") if isinstance(row, dict) else None
            if not turns or not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
                raise UserError(f"{suite}, question {number + 1}: expected a list of texts under 'turns'")
            questions.append((str(row.get("question_id", number + 1)), turns))
    return questions[:limit]


def run(check: Check, questions: list[tuple[str, list[str]]], out: Path | None, settings: dict[str, Any]) -> list[Any]:
    """The result of every question; those that `out` holds are taken from there.

    Raises:
        UserError: `out` was made with other settings.
    """
    rows = list(read_jsonl(out)) if out is not None and out.exists() else [settings]
    if rows[0] != settings:
        other = {key: value for key, value in rows[0].items() if settings.get(key) != value}
        raise UserError(f"{out}: was made with {other}; give another --out, or remove it")
    done = {row["question"] for row in rows[1:]}
    with Progress(len(questions), "questions", "equality", done=len(done)) as progress:
        for name, turns in questions:
            if name not in done:
                rows.append({"question": name, "turns": check.question(turns)})
                if out is not None:
                    write_jsonl(out, rows)
                progress.advance()
    return rows[1:]


def verdict(rows: list[Any]) -> tuple[str, int]:
    """What was found, as text, and the exit code."""
    turns = [(row["question"], number + 1, turn) for row in rows for number, turn in enumerate(row["turns"])]
    lines = list(_listed(turns))
    kinds = [turn.get("kind") for _, _, turn in turns]
    rounds, tokens = sum(turn["rounds"] for _, _, turn in turns), sum(turn["tokens"] for _, _, turn in turns)
    length = 1 + sum(turn["accepted"] for _, _, turn in turns) / max(rounds, 1)
    lines.append(
        f"{len(rows)} questions, {len(turns)} answers, {tokens} tokens: {kinds.count(None)} equal, "
        f"{kinds.count('tie')} ties, {kinds.count('mismatch')} mismatches; {length:.2f} tokens a round"
    )
    return "\n".join(lines), 1 if "mismatch" in kinds else 0


def _listed(turns: list[tuple[str, int, dict[str, Any]]]) -> Iterator[str]:
    for question, number, turn in turns:
        if "kind" in turn:
            where = f"{turn['kind']}: question {question}, turn {number}, step {turn['step']}"
            yield where + (f", gap {turn['gap']:.2e}" if "gap" in turn else f", lengths {turn['lengths']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backbone", default="smollm2-135m", help="built-in name, folder or Hub id")
    parser.add_argument("--drafter", default="ngram", help="folder of a head, ngram, or none")
    parser.add_argument("--tree", help="chain:4, dynamic:4x4x8, ...")
    parser.add_argument("--suite", required=True, help="questions: JSON lines with 'turns'")
    parser.add_argument("--every", type=int, default=12, help="take every n-th question")
    parser.add_argument("--limit", type=int, help="stop after so many questions")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens of an answer, at most")
    parser.add_argument("--out", type=Path, help="JSON lines of finished questions, to go on from")
    given = parser.parse_args()
    backbone = load_backbone(given.backbone, dtype="float32")
    named = {"ngram": "ngram", "none": None}
    drafter = named[given.drafter] if given.drafter in named else load_head(given.drafter, backbone)
    generator = Generator(backbone, drafter, tree=given.tree)
    settings = {name: getattr(given, name) for name in ("backbone", "drafter", "tree", "new_tokens")}
    settings["weights"] = backbone.fingerprint()
    questions = chosen(given.suite, given.every, given.limit)
    text, code = verdict(run(Check(backbone, generator, given.new_tokens), questions, given.out, settings))
    print(text)
    return code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
