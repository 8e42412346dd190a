"""Conversations with no data set: the instruct backbone writes whole ones.

The backbone is given its chat template's opening of a user turn, continues it to the end of the turn, then answers it;
some conversations get a second question. What is cut, too short, looped or close to an earlier one is dropped and
counted. Work goes in fixed groups (`groups.py`), so that an interrupted run goes on where it was.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import write_jsonl
from ..heads import chat
from ..heads.backbone import Backbone
from ..inference.plain import decode_group
from ..inference.stats import repeats_last, repeats_ngram
from ..progress import Progress
from .groups import finished, run_groups

Row = dict[str, Any]

_MARK = "\u2402HEADSTART\u2403"  # stands in a rendered template where the user's words go
_LOOP = 10  # an n-gram of this many tokens that occurs twice is a loop


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
    max_user_tokens: int = 64
    """A user turn that has not ended after this many tokens is dropped."""
    max_answer_tokens: int = 256
    """Answers are cut here; a cut answer is kept and marked."""
    user_temperature: float = 1.0
    """Temperature of the user turns: lower is plainer and repeats itself more."""
    user_top_p: float = 0.95
    """Nucleus of the user turns."""
    answer_temperature: float = 0.7
    """Temperature of the sampled answers."""
    sampled_share: float = 0.5
    """Share of conversations whose answers are sampled; the others are answered greedily."""
    follow_up_share: float = 0.25
    """Share of conversations in which a second question is asked."""
    group_size: int = 128
    """Conversations in a group: they share forwards, and a group interrupted is done again as a whole."""
    dtype: str = "bfloat16"
    """Precision of the backbone while it writes."""
    restart: bool = False
    """Throw away an unfinished run, and replace the file if it exists."""

    def __post_init__(self) -> None:
        for name in ("count", "max_user_tokens", "max_answer_tokens", "group_size"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it has to be at least 1")
        for name in ("user_temperature", "answer_temperature"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise UserError(f"{name} is {getattr(self, name)}; it has to be 0 (greedy) or above")
        if not 0 < self.user_top_p <= 1:
            raise UserError(f"user_top_p is {self.user_top_p}; it has to be above 0 and at most 1")
        for name in ("sampled_share", "follow_up_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name} is {getattr(self, name)}; it has to be from 0 to 1")


def synthesize(backbone: Backbone, settings: SynthesizeSettings) -> Counter[str]:
    """Write `settings.count` conversations to `settings.out`; returns counts of what was kept and dropped.

    Raises:
        UserError: the backbone has no chat template, the template has no place for a user's words, or almost nothing
            it writes can be kept.
    """
    out, openings = Path(settings.out), UserOpening(backbone)
    fixed = {name: value for name, value in asdict(settings).items() if name not in ("out", "restart")}
    fixed |= {"weights": backbone.fingerprint(), **chat.fingerprint(backbone.tokenizer)}
    if finished(out, fixed):
        return Counter(kept=settings.count, already_there=1)
    numbers = (range(start, start + settings.group_size) for start in count(0, settings.group_size))
    counts: Counter[str] = Counter()
    kept: list[Row] = []
    seen = NearDuplicates()

    def work(_: int, group: Sequence[int]) -> list[Row]:
        return _write_group(backbone, openings, settings, group)

    with (
        run_groups(out, fixed, numbers, work, restart=settings.restart) as results,
        Progress(settings.count, "conversations", "synthesize") as progress,
    ):
        for rows in results:
            for row in rows:
                if len(kept) == settings.count:
                    break
                reason = row["dropped"] or ("near-duplicate" if seen.has_or_adds(row["messages"][0]["content"]) else "")
                counts[reason or "kept"] += 1
                if not reason:
                    kept.append({name: value for name, value in row.items() if name != "dropped"})
            progress.note(dropped=sum(counts.values()) - counts["kept"])
            progress.advance(len(kept) - progress.done)
            if len(kept) == settings.count:
                break
            _check_yield(counts, settings.group_size)
        write_jsonl(out, kept)
    return counts


class UserOpening:
    """The text with which the template opens a user turn after given messages, and how it closes one."""

    def __init__(self, backbone: Backbone) -> None:
        if backbone.tokenizer is None:
            raise UserError("synthesize needs a tokenizer with a chat template")
        self.tokenizer = backbone.tokenizer
        after = self._around([])[1]
        ends = self.tokenizer(after, add_special_tokens=False)["input_ids"][:1]
        self.end_tokens = backbone.eos_token_ids | frozenset(ends)
        self.special = sorted(filter(None, self.tokenizer.all_special_tokens), key=len, reverse=True)

    def ids(self, messages: Sequence[chat.Message]) -> list[int]:
        """Token ids up to where the user's next words go."""
        return list(self.tokenizer(self._around(messages)[0], add_special_tokens=False)["input_ids"])

    def words(self, tokens: Sequence[int]) -> str:
        """What the user said, without the end of the turn."""
        body = tokens[:-1] if tokens and tokens[-1] in self.end_tokens else tokens
        return str(self.tokenizer.decode(body)).strip()

    def _around(self, messages: Sequence[chat.Message]) -> tuple[str, str]:
        text = chat.render(self.tokenizer, [*messages, {"role": "user", "content": _MARK}])
        before, mark, after = text.partition(_MARK)
        if not mark or not before or _MARK in after:
            raise UserError("the chat template does not write the user's words once and as they are: not usable here")
        return before, after


class NearDuplicates:
    """Texts seen so far, by their word trigrams: a text is a near-duplicate if Jaccard similarity reaches 0.7."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.owners: dict[str, list[int]] = {}

    def has_or_adds(self, text: str) -> bool:
        """Whether a near-duplicate of `text` was seen; if not, `text` counts as seen from now on."""
        grams = _trigrams(text)
        shared = Counter(owner for gram in grams for owner in self.owners.get(gram, ()))
        for owner, common in shared.items():
            if common / (len(grams) + self.sizes[owner] - common) >= 0.7:
                return True
        for gram in grams:
            self.owners.setdefault(gram, []).append(len(self.sizes))
        self.sizes.append(len(grams))
        return False


def _trigrams(text: str) -> set[str]:
    words = re.findall(r"\w+", text.lower())
    return {" ".join(words[i : i + 3]) for i in range(max(1, len(words) - 2))}


def _write_group(
    backbone: Backbone, opening: UserOpening, settings: SynthesizeSettings, numbers: Sequence[int]
) -> list[Row]:
    """The conversations with these numbers, the dropped ones with their reason."""
    rows: list[Row] = [
        {
            "id": f"synthetic-{number:06d}",
            "messages": [],
            "answers": _way(number, settings.sampled_share),
            "dropped": "no room in the context",  # until it is answered
        }
        for number in numbers
    ]
    _exchange(backbone, opening, settings, rows, 0)
    second = [
        row
        for row in rows
        if not row["dropped"] and _way(int(row["id"][10:]) // 2, settings.follow_up_share) == "sampled"
    ]
    _exchange(backbone, opening, settings, [row for row in second if row["finish"] == "stop"], 1)
    return rows


def _way(number: int, share: float) -> str:
    """Spread `share` of the numbers evenly: "sampled" for them, "greedy" for the others."""
    return "sampled" if int((number + 1) * share) > int(number * share) else "greedy"


def _exchange(
    backbone: Backbone, opening: UserOpening, settings: SynthesizeSettings, rows: list[Row], turn: int
) -> None:
    """Let the user say something in each row and the assistant answer; a bad first exchange drops the row, a bad later
    one is left out."""
    live = [
        row for row in rows if len(opening.ids(row["messages"])) < backbone.max_positions - settings.max_user_tokens
    ]
    said = decode_group(
        backbone,
        [opening.ids(row["messages"]) for row in live],
        max_new_tokens=settings.max_user_tokens,
        temperature=settings.user_temperature,
        top_p=settings.user_top_p,
        seed=settings.seed * 4 + 2 * turn,
        samples=[int(row["id"][10:]) for row in live],
        eos=opening.end_tokens,
    )
    asked = []
    for row, tokens in zip(live, said, strict=True):
        words = opening.words(tokens)
        reason = _user_fault(words, tokens, opening)
        if not reason:
            asked.append((row, words))
        elif turn == 0:
            row["dropped"], row["messages"] = reason, [{"role": "user", "content": words}]
    _answer(backbone, settings, asked, turn)


def _answer(backbone: Backbone, settings: SynthesizeSettings, asked: list[tuple[Row, str]], turn: int) -> None:
    prompts = [backbone.encode([*row["messages"], {"role": "user", "content": words}]) for row, words in asked]
    limit = settings.max_answer_tokens
    fitting = [place for place, prompt in enumerate(prompts) if len(prompt) + limit <= backbone.max_positions]
    rows = [asked[place][0] for place in fitting]
    answers = decode_group(
        backbone,
        [prompts[place] for place in fitting],
        max_new_tokens=limit,
        temperature=[settings.answer_temperature if row["answers"] == "sampled" else 0.0 for row in rows],
        seed=settings.seed * 4 + 2 * turn + 1,
        samples=[int(row["id"][10:]) for row in rows],
        give_up=lambda _, tokens: repeats_last(tokens, _LOOP),  # it would be dropped for that anyway
    )
    for place, tokens in zip(fitting, answers, strict=True):
        row, words = asked[place]
        stopped = tokens[-1] in backbone.eos_token_ids
        text = str(backbone.tokenizer.decode(tokens[:-1] if stopped else tokens)).strip()
        reason = _answer_fault(text, tokens)
        if turn == 0 or not reason:
            row["messages"] += [{"role": "user", "content": words}, {"role": "assistant", "content": text}]
            row["finish"] = "stop" if stopped else "length"
        if turn == 0:
            row["dropped"] = reason


def _user_fault(words: str, tokens: Sequence[int], opening: UserOpening) -> str:
    """Why a user turn cannot be kept; empty if it can."""
    if not tokens or tokens[-1] not in opening.end_tokens:
        return "user turn cut"
    if len(words.split()) < 3:
        return "user turn too short"
    if _unclean(words) or any(special in words for special in opening.special):
        return "user turn not clean text"
    if repeats_ngram(tokens, _LOOP):
        return "user turn loops"
    return ""


def _answer_fault(text: str, tokens: Sequence[int]) -> str:
    if len(text.split()) < 2:
        return "answer too short"
    if _unclean(text):
        return "answer not clean text"
    return "answer loops" if repeats_ngram(tokens, _LOOP) else ""


def _unclean(text: str) -> bool:
    """Half characters or control characters."""
    return any(c == "\ufffd" or (ord(c) < 32 and c not in "\n\t\r") for c in text)


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
