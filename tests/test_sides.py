"""Two columns: nothing lost, nothing wider than the terminal."""

from __future__ import annotations

import zoo
from headstart.inference.generator import Generator
from headstart.inference.sides import GAP, _parting, compared, side_by_side


def columns(text: str) -> tuple[str, str]:
    rows = [line.split(GAP.rstrip(), 1) for line in text.splitlines()]
    return "".join(row[0].rstrip() + " " for row in rows), "".join(row[1].strip() + " " for row in rows)


def test_every_word_stays_in_its_column() -> None:
    left, right = "one two three four five six seven eight nine ten", "eleven twelve thirteen fourteen"
    shown = side_by_side(("plain", left), ("headstart", right), 50)
    found = columns(shown)
    assert all(word in found[0] for word in left.split())
    assert all(word in found[1] for word in right.split())
    assert max(map(len, shown.splitlines())) <= 50


def test_line_breaks_stay_and_control_characters_do_not() -> None:
    shown = side_by_side(("a", "1\n2\n\n3\x1b[31m"), ("b", ""), 60)
    assert [line.split()[0] for line in shown.splitlines()[2:] if line.split(GAP.rstrip())[0].strip()] == [
        "1",
        "2",
        "3[31m",
    ]
    assert len(shown.splitlines()) == 6


def test_wide_characters_take_two_cells() -> None:
    shown = side_by_side(("a", "天空为什么是蓝色的" * 5), ("b", "x"), 60)
    widths = [sum(2 if ord(c) > 0x2E80 else 1 for c in line.split("│")[0]) for line in shown.splitlines()]
    assert len(set(widths)) == 1


def test_both_are_answered_and_judged() -> None:
    backbone = zoo.backbone()
    plain, drafted = Generator(backbone), Generator(backbone, "ngram")
    shown = compared(plain, drafted, "red sun", "ngram", {"max_new_tokens": 12})
    assert "plain: " in shown
    assert "tokens a round" in shown
    assert shown.endswith("x, identical")
    other = Generator(zoo.backbone(seed=1), "ngram")
    assert "they part at token 0" in compared(plain, other, "red sun", "other", {"max_new_tokens": 12})


def test_one_answer_may_be_the_beginning_of_the_other() -> None:
    assert _parting([1, 2, 3], [1, 2]) == _parting([1, 2], [1, 2, 3]) == 2
    assert _parting([1, 2, 3], [1, 5, 3]) == 1
