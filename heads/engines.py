"""Serving engines: which kinds of heads each reads, which it has no more or never had, and the check for each kind."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..errors import UserError, nearest
from . import reading_others, reading_sglang, reading_vllm
from .reading import Files, Finding

Check = Callable[[Files], Iterator[Finding]]


@dataclass(frozen=True)
class Engine:
    """One engine: its kinds, and those it has no more or never had."""

    title: str
    versions: tuple[str, str] | None
    """The oldest and the newest version whose sources were read; None: it has none that one could name."""
    checks: dict[str, Check]
    never: dict[str, str]
    """Kind to why not."""


def engine_of(name: str) -> tuple[Engine, tuple[int, ...], str]:
    """An engine by its name, perhaps with a version: "vllm:0.32.0".

    Returns:
        The engine, the version as numbers (without one, that of the newest that was read), and both in words.

    Raises:
        UserError: there is no such engine, or that is no version.
    """
    known, _, version = name.partition(":")
    if known not in ENGINES:
        near = nearest(known, ENGINES)
        raise UserError(
            f"no engine {known!r}; " + (f"did you mean {near}?" if near else f"known: {', '.join(ENGINES)}")
        )
    engine = ENGINES[known]
    if not version:
        version = engine.versions[1] if engine.versions else ""
    elif engine.versions is None or not re.fullmatch(r"v?\d+(\.\d+)*([.+-]?[a-z]+[\w.+-]*)?", version):
        raise UserError(f"{name}: {version!r} is no version of {engine.title}; it is like {known}:0.33.0")
    return engine, numbers(version), f"{engine.title} {version}".strip()


def numbers(version: str) -> tuple[int, ...]:
    """0.32.0 as (0, 32, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def outside(engine: Engine, version: tuple[int, ...]) -> Iterator[Finding]:
    """A note where a version is none of those whose sources were read."""
    if engine.versions and version and not numbers(engine.versions[0]) <= version <= numbers(engine.versions[1]):
        read = f"{engine.title} was read from {engine.versions[0]} to {engine.versions[1]}"
        yield Finding(f"{read}: what others do is not known", "try it with a short run", wrong=False)


_NO = "it has no such heads"
_SPECULATOR = "MLP speculators went with vLLM 0.33, and its engine of 0.11 and later has no way to run them"
ENGINES: dict[str, Engine] = {
    "vllm": Engine(
        "vLLM",
        ("0.12.0", "0.33.0"),
        {
            "eagle1": reading_vllm.eagle1,
            "eagle3": reading_vllm.eagle3,
            "speculators": reading_vllm.speculators,
            "medusa": reading_vllm.medusa,
            "medusa-vllm": reading_vllm.medusa,
        },
        {
            "mlp_speculator": _SPECULATOR,
            "hydra": _NO,
            "medusa-2": "heads are read from a folder of their own, not from the model's shards",
            "medusa-trt": "it reads other names of the same tensors",
        },
    ),
    "sglang": Engine(
        "SGLang",
        ("0.5.5", "0.5.23"),
        {"eagle1": reading_sglang.eagle1, "eagle3": reading_sglang.eagle3},
        {
            "speculators": "the config inside the config is not read; export it to sglang",
            **dict.fromkeys(("medusa", "medusa-vllm", "medusa-2", "medusa-trt", "hydra", "mlp_speculator"), _NO),
        },
    ),
    "tensorrt-llm": Engine(
        "TensorRT-LLM",
        None,
        {"eagle3": reading_others.tensorrt_eagle3},
        {
            "eagle1": "its PyTorch backend has no heads of EAGLE-1",
            "speculators": "the config inside the config is not read; export it to modelopt",
            **dict.fromkeys(
                ("medusa", "medusa-vllm", "medusa-2", "medusa-trt"),
                "its PyTorch backend has no Medusa heads; the engines that older releases build have",
            ),
            **dict.fromkeys(("hydra", "mlp_speculator"), _NO),
        },
    ),
    "eagle": Engine(
        "SafeAILab/EAGLE",
        None,
        {"eagle1": reading_others.official, "eagle3": reading_others.official},
        dict.fromkeys(
            ("speculators", "medusa", "medusa-vllm", "medusa-2", "medusa-trt", "hydra", "mlp_speculator"), _NO
        ),
    ),
}
