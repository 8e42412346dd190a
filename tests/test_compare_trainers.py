"""What scripts/compare_trainers.py makes of other trainers' files and clocks."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import zoo
from headstart.heads.eagle3 import Eagle3
from headstart.heads.vocab import DraftVocab

PATH = Path(__file__).resolve().parent.parent / "scripts" / "compare_trainers.py"


@pytest.fixture(scope="module")
def compare():
    spec = importlib.util.spec_from_file_location("compare_trainers", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0."])
def test_heads_of_others_are_read_whole(compare, prefix):
    backbone = zoo.backbone()
    head = Eagle3.build(backbone, vocab=DraftVocab(range(0, 80, 2), zoo.VOCAB))
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    tensors = {name.removeprefix("vocab.").replace("midlayer.", prefix): one for name, one in head.state_dict().items()}
    tensors["embed_tokens.weight"] = torch.zeros(zoo.VOCAB, 32)  # the backbone's own, which is borrowed
    found = compare.foreign(tensors, backbone)
    for name, tensor in head.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
    del tensors["fc.weight"]
    with pytest.raises(AssertionError, match=r"other tensors than expected: \['fc.weight'\]"):
        compare.foreign(tensors, backbone)


def test_the_clock_starts_behind_the_first_steps(compare):
    steps = [10.0 + step for step in range(20)] + [29.0 + 2 * step for step in range(1, 11)]  # 30 steps
    watched = {"steps": steps, "cpu": [2 * moment for moment in steps], "peak_mib": 7, "load": 1.0}
    found = compare.figures(watched, {"tokens": 3000})  # 100 a step
    assert found["speed"] == pytest.approx(1000 / 20)  # ten steps behind the 20th
    assert found["cpu_speed"] == pytest.approx(1000 / 40)
    assert found["steps"] == 30
