"""Every recipe that comes with headstart takes two steps: online and from cached features, fresh and resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import runs

import zoo
from headstart.errors import UserError
from headstart.heads.format import load_head
from headstart.heads.methods import TRAINABLE
from headstart.training.loop import train
from headstart.training.recipe import load_recipe

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in zoo.chats(24)))
    return path


def test_every_method_has_a_recipe():
    assert {load_recipe(path).method for path in CONFIGS} == set(TRAINABLE)


@pytest.mark.parametrize("cache", [None, "auto"], ids=["online", "cached"])
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_two_steps_fresh_and_resumed(path, cache, chats, tmp_path, monkeypatch):
    """B157."""
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    backbone, recipe = zoo.backbone(), load_recipe(path)
    if recipe.adapter.rank is not None:
        pytest.importorskip("peft")
    changes = {"data.train": [str(chats)], "data.cache": cache, "data.held_out": 0.2, "optim.max_steps": 2}
    changes |= {"save.every": 1, "log.rows": True, "optim.max_minutes": None}
    changes |= {"evaluate.rows": 4, "evaluate.prompts": 1, "evaluate.max_new_tokens": 6}
    if recipe.draft_vocab is not None:
        changes["draft_vocab"] = 40
    if cache and recipe.adapter.rank is not None:
        with pytest.raises(UserError, match="features change with the backbone"):
            load_recipe(recipe, changes)
        return
    fresh = train(recipe, {**changes, "run": str(tmp_path / "fresh")}, backbone=backbone)
    changes["run"] = str(tmp_path / "resumed")
    with monkeypatch.context() as patch:
        runs.stop_at(patch, 2, runs.crash)
        with pytest.raises(runs.Crash):
            train(recipe, changes, backbone=backbone)
    resumed = train(recipe, changes, backbone=backbone)
    assert load_head(fresh).method == recipe.method
    assert runs.same_bits(runs.weights(resumed.parent), runs.weights(fresh.parent))
    assert [line["step"] for line in runs.lines(resumed.parent, "rows.jsonl")] == [1, 2]
