"""The backbone's features of prepared rows, written shard by shard: in parallel, resumable, whole at the end.

A shard is a fixed group of rows (`batches_of`), so that a run that was killed ends with the bytes of one that was not.
While the work goes on, `<out>.parts` holds the settings, the shards that are there, and beside each shard a note with
its size and hash, without which it does not count. In the end the folder is renamed to `out`.

Letters: n rows of a group, T positions, L positions with `last`, F taps, H hidden width.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError
from ..files import file_hash, whole_file, write_whole
from ..heads.backbone import Backbone
from ..heads.weights import write_tensors
from ..progress import Progress
from . import eight_bits
from .feature_key import Reads, Texts, difference
from .features import HEADER, SHARD, Shard, check_settings, damaged, read_header, shards_of, told
from .groups import discard, locked, parts_of, read_json

GROUP_TOKENS = 8192
SETTINGS = "settings.json"
OURS = ("[0-9]*.json", "[0-9]*.safetensors", ".*.part", HEADER, SETTINGS)  # a note never stays without its shard


class World(Protocol):
    """The processes at work, as accelerate has them."""

    @property
    def process_index(self) -> int: ...

    @property
    def num_processes(self) -> int: ...

    def wait_for_everyone(self) -> None: ...


class Alone:
    """A single process."""

    process_index, num_processes = 0, 1

    def wait_for_everyone(self) -> None:
        pass


def capture(
    backbone: Backbone,
    rows: Texts,
    numbers: Sequence[int],
    reads: Reads,
    settings: Mapping[str, Any],
    out: Path,
    *,
    world: World | None = None,
    together: Callable[[], AbstractContextManager[None]] = nullcontext,
    restart: bool = False,
    thorough: bool = False,
) -> None:
    """Make the folder `out`, or find it there; every process of the world calls it.

    Args:
        rows: each up to the last token that training proposes.
        numbers: of the rows, by which they are found again.
        settings: of `settings_of`.
        restart: replace other features that are there, finished or not.
        together: what the forwards of the backbone run in, where one waits for all processes.
        thorough: if they are there, read them whole and compare their hashes.

    Raises:
        UserError: `out` holds something else, another process is at work on it, or it would not fit on the disk.
    """
    world = world or Alone()
    first = world.process_index == 0
    groups = batches_of(np.array([len(rows[row][0]) for row in range(len(rows))]), settings["group_tokens"])
    with _prepared(out, settings, thorough, restart) if first else nullcontext():
        world.wait_for_everyone()
        if read_header(out) is not None:
            return
        _refuse_sharded(backbone)
        parts = parts_of(out)
        missing = [group for group in range(len(groups)) if not _noted(parts, group)]
        if first:
            sizes = _tell_sizes(rows, groups, missing, reads, settings, out)
            _check_room(sizes, out)
        world.wait_for_everyone()
        mine = missing[world.process_index :: world.num_processes]
        done = sum(len(groups[group]) for group in set(range(len(groups))) - set(missing))
        with Progress(len(rows), "rows", "features", done=done, enabled=first) as progress, together():
            for group in mine:
                _write(backbone, rows, numbers, groups[group], reads, settings, parts, group)
                progress.advance(len(groups[group]) * world.num_processes)
        world.wait_for_everyone()
        if first:
            _finish(parts, out, settings, backbone.name, len(groups))
    world.wait_for_everyone()


def _refuse_sharded(backbone: Backbone) -> None:
    """Where layers are spread over processes, these would have to go in step."""
    if any(hasattr(weight, "ds_id") or hasattr(weight, "device_mesh") for weight in backbone.model.parameters()):
        raise UserError(
            "the backbone's weights are spread over the processes, and its features are not made like that. Make them "
            "first, with `headstart data cache` and without ZeRO-3 or FSDP; then this run finds them"
        )


def batches_of(lengths: np.ndarray[Any, Any], tokens: int) -> list[list[int]]:
    """Rows of each group: longest first, so many that they come to `tokens` with their padding (or one longer row)."""
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= tokens:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


# -- a group -------------------------------------------------------------------------------------------------------


def _write(
    backbone: Backbone,
    rows: Texts,
    numbers: Sequence[int],
    group: Sequence[int],
    reads: Reads,
    settings: Mapping[str, Any],
    parts: Path,
    number: int,
) -> None:
    """A shard, whole, and then its note."""
    path = parts / SHARD.format(number)
    tensors = _captured(backbone, [rows[row] for row in group], reads, settings["store"])
    tensors["rows"] = torch.tensor([numbers[row] for row in group], dtype=torch.int32)
    with whole_file(path) as temporary:
        write_tensors(temporary, tensors, {"headstart": json.dumps(settings)})
        note = Shard(path.name, temporary.stat().st_size, file_hash(temporary), tensors["rows"].tolist())
    write_whole(_note(parts, number), json.dumps(asdict(note)))


@torch.no_grad()
def _captured(backbone: Backbone, texts: Sequence[tuple[Any, Any]], reads: Reads, store: str) -> dict[str, Tensor]:
    """The tensors of a shard, but for its rows' numbers."""
    lengths = [len(ids) for ids, _ in texts]
    ids = torch.zeros(len(texts), max(lengths), dtype=torch.long)
    for row, (tokens, _) in enumerate(texts):
        ids[row, : len(tokens)] = torch.from_numpy(np.asarray(tokens, dtype=np.int64))
    features = backbone.forward(ids.to(backbone.device), taps=reads.taps)
    found = [reads.positions(np.asarray(mask)) for _, mask in texts]
    last = torch.cat([features.last[row, torch.from_numpy(at).to(ids)] for row, (_, at) in enumerate(found)])
    tensors = {
        "ids": torch.cat([ids[row, :length] for row, length in enumerate(lengths)]).int(),
        "lengths": torch.tensor(lengths, dtype=torch.int32),
        "texts": torch.tensor([text for text, _ in found], dtype=torch.int32),
        "lasts": torch.tensor([len(at) for _, at in found], dtype=torch.int32),
        "last_at": torch.from_numpy(np.concatenate([at for _, at in found])).int(),
        **_stored("last", last, 1, store),
    }
    if features.taps is not None:
        taps = torch.cat([features.taps[row, :text] for row, (text, _) in enumerate(found)])
        tensors |= _stored("taps", taps, len(reads.taps), store)
    return tensors


def _stored(name: str, states: Tensor, number: int, store: str) -> dict[str, Tensor]:
    """(P, F * H) states, F of them a position, as they are written."""
    if store != "int8":
        return {name: states.to("cpu", getattr(torch, store)).contiguous()}
    parts = eight_bits.encoded(states.reshape(len(states) * number, -1))
    return {f"{name}.{part}": tensor.reshape(-1, number, *tensor.shape[1:]).cpu() for part, tensor in parts.items()}


# -- how large -----------------------------------------------------------------------------------------------------


def size_of(rows: Texts, group: Sequence[int], reads: Reads, settings: Mapping[str, Any]) -> int:
    """Bytes of the shard of a group."""
    store, width = settings["store"], settings["width"]
    state = eight_bits.size(width) if store == "int8" else getattr(torch, store).itemsize * width
    total = 4096  # about what the shard says of itself
    for row in group:
        ids, mask = rows[row]
        text, at = reads.positions(mask)
        total += state * (text * len(reads.taps) + len(at)) + 4 * (len(ids) + len(at) + 4)
    return total


def _tell_sizes(
    rows: Texts,
    groups: Sequence[Sequence[int]],
    missing: Sequence[int],
    reads: Reads,
    settings: Mapping[str, Any],
    out: Path,
) -> int:
    """Bytes that are still to be written; says so."""
    sizes = [size_of(rows, group, reads, settings) for group in groups]
    left = sum(sizes[group] for group in missing)
    there = len(groups) - len(missing)
    tokens = sum(len(rows[row][0]) for row in range(len(rows)))
    print(
        f"{out}: features of {len(rows):,} rows, {tokens:,} tokens, in {len(groups):,} shards ({settings['store']}): "
        f"{told(sum(sizes))}" + (f"; {there:,} shards are there already, {told(left)} to go" if there else "")
    )
    return left


def _check_room(needed: int, out: Path) -> None:
    folder = next(path for path in out.absolute().parents if path.exists())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"{out}: the features need {told(needed)}, and {told(free)} are free there. Choose another disk, the 8-bit "
            "form (int8), fewer rows or a smaller max_length"
        )


# -- the folder ----------------------------------------------------------------------------------------------------


@contextmanager
def _prepared(out: Path, settings: Mapping[str, Any], thorough: bool, restart: bool) -> Iterator[None]:
    """The first process: nothing to do where `out` is whole, else its lock, and a folder of parts that can go on."""
    if not restart and _whole(out, settings, thorough):
        yield
        return
    with locked(out):
        _open_parts(out, settings, thorough, restart)
        yield


def _whole(out: Path, settings: Mapping[str, Any], thorough: bool) -> bool:
    header = read_header(out)
    if header is None:
        return False
    check_settings(out, header, settings)
    bad = damaged(out, header, thorough=thorough)
    if bad and (change := difference(header["settings"], settings)):
        file, why = next(iter(bad.items()))
        raise UserError(
            f"{out / file}: {why}, and it is one of features that hold more than is asked for ({change}): mend them by "
            "the command that made them, or choose another folder"
        )
    return not bad


def _open_parts(out: Path, settings: Mapping[str, Any], thorough: bool, restart: bool) -> None:
    parts = parts_of(out)
    if restart:
        discard(parts, OURS)
        if read_header(out) is not None:
            os.replace(out, parts)
            discard(parts, OURS)
    if (parts / HEADER).is_file():  # killed between the header and the new name, or while it was taken apart
        _take_apart(parts, thorough=True)
    elif read_header(out) is not None:
        if parts.exists():
            raise UserError(f"{parts}: unfinished features are there beside damaged ones in {out}; remove one of them")
        os.replace(out, parts)
        _take_apart(parts, thorough)
    before = _settings_there(parts)
    if before is None:
        discard(parts, OURS)  # half-made
        write_whole(parts / SETTINGS, json.dumps(settings, indent=1) + "\n")
    elif change := difference(before, settings):
        raise UserError(
            f"{parts}: unfinished features with other settings are there: {change}. Repeat the earlier setting to go "
            "on with them, choose another folder, or throw them away (`headstart data cache ... --restart`)"
        )


def _take_apart(parts: Path, thorough: bool) -> None:
    """A finished folder back to parts: what is whole keeps its note, the rest goes."""
    header = read_header(parts)
    assert header is not None, "asked for a folder with a header"
    bad = damaged(parts, header, thorough=thorough)
    for number, shard in enumerate(shards_of(header)):
        if shard.file in bad:
            print(f"{parts / shard.file}: {bad[shard.file]}; it is made anew")
            (parts / shard.file).unlink(missing_ok=True)
        else:
            write_whole(_note(parts, number), json.dumps(asdict(shard)))
    write_whole(parts / SETTINGS, json.dumps(header["settings"], indent=1) + "\n")
    (parts / HEADER).unlink()


def _finish(parts: Path, out: Path, settings: Mapping[str, Any], name: str, groups: int) -> None:
    notes = [_noted(parts, group) for group in range(groups)]
    assert all(notes), "a process ended without its shards"
    header = {
        "backbone": Path(name).name,
        "settings": dict(settings),
        "bytes": sum(note["bytes"] for note in notes if note),
        "shards": notes,
    }
    write_whole(parts / HEADER, json.dumps(header, indent=1) + "\n")
    for path in (*(_note(parts, group) for group in range(groups)), parts / SETTINGS, *parts.glob(".*.part")):
        path.unlink()
    os.replace(parts, out)


def _settings_there(parts: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads((parts / SETTINGS).read_text(encoding="utf-8"))
        return found
    except (OSError, ValueError):
        return None


def _noted(parts: Path, group: int) -> Any:
    """What was noted of the shard of a group; None if nothing was."""
    return read_json(_note(parts, group))


def _note(parts: Path, group: int) -> Path:
    return parts / SHARD.format(group).replace(".safetensors", ".json")
