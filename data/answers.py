"""Answers by a backbone in this process: a group of conversations, the next turn of all of them at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..errors import UserError
from ..heads import chat
from ..heads.backbone import Backbone
from ..inference.plain import decode_group
from .talks import Answer, Talk

if TYPE_CHECKING:
    from .regenerate import RegenerateSettings


def answer(
    backbone: Backbone, settings: RegenerateSettings, talks: Sequence[Talk], on_step: Callable[[], None]
) -> None:
    """Take a group of conversations to their ends.

    Args:
        on_step: called after each forward.
    """
    while going := [talk for talk in talks if not talk.finish]:
        _turn(backbone, settings, going, on_step)


def _turn(backbone: Backbone, settings: RegenerateSettings, talks: Sequence[Talk], on_step: Callable[[], None]) -> None:
    """The next answer of all these conversations."""
    asked = [(talk, _prompt(backbone, talk)) for talk in talks]
    going = [(talk, prompt) for talk, prompt in asked if prompt]
    answers = decode_group(
        backbone,
        [prompt for _, prompt in going],
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        seed=settings.seed,
        samples=[talk.number for talk, _ in going],
        on_step=on_step,
    )
    for (talk, _), answer in zip(going, answers, strict=True):
        talk.take(_answer_of(backbone, answer), settings.keep_cut)


def _prompt(backbone: Backbone, talk: Talk) -> list[int]:
    """Token ids before an answer; empty, with the reason in `talk.finish`, if there can be none."""
    try:
        prompt = chat.encode(backbone.tokenizer, talk.prompt(), tools=talk.tools, add_generation_prompt=True)
    except UserError as error:
        talk.end("refused", str(error))
        return []
    if len(prompt) >= backbone.max_positions:
        talk.end("context", f"turn {talk.turn + 1} opens with {len(prompt)} tokens")
        return []
    return prompt


def _answer_of(backbone: Backbone, answer: list[int]) -> Answer:
    if not answer:
        return Answer("", "overflow")
    ended = answer[-1] in backbone.eos_token_ids
    text = backbone.tokenizer.decode(
        answer[:-1] if ended else answer, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return Answer(text, "stop" if ended else "length", f"{len(answer)} tokens")
