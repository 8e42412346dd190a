"""Replies of long chats, found in windows: as whole renderings have them, and in far less time."""

from __future__ import annotations

import random
from typing import Any

import pytest
from test_masks import CHANGING, CHATML, HISTORY, TEMPLATES, with_template
from test_templates import TOOL, WEATHER, needs_data, templates

from headstart.data import replies, turns
from headstart.data.masks import Masker
from headstart.data.replies import Unmaskable
from headstart.data.turns import Turns
from headstart.heads import chat

ODD = {  # templates that look farther than a window
    "history": HISTORY,
    "changing end": CHANGING,
    "numbered": CHATML.replace("{{ m.content }}", "{{ loop.index }}{{ m.content }}"),
    "counted": CHATML.replace("{{ m.content }}", "{{ messages|length if m.role == 'user' }}{{ m.content }}"),
    "opened by length": CHATML.replace(
        "{% if add_generation_prompt %}", "{% if add_generation_prompt %}{{ 'x' if messages|length > 20 }}"
    ),
    "once a tool has spoken": CHATML.replace(
        "{% if add_generation_prompt %}",
        "{% if add_generation_prompt %}{{ 'x' if messages|selectattr('role', 'equalto', 'tool')|list }}",
    ),
    "tools before the last question": "{% set last = messages|selectattr('role', 'equalto', 'user')|list|length %}"
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.n = ns.n + 1 %}"
    "{{ '[TOOLS]' if ns.n == last }}{% endif %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    "alternation": "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    "refuses the long": CHATML.replace("{% for m", "{{ raise_exception('long') if messages|length > 30 }}{% for m", 1),
}
LONGER = {name: template for name, (template, _) in TEMPLATES.items()} | ODD


def talk(source: random.Random, length: int, tools: bool) -> list[dict[str, Any]]:
    """A conversation with some short turns, double turns and, if asked, tools."""
    said: list[dict[str, Any]] = [{"role": "system", "content": "be good"}] if source.random() < 0.4 else []
    for number in range(length):
        said.append({"role": "user", "content": source.choice(["hi", "yo man", f"ab {number} hi", "ok"])})
        if tools and source.random() < 0.3:
            said.append({"role": "assistant", "content": "", "tool_calls": [{"id": "abcdefghi", **WEATHER}]})
            said.append({"role": "tool", "name": "weather", "tool_call_id": "abcdefghi", "content": f"sun {number}"})
        said.append({"role": "assistant", "content": source.choice(["ab", "\nab", "hi ab", f"xy {number}"])})
    return said


def made(tokenizer: Any, chat: list[dict[str, Any]], tools: Any, muted: list[int]) -> Any:
    try:
        return Turns(tokenizer)(chat, tools, muted)
    except Unmaskable as fault:
        return str(fault)


def same(one: Any, other: Any) -> None:
    if isinstance(one, str) or isinstance(other, str):
        assert one == other
        return
    assert [script.text for script in one.scripts] == [script.text for script in other.scripts]
    assert [script.spans for script in one.scripts] == [script.spans for script in other.scripts]
    for script, naive in zip(one.scripts, other.scripts, strict=True):
        assert [(t.text, t.start, t.end) for t in script.turns or []] == [
            (t.text, t.start, t.end) for t in naive.turns or []
        ]
    assert [str(fault) for fault in one.lost] == [str(fault) for fault in other.lost]
    assert one.notes == other.notes


def compare(monkeypatch: pytest.MonkeyPatch, template: str, seeds: range, length: int) -> None:
    tokenizer = with_template(template)
    for seed in seeds:
        source = random.Random(seed)
        tools = seed % 2 == 1
        said = talk(source, length, tools)
        muted = [k for k in range(len(said)) if source.random() < 0.1]
        found = []
        for long in (7, 10**9):
            for module in (replies, turns):
                monkeypatch.setattr(module, "LONG", long)
            monkeypatch.setattr(replies, "BLOCK", 4)
            found.append(made(tokenizer, said, [TOOL] if tools else None, muted))
        same(*found)


@pytest.mark.parametrize("name", LONGER)
def test_windows_say_what_whole_renderings_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(monkeypatch, LONGER[name], range(4), 13)


@needs_data
@pytest.mark.slow
def test_windows_on_every_template(monkeypatch: pytest.MonkeyPatch) -> None:
    for template in templates().values():
        compare(monkeypatch, template, range(2), 11)


def test_a_long_chat_is_rendered_in_nearly_linear_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole rendering for each reply would be 16 times the work for 4 times the replies."""
    render, work = chat.render, []

    def counted(tokenizer: Any, messages: Any, **options: Any) -> str:
        work[-1] += len(messages)
        return render(tokenizer, messages, **options)

    monkeypatch.setattr(chat, "render", counted)
    for length in (70, 280):
        work.append(0)
        said = [{"role": ("user", "assistant")[n % 2], "content": f"ab {n} hi ab hi"} for n in range(2 * length)]
        assert sum(Masker(with_template(CHATML))(said).rows[0].mask) > 5 * length
    assert work[1] < 8 * work[0]
    assert work[1] < 280 * 560 / 2
