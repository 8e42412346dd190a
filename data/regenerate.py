"""The backbone answers given prompts, so that a head is trained on what its backbone really says.

Of each chat the system and user messages are kept; each user turn is answered in turn, behind the backbone's own
earlier answers. Prompts of like length form fixed groups (`groups.py`), so that a killed run ends with the same bytes.

A conversation ends early where an answer is cut off at the limit or is empty, and where the next turn does not fit into
the backbone's context: what was answered in full before that is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import write_jsonl
from ..heads import chat
from ..heads.backbone import Backbone
from ..inference.plain import decode_group
from ..progress import Progress
from .chats import Chat, Skipped, listed, read_chats
from .groups import earlier, finished, run_groups, settings_hash
from .messages import Message
from .sources import sources_of
from .store import tokenizer_of

FORMAT = 1  # counts up when the same settings would give another file

WHY = {
    "length": "cut off at the limit",
    "context": "ended at the backbone's context",
    "empty": "ended by an empty answer",
    "refused": "refused by the chat template",
}


@dataclass
class RegenerateSettings:
    """Answers by the backbone to given prompts."""

    input: list[str]
    """Chats or prompts, as `data prepare` takes them; their own answers are replaced."""
    out: Path
    """The file to write: .jsonl or .jsonl.gz, a conversation a line."""
    max_new_tokens: int = 512
    """Tokens of an answer at most."""
    temperature: float = 0.0
    """0 is greedy; above it, answers are drawn."""
    top_p: float = 1.0
    """Draw among the likeliest tokens that make up this much of the probability."""
    top_k: int = 0
    """Draw among this many of the likeliest tokens; 0 is all of them."""
    seed: int = 0
    """Answers depend on it and on the place of the prompt in the input, not on the run."""
    group: int = 16
    """Conversations decoded together. Part of the result in half precision, where neighbours shift last digits."""
    keep_cut: bool = False
    """Keep answers that were cut off at the limit (their rows say finish: length) instead of dropping them."""
    strict: bool = False
    """Refuse the input because of one bad row, instead of skipping and listing it."""
    restart: bool = False
    """Throw away an unfinished run, or a file that is there already."""

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("group", 1), ("temperature", 0), ("top_k", 0)):
            if getattr(self, name) < least:
                raise UserError(f"{name} is {getattr(self, name)}; it has to be at least {least}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}; it has to be above 0 and at most 1")


@dataclass
class _Talk:
    """A conversation on its way."""

    number: int
    """Its place in the input; the number of its random sample."""
    turns: list[list[Message]]
    """What comes before each answer: a message of the user, and system messages that stand before it."""
    messages: list[Message] = field(default_factory=list)
    """What has been said and answered."""
    finish: str = ""
    """Why it ended; empty while it goes on."""
    detail: str = ""


def regenerate(backbone: Backbone, settings: RegenerateSettings) -> None:
    """Write `settings.out`: a row for each conversation with at least one answer, in the order of the input.

    A row has `messages`, `finish` (stop, or why it ended early: a key of `WHY`), `source` (file and row) and `settings`
    (a hash of what `<out>.settings.json` records).

    Raises:
        UserError: the input is unreadable, the backbone has no chat template, `out` is taken, nothing was answered.
    """
    chat.template_of(tokenizer_of(backbone))
    chats, skipped = _without_tools(*read_chats(settings.input, settings.strict))
    if skipped:
        print(listed(skipped))
    if not chats:
        raise UserError("no row can be answered")
    record = _record(backbone, settings)
    if finished(settings.out, record) and not settings.restart:
        print(f"{settings.out}: already there")
        return
    groups = _groups(backbone, chats, settings.group)

    def work(number: int, group: list[int]) -> list[dict[str, Any]]:
        talks = [_Talk(place, _turns(chats[place].messages)) for place in group]
        _answer(backbone, settings, talks, progress)
        progress.advance(len(group))
        return [{name: getattr(talk, name) for name in ("number", "messages", "finish", "detail")} for talk in talks]

    with run_groups(settings.out, record, groups, work, restart=settings.restart) as results:
        done = sum(map(len, groups[: earlier(settings.out)]))
        with Progress(len(chats), "chats", "regenerate", done=done) as progress:
            talks = sorted((row for rows in results for row in rows), key=lambda row: int(row["number"]))
        _write(talks, chats, settings_hash(record), settings.out)


def _without_tools(chats: Sequence[Chat], skipped: Sequence[Skipped]) -> tuple[list[Chat], list[Skipped]]:
    """Leave out chats with tools: what a tool says to another call than the recorded one cannot be known."""
    with_tools = [one for one in chats if one.tools or any(said["role"] == "tool" for said in one.messages)]
    left = [Skipped(one.file, one.row, "a chat with tools") for one in with_tools]
    return [one for one in chats if one not in with_tools], [*skipped, *left]


def _answer(backbone: Backbone, settings: RegenerateSettings, talks: Sequence[_Talk], progress: Progress) -> None:
    """Take a group of conversations to their ends, a turn of all of them at a time."""
    for turn in range(max(len(talk.turns) for talk in talks)):
        asked = [(talk, _prompt(backbone, talk, turn)) for talk in talks if not talk.finish]
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
            on_step=lambda _: progress.refresh(),
        )
        for (talk, _), answer in zip(going, answers, strict=True):
            _take(backbone, talk, turn, answer, settings.keep_cut)


def _prompt(backbone: Backbone, talk: _Talk, turn: int) -> list[int]:
    """Token ids before an answer; empty, with the reason in `talk.finish`, if there can be none."""
    try:
        prompt = backbone.encode([*talk.messages, *talk.turns[turn]])
    except UserError as error:
        talk.finish, talk.detail = "refused", str(error)
        return []
    if len(prompt) >= backbone.max_positions:
        talk.finish, talk.detail = "context", f"turn {turn + 1} opens with {len(prompt)} tokens"
        return []
    return prompt


def _take(backbone: Backbone, talk: _Talk, turn: int, answer: list[int], keep_cut: bool) -> None:
    """Add an answer to its conversation, and see whether that ends it."""
    ended = answer[-1] in backbone.eos_token_ids
    text = backbone.tokenizer.decode(
        answer[:-1] if ended else answer, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    if not text.strip():
        talk.finish, talk.detail = "empty", f"answer {turn + 1}"
        return
    if ended or keep_cut:
        talk.messages += [*talk.turns[turn], {"role": "assistant", "content": text}]
    if not ended:
        talk.finish, talk.detail = "length", f"answer {turn + 1}, {len(answer)} tokens"
    elif turn + 1 == len(talk.turns):
        talk.finish = "stop"


def _turns(messages: Sequence[Message]) -> list[list[Message]]:
    """A chat without its answers, cut behind each message of the user."""
    turns: list[list[Message]] = [[]]
    for message in messages:
        if message["role"] != "assistant":
            turns[-1].append(message)
        if message["role"] == "user":
            turns.append([])
    return turns[:-1]


def _groups(backbone: Backbone, chats: Sequence[Chat], size: int) -> list[list[int]]:
    """Places of chats in the input, those alike in turns and length together, the short ones first."""

    def weight(place: int) -> tuple[int, int, int]:
        turns = _turns(chats[place].messages)
        text = "".join(message["content"] for turn in turns for message in turn)
        return len(turns), len(backbone.tokenizer(text, verbose=False)["input_ids"]), place

    order = sorted(range(len(chats)), key=weight)
    return [order[start : start + size] for start in range(0, len(order), size)]


def _record(backbone: Backbone, settings: RegenerateSettings) -> dict[str, Any]:
    """All that determines the file."""
    options = {name: value for name, value in asdict(settings).items() if name not in ("input", "out", "restart")}
    return {
        "verb": "regenerate",
        "format": FORMAT,
        "backbone": {"name": backbone.name, "weights": backbone.fingerprint(), "dtype": str(backbone.dtype)},
        "tokenizer": chat.fingerprint(backbone.tokenizer),
        "input": [source.identity() for source in sources_of(settings.input)],
        **options,
    }


def _write(talks: Sequence[dict[str, Any]], chats: Sequence[Chat], made_with: str, out: Path) -> None:
    """The final file, and what it came to."""
    rows, early = [], []
    for talk in talks:
        one, finish = chats[talk["number"]], talk["finish"]
        if finish != "stop":
            early.append(Skipped(one.file, one.row, WHY[finish], talk["detail"]))
        if talk["messages"]:
            source = f"{Path(one.file).name}, row {one.row}"
            rows.append({"messages": talk["messages"], "finish": finish, "source": source, "settings": made_with})
    if not rows:
        raise UserError(f"no conversation has an answer; {listed(early, 'ended early')}")
    write_jsonl(out, rows)
    answers = sum(message["role"] == "assistant" for row in rows for message in row["messages"])
    print(f"{out}: {len(rows):,} conversations with {answers:,} answers, of {len(talks):,} prompts")
    if early:
        print(listed(early, "ended early"))
