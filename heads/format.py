"""The own format of a head: a folder with `config.json`, `model.safetensors` and a card, read strictly.

- `save_head`: a head to a folder, whole or not at all.
- `load_head`: a folder or Hub id to a head; every tensor is checked, and the head against its backbone.

Tensor names are those of the module, the vocabulary map as `d2t` and `t2d` (see vocab.py). Weights are read from
safetensors only, never from pickles, and never with something missing or left over.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..errors import UserError
from ..files import whole_folder, write_whole
from ..settings import build, dump
from .adapter import FOLDER as ADAPTER
from .adapter import Adapter, apply
from .assembly import assembled, outside, some
from .backbone import Backbone
from .base import DraftHead
from .card import Card
from .exchange import import_head
from .hub import fetched, is_id
from .methods import METHODS
from .weights import read_config, write_tensors

FORMAT, VERSION = "headstart", 1
LAYER_IDS = (
    "taps count hidden states as transformers does: 0 is the embedding output, k the output of decoder layer k - 1, "
    "all before the final norm"
)
_CONFIG, _WEIGHTS, _CARD = "config.json", "model.safetensors", "README.md"
TUNING = "tuning.json"  # what was measured of the head beside it (inference/tuned.py)


@dataclass(kw_only=True)
class Manifest:
    """What `config.json` holds."""

    format: str
    """Always "headstart"."""
    format_version: int
    """Raised when older readers would go wrong."""
    method: str
    """A name in METHODS."""
    config: dict[str, Any]
    """The fields of the method's config."""
    layer_ids: str
    """How layers are counted, in words."""
    versions: dict[str, str]
    """Versions of what wrote it."""
    provenance: dict[str, Any]
    """What the writer says of its training."""


def save_head(
    head: DraftHead,
    folder: str | Path,
    *,
    weights: Mapping[str, Tensor] | None = None,
    provenance: Mapping[str, Any] | None = None,
    adapter: Adapter | None = None,
) -> Path:
    """Write a head, in the dtype it has; the folder appears whole, and takes the place of an older head.

    Args:
        weights: its tensors by name, where the module itself holds pieces of them; None: those of the module.
        provenance: how it was trained, as JSON values; goes into the config and the card.
        adapter: on the backbone that it was trained on; lies beside it in a folder `adapter`.

    Raises:
        UserError: the folder cannot be written, or holds something else.
    """
    folder = Path(folder)
    if head.config.adapter_hash and not adapter:
        raise UserError(
            f"{folder}: the head was trained with adapter {head.config.adapter_hash} on the backbone, and cannot be "
            "saved without it: save_head(..., adapter=...)"
        )
    config = replace(head.config, adapter_hash=adapter.hash()) if adapter else head.config
    strange = sorted(path.name for path in folder.iterdir() if path.name not in _FILES) if folder.is_dir() else []
    if strange:
        raise UserError(f"{folder}: holds {some(strange)}, which a head would replace; give a new or empty folder")
    manifest = Manifest(
        format=FORMAT,
        format_version=VERSION,
        method=head.method,
        config=dump(config),
        layer_ids=LAYER_IDS,
        versions={name: metadata.version(name) for name in ("headstart", "torch", "transformers")},
        provenance=dict(provenance or {}),
    )
    tensors = {
        outside(name): tensor.detach().cpu().contiguous() for name, tensor in (weights or head.state_dict()).items()
    }
    with whole_folder(folder) as part:
        write_tensors(part / _WEIGHTS, tensors)
        write_whole(part / _CONFIG, json.dumps(asdict(manifest), indent=2, ensure_ascii=False) + "\n")
        write_whole(part / _CARD, str(_card(manifest)))
        if adapter:
            adapter.save(part / ADAPTER)
        (folder / TUNING).unlink(missing_ok=True)  # it says nothing of other weights
    return folder


def load_head(
    source: str | Path,
    backbone: Backbone | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    revision: str | None = None,
    token: str | None = None,
    adapter: bool | None = None,
) -> DraftHead:
    """A head from a folder or a Hub id.

    Args:
        source: the folder of a head or of the run that trained it, "user/name" or "user/name@revision".
        backbone: what it is to be bound to; None: `head.bind` has to be called before it is used.
        dtype: None: the backbone's; without one, as stored.
        device: None: the backbone's; without one, the CPU.
        revision: of a Hub repository: branch, tag or commit.
        token: for it; None: HF_TOKEN, or that of `hf auth login`.
        adapter: of a head that was trained on a changed backbone (Medusa-2): True takes the adapter beside it into the
            backbone in memory, whose answers are then other ones; False lets it draft for the backbone as it is.

    Raises:
        UserError: there is no such head, it is of another format, its files are damaged, incomplete or contradict each
            other, or it was made for another backbone.
    """
    folder = place_of(source, revision, token)
    own = folder.is_dir() and is_own(folder)
    head = _own(folder) if own else import_head(folder, backbone)
    if backbone is not None:
        head.bind(backbone)
        if own or adapter:
            _adapt(head, backbone, folder, adapter)
        dtype, device = dtype or backbone.dtype, device or backbone.device
    head.source = str(folder.resolve())
    head.home = (folder if folder.is_dir() else folder.parent) if Path(source).exists() else None
    return head.to(device=device, dtype=dtype).eval()


def is_own(folder: Path) -> bool:
    """Whether a folder says that it is in the own format."""
    return read_config(folder).get("format") == FORMAT


def _own(folder: Path) -> DraftHead:
    manifest = _manifest(folder)
    method = METHODS.get(manifest.method)
    if method is None:
        raise UserError(f"{folder / _CONFIG}: method is {manifest.method!r}; known are {', '.join(METHODS)}")
    config = build(method.config_class, manifest.config, lambda key: f"{folder / _CONFIG}, config")
    return assembled(method, config, _tensors(folder / _WEIGHTS), str(folder / _WEIGHTS))


def provenance_of(source: str | Path, revision: str | None = None) -> dict[str, Any]:
    """How a head was trained, as its files say; those of other tools say nothing.

    Raises:
        UserError: as `load_head`.
    """
    folder = place_of(source, revision)
    return _manifest(folder).provenance if folder.is_dir() and is_own(folder) else {}


_FILES = {_CONFIG, _WEIGHTS, _CARD, ADAPTER, TUNING}


def _adapt(head: DraftHead, backbone: Backbone, folder: Path, wanted: bool | None) -> None:
    """Take the adapter in, if that is wanted; a backbone is changed by nobody who did not ask for it."""
    expected, place = head.config.adapter_hash, folder / ADAPTER
    if bool(expected) != place.is_dir():
        there = "is" if place.is_dir() else "is not"
        raise UserError(f"{folder}: {_CONFIG} names {expected or 'no'} adapter, and the folder {ADAPTER} {there} there")
    if wanted and not expected:
        raise UserError(f"{folder}: has no adapter; adapter=True is for heads that were trained on a changed backbone")
    if expected and wanted is None and backbone.adapter != expected:
        raise UserError(
            f"{folder}: this head was trained with a LoRA on the backbone (Medusa-2), which changes its answers; "
            "say adapter=True (--adapter) to take it into the backbone, or adapter=False to draft for it as it is"
        )
    if wanted:
        apply(backbone, place, expected)
        head.bind(backbone)  # anew: what is borrowed may have changed


def place_of(source: str | Path, revision: str | None = None, token: str | None = None) -> Path:
    """The folder or file of a source, for a run that of its head; what is on the Hub is fetched.

    Raises:
        UserError: there is no such thing.
    """
    if Path(source).is_file():
        path = Path(source)
        return path.parent if path.name == _WEIGHTS and is_own(path.parent) else path
    if Path(source).is_dir():
        inner = Path(source) / "head"
        return inner if (inner / _CONFIG).is_file() and not (Path(source) / _CONFIG).exists() else Path(source)
    if not is_id(source):
        raise UserError(
            f"{source}: no such folder; a head is a folder or a file of weights, or a Hub id like user/name"
        )
    return fetched(str(source), revision, token)


def _manifest(folder: Path) -> Manifest:
    path = folder / _CONFIG
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{folder}: no headstart head, there is no {_CONFIG}; it holds {some(_names(folder))}"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise UserError(f"{folder}: no head in headstart's own format, {_CONFIG} does not say so")
    if found.get("format_version") != VERSION:
        raise UserError(
            f"{path}: format_version is {found.get('format_version')!r}, this headstart reads {VERSION}; "
            "update headstart, or save the head again with this one"
        )
    return build(Manifest, found, lambda key: str(path))


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        # copies are aligned in memory, as a new head's weights are: same kernels, same bits
        return {name: tensor.clone() for name, tensor in load_file(path).items()}
    except FileNotFoundError:
        raise UserError(
            f"{path}: no such file, so the head has no weights; it holds {some(_names(path.parent))}"
        ) from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: cannot be read, it may be cut short ({error})") from None


def card_of(folder: Path) -> Card:
    """What a folder in the own format says of itself.

    Raises:
        UserError: its config cannot be read.
    """
    return _card(_manifest(folder))


def _card(manifest: Manifest) -> Card:
    said = {name: getattr(manifest, name) for name in ("method", "config", "provenance", "versions")}
    return Card(**said)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
