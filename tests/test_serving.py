"""`headstart plan --serve`: by arithmetic what an engine and a head really hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import zoo
from headstart.cli import main
from headstart.errors import UserError
from headstart.heads.format import save_head
from headstart.heads.methods import METHODS
from headstart.heads.vocab import DraftVocab
from headstart.inference import serving as module
from headstart.inference.engine import Engine
from headstart.inference.serving import GIB, SIZES, ServeSettings, figures, fitting, serving, sketch, told
from headstart.inference.tree import Chain


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """The config of a tiny model alone."""
    zoo.model().config.save_pretrained(tmp_path / "tiny")
    return str(tmp_path / "tiny")


@pytest.mark.parametrize("method", ["eagle3", "eagle1", "medusa", "hydra"])
def test_it_is_what_an_engine_holds(method: str, folder: str, tmp_path: Path) -> None:
    backbone = zoo.backbone()
    torch.manual_seed(0)
    save_head(METHODS[method].build(backbone, vocab=DraftVocab(range(40), zoo.VOCAB)), tmp_path / "head")
    settings = ServeSettings(
        serve=True, backbone=folder, head=str(tmp_path / "head"), rows=3, length=50, nodes=3, precision="float32"
    )
    base, verifying, head = serving(settings)[:3]
    engine = Engine(backbone, METHODS[method].build(backbone), max_rows=3, max_tokens=3 * 54, tree=Chain(3))
    weights = 4 * sum(one.numel() for one in backbone.model.parameters())
    assert base.weights == weights
    assert base.slots + head.slots == engine.bytes
    assert verifying.extra == 3 * 4 * zoo.VOCAB * 4
    file = (tmp_path / "head" / "model.safetensors").stat().st_size
    borrowed = 40 * 32 * 4
    assert 0 < head.weights - borrowed <= file, "no more than its file and the rows of the projection"


def test_usual_sizes_have_the_parameters_of_their_names() -> None:
    for size in SIZES:
        count = sum(one.numel() for one in sketch(size).model.parameters()) / 1e9
        assert count == pytest.approx(float(size.removesuffix("b")), rel=0.25), size
    llama = sum(one.numel() for one in sketch("8b").model.parameters())
    assert llama == 8_030_261_248
    assert module.cache_width(sketch("8b").model.config) * 2 == 128 * 1024


def test_what_each_way_to_draft_adds(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ServeSettings(serve=True, backbone="8b", rows=4, length=1000, nodes=23)
    base, verifying, *ways = serving(settings)
    assert [one.name.split(" ")[0] for one in ways] == ["eagle3", "medusa", "draft", "draft"]
    assert base.slots == 4 * 1024 * 128 * 1024
    eagle, medusa, half, eighth = ways
    assert eagle.token == 2 * 2 * 8 * 128
    assert medusa.token == 0
    assert eighth.weights < 0.65 * half.weights
    assert half.token == eighth.token
    text = told([base, verifying, *ways], settings, 24 * GIB)
    assert "8b (8.03 billion)" in text
    assert "rows in 24 GiB" in text
    fit = fitting([base, verifying, *ways], eagle, settings, 24 * GIB)
    assert 0 < fit < fitting([base, verifying, *ways], base, settings, 24 * GIB)
    assert fitting([base, verifying, *ways], eagle, settings, 1 * GIB) == 0
    assert main(["plan", "--serve", "--backbone", "8b", "--json", "--memory", "24"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parts"][0]["of_backbone"] == 1
    assert found["rows_that_fit"].keys() == {one["name"] for one in found["parts"]}
    assert figures([base], settings, None)["rows_that_fit"] is None


def test_what_cannot_be_planned_is_said(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        ([], "needs a backbone"),
        (["--backbone", "6b"], "usual sizes are 0.5b"),
        (["--backbone", "nowhere"], "no such folder"),
        (["--backbone", "8b", "--head", "nowhere"], "no such folder"),
        (["--backbone", "8b", "--rows", "0"], "rows is 0"),
        (["recipe.yaml", "--backbone", "8b"], "takes no recipe"),
    ):
        assert main(["plan", "--serve", *words]) == 2
        assert message in capsys.readouterr().err
    save_head(METHODS["medusa"].build(zoo.backbone()), tmp_path / "head")
    with pytest.raises(UserError, match="hidden_size is 32"):
        serving(ServeSettings(backbone="8b", head=str(tmp_path / "head")))
    assert main(["plan"]) == 2
    assert "--serve" in capsys.readouterr().err
