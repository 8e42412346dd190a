"""One chat rendered: what a template is given, what it is asked again with, and what stands for it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from headstart.errors import UserError
from headstart.heads import chat
from headstart.heads.dialect import Dialect
from zoo import tokenizer

PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}"
PARTS = "{% for m in messages %}{{ m.role }}:{% for p in m.content %}{{ p.text }}{% endfor %}|{% endfor %}"
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


def with_template(template: Any) -> Any:
    changed = copy.deepcopy(tokenizer())
    changed.chat_template = template
    return changed


def test_content_is_text_or_parts_as_the_template_wants_it() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
    for template in (PLAIN, PARTS):
        for messages in (HI, parts):
            assert chat.render(with_template(template), messages) == "user:hi|"


@pytest.mark.parametrize("read", ["m.thinking", "m['reasoning']", "m.get('thought')", "m.reasoning_content"])
@pytest.mark.parametrize("given", ["reasoning_content", "reasoning", "thinking", "thought"])
def test_reasoning_is_found_under_the_name_that_is_read(read: str, given: str) -> None:
    template = f"{{% for m in messages %}}{{{{ {read} or '' }}}}{{{{ m.content }}}}{{% endfor %}}"
    messages = [*HI, {"role": "assistant", "content": "ho", given: "hm "}]
    assert chat.render(with_template(template), messages) == "hihm ho"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for c in messages[1].tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}", '{"x": 1}'),
        ("{% for c in messages[1].tool_calls %}{{ 'a' + c.function.arguments }}{% endfor %}", 'a{"x": 1}'),
        ("{% if messages[1].content is string %}{{ raise_exception('no') }}{% endif %}fine", "fine"),
        ("{% if messages[1].content is string %}{{ raise_exception('no') }}{% endif %}"
         "{% for c in messages[1].tool_calls %}{{ 'a' + c.function.arguments }}{% endfor %}", 'a{"x": 1}'),
    ],
)  # fmt: skip
def test_a_template_that_fails_is_asked_again(template: str, expected: str) -> None:
    messages = [*HI, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    assert chat.render(with_template(template), messages) == expected


def test_a_developer_is_a_system_where_nothing_else_is_known() -> None:
    strict = "{% for m in messages %}{% if m.role not in ['system', 'user'] %}{{ raise_exception('no') }}{% endif %}"
    developer = [{"role": "developer", "content": "d"}, *HI]
    assert chat.render(with_template(strict + "{{ m.role }}{% endfor %}"), developer) == "systemuser"
    assert chat.render(with_template(PLAIN), developer) == "developer:d|user:hi|"


def test_tools_and_thinking_reach_the_template() -> None:
    template = "{{ tools[0].function.name if tools }}{{ enable_thinking }}{{ thinking }}"
    function = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert chat.render(with_template(template), HI, tools=[function], thinking=False) == "fFalseFalse"
    assert chat.render(with_template(template), HI) == ""


def test_a_refusal_quotes_the_template() -> None:
    with pytest.raises(chat.Refusal, match=r"refuses a chat with roles \['user'\]: never") as caught:
        chat.render(with_template("{{ raise_exception('never') }}"), HI)
    assert (caught.value.words, caught.value.roles) == ("never", ["user"])
    with pytest.raises(chat.Refusal, match="division"):
        chat.render(with_template("{{ 1 // 0 }}"), HI)


def test_templates_by_file_and_name(tmp_path: Path) -> None:
    (tmp_path / "a.jinja").write_text(PLAIN)
    (tmp_path / "b.json").write_text(json.dumps({"chat_template": PLAIN}))
    several = with_template({"default": PARTS, "plain": PLAIN})
    for name in (tmp_path / "a.jinja", tmp_path / "b.json", "plain"):
        assert chat.render(chat.with_template(several, name), HI) == "user:hi|"
    assert several.chat_template["default"] == PARTS
    assert "<|im_start|>user\nhi<|im_end|>\n" in chat.render(chat.with_template(several, "chatml"), HI)
    for wrong, message in (("plane", "did you mean plain"), ("x", "known are chatml, default, plain")):
        with pytest.raises(UserError, match=f"{wrong}: no such template file.*{message}"):
            chat.with_template(several, wrong)
    (tmp_path / "b.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be read as a chat template"):
        chat.with_template(several, tmp_path / "b.json")


def test_a_template_of_its_own_for_tools() -> None:
    several = with_template({"default": "default", "tool_use": "tools"})
    assert chat.render(several, HI) == "default"
    assert chat.render(several, HI, tools=[{"type": "function", "function": {}}]) == "tools"


def test_the_fingerprint_holds_what_a_template_prints() -> None:
    mine = with_template(PLAIN)
    first = chat.fingerprint(mine)
    mine.bos_token = "<pad>"
    assert chat.fingerprint(mine) == first  # a token that is not printed changes nothing
    mine.chat_template = "{{ bos_token }}" + PLAIN
    before = chat.fingerprint(mine)
    assert before["template"] != first["template"]
    mine.bos_token = "<|im_end|>"
    assert chat.fingerprint(mine)["template"] != before["template"]
    assert chat.fingerprint(mine)["tokenizer"] == first["tokenizer"]
    mine.chat_template = {"default": PLAIN, "tool_use": PARTS}
    both = chat.fingerprint(mine)["template"]
    mine.chat_template = {"default": PLAIN, "tool_use": PLAIN}
    assert len({both, chat.fingerprint(mine)["template"], first["template"]}) == 3
    mine.chat_template = None
    assert chat.fingerprint(mine)["template"] == "none"


def test_the_mark_of_a_template_is_kept_apart_from_names() -> None:
    """A namespace's own variables are no fields of a message."""
    template = "{% set ns = namespace(thinking=false) %}{% if ns.thinking %}{{ m.reasoning }}{% endif %}"
    assert Dialect.of(template, lambda messages: "").reasoning == "reasoning"
