"""Medusa-2 by recipe: heads and a LoRA on the backbone, taught by the original; saved, gone on with, and used."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from runs import crash_at, lines, prepared, recipe, same_bits
from safetensors.torch import load_file

import zoo
from headstart.errors import UserError
from headstart.heads.adapter import Adapter, AdapterSettings
from headstart.heads.format import load_head
from headstart.heads.medusa import Medusa
from headstart.inference.generator import Generator
from headstart.training.batches import Batch, anchors
from headstart.training.distilled import Distilled
from headstart.training.loop import train
from headstart.training.plan import plan
from headstart.training.recipe import LossSettings, OptimSettings
from headstart.training.schedule import Schedule
from headstart.training.sheet import check

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),
    pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft, an extra of headstart"),
]
MEDUSA2 = {"adapter__rank": 4, "adapter__alpha": 8.0, "adapter__alone": 2, "adapter__heads": 0.2}
PROMPT = [5, 6, 7, 8, 5, 6]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return prepared(tmp_path_factory.mktemp("distilled"))


def all_weights(run: Any) -> dict[str, torch.Tensor]:
    head = load_file(run / "head" / "model.safetensors")
    return head | load_file(run / "head" / "adapter" / "adapter_model.safetensors")


def batch_of() -> Batch:
    ids = torch.randint(3, zoo.VOCAB, (2, 15), generator=torch.Generator().manual_seed(2))
    mask = torch.zeros(2, 15, dtype=torch.bool)
    mask[0, 4:9], mask[0, 11:15], mask[1, 6:12] = True, True, True
    return Batch(ids, mask, [0, 1], 27)


def distilled(vocab: Any = None, **settings: Any) -> Distilled:
    """Heads and adapter with random numbers in both."""
    torch.manual_seed(0)
    backbone = zoo.backbone()
    backbone.model.requires_grad_(False)
    head = Medusa.build(backbone, num_heads=2, vocab=vocab).train()
    adapter = Adapter(backbone, AdapterSettings(rank=3))
    with torch.no_grad():
        for one in (*head.parameters(), *adapter.parameters()):
            one.add_(0.1 * torch.randn_like(one))
    return Distilled(head, LossSettings(**settings), adapter, 0.3)


@pytest.mark.parametrize("name", ["hard", "soft"])
def test_loss_and_gradients_are_those_of_the_plain_formula(name: str) -> None:
    objective, batch = distilled(name=name), batch_of()
    head, backbone, counts = objective.head, objective.backbone, objective.counts(batch_of())
    found = anchors(batch.mask, 2)
    assert counts.tolist() == [len(found[0]), len(found[1]), 15]  # every supervised token
    result = objective(batch, objective.features(batch), 1 / counts)
    result.total.backward()
    trained = [*head.parameters(), *objective.adapter.parameters()]
    gradients = [one.grad.clone() for one in trained]
    with torch.no_grad(), objective.original():
        p = backbone.model(batch.ids).logits.softmax(-1)
    assert torch.equal(p, zoo.backbone().model(batch.ids).logits.softmax(-1))
    q = backbone.model(batch.ids).logits.log_softmax(-1)
    kept = batch.mask[:, 1:]
    apart = (p * (p.log() - q)).sum(-1)[:, :-1][kept].mean()
    features, heads = backbone.forward(batch.ids), torch.zeros(())
    for depth, hidden in enumerate(head.unroll(features, batch.ids, found)):
        logits, at = head.project(hidden, depth), found[depth]
        aim = batch.ids.flatten()[at + 2 + depth] if name == "hard" else p.flatten(0, 1)[at + 1 + depth]
        heads = heads + F.cross_entropy(logits, aim) * [1, 0.8][depth] / 1.8
    total = 0.3 * heads + apart
    torch.testing.assert_close(result.total, total)
    torch.testing.assert_close(result.distance / 15, apart)
    for one, other in zip(gradients, torch.autograd.grad(total, trained), strict=True):
        assert other.abs().max() > 0
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)
    assert all(one.grad is None for name, one in backbone.model.named_parameters() if "lora_" not in name)


def test_heads_learn_alone_at_first() -> None:
    objective, batch = distilled(), batch_of()
    objective.joined = 0.0
    objective(batch, objective.features(batch), 1 / objective.counts(batch)).total.backward()
    assert all(one.grad is not None and not one.grad.any() for one in objective.matrices)
    assert all(one.grad.any() for one in objective.head.parameters())
    schedule = Schedule(OptimSettings(), 100)
    assert [schedule.joined(0.2, step, 0.0) for step in (1, 20, 30, 40, 100)] == pytest.approx([0, 0, 0.5, 1, 1])
    assert [schedule.joined(10, step, 0.0) for step in (1, 10, 15, 20, 21)] == [0, 0, 0.5, 1, 1]
    assert schedule.joined(0, 1, 0.0) == 1


def test_measured_is_what_the_changed_backbone_says() -> None:
    objective, batch = distilled(), batch_of()
    total, positions = objective.distance([batch]).tolist()
    assert total > 0.01
    assert positions == 15
    objective.head.eval()
    assert torch.equal(objective.features(batch).last, objective.backbone.forward(batch.ids).last)
    objective.release()
    assert torch.equal(objective.backbone.forward(batch.ids).last, zoo.backbone().forward(batch.ids).last)


def test_a_run_is_saved_gone_on_with_and_used(rows: Any, tmp_path: Any, capsys: Any) -> None:
    backbone = zoo.backbone()
    original = backbone.model(torch.tensor([PROMPT])).logits
    whole = recipe(tmp_path / "whole", rows, **MEDUSA2)
    train(whole, backbone=backbone)
    assert torch.equal(backbone.model(torch.tensor([PROMPT])).logits, original)  # lent, and given back
    assert "divergence from the original" in capsys.readouterr().err
    written = lines(tmp_path / "whole")
    assert abs(written[0]["divergence"]) < 1e-6 < written[-2]["divergence"]
    assert written[-1]["held_out"]["divergence"] > 0
    crash_at(recipe(tmp_path / "cut", rows, **MEDUSA2), 5)
    train(recipe(tmp_path / "cut", rows, **MEDUSA2), backbone=zoo.backbone())
    assert same_bits(all_weights(tmp_path / "whole"), all_weights(tmp_path / "cut"))

    folder = tmp_path / "whole" / "head"
    told = json.loads((folder / "config.json").read_text())
    assert told["config"]["adapter_hash"]
    assert told["provenance"]["adapter"]["rank"] == 4
    assert "changed one" in (folder / "README.md").read_text()
    changed = zoo.backbone()
    head = load_head(folder, changed, adapter=True)
    assert changed.adapter in changed.name
    expected = changed.model.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False)[0, 6:].tolist()
    assert Generator(changed, head).generate(PROMPT, max_new_tokens=12, do_sample=False).tokens == expected

    # the next run begins with both, and the teacher is the original again
    after = recipe(
        tmp_path / "after", rows, start=str(folder), **(MEDUSA2 | {"optim__max_steps": 1, "optim__lr": 1e-9})
    )
    train(after, backbone=zoo.backbone())
    for name, one in all_weights(tmp_path / "after").items():
        torch.testing.assert_close(one, all_weights(tmp_path / "whole")[name], atol=1e-6, rtol=0)
    with pytest.raises(UserError, match=r"trained together with a LoRA .* set adapter.rank"):
        train(recipe(tmp_path / "none", rows, start=str(folder)), backbone=zoo.backbone())
    with pytest.raises(UserError, match=r"rank=8.*rank=4"):
        train(recipe(tmp_path / "other", rows, start=str(folder), adapter__rank=8), backbone=zoo.backbone())


def test_heads_trained_alone_are_a_start(rows: Any, tmp_path: Any) -> None:
    train(recipe(tmp_path / "one", rows, optim__max_steps=2), backbone=zoo.backbone())
    two = recipe(tmp_path / "two", rows, start=str(tmp_path / "one"), **(MEDUSA2 | {"adapter__alone": 0}))
    backbone = zoo.backbone()
    sizes = [
        int(check(one, backbone=backbone)["trainable parameters"].replace(",", ""))
        for one in (recipe(tmp_path / "alone", rows), two)
    ]
    assert sizes[1] > sizes[0]
    planned = plan(two, backbone=backbone)
    assert planned.facts["trainable parameters"] == f"{sizes[1]:,}"
    assert planned.memory["what the backbone keeps for its gradient"] > 0
    train(two, backbone=backbone)
    assert (tmp_path / "two" / "head" / "adapter").is_dir()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"method": "eagle3"}, "method is eagle3"),
        ({"data__cache": "auto"}, "data.cache is auto: its features change with the backbone"),
        ({"batch__pack": True}, "batch.pack"),
        ({"lora__rank": 2, "start": "x"}, "lora.rank is 2"),
        ({"device_map": "auto"}, "device_map is auto"),
        ({"adapter__rank": 0}, "adapter.rank is 0"),
        ({"adapter__heads": 0}, "adapter.heads is 0"),
    ],
    ids=str,
)
def test_what_a_learning_backbone_cannot_do_is_refused(rows: Any, tmp_path: Any, change: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        recipe(tmp_path / "run", rows, **(MEDUSA2 | change))
