"""A LoRA on the backbone, trained together with a head: Medusa-2. It changes what the backbone says.

Source: Cai et al., "Medusa", arXiv 2401.10774, section 2.2: heads and backbone are trained jointly, here self-distilled
(section 2.3.2): with the adapter `off` the backbone is the teacher of itself. The layers are peft's (Hu et al., "LoRA",
arXiv 2106.09685); without peft there are none.

The adapter lies beside its head, in peft's own layout. A backbone that has taken one in bears its hash, in its name,
too: answers are those of the changed backbone, and equality means equality with these.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ..errors import UserError
from ..files import write_whole
from .backbone import Backbone
from .base import plain_name
from .weights import write_tensors

FOLDER = "adapter"
FILES = _CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@dataclass(kw_only=True)
class AdapterSettings:
    """Shape of the LoRA."""

    rank: int = 32
    """Rank of the two matrices beside each linear layer."""
    alpha: float = 16.0
    """What they add is scaled by alpha / rank."""
    targets: list[str] = field(default_factory=list)
    """Names of the linear layers, such as q_proj; without any, all but the output projection."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UserError(f"the adapter's rank is {self.rank}; expected 1 or more")


class Adapter:
    """A LoRA in training. The backbone's model is changed in place: with zero matrices at first, it says the same.

    Args:
        backbone: gets linear layers with the adapter in them; its own weights no longer learn.

    Raises:
        UserError: peft is not installed, the backbone has an adapter already, or no layer has such a name.
    """

    def __init__(self, backbone: Backbone, settings: AdapterSettings | None = None) -> None:
        if backbone.adapter:
            raise UserError(f"{backbone.name}: has taken in an adapter already; load the backbone anew")
        self.backbone, self.settings = backbone, settings or AdapterSettings()
        try:  # wraps the model, in which layers are replaced
            self.model = _peft().get_peft_model(backbone.model, _config(self.settings))
        except ValueError as error:
            raise UserError(f"{backbone.name}: no adapter for {self.settings.targets}: {error}") from None

    def parameters(self) -> list[nn.Parameter]:
        """What is trained, in fp32."""
        return [one for one in self.model.parameters() if one.requires_grad]

    @contextmanager
    def off(self) -> Iterator[None]:
        """Within, the backbone is the original. Ask it before the forward that is trained on, not behind it."""
        with self.model.disable_adapter():
            yield

    def remove(self) -> Backbone:
        """The original backbone again."""
        self.model.unload()
        return self.backbone

    def merge(self) -> Backbone:
        """The changed backbone as a plain model, which bears the adapter's hash."""
        digest = self.hash()
        self.model.merge_and_unload(safe_merge=True)
        self.backbone.adapter = digest
        self.backbone.name += f" + adapter {digest}"
        return self.backbone

    def tensors(self) -> dict[str, Tensor]:
        """The matrices, by the names that peft gives them in files."""
        found = _peft().get_peft_model_state_dict(self.model)
        return {name: one.detach().float().cpu().contiguous() for name, one in sorted(found.items())}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The reverse of `tensors`.

        Raises:
            UserError: one is missing, left over, or of another shape; names it.
        """
        shapes = {name: tuple(one.shape) for name, one in tensors.items()}
        wanted = {name: tuple(one.shape) for name, one in self.tensors().items()}
        for name in sorted(shapes.keys() | wanted.keys()):
            if shapes.get(name) != wanted.get(name):
                raise UserError(f"is no adapter for {self.backbone.name}; {name} differs")
        _peft().set_peft_model_state_dict(self.model, dict(tensors))

    def hash(self) -> str:
        """16 hex digits of matrices and scale."""
        digest = hashlib.sha256(f"{self.settings.rank} {self.settings.alpha}".encode())
        for name, one in self.tensors().items():
            digest.update(f"{name}{tuple(one.shape)}".encode() + one.numpy().tobytes())
        return digest.hexdigest()[:16]

    def read(self, folder: Path, expected: str) -> None:
        """Take the matrices of a stored one, which has this hash.

        Raises:
            UserError: they cannot be read, are for other layers, or are others.
        """
        path = folder / _WEIGHTS
        try:
            self.load(load_file(path))
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: cannot be read ({error})") from None
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
        if self.hash() != expected:
            raise UserError(f"{folder}: holds adapter {self.hash()}; the head beside it was trained with {expected}")

    def save(self, folder: Path) -> None:
        """Both files, into a folder that is made."""
        folder.mkdir()
        found = _plain(self.settings) | {"base_model_name_or_path": plain_name(self.backbone.name)}
        write_whole(folder / _CONFIG, json.dumps(found, indent=2, sort_keys=True) + "\n")
        write_tensors(folder / _WEIGHTS, self.tensors())


def apply(backbone: Backbone, folder: Path, expected: str) -> Backbone:
    """Take a stored adapter into the backbone's weights: from here on it is another model.

    Args:
        expected: the hash that its head knows.

    Raises:
        UserError: files are missing, damaged, no plain LoRA, or another one's; peft is missing.
    """
    if backbone.adapter == expected:
        return backbone
    adapter = Adapter(backbone, stored(folder))
    try:
        adapter.read(folder, expected)
    except UserError:
        adapter.remove()
        raise
    return adapter.merge()


def stored(folder: Path) -> AdapterSettings:
    """Settings of a stored adapter; whatever else peft knows has to have its default.

    Raises:
        UserError: they cannot be read, or are those of another kind of adapter.
    """
    path = folder / _CONFIG
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        targets = found["target_modules"]
        settings = AdapterSettings(
            rank=found["r"], alpha=found["lora_alpha"], targets=[] if targets == _ALL else list(targets)
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: is no adapter's config ({error!r})") from None
    plain = _plain(settings)
    for key in sorted(plain.keys() | found.keys()):
        free = key in ("target_modules", "base_model_name_or_path", "peft_version")
        if not free and found.get(key, plain.get(key)) != plain.get(key):
            raise UserError(f"{path}: {key} is {found[key]!r}; only a plain LoRA can be taken in")
    return settings


_ALL = "all-linear"


def _config(settings: AdapterSettings) -> Any:
    return _peft().LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=settings.targets or _ALL)


def _plain(settings: AdapterSettings) -> dict[str, Any]:
    """peft's config as JSON values."""
    plain: dict[str, Any] = json.loads(json.dumps(_config(settings).to_dict(), default=sorted))
    return plain


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise UserError("adapters on the backbone need peft: pip install 'headstart[peft]'") from None
    return peft
