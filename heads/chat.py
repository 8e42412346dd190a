"""One chat rendered by its tokenizer's own template, and the fingerprint of template and tokenizer.

- `render`: messages to text; `encode`: messages to token ids, without a second beginning-of-sequence token.
- `marked`: the same text with what the template itself marks as generated.
- `with_template`: the tokenizer with another template, from a file or by name.
- `fingerprint`: what has to be equal for two tokenizers to mean the same text by the same ids.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import UserError, nearest
from ..files import text_hash
from .dialect import Dialect, others

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]

MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")  # what transformers itself looks for
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NAMED = {"chatml": CHATML}
"""Templates that can be asked for by name."""

_DIALECTS: dict[str, Dialect] = {}


class Refusal(UserError):
    """A template that refuses a chat: its own words, and the roles of the chat."""

    def __init__(self, words: str, roles: Sequence[Any]):
        super().__init__(f"the chat template refuses a chat with roles {list(roles)}: {words}")
        self.words, self.roles = words, list(roles)


def template_of(tokenizer: Any, tools: Tools | None = None) -> str:
    """The text of the tokenizer's chat template: the default one, or that for tools if it has one of its own.

    Raises:
        UserError: it has none.
    """
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, Mapping):
        template = (template.get("tool_use") if tools else None) or template.get("default")
    if not template:
        raise UserError(
            f"the tokenizer of {_name(tokenizer)} has no chat template, so chats cannot be rendered; "
            "use an instruct model, or set tokenizer.chat_template and save it beside the model"
        )
    return str(template)


def with_template(tokenizer: Any, template: str | Path) -> Any:
    """A copy of the tokenizer whose chat template is the given one.

    Args:
        template: a file (`.jinja`, or `.json` with the key chat_template), the name of one of the tokenizer's own
            templates, or one of `NAMED`.

    Raises:
        UserError: there is no such file and no template of that name.
    """
    changed = copy.copy(tokenizer)
    changed.chat_template = _template(tokenizer, str(template))
    return changed


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    tools: Tools | None = None,
    thinking: bool | None = None,
    add_generation_prompt: bool = False,
) -> str:
    """The text of a chat, exactly as the template writes it.

    Args:
        messages: `{"role": ..., "content": ...}` each; see `dialect.py` for what else one may hold.
        tools: JSON schemas of the functions that can be called.
        thinking: given to the template as `enable_thinking` and `thinking`; None leaves it to the template.
        add_generation_prompt: end with the opening of an assistant turn.

    Raises:
        UserError: there is no template, or (`Refusal`) it refuses the chat.
    """
    switches = {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}

    def write(spoken: Sequence[Message]) -> str:
        text = tokenizer.apply_chat_template(
            list(spoken), tools=tools or None, tokenize=False, add_generation_prompt=add_generation_prompt, **switches
        )
        assert isinstance(text, str), "apply_chat_template(tokenize=False) gave no text"
        return text

    text: str = _written(write, _dialect(tokenizer, tools).speak(messages))
    return text


def marked(
    tokenizer: Any, messages: Sequence[Message], *, tools: Tools | None = None, thinking: bool | None = None
) -> tuple[str, list[tuple[int, int]]]:
    """The text of a chat, and the characters (first, behind the last) that `{% generation %}` marks in it, in order.

    Raises:
        UserError: as `render` does.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    switches = {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}

    def write(spoken: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        found: Any = render_jinja_template(  # (texts, marks), whatever its annotation says
            conversations=[[dict(message) for message in spoken]],
            tools=list(tools) if tools else None,  # type: ignore[arg-type]
            chat_template=template_of(tokenizer, tools),
            return_assistant_tokens_mask=True,
            **{**tokenizer.special_tokens_map, **switches},
        )
        (text,), (spans,) = found
        return text, [(start, stop) for start, stop in spans if stop > start]

    found: tuple[str, list[tuple[int, int]]] = _written(write, _dialect(tokenizer, tools).speak(messages))
    return found


def encode(
    tokenizer: Any, messages: Sequence[Message], *, tools: Tools | None = None, add_generation_prompt: bool = False
) -> list[int]:
    """Token ids of a chat; the template writes its own special tokens, so none are added."""
    text = render(tokenizer, messages, tools=tools, add_generation_prompt=add_generation_prompt)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def fingerprint(tokenizer: Any) -> dict[str, str]:
    """`{"tokenizer": ..., "template": ...}`, 16 hex digits each: the id of every token string; and the template's text
    with the special tokens that it prints by name (`{{ bos_token }}`).

    A tokenizer without a template has `"template": "none"`.
    """
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=False)
    return {"tokenizer": text_hash(vocabulary)[:16], "template": _template_hash(tokenizer)}


def _template_hash(tokenizer: Any) -> str:
    if not getattr(tokenizer, "chat_template", None):
        return "none"
    text = template_of(tokenizer)
    if isinstance(tokenizer.chat_template, Mapping) and len(tokenizer.chat_template) > 1:
        text = json.dumps(dict(tokenizer.chat_template), sort_keys=True)
    printed = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if name in text}
    return text_hash(text + json.dumps(printed, sort_keys=True) if printed else text)[:16]


def _written(write: Callable[[Sequence[Message]], Any], messages: list[Message]) -> Any:
    """What a template writes; where it fails, it is asked again with the chat in another form."""
    try:
        return write(messages)
    except Exception as error:  # a template is foreign code: it may raise anything
        for form in others(messages):
            try:
                return write(form)
            except Exception:
                continue  # the first failure tells more
        raise Refusal(str(error) or type(error).__name__, [message.get("role") for message in messages]) from error


def _dialect(tokenizer: Any, tools: Tools | None) -> Dialect:
    template = template_of(tokenizer, tools)
    if template not in _DIALECTS:
        _DIALECTS[template] = Dialect.of(
            template,
            lambda messages: str(tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False)),
        )
    return _DIALECTS[template]


def _template(tokenizer: Any, wanted: str) -> str:
    """The text of the template that a file or a name stands for."""
    own = getattr(tokenizer, "chat_template", None)
    known = {**NAMED, **(own if isinstance(own, Mapping) else {})}
    if wanted in known:
        return str(known[wanted])
    if not Path(wanted).is_file():
        near = nearest(wanted, known)
        raise UserError(
            f"{wanted}: no such template file, and no template of that name"
            + (f"; did you mean {near}?" if near else f"; known are {', '.join(known)}")
        )
    try:
        text = Path(wanted).read_text(encoding="utf-8")
        return str(json.loads(text)["chat_template"]) if wanted.endswith(".json") else text
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{wanted}: cannot be read as a chat template ({type(error).__name__}: {error})") from None


def _name(tokenizer: Any) -> str:
    return str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
