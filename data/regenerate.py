"""The backbone answers given prompts, so that a head is trained on what its backbone really says.

Of each chat all but the answers is kept (`talks.py`); each user turn is answered in turn, behind the backbone's own
earlier answers, by a backbone in this process or by a server that has it (`endpoint.py`). Prompts of like length form
fixed groups (`groups.py`), so that a killed run ends with the same bytes.

A conversation ends early where an answer is cut off at the limit or is empty, and where the next turn does not fit into
the backbone's context: what was answered in full before that is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..files import write_jsonl
from ..heads import chat
from ..progress import Progress
from .chats import Chat, Skipped, listed, read_chats
from .crew import Crew
from .endpoint import Endpoint, Failed, seed_of
from .groups import earlier, finished, run_groups, settings_hash, tidied
from .sources import sources_of
from .store import tokenizer_of
from .talks import WHY, Talk, kept, turns_of

if TYPE_CHECKING:
    from ..heads.backbone import Backbone

FORMAT = 3  # counts up when the same settings would give another file
DECODER = 2  # and this, where a backbone in this process would give another one
Work = Callable[[int, list[int]], list[dict[str, Any]]]
FIELDS = ("number", "messages", "finish", "detail")


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


def regenerate(writer: Backbone | Endpoint, settings: RegenerateSettings) -> None:
    """Write `settings.out`: a row for each conversation with at least one answer, in the order of the input.

    A row has `messages`, `tools` where there are some, `finish` (stop, or why it ended early: a key of `WHY`), `source`
    (file and row) and `settings` (a hash of what `<out>.settings.json` records).

    Args:
        writer: who answers.

    Raises:
        UserError: the input is unreadable, the backbone has no chat template, `out` is taken, nothing was answered, or
            the endpoint fails.
    """
    if not isinstance(writer, Endpoint):
        chat.template_of(tokenizer_of(writer))
    chats, skipped = read_chats(settings.input, settings.strict)
    if skipped:
        print(listed(skipped))
    record = _record(writer, settings)
    if finished(settings.out, record) and not settings.restart:
        tidied(settings.out)
        print(f"{settings.out}: already there")
        return
    groups = _groups(writer, chats, settings.group)
    notes = {"endpoint": writer.url} if isinstance(writer, Endpoint) else {}
    with (
        Progress(len(chats), "chats", "regenerate") as progress,
        _work(writer, settings, chats, groups, progress) as work,
        run_groups(settings.out, record, groups, work, restart=settings.restart, notes=notes) as results,
    ):
        progress.done = progress.first = sum(map(len, groups[: earlier(settings.out)]))
        talks = sorted((row for rows in results for row in rows), key=lambda row: int(row["number"]))
        progress.close()
        _write(talks, chats, settings_hash(record), settings.out)


@contextmanager
def _work(
    writer: Backbone | Endpoint,
    settings: RegenerateSettings,
    chats: Sequence[Chat],
    groups: Sequence[list[int]],
    progress: Progress,
) -> Iterator[Work]:
    """The function that answers a group."""
    if isinstance(writer, Endpoint):
        with _by_endpoint(writer, settings, chats, groups, progress) as work:
            yield work
    else:
        yield _by_backbone(writer, settings, chats, progress)


def _by_backbone(backbone: Backbone, settings: RegenerateSettings, chats: Sequence[Chat], progress: Progress) -> Work:
    from .answers import answer  # loads torch, which answers by an endpoint do without

    def work(number: int, group: list[int]) -> list[dict[str, Any]]:
        talks = [Talk.of(place, chats[place]) for place in group]
        answer(backbone, settings, talks, progress.refresh)
        progress.advance(len(group))
        return [_told(talk) for talk in talks]

    return work


# -- by an endpoint ---------------------------------------------------------------------------------------------------


@contextmanager
def _by_endpoint(
    endpoint: Endpoint,
    settings: RegenerateSettings,
    chats: Sequence[Chat],
    groups: Sequence[list[int]],
    progress: Progress,
) -> Iterator[Work]:
    """Requests run ahead of the group that is waited for, so that the server always has enough to do."""
    retries = 0

    def retried() -> None:
        nonlocal retries
        retries += 1
        progress.note(retries=retries)

    endpoint.on_retry = retried
    with Crew(endpoint.settings.concurrency, endpoint.stopped) as crew:
        ahead: dict[int, list[Any]] = {}

        def work(number: int, group: list[int]) -> list[dict[str, Any]]:
            for coming in range(max([number - 1, *ahead]) + 1, len(groups)):
                if coming > number and crew.waiting > endpoint.settings.concurrency:
                    break
                ahead[coming] = [crew.do(_talked, endpoint, settings, place, chats[place]) for place in groups[coming]]
            talks = list(crew.results(ahead.pop(number), lambda done: progress.advance(done)))
            return [_told(talk) for talk in talks]

        yield work


def _talked(endpoint: Endpoint, settings: RegenerateSettings, place: int, one: Chat) -> Talk:
    """A whole conversation, answered in turn."""
    talk = Talk.of(place, one)
    while not talk.finish:
        options: dict[str, Any] = {"max_tokens": settings.max_new_tokens, "temperature": settings.temperature}
        if settings.temperature:
            options |= {"top_p": settings.top_p, "seed": seed_of(settings.seed, place, talk.turn)}
            options |= {"top_k": settings.top_k} if settings.top_k else {}
        try:
            talk.take(endpoint.answer(talk.prompt(), talk.tools, options), settings.keep_cut)
        except Failed as failure:
            tries = endpoint.settings.retries + 1
            if not endpoint.settings.skip_failed:
                raise UserError(
                    f"{endpoint.url}: {failure}, in {tries} {'try' if tries == 1 else 'tries'} ({one.place}). What is "
                    "answered so far is kept: the same command goes on with it; --skip-failed leaves out what fails"
                ) from None
            talk.end("failed", str(failure))
    return talk


# -- in and out -------------------------------------------------------------------------------------------------------


def _told(talk: Talk) -> dict[str, Any]:
    return {name: getattr(talk, name) for name in FIELDS}


def _groups(writer: Backbone | Endpoint, chats: Sequence[Chat], size: int) -> list[list[int]]:
    """Places of chats in the input, those alike in turns and length together, the short ones first."""

    def weight(place: int) -> tuple[int, int, int]:
        turns = turns_of(chats[place].messages)
        text = "".join(message["content"] for turn in turns for message in turn)
        if isinstance(writer, Endpoint):
            return len(turns), len(text), place
        return len(turns), len(writer.tokenizer(text, verbose=False)["input_ids"]), place

    order = sorted(range(len(chats)), key=weight)
    return [order[start : start + size] for start in range(0, len(order), size)]


def _record(writer: Backbone | Endpoint, settings: RegenerateSettings) -> dict[str, Any]:
    """All that determines the file."""
    options = {name: value for name, value in asdict(settings).items() if name not in ("input", "out", "restart")}
    who: dict[str, Any]
    if isinstance(writer, Endpoint):
        who = {"model": writer.model, "body": writer.extra}
    else:
        weights = {"name": writer.name, "weights": writer.fingerprint(), "dtype": str(writer.dtype)}
        who = {"backbone": weights, "tokenizer": chat.fingerprint(writer.tokenizer), "decoder": DECODER}
    inputs = [source.identity() for source in sources_of(settings.input)]
    return {"verb": "regenerate", "format": FORMAT, **who, "input": inputs, **options}


def _write(talks: Sequence[dict[str, Any]], chats: Sequence[Chat], made_with: str, out: Path) -> None:
    """The final file, and what it came to."""
    rows, early = [], []
    for talk in talks:
        one, finish = chats[talk["number"]], talk["finish"]
        if finish != "stop":
            early.append(Skipped(one.file, one.row, WHY[finish], talk["detail"]))
        if talk["messages"]:
            row = {"messages": kept(talk["messages"])} | ({"tools": one.tools} if one.tools else {})
            rows.append(
                {**row, "finish": finish, "source": f"{Path(one.file).name}, row {one.row}", "settings": made_with}
            )
    if not rows:
        raise UserError(f"no conversation has an answer; {listed(early, 'ended early')}")
    write_jsonl(out, rows)
    calls = [message for row in rows for message in row["messages"] if message["role"] == "assistant"]
    answers = sum("weight" not in message for message in calls)
    print(f"{out}: {len(rows):,} conversations with {answers:,} answers, of {len(talks):,} prompts")
    if early:
        print(listed(early, "ended early"))
