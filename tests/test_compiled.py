"""Rounds of fixed shapes, compiled: the tokens are those of the eager model, and no graph is made twice."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import families
import pytest
import test_families
import torch
from torch._dynamo.utils import counters

import zoo
from headstart import Generator, UserError
from headstart.heads import compiled as module
from headstart.heads.compiled import Compiled, slots, width
from headstart.heads.methods import METHODS

PROMPT = [1, 5, 6, 7, 9, 11]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    log = logging.getLogger("torch.__trace")  # of which pytest would keep every record
    torch._dynamo.reset()
    log.disabled = True
    yield
    log.disabled = False
    torch._dynamo.reset()


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    monkeypatch.setattr(module, "BACKEND", request.param)
    return request.param


def tokens(generator: Generator, new: int = 14, **options: Any) -> list[int]:
    asked = {"do_sample": False, "eos_token_id": -1, **options}
    found: list[int] = generator.generate(PROMPT, max_new_tokens=new, **asked).tokens
    return found


def test_sizes() -> None:
    assert [width(nodes) for nodes in (1, 2, 8, 9, 16, 17, 100)] == [1, 8, 8, 16, 16, 32, 128]
    assert [slots(count) for count in (1, 256, 257, 512, 513, 8192)] == [256, 256, 512, 512, 1024, 8192]


@pytest.mark.parametrize("backend", [None], indirect=True)
@pytest.mark.parametrize(
    "name", ["mistral", "gemma2", "phi", "gpt2", "opt", "falcon", "deepseek-v3", "gpt-oss", "llama4", "gemma3-vision"]
)
def test_padded_rounds_change_nothing(name: str, backend: Any) -> None:
    """The shapes alone, without a compiler: on windows, learned positions, mixtures and others."""
    backbone = families.backbone(name)
    head = METHODS["eagle3"].build(backbone)
    for tree in ("chain:2", "dynamic:3x3x8"):
        generator = Generator(backbone, head, tree=tree, compile=True)
        output = generator.generate(test_families.prompt(), max_new_tokens=test_families.NEW, do_sample=False)
        assert output.tokens == test_families.own(backbone)
        assert generator._compiled is not None
        assert not generator._compiled.off


@pytest.mark.parametrize("backend", [None], indirect=True)
def test_a_cache_grows_between_rounds(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLOTS", 16)
    monkeypatch.setattr("headstart.inference.generator.PREFILL", 1)
    monkeypatch.setattr("headstart.inference.generator.ROOM", 0)
    backbone = zoo.backbone()
    head = METHODS["eagle3"].build(backbone)
    generator = Generator(backbone, head, compile=True)
    assert tokens(generator, 60) == tokens(Generator(backbone), 60)
    assert generator._compiled is not None
    assert {shape[1] for shape in generator._compiled._known} == {16, 32, 64, 128}


@pytest.mark.parametrize(
    "backend",
    ["eager", pytest.param("aot_eager", marks=pytest.mark.slow), pytest.param("inductor", marks=pytest.mark.slow)],
    indirect=True,
)
def test_no_graph_is_made_twice(backend: Any) -> None:
    backbone = zoo.backbone(num_hidden_layers=2)
    expected, drawn = tokens(Generator(backbone), 60), {"do_sample": True, "seed": 3}
    sampled = tokens(Generator(backbone), 20, **drawn)
    for drafter in (None, METHODS["eagle3"].build(backbone)):
        generator = Generator(backbone, drafter, tree="dynamic:3x3x7" if drafter else None, compile=True)
        assert tokens(generator, 60) == expected
        counters.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert tokens(generator, 60) == expected
            assert tokens(generator, 20, **drawn) == sampled
        assert counters["stats"]["unique_graphs"] == 0, "rounds after the first answer make no graph"
        assert generator._compiled is not None
        assert {shape[0] for shape in generator._compiled._known} == ({1, 8} if drafter else {1})


def test_what_cannot_be_compiled_goes_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise ValueError("no compiler here")

    monkeypatch.setattr(module, "BACKEND", broken)
    backbone = zoo.backbone(num_hidden_layers=1)
    generator = Generator(backbone, "ngram", compile=True)
    with pytest.warns(UserWarning, match="cannot be compiled .*no compiler here.*goes on uncompiled") as told:
        assert tokens(generator) == tokens(Generator(backbone))
    assert len([one for one in told if "uncompiled" in str(one.message)]) == 1, "said once"
    assert tokens(generator) == tokens(Generator(backbone))


@pytest.mark.parametrize("backend", [None], indirect=True)
def test_an_error_of_the_model_itself_comes_through(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = zoo.backbone()
    ids = torch.tensor([PROMPT])
    cache = backbone.new_cache()
    backbone.forward(ids, cache=cache)
    cache.commit_all()

    def broken(*arguments: Any, **more: Any) -> Any:
        raise RuntimeError("the model is broken")

    monkeypatch.setattr(backbone.layers[1], "forward", broken)
    with pytest.warns(UserWarning, match="goes on"), pytest.raises(RuntimeError, match="the model is broken"):
        Compiled(backbone).forward(ids[:, :1], cache=cache, ancestors=None)


def test_factors_that_change_with_the_length_and_unknown_modes_are_told() -> None:
    with pytest.warns(UserWarning, match="rotary factors change.*goes on uncompiled"):
        Generator(families.backbone("phi3-longrope"), compile=True)
    with pytest.raises(UserError, match="compile is 'fast'; it has to be True, False or one of default, reduce"):
        Generator(zoo.backbone(), compile="fast")
