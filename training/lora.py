"""A trained head for a new domain by LoRA: small matrices beside its own, which stay as they are.

Source: Hu et al. 2021, arXiv 2106.09685, in the implementation of peft, which is imported when it is asked for. The
head that is written in the end is an ordinary one: what was learned is added to its matrices.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..errors import UserError, nearest
from ..heads.base import DraftHead
from .recipe import LoraSettings

ADAPTER = "default"


def adapt(head: DraftHead, settings: LoraSettings) -> None:
    """Give the linear layers of a head their small matrices, in place; nothing else of it is trained from here on.

    Raises:
        UserError: peft is missing, or a layer is named that the head has not.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise UserError("lora.rank is set, and peft is missing: pip install 'headstart[peft]'") from None
    linear = [name for name, module in head.named_modules() if isinstance(module, nn.Linear)]
    targets = [name for name in linear if not settings.targets or _named(name, settings.targets)]
    for target in settings.targets:
        if not any(_named(name, [target]) for name in linear):
            hint = nearest(target, {part for name in linear for part in (name, name.rpartition(".")[2])})
            raise UserError(
                f"lora.targets has {target}; the linear layers of this {head.method} head are {', '.join(linear)}"
                + (f"; did you mean {hint}?" if hint else "")
            )
    rank = settings.rank or 0
    alpha = rank if settings.alpha is None else settings.alpha
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, lora_dropout=0.0)
    inject_adapter_in_model(config, head, adapter_name=ADAPTER)


@torch.no_grad()
def merged(head: DraftHead, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The tensors of an adapted head as those of an ordinary one: W + alpha / rank * B A.

    Args:
        weights: its tensors by name, whole; returned as they are where the head is none.
    """
    layers = {name: module for name, module in head.named_modules() if hasattr(module, "lora_A")}
    made = {}
    for name, tensor in weights.items():
        layer, _, part = name.partition(".base_layer.")
        if layer in layers and part:
            if part == "weight":
                a, b = (weights[f"{layer}.lora_{one}.{ADAPTER}.weight"] for one in "AB")
                scale: float = layers[layer].scaling[ADAPTER]
                tensor = tensor + scale * (b @ a)
            made[f"{layer}.{part}"] = tensor
        elif layer.partition(".lora_")[0] not in layers:
            made[name] = tensor
    return made


def _named(name: str, targets: list[str]) -> bool:
    """Is this layer, or the last part of its name, among these?"""
    return any(name == target or name.endswith(f".{target}") for target in targets)
