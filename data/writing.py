"""The backbone writes both sides of planned conversations, a group at a time.

A user's turn is the template's opening of one, the first words of the plan, and what the backbone writes behind them.
Its topic is said by a system prompt which the finished conversation does not have. For a conversation about a long text
the backbone writes that first, section by section.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..heads import chat
from ..heads.backbone import Backbone
from ..inference.plain import decode_group
from ..inference.stats import repeats_last, repeats_ngram
from .plans import Plan
from .quality import LOOP, answer_fault, unclean, user_fault

if TYPE_CHECKING:
    from .synthesize import SynthesizeSettings

Row = dict[str, Any]

_MARK = "\u2402HEADSTART\u2403"  # stands in a rendered template where the user's words go
SECTION, USUAL = 320, 200  # tokens of a section at most, and as a weak backbone writes it
STREAMS = 1 << 16  # further than any number of turns: the noise of sections


class UserOpening:
    """The text with which the template opens a user turn after given messages, and how it closes one."""

    def __init__(self, backbone: Backbone) -> None:
        if backbone.tokenizer is None:
            raise UserError(f"synthesize needs a tokenizer with a chat template: {backbone.no_tokenizer}")
        self.tokenizer = backbone.tokenizer
        after = self._around([])[1]
        ends = self.tokenizer(after, add_special_tokens=False)["input_ids"][:1]
        self.end_tokens = backbone.eos_token_ids | frozenset(ends)
        self.special = sorted(filter(None, self.tokenizer.all_special_tokens), key=len, reverse=True)
        self.takes_system = self._renders([{"role": "system", "content": "Topic: rivers"}])

    def ids(self, messages: Sequence[chat.Message], words: str = "") -> list[int]:
        """Token ids up to where the user's next words go, and those of the first of them."""
        return list(self.tokenizer(self._around(messages)[0] + words, add_special_tokens=False)["input_ids"])

    def words(self, tokens: Sequence[int]) -> str:
        """What the user said, without the end of the turn."""
        return self.text(tokens[:-1] if tokens and tokens[-1] in self.end_tokens else tokens)

    def text(self, tokens: Sequence[int]) -> str:
        """Tokens as they were written."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _around(self, messages: Sequence[chat.Message]) -> tuple[str, str]:
        text = chat.render(self.tokenizer, [*messages, {"role": "user", "content": _MARK}])
        before, mark, after = text.partition(_MARK)
        if not mark or not before or _MARK in after:
            raise UserError("the chat template does not write the user's words once and as they are: not usable here")
        return before, after

    def _renders(self, messages: Sequence[chat.Message]) -> bool:
        try:
            return str(messages[0]["content"]) in self._around(messages)[0]
        except UserError:
            return False


class Writer:
    """Writes conversations with one backbone.

    Args:
        on_step: called after each forward.
    """

    def __init__(self, backbone: Backbone, settings: SynthesizeSettings, on_step: Callable[[], None] = lambda: None):
        self.backbone, self.settings, self.on_step = backbone, settings, on_step
        self.opening = UserOpening(backbone)

    def group(self, plans: dict[int, Plan]) -> list[Row]:
        """The conversations of these numbers, the dropped ones with their reason."""
        rows = [self._row(number, plan) for number, plan in plans.items()]
        for long in (False, True):  # apart: a short row would pay for the length of a long one
            some = [row for row in rows if (row["kind"] == "long") is long]
            if long:
                self._write_texts(some, plans)
            for turn in range(self.settings.max_turns):
                going = [row for row in some if self._goes_on(row, plans[row["number"]], turn)]
                self._exchange(going, plans, turn)
        return rows

    def _row(self, number: int, plan: Plan) -> Row:
        system = [{"role": "system", "content": plan.system}] if plan.system and self.opening.takes_system else []
        return {
            "number": number,
            "kind": plan.kind,
            "topic": plan.topic,
            "language": plan.language,
            "messages": system,
            "answers": "sampled" if plan.sampled else "greedy",
            "dropped": "no room in the context",  # until it is answered
            "finish": "stop",
        }

    def _goes_on(self, row: Row, plan: Plan, turn: int) -> bool:
        if turn == 0:
            return bool(row["dropped"] != "long text too short")
        asked = sum(message["role"] == "user" for message in row["messages"])
        return bool(not row["dropped"] and row["finish"] == "stop" and asked == turn < len(plan.openings))

    # -- long texts ---------------------------------------------------------------------------------------------------

    def _write_texts(self, rows: list[Row], plans: dict[int, Plan]) -> None:
        """Give each row the text that it is about, in `text`."""
        want = -(-self.settings.long_tokens // USUAL)
        asked = [(row, place) for row in rows for place in range(min(want, len(plans[row["number"]].sections)))]
        ask = "Write a detailed text about {}."
        prompts = [ask.format(plans[row["number"]].sections[place]) for row, place in asked]
        written = decode_group(
            self.backbone,
            [self.backbone.encode([{"role": "user", "content": prompt}]) for prompt in prompts],
            max_new_tokens=SECTION,
            temperature=self.settings.answer_temperature,
            top_p=self.settings.user_top_p,
            seed=self._noise(STREAMS),
            samples=[row["number"] * 64 + place for row, place in asked],
            give_up=lambda _, tokens: repeats_last(tokens, LOOP),
            on_step=self.on_step,
        )
        for row in rows:
            of_row = [tokens for (owner, _), tokens in zip(asked, written, strict=True) if owner is row]
            sections = [section for tokens in of_row if (section := self._section(tokens))]
            row["text"] = "\n\n".join(sections)
            if len(self.backbone.tokenizer(row["text"])["input_ids"]) < self.settings.long_tokens / 2:
                row["dropped"] = "long text too short"

    def _section(self, tokens: list[int]) -> str:
        """A section as text, up to its last whole sentence before a loop; empty if that is too little."""
        loops = repeats_ngram(tokens, LOOP)  # since its last token, where the loop was seen
        tokens = tokens[:-LOOP] if loops else tokens
        ended = bool(tokens) and not loops and tokens[-1] in self.backbone.eos_token_ids
        text = self.opening.text(tokens[:-1] if ended else tokens).strip()
        if not ended:
            text = text[: max(map(text.rfind, (". ", ".\n", "! ", "? "))) + 1]
        return (
            "" if repeats_ngram(tokens, LOOP) or unclean(text, self.opening.special) or len(text.split()) < 30 else text
        )

    # -- questions and answers ----------------------------------------------------------------------------------------

    def _exchange(self, rows: list[Row], plans: dict[int, Plan], turn: int) -> None:
        """Let the user say something in each row and the assistant answer; a bad first exchange drops the row, a bad
        later one is left out."""
        opened = [(row, self._opened(row, plans[row["number"]], turn)) for row in rows]
        limit = self.settings.max_user_tokens
        limits = {"code": 3 * limit}
        live = [
            (row, first, ids)
            for row, (first, ids) in opened
            if len(ids) + limits.get(row["kind"], limit) < self.backbone.max_positions
        ]
        said = decode_group(
            self.backbone,
            [ids for _, _, ids in live],
            max_new_tokens=[limits.get(row["kind"], limit) for row, _, _ in live],
            temperature=self.settings.user_temperature,
            top_p=self.settings.user_top_p,
            seed=self._noise(2 * turn),
            samples=[row["number"] for row, _, _ in live],
            eos=self.opening.end_tokens,
            on_step=self.on_step,
        )
        asked = []
        for (row, first, _), tokens in zip(live, said, strict=True):
            words = (first + self.opening.words(tokens)).strip()
            question = words[len(row["text"]) :].strip() if turn == 0 and "text" in row else words
            reason = user_fault(question, tokens, self.opening.end_tokens, self.opening.special, row["language"])
            if not reason:
                row["question"] = question if turn == 0 else row["question"]
                asked.append((row, words))
            elif turn == 0:
                row["dropped"] = reason
        self._answer(asked, turn)

    def _opened(self, row: Row, plan: Plan, turn: int) -> tuple[str, list[int]]:
        """The first words of the user, and all token ids up to their end."""
        words, messages = plan.openings[turn], row["messages"]
        if turn == 0:
            words = f"{row['text']}\n\n{words}" if "text" in row else words
            steered = plan.topic and self.opening.takes_system and "text" not in row
            messages = [{"role": "system", "content": f"Topic: {plan.topic}"}] if steered else messages
        return words, self.opening.ids(messages, words)

    def _answer(self, asked: list[tuple[Row, str]], turn: int) -> None:
        limit, backbone = self.settings.max_answer_tokens, self.backbone
        prompts = [backbone.encode([*row["messages"], {"role": "user", "content": words}]) for row, words in asked]
        fitting = [place for place, prompt in enumerate(prompts) if len(prompt) + limit <= backbone.max_positions]
        rows = [asked[place][0] for place in fitting]
        answers = decode_group(
            backbone,
            [prompts[place] for place in fitting],
            max_new_tokens=limit,
            temperature=[self.settings.answer_temperature if row["answers"] == "sampled" else 0.0 for row in rows],
            seed=self._noise(2 * turn + 1),
            samples=[row["number"] for row in rows],
            give_up=lambda _, tokens: repeats_last(tokens, LOOP),  # it would be dropped for that anyway
            on_step=self.on_step,
        )
        for place, tokens in zip(fitting, answers, strict=True):
            row, words = asked[place]
            stopped = bool(tokens) and tokens[-1] in backbone.eos_token_ids
            text = self.opening.text(tokens[:-1] if stopped else tokens).strip()
            reason = answer_fault(text, tokens, self.opening.special, row["language"])
            if turn == 0:
                row["dropped"] = reason
            if not reason:
                row["messages"] += [{"role": "user", "content": words}, {"role": "assistant", "content": text}]
                row["finish"] = "stop" if stopped else "length"
                row["tokens"] = row.get("tokens", 0) + len(tokens)

    def _noise(self, stream: int) -> int:
        """The seed of a stream of noise: seeds of the user and streams do not meet."""
        return self.settings.seed * (STREAMS + 1) + stream
