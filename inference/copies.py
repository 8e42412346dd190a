"""Copies of a backbone that draft for it: its first layers alone, or its weights in eight bits.

Neither changes the backbone. The first shares every weight with it.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

from torch import nn

from ..errors import UserError
from ..heads.backbone import Backbone


def shallow(backbone: Backbone, layers: int) -> Backbone:
    """The backbone's first `layers` layers below its own norm and projection (LayerSkip, Elhoushi et al. 2024, sec. 4).

    The modules are shared. The copy needs a cache of its own, so true tokens pass through these layers twice.

    Raises:
        UserError: the backbone has not more layers than that.
    """
    if not 1 <= layers < backbone.num_layers:
        most = backbone.num_layers - 1
        have = f"{backbone.name} has {backbone.num_layers} layers"
        raise UserError(f"exit:{layers}: {have}; choose exit:1 to exit:{most}")
    decoder = backbone.model.get_decoder()
    short = _copied(decoder)
    short.config = _cut(decoder.config, layers)
    for name, child in decoder.named_children():
        if isinstance(child, nn.ModuleList) and len(child) == backbone.num_layers:
            setattr(short, name, nn.ModuleList(list(child)[:layers]))
    model = _replaced(backbone.model, decoder, short)
    model.config = _cut(model.config, layers)
    return Backbone(model, backbone.tokenizer, f"{backbone.name}, first {layers} layers")


def quantized(backbone: Backbone) -> Backbone:
    """A copy whose decoder multiplies in int8: weights by row, activations as they come (dynamic quantisation).

    Embedding and projection stay as they are, in fp32.

    Raises:
        UserError: the backbone is not on the CPU, or this torch has no int8 kernels.
    """
    if backbone.device.type != "cpu":
        raise UserError(f"int8: works on the CPU; {backbone.name} is on {backbone.device}")
    try:
        from torch.ao.quantization import per_channel_dynamic_qconfig, quantize_dynamic
    except ImportError:
        raise UserError("int8: this torch has no torch.ao.quantization any more; use another drafter") from None
    model = copy.deepcopy(backbone.model).float()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that these functions will move to another package
        try:
            quantize_dynamic(model.get_decoder(), {nn.Linear: per_channel_dynamic_qconfig}, inplace=True)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise UserError(f"int8: this processor has no kernels for it ({error})") from error
    return Backbone(model, backbone.tokenizer, f"{backbone.name} in int8")


def _copied(module: Any) -> Any:
    """A module of its own with the same children."""
    twin = copy.copy(module)
    twin.__dict__["_modules"] = dict(module._modules)
    return twin


def _replaced(module: Any, old: nn.Module, new: nn.Module) -> Any:
    """A copy of `module` in which `new` stands where `old` does; whatever lies on the way is copied, too."""
    if module is old:
        return new
    twin = _copied(module)
    for name, child in module.named_children():
        if any(part is old for part in child.modules()):
            twin._modules[name] = _replaced(child, old, new)
    return twin


def _cut(config: Any, layers: int) -> Any:
    """A copy of a config, of nested ones too, that knows of these layers only."""
    short = copy.deepcopy(config)
    text = short.get_text_config(decoder=True)
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    return short
