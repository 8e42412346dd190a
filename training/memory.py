"""How much memory a run takes on each process, by arithmetic.

Letters: N positions of the largest forward, padding counted; M_d anchors of depth d in it; H hidden width, W width of
the head, I of an MLP, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..heads import packed
from ..heads.backbone import Backbone
from ..heads.base import DraftHead
from .log import memory
from .optimizer import by_muon
from .recipe import Recipe
from .summed import CHUNK, ELSEWHERE

SLACK = 1.1  # what the allocator holds besides, of what a step allocates
LAYOUTS = ("whole", "zero1", "zero2", "zero3", "fsdp")


@dataclass
class Shape:
    """What the memory of a run depends on."""

    recipe: Recipe
    backbone: Backbone
    """Without weights, on the meta device, is enough."""
    head: DraftHead
    """So it is for the head."""
    dtype: torch.dtype
    """Of the backbone."""
    autocast: bool
    device: str
    positions: int
    """N."""
    anchors: list[int]
    """M_d by depth."""
    processes: int = 1
    layout: str = "whole"


def parts(shape: Shape, libraries: float = 0.0) -> dict[str, float]:
    """Bytes on each process at the peak, of a step or while the backbone is loaded, by what they are for.

    Args:
        libraries: bytes that the process holds before anything is loaded, where they count.
    """
    return max(_loading(shape, libraries), _step(shape, libraries), key=lambda made: sum(made.values()))


def _loading(shape: Shape, libraries: float) -> dict[str, float]:
    """A file is read whole, beside what is made of it; on a GPU the file does not count."""
    if shape.device != "cpu" or shape.backbone.device.type != "meta":
        return {}
    weights = list(shape.backbone.model.parameters())
    stored = float(sum(one.numel() * one.dtype.itemsize for one in weights))
    made = float(sum(one.numel() for one in weights) * shape.dtype.itemsize)
    return {"libraries": libraries, "backbone": made, "the file that it is loaded from": stored}


def _step(shape: Shape, libraries: float) -> dict[str, float]:
    forward = _forward(shape)
    step = {"activations of the head": SLACK * _activations(shape), "logits": SLACK * _logits(shape)}
    step["gradients"] = _gradients(shape)
    if shape.recipe.adapter.rank is not None:
        step["what the backbone keeps for its gradient"] = _learning(shape)
    if forward > sum(step.values()):  # the backbone's forward comes first, and nothing of the head is there yet
        step = {"the backbone's forward": forward}
    return {"libraries": libraries, **_kept(shape), "features": SLACK * _features(shape), **step}


def head_bytes(shape: Shape) -> float:
    """The head's weights in fp32."""
    return 4.0 * sum(one.numel() for one in shape.head.parameters())


def moment_bytes(shape: Shape) -> float:
    """The optimizer's state, whole: two averages of a trained number, or one for what Muon moves."""
    return sum(
        4.0 * one.numel() * (1 if by_muon(shape.recipe.optim, name, one) else 2)
        for name, one in shape.head.named_parameters()
        if one.requires_grad
    )


def _kept(shape: Shape) -> dict[str, float]:
    """What is there all the time."""
    share, width = 1 / shape.processes, shape.dtype.itemsize
    model, layers = shape.backbone.model, shape.backbone.layers
    sharded = sum(one.numel() for one in layers.parameters()) if shape.layout in ("zero3", "fsdp") else 0
    whole = sum(one.numel() for one in model.parameters()) - sharded
    gathered = 2 * sharded / max(1, len(layers)) if sharded else 0  # the layer at work, and the next one
    vocab = shape.head.vocab
    rows = 0 if vocab.full else vocab.size * shape.backbone.hidden_size * width
    borrowed = 1 if any(name.startswith("lm_head") for name, _ in shape.head.named_parameters()) else 2
    return {
        "backbone": width * (whole + gathered + share * sharded),
        "its projection for the draft vocabulary": borrowed * rows,
        "head": head_bytes(shape) * (share if shape.layout == "fsdp" else 1),
        "optimizer": moment_bytes(shape) * (1 if shape.layout == "whole" else share),
        "adapter, its gradients and moments": adapter_bytes(shape),
    }


def adapter_bytes(shape: Shape) -> float:
    """The matrices of a LoRA on the backbone in fp32, their gradients and two averages of these."""
    rank = shape.recipe.adapter.rank or 0
    return 16.0 * rank * sum(one.in_features + one.out_features for one in _adapted(shape))


def _adapted(shape: Shape) -> list[nn.Linear]:
    """The backbone's linear layers beside which a LoRA learns."""
    targets = shape.recipe.adapter.targets
    linear = [(name, one) for name, one in shape.backbone.layers.named_modules() if isinstance(one, nn.Linear)]
    return [one for name, one in linear if not targets or name.rpartition(".")[2] in targets]


def _learning(shape: Shape) -> float:
    """What the layers of a backbone that learns keep at a position: what each LoRA reads, in fp32, the norms' fp32
    states, queries, keys, values, and three states of the MLP."""
    config, hidden = shape.backbone.config, shape.backbone.hidden_size
    inner = int(getattr(config, "intermediate_size", None) or 4 * hidden)
    layer = 16 * hidden + (12 * hidden + 5 * inner) * shape.dtype.itemsize
    read = 4 * sum(one.in_features for one in _adapted(shape))
    return SLACK * float(shape.positions * (read + len(shape.backbone.layers) * layer))


def _gradients(shape: Shape) -> float:
    trained = 4.0 * sum(one.numel() for one in shape.head.parameters() if one.requires_grad)
    return trained / shape.processes if shape.layout in ("zero2", "zero3", "fsdp") else trained


def _features(shape: Shape) -> float:
    """Of the largest forward: the last hidden states, and those that the head taps, twice while they are joined."""
    width = shape.backbone.hidden_size * shape.dtype.itemsize
    return float(shape.positions * width * (1 + len(shape.head.taps)))


def _forward(shape: Shape) -> float:
    """What a layer of the backbone computes at most, and the tapped states before they are joined."""
    config, hidden = shape.backbone.config, shape.backbone.hidden_size
    inner = int(getattr(config, "intermediate_size", None) or 4 * hidden)
    floats = 3 * inner + (6 + len(shape.head.taps)) * hidden
    return SLACK * float(shape.positions * floats * shape.dtype.itemsize)


def _logits(shape: Shape) -> float:
    """Of a chunk: the teacher's, p in fp32, the head's, their gradients in blocks and joined."""
    most = CHUNK.get(shape.device, ELSEWHERE)
    rows = min(shape.anchors[0], max(1, most // shape.head.vocab.size))
    product = 2 if shape.autocast else 4
    return float(rows * shape.head.vocab.size * (shape.dtype.itemsize + 4 + 3 * product))


def _activations(shape: Shape) -> float:
    """What the head keeps for its backward pass."""
    config: Any = shape.head.config
    if not hasattr(config, "intermediate_size") or shape.head.max_depth is not None:
        return _blocks(shape)
    product, spared = 2 if shape.autocast else 4, shape.recipe.batch.checkpointing
    width = int(getattr(config, "own_width", 0) or config.hidden_size)
    queries = config.num_attention_heads * config.head_dim
    entries = 2 * config.num_key_value_heads * config.head_dim
    layers = int(getattr(config, "head_layers", 1))
    inside = 0 if spared else 4 * config.intermediate_size * product + 2 * width * 4 + (width + queries) * product
    total = float(shape.positions * (6 * width * 4 + 2 * width * product + layers * entries * (4 + product)))
    if layers > 1:
        total += (layers - 1) * shape.positions * (inside + (queries + width) * 4)
    for depth, count in enumerate(shape.anchors):
        attention = (2 * queries + (1 + depth) * entries) * 4
        total += count * (layers * (inside + attention) + 7 * width * 4 + 2 * width * product)
    return total + _ahead(shape)


def _ahead(shape: Shape) -> float:
    """Scores of a block of queries, which are computed anew and then thrown away."""
    return 3 * 4.0 * (1 << 21) if shape.device == "cpu" and shape.positions > 256 else 0.0


def _blocks(shape: Shape) -> float:
    """The same for heads of residual blocks."""
    config: Any = shape.head.config
    hidden, blocks = config.hidden_size, getattr(config, "num_blocks", 1)
    product = 2 if shape.autocast else 4
    inside = 0 if shape.recipe.batch.checkpointing else blocks * hidden * (2 * 4 + 2 * product)
    joined = shape.head.method == "hydra"
    return float(
        sum(
            count * (hidden * 3 * 4 + inside + (depth + 2) * hidden * (4 + product) * joined)
            for depth, count in enumerate(shape.anchors)
        )
    )


def resident() -> float:
    """Bytes that this process holds now."""
    try:
        with open("/proc/self/statm") as file:
            return float(int(file.read().split()[1]) * resource.getpagesize())
    except OSError:  # no Linux: the most it ever held
        return memory(torch.device("cpu")) * 2**30


def free_bytes(device: torch.device) -> float:
    """Memory of this machine that a run could have; on a GPU, that GPU's."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return float(packed.free_bytes() or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
