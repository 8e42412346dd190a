"""Templates of shapes that are in use, written for these tests, with their verdicts.

Letters are those of `test_templates.py`; each is proved by rendering with transformers alone."""

from __future__ import annotations

import pytest
from test_masks import with_template
from test_templates import CHATS, verdict

from headstart.data.masks import Masker

LOOP = "{% for m in messages %}"
OPEN = "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
CALLS = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
UNLISTED: dict[str, tuple[str, str]] = {
    "thoughts of the last reply alone": (
        "mmmsm",
        LOOP + "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last and m.reasoning_content %}"
        "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}" + CALLS + "<|im_end|>\n" + OPEN,
    ),
    "an empty block of thoughts opens a reply and stays in the last alone": (
        "mssxs",
        LOOP + "<|im_start|>{{ m.role }}\n{{ '<think>\n\n</think>\n\n' if m.role == 'assistant' and loop.last and not "
        "m.reasoning_content }}{{ '<think>' ~ m.reasoning_content ~ '</think>' if m.reasoning_content }}{{ m.content }}"
        + CALLS + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n"
        "{% endif %}",
    ),
    "no system": (
        "mmrmm",
        LOOP + "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + TURN + OPEN,
    ),
    "turns of one role merged": (
        "mmmmm",
        "{% set ns = namespace(role='') %}" + LOOP + "{% if m.role != ns.role %}{{ '<|im_end|>\n' if ns.role }}"
        "<|im_start|>{{ m.role }}\n{% else %}\n\n{% endif %}{{ m.content }}{% set ns.role = m.role %}{% endfor %}"
        "<|im_end|>\n{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ),
    "a default system prompt with the date": (
        "mmmmm",
        "{% if messages[0].role != 'system' %}<|im_start|>system\nToday is {{ strftime_now('%d %B %Y') }}.<|im_end|>\n"
        "{% endif %}" + LOOP + "<|im_start|>{{ m.role }}\n{{ m.content }}" + CALLS + "<|im_end|>\n" + OPEN,
    ),
    "tools first": (
        "mmmmm",
        "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
        + LOOP + "<|im_start|>{{ m.role }}\n{{ m.content }}" + CALLS + "<|im_end|>\n" + OPEN,
    ),
    "a beginning that the tokenizer adds, too": ("mmmmm", "{{ bos_token }}" + LOOP + TURN + OPEN),
    "calls end otherwise than replies": (
        "mmmmm",
        LOOP + "<|im_start|>{{ m.role }}\n{{ m.content }}" + CALLS
        + "{{ '<|eom|>' if m.tool_calls else '<|eot|>' }}" + OPEN,
    ),
    "the last reply has no end": (
        "mmmmm",
        LOOP + "<|im_start|>{{ m.role }}\n{{ m.content }}{{ '<|im_end|>\n' if not loop.last or m.role != 'assistant' }}"
        + OPEN,
    ),
    "the last reply alone has an end": (
        "mssss",
        LOOP + "{{ m.role }}: {{ m.content }}{{ eos_token if loop.last and m.role == 'assistant' else '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}",
    ),
    "marks around the last reply alone": (
        "mmmmm",
        LOOP + "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}{% generation %}{{ m.content }}"
        "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n" + OPEN,
    ),
    "trimmed": (
        "mmmmm",
        LOOP + "{{ m.role | upper | trim }}: {{ m.content | trim }}{{ eos_token if m.role == 'assistant' }}\n"
        "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}",
    ),
    "the system in the last question": (
        "mmsmm",
        "{% set system = messages[0].content if messages[0].role == 'system' else '' %}{% set said = messages[1:] if "
        "system else messages %}{% for m in said %}{% if m.role == 'assistant' %} {{ m.content }}</s>{% else %}[INST] "
        "{{ system ~ '\n\n' if system and (loop.last or loop.revindex == 2 and said[-1].role == 'assistant') }}"
        "{{ m.content }}[/INST]{% endif %}{% endfor %}",
    ),
    "a reply is always opened": (
        "mmmmm",
        LOOP + TURN + "{% endfor %}{% if messages[-1].role != 'assistant' %}<|im_start|>assistant\n{% endif %}",
    ),
    "the end of a reply stands before the next turn": (
        "mmmmm",
        LOOP + "{{ '<|im_end|>\n' if not loop.first }}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_end|>\n<|im_start|>assistant\n{% endif %}",
    ),
    "turns are numbered": (  # the space that opens a reply and its first letter are one token
        "msssm",
        LOOP + "[{{ (loop.index + 1) // 2 }}] {{ m.role }}: {{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}[{{ (messages|length + 2) // 2 }}] assistant: {% endif %}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNLISTED)
def test_verdict(name: str) -> None:
    expected, template = UNLISTED[name]
    assert "".join(verdict(template, *chat) for chat in CHATS) == expected


def test_a_last_reply_without_an_end_gets_the_one_that_others_have() -> None:
    tokenizer = with_template(UNLISTED["the last reply has no end"][1])
    (row,) = Masker(tokenizer)(CHATS[1][0]).rows
    text = "".join(tokenizer.decode([token]) for token, one in zip(row.ids, row.mask, strict=True) if one)
    assert text == "ab cd<|im_end|>xy zz<|im_end|>"


def test_replies_that_a_template_does_not_mark_are_counted() -> None:
    made = Masker(with_template(UNLISTED["marks around the last reply alone"][1]))(CHATS[1][0])
    assert made.notes["replies that the template does not mark"] == 1
    both = LOOP + "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    made = Masker(with_template(both + "<|im_end|>{% endgeneration %}{% endif %}" + OPEN))(CHATS[1][0])
    assert not made.notes["replies that the template does not mark"]
