"""Conversations with no data set: the instruct backbone writes whole ones.

What each is to be is planned (`plans.py`), both sides are written by the backbone (`writing.py`), what is no good is
dropped and counted (`quality.py`), and a card tells what came of it (`card.py`). Work goes in fixed groups
(`groups.py`), so that an interrupted run goes on where it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import text_hash, write_jsonl, write_whole
from ..heads import chat
from ..heads.backbone import Backbone
from ..progress import Progress
from .card import card
from .groups import finished, run_groups, tidied
from .plans import plan_of
from .quality import NearDuplicates
from .topics import LANGUAGES, read_topics
from .writing import Row, Writer

FORMAT = 4  # counts up when the same settings would give another file
FIELDS = ("messages", "kind", "topic", "language", "answers", "finish", "tokens")


@dataclass
class SynthesizeSettings:
    """Let the backbone write conversations, from nothing."""

    backbone: str
    """Built-in name, folder or Hub id of an instruct model with a chat template."""
    out: str
    """The file to write: one conversation a line, gzipped if it ends in .gz."""
    count: int = 1000
    """Conversations to keep; the backbone writes until there are that many."""
    seed: int = 0
    """Other seeds give other conversations."""
    topics: str = "own"
    """What conversations are about: own (a list of about 150 that comes with headstart), a file with a topic a line, or
    none."""
    free_share: float = 0.1
    """Share of the other conversations in which the backbone begins with nothing given, no topic and no first words."""
    code_share: float = 0.15
    """Share of conversations that ask for code."""
    long_share: float = 0.05
    """Share of conversations about a long text, which the backbone writes first."""
    long_tokens: int = 1500
    """Tokens of such a text, about; up to 3,000."""
    language_share: float = 0.0
    """Share of conversations in other languages, those of `languages`; what turns out to be in another is dropped."""
    languages: list[str] = field(default_factory=list)
    """Codes of these languages: de, fr, es, pt, it, nl, ru, zh, ja, ko, hi, ar."""
    system_share: float = 0.25
    """Share of conversations on a topic that have a system prompt."""
    max_turns: int = 4
    """Questions in a conversation at most."""
    max_user_tokens: int = 80
    """A user turn that has not ended after this many tokens is dropped; where code is asked for, after three times as
    many."""
    max_answer_tokens: int = 256
    """Answers are cut here; a cut answer is kept and marked."""
    user_temperature: float = 0.8
    """Temperature of the user turns: lower is plainer and repeats itself more."""
    user_top_p: float = 0.95
    """Nucleus of the user turns."""
    answer_temperature: float = 0.7
    """Temperature of the sampled answers."""
    sampled_share: float = 0.5
    """Share of conversations whose answers are sampled; the others are answered greedily."""
    follow_up_share: float = 0.35
    """Share of answers behind which another question is asked."""
    group_size: int = 128
    """Conversations in a group: they share forwards, and a group interrupted is done again as a whole."""
    dtype: str = "bfloat16"
    """Precision of the backbone while it writes."""
    restart: bool = False
    """Throw away an unfinished run, and replace the file if it exists."""

    def __post_init__(self) -> None:
        for name in ("count", "max_turns", "long_tokens", "max_user_tokens", "max_answer_tokens", "group_size"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it has to be at least 1")
        for name in ("user_temperature", "answer_temperature"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise UserError(f"{name} is {getattr(self, name)}; it has to be 0 (greedy) or above")
        if not 0 < self.user_top_p <= 1:
            raise UserError(f"user_top_p is {self.user_top_p}; it has to be above 0 and at most 1")
        kinds = ("code_share", "long_share", "language_share")
        for name in ("sampled_share", "follow_up_share", "free_share", "system_share", *kinds):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name} is {getattr(self, name)}; it has to be from 0 to 1")
        if self.long_tokens > 3000:
            raise UserError(f"long_tokens is {self.long_tokens}; it has to be at most 3000")
        if sum(getattr(self, name) for name in kinds) > 1 + 1e-9:
            raise UserError(f"{', '.join(kinds)} are more than 1 together")
        self._check_languages()

    def _check_languages(self) -> None:
        for code in self.languages:
            if code not in LANGUAGES:
                raise UserError(f"languages has {code!r}; known are {', '.join(LANGUAGES)}")
        if self.language_share and not self.languages:
            raise UserError(f"language_share is {self.language_share}: name the languages, such as --languages de fr")


def synthesize(backbone: Backbone, settings: SynthesizeSettings) -> Counter[str]:
    """Write `settings.count` conversations to `settings.out` and a card beside it (`<out>.card.md`); returns counts of
    what was kept and dropped.

    Raises:
        UserError: the backbone has no chat template, the template has no place for a user's words, or almost nothing
            it writes can be kept.
    """
    out, topics = Path(settings.out), read_topics(settings.topics)
    fixed = _fixed(backbone, settings, topics)
    numbers = (range(start, start + settings.group_size) for start in count(0, settings.group_size))
    with Progress(settings.count, "conversations", "synthesize") as progress:
        writer = Writer(backbone, settings, progress.refresh)
        if finished(out, fixed) and not settings.restart:
            tidied(out)
            return Counter(kept=settings.count, already_there=1)

        def work(_: int, group: Sequence[int]) -> list[Row]:
            return writer.group({number: plan_of(number, settings, topics) for number in group})

        with run_groups(out, fixed, numbers, work, restart=settings.restart) as results:
            kept, counts = _kept(results, settings, progress)
            told = asdict(settings) | {name: fixed[name] for name in ("weights", "tokenizer", "template")}
            write_whole(f"{out}.card.md", card(out.name, kept, counts, told))
            write_jsonl(out, map(_final, kept))
    return counts


def _final(row: Row) -> Row:
    return {"id": f"synthetic-{row['number']:06d}", **{name: row[name] for name in FIELDS}}


def _fixed(backbone: Backbone, settings: SynthesizeSettings, topics: Sequence[str]) -> dict[str, Any]:
    """All that determines the file."""
    options = {name: value for name, value in asdict(settings).items() if name not in ("out", "restart", "topics")}
    tokenizer = chat.fingerprint(backbone.tokenizer) if backbone.tokenizer is not None else {}
    return {
        "format": FORMAT,
        **options,
        "topics": text_hash("\n".join(topics))[:12],
        "weights": backbone.fingerprint(),
        **tokenizer,
    }


def _kept(
    results: Iterable[list[Row]], settings: SynthesizeSettings, progress: Progress
) -> tuple[list[Row], Counter[str]]:
    """The first conversations that are good and new, and counts of all up to the last of them."""
    kept, counts, seen, answers = list[Row](), Counter[str](), NearDuplicates(), set[str]()
    for rows in results:
        for row in rows:
            if len(kept) == settings.count:
                break
            reason = row["dropped"] or _said_before(row, seen, answers)
            counts[reason or "kept"] += 1
            if not reason:
                kept.append(row)
        progress.note(dropped=sum(counts.values()) - counts["kept"])
        progress.advance(len(kept) - progress.done)
        if len(kept) == settings.count:
            break
        _check_yield(counts, settings.group_size)
    return kept, counts


def _said_before(row: Row, seen: NearDuplicates, answers: set[str]) -> str:
    answer = " ".join(next(one["content"] for one in row["messages"] if one["role"] == "assistant").lower().split())
    if answer in answers:
        return "answer of an earlier one"
    if seen.has_or_adds(row["question"]):
        return "near-duplicate"
    answers.add(answer)
    return ""


def _check_yield(counts: Counter[str], group_size: int) -> None:
    written = sum(counts.values())
    if written >= 4 * group_size and counts["kept"] < written // 100:
        worst = ", ".join(f"{n} {reason}" for reason, n in counts.most_common(4) if reason != "kept")
        raise UserError(
            f"of {written} conversations only {counts['kept']} can be kept ({worst}): is it an instruct model?"
        )


def summary(counts: Counter[str]) -> Iterator[str]:
    """One line for what was kept, one for each reason of dropping."""
    yield f"kept {counts['kept']} conversations" + (" (already there)" if counts["already_there"] else "")
    for reason, number in counts.most_common():
        if reason not in ("kept", "already_there"):
            yield f"dropped {number}: {reason}"
