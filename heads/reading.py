"""What checks of serving engines share: the files that are looked at, a finding, and faults that all engines have.

Engines load drafters leniently: a tensor without a place and a place without a tensor are often no error there, and
drafts are then accepted by chance alone. The engines themselves stand in reading_vllm.py, reading_sglang.py and
reading_others.py; engines.py joins them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from .layouts import Config

Shape = tuple[tuple[int, ...], str]


@dataclass(frozen=True)
class Finding:
    """One thing that an engine would do with a head."""

    what: str
    fix: str
    wrong: bool = True
    """False: worth knowing, and no fault."""


@dataclass
class Files:
    """What is looked at."""

    config: Config
    tensors: dict[str, Shape]
    zeros: frozenset[str] = field(default_factory=frozenset)
    """Biases that are all zero, whose loss changes nothing."""
    taps: tuple[int, ...] | None = None
    """Hidden states that the head was made for, if that is known."""
    version: tuple[int, ...] = (1 << 30,)
    """Of the engine; without a word, later than any."""

    def before(self, *version: int) -> bool:
        """Whether the engine is older than that."""
        return self.version < version

    def has(self, pattern: str) -> list[str]:
        """Names that a pattern fits."""
        return [name for name in self.tensors if re.fullmatch(pattern, name)]


Check = Callable[[Files], Iterator[Finding]]
EXPORT = "headstart export --to {} writes it as it has to be"


# -- shared -----------------------------------------------------------------------------------------------------------

LAYER = (
    *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
    *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    "post_attention_layernorm.weight",
)


def missing(files: Files, wanted: list[str], fate: str, to: str) -> Iterator[Finding]:
    names = {re.sub(r"^(model\.)?midlayer\.", "layers.0.", name).removeprefix("model.") for name in files.tensors}
    for name in wanted:
        if name not in names:
            yield Finding(f"{name} is missing, and would be {fate}", f"find the tensor; {EXPORT.format(to)}")


def activation(files: Files) -> Iterator[Finding]:
    act = files.config.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        yield Finding(f"hidden_act is {act}, and it computes silu alone", "train with head.hidden_act=silu")


def layers_of(files: Files) -> int:
    numbers = [int(m[1]) for name in files.tensors if (m := re.search(r"(?:^|\.)layers\.(\d+)\.", name))]
    return max(numbers, default=0) + 1


def counted(files: Files) -> Iterator[Finding]:
    said, found = files.config.get("num_hidden_layers", 1), layers_of(files)
    if said != found:
        yield Finding(f"num_hidden_layers is {said}, and the file holds {found}", f"set num_hidden_layers to {found}")


def no_names(files: Files, pattern: str, what: str, fix: str) -> Iterator[Finding]:
    found = files.has(pattern)
    if found and not all(name in files.zeros for name in found):
        yield Finding(f"{', '.join(found[:3])}: {what}", fix)


def maps(files: Files) -> Iterator[Finding]:
    config = files.config
    rows = files.tensors.get("lm_head.weight", files.tensors.get("model.lm_head.weight", ((0,), "")))[0][0]
    draft, size = config.get("draft_vocab_size") or rows, config.get("vocab_size")
    if size and draft and draft != size and not files.has(r"(model\.)?d2t"):
        yield Finding(
            f"d2t is missing, and {draft} of {size} tokens are proposed: they would be read as the first {draft}",
            "find the map that the head was trained with",
        )


def switch(files: Files, key: str, pattern: str) -> Iterator[Finding]:
    found = files.has(pattern)
    if found and not files.config.get(key):
        yield Finding(f"{found[0]} is dropped, since {key} is not true", f"set {key} to true")
    if files.config.get(key) and not found:
        yield Finding(f"{key} is true, and its norm is missing: left at one", f"set {key} to false, or find the norm")


def ids(config: Config) -> list[int]:
    return list(config.get("eagle_aux_hidden_state_layer_ids") or [])


def fused(files: Files, count: int, engine: str) -> Iterator[Finding]:
    """Whether `fc` reads as many hidden states as the engine builds it for."""
    config = files.config
    shape = files.tensors.get("fc.weight", files.tensors.get("model.fc.weight", ((0, 0), "")))[0]
    width = config.get("target_hidden_size") or config.get("hidden_size")
    if "target_hidden_size" in config and config["target_hidden_size"] is None:
        yield Finding(f"target_hidden_size is null, and {engine} stops", "take it out of config.json")
    if width and len(shape) == 2 and shape[1] and shape[1] != count * width:
        yield Finding(
            f"fc reads {shape[1] / width:g} hidden states, and {engine} builds it for {count}: it stops",
            f"write num_aux_hidden_states into config.json; {EXPORT.format(engine.lower())}",
        )
