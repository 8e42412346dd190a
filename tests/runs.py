"""Small training runs for the tests: tiny chats, prepared once, and a recipe that takes a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zoo
from headstart.data.prepare import PrepareSettings, prepare
from headstart.training import loop
from headstart.training.recipe import Recipe, load_recipe

SMALL = {
    "data.held_out": 0.2,
    "batch.rows": 4,
    "batch.forward_rows": 2,
    "optim.lr": 3e-3,
    "optim.epochs": 2,
    "precision.backbone": "float32",
    "precision.autocast": "no",
    "evaluate.every": None,
    "evaluate.rows": 4,
    "evaluate.prompts": 1,
    "evaluate.max_new_tokens": 6,
    "log.every": 1,
    "log.rows": True,
    "save.every": 3,
}


def prepared(folder: Path, count: int = 12) -> Path:
    """A prepared folder of `count` chats."""
    chats = folder / "chats.jsonl"
    chats.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in zoo.chats(count)))
    prepare(zoo.tokenizer(), PrepareSettings(input=[str(chats)], out=folder / "rows"))
    return folder / "rows"


def recipe(run: Path, rows: Path, method: str = "medusa", **changes: Any) -> Recipe:
    """A recipe of two epochs on these rows; changes are named with two underscores for a dot."""
    made = Recipe(backbone="tiny", run=run, method=method, head={"num_heads": 2} if method == "medusa" else {})
    named = {key.replace("__", "."): value for key, value in changes.items()}
    return load_recipe(made, {**SMALL, "data.train": [str(rows)], **named})


def weights(run: Path) -> dict[str, torch.Tensor]:
    """The tensors of the trained head."""
    return load_file(run / "head" / "model.safetensors")


def lines(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def stop_at(monkeypatch: Any, step: int, action: Any) -> None:
    """Do something in the middle of a step (counted from 1), behind its gradient and before its update."""
    plain = loop.check_gradient

    def check(setup: Any, batches: Any, norm: float, before: int) -> None:
        plain(setup, batches, norm, before)
        if before + 1 == step:
            action()

    monkeypatch.setattr(loop, "check_gradient", check)


class Crash(Exception):
    pass


def crash() -> None:
    raise Crash


def crash_at(recipe: Recipe, step: int) -> None:
    """Train, and crash in place of this step."""
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, step, crash)
        with pytest.raises(Crash):
            loop.train(recipe, backbone=zoo.backbone())
