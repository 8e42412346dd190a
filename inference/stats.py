"""What a generation did: tokens, rounds, acceptance by depth, seconds; and the formulas that go with them.

A round is one verification forward. It emits the accepted drafts and one more token, the backbone's own choice behind
them. The token that prefill gives belongs to no round. Hence, always,

    tokens = outputs + rounds + sum(accepted)

for an end of sequence, too: the walk stops where the backbone chooses it, and what was drafted there does not count as
accepted, even if it was the same token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

PARTS = ("prefill", "draft", "verify", "rest")


@dataclass
class Stats:
    """Counts of one output, or of several merged."""

    outputs: int = 1
    """How many outputs were counted."""
    prompt_tokens: int = 0
    """Tokens of the prompts."""
    tokens: int = 0
    """Tokens emitted, an end of sequence included."""
    rounds: int = 0
    """Verification forwards after prefill."""
    drafted: int = 0
    """Drafted nodes that were verified, in all branches."""
    offered: list[int] = field(default_factory=list)
    """By depth, from 0: rounds whose tree had a draft there."""
    accepted: list[int] = field(default_factory=list)
    """By depth, from 0: rounds in which a draft there was accepted."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    """Wall clock by part: prefill (first token included), draft (the drafter's own work), verify (forward, logits,
    walk), rest."""
    lossless: bool = True
    """Whether the tokens have the law of the backbone alone; typical acceptance does not keep it."""

    def count_round(self, depth: int, drafted: int, accepted: int) -> None:
        """Add a round: its tree was `depth` drafts deep and had `drafted` of them; `accepted` lay on the walk."""
        self.rounds += 1
        self.drafted += drafted
        self.tokens += accepted + 1
        for counts, reached in ((self.offered, depth), (self.accepted, accepted)):
            counts.extend([0] * (depth - len(counts)))
            for d in range(reached):
                counts[d] += 1

    @property
    def acceptance_length(self) -> float:
        """Tokens a round, the backbone's own one included: 1.0 without drafts, 0.0 if there was no round."""
        return 1 + sum(self.accepted) / self.rounds if self.rounds else 0.0

    @property
    def acceptance(self) -> list[float]:
        """By depth: accepted / offered, over all rounds that offered a draft there, reached by the walk or not."""
        return [a / o if o else 0.0 for a, o in zip(self.accepted, self.offered, strict=True)]

    @property
    def conditional_acceptance(self) -> list[float]:
        """By depth: accepted there / accepted one above (rounds, for depth 0).

        `expected_tokens` of it is `acceptance_length`.
        """
        above = [self.rounds, *self.accepted]
        return [a / b if b else 0.0 for a, b in zip(self.accepted, above, strict=False)]

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        """Tokens emitted a second, prefill included."""
        return self.tokens / self.total_seconds if self.total_seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The counts and what follows from them, for JSON."""
        derived = ("acceptance_length", "acceptance", "total_seconds", "tokens_per_second")
        return {**vars(self), **{name: getattr(self, name) for name in derived}}

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens, {self.rounds} rounds, {self.acceptance_length:.2f} tokens a round, "
            f"{self.total_seconds:.2f} s{'' if self.lossless else ', not lossless'}"
        )


def merge(parts: Iterable[Stats]) -> Stats:
    """The sums of several stats, so that every rate of the result weighs rounds and tokens alike (a micro average)."""
    total = Stats(outputs=0)
    for part in parts:
        for name in ("outputs", "prompt_tokens", "tokens", "rounds", "drafted"):
            setattr(total, name, getattr(total, name) + getattr(part, name))
        total.lossless &= part.lossless
        total.offered = _added(total.offered, part.offered)
        total.accepted = _added(total.accepted, part.accepted)
        for name, seconds in part.seconds.items():
            total.seconds[name] = total.seconds.get(name, 0.0) + seconds
    return total


class Watch:
    """Adds the time between two laps to a part of `seconds`."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds
        self.mark = perf_counter()
        self.last = 0.0
        """Seconds of the last lap."""

    def lap(self, part: str | None) -> None:
        """The time since the last lap went into this part; None: it belongs to somebody else."""
        now = perf_counter()
        self.last = now - self.mark
        if part is not None:
            self.seconds[part] += self.last
        self.mark = now


def expected_tokens(acceptance: Sequence[float]) -> float:
    """Tokens a round of a chain whose depth d is accepted with probability `acceptance[d]` given all before it.

    1 + sum over k of the product of the first k: the run ends at the first rejection, and the backbone adds a token.
    """
    total, survival = 1.0, 1.0
    for a in acceptance:
        survival *= a
        total += survival
    return total


def expected_tokens_iid(acceptance: float, depth: int) -> float:
    """`expected_tokens` for one acceptance at every depth: (1 - a^(g + 1)) / (1 - a) (Leviathan et al. 2023, eq. 1)."""
    if acceptance == 1.0:
        return depth + 1.0
    return (1 - acceptance ** (depth + 1)) / (1 - acceptance)


def expected_speedup(
    tokens: float, depth: int, draft_cost: float, verify_cost: float = 1.0, overhead: float = 0.0
) -> float:
    """Speed-up over plain decoding of rounds that emit `tokens` on average.

    All costs are in units of one plain decoding step: a draft step, the verification forward, the rest of a round.
    """
    return tokens / (depth * draft_cost + verify_cost + overhead)


def repeats_ngram(tokens: Sequence[int], n: int = 10) -> bool:
    """Whether some run of n tokens occurs twice (overlaps included): a loop, which flatters every drafter."""
    seen = set()
    for end in range(n, len(tokens) + 1):
        gram = tuple(tokens[end - n : end])
        if gram in seen:
            return True
        seen.add(gram)
    return False


def repeats_last(tokens: Sequence[int], n: int = 10) -> bool:
    """Whether the last run of n tokens occurred before: the moment at which `repeats_ngram` becomes true."""
    last = list(tokens[-n:])
    starts = (start for start in range(len(tokens) - n) if tokens[start] == last[0])
    return len(last) == n and any(list(tokens[start : start + n]) == last for start in starts)


def _added(a: list[int], b: list[int]) -> list[int]:
    longer, shorter = (a, b) if len(a) >= len(b) else (b, a)
    return [x + y for x, y in zip(longer, shorter, strict=False)] + longer[len(shorter) :]
