"""The settings of a run: what is trained, on what, how, and what is measured meanwhile.

The docstring under a field is its help, on the command line and in the docs. Nothing here needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from .. import settings
from ..errors import UserError, nearest

LossName = Literal["soft", "hard", "kl", "reverse_kl", "top_k", "tv", "lk_alpha", "lk_lambda", "smooth_l1"]


@dataclass
class DataSettings:
    """What is learned from."""

    train: list[str] = field(default_factory=lambda: ["shipped"])
    """Files of chats, `shipped` for the conversations that come with headstart, or one folder made by data prepare."""
    max_length: int = 1024
    """Tokens of a row; what lies behind them is cut off, and a row with nothing supervised left is dropped."""
    held_out: float = 0.02
    """Share of the conversations that is kept for evaluation; a hash of each decides, whatever file it stands in."""
    cache: str | None = None
    """Where the backbone's features of all rows are kept, computed once: a folder, or auto for one in the cache that
    follows from backbone, rows and settings. null: the backbone is asked at each step."""
    cache_store: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    """Number format of cached features; auto: that of the backbone, which loses nothing; int8: 8 bits, half of bf16."""

    def __post_init__(self) -> None:
        _require(self.max_length >= 3, "data.max_length", self.max_length, "3 or more: two to stand on, one to propose")
        _require(0 <= self.held_out < 1, "data.held_out", self.held_out, "a share from 0 to below 1")


@dataclass
class LossSettings:
    """What is minimised: the mean over the anchors of each depth, then over depths by their weights."""

    name: LossName = "soft"
    """soft: cross-entropy with what the backbone says over the draft vocabulary; hard: with the tokens of the data; the
    others stand in docs/train.md."""
    terms: dict[str, float] = field(default_factory=dict)
    """Several losses in place of name, each with its weight, such as {smooth_l1: 1.0, soft: 0.1}."""
    over: Literal["draft", "all"] = "draft"
    """The tokens that the backbone's distribution sums to 1 over: the draft vocabulary, or all. With all, tv, lk_alpha
    and lk_lambda see the chance of acceptance itself; it costs a projection to all tokens a position."""
    k: int = 10
    """Tokens that top_k compares."""
    eta: float = 3.0
    """How soon lk_lambda turns from kl to tv as acceptance grows."""
    depths: int | None = None
    """Drafted tokens that are trained; without it, all that a Medusa head has, and 3 for a head that unrolls."""
    decay: float = 0.8
    """Weight of a depth, as a multiple of that of the depth before."""
    weights: list[float] = field(default_factory=list)
    """Weights of the depths, one by one, in place of decay; only their ratios count."""
    noise: float = 0.0
    """Uniform noise on the features that the head reads in training, as EAGLE has it: numbers up to half of this either
    way, times 512 over the tokens of the row. EAGLE's own is 0.2."""

    def __post_init__(self) -> None:
        for name, weight in self.terms.items():
            if name not in get_args(LossName):
                hint = nearest(name, get_args(LossName))
                raise UserError(
                    f"loss.terms has {name}; the losses are {', '.join(get_args(LossName))}"
                    + (f"; did you mean {hint}?" if hint else "")
                )
            _require(0 < weight < math.inf, f"loss.terms.{name}", weight, "a number above 0")
        _require(self.k >= 1, "loss.k", self.k, "1 or more")
        _require(0 <= self.eta < math.inf, "loss.eta", self.eta, "a number of 0 or more")
        _require(0 <= self.noise < math.inf, "loss.noise", self.noise, "a number of 0 or more")
        for weight in self.weights:
            _require(0 < weight < math.inf, "loss.weights", self.weights, "numbers above 0")
        _require(self.depths is None or self.depths >= 1, "loss.depths", self.depths, "1 or more")
        _require(0 < self.decay < math.inf, "loss.decay", self.decay, "a number above 0")


@dataclass
class BatchSettings:
    """Rows of an optimizer step, and how they are dealt out to forwards. Gradients do not depend on the latter."""

    rows: int = 16
    """Rows of an optimizer step, over all processes and accumulated forwards."""
    tokens: int | None = None
    """Tokens of an optimizer step instead: rows are added until they have as many."""
    forward_rows: int | None = None
    """The most rows of one forward; a step is accumulated over as many forwards as that takes."""
    forward_tokens: int = 4096
    """The most tokens of one forward, padding counted (one row may be longer)."""
    pack: bool = False
    """Let the backbone read several short conversations as one row, each seeing itself alone, in place of padding."""
    checkpointing: bool = False
    """Compute what is inside the head's layers once more in the backward pass instead of keeping it: less memory, more
    time."""

    def __post_init__(self) -> None:
        for name in ("rows", "tokens", "forward_rows", "forward_tokens"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"batch.{name}", value, "1 or more")


@dataclass
class OptimSettings:
    """The optimizer, linear warm-up, then a cosine that ends with the last step."""

    name: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon: Muon for the head's inner matrices and AdamW for the rest, which learns faster in short runs."""
    lr: float = 1e-4
    """Peak learning rate."""
    muon_share: float = 5.0
    """Learning rate of what Muon moves, as a multiple of lr."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's two averages."""
    weight_decay: float = 0.0
    """AdamW's decay of matrices; vectors (norms, biases) have none."""
    warmup: float = 0.03
    """Linear warm-up: below 1 a share of the run, from 1 on optimizer steps."""
    final: float = 0.05
    """Learning rate of the last step, as a share of the peak."""
    clip: float | None = 0.5
    """Largest norm of the gradient; longer ones are scaled down. null: never."""
    epochs: int = 1
    """Times that each row is seen."""
    max_steps: int | None = None
    """End after this many optimizer steps instead, in however many epochs that takes."""
    max_minutes: float | None = None
    """End after this much wall time at the latest; where the clock is ahead of the steps, the schedule follows it."""

    def __post_init__(self) -> None:
        for name in ("lr", "muon_share"):
            value = getattr(self, name)
            _require(0 < value < math.inf, f"optim.{name}", value, "a number above 0")
        _require(all(0 <= beta < 1 for beta in self.betas), "optim.betas", self.betas, "numbers from 0 to below 1")
        for name in ("weight_decay", "warmup"):
            value = getattr(self, name)
            _require(0 <= value < math.inf, f"optim.{name}", value, "a number of 0 or more")
        _require(0 <= self.final <= 1, "optim.final", self.final, "a share from 0 to 1")
        for name in ("clip", "max_minutes"):
            value = getattr(self, name)
            _require(value is None or value > 0, f"optim.{name}", value, "above 0, or null")
        _require(self.epochs >= 1, "optim.epochs", self.epochs, "1 or more")
        _require(self.max_steps is None or self.max_steps >= 1, "optim.max_steps", self.max_steps, "1 or more")


@dataclass
class LoraSettings:
    """A trained head (start) that learns a new domain by small matrices beside its own."""

    rank: int | None = None
    """Rank of these matrices; null: all weights of the head are trained. Needs peft, and a head to start with."""
    alpha: float | None = None
    """What they give is multiplied by alpha over rank; null: by 1."""
    targets: list[str] = field(default_factory=list)
    """Layers that have them, by their names or last parts, such as q_proj; without it, every linear one."""

    def __post_init__(self) -> None:
        _require(self.rank is None or self.rank >= 1, "lora.rank", self.rank, "1 or more, or null")
        _require(self.alpha is None or 0 < self.alpha < math.inf, "lora.alpha", self.alpha, "a number above 0, or null")


@dataclass
class AdapterSettings:
    """A LoRA on the backbone that learns beside Medusa heads (Medusa-2). It makes the backbone another model."""

    rank: int | None = None
    """Rank of the matrices beside each linear layer, such as 32; null: the backbone stays as it is. Needs peft."""
    alpha: float = 16.0
    """What they give is multiplied by alpha over rank."""
    targets: list[str] = field(default_factory=list)
    """Layers that have them, by the last parts of their names, such as q_proj; without it, every linear one but the
    output projection."""
    lr_share: float = 0.25
    """Their learning rate, as a multiple of optim.lr, which is that of the heads."""
    alone: float = 0.1
    """The heads learn alone at first; then the adapter's learning rate rises over as long again. Below 1 a share of the
    run, from 1 on optimizer steps."""
    heads: float = 0.01
    """Weight of the heads' loss beside the divergence of the changed backbone from the original one, which has 1."""

    def __post_init__(self) -> None:
        rank = self.rank
        _require(rank is None or rank >= 1, "adapter.rank", rank, "1 or more, or null")
        for name in ("alpha", "lr_share", "heads"):
            value = getattr(self, name)
            _require(0 < value < math.inf, f"adapter.{name}", value, "a number above 0")
        _require(0 <= self.alone < math.inf, "adapter.alone", self.alone, "a number of 0 or more")


@dataclass
class PrecisionSettings:
    """Number formats. The head's own weights and the optimizer's state are fp32 always."""

    backbone: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Of the frozen backbone; auto: bfloat16 where the machine multiplies it fast, else float32."""
    autocast: Literal["auto", "bf16", "no"] = "auto"
    """Of the head's matrix products; auto: bf16 where the machine multiplies it fast, else fp32."""


@dataclass
class LogSettings:
    """What is written down on the way."""

    every: int = 10
    """Optimizer steps between two lines of metrics.jsonl."""
    trackers: list[str] = field(default_factory=list)
    """wandb, tensorboard, trackio or another tracker that accelerate knows, besides metrics.jsonl."""
    project: str = "headstart"
    """Project name for the trackers."""
    rows: bool = False
    """Write the key of every row that a step trains on to rows.jsonl."""

    def __post_init__(self) -> None:
        _require(self.every >= 1, "log.every", self.every, "1 or more")


@dataclass
class SaveSettings:
    """Checkpoints, from which a run goes on by itself."""

    every: int = 200
    """Optimizer steps between two checkpoints; the end and an interruption have one in any case."""
    keep: int = 2
    """Checkpoints that stay; older ones are removed."""

    def __post_init__(self) -> None:
        _require(self.every >= 1, "save.every", self.every, "1 or more")
        _require(self.keep >= 1, "save.keep", self.keep, "1 or more")


@dataclass
class EvaluateSettings:
    """What is measured on held-out conversations, at the end and on the way."""

    every: int | None = 200
    """Optimizer steps between two evaluations; null: only at the end."""
    rows: int = 64
    """Held-out rows for loss, accuracy by depth and the estimate of acceptance length."""
    prompts: int = 8
    """Held-out prompts that are answered with the head, for the measured acceptance length."""
    max_new_tokens: int = 64
    """Tokens of each answer."""
    tree: str | None = None
    """Form of the drafts, such as chain:4 or dynamic:4x4x8, for both acceptance lengths; without it, the one that
    generation takes."""

    def __post_init__(self) -> None:
        _require(self.every is None or self.every >= 1, "evaluate.every", self.every, "1 or more, or null")
        _require(self.rows >= 0, "evaluate.rows", self.rows, "0 or more")
        _require(self.prompts >= 0, "evaluate.prompts", self.prompts, "0 or more")
        _require(self.max_new_tokens >= 2, "evaluate.max_new_tokens", self.max_new_tokens, "2 or more")


@dataclass
class Recipe:
    """A training run."""

    backbone: str
    """The frozen model: a built-in name (smollm2-135m), a folder, or a Hub id."""
    run: Path
    """Folder of the run: checkpoints, metrics, and the trained head in `head` under it. A run that is there goes on."""
    method: str = "eagle3"
    """What is trained: eagle3, eagle1 (which is EAGLE-2, too), medusa or hydra."""
    head: dict[str, Any] = field(default_factory=dict)
    """Fields of the method's config that are to differ from what follows from the backbone, such as num_heads: 3."""
    draft_vocab: int | None = None
    """Tokens that the head can propose, the most frequent supervised ones; null: all."""
    start: str | None = None
    """A trained head to begin with, a folder or a Hub id; it keeps its draft vocabulary. null: a new head."""
    new_vocab: bool = False
    """With start: count the draft vocabulary anew; tokens that the head knows keep their rows, the others begin as the
    backbone's."""
    seed: int = 0
    """Of the head's first weights and the order of the rows."""
    revision: str | None = None
    """Branch, tag or commit of a backbone on the Hub."""
    device_map: Literal["auto", "balanced", "sequential"] | None = None
    """auto: one process spreads the backbone's layers over all GPUs, then over its memory; null: on one device."""
    data: DataSettings = field(default_factory=DataSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    batch: BatchSettings = field(default_factory=BatchSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    lora: LoraSettings = field(default_factory=LoraSettings)
    adapter: AdapterSettings = field(default_factory=AdapterSettings)
    precision: PrecisionSettings = field(default_factory=PrecisionSettings)
    log: LogSettings = field(default_factory=LogSettings)
    save: SaveSettings = field(default_factory=SaveSettings)
    evaluate: EvaluateSettings = field(default_factory=EvaluateSettings)

    def __post_init__(self) -> None:
        size = self.draft_vocab
        _require(size is None or size >= 1, "draft_vocab", size, "1 or more, or null")
        if self.new_vocab and self.start is None:
            raise UserError("new_vocab is set, but no start: the vocabulary of a new head is counted in any case")
        if self.lora.rank is not None and self.start is None:
            raise UserError("lora.rank is set, but no start: name the trained head that is to learn more")
        if self.adapter.rank is not None:
            self._check_adapter()
        _require(abs(self.seed) < 2**40, "seed", self.seed, "a number below 2 ** 40")

    def _check_adapter(self) -> None:
        """What a backbone that changes while it is trained cannot do."""
        others = [
            (self.method != "medusa", "method", self.method, "a LoRA on the backbone is for Medusa heads (medusa)"),
            (
                self.data.cache is not None,
                "data.cache",
                self.data.cache,
                "its features change with the backbone (null)",
            ),
            (self.batch.pack, "batch.pack", True, "rows of a backbone that learns are not packed (false)"),
            (self.lora.rank is not None, "lora.rank", self.lora.rank, "one LoRA at a time (null)"),
            (self.device_map is not None, "device_map", self.device_map, "a backbone that learns is not spread (null)"),
        ]
        for wrong, key, value, reason in others:
            if wrong:
                raise UserError(f"adapter.rank is {self.adapter.rank} (Medusa-2), and {key} is {value}: {reason}")


FREE = ("run", "log", "save", "evaluate", "device_map")
"""Settings that leave the weights as they are, so that a run may go on with others."""


def load_recipe(recipe: Recipe | str | Path | None, overrides: Mapping[str, Any] | Iterable[str] = ()) -> Recipe:
    """A recipe from its YAML file, from one in memory, or from overrides alone (`optim.lr=1e-4`).

    Raises:
        UserError: the file is missing, a key is unknown, or a value is impossible.
    """
    if not isinstance(recipe, Recipe):
        return settings.load(Recipe, recipe, overrides)
    changed = overrides if isinstance(overrides, Mapping) else dict(one.split("=", 1) for one in overrides)
    return settings.load(Recipe, None, {**dict(_flat(settings.dump(recipe))), **changed})


def differences(before: Recipe, now: Recipe) -> Iterator[tuple[str, Any, Any]]:
    """Key, old and new value of each setting in which two recipes differ and which the weights depend on."""
    old, new = dict(_flat(settings.dump(before))), dict(_flat(settings.dump(now)))
    for key in sorted(old.keys() | new.keys()):
        # text and number of the same spelling (an override of a head field, and the file's) are one value
        if key.split(".")[0] not in FREE and str(old.get(key)) != str(new.get(key)):
            yield key, old.get(key), new.get(key)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise UserError(f"{name} is {value}; expected {wanted}")
