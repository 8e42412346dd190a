"""One chat rendered by its tokenizer's own template, and the fingerprint of template and tokenizer.

- `render`: messages to text; `encode`: messages to token ids, without a second beginning-of-sequence token.
- `fingerprint`: what has to be equal for two tokenizers to mean the same text by the same ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError

from ..errors import UserError
from ..files import text_hash

Message = Mapping[str, Any]


def template_of(tokenizer: Any) -> str:
    """The text of the tokenizer's default chat template.

    Raises:
        UserError: it has none.
    """
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, Mapping):
        template = template.get("default")
    if not template:
        raise UserError(
            f"the tokenizer of {_name(tokenizer)} has no chat template, so chats cannot be rendered; "
            "use an instruct model, or set tokenizer.chat_template and save it beside the model"
        )
    return str(template)


def render(tokenizer: Any, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
    """The text of a chat, exactly as the template writes it.

    Args:
        messages: `{"role": ..., "content": ...}` each.
        add_generation_prompt: end with the opening of an assistant turn.

    Raises:
        UserError: there is no template, or the template refuses the chat (its own words and the roles are quoted).
    """
    template_of(tokenizer)
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
        roles = [message.get("role") for message in messages]
        raise UserError(f"the chat template refuses a chat with roles {roles}: {error}") from error
    assert isinstance(text, str), "apply_chat_template(tokenize=False) gave no text"
    return text


def encode(tokenizer: Any, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> list[int]:
    """Token ids of a chat; the template writes its own special tokens, so none are added."""
    text = render(tokenizer, messages, add_generation_prompt=add_generation_prompt)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def fingerprint(tokenizer: Any) -> dict[str, str]:
    """`{"tokenizer": ..., "template": ...}`, 16 hex digits each: the id of every token string, and the template's text.

    A tokenizer without a template has `"template": "none"`.
    """
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=False)
    template = getattr(tokenizer, "chat_template", None)
    return {
        "tokenizer": text_hash(vocabulary)[:16],
        "template": text_hash(template_of(tokenizer))[:16] if template else "none",
    }


def _name(tokenizer: Any) -> str:
    return str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
