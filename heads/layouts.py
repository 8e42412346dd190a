"""What the layouts of other tools share: what is found in their files, what is written, and plain refusals.

A layout is two pure functions. Reading takes the config and the tensors of a file and gives the fields of one of our
configs and tensors by our names; writing goes the other way. Whether the tensors are those of the config is checked by
`assembly.py`, for every layout alike.

Letters: H width of the backbone, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from .backbone import Backbone
from .base import HeadConfig, plain_name

Config = dict[str, Any]
Tensors = dict[str, Tensor]


class BackboneNeededError(UserError):
    """Something stands in the backbone alone."""


@dataclass
class Found:
    """A head as its files describe it."""

    method: str
    fields: Config
    """Of the method's config."""
    tensors: Tensors
    """By our names, vocabulary maps included."""
    spell: Callable[[str], str] = str
    """Our name of a tensor to the file's, for messages."""
    notes: list[str] = field(default_factory=list)
    """What had to be assumed."""


@dataclass
class Files:
    """What is written: `config.json` and one file of weights."""

    config: Config
    tensors: Tensors
    weights: str = "model.safetensors"
    model: Backbone | None = None
    """A model that is written with it, as one."""


def flag(config: Config, name: str) -> bool:
    """A switch of a config; off where nothing is said.

    Raises:
        UserError: it is neither on nor off; "false" in quotes is on for most readers.
    """
    value = config.get(name)
    if value is not None and value not in (True, False):
        raise UserError(f"{name} is {value!r}; expected true or false, without quotes")
    return bool(value)


def number(config: Config, name: str) -> int | None:
    """A size or count of a config; None where nothing is said.

    Raises:
        UserError: it is no whole number of 1 or more.
    """
    value = config.get(name)
    if value is None:
        return None
    try:
        whole = int(value) if not isinstance(value, bool) and float(value).is_integer() else 0
    except (TypeError, ValueError, OverflowError):
        whole = 0
    if whole < 1:
        raise UserError(f"{name} is {value!r}; expected a whole number of 1 or more")
    return whole


def refuse(what: str, reasons: Iterable[str]) -> None:
    """Raise a UserError with all reasons, if there are any."""
    said = list(reasons)
    if said:
        raise UserError(f"{what}: " + "; ".join(said))


def full_vocabulary(config: HeadConfig, who: str = "it proposes") -> Iterator[str]:
    """The fault of a draft vocabulary, for readers that know none."""
    if config.draft_vocab_size != config.vocab_size:
        yield (
            f"{who} {config.draft_vocab_size} of {config.vocab_size} tokens, and all are read: train without a "
            "draft vocabulary"
        )


def backbone_facts(backbone: Backbone | None, name: str = "") -> Config:
    """The fields that every config has, as far as they are known; no hash is claimed for a head from elsewhere."""
    if backbone is None:
        return {"num_layers": 0, "backbone": name}
    return {"num_layers": backbone.num_layers, "backbone": name or plain_name(backbone.name)}


def needed(backbone: Backbone | None, what: str) -> Backbone:
    """The backbone, without which `what` cannot be known."""
    if backbone is None:
        raise BackboneNeededError(f"{what}; give the backbone, too (load_head(folder, backbone), or --backbone)")
    return backbone


@torch.no_grad()
def embedding_of(backbone: Backbone) -> Tensor:
    """(V, H) what the backbone makes of each token, its own scale included."""
    return backbone.embed(torch.arange(_rows(backbone), device=backbone.device)).detach().cpu()


def scales_embedding(backbone: Backbone) -> bool:
    """Whether the embedding is more than a row of its weight: engines that share it hand the row alone."""
    return not same(embedding_of(backbone), backbone.model.get_input_embeddings().weight.detach().cpu())


@torch.no_grad()
def plain_projection(backbone: Backbone) -> bool:
    """Whether logits are rows times hidden state and nothing else."""
    probe = torch.linspace(-60, 60, 7)
    return backbone.output_bias is None and torch.equal(backbone.finish(probe), probe)


def same(one: Tensor, other: Tensor) -> bool:
    """Equal, or equal as soon as the finer of the two is rounded to the dtype of the other."""
    if one.shape != other.shape or not (one.is_floating_point() and other.is_floating_point()):
        return False
    other = other.to(one.device)
    return torch.equal(one, other.to(one.dtype)) or torch.equal(one.to(other.dtype), other)


def _rows(backbone: Backbone) -> int:
    return int(backbone.model.get_input_embeddings().weight.shape[0])
