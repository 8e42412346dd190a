"""Which language a text is in: by its script, and where several share one by their most frequent words.

A rough guess that needs no model: right for a paragraph, not to be trusted for three words.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

SCRIPTS = {
    "HANGUL": "ko",
    "HIRAGANA": "ja",
    "KATAKANA": "ja",
    "CYRILLIC": "ru",
    "GREEK": "el",
    "ARABIC": "ar",
    "HEBREW": "he",
    "DEVANAGARI": "hi",
    "THAI": "th",
    "CJK": "zh",
}
"""The language that a script stands for; Cyrillic, Arabic and Devanagari stand for all that are written in them."""

WORDS = {
    "en": "the of and to in is you that it for was on are with as this be have not or by from what how can your which",
    "de": "der die und das ist nicht ein eine ich zu den mit sich auf für im dem von des auch wie sind werden kann",
    "fr": "le la les des est et une dans que qui pour pas sur vous au avec ce il sont du plus par être cette aux",
    "es": "el los las que una es por con para del se como más su está pero son lo al esta este muy qué cómo",
    "pt": "os uma não que em para com do da por mais como dos é ao das são foi você seu sua isso também pode",
    "it": "il che di per una è non sono del della con le gli più come nel anche dei alla questo questa essere",
    "nl": "de het een van en is dat op te zijn voor met niet aan er ook als wordt naar bij deze kan dit je",
}
CODE = re.compile(
    r"^\s*(?:def |class |import |from \w+ import|#include|function |const |return\b|for \(|if \()|[;{}]\s*$",
    re.MULTILINE,
)
_OWNERS = {language: frozenset(words.split()) for language, words in WORDS.items()}


def language_of(text: str) -> str:
    """A code such as `en` or `zh`; `code` for a program, `other` where nothing tells."""
    text = text[:2000]
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and len(CODE.findall(text)) >= 0.4 * len(lines):
        return "code"
    scripts = Counter(_script(sign) for sign in text if sign.isalpha())
    latin = scripts.pop("", 0)
    if scripts and sum(scripts.values()) > 0.15 * latin:  # formulas and names are Latin everywhere
        if scripts["ja"] > 0.1 * scripts.total():
            return "ja"  # kana among Han characters
        return scripts.most_common(1)[0][0]
    return _by_words(text)


def _script(sign: str) -> str:
    """The language that the script of a letter stands for; empty for Latin and the like."""
    if sign.isascii():
        return ""
    return SCRIPTS.get(unicodedata.name(sign, "").partition(" ")[0], "")


def _by_words(text: str) -> str:
    words = Counter(re.findall(r"[^\W\d_]+", text.lower()))
    hits = {language: sum(words[word] for word in known) for language, known in _OWNERS.items()}
    best = max(hits, key=lambda language: hits[language])
    return best if hits[best] >= 0.08 * max(words.total(), 1) and hits[best] else "other"
