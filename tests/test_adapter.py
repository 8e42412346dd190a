"""Medusa-2: heads and a LoRA on the backbone, self-distilled; stored together, taken in on request, never silently."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import zoo
from headstart.errors import UserError
from headstart.heads import adapter as room
from headstart.heads.adapter import Adapter, AdapterSettings
from headstart.heads.backbone import Backbone
from headstart.heads.format import load_head, save_head
from headstart.heads.medusa import Medusa
from headstart.inference.generator import Generator

IDS = torch.randint(3, zoo.VOCAB, (2, 14), generator=torch.Generator().manual_seed(4))
PROMPT = IDS[0, :6].tolist()

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
with_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft, an extra of headstart")


def trained(family: str = "llama", steps: int = 12, **settings: Any) -> tuple[Medusa, Adapter]:
    """Heads and adapter after a few steps: KL to the adapter-off backbone, and the heads' cross-entropy."""
    backbone = zoo.backbone(family)
    torch.manual_seed(0)
    head = Medusa.build(backbone, num_heads=2)
    adapter = Adapter(backbone, AdapterSettings(**{"rank": 4, "alpha": 8.0, **settings}))
    optimizer = torch.optim.Adam([*head.parameters(), *adapter.parameters()], lr=2e-2)
    anchors = [torch.arange(2 * 14).view(2, 14)[:, : 12 - depth].flatten() for depth in range(2)]
    for _ in range(steps):
        with torch.no_grad(), adapter.off():
            teacher = backbone.logits(backbone.forward(IDS).last).log_softmax(-1)
        features = backbone.forward(IDS)
        q = backbone.logits(features.last).log_softmax(-1)
        loss = F.kl_div(q, teacher, log_target=True, reduction="batchmean")
        for depth, hidden in enumerate(head.unroll(features, IDS, anchors)):
            loss = loss + F.cross_entropy(head.project(hidden, depth), IDS.flatten()[anchors[depth] + 2 + depth])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head, adapter


@torch.no_grad()
def said(backbone: Backbone) -> torch.Tensor:
    logits: torch.Tensor = backbone.model(IDS).logits
    return logits


@with_peft
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma"])
def test_starts_as_the_original_which_stays_reachable(family: str) -> None:
    original = said(zoo.backbone(family))
    _, adapter = trained(family, steps=0)
    assert torch.equal(said(adapter.backbone), original)
    _, adapter = trained(family)
    backbone = adapter.backbone
    changed = said(backbone)
    assert (changed - original).abs().max() > 1e-3
    with adapter.off():
        assert torch.equal(said(backbone), original)
    assert torch.equal(said(backbone), changed)
    assert all(one.requires_grad and one.dtype == torch.float32 for one in adapter.parameters())
    assert {name for name, one in backbone.model.named_parameters() if one.requires_grad} == {
        name for name, _ in backbone.model.named_parameters() if "lora_" in name
    }
    assert torch.equal(said(adapter.remove()), original)
    assert backbone.adapter == ""


@with_peft
def test_the_gradient_reaches_heads_and_adapter() -> None:
    head, adapter = trained(steps=1)
    backbone = adapter.backbone
    features = backbone.forward(IDS)
    for hidden in head.unroll(features, IDS, [torch.arange(10)] * 2):
        head.project(hidden, 0).sum().backward(retain_graph=True)
    assert all(one.grad is not None for one in (*head.parameters(), *adapter.parameters()))
    assert all(one.grad is None for name, one in backbone.model.named_parameters() if "lora_" not in name)


@with_peft
@pytest.mark.parametrize("settings", [{}, {"targets": ["q_proj", "v_proj"], "alpha": 3.0}], ids=str)
def test_files_and_generation_are_those_of_the_changed_backbone(settings: dict[str, Any], tmp_path: Path) -> None:
    head, adapter = trained(**settings)
    changed = said(adapter.backbone)
    folder = save_head(head, tmp_path / "head", adapter=adapter)
    save_head(head, folder, adapter=adapter)  # in place of the older one
    assert sorted(path.name for path in folder.rglob("*") if path.is_file()) == sorted(
        ["README.md", "config.json", "model.safetensors", "adapter_config.json", "adapter_model.safetensors"]
    )
    assert "adapter=True" in (folder / "README.md").read_text()
    backbone = zoo.backbone()
    original, name = said(backbone), backbone.name
    with pytest.raises(UserError, match="changes its answers; say adapter=True"):
        load_head(folder, backbone)
    kept = load_head(folder, backbone, adapter=False)
    assert torch.equal(said(backbone), original)
    assert (backbone.name, backbone.adapter) == (name, "")
    plain = Generator(backbone).generate(PROMPT, max_new_tokens=16, do_sample=False).tokens
    assert Generator(backbone, kept).generate(PROMPT, max_new_tokens=16, do_sample=False).tokens == plain
    loaded = load_head(folder, backbone, adapter=True)
    torch.testing.assert_close(said(backbone), changed, atol=1e-4, rtol=1e-4)
    digest = json.loads((folder / "config.json").read_text())["config"]["adapter_hash"]
    assert backbone.adapter == digest == adapter.hash()
    assert digest in backbone.name
    assert not any("lora" in name for name, _ in backbone.model.named_parameters())
    expected = backbone.model.generate(IDS[:1, :6], max_new_tokens=16, do_sample=False)[0, 6:].tolist()
    assert Generator(backbone, loaded).generate(PROMPT, max_new_tokens=16, do_sample=False).tokens == expected
    once_more = said(backbone)
    load_head(folder, backbone)  # it is the changed one by now
    load_head(folder, backbone, adapter=True)
    assert torch.equal(said(backbone), once_more)
    with pytest.raises(UserError, match="has taken in an adapter already"):
        Adapter(backbone)
    with pytest.raises(UserError, match="cannot be saved without it"):
        save_head(loaded, tmp_path / "other")


@with_peft
def test_peft_itself_reads_the_adapter(tmp_path: Path) -> None:
    import peft

    head, adapter = trained()
    folder = save_head(head, tmp_path / "head", adapter=adapter)
    model = peft.PeftModel.from_pretrained(zoo.model(), str(folder / "adapter"))
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, said(adapter.backbone), atol=1e-5, rtol=1e-5)


@with_peft
def test_damaged_or_foreign_adapters_are_refused_and_change_nothing(tmp_path: Path) -> None:
    head, adapter = trained()
    backbone = zoo.backbone()
    original = said(backbone)

    def refused(what: str, change: Any) -> None:
        folder = save_head(head, tmp_path / "head", adapter=adapter)
        change(folder / "adapter")
        with pytest.raises(UserError, match=what):
            load_head(folder, backbone, adapter=True)
        assert torch.equal(said(backbone), original)
        assert backbone.adapter == ""

    def config(**changes: Any) -> Any:
        def change(folder: Path) -> None:
            path = folder / "adapter_config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | changes))

        return change

    def tensors(change: Any) -> Any:
        def changed(folder: Path) -> None:
            path = folder / "adapter_model.safetensors"
            found = load_file(path)
            change(found)
            save_file(found, path)

        return changed

    refused("use_dora is True; only a plain LoRA", config(use_dora=True))
    refused("megatron_core is 'os'", config(megatron_core="os"))
    refused("rank is 0", config(r=0))
    refused("differs", config(r=8))
    refused("differs", config(target_modules=["q_proj"]))
    refused("holds adapter .* was trained with", config(lora_alpha=9.0))
    refused("is no adapter's config", lambda folder: (folder / "adapter_config.json").write_text("{"))
    refused("cannot be read", lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"cut"))
    refused("differs", tensors(lambda found: found.pop(next(iter(found)))))
    refused("holds adapter", tensors(lambda found: next(iter(found.values())).add_(1)))
    refused("the folder adapter is not there", lambda folder: folder.rename(folder.with_name("elsewhere")))


def test_an_adapter_that_nobody_knows_of_is_refused(tmp_path: Path) -> None:
    backbone = zoo.backbone()
    folder = save_head(Medusa.build(backbone), tmp_path / "head")
    with pytest.raises(UserError, match="has no adapter"):
        load_head(folder, backbone, adapter=True)
    (folder / "adapter").mkdir()
    with pytest.raises(UserError, match="names no adapter, and the folder adapter is there"):
        load_head(folder, backbone)


def test_without_peft_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"pip install 'headstart\[peft\]'"):
        Adapter(zoo.backbone())
    with pytest.raises(UserError, match="rank is 0"):
        AdapterSettings(rank=0)
    assert room.FOLDER == "adapter"


@with_peft
def test_a_layer_that_is_not_there_is_named() -> None:
    with pytest.raises(UserError, match="wq"):
        Adapter(zoo.backbone(), AdapterSettings(targets=["wq"]))


@with_peft
def test_the_command_line_takes_it_in_where_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from headstart.cli import main

    head, adapter = trained()
    folder = save_head(head, tmp_path / "head", adapter=adapter)
    zoo.model().save_pretrained(tmp_path / "model")
    zoo.tokenizer().save_pretrained(tmp_path / "model")
    changed = Generator(adapter.merge()).generate("red sun", max_new_tokens=12, do_sample=False).text
    plain = Generator(zoo.backbone()).generate("red sun", max_new_tokens=12, do_sample=False).text
    assert changed != plain
    command = [
        "generate",
        "--backbone",
        str(tmp_path / "model"),
        "--max-new-tokens",
        "12",
        "--temperature",
        "0",
        "red sun",
    ]
    assert main([*command, "--head", str(folder), "--adapter", str(folder)]) == 0
    assert changed.strip() in capsys.readouterr().out
    assert main([*command, "--head", str(folder)]) == 2
    assert "--adapter" in capsys.readouterr().err
