"""What is exported, read by those who own the formats: transformers' configs, and the speculators package.

The package needs an environment of its own; HEADSTART_SPECULATORS_PYTHON names the Python of it.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_exchange import IDS, backbone, built, proposed
from transformers import AutoConfig

import zoo
from headstart.heads.exchange import FORMATS, export_head
from headstart.heads.format import load_head

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 77.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
PYTHON = os.environ.get("HEADSTART_SPECULATORS_PYTHON", "")


@pytest.mark.parametrize(
    "to", [to for to in FORMATS if {"eagle1", "eagle3"} & FORMATS[to].keys() and to != "speculators"]
)
@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 77.0}, LLAMA3], ids=["default", "llama3"])
def test_transformers_takes_every_llama_shaped_config(to: str, rope: dict[str, Any], tmp_path: Path) -> None:
    """B094, B095, B136: with the positions and the rotary embedding that the head was trained with."""
    for method in FORMATS[to]:
        if method == "medusa" or (to == "eagle" and rope is LLAMA3):
            continue
        fields = {"fc_bias": False} if method == "eagle1" else {}
        head = built(method, fields | {"rope_parameters": rope}, small=method == "eagle3")
        folder = export_head(head, to, tmp_path / method)
        config = AutoConfig.from_pretrained(folder)
        assert config.model_type == "llama"
        assert config.num_hidden_layers == 1
        assert config.max_position_embeddings == 256
        assert config.head_dim == 8
        assert {key: config.rope_parameters[key] for key in rope} == rope
        said = json.loads((folder / "config.json").read_text())
        assert said["rope_theta"] == 77.0  # for readers that know the old fields alone
        assert (said["rope_scaling"] or {"rope_type": "default"})["rope_type"] == rope["rope_type"]


def test_architectures_are_those_that_engines_look_for(tmp_path: Path) -> None:
    """B088"""
    wanted = {
        ("eagle3", "sglang"): "LlamaForCausalLMEagle3", ("eagle3", "vllm"): "LlamaForCausalLMEagle3",
        ("eagle3", "specforge"): "LlamaForCausalLMEagle3", ("eagle3", "speculators"): "Eagle3DraftModel",
        ("eagle1", "sglang"): "LlamaForCausalLMEagle", ("eagle1", "vllm"): "LlamaForCausalLM",
        ("medusa", "vllm"): "MedusaModel",
    }  # fmt: skip
    for (method, to), architecture in wanted.items():
        head = built(method, {"fc_bias": False} if method == "eagle1" else {}, small=method == "eagle3")
        folder = export_head(head, to, tmp_path / f"{method}-{to}")
        assert json.loads((folder / "config.json").read_text())["architectures"] == [architecture]


def test_maps_are_offsets_and_marks(tmp_path: Path) -> None:
    """B068"""
    held = load_file(export_head(built("eagle3", {}), "sglang", tmp_path / "a") / "model.safetensors")
    assert (held["d2t"] + torch.arange(40)).tolist() == list(range(5, 45))
    assert held["t2d"].nonzero().flatten().tolist() == list(range(5, 45))
    assert held["d2t"].dtype == torch.int64
    full = load_file(export_head(built("eagle3", {}, small=False), "sglang", tmp_path / "b") / "model.safetensors")
    assert not {"d2t", "t2d"} & full.keys()


def test_no_path_of_this_machine_is_written(tmp_path: Path) -> None:
    other = zoo.backbone(num_hidden_layers=8)
    other.name = str(tmp_path / "my-model")
    head = built("medusa", {}, small=False)
    folder = export_head(type(head).build(other), "medusa", tmp_path / "a")
    assert str(tmp_path) not in (folder / "config.json").read_text()


READ_AND_WRITE = """
import sys, torch
from speculators.models.eagle3 import Eagle3DraftModel
model = Eagle3DraftModel.from_pretrained(sys.argv[1])
names = {name: tuple(one.shape) for name, one in model.state_dict().items()}
held = torch.load(sys.argv[2], weights_only=True)
with torch.no_grad():
    fused = held["taps"]
    if model.input_norm is not None:
        fused = model.input_norm(fused)
    if model.fc_norm is not None:
        fused = torch.cat([norm(part) for norm, part in zip(model.fc_norm, fused.chunk(len(model.fc_norm), -1))], -1)
    states = torch.cat([model.embed_tokens(held["next"]), model.fc(fused)], -1)
    at = torch.arange(states.shape[1])[None]
    mask = torch.full((states.shape[1],) * 2, -torch.inf).triu(1)[None, None]
    for layer in model.layers:
        layer.self_attn.config._attn_implementation = "eager"
        states = layer(states, attention_mask=mask, position_ids=at, position_embeddings=model.rotary_emb(states, at))
    logits = model.lm_head(model.norm(states))
torch.save(logits, sys.argv[3])
model.save_pretrained(sys.argv[4])
"""


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="HEADSTART_SPECULATORS_PYTHON names no Python with the speculators package")
@pytest.mark.parametrize(
    "fields", [{}, {"norm_before_residual": True, "norm_before_fc": True}, {"fc_norm": True}], ids=str
)
def test_the_speculators_package_reads_and_writes_the_same_head(fields: dict[str, Any], tmp_path: Path) -> None:
    backbone().model.save_pretrained(tmp_path / "verifier")
    head = built("eagle3", fields)
    folder = export_head(head, "speculators", tmp_path / "out")
    said = json.loads((folder / "config.json").read_text())
    said["speculators_config"]["verifier"]["name_or_path"] = str(tmp_path / "verifier")
    (folder / "config.json").write_text(json.dumps(said))
    with torch.no_grad():
        features = head.backbone.forward(IDS, taps=head.taps)
    torch.save({"taps": features.taps[:, :5], "next": IDS[:, 1:6]}, tmp_path / "in.pt")
    (tmp_path / "run.py").write_text(READ_AND_WRITE)
    line = [PYTHON, "run.py", str(folder), "in.pt", "logits.pt", "back"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr[-2000:]
    logits = torch.load(tmp_path / "logits.pt", weights_only=True)[0, -1]
    expected = proposed(head)
    torch.testing.assert_close(logits, expected[0, head.vocab.ids], atol=1e-5, rtol=1e-5)
    found = load_head(tmp_path / "back", head.backbone)
    torch.testing.assert_close(proposed(found), expected, atol=1e-6, rtol=1e-6)
