"""What each synthetic conversation is to be: about what, in which language, how long, beginning with which words.

A plan follows from the settings and the number of the conversation alone, so that a run can be interrupted anywhere.
Every topic has its turn before one comes again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .topics import ABOUT, CODE, LANGUAGES, NEXT, PERSONAS, PLAIN, QUESTIONS, SECTIONS, entries

if TYPE_CHECKING:
    from .synthesize import SynthesizeSettings


@dataclass(frozen=True)
class Plan:
    """What one conversation is to be."""

    kind: str
    """topic, code, language, long (about a long text), plain (first words alone), or free (nothing is given)."""
    topic: str = ""
    language: str = "en"
    system: str = ""
    """System prompt that stays in the conversation; empty for none."""
    openings: tuple[str, ...] = ("",)
    """First words of each question of the user; empty for none. As many as there may be questions."""
    sections: tuple[str, ...] = ()
    """What the sections of a long text are about."""
    sampled: bool = False
    """Whether answers are drawn, not greedy."""


def plan_of(number: int, settings: SynthesizeSettings, topics: Sequence[str]) -> Plan:
    """The plan of a conversation."""
    chance = random.Random(f"{settings.seed} {number}")
    kind = _kind(chance, settings, bool(topics))
    topic = _topic(number, settings.seed, topics) if kind in ("topic", "long") else ""
    language = chance.choice(settings.languages) if kind == "language" else "en"
    system = ""
    if topic and chance.random() < settings.system_share:
        system = chance.choice(entries(PERSONAS)).format(topic=topic)
    first = {
        "topic": ABOUT, "long": QUESTIONS, "code": CODE, "plain": PLAIN, "free": "",
        "language": LANGUAGES.get(language, ""),
    }[kind]  # fmt: skip
    turns = 1
    while turns < settings.max_turns and chance.random() < settings.follow_up_share:
        turns += 1
    later = QUESTIONS if kind == "long" else LANGUAGES.get(language, NEXT) if kind != "free" else ""
    openings = [_opening(chance.choice(entries(first)), topic)]
    openings += [_opening(chance.choice(entries(later)), topic) for _ in range(turns - 1)]
    sections = chance.sample(entries(SECTIONS), len(entries(SECTIONS))) if kind == "long" else []
    return Plan(
        kind,
        topic,
        language,
        system,
        tuple(openings),
        tuple(_opening(one, topic) for one in sections),
        _is_sampled(number, settings.sampled_share),
    )


def _kind(chance: random.Random, settings: SynthesizeSettings, topics: bool) -> str:
    drawn = chance.random()
    shares = {"long": settings.long_share, "code": settings.code_share, "language": settings.language_share}
    for kind, share in shares.items():
        if drawn < share and (topics or kind != "long") and (settings.languages or kind != "language"):
            return kind
        drawn -= share
    if chance.random() < settings.free_share:
        return "free"
    return "topic" if topics and chance.random() < 0.75 else "plain"


def _topic(number: int, seed: int, topics: Sequence[str]) -> str:
    lap, place = divmod(number, len(topics))
    return random.Random(f"{seed} topics {lap}").sample(list(topics), len(topics))[place]


def _opening(text: str, topic: str) -> str:
    return text.replace("{topic}", topic)


def _is_sampled(number: int, share: float) -> bool:
    """Spread `share` of the numbers evenly."""
    return int((number + 1) * share) > int(number * share)
