"""The folder of cached features: what is in it, whether it is whole, and reading it back.

A folder holds `features.json` (what the features were made from, and size and hash of each shard) and the shards, each
the rows of one fixed group that went through the backbone together. In `000017.safetensors`

    rows       int32 (n,)       numbers of the rows in the prepared set
    lengths    int32 (n,)       their tokens
    ids        int32            the tokens themselves, row behind row
    texts      int32 (n,)       of how many first positions of each row taps are there
    lasts      int32 (n,)       at how many positions `last` is there
    last_at    int32            which these are, row behind row
    taps       (P, F * H)       hidden states before any norm, low to high, row behind row; missing without taps
    last       (L, H)           the last hidden state, after the final norm

where the two large ones may be in eight bits, as `taps.q`, `taps.scale` and so on (`eight_bits.py`), a state each. The
metadata of each shard repeats what the features were made from. The teacher's logits are not there: they are the
backbone's projection of `last`.

Letters: n rows of a shard, B rows, T positions, P, L positions of a shard, F taps, H hidden width.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import UserError
from ..files import file_hash
from ..heads.backbone import Features
from . import eight_bits
from .feature_key import difference

HEADER = "features.json"
SHARD = "{:06d}.safetensors"
OPEN = 64  # shards kept open
AGAIN = "run `headstart data cache` again with the same settings: only what is missing or damaged is made anew"


@dataclass
class Shard:
    """A shard as the header has it."""

    file: str
    bytes: int
    sha256: str
    rows: list[int]
    """Numbers of its rows in the prepared set."""


def read_header(folder: Path) -> dict[str, Any] | None:
    """What a folder of features says of itself; None if there is no such folder, or an empty one.

    Raises:
        UserError: something else is there.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    try:
        header: dict[str, Any] = json.loads((folder / HEADER).read_text(encoding="utf-8"))
        if header["settings"]["format"] and shards_of(header):
            return header
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise UserError(f"{folder}: holds something else than cached features; choose another folder, or remove it")


def shards_of(header: Mapping[str, Any]) -> list[Shard]:
    return [Shard(**one) for one in header["shards"]]


def check_settings(folder: Path, header: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """The features have to be those of these settings, or hold them.

    Raises:
        UserError: they do not; says in what, with both values.
    """
    if not covers(header["settings"], settings):
        change = difference(header["settings"], settings)
        raise UserError(
            f"{folder}: these features are not those of this backbone, these rows and these settings: {change}. Repeat "
            "the earlier setting, choose another folder, or have them replaced (`headstart data cache ... --restart`)"
        )


def covers(there: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether features made with one setting hold those of another: all taps of it, `last` wherever it is read, and
    nothing else is different. So those of an EAGLE-3 head are good for Medusa heads."""
    more = {**wanted, "taps": there.get("taps"), "last at": there.get("last at")}
    if difference(there, more):
        return False
    return {*wanted["taps"]} <= {*there["taps"]} and there["last at"] in ("every position", wanted["last at"])


def damaged(folder: Path, header: Mapping[str, Any], *, thorough: bool) -> dict[str, str]:
    """What is wrong with shards, by file: missing, of another length, or (if thorough) of another hash."""
    found = {}
    for shard in shards_of(header):
        if why := _damage(folder / shard.file, shard, thorough):
            found[shard.file] = why
    return found


def _damage(path: Path, shard: Shard, thorough: bool) -> str:
    try:
        size = path.stat().st_size
        if size != shard.bytes:
            return f"has {size:,} bytes, and was written with {shard.bytes:,}"
        if thorough and (found := file_hash(path)) != shard.sha256:
            return f"has hash {found[:16]}, and was written with {shard.sha256[:16]}"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return ""


class FeatureCache:
    """Cached features, read row by row. Each shard is checked against its hash when it is first opened.

    Args:
        settings: what is read; None: whatever the folder has, which may be more (`covers`).
        dtype: what is read is given in it.

    Raises:
        UserError: there is no such folder, it has other features, or shards are missing or cut.
    """

    def __init__(
        self, folder: str | Path, settings: Mapping[str, Any] | None = None, *, dtype: torch.dtype = torch.float32
    ) -> None:
        self.folder, self.dtype = Path(folder), dtype
        header = read_header(self.folder)
        if header is None:
            raise UserError(f"{folder}: no cached features are there; make them with `headstart data cache`")
        if settings is not None:
            check_settings(self.folder, header, settings)
        if bad := damaged(self.folder, header, thorough=False):
            file, why = next(iter(bad.items()))
            raise UserError(f"{self.folder / file}: {why} ({len(bad)} of the shards); {AGAIN}")
        self.settings: dict[str, Any] = header["settings"]
        stored = self.settings["taps"]
        read = stored if settings is None else settings["taps"]
        self.chosen = None if read == stored else [stored.index(tap) for tap in read]
        self.taps: int = len(read)
        self.width: int = self.settings["width"]
        self.shards = shards_of(header)
        self.place = {row: (at, k) for at, shard in enumerate(self.shards) for k, row in enumerate(shard.rows)}
        self.opened: OrderedDict[int, _Opened] = OrderedDict()
        self.verified: set[int] = set()

    def summary(self) -> str:
        """What it holds, in a line."""
        rows, size = sum(len(shard.rows) for shard in self.shards), sum(shard.bytes for shard in self.shards)
        stored = self.settings["taps"]
        states = f"hidden states {stored}, the last" if stored else "the last hidden state"
        return (
            f"{self.folder}: {states} of {rows:,} rows, {self.settings['store']}, "
            f"{told(size)} in {len(self.shards):,} shards, all whole"
        )

    def identity(self) -> str:
        """16 hex digits that stand for every byte of it."""
        return hashlib.sha256("".join(shard.sha256 for shard in self.shards).encode()).hexdigest()[:16]

    def read(self, places: Sequence[tuple[int, int, int]], rows: int, width: int) -> Features:
        """Features laid out as a batch (rows, width, .), on the CPU; zero where none are stored.

        Args:
            places: for each cached row its number, the row of the batch, and the position there that it begins at.
        """
        last = torch.zeros(rows, width, self.width, dtype=self.dtype)
        taps = torch.zeros(rows, width, self.taps * self.width, dtype=self.dtype) if self.taps else None
        for number, row, start in places:
            at, k = self.place[number]
            shard = self._open(at)
            positions, states = shard.last(k)
            last[row, start + positions] = states.to(self.dtype)
            if taps is not None:
                text = shard.taps(k)
                if self.chosen is not None:
                    text = text.view(len(text), -1, self.width)[:, self.chosen].flatten(1)
                taps[row, start : start + len(text)] = text.to(self.dtype)
        return Features(last, taps)

    def ids(self, number: int) -> Tensor:
        """(T,) int32 tokens of a row."""
        at, k = self.place[number]
        return self._open(at).ids(k)

    def _open(self, at: int) -> _Opened:
        if at in self.opened:
            self.opened.move_to_end(at)
            return self.opened[at]
        shard = self.shards[at]
        path = self.folder / shard.file
        if why := _damage(path, shard, at not in self.verified):
            raise UserError(f"{path}: {why}; {AGAIN}")
        self.verified.add(at)
        while len(self.opened) >= OPEN:
            self.opened.popitem(last=False)
        self.opened[at] = _Opened(path, self.settings)
        return self.opened[at]


def told(size: int) -> str:
    """Bytes as `2.61 GiB`."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size / 1024:.1f} KiB"


class _Opened:
    """A shard, mapped into memory."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        opened: Any = safe_open  # which says nothing of types
        try:
            self.file = opened(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: cannot be read ({error}); {AGAIN}") from None
        if change := difference(json.loads(self.file.metadata()["headstart"]), settings):
            raise UserError(f"{path}: belongs to other features than the folder's {HEADER} says: {change}")
        get = self.file.get_tensor
        self.keys = set(self.file.keys())
        self.last_at = get("last_at").long()
        self.bounds = {
            name: torch.cat((torch.zeros(1, dtype=torch.long), get(name).long().cumsum(0))).tolist()
            for name in ("lengths", "texts", "lasts")
        }

    def ids(self, k: int) -> Tensor:
        tokens: Tensor = self.file.get_slice("ids")[slice(*self.bounds["lengths"][k : k + 2])]
        return tokens

    def last(self, k: int) -> tuple[Tensor, Tensor]:
        """Positions (l,) of row k, and `last` there (l, H)."""
        start, stop = self.bounds["lasts"][k : k + 2]
        return self.last_at[start:stop], self._states("last", start, stop)

    def taps(self, k: int) -> Tensor:
        """(p, F * H) taps of the first positions of row k."""
        return self._states("taps", *self.bounds["texts"][k : k + 2])

    def _states(self, name: str, start: int, stop: int) -> Tensor:
        if name in self.keys:
            states: Tensor = self.file.get_slice(name)[start:stop]
            return states
        q = self.file.get_slice(f"{name}.q")[start:stop]  # (p, F, H)
        parts = {part: self.file.get_slice(f"{name}.{part}")[start:stop].flatten(0, 1) for part in eight_bits.PARTS}
        return eight_bits.decoded(parts).reshape(len(q), -1)
