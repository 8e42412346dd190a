"""The own format: what is written, and everything that must not be read."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_heads import CASES

import zoo
from headstart.errors import UserError
from headstart.heads.base import DraftHead
from headstart.heads.exchange import export_head
from headstart.heads.format import load_head, save_head
from headstart.heads.methods import METHODS
from headstart.heads.vocab import DraftVocab
from headstart.settings import dump

SMALL = DraftVocab(range(5, 45), zoo.VOCAB)
IDS = torch.randint(3, zoo.VOCAB, (1, 9), generator=torch.Generator().manual_seed(0))


def built(method: str = "eagle3", family: str = "llama", vocab: DraftVocab | None = SMALL, **fields: Any) -> DraftHead:
    torch.manual_seed(0)
    head = METHODS[method].build(zoo.backbone(family), vocab=vocab, **fields)
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return head


@torch.no_grad()
def proposed(head: DraftHead) -> torch.Tensor:
    features = head.backbone.forward(IDS, taps=head.taps)
    state = head.start()
    first = head.extend(state, features[:, :8], IDS[:, 1:])
    second = head.step(state, torch.tensor([[5, 9]]), torch.tensor([[-1, -1]]))
    return torch.cat((first.logits, second.logits), 1)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_head(built(), tmp_path / "head", provenance={"recipe": "a.yaml", "steps": 3})


def rewritten(folder: Path, change: Any, *, tensors: bool = False) -> Path:
    """Change `config.json`, or the tensors, in place."""
    path = folder / ("model.safetensors" if tensors else "config.json")
    found = load_file(path) if tensors else json.loads(path.read_text())
    change(found)
    save_file(found, path) if tensors else path.write_text(json.dumps(found))
    return folder


# -- round trips ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", zoo.FAMILIES)
@pytest.mark.parametrize("vocab", [None, SMALL], ids=["full", "small"])
def test_round_trip_is_exact(method: str, family: str, vocab: DraftVocab | None, tmp_path: Path) -> None:
    head = built(method, family, vocab)
    found = load_head(save_head(head, tmp_path / "head"), head.backbone)
    assert type(found) is type(head)
    assert found.config == head.config
    assert found.taps == head.taps
    assert not found.training
    for name, tensor in head.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor)
    assert torch.equal(proposed(found), proposed(head))


@pytest.mark.parametrize(("method", "fields"), CASES, ids=str)
def test_round_trip_of_every_shape(method: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """B083: every switch at another value than its default, exactly."""
    head = built(method, **fields)
    found = load_head(save_head(head, tmp_path / "head"), head.backbone)
    assert found.config == head.config
    assert torch.equal(proposed(found), proposed(head))


@pytest.mark.parametrize(("method", "fields"), [case for case in CASES if case[1]], ids=str)
def test_a_switch_that_got_lost_is_refused(method: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """B083: with its switches at their defaults the config no longer fits the weights, unless a switch has none."""
    head = built(method, **fields)
    plain = dump(METHODS[method].build(zoo.backbone(), vocab=SMALL).config)
    folder = rewritten(save_head(head, tmp_path / "head"), lambda found: found["config"].update(plain))
    weightless = {"norm_output", "norm_before_residual", "scale_input"}
    if dict(plain, **{key: value for key, value in fields.items() if key not in weightless}) == plain:
        return
    with pytest.raises(UserError, match=f"does not hold the {method} head"):
        load_head(folder)


def test_biases_of_qwen2_are_in_the_file(tmp_path: Path) -> None:
    names = load_file(save_head(built(family="qwen2"), tmp_path / "head") / "model.safetensors")
    assert {name for name in names if name.endswith("bias")} == {
        f"midlayer.self_attn.{part}_proj.bias" for part in ("q", "k", "v")
    }


@pytest.mark.parametrize("taps", [(1, 2, 3), (0, 1, 2, 4)], ids=str)
def test_projection_is_as_wide_as_the_taps(taps: tuple[int, ...], tmp_path: Path) -> None:
    folder = save_head(built(taps=taps), tmp_path / "head")
    assert json.loads((folder / "config.json").read_text())["config"]["taps"] == list(taps)
    assert load_file(folder / "model.safetensors")["fc.weight"].shape == (32, 32 * len(taps))
    assert load_head(folder).taps == taps


def test_file_holds_the_head_alone(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    assert sorted(tensors) == sorted([
        "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d",
        *(f"midlayer.{part}.weight" for part in ("hidden_norm", "input_layernorm", "post_attention_layernorm")),
        *(f"midlayer.self_attn.{part}_proj.weight" for part in "qkvo"),
        *(f"midlayer.mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    ])  # fmt: skip
    assert (tensors["d2t"] + torch.arange(40)).tolist() == list(range(5, 45))
    assert tensors["t2d"].nonzero().flatten().tolist() == list(range(5, 45))


def test_config_says_where_it_comes_from(saved: Path) -> None:
    found = json.loads((saved / "config.json").read_text())
    assert found["method"] == "eagle3"
    assert "0 is the embedding output" in found["layer_ids"]
    assert found["provenance"] == {"recipe": "a.yaml", "steps": 3}
    assert set(found["versions"]) == {"headstart", "torch", "transformers"}
    backbone = zoo.backbone()
    assert found["config"]["backbone"] == "tiny-llama"
    assert found["config"]["backbone_hash"] == backbone.fingerprint()
    card = (saved / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: headstart\n")
    assert "tiny-llama" in card
    assert "| steps | 3 |" in card


def test_paths_of_this_machine_do_not_travel(tmp_path: Path) -> None:
    backbone = zoo.backbone()
    backbone.name = str(tmp_path / "my-model")
    folder = save_head(METHODS["medusa"].build(backbone), tmp_path / "head")
    assert str(tmp_path) not in (folder / "config.json").read_text() + (folder / "README.md").read_text()
    assert json.loads((folder / "config.json").read_text())["config"]["backbone"] == "my-model"


def test_dtype_and_device(saved: Path, tmp_path: Path) -> None:
    assert next(load_head(saved).parameters()).dtype == torch.float32
    half = save_head(built().to(torch.bfloat16), tmp_path / "half")
    assert next(load_head(half).parameters()).dtype == torch.bfloat16
    assert next(load_head(half, zoo.backbone()).parameters()).dtype == torch.float32  # the backbone's
    assert next(load_head(half, zoo.backbone(), dtype=torch.bfloat16).parameters()).dtype == torch.bfloat16
    assert load_head(half).vocab.d2t is not None
    assert load_head(half).state_dict()["vocab.d2t"].dtype == torch.int64


def test_a_loaded_head_is_trained_on(saved: Path) -> None:
    head = load_head(saved, zoo.backbone())
    features = head.backbone.forward(IDS, taps=head.taps)
    for depth, hidden in enumerate(head.unroll(features, IDS, [torch.arange(5)] * 2)):
        head.project(hidden, depth).sum().backward(retain_graph=True)
    assert all(weight.grad is not None for weight in head.parameters())


# -- writing --------------------------------------------------------------------------------------------------------


def test_an_older_head_is_replaced_and_nothing_else(saved: Path, tmp_path: Path) -> None:
    save_head(built("medusa"), saved)
    assert load_head(saved).method == "medusa"
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match=r"thesis\.txt"):
        save_head(built(), tmp_path / "work")
    assert (tmp_path / "work" / "thesis.txt").read_text() == "mine"


def test_a_failed_save_leaves_the_old_head(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    monkeypatch.setattr("headstart.heads.format._card", lambda manifest: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_head(built("medusa"), saved)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fc.weight", "midlayer.hidden_norm.weight", "lm_head.weight", "d2t", "t2d"])
def test_missing_tensors_are_named(name: str, saved: Path) -> None:
    rewritten(saved, lambda tensors: tensors.pop(name), tensors=True)
    with pytest.raises(UserError, match=f"missing: {name}"):
        load_head(saved)


def test_extra_tensors_are_named(saved: Path) -> None:
    bias = "midlayer.self_attn.q_proj.bias"
    rewritten(saved, lambda tensors: tensors.update({bias: torch.zeros(32)}), tensors=True)
    with pytest.raises(UserError, match=f"not part of it: {bias}"):
        load_head(saved)


def test_maps_beside_a_full_vocabulary_are_extra(tmp_path: Path) -> None:
    folder = save_head(built(vocab=None), tmp_path / "head")
    rewritten(folder, lambda tensors: tensors.update(d2t=torch.zeros(zoo.VOCAB, dtype=torch.long)), tensors=True)
    with pytest.raises(UserError, match="not part of it: d2t"):
        load_head(folder)


def test_other_shapes_and_kinds_are_named(saved: Path) -> None:
    rewritten(saved, lambda tensors: tensors.update({"fc.weight": torch.zeros(32, 64)}), tensors=True)
    with pytest.raises(UserError, match=r"fc\.weight is float \(32, 64\), expected float \(32, 96\)"):
        load_head(saved)
    rewritten(saved, lambda tensors: tensors.update({"fc.weight": torch.zeros(32, 96).to(torch.int8)}), tensors=True)
    with pytest.raises(UserError, match=r"fc\.weight is int8"):
        load_head(saved)


@pytest.mark.parametrize(
    ("entry", "offset", "words"),
    [
        (39, zoo.VOCAB - 39, "draft id 39 stands for token 96"),
        (0, -1, "draft id 0 stands for token -1"),
        (7, 4, "draft id 7 .* twice: token 11"),
        (7, 3, "draft id 7 .* out of order: token 10 after 11"),
    ],
)
def test_bad_maps_are_refused(entry: int, offset: int, words: str, saved: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["d2t"][entry] = offset

    rewritten(saved, change, tensors=True)
    with pytest.raises(UserError, match=words) as caught:
        load_head(saved)
    assert "model.safetensors" in str(caught.value)


def test_a_map_of_another_length_is_refused(saved: Path) -> None:
    rewritten(saved, lambda tensors: tensors.update(d2t=torch.full((41,), 5)), tensors=True)
    with pytest.raises(UserError, match=r"t2d\[45\] is False, and d2t says True"):
        load_head(saved)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["t2d"][45] = True

    rewritten(saved, change, tensors=True)  # the maps agree now, but not with the projection
    with pytest.raises(UserError, match="41 of 96 tokens; the head's config says 40"):
        load_head(saved)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c["config"].update(nrom_before_fc=True), "unknown setting nrom_before_fc"),
        (lambda c: c["config"].update(tap=[1]), "did you mean taps"),
        (lambda c: c["config"].pop("hidden_size"), "hidden_size is missing"),
        (lambda c: c["config"].update(hidden_size="wide"), "hidden_size is 'wide'"),
        (lambda c: c["config"].update(taps=[1, 9]), r"taps are \[1, 9\]"),
        (lambda c: c["config"].update(draft_vocab_size=97), "draft_vocab_size is 97"),
        (lambda c: c.update(extra=1), "unknown setting extra"),
        (lambda c: c.update(method="eagel3"), "method is 'eagel3'; known are medusa, eagle3"),
        (lambda c: c.update(format_version=2), "format_version is 2"),
    ],
)
def test_wrong_configs_are_refused(change: Any, words: str, saved: Path) -> None:
    rewritten(saved, change)
    with pytest.raises(UserError, match=words) as caught:
        load_head(saved)
    assert "config.json" in str(caught.value)


def test_the_other_method_is_refused(saved: Path) -> None:
    medusa = built("medusa").config
    rewritten(saved, lambda config: config.update(method="medusa", config=medusa.__dict__))
    with pytest.raises(UserError, match="does not hold the medusa head"):
        load_head(saved)


def test_damaged_files_are_refused(saved: Path) -> None:
    weights = saved / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="cut short"):
        load_head(saved)
    weights.unlink()
    with pytest.raises(UserError, match="no such file, so the head has no weights"):
        load_head(saved)
    (saved / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read as JSON"):
        load_head(saved)


def test_the_own_format_has_no_pickles(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    (saved / "model.safetensors").unlink()
    torch.save(tensors, saved / "pytorch_model.bin")
    with pytest.raises(UserError, match="no such file"):
        load_head(saved)


def test_another_backbone_is_refused(saved: Path) -> None:
    with pytest.raises(UserError, match=r"width 32; tiny-llama has 64"):
        load_head(saved, zoo.backbone(hidden_size=64))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"medusa_num_heads": 3, "medusa_num_layers": 1}, "Medusa heads without their tensors"),
        (
            {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000},
            "an EAGLE-3 head without its tensors",
        ),
        (
            {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "bias": False},
            "an EAGLE head without its tensors",
        ),
        ({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32}, "whole causal LM"),
        ({"model_type": "mlp_speculator"}, "an MLP speculator without its tensors"),
        ({"hydra_num_heads": 4}, "Hydra heads"),
        ({"x": 1}, "nothing known here, with config.json"),
        ([], "holds no JSON object"),
    ],
)
def test_foreign_folders_are_recognised(config: Any, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=words) as caught:
        load_head(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_no_head_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"")
    with pytest.raises(UserError, match=r"medusa_lm_head\.pt: cannot be read, it may be cut short"):
        load_head(tmp_path)
    (tmp_path / "medusa_lm_head.pt").unlink()
    with pytest.raises(UserError, match=r"holds no weights .* nothing known here, with nothing"):
        load_head(tmp_path)
    for name in ("./nowhere", "nowhere", str(tmp_path / "nowhere"), "a/b/c"):
        with pytest.raises(UserError, match="no such folder; a head is"):
            load_head(name)
    with pytest.raises(UserError, match="no such folder"):
        load_head(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("taps", [2, 2, 3], "one of them stands there twice"),
        ("rope_parameters", {"rope_type": "spiral"}, "no rotary embedding of this kind"),
        ("vocab_size", 10**12, "no vocabulary has more than"),
        ("head_layers", 10**6, "head_layers is 1000000, and the file holds"),
    ],
)
def test_values_that_no_head_has(saved: Path, field: str, value: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        load_head(rewritten(saved, lambda found: found["config"].update({field: value})))


def test_hub_ids_are_fetched_without_pickles(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: dict[str, Any] = {}

    def fetched(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(saved)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    assert load_head("user/name", revision="v1").method == "eagle3"
    patterns = ["config.json", "*.safetensors", "*.index.json", "adapter/*.json"]
    assert asked == {"name": "user/name", "revision": "v1", "allow_patterns": patterns, "token": None}


def test_an_unreachable_hub_is_said_plainly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="user/none: no such folder; on the Hub: HF_HUB_OFFLINE is set"):
        load_head("user/none")


def test_the_folder_of_a_run_stands_for_its_head(tmp_path):
    backbone = zoo.backbone()
    saved = METHODS["medusa"].build(backbone)
    save_head(saved, tmp_path / "run" / "head")
    (tmp_path / "run" / "recipe.yaml").write_text("method: medusa\n")
    loaded = load_head(tmp_path / "run", backbone)
    for name, value in saved.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name


def test_whoever_may_read_a_folder_may_read_its_head(tmp_path: Path) -> None:
    """The umask decides, as for any file: safetensors 0.8 would make the weights readable for their writer alone."""
    head = METHODS["medusa"].build(zoo.backbone())
    before = os.umask(0o022)
    try:
        folder = save_head(head, tmp_path / "head")
        export_head(METHODS["eagle3"].build(zoo.backbone(), vocab=SMALL), "vllm", tmp_path / "exported")
    finally:
        os.umask(before)
    for path in (*folder.iterdir(), *(tmp_path / "exported").iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) == 0o644, path
