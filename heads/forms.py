"""The weights of a model, wherever and in whatever form they lie: offloaded, quantised, beside adapters.

What is quantised is read through the module that multiplies with it, so that no library's format is known here.

Letters: H width, V vocabulary.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn

from ..errors import UserError

_COLUMNS = 8  # of a quantised layer, that stand for it in a fingerprint


def unwrapped(model: Any) -> Any:
    """The causal LM itself, out of the wrapper that peft puts around it.

    Raises:
        UserError: its adapter writes tokens of its own before the text (prompt and prefix tuning).
    """
    config = getattr(model, "active_peft_config", None)
    if config is None:
        return model
    if config.is_prompt_learning:
        kind = str(getattr(config.peft_type, "value", config.peft_type)).lower().replace("_", " ")
        raise UserError(
            f"adapter of kind {kind}: puts tokens of its own before the text, which the forward of a tree does not "
            "have; adapters that change layers (LoRA and the like) work"
        )
    return model.get_base_model()


def adapters(model: nn.Module) -> list[str]:
    """Names of the adapters that change its layers just now, and are not merged into the weights."""
    return sorted({name for layer in model.modules() if _adapted(layer) for name in _active(layer)})


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What decides its output, as numbers: parameters by name, sorted; of adapters the active ones alone, of quantised
    layers a few columns of their matrix, which do not depend on how it is packed.

    Offloaded ones are there one at a time, until the next is asked for.
    """
    for name, (owner, leaf) in sorted(_owned(model).items()):
        if not _idle(model, name):
            with align_module_device(owner):
                yield name.replace(".base_layer.", "."), _numbers(owner, leaf)


def fingerprint(named: Iterable[tuple[str, Tensor]], through: torch.dtype = torch.bfloat16) -> str:
    """`Backbone.fingerprint` of parameters with their names, in the order of these."""
    digest = hashlib.sha256()
    for name, weight in named:
        digest.update(f"{name}{tuple(weight.shape)}".encode())
        flat = weight.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 1024)].to(through).to(torch.bfloat16).float()
        digest.update(sample.cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def weights_hash(model: nn.Module) -> str:
    """16 hex digits of every weight and stored buffer, each byte of it, and of which adapters are at work.

    `Backbone.fingerprint` looks at samples, in which a small adapter may not show. Offloaded ones are fetched one at a
    time.
    """
    digest = hashlib.sha256()
    shared: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    seen: dict[Any, str] = {}
    for name, tensor in sorted(model.state_dict().items()):
        place = (tensor.data_ptr(), *tensor.shape, *tensor.stride()) if not tensor.is_meta else shared.get(name, name)
        if tensor.numel() and seen.setdefault(place, name) != name:
            continue  # tied
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(_bytes(_fetched(model, name) if tensor.is_meta else tensor))
    for name, module in model.named_modules():
        if hasattr(module, "active_adapters"):  # peft's layers: the same weights, switched on and off
            words = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
            digest.update(repr([name, *(_told(getattr(module, word, None)) for word in words)]).encode())
    return digest.hexdigest()[:16]


def place_of(module: nn.Module) -> torch.device:
    """The device on which a module computes; its weights may lie elsewhere until it does."""
    hook = getattr(module, "_hf_hook", None)
    asked = [getattr(one, "execution_device", None) for one in getattr(hook, "hooks", [hook])]
    found = next((one for one in asked if isinstance(one, int | str | torch.device)), None)
    weights = itertools.chain(module.parameters(), module.buffers())
    return next(weights).device if found is None else torch.device(found)


def rows_of(projection: nn.Module) -> int:
    """V, the outputs of a linear layer."""
    count = getattr(projection, "out_features", None)
    return int(projection.get_parameter("weight").shape[0] if count is None else count)


def matrix_of(projection: nn.Module) -> Tensor:
    """(V, H) weight of a linear layer as numbers; of a quantised one what it multiplies with."""
    with align_module_device(projection):
        if not _packed(projection):
            weight = projection.weight
            assert isinstance(weight, Tensor)
            return weight
        known = [one.dtype for one in projection.parameters() if one.is_floating_point()]
        every = torch.arange(int(projection.in_features))  # type: ignore[arg-type]
        return _multiplied(projection, every, known[0] if known else torch.get_default_dtype())


def _owned(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """By name, the module that holds a weight and what it calls it; one that is tied to another stands there once."""
    shared: set[str] = set(getattr(model, "all_tied_weights_keys", None) or ())
    found: dict[str, tuple[nn.Module, str]] = {}
    known: set[int] = set()
    for path, module in model.named_modules():
        names = [name for name, _ in module.named_parameters(recurse=False)]
        if _packed(module) and "weight" not in names:
            names.append("weight")
        for leaf in names:
            name, weight = f"{path}.{leaf}".lstrip("."), module._parameters.get(leaf)
            if name not in shared and id(weight) not in known:
                found[name] = module, leaf
                known |= {id(weight)} if weight is not None else set()
    return found


def _packed(module: nn.Module) -> bool:
    """Whether it is a linear layer whose weight is no matrix of numbers."""
    if not hasattr(module, "in_features") or next(module.children(), None) is not None:
        return False
    weight = module._parameters.get("weight")
    return weight is None or not _plain(weight)


def _numbers(owner: nn.Module, leaf: str) -> Tensor:
    weight = getattr(owner, leaf, None)
    if leaf == "weight" and _packed(owner):
        count = int(owner.in_features)  # type: ignore[arg-type]
        return _multiplied(owner, torch.arange(0, count, max(1, count // _COLUMNS)), torch.float32)
    assert isinstance(weight, Tensor)
    own_form = type(weight) not in (Tensor, nn.Parameter) and hasattr(weight, "dequantize")
    return weight.dequantize() if own_form and weight.is_floating_point() else weight


@torch.no_grad()
def _multiplied(projection: nn.Module, columns: Tensor, dtype: torch.dtype) -> Tensor:
    """(V, n) these columns of a linear layer's matrix, from what it makes of unit vectors."""
    bias, device = getattr(projection, "bias", None), place_of(projection)
    units = nn.functional.one_hot(columns, int(projection.in_features)).to(device, dtype)  # type: ignore[arg-type]
    rows: Tensor = projection(units)
    return (rows if bias is None else rows - bias).T.contiguous()


def _plain(weight: Tensor) -> bool:
    return weight.is_floating_point() and type(weight) in (Tensor, nn.Parameter)


def _fetched(model: nn.Module, name: str) -> Tensor:
    """An offloaded weight or buffer by its name, from where it lies."""
    path, _, leaf = name.rpartition(".")
    with align_module_device(owner := model.get_submodule(path)):
        found = getattr(owner, leaf)
    assert isinstance(found, Tensor)
    return found


def _bytes(tensor: Tensor) -> Any:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else b""


def _told(value: Any) -> Any:
    """A setting of an adapter; methods (transformers has one of that name) say nothing."""
    return None if callable(value) else value


# -- adapters, as peft puts them into a model --------------------------------------------------------------------------


def _adapted(module: nn.Module) -> bool:
    return hasattr(module, "active_adapters") and (hasattr(module, "base_layer") or hasattr(module, "original_module"))


def _active(layer: Any) -> set[str]:
    """Adapters of a layer that its output depends on, beside its own weight."""
    return set() if layer.disable_adapters else set(layer.active_adapters) - set(getattr(layer, "merged_adapters", ()))


def _idle(model: nn.Module, name: str) -> bool:
    """Whether a parameter belongs to an adapter that changes nothing."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        layer = model.get_submodule(".".join(parts[:end]))
        if _adapted(layer) and parts[end] not in ("base_layer", "original_module"):
            return not _active(layer) & set(parts[end + 1 :])
    return False
