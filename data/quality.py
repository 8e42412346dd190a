"""What is not kept of synthetic conversations: turns that are cut, short, broken, looped, refused, in another language,
or said before."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from ..inference.stats import repeats_ngram
from .language import language_of

LOOP = 10  # an n-gram of this many tokens that occurs twice is a loop
ALIKE = 0.7  # Jaccard similarity of word trigrams from which on two texts are the same
OPEN = ("code", "other")  # of these no language can be told
BLANKLESS = ("zh", "ja")  # written without blanks: their words cannot be counted
REFUSAL = re.compile(
    r"(?:i['’]m sorry,? (?:but|i|for)\b|i apologi[sz]e,? but|sorry, (?:but )?i|"
    r"i (?:can(?:no|')t|am (?:un|not )able to|won't) "
    r"(?:assist|help|provide|answer|do|fulfil|discuss|generate|write|create)|as an ai\b|es tut mir leid|je suis désolé|"
    r"lo siento|sinto muito|mi dispiace)",
    re.IGNORECASE,
)
ASSISTANT = re.compile(
    r"(?:sure[,!]|certainly|here (?:is|are)\b|of course[,!]|as an ai\b|i'm sorry|how can i (?:help|assist))", re.I
)


def user_fault(words: str, tokens: Sequence[int], ends: frozenset[int], special: Sequence[str], language: str) -> str:
    """Why a user turn cannot be kept; empty if it can.

    Args:
        words: the turn as text.
        tokens: what was written of it, its end included.
        ends: tokens that end a turn.
        special: texts of special tokens.
        language: what it should be in.
    """
    if not tokens or tokens[-1] not in ends:
        return "user turn cut"
    if _is_short(words, 3):
        return "user turn too short"
    if unclean(words, special):
        return "user turn not clean text"
    if repeats_ngram(tokens, LOOP):
        return "user turn loops"
    if ASSISTANT.match(words):
        return "user turn speaks as the assistant"
    return "user turn in another language" if _is_foreign(words, language) else ""


def answer_fault(text: str, tokens: Sequence[int], special: Sequence[str], language: str) -> str:
    """Why an answer cannot be kept; empty if it can. Arguments as `user_fault` takes them."""
    if _is_short(text, 2):
        return "answer too short"
    if unclean(text, special):
        return "answer not clean text"
    if repeats_ngram(tokens, LOOP):
        return "answer loops"
    if REFUSAL.match(text):
        return "answer refuses"
    return "answer in another language" if _is_foreign(text, language) else ""


def unclean(text: str, special: Sequence[str]) -> bool:
    """Half characters, control characters, or the text of a special token."""
    return any(one in text for one in special) or any(
        c == "\ufffd" or (ord(c) < 32 and c not in "\n\t\r") for c in text
    )


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
            if common / (len(grams) + self.sizes[owner] - common) >= ALIKE:
                return True
        for gram in grams:
            self.owners.setdefault(gram, []).append(len(self.sizes))
        self.sizes.append(len(grams))
        return False


def _trigrams(text: str) -> set[str]:
    words = re.findall(r"\w+", text.lower())
    return {" ".join(words[i : i + 3]) for i in range(max(1, len(words) - 2))}


def _is_short(text: str, words: int) -> bool:
    if language_of(text) in BLANKLESS:
        return len(text) < 2 * words
    return len(text.split()) < words


def _is_foreign(text: str, language: str) -> bool:
    """Whether a text is in another language. English is at home where none can be told, as in formulas and names."""
    found = language_of(text)
    return found != language and (language != "en" or found not in OPEN)
