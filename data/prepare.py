"""Chats to token ids and loss masks, in a folder that appears whole.

The folder is a saved `datasets` data set with a row for each chat

    ids    int32, T tokens of the rendered chat
    mask   uint8, T, 1 where the token is supervised (a reply or its end of turn)
    key    the hash of the chat's content; held-out splits go by it
    place  the file and row it came from

beside `meta.json` (what it was made from, the template, counts) and `skipped.jsonl` (rows that are not used, and why).
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UserError
from ..files import file_hash, whole_folder, write_jsonl
from ..heads import chat
from ..progress import Progress
from .chats import Chat, Skipped, counted, files_of, listed, read_chats
from .groups import locked
from .masks import NOTHING, Masked, Masker, Unmaskable

if TYPE_CHECKING:
    from datasets import Dataset

FORMAT = 1  # counts up when the same chats would give other ids or masks
META = "meta.json"
CUT_OFF = "no reply within max_length"


@dataclass
class PrepareSettings:
    """Chats to token ids and loss masks."""

    input: list[str]
    """Files of chats (.jsonl, .json, plain or .gz); `shipped` stands for the conversations that come with headstart."""
    out: Path
    """The folder to make."""
    max_length: int = 2048
    """Tokens of a row; what lies behind them is cut off, and a row without a reply before that is dropped."""
    strict: bool = False
    """Refuse the whole set because of one bad row, instead of skipping and listing it."""
    drop_empty: bool = False
    """Skip rows with nothing to learn (no reply, an empty mask), which otherwise make the set refused."""

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise UserError(f"max_length is {self.max_length}; a row needs at least 2 tokens")


@dataclass
class Rows:
    """What a set of chats came to."""

    used: list[tuple[Chat, Masked]]
    skipped: list[Skipped]
    """Bad rows, rows with nothing to learn, and rows without a reply within max_length."""
    truncated: int = 0


def prepare(backbone: Any, settings: PrepareSettings) -> dict[str, Any]:
    """Make the folder `settings.out`, or say that it is there already; returns its meta data.

    The same files, tokenizer, template and settings find the finished folder; any other make it anew.

    Args:
        backbone: a `Backbone` or a tokenizer.

    Raises:
        UserError: a file is missing, a row has nothing to learn, no row is left, the tokenizer has no chat template, or
            `out` holds something else.
    """
    tokenizer = tokenizer_of(backbone)
    source = _source(tokenizer, settings)
    meta = _meta_or_none(settings.out)
    if meta is not None and meta["source"] == source:
        print(f"{settings.out}: already there\n{summary(meta)}")
        return meta
    with locked(settings.out):
        _remove_leftovers(settings.out)
        masker = Masker(tokenizer)
        chats, bad = read_chats(settings.input, settings.strict)
        rows = mask_chats(masker, chats, settings.max_length)
        _check(rows, settings)
        rows.skipped[:0] = bad
        meta = {"source": source, "template": masker.template, "counts": _counts(rows)}
        _save(rows, meta, settings.out)
    print(f"{settings.out}: made\n{summary(meta)}")
    if rows.skipped:
        print(listed(rows.skipped))
    return meta


def load_prepared(folder: str | Path, tokenizer: Any = None) -> Dataset:
    """The rows of a prepared folder, as numpy arrays.

    Args:
        tokenizer: if given (a `Backbone` does, too), the folder has to be made with the same tokenizer and template.

    Raises:
        UserError: there is no such folder, it is no prepared one, or it belongs to another tokenizer or template.
    """
    from datasets import load_from_disk

    folder = Path(folder)
    meta = read_meta(folder)
    if tokenizer is not None:
        for name, now in _fingerprint(tokenizer_of(tokenizer)).items():
            if (before := meta["source"].get(name)) != now:
                raise UserError(
                    f"{folder}: was prepared with another {name} ({before}, not {now}); prepare the chats again with "
                    "this backbone"
                )
    return load_from_disk(str(folder)).with_format("numpy")


def read_meta(folder: Path) -> dict[str, Any]:
    """What a prepared folder says of itself.

    Raises:
        UserError: there is no such folder, or it is no prepared one.
    """
    meta = _meta_or_none(folder)
    if meta is None:
        raise UserError(f"{folder}: no prepared chats are there; make them with `headstart data prepare`")
    return meta


def summary(meta: Mapping[str, Any]) -> str:
    """Counts and the template of prepared chats, in two lines."""
    counts, source = meta["counts"], meta["source"]
    extras = [
        f"{counts[name]:,} {text}"
        for name, text in (
            ("truncated", f"cut off at {source['max_length']:,} tokens"),
            ("duplicates", "chats more than once"),
            ("cuts", "ends of replies inside a token"),
        )
        if counts[name]
    ]
    line = f"{counts['rows']:,} rows, {share(counts['tokens'], counts['supervised'])}"
    return "; ".join([line, *extras]) + f"\ntemplate {source['template']}, tokenizer {source['tokenizer']}"


def share(tokens: int, supervised: int) -> str:
    """`1,234 tokens, 567 supervised (45.9%)`"""
    return f"{tokens:,} tokens, {supervised:,} supervised ({100 * supervised / max(tokens, 1):.1f}%)"


def tokenizer_of(backbone: Any) -> Any:
    """The tokenizer of a backbone, or the tokenizer itself.

    Raises:
        UserError: the backbone has none.
    """
    tokenizer = getattr(backbone, "tokenizer", backbone)
    if not callable(tokenizer):
        raise UserError("the backbone has no tokenizer, so chats cannot be turned into tokens")
    return tokenizer


def mask_chats(masker: Masker, chats: Sequence[Chat], max_length: int) -> Rows:
    """Ids and masks of chats, cut off at `max_length` tokens; what cannot be used is listed."""
    rows = Rows([], [])
    for one in Progress(len(chats), "chats", "prepare").over(chats):
        try:
            masked = masker(one.messages)
            if not any(masked.mask):
                raise Unmaskable(NOTHING, "the template marks no reply")
            if not any(masked.mask[:max_length]):
                raise Unmaskable(CUT_OFF, f"{len(masked.ids)} tokens")
        except Unmaskable as fault:
            rows.skipped.append(Skipped(one.file, one.row, fault.reason, fault.detail))
            continue
        rows.truncated += len(masked.ids) > max_length
        rows.used.append((one, Masked(masked.ids[:max_length], masked.mask[:max_length], masked.cuts)))
    return rows


def _check(rows: Rows, settings: PrepareSettings) -> None:
    """Refuse a set with rows that have nothing to learn, with bad rows if that is asked for, or without any row."""
    empty = [one for one in rows.skipped if one.reason == NOTHING]
    if empty and not settings.drop_empty:
        raise UserError(
            f"rows with nothing to learn: {listed(empty)}\nRemove them, have them answered "
            "(headstart data regenerate), or pass --drop-empty to leave them out"
        )
    refused = [one for one in rows.skipped if one.reason not in (NOTHING, CUT_OFF)]
    if refused and settings.strict:
        raise UserError(listed(refused))
    if not rows.used:
        raise UserError(f"no row is left to train on; {listed(rows.skipped)}")


def _counts(rows: Rows) -> dict[str, Any]:
    masks = [masked for _, masked in rows.used]
    return {
        "rows": len(masks),
        "tokens": sum(len(masked.ids) for masked in masks),
        "supervised": sum(sum(masked.mask) for masked in masks),
        "truncated": rows.truncated,
        "duplicates": sum(count - 1 for count in Counter(one.key for one, _ in rows.used).values()),
        "cuts": sum(masked.cuts for masked in masks),
        "skipped": counted(rows.skipped),
    }


def _source(tokenizer: Any, settings: PrepareSettings) -> dict[str, Any]:
    """All that determines the rows."""
    options = {name: value for name, value in asdict(settings).items() if name not in ("input", "out")}
    files = [[str(path), file_hash(path)] for path in files_of(settings.input)]
    return {"format": FORMAT, **_fingerprint(tokenizer), **options, "files": files}


def _fingerprint(tokenizer: Any) -> dict[str, str]:
    """What has to be equal for two tokenizers to render and tokenise alike."""
    template = chat.template_of(tokenizer)
    named = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if name in template}
    return {**chat.fingerprint(tokenizer), "special tokens": json.dumps(named, sort_keys=True)}


def _save(rows: Rows, meta: Mapping[str, Any], out: Path) -> None:
    import datasets

    features = datasets.Features(
        ids=datasets.List(datasets.Value("int32")),
        mask=datasets.List(datasets.Value("uint8")),
        key=datasets.Value("string"),
        place=datasets.Value("string"),
    )
    columns = {
        "ids": [np.array(masked.ids, np.int32) for _, masked in rows.used],
        "mask": [np.frombuffer(masked.mask, np.uint8) for _, masked in rows.used],
        "key": [one.key for one, _ in rows.used],
        "place": [one.place for one, _ in rows.used],
    }
    with whole_folder(out) as folder, _no_bars():
        datasets.Dataset.from_dict(columns, features).save_to_disk(folder)
        write_jsonl(folder / "skipped.jsonl", map(asdict, rows.skipped))
        (folder / META).write_text(json.dumps(meta, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def _no_bars() -> Iterator[None]:
    """Keep the progress bars of `datasets` away; ours is enough."""
    import datasets

    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def _meta_or_none(out: Path) -> dict[str, Any] | None:
    """The meta data of a prepared folder; None if nothing is there.

    Raises:
        UserError: something else is there.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    try:
        meta: dict[str, Any] = json.loads((out / META).read_text(encoding="utf-8"))
        if meta["source"]["format"] and meta["counts"]:
            return meta
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise UserError(f"{out}: holds something else than prepared chats; choose another folder, or remove it")


def _remove_leftovers(out: Path) -> None:
    """What a killed run left beside `out`; nobody else is at work on it while we hold its lock."""
    for path in out.parent.glob(f".{out.name}.*.part"):
        shutil.rmtree(path, ignore_errors=True)
