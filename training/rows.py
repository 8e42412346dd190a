"""The rows that a run learns from, by name: chats are prepared in the cache, and found there again."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from ..data.prepare import META, PrepareSettings, load_prepared, prepare, tokenizer_of
from ..data.store import Damaged, read_meta
from ..errors import UserError, first_line
from ..files import cache_folder, text_hash
from ..heads import chat
from .batches import Rows
from .recipe import DataSettings


def prepared_rows(data: DataSettings, backbone: Any) -> Rows:
    """All prepared rows. Chats are prepared in the cache, and found there again as long as nothing of them changes;
    what was damaged there is made anew.

    Args:
        backbone: one with a tokenizer, or the tokenizer itself.

    Raises:
        UserError: a file is missing or wrong, or a prepared folder is given beside others.
    """
    given = [Path(name).resolve() if Path(name).exists() else name for name in data.train]
    folders = _prepared(data)
    if folders and len(given) > 1:
        raise UserError(f"data.train names {folders[0]}, which is prepared; give it alone, or give chats only")
    if folders:
        return Rows.of(load_prepared(folders[0], backbone))
    asked = json.dumps([list(map(str, given)), data.max_length, chat.fingerprint(tokenizer_of(backbone))])
    settings = PrepareSettings(data.train, cache_folder() / "prepared" / text_hash(asked)[:16], data.max_length)
    try:
        return _found(backbone, settings)
    except Damaged as error:  # it is ours, and can be made again
        print(f"{error}\n{settings.out}: made anew", file=sys.stderr)
        shutil.rmtree(settings.out)
        return _found(backbone, settings)


def template_of(data: DataSettings) -> str | None:
    """Fingerprint of the template that a prepared folder was rendered by; None where rows are by the backbone's own."""
    folders = _prepared(data)
    return str(read_meta(Path(folders[0]))["source"]["template"]) if folders else None


def _prepared(data: DataSettings) -> list[str]:
    return [name for name in data.train if (Path(name) / META).is_file()]


def _found(backbone: Any, settings: PrepareSettings) -> Rows:
    prepare(backbone, settings)
    try:
        return Rows.of(load_prepared(settings.out, backbone))
    except (OSError, ValueError, IndexError, KeyError, AssertionError) as error:
        raise Damaged(f"{settings.out}: is damaged ({first_line(error)})") from None
