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

from ..errors import UserError, first_line, nearest
from ..files import whole_folder, write_whole
from ..settings import build
from . import (
    eagle1_layouts,
    eagle3_read,
    eagle3_write,
    hydra_layout,
    medusa_layouts,
    mlp_speculator_layout,
    speculators_layout,
)
from .assembly import assembled, outside
from .backbone import Backbone
from .base import DraftHead
from .kinds import TITLES, kind_of, likeness, wrapper_of
from .layouts import Config, Files, Found, Tensors
from .methods import METHODS
from .weights import PICKLES, read_config, read_tensors, tensor_shapes, weight_files, write_tensors

Writer = Callable[[Any, Tensors, Backbone | None], Files]
Reader = Callable[[Config, Tensors, Backbone | None], Found]

_WRITERS: dict[str, Mapping[str, Writer]] = {
    "eagle3": eagle3_write.WRITERS | speculators_layout.WRITERS,
    "eagle1": eagle1_layouts.WRITERS,
    "medusa": medusa_layouts.WRITERS,
    "hydra": hydra_layout.WRITERS,
}
_NAMES = (
    *("eagle", "specforge", "sglang", "modelopt", "vllm", "speculators"),
    *("medusa", "medusa-v2", "medusa-2", "tensorrt-llm", "hydra"),
)
FORMATS: dict[str, dict[str, Writer]] = {
    name: {method: writers[name] for method, writers in _WRITERS.items() if name in writers} for name in _NAMES
}
READERS: dict[str, Reader] = {
    "eagle3": eagle3_read.read,
    "eagle1": eagle1_layouts.read,
    "speculators": speculators_layout.read,
    "medusa": medusa_layouts.read,
    "medusa-2": medusa_layouts.read,
    "medusa-vllm": medusa_layouts.read_vllm,
    "medusa-trt": medusa_layouts.read_tensorrt,
    "hydra": hydra_layout.read,
    "mlp_speculator": mlp_speculator_layout.read,
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
    _refuse_adapter(head, to, backbone or head._backbone)
    tensors = {outside(name): one.detach().cpu().contiguous() for name, one in head.state_dict().items()}
    return writer(head.config, tensors, backbone or head._backbone)


def _refuse_adapter(head: DraftHead, to: str, backbone: Backbone | None) -> None:
    """A head for a changed backbone is worth nothing without the change."""
    wanted = head.config.adapter_hash
    if wanted and (to != "medusa-2" or backbone is None or backbone.adapter != wanted):
        raise UserError(
            f"the head was trained with adapter {wanted} on its backbone, and {to} would serve it with another model; "
            "export it to medusa-2, which holds the changed backbone with its heads (in Python: load_head(..., "
            "adapter=True) first)"
        )


def export_head(head: DraftHead, to: str, folder: str | Path, *, backbone: Backbone | None = None) -> Path:
    """Write a head in the format of another tool; the folder appears whole.

    Args:
        to: a name in `FORMATS`.
        backbone: for formats that hold something of it; None: the one that the head is bound to.

    Raises:
        UserError: as `written`; or the folder cannot be written, or is not empty.
    """
    folder = Path(folder)
    check_empty(folder)
    files = written(head, to, backbone)
    with whole_folder(folder) as part:
        write_files(part, files)
    return folder


def check_empty(folder: Path) -> None:
    """Nothing may be written over.

    Raises:
        UserError: the folder holds something.
    """
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"{folder}: is not empty; give a new or empty folder")


def write_files(folder: Path, files: Files) -> None:
    """A config and one file of tensors, each tensor with memory of its own, since safetensors shares none."""
    tensors = {name: one.detach().cpu().contiguous().clone() for name, one in files.tensors.items()}
    config = files.config
    if files.model is not None:
        config = _model_beside(folder, files.model, tensors, files.weights) | config
    if Path(files.weights).suffix in PICKLES:
        torch.save(tensors, folder / files.weights)
    else:
        write_tensors(folder / files.weights, tensors)
    write_whole(folder / "config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def _model_beside(folder: Path, model: Backbone, tensors: Tensors, shard: str) -> Config:
    """A whole model whose index names one shard more; its config."""
    model.model.save_pretrained(folder)
    if model.tokenizer is not None:
        model.tokenizer.save_pretrained(folder)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        said = json.loads(index.read_text(encoding="utf-8"))
    else:
        names = tensor_shapes([folder / "model.safetensors"])
        said = {"metadata": {}, "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    said["weight_map"] |= dict.fromkeys(tensors, shard)
    write_whole(index, json.dumps(said, indent=2) + "\n")
    config: Config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config


def import_head(source: Path, backbone: Backbone | None = None) -> DraftHead:
    """A head from the folder or the file of another tool, not bound yet.

    Raises:
        UserError: it is none that is known, its files are damaged, incomplete or contradict each other, or it was made
            for another backbone.
    """
    config, files = read_config(source), _files(source)
    try:
        shapes = tensor_shapes(files)
        wrapper = wrapper_of(shapes)
        kind = kind_of(config, [name.removeprefix(wrapper) for name in shapes])
    except UserError as error:
        raise UserError(f"{source}: no head that can be loaded; {error}") from None
    wanted = f"{wrapper}medusa_head." if kind == "medusa-2" else wrapper
    tensors = read_tensors(files, lambda name: name.startswith(wanted))
    tensors = {name.removeprefix(wrapper): one for name, one in tensors.items()}
    return read_head(kind, config, tensors, backbone, str(files[0] if len(files) == 1 else source))


def read_head(kind: str, config: Config, tensors: Tensors, backbone: Backbone | None, place: str) -> DraftHead:
    """A head from what its files hold.

    Args:
        kind: a key of `READERS`.
        place: for messages.

    Raises:
        UserError: something is missing, left over, misshapen, contradicts itself, or is another backbone's.
    """
    try:
        found = READERS[kind](config, tensors, backbone)
    except UserError as error:
        raise type(error)(f"{place} ({TITLES[kind]}): {error}") from None
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(
            f"{place} ({TITLES[kind]}): config.json or a tensor is of another kind than this format has ({reason})"
        ) from error
    for note in found.notes:
        warnings.warn(f"{place}: {note}", stacklevel=5)
    method = METHODS[found.method]
    settings = build(method.config_class, _plain(found.fields), lambda key: f"{place}, config.json")
    return assembled(method, settings, found.tensors, place, found.spell)


def _files(source: Path) -> list[Path]:
    try:
        return weight_files(source)
    except UserError as error:
        looks = likeness(read_config(source), [path.name for path in source.iterdir()])
        raise UserError(f"{error}; it looks like {looks}") from None


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()}
