"""The files of a head in whatever layout: its config, and its tensors from safetensors, `.bin` or `.pt`, whole or in
shards. Pickles are read with `weights_only`: they may hold tensors and nothing that runs.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..errors import UserError, first_line

PICKLES = (".bin", ".pt", ".pth")
_KNOWN = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
    "medusa_lm_head.safetensors", "medusa_lm_head.pt", "hydra_lm_head.safetensors", "hydra_lm_head.pt",
)  # fmt: skip
_INDEX = ".index.json"


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """A file of safetensors, in place of `save_file`: newer versions of that write a file of their own beside `path`,
    which a kill leaves there, make it readable for the writer alone, and hide what the system says of a full disk.

    Args:
        metadata: of the file; with several keys, their order changes from run to run. None: as transformers has it.
    """
    path.write_bytes(save(dict(tensors), metadata=dict(metadata or {"format": "pt"})))


def read_config(source: Path) -> dict[str, Any]:
    """`config.json` of a folder, or beside a file of weights; empty where there is none.

    Raises:
        UserError: it is no JSON object.
    """
    path = (source if source.is_dir() else source.parent) / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: holds no JSON object")
    return found


def weight_files(source: Path) -> list[Path]:
    """The files that hold a head's tensors, in order; an index is replaced by the shards that it names.

    Raises:
        UserError: there is none, or it is not clear which; a shard is missing.
    """
    if source.is_file():
        return [source]
    here = {path.name: path for path in source.iterdir() if path.is_file()}
    chosen = next((here[name] for name in _KNOWN if name in here), None)
    if chosen is None:
        weights = sorted(p for p in here.values() if p.suffix == ".safetensors") or sorted(
            p for p in here.values() if p.suffix in PICKLES
        )
        if len(weights) != 1:
            names = ", ".join(p.name for p in weights[:5]) or "no weights (model.safetensors, pytorch_model.bin, …)"
            raise UserError(f"{source}: holds {names}; name the file of the head's weights")
        chosen = weights[0]
    return _shards(chosen) if chosen.name.endswith(_INDEX) else [chosen]


def _shards(index: Path) -> list[Path]:
    try:
        placed = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        names = sorted(set(placed.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index}: cannot be read as an index of shards ({first_line(error)})") from None
    shards = [index.parent / Path(str(name)).name for name in names]
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise UserError(f"{index}: names {', '.join(missing[:3])}, which the folder does not hold")
    if gone := sorted(placed.keys() - tensor_shapes(shards).keys()):
        raise UserError(f"{index}: names {', '.join(gone[:3])}, which none of its shards holds")
    return shards


def tensor_shapes(files: list[Path]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every tensor by name; safetensors are not read for it, pickles are."""
    found = {}
    for path in files:
        if path.suffix in PICKLES:
            shapes = {name: (tuple(one.shape), _dtype(one.dtype)) for name, one in _unpickled(path).items()}
            found.update(shapes)
            continue
        with _opened(path) as weights:
            for name in weights.keys():  # noqa: SIM118
                part = weights.get_slice(name)
                found[name] = (tuple(part.get_shape()), str(part.get_dtype()))
    return found


def read_tensors(files: list[Path], wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
    """The wanted tensors of these files, each with memory of its own.

    Raises:
        UserError: a file is damaged, holds other things than tensors, or a name stands in two of them.
    """
    found: dict[str, Tensor] = {}
    for path in files:
        for name, tensor in _read(path, wanted):
            if name in found:
                raise UserError(f"{path}: holds {name} once more")
            found[name] = tensor.clone().contiguous()
    return found


def _read(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    if path.suffix in PICKLES:
        yield from ((name, tensor) for name, tensor in _unpickled(path).items() if wanted(name))
        return
    with _opened(path) as weights:
        for name in weights.keys():  # noqa: SIM118
            if wanted(name):
                yield name, weights.get_tensor(name)


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: cannot be read as safetensors, it may be cut short ({error})") from None


def _unpickled(path: Path) -> dict[str, Tensor]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        refused = re.search(r"(?:GLOBAL|global) (\S+)", str(error))
        raise UserError(
            f"{path}: holds more than tensors ({refused[1] if refused else first_line(error)}), and pickles that could "
            "run code are not opened; load it where you trust it, and save its state dict as safetensors"
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise UserError(f"{path}: cannot be read, it may be cut short ({first_line(error)})") from None
    for inner in ("state_dict", "model_state_dict"):
        if isinstance(found, dict) and isinstance(found.get(inner), dict):
            found = found[inner]
    if not isinstance(found, dict) or not found or not all(isinstance(one, Tensor) for one in found.values()):
        raise UserError(f"{path}: holds no mapping of names to tensors")
    return found


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
