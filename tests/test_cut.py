"""Replies that were cut off at a limit: their words are supervised, and the end of turn that nobody wrote is not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from test_masks import CHAT, CHATML, TEMPLATES, Slow, only, shown, with_template

from headstart.data.chats import read_chats
from headstart.data.masks import Masker
from headstart.data.prepare import PrepareSettings, load_prepared, prepare
from headstart.data.replies import Unmaskable
from headstart.files import write_jsonl

MARKED = TEMPLATES["generation marks"][0]
SHORT = "replies that were cut off, without their end of turn"
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% set thought = m.reasoning_content or '' %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKS_MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}<think>\n"
    "{{ m.reasoning_content or '' }}\n</think>\n\n{{ m.content }}<|im_end|>{% endgeneration %}{% else %}"
    "{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("cut", [[1], [3], [1, 3]])
def test_a_cut_reply_has_no_end(name: str, slow: bool, cut: list[int]) -> None:
    template, whole = TEMPLATES[name]
    tokenizer = with_template(template)
    numbers = iter((1, 3))
    expected = re.sub(
        r"ab([^\]]*)\]", lambda end: f"ab]{end[1]}" if next(numbers) in cut else end[0], whole or TEMPLATES["chatml"][1]
    )
    made = only(Masker(Slow(tokenizer) if slow else tokenizer), CHAT, cut=cut)
    assert shown(tokenizer, made) == expected


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_words_that_are_also_in_the_end_of_turn(template: str) -> None:
    tokenizer = with_template(template)
    chat = [CHAT[0], {"role": "assistant", "content": "end"}]
    assert "[end]<|im_end|>" in shown(tokenizer, only(Masker(tokenizer), chat, cut=[1]))


def test_a_token_across_the_end_is_not_what_was_said() -> None:
    tokenizer = with_template("{% for m in messages %}{{ m.content }}\n{% endfor %}")  # two line feeds are a token
    chat = [CHAT[0], {"role": "assistant", "content": "ab\n"}]
    assert shown(tokenizer, only(Masker(tokenizer), chat)) == "hi\n[ab\n\n]"
    assert shown(tokenizer, only(Masker(tokenizer), chat, cut=[1])) == "hi\n[ab]\n\n"


@pytest.mark.parametrize("marks", [False, True])
@pytest.mark.parametrize(
    "reply", [{"content": "<think>\nso ab"}, {"content": "", "reasoning_content": "so ab"}], ids=["text", "field"]
)
def test_thoughts_that_were_cut_are_not_closed(marks: bool, reply: dict[str, str]) -> None:
    tokenizer = with_template(THINKS_MARKED if marks else THINKS)
    made = only(Masker(tokenizer), [CHAT[0], {"role": "assistant", **reply}], cut=[1])
    assert "assistant\n[<think>\nso ab]\n</think>\n\n<|im_end|>" in shown(tokenizer, made)


def test_thoughts_stay_words_for_a_template_that_knows_none() -> None:
    tokenizer = with_template(CHATML)
    made = only(Masker(tokenizer), [CHAT[0], {"role": "assistant", "content": "<think>\nso ab"}], cut=[1])
    assert "[<think>\nso ab]<|im_end|>" in shown(tokenizer, made)
    with pytest.raises(Unmaskable, match="words of a reply that was cut off"):
        Masker(tokenizer)([CHAT[0], {"role": "assistant", "content": "", "reasoning_content": "so"}], cut=[1])
    tokenizer = with_template(MARKED)
    lost = [*CHAT[:3], {"role": "assistant", "content": "", "reasoning_content": "so"}]
    made = Masker(tokenizer)(lost, cut=[3])
    assert [fault.detail for fault in made.lost] == ["message 4"]
    assert shown(tokenizer, made.rows[0]).count("[") == 1
    with pytest.raises(Unmaskable, match="words of a reply that was cut off"):
        Masker(tokenizer)([lost[0], lost[3]], cut=[1])


@pytest.mark.parametrize(
    ("row", "cut"),
    [
        ({"messages": CHAT, "finish": "length"}, (3,)),
        ({"messages": CHAT, "finish_reason": "length"}, (3,)),
        ({"messages": CHAT, "finish": "stop"}, ()),
        ({"messages": CHAT, "finish": "dropped"}, ()),
        ({"messages": CHAT, "finish": ["length"]}, ()),
        ({"messages": CHAT[:3], "finish": "length"}, ()),
        ({"messages": [CHAT[0], {**CHAT[1], "finish_reason": "max_tokens"}, *CHAT[2:]]}, (1,)),
        ({"prompt": "hi", "response": "ab", "finish": "length"}, (1,)),
        ({"system": "be", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ab"}]}, ()),
        (
            {
                "system": "be",
                "finish": "length",
                "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ab"}],
            },
            (2,),
        ),
    ],
)
def test_how_a_row_says_so(row: dict[str, Any], cut: tuple[int, ...], tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [row])
    (one,), _ = read_chats([tmp_path / "a.jsonl"])
    assert one.cut == cut
    assert not any(message.keys() - {"role", "content"} for message in one.messages)  # no template sees it


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_prepared_rows_count_them(template: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = with_template(template)
    rows: list[dict[str, Any]] = [{"messages": CHAT, "finish": finish} for finish in ("stop", "length", "length")]
    write_jsonl(tmp_path / "a.jsonl", rows)
    meta = prepare(tokenizer, PrepareSettings([str(tmp_path / "a.jsonl")], tmp_path / "out"))
    assert meta["counts"]["notes"] == {SHORT: 2}
    assert f"2 {SHORT}" in capsys.readouterr().out
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    made = load_prepared(tmp_path / "out", tokenizer)
    assert [int((row["mask"].astype(bool) & (row["ids"] == end)).sum()) for row in made] == [2, 1, 1]
