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
LAST = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
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
    "the date in each turn": (
        "mmmmm",
        LOOP + "<|im_start|>{{ m.role }} {{ strftime_now('%Y-%m-%d') }}\n{{ m.content }}" + CALLS
        + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {{ strftime_now('%Y-%m-%d') }}\n"
        "{% endif %}",
    ),
    "thoughts behind the last question alone": (
        "mmmsm",
        LAST + LOOP + "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.index0 > ns.last and "
        "m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}" + CALLS
        + "<|im_end|>\n" + OPEN,
    ),
    "an opened block of thoughts, in the last reply alone": (
        "mssss",
        LOOP + "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>\n"
        "{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}" + CALLS
        + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
    ),
    "tools in the last question": (
        "mmmmm",
        LAST + LOOP + "<|im_start|>{{ m.role }}\n{{ tools | tojson if tools and loop.index0 == ns.last }}"
        "{{ m.content }}" + CALLS + "<|im_end|>\n" + OPEN,
    ),
    "marks that take blanks away": (
        "mmmmm",
        LOOP + "<|im_start|>{{ m.role }}\n{%- if m.role == 'assistant' -%}\n{%- generation -%}\n  {{- m.content -}}\n"
        "<|im_end|>\n{%- endgeneration -%}\n{% else %}{{ m.content }}<|im_end|>\n{% endif %}" + OPEN,
    ),
    "marks in a macro": (
        "mmmmm",
        "{% macro said(m) %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>{% endgeneration %}"
        "{% else %}{{ m.content }}</s>{% endif %}{% endmacro %}" + LOOP + "<{{ m.role }}>{{ said(m) }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}",
    ),
    "a namespace counts turns": (
        "mmmmm",
        "{% set ns = namespace(n=0) %}" + LOOP + "{% set ns.n = ns.n + 1 %}<turn {{ ns.n }} of {{ m.role }}>"
        "{{ m.content }}</turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<turn {{ ns.n + 1 }} of assistant>{% endif %}",
    ),
    "the number of messages first": ("xxxxx", "{{ messages | length }} messages\n" + LOOP + TURN + OPEN),
    "the number of questions first": (
        "msssm",
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }} questions\n" + LOOP + TURN + OPEN,
    ),
    "channels, as in harmony": (
        "mssss",
        LOOP + "{% if m.role == 'assistant' %}{% if m.reasoning_content and loop.last %}<|start|>assistant<|channel|>"
        "analysis<|message|>{{ m.reasoning_content }}<|end|>{% endif %}<|start|>assistant<|channel|>final<|message|>"
        "{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}{% else %}<|start|>{{ m.role }}<|message|>"
        "{{ m.content }}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    ),
    "an end of everything": (
        "mssss",
        LOOP + "<|im_start|>{{ m.role }}\n{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}{{ eos_token }}{% endif %}",
    ),
    "a switch behind the last question": (
        "xxxxp",
        LOOP + "<|im_start|>{{ m.role }}\n{{ m.content }}{{ ' /no_think' if m.role == 'user' and loop.last }}"
        "<|im_end|>\n" + OPEN,
    ),
    "the last two messages alone": ("mpxpp", "{% for m in messages[-2:] %}" + TURN + OPEN),
    "replies as JSON": (
        "mmmmm",
        LOOP + "{{ {'r': m.role, 'c': m.content} | tojson }}\n{% endfor %}"
        "{% if add_generation_prompt %}{\"r\": \"assistant\", \"c\": \"{% endif %}",
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
