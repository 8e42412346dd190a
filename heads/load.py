"""A backbone or a tokenizer by name: built in, a folder, on the Hub, or in memory."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from ..errors import UserError, first_line
from .backbone import Backbone
from .fetch import BUILT_IN, fetch


def load_backbone(
    source: Any,
    *,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    revision: str | None = None,
    attention: str | None = None,
    device_map: Any = None,
    quantize: Any = None,
    trust_remote_code: bool = False,
) -> Backbone:
    """A backbone from a built-in name, a folder, a Hub id, or a model already in memory.

    Args:
        source: for example "smollm2-135m" (fetched at first use), "path/to/folder", "user/model", or a causal LM.
        dtype: a torch dtype or its name ("bfloat16"); None keeps the stored one.
        device: where to put it; None leaves it on the CPU.
        attention: "sdpa" or "eager"; None lets transformers choose.
        device_map: how accelerate spreads it over the devices of this machine ("auto"), in place of `device`.
        quantize: "8bit" or "4bit" (bitsandbytes), "int8" (torchao, weights alone), or a config of transformers; weights
            that are stored in such a form are loaded in it without.

    Raises:
        UserError: there is no such model or device, or the model cannot be loaded.
    """
    if isinstance(source, Backbone):
        return source
    if isinstance(source, nn.Module):
        return Backbone(source)
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": _dtype(dtype), "revision": revision, "trust_remote_code": trust_remote_code}
    _check_device(device)
    if attention is not None:
        options["attn_implementation"] = attention
    if device_map is not None:
        options["device_map"], device = device_map, None
    if quantize is not None:
        options["quantization_config"] = _quantization(quantize)
        options.setdefault("device_map", {"": device or "cpu"})
        device = None
    try:
        model = AutoModelForCausalLM.from_pretrained(_place(source), **options)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise UserError(f"{source}: cannot be loaded as a causal LM: {first_line(error)}") from error
    tokenizer, untold = None, ""
    try:
        tokenizer = load_tokenizer(source, revision=revision, trust_remote_code=trust_remote_code)
    except UserError as error:
        untold = str(error)  # token ids still work, and texts say what is missing
    if device is not None:
        _move(model, device, source)
    backbone = Backbone(model, tokenizer, name=str(source))
    backbone.untold, backbone.revision = untold, _commit_of(source, revision)
    if dtype is None:
        backbone.stored = backbone.dtype
    return backbone


def _commit_of(source: Any, revision: str | None) -> str:
    """The commit in the Hub's cache that a Hub id was loaded from; empty for anything else."""
    from huggingface_hub import try_to_load_from_cache

    if source in BUILT_IN or Path(source).exists():
        return ""
    found = try_to_load_from_cache(str(source), "config.json", revision=revision)
    return Path(found).parent.name if isinstance(found, str) else ""


def sketch_backbone(source: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Backbone:
    """A backbone by its shape alone, on the meta device, with its tokenizer; no weights are read.

    Raises:
        UserError: there is no such model or tokenizer.
    """
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    made = Backbone(sketch_model(source, **options), load_tokenizer(source, **options), name=source)
    made.hash = "unknown"
    return made


def sketch_model(source: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """A causal LM by its config alone, on the meta device.

    Raises:
        UserError: there is no such model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(_place(source), **options)
        with torch.device("meta"):
            make: Any = AutoModelForCausalLM.from_config
            return make(config, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{source}: cannot be read as a causal LM: {first_line(error)}") from error


def load_tokenizer(source: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a built-in name, a folder or a Hub id; no weights are loaded.

    Raises:
        UserError: there is none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(_place(source), revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{source}: no tokenizer could be loaded: {first_line(error)}") from error


def _place(source: str) -> str:
    """The folder or Hub id that a name stands for."""
    if source in BUILT_IN:
        return str(fetch(source))
    name = str(source)
    if not Path(name).exists() and (name.startswith((".", "/", "~")) or name.count("/") != 1):
        raise UserError(
            f"{name}: no such folder; built-in backbones are {', '.join(BUILT_IN)}, Hub ids look like user/model"
        )
    return name


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | str:
    if dtype is None:
        return "auto"
    if isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(dtype, dtype), None)
    if not isinstance(found, torch.dtype):
        raise UserError(f"dtype is {dtype!r}; choose float32, bfloat16 or float16")
    return found


def _eight_bit() -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_8bit=True)  # type: ignore[no-untyped-call]


def _four_bit() -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")  # type: ignore[no-untyped-call]


def _int8() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


_QUANTIZED: dict[str, tuple[str, Callable[[], Any]]] = {
    "8bit": ("bitsandbytes", _eight_bit),
    "4bit": ("bitsandbytes", _four_bit),
    "int8": ("torchao", _int8),
}
"""Forms of weights by name: the package that makes them, and its config."""


def _quantization(form: Any) -> Any:
    if not isinstance(form, str):
        return form
    if form not in _QUANTIZED:
        raise UserError(f"quantize is {form!r}; choose {', '.join(_QUANTIZED)}, or give a config of transformers")
    package, config = _QUANTIZED[form]
    if find_spec(package) is None:
        raise UserError(f"quantize={form} needs {package}: pip install {package}")
    return config()


def _move(model: Any, device: str | torch.device, source: Any) -> None:
    """To a device; what is quantised may be bound to the one it was loaded on."""
    if all(weight.device.type == torch.device(device).type for weight in model.parameters()):
        return
    try:
        model.to(device)
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"{source}: cannot be moved to {device}; give device_map instead ({first_line(error)})"
        ) from error


def _check_device(device: str | torch.device | None) -> None:
    """Before a long load: a device that is not there, or that holds no values."""
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device {device}: cannot be used here ({first_line(error)})") from error
