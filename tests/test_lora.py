"""LoRA on a trained head: small matrices alone are trained, and an ordinary head comes out."""

from __future__ import annotations

import builtins
import json

import pytest
import runs
import torch

import zoo
from headstart.errors import UserError
from headstart.heads.format import load_head
from headstart.heads.methods import TRAINABLE
from headstart.training.checkpoints import checkpoints
from headstart.training.loop import train
from headstart.training.lora import merged
from headstart.training.recipe import load_recipe
from headstart.training.setup import set_up


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return runs.prepared(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def trained(rows, tmp_path_factory):
    """Heads of two methods, trained for a step."""
    folder = tmp_path_factory.mktemp("heads")
    made = {}
    for method in ("medusa", "eagle3"):
        recipe = runs.recipe(folder / method, rows, method, draft_vocab=40, optim__max_steps=1, evaluate__prompts=0)
        made[method] = train(recipe, backbone=zoo.backbone())
    return made


def adapted(run, rows, method, start, **changes):
    head = {} if method == "eagle3" else {"head.num_heads": 2}
    recipe = runs.recipe(run, rows, method, start=str(start), lora__rank=2, **changes)
    return load_recipe(recipe, head)


@pytest.mark.parametrize("method", ["medusa", "eagle3"])
def test_the_head_that_comes_out_is_an_ordinary_one(method, rows, trained, tmp_path):
    """The same logits as head and small matrices side by side; what has none of them is as it was."""
    pytest.importorskip("peft")
    recipe = adapted(tmp_path / "run", rows, method, trained[method], lora__alpha=6.0)
    made = load_head(train(recipe, backbone=zoo.backbone()))
    before = load_head(trained[method])
    assert made.state_dict().keys() == before.state_dict().keys()
    moved = {name for name, one in made.state_dict().items() if not torch.equal(one, before.state_dict()[name])}
    linear = {name for name, one in before.named_modules() if isinstance(one, torch.nn.Linear)}
    assert moved == {f"{name}.weight" for name in linear}
    for name in linear:
        delta = made.state_dict()[f"{name}.weight"] - before.state_dict()[f"{name}.weight"]
        assert torch.linalg.matrix_rank(delta, rtol=1e-3) <= 2
    assert json.loads((recipe.run / "head" / "config.json").read_text())["provenance"]["lora_rank"] == 2
    setup = set_up(load_recipe(recipe, {"run": str(tmp_path / "other")}), zoo.backbone())
    with torch.no_grad():
        for name, weight in setup.head.named_parameters():
            if ".lora_" in name:
                weight.copy_(0.1 * torch.randn_like(weight))
    plain = load_head(trained[method], setup.backbone)
    plain.load_state_dict(merged(setup.head, setup.layout.weights(setup.objective)))
    (batch,) = setup.batches.forwards(0)[:1]
    features = setup.objective.features(batch)
    at = [(batch.mask.flatten().nonzero().flatten()[:3] - 1).clamp(min=0)]
    for one, other in zip(*(head.unroll(features, batch.ids, at) for head in (setup.head, plain)), strict=True):
        torch.testing.assert_close(setup.head.project(one, 0), plain.project(other, 0), rtol=1e-4, atol=1e-4)


def test_small_matrices_alone_are_trained(rows, trained, tmp_path):
    pytest.importorskip("peft")
    recipe = adapted(tmp_path / "run", rows, "eagle3", trained["eagle3"], lora__targets=["q_proj", "lm_head"])
    setup = set_up(recipe, zoo.backbone())
    names = {name for name, one in setup.head.named_parameters() if one.requires_grad}
    layers = ("midlayer.self_attn.q_proj", "lm_head")
    assert names == {f"{layer}.lora_{one}.default.weight" for layer in layers for one in "AB"}
    assert sum(len(group["params"]) for group in setup.optimizer.param_groups) == 4


def test_an_adapted_run_goes_on_bit_for_bit(rows, trained, tmp_path):
    pytest.importorskip("peft")
    undisturbed = adapted(tmp_path / "whole", rows, "eagle3", trained["eagle3"])
    train(undisturbed, backbone=zoo.backbone())
    recipe = adapted(tmp_path / "run", rows, "eagle3", trained["eagle3"], save__every=1)
    runs.crash_at(recipe, 4)
    assert [one.name for one in checkpoints(recipe.run)][-1] == "step-000003"
    train(recipe, backbone=zoo.backbone())
    assert runs.same_bits(runs.weights(recipe.run), runs.weights(undisturbed.run))


def test_layers_that_are_not_there_are_said(rows, trained, tmp_path):
    pytest.importorskip("peft")
    recipe = adapted(tmp_path / "run", rows, "eagle3", trained["eagle3"], lora__targets=["q_porj"])
    with pytest.raises(UserError, match="lora.targets has q_porj; .*did you mean q_proj?"):
        train(recipe, backbone=zoo.backbone())


def test_without_peft_or_a_head_to_start_with(rows, trained, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="lora.rank is set, but no start"):
        runs.recipe(tmp_path / "run", rows, lora__rank=2)
    plain = builtins.__import__

    def without(name, *rest, **more):
        if name == "peft":
            raise ImportError(name)
        return plain(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"peft is missing: pip install 'headstart\[peft\]'"):
        train(adapted(tmp_path / "run", rows, "medusa", trained["medusa"]), backbone=zoo.backbone())


@pytest.mark.parametrize("method", TRAINABLE)
def test_a_run_begins_with_a_trained_head_of_every_method(method, rows, tmp_path):
    first = train(runs.recipe(tmp_path / "first", rows, method, optim__max_steps=1), backbone=zoo.backbone())
    recipe = runs.recipe(tmp_path / "second", rows, method, start=str(first), optim__max_steps=1, optim__lr=1e-30)
    assert runs.same_bits(runs.weights(train(recipe, backbone=zoo.backbone()).parent), runs.weights(first.parent))
