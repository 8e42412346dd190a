"""Languages are guessed right for a sentence or two."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from headstart.data.language import language_of

TEXTS = {
    "en": "The cat is on the mat, and it was there for the whole of the day.",
    "de": "Die Katze ist auf der Matte, und sie war den ganzen Tag dort, wie ich von dem Nachbarn weiß.",
    "fr": "Le chat est sur le tapis, et il y est resté toute la journée avec les enfants.",
    "es": "El gato está en la alfombra y los niños son muy felices por lo que se ve en la casa.",
    "pt": "O gato não está em casa, mas os meninos são felizes por causa do que você fez para eles.",
    "it": "Il gatto è sul tappeto, e non c'è niente di più bello nel mondo per gli amici della casa.",
    "nl": "De kat zit op het kleed, en dat is voor de kinderen niet zo fijn als het weer goed is.",
    "zh": "猫坐在垫子上，一整天都没有离开。",
    "ja": "猫は一日中、敷物の上に座っていました。",
    "ko": "고양이는 하루 종일 매트 위에 앉아 있었습니다.",
    "ru": "Кошка весь день сидела на коврике.",
    "ar": "جلست القطة على السجادة طوال اليوم.",
    "code": "def f(x):\n    if (x > 1):\n        return x\n    for (i) in y:\n        import z\n",
    "other": "12345 + 67890",
}


@pytest.mark.parametrize("language", TEXTS)
def test_a_sentence(language: str) -> None:
    assert language_of(TEXTS[language]) == language


def test_nothing_is_other() -> None:
    assert language_of("") == language_of("\n \t") == language_of("zq xv") == "other"


def test_mixed_scripts_follow_the_larger_part() -> None:
    assert language_of("请解释 Python 的 list 是什么意思，以及如何使用。") == "zh"
    assert language_of("What does the word 猫 mean, and how is it read in that language?") == "en"


@pytest.mark.skipif("HEADSTART_TEST_DATA" not in os.environ, reason="needs HEADSTART_TEST_DATA, a folder of real files")
def test_real_prompts() -> None:
    """Rows that say their language: nearly all Chinese ones, and most English ones of some length."""
    path = Path(os.environ["HEADSTART_TEST_DATA"]) / "train" / "prompts.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as handle:
        rows = [json.loads(line) for line in handle][::20]
    for language, least in (("zh", 0.95), ("en", 0.9)):
        texts = [row["messages"][0]["content"] for row in rows if row["lang"] == language]
        texts = [text for text in texts if len(text) > (20 if language == "zh" else 80)]
        right = sum(language_of(text) == language for text in texts)
        assert right >= least * len(texts), f"{language}: {right} of {len(texts)}"
