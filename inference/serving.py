"""`headstart plan --serve`: what drafting adds to the memory of a served backbone, before anything is loaded.

All by arithmetic, from configs: weights by shape (on the meta device), caches by what one token leaves in them, slots
by rows and length as `Engine` takes them, and the logits of a verification forward.

Letters: B rows, T tokens of a row, N tree nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from ..errors import UserError
from ..heads.backbone import Backbone
from ..heads.base import DraftHead
from ..heads.format import load_head
from ..heads.load import sketch_model
from ..heads.methods import METHODS
from ..heads.vocab import DraftVocab
from ..settings import build

GIB = 2**30
SIZES: dict[str, tuple[int, int, int, int, int, int, int, bool]] = {
    "0.5b": (896, 24, 14, 2, 64, 4864, 151936, True),
    "1b": (2048, 16, 32, 8, 64, 8192, 128256, True),
    "3b": (3072, 28, 24, 8, 128, 8192, 128256, True),
    "7b": (4096, 32, 32, 32, 128, 11008, 32000, False),
    "8b": (4096, 32, 32, 8, 128, 14336, 128256, False),
    "13b": (5120, 40, 40, 40, 128, 13824, 32000, False),
    "14b": (5120, 48, 40, 8, 128, 13824, 152064, False),
    "32b": (5120, 64, 40, 8, 128, 27648, 152064, False),
    "70b": (8192, 80, 64, 8, 128, 28672, 128256, False),
}
"""Sizes as they are usual: hidden width, layers, query heads, key and value heads, their width, MLP, vocabulary, tied
embeddings (Qwen2.5 for 0.5, 14 and 32 billion, Llama 2 for 7 and 13, Llama 3 for the others)."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DRAFTED = ("eagle3", "medusa")  # heads that are shown where none is named


@dataclass
class ServeSettings:
    """What drafting adds to the memory of a served backbone."""

    serve: bool = False
    """Plan serving, not training: what a head, a draft model and their caches add. Nothing is loaded."""
    backbone: str | None = None
    """The backbone: a folder, a Hub id (its config alone is read) or a usual size, such as 8b."""
    head: str | None = None
    """The head: a folder or Hub id, or a method for one as it would be trained (eagle3, medusa, ...); without it,
    eagle3 and medusa."""
    draft: str | None = None
    """A draft model: as for --backbone; without it, a usual size of a tenth or less, where there is one."""
    draft_vocab: int | None = None
    """Tokens that a head named by its method can propose; without it, 32,000 or all."""
    rows: int = 8
    """Requests at once."""
    length: int = 4096
    """Tokens of each, prompt and answer."""
    nodes: int = 16
    """Drafts of a tree, at most."""
    precision: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Number format of weights and caches."""
    json: bool = False
    """Print one JSON object in place of a table."""

    def __post_init__(self) -> None:
        for name, least in (("rows", 1), ("length", 1), ("nodes", 1), ("draft_vocab", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"{name} is {value}; it has to be at least {least}")


class Part(NamedTuple):
    """Something that is there while serving; bytes."""

    name: str
    weights: float
    token: float
    """Of its cache, for each token."""
    slots: float
    """The same for all rows, at their full length and with a tree."""
    extra: float = 0.0
    """What a round holds besides."""

    @property
    def total(self) -> float:
        return self.weights + self.slots + self.extra


def serving(settings: ServeSettings) -> list[Part]:
    """The backbone first, then what each way to draft adds.

    Raises:
        UserError: something is named that does not exist, or is no causal LM or head.
    """
    if settings.backbone is None:
        raise UserError("plan --serve needs a backbone: --backbone with a folder, a Hub id or a size such as 8b")
    backbone = sketch(settings.backbone)
    each, tokens = BYTES[settings.precision], settings.rows * (settings.length + settings.nodes + 1)
    token = each * cache_width(backbone.config)
    logits = float(settings.rows * (settings.nodes + 1) * backbone.vocab_size * each)
    found = [Part(_named(backbone), each * float(_numbers(backbone.model)), token, token * tokens)]
    found.append(Part(f"verifying {settings.nodes} drafts a row", 0.0, 0.0, 0.0, logits))
    found += [_head(name, backbone, settings, tokens) for name in ([settings.head] if settings.head else DRAFTED)]
    draft = settings.draft or _smaller(backbone)
    if draft is not None:
        found += _draft(sketch(draft), settings, tokens)
    return found


def sketch(name: str) -> Backbone:
    """A backbone by its shape alone: a usual size, or whatever has a config."""
    if name.lower() in SIZES and not Path(name).exists():
        made = Backbone(_usual(name.lower()), None, name.lower())
    elif name[:1].isdecimal() and "/" not in name and not Path(name).exists():
        raise UserError(f"{name}: usual sizes are {', '.join(SIZES)}; or name the folder or Hub id of a model")
    else:
        made = Backbone(sketch_model(name), None, name)
    made.hash = "unknown"
    return made


def _usual(size: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers, heads, groups, width, inner, vocab, tied = SIZES[size]
    config = LlamaConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=groups,
        head_dim=width, intermediate_size=inner, vocab_size=vocab, tie_word_embeddings=tied,
        max_position_embeddings=131072,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def _smaller(backbone: Backbone) -> str | None:
    """The largest usual size of a tenth of the backbone, or less."""
    most = _numbers(backbone.model) / 10
    fitting = [name for name in SIZES if 1e9 * float(name.removesuffix("b")) * 0.9 <= most]
    return fitting[-1] if fitting else None


def cache_width(config: Any) -> float:
    """Numbers that a token leaves in the cache, all layers together.

    A window does not make it less: whoever goes back over drafts keeps what is behind the window until they are judged.
    """
    config = getattr(config, "get_text_config", lambda: config)()
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    keys = values = float((getattr(config, "num_key_value_heads", None) or heads) * width)
    if getattr(config, "kv_lora_rank", None):  # latent attention, whose keys and values are kept expanded
        keys = float(heads * (config.qk_nope_head_dim + config.qk_rope_head_dim))
        values = float(heads * config.v_head_dim)
    return float(config.num_hidden_layers * (keys + values))


def _head(name: str, backbone: Backbone, settings: ServeSettings, tokens: int) -> Part:
    """What a head adds: its weights, its rows of the backbone's projection, its own cache."""
    each = BYTES[settings.precision]
    head = _of_method(name, backbone, settings) if name in METHODS and not Path(name).exists() else load_head(name)
    wrong = [n for n in ("hidden_size", "vocab_size") if getattr(head.config, n) != getattr(backbone, n)]
    if wrong:
        there, here = getattr(head.config, wrong[0]), getattr(backbone, wrong[0])
        raise UserError(
            f"{name}: was made for a backbone whose {wrong[0]} is {there}; that of {backbone.name} is {here}"
        )
    config: Any = head.config
    layers = sum(key.endswith("k_proj") for key, _ in head.named_modules())
    token = each * float(2 * layers * config.num_key_value_heads * config.head_dim) if layers else 0.0
    own = any(key.startswith("lm_head") for key, _ in head.named_parameters())
    rows = 0.0 if own or head.vocab.full else float(each * head.vocab.size * backbone.hidden_size)
    weights = each * float(_numbers(head)) + rows
    size = "" if head.vocab.full else f", {head.vocab.size:,} tokens"
    logits = float(settings.rows * head.vocab.size * each * min(4, settings.nodes))
    return Part(f"{head.method} head{size}", weights, token, token * tokens, logits)


def _of_method(name: str, backbone: Backbone, settings: ServeSettings) -> DraftHead:
    method = METHODS[name]
    if not method.trainable:
        raise UserError(f"{name}: such heads are read and not trained; name the folder of one")
    size = min(settings.draft_vocab or 32000, backbone.vocab_size)
    fields = {**method.config_class.facts(backbone), "draft_vocab_size": size}
    config = build(method.config_class, fields, "head.{}".format)
    vocab = DraftVocab(None if size == backbone.vocab_size else range(size), backbone.vocab_size)
    with torch.device("meta"):
        return method(config, vocab)


def _draft(model: Backbone, settings: ServeSettings, tokens: int) -> Iterator[Part]:
    """A draft model in two formats: int8 keeps embeddings and norms as they are, and the cache in 16 bits."""
    linear = sum(
        one.weight.numel()
        for name, one in model.model.named_modules()
        if isinstance(one, nn.Linear) and one.weight is not model.model.get_input_embeddings().weight
    )
    rest, token = _numbers(model.model) - linear, 2.0 * cache_width(model.config)
    for name, weights in (("fp16", 2.0 * (linear + rest)), ("int8", 1.0 * linear + 2.0 * rest)):
        logits = 2.0 * settings.rows * model.vocab_size
        yield Part(f"draft model {_named(model)}, {name}", weights, token, token * tokens, logits)


def _numbers(module: nn.Module) -> int:
    return sum(one.numel() for one in module.parameters())


def _named(backbone: Backbone) -> str:
    return f"{backbone.name} ({_numbers(backbone.model) / 1e9:.2f} billion)"


# -- told ------------------------------------------------------------------------------------------------------------


def figures(parts: list[Part], settings: ServeSettings, room: float | None) -> dict[str, Any]:
    """The same as JSON values; `room` in bytes."""
    base = parts[0].total
    return {
        "rows": settings.rows,
        "length": settings.length,
        "parts": [{**one._asdict(), "total": one.total, "of_backbone": one.total / base} for one in parts],
        "rows_that_fit": None if room is None else {one.name: fitting(parts, one, settings, room) for one in parts},
    }


def fitting(parts: list[Part], one: Part, settings: ServeSettings, room: float) -> int:
    """Rows of this length that fit into so many bytes, with one of the ways to draft (or without, the first part)."""
    there = [parts[0]] if one is parts[0] else [*parts[:2], one]
    weights = sum(part.weights for part in there)
    row = sum(part.slots + part.extra for part in there) / settings.rows
    return max(0, int((room - weights) / row))


def told(parts: list[Part], settings: ServeSettings, room: float | None = None) -> str:
    """A table, and how many rows fit where `room` is given, in bytes."""
    base = parts[0].total
    head = f"{settings.rows} rows of {settings.length:,} tokens, {settings.precision}"
    fit = "" if room is None else f" rows in {room / GIB:.4g} GiB |"
    lines = [
        head,
        "",
        f"| what | weights | cache a token | cache of all rows | a round | in all | of the backbone |{fit}",
    ]
    lines.append("|" + "---|" * (7 + (room is not None)))
    for one in parts:
        cells = [_size(one.weights), _size(one.token), _size(one.slots), _size(one.extra), _size(one.total)]
        more = "" if room is None else f" {fitting(parts, one, settings, room):,} |"
        lines.append(f"| {one.name} | {' | '.join(cells)} | {100 * one.total / base:.1f}% |{more}")
    return "\n".join(lines)


def _size(size: float) -> str:
    for unit, name in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}" if size < 100 * unit else f"{size / unit:.0f} {name}"
    return f"{size:.0f} B" if size else ""
