"""Heads to and from the formats of other tools.

- `FORMATS`: by name, what writes which method.
- `READERS`: by kind (see kinds.py), what reads it.
- `export_head`, `import_head`: the same with files.

Whatever is read goes through `assembly.py`: nothing is loaded that does not fit whole.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ..errors import UserError, nearest
from ..files import whole_folder, write_whole
from ..settings import build
from . import eagle3_read, eagle3_write, speculators_layout
from .assembly import assembled, outside
from .backbone import Backbone
from .base import DraftHead
from .kinds import kind_of, likeness
from .layouts import Config, Files, Found, Tensors
from .methods import METHODS
from .weights import PICKLES, read_config, read_tensors, tensor_shapes, weight_files

Writer = Callable[[Any, Tensors, Backbone | None], Files]
Reader = Callable[[Config, Tensors, Backbone | None], Found]

FORMATS: dict[str, dict[str, Writer]] = {
    "eagle": {"eagle3": eagle3_write.official},
    "specforge": {"eagle3": eagle3_write.specforge},
    "sglang": {"eagle3": eagle3_write.sglang},
    "modelopt": {"eagle3": eagle3_write.modelopt},
    "vllm": {"eagle3": eagle3_write.vllm},
    "speculators": {"eagle3": speculators_layout.write},
}
READERS: dict[str, Reader] = {
    "eagle3": eagle3_read.read,
    "speculators": speculators_layout.read,
}


def written(head: DraftHead, to: str, backbone: Backbone | None = None) -> Files:
    """What a format holds for a head.

    Args:
        backbone: None: the one that the head is bound to, if it is.

    Raises:
        UserError: there is no such format, it has no such heads, or it cannot say what this one is.
    """
    if to not in FORMATS:
        near = nearest(to, FORMATS)
        raise UserError(f"no format {to!r}; " + (f"did you mean {near}?" if near else f"there is {', '.join(FORMATS)}"))
    writer = FORMATS[to].get(head.method)
    if writer is None:
        able = [name for name, writers in FORMATS.items() if head.method in writers]
        raise UserError(
            f"the format {to} has no {head.method} heads; " + (f"there is {', '.join(able)}" if able else "none has")
        )
    tensors = {outside(name): one.detach().cpu().contiguous() for name, one in head.state_dict().items()}
    return writer(head.config, tensors, backbone or head._backbone)


def export_head(head: DraftHead, to: str, folder: str | Path, *, backbone: Backbone | None = None) -> Path:
    """Write a head in the format of another tool; the folder appears whole.

    Args:
        to: a name in `FORMATS`.
        backbone: for formats that hold something of it; None: the one that the head is bound to.

    Raises:
        UserError: as `written`; or the folder cannot be written, or is not empty.
    """
    folder = Path(folder)
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"{folder}: is not empty; give a new or empty folder")
    files = written(head, to, backbone)
    with whole_folder(folder) as part:
        write_files(part, files)
    return folder


def write_files(folder: Path, files: Files) -> None:
    """A config and one file of tensors, each tensor with memory of its own, since safetensors shares none."""
    tensors = {name: one.detach().cpu().contiguous().clone() for name, one in files.tensors.items()}
    if Path(files.weights).suffix in PICKLES:
        torch.save(tensors, folder / files.weights)
    else:
        save_file(tensors, folder / files.weights, metadata={"format": "pt"})
    write_whole(folder / "config.json", json.dumps(files.config, indent=2, ensure_ascii=False) + "\n")


def import_head(source: Path, backbone: Backbone | None = None) -> DraftHead:
    """A head from the folder or the file of another tool, not bound yet.

    Raises:
        UserError: it is none that is known, its files are damaged, incomplete or contradict each other, or it was made
            for another backbone.
    """
    config, files = read_config(source), _files(source)
    try:
        kind = kind_of(config, tensor_shapes(files))
    except UserError as error:
        raise UserError(f"{source}: no head that can be loaded; {error}") from None
    tensors = read_tensors(files)
    place = str(files[0] if len(files) == 1 else source)
    try:
        found = READERS[kind](config, tensors, backbone)
    except UserError as error:
        raise type(error)(f"{place}: {error}") from None
    for note in found.notes:
        warnings.warn(f"{place}: {note}", stacklevel=4)
    return _made(found, place)


def _files(source: Path) -> list[Path]:
    try:
        return weight_files(source)
    except UserError as error:
        looks = likeness(read_config(source), [path.name for path in source.iterdir()])
        raise UserError(f"{error}; it looks like {looks}") from None


def _made(found: Found, place: str) -> DraftHead:
    method = METHODS[found.method]
    settings = build(method.config_class, _plain(found.fields), lambda key: f"{place}, config.json")
    return assembled(method, settings, found.tensors, place, found.spell)


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()}
