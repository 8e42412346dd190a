"""The rows that a run learns from, by name: chats are prepared in the cache, and found there again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..data.prepare import META, PrepareSettings, load_prepared, prepare, tokenizer_of
from ..errors import UserError
from ..files import cache_folder, text_hash
from ..heads import chat
from .batches import Rows
from .recipe import DataSettings


def prepared_rows(data: DataSettings, backbone: Any) -> Rows:
    """All prepared rows. Chats are prepared in the cache, and found there again as long as nothing of them changes.

    Args:
        backbone: one with a tokenizer, or the tokenizer itself.

    Raises:
        UserError: a file is missing or wrong, or a prepared folder is given beside others.
    """
    given = [Path(name).resolve() if Path(name).exists() else name for name in data.train]
    folders = [name for name in data.train if (Path(name) / META).is_file()]
    if folders and len(given) > 1:
        raise UserError(f"data.train names {folders[0]}, which is prepared; give it alone, or give chats only")
    if folders:
        return Rows.of(load_prepared(folders[0], backbone))
    asked = json.dumps([list(map(str, given)), data.max_length, chat.fingerprint(tokenizer_of(backbone))])
    out = cache_folder() / "prepared" / text_hash(asked)[:16]
    prepare(backbone, PrepareSettings(input=data.train, out=out, max_length=data.max_length))
    return Rows.of(load_prepared(out, backbone))
