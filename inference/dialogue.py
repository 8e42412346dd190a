"""A question asked turn by turn, each turn behind the plain answers to those before; and what a plain answer is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import UserError
from ..heads.backbone import Backbone
from .detokenizer import decode
from .suite import Message, Question

Row = dict[str, Any]
Answer = Callable[[list[int], int], tuple[Row, list[int]]]


def dialogue(backbone: Backbone, question: Question, new_tokens: int, raw: bool, answer: Answer) -> list[Row]:
    """A row for each turn; `skipped` says why one was not asked.

    Args:
        new_tokens: of each answer, at most.
        raw: the texts as they stand, without the chat template.
        answer: gets token ids and how many tokens may follow; returns what goes into the row, and the plain answer.
    """
    about = {"question": question.id, "key": question.key, "category": question.category, "group": question.group}
    messages: list[Message] = []
    rows: list[Row] = []
    skipped = ""
    for turn, said in enumerate(question.turns, 1):
        row: Row = {**about, "turn": turn, "turns": len(question.turns)}
        messages += said
        try:
            ids = [] if skipped else encode(backbone, question, messages, raw)
        except UserError as error:  # the template does not take the plain answer, which nobody could know before
            skipped = str(error)
        limit = 0 if skipped else min(new_tokens, backbone.max_positions - len(ids))
        if limit < 1:
            skipped = skipped or f"the prompt has {len(ids)} tokens; {backbone.name} holds {backbone.max_positions}"
            rows.append({**row, "skipped": skipped})
            continue
        found, tokens = answer(ids, limit)
        rows.append({**row, **found})
        messages.append({"role": "assistant", "content": decode(backbone.tokenizer, tokens)})
    return rows


def encode(backbone: Backbone, question: Question, messages: Sequence[Message], raw: bool) -> list[int]:
    """Token ids of what has been said so far.

    Raises:
        UserError: it cannot be asked (no chat template, say); names the question.
    """
    try:
        if not raw:
            return backbone.encode(messages)
        if backbone.tokenizer is None:
            raise UserError(f"texts need a tokenizer: {backbone.no_tokenizer}")
        text = "\n\n".join(message["content"] for message in messages)
        return list(backbone.tokenizer(text)["input_ids"])
    except UserError as error:
        raise UserError(f"question {question.id} (row {question.row}): {error}") from error


def own_answer(backbone: Backbone, ids: list[int], limit: int) -> list[int]:
    """The new tokens of greedy `model.generate`, transformers' own."""
    config, prompt = backbone.model.generation_config, torch.tensor([ids], device=backbone.device)  # (1, T)
    pad = config.pad_token_id if config.pad_token_id is not None else min(backbone.eos_token_ids, default=0)
    mask = torch.ones_like(prompt)
    options = {"max_new_tokens": limit, "do_sample": False, "pad_token_id": pad}
    found: list[int] = backbone.model.generate(prompt, attention_mask=mask, **options)[0, len(ids) :].tolist()
    return found
