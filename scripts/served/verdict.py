"""Answers of two engines side by side: what differs, where, and a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Answers = dict[str, Any]
"""`tokens` and `counts`, each with an entry a prompt; counts are `drafts` (rounds that had drafts), `drafted` (tokens)
and `accepted` (by position)."""

ENGINES = ("vLLM plain", "vLLM drafted", "headstart plain", "headstart drafted")


@dataclass
class Verdict:
    """One head in both engines."""

    name: str
    faults: list[str]
    theirs: dict[str, Any] | None
    """vLLM's counts over all prompts; None: it gave no answers."""
    ours: dict[str, Any]


def compare(name: str, plain: Answers, drafted: Answers, our_plain: Answers, ours: Answers) -> Verdict:
    """Tokens and counts of all prompts."""
    faults = []
    rows = zip(*(one["tokens"] for one in (plain, drafted, our_plain, ours)), strict=True)
    for number, row in enumerate(rows):
        faults += [f"prompt {number}: {fault}" for fault in _partings(dict(zip(ENGINES, row, strict=True)))]
    for number, (theirs, own) in enumerate(zip(drafted["counts"], ours["counts"], strict=True)):
        faults += [
            f"prompt {number}: {what}: vLLM {theirs.get(what, 'none')}, headstart {own[what]}"
            for what in own
            if theirs.get(what) != own[what]
        ]
    told = summed(ours["counts"])
    if not sum(told["accepted"]):
        faults.append("no draft was accepted at all, so that the counts say nothing: take a trained head")
    return Verdict(name, faults, summed(drafted["counts"]), told)


def _partings(answers: dict[str, list[int]]) -> list[str]:
    """Who says something else than the first of them, and from which token on."""
    (first, right), *others = answers.items()
    found = []
    for name, tokens in others:
        if tokens != right:
            pairs = enumerate(zip(tokens, right, strict=False))
            place = next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(right)))
            found.append(f"{name} is not {first} from token {place} on: {tokens[place:][:4]}, {right[place:][:4]}")
    return found


def summed(counts: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts of several prompts as one."""
    columns = {what: [one[what] for one in counts] for what in counts[0]}
    return {
        what: [sum(place) for place in zip(*column, strict=True)] if isinstance(column[0], list) else sum(column)
        for what, column in columns.items()
    }


def table(verdicts: list[Verdict]) -> str:
    """All of them in Markdown, and below it what differs."""
    lines = [
        "| head | engine | rounds | drafted | accepted by position | tokens a round | |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in verdicts:
        said = "**DIFFERS**" if one.faults else "the same"
        for engine, counts in (("vLLM", one.theirs), ("headstart", one.ours)):
            lines.append(f"| {one.name} | {engine} | {' | '.join(_cells(counts))} | {said} |")
    for one in verdicts:
        lines += ["", f"{one.name}:", "", *(f"- {fault}" for fault in one.faults)] if one.faults else []
    return "\n".join(lines)


def _cells(counts: dict[str, Any] | None) -> list[str]:
    if not counts:
        return ["-"] * 4
    length = 1 + sum(counts["accepted"]) / max(counts["drafts"], 1)
    accepted = " ".join(f"{count:,}" for count in counts["accepted"])
    return [f"{counts['drafts']:,}", f"{counts['drafted']:,}", accepted, f"{length:.3f}"]
