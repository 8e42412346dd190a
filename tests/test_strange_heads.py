"""Heads of other tools with odd switches, odd files, or something broken in them: exactly loaded, or refused by reason.

The files are written by hand with the pieces of test_layouts.py, which shares no code with the product.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_exchange import backbone
from test_layouts import SHAPE, VD, H, I, V, again, agrees, draw, eagle3, folder, layer, reference3
from torch import Tensor

from headstart.cli import main
from headstart.errors import UserError
from headstart.heads.format import load_head

__all__ = ["again"]  # a fixture: draws begin anew
Tensors = dict[str, Tensor]
CONFIG = SHAPE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "draft_vocab_size": VD}
NORMS = {f"fc_norm.{i}.weight": torch.linspace(0.5, 1.5, H) for i in range(3)}


FREQUENCIES = "midlayer.self_attn.rotary_emb.inv_freq"  # which older files of EAGLE hold


def wide(tensors: Tensors) -> Tensors:
    """Heads of 12: none that hidden / heads would give."""
    return {**tensors, **layer("midlayer.", 2 * H, head_dim=12)}


def biased(tensors: Tensors, parts: str = "qkvo") -> Tensors:
    rows = {"q": 32, "k": 16, "v": 16, "o": H}
    return {**tensors, **{f"midlayer.self_attn.{part}_proj.bias": draw(rows[part]) for part in parts}}


def upper(tensors: Tensors) -> Tensors:
    """A second layer, with SGLang's name for its first norm."""
    return {**tensors, **layer("layers.1.", H), "layers.1.hidden_norm.weight": 1 + draw(H)}


ODD: dict[str, tuple[dict[str, Any], Callable[[Tensors], Tensors], dict[str, Any]]] = {
    "theta": ({"rope_theta": 777.0}, dict, {"rope_parameters": {"rope_theta": 777.0}}),
    "new names of theta": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 55.0}},
        dict,
        {"rope_parameters": {"rope_theta": 55.0}},
    ),
    "head_dim": ({"head_dim": 12}, wide, {}),
    "head_dim that the tensors tell": ({}, wide, {}),
    "eps": ({"rms_norm_eps": 0.1}, dict, {"rms_norm_eps": 0.1}),
    "biases": ({"attention_bias": True}, biased, {}),
    "taps of vLLM": ({"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}, dict, {"taps": (1, 3, 7)}),
    "taps of SGLang": (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 6]}},
        dict,
        {"taps": (1, 3, 7)},
    ),
    "both, one apart": (
        {
            "eagle_aux_hidden_state_layer_ids": [1, 3, 7],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 6]},
        },
        dict,
        {"taps": (1, 3, 7)},
    ),
    "norms": ({"fc_norm": True}, lambda tensors: tensors | NORMS, {"fc_norm": True}),
    "norm in eagle_config": (
        {"eagle_config": {"norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]}},
        lambda tensors: tensors | {"input_norm.weight": 1 + torch.linspace(0, 1, 3 * H)},
        {"norm_before_fc": True},
    ),
    "two layers": ({"num_hidden_layers": 2}, upper, {"head_layers": 2}),
    "tied flag of the backbone": ({"tie_word_embeddings": False}, dict, {}),
    "no marks": ({}, lambda tensors: {name: one for name, one in tensors.items() if name != "t2d"}, {}),
    "int32 map": ({}, lambda tensors: tensors | {"d2t": tensors["d2t"].int()}, {}),
    "a model's prefix": ({}, lambda tensors: {f"model.{name}": one for name, one in tensors.items()}, {}),
    "a wrapper's prefix": ({}, lambda tensors: {f"module._orig_mod.{name}": t for name, t in tensors.items()}, {}),
    "rotary frequencies": (
        {"rope_theta": 777.0},
        lambda tensors: tensors | {FREQUENCIES: (777.0 ** -(torch.arange(4) / 4)).half()},
        {"rope_parameters": {"rope_theta": 777.0}},
    ),
    "sizes in quotes": ({"hidden_size": "32", "num_attention_heads": "4", "draft_vocab_size": "40"}, dict, {}),
    "the backbone's embedding": (
        {},
        lambda tensors: tensors | {"embed_tokens.weight": backbone().model.model.embed_tokens.weight.detach().clone()},
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_odd_heads_are_loaded_exactly(name: str, tmp_path: Path) -> None:
    config, change, switches = ODD[name]
    tensors = change(eagle3())
    taps = switches.get("taps", (2, 4, 5))
    rest = {key: value for key, value in switches.items() if key != "taps"}
    plain = {
        re.sub(r"^(model|module\._orig_mod)\.", "", one): tensor.long() if one == "d2t" else tensor
        for one, tensor in tensors.items()
    }
    if "layers.1.hidden_norm.weight" in plain:
        plain["layers.1.input_layernorm.weight"] = plain["layers.1.hidden_norm.weight"]
    agrees(folder(tmp_path / "a", CONFIG | config, tensors), reference3(plain, taps, **rest))


@pytest.mark.parametrize("kind", ["pt", "shards of bin", "shards of safetensors", "state_dict", "bf16"])
def test_files_of_every_kind(kind: str, tmp_path: Path) -> None:
    tensors, path = eagle3(), tmp_path / "a"
    if kind == "bf16":
        tensors = {name: one.bfloat16() if one.is_floating_point() else one for name, one in tensors.items()}
        expected = reference3(
            {k: one.float() if one.is_floating_point() else one for k, one in tensors.items()}, (2, 4, 5)
        )
        return agrees(folder(path, CONFIG, tensors), expected)
    folder(path, CONFIG, {})
    (path / "model.safetensors").unlink()
    if kind in ("pt", "state_dict"):
        torch.save(tensors if kind == "pt" else {"state_dict": tensors, "step": 3}, path / "eagle.pt")
    else:
        end = "bin" if kind.endswith("bin") else "safetensors"
        stem = {"bin": "pytorch_model", "safetensors": "model"}[end]
        names = sorted(tensors)
        parts = {f"{stem}-0000{i + 1}-of-00002.{end}": names[i::2] for i in range(2)}
        for file, part in parts.items():
            held = {name: tensors[name] for name in part}
            torch.save(held, path / file) if end == "bin" else save_file(held, path / file)
        index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
        (path / f"{stem}.{end}.index.json").write_text(json.dumps(index))
    return agrees(path, reference3(tensors, (2, 4, 5)))


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: one for key, one in tensors.items() if key != name}


def put(name: str, tensor: Tensor) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: tensor}


BROKEN: dict[str, tuple[dict[str, Any], Callable[[Tensors], Tensors], str]] = {
    "absolute map": ({}, lambda tensors: tensors | {"d2t": tensors["d2t"] + torch.arange(VD)}, "d2t"),
    "map twice": ({}, lambda tensors: tensors | {"d2t": tensors["d2t"] * 0 + 3 - torch.arange(VD)}, "draft id 1"),
    "map out of range": ({}, lambda tensors: tensors | {"d2t": tensors["d2t"] + V}, "draft id 0"),
    "marks of others": ({}, lambda tensors: tensors | {"t2d": tensors["t2d"].roll(1)}, "t2d"),
    "no map": ({}, without("d2t"), "d2t"),
    "no norm": ({}, without("norm.weight"), "missing: norm.weight"),
    "no hidden_norm": ({}, without("midlayer.hidden_norm.weight"), "missing: midlayer.hidden_norm.weight"),
    "no projection": ({}, without("lm_head.weight"), "lm_head.weight"),
    "a bias of fc": ({}, put("fc.bias", torch.ones(H)), "fc.bias"),
    "a bias of fc that is said": ({"bias": True}, put("fc.bias", torch.ones(H)), "fc.bias"),
    "a norm that no switch names": ({}, put("input_norm.weight", torch.ones(3 * H)), "input_norm"),
    "a switch without its norm": ({"fc_norm": True}, dict, "fc_norm"),
    "another layer": ({}, put("layers.3.mlp.up_proj.weight", torch.ones(I, H)), "layers.3"),
    "the backbone's layers": ({"num_hidden_layers": 8}, dict, "num_hidden_layers is 8, and the file holds 1"),
    "biases that are denied": ({"attention_bias": False}, biased, "bias"),
    "biases that are missing": ({"attention_bias": True}, dict, "bias"),
    "heads that do not fit": ({"num_attention_heads": 5}, dict, "num_attention_heads"),
    "another vocabulary": ({"vocab_size": 2 * V}, dict, "t2d has shape (96,), and vocab_size is 192"),
    "the draft vocabulary for the whole": ({"vocab_size": VD}, dict, "t2d has shape (96,), and vocab_size is 40"),
    "another draft vocabulary": ({"draft_vocab_size": VD - 1}, dict, "d2t has 40 entries, and the head proposes 39"),
    "layers said twice": (
        {
            "eagle_aux_hidden_state_layer_ids": [1, 3, 7],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]},
        },
        dict,
        "which is it",
    ),
    "a layer too high": ({"eagle_aux_hidden_state_layer_ids": [1, 3, 70]}, dict, "70"),
    "four layers, three read": ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 7]}, dict, "fc.weight"),
    "tied to an embedding": ({"tie_word_embeddings": True}, dict, "tie_word_embeddings"),
    "numbers in words": ({"rope_theta": "ten thousand"}, dict, "rope_theta"),
    "a width that is none": ({"hidden_size": -1}, dict, "hidden_size is -1; expected a whole number"),
    "another activation": ({"hidden_act": "mish7"}, dict, "hidden_act"),
    "a rotary embedding in words": ({"rope_scaling": "linear"}, dict, "of another kind"),
    "a list for a dict": ({"eagle_config": [1, 2]}, dict, "of another kind"),
    "no draft vocabulary at all": ({"draft_vocab_size": 0}, dict, "draft_vocab_size is 0; expected a whole number"),
    "a switch in quotes": ({"norm_output": "false"}, dict, "norm_output is 'false'; expected true or false"),
    "a switch of eagle_config in quotes": (
        {"eagle_config": {"norm_before_fc": "off"}},
        dict,
        "norm_before_fc is 'off'",
    ),
    "a number for a switch": ({"norm_before_residual": 2}, dict, "norm_before_residual is 2"),
    "an epsilon below zero": ({"rms_norm_eps": -1e-6}, dict, "rms_norm_eps is -1e-06"),
    "an endless epsilon": ({"rms_norm_eps": float("inf")}, dict, "rms_norm_eps is inf"),
    "a rotary base of zero": ({"rope_theta": 0}, dict, "rope_theta is 0.0"),
    "no positions": ({"max_position_embeddings": 0}, dict, "max_position_embeddings is 0"),
    "rotary frequencies of another base": (
        {},
        put(FREQUENCIES, 5e5 ** -(torch.arange(4) / 4)),
        f"{FREQUENCIES} is not that of rope_theta 10000",
    ),
    "four states, three layers": (
        {"num_aux_hidden_states": 4, "eagle_aux_hidden_state_layer_ids": [1, 3, 7]},
        dict,
        "num_aux_hidden_states is 4, and the layers are [1, 3, 7]",
    ),
    "four states, none named": ({"num_aux_hidden_states": 4}, dict, "name all of them"),
    "a weight that is no number": ({}, put("norm.weight", torch.full((H,), torch.nan)), "norm.weight holds numbers"),
    "eight bits without a scale": ({}, put("fc.weight", torch.ones(H, 3 * H).to(torch.float8_e4m3fn)), "float8_e4m3fn"),
    "another rotary kind": ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, dict, "spiral"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_heads_are_refused_by_reason(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, change, words = BROKEN[name]
    path = folder(tmp_path / "a", CONFIG | config, change(eagle3()))
    with pytest.raises(UserError, match=r"(?s)a: |model\.safetensors|config\.json") as refusal:
        load_head(path, backbone())
    assert words in str(refusal.value)
    line = ["export", "--head", str(path), "--to", "vllm", "--out", str(tmp_path / "out")]
    assert main(line) == 2 or name == "a layer too high"  # which the backbone alone knows
    assert "Traceback" not in capsys.readouterr().err


# -- files that are none -----------------------------------------------------------------------------------------------


class Runs:
    """What a pickle runs when it is opened."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("was-run"),)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "medusa_lm_head.pt", "hydra_lm_head.pt", "odd.pth"])
def test_pickles_that_would_run_something(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = folder(tmp_path / "a", CONFIG, {})
    (path / "model.safetensors").unlink()
    for content in (pickle.dumps(Runs()), saved({"fc.weight": torch.ones(2), "x": Runs()})):
        (path / file).write_bytes(content)
        for argument in (path, path / file):
            with pytest.raises(UserError, match="holds more than tensors|cannot be read"):
                load_head(argument, backbone())
            assert main(["inspect", str(argument)]) == 2
    assert not (tmp_path / "was-run").exists()


def test_an_index_that_promises_more_than_its_shards_hold(tmp_path: Path) -> None:
    path = folder(tmp_path / "a", CONFIG, eagle3(), "model-00001-of-00001.safetensors")
    placed = dict.fromkeys([*eagle3(), "fc.bias"], "model-00001-of-00001.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    with pytest.raises(UserError, match=r"names fc\.bias, which none of its shards holds"):
        load_head(path, backbone())


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def bomb() -> bytes:
    """A few bytes that unpack to two gigabytes."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("a/data.pkl", "w") as inside:
        for _ in range(256):
            inside.write(bytes(1 << 23))
    return file.getvalue()


FILES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "cut": ("pytorch_model.bin", lambda: saved({"fc.weight": torch.ones(9, 9)})[:-200]),
    "empty": ("pytorch_model.bin", bytes),
    "no pickle": ("pytorch_model.bin", lambda: b"<html>Not found</html>"),
    "a list": ("pytorch_model.bin", lambda: saved([torch.ones(2)])),
    "numbers": ("pytorch_model.bin", lambda: saved({"fc.weight": 3})),
    "cut safetensors": ("model.safetensors", lambda: b"\x08\0\0\0\0\0\0\0{\"a\": 1"),
    "a header of exabytes": ("model.safetensors", lambda: b"\xff\xff\xff\xff\xff\xff\xff\x7f{}"),
    "a pointer of git": ("model.safetensors", lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
    "lies about sizes": (
        "model.safetensors",
        lambda: (lambda said: len(said).to_bytes(8, "little") + said)(
            b'{"fc.weight":{"dtype":"F32","shape":[9999999,9999999],"data_offsets":[0,399999920000004]}}'
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_damaged(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, content = FILES[name]
    path = folder(tmp_path / "a", CONFIG, {})
    (path / "model.safetensors").unlink()
    (path / file).write_bytes(content())
    with pytest.raises(UserError, match=file):
        load_head(path, backbone())
    assert main(["inspect", str(path)]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_file_that_unpacks_to_more_than_there_is(tmp_path: Path) -> None:
    path = folder(tmp_path / "a", CONFIG, {})
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(bomb())
    with pytest.raises(UserError, match="pytorch_model.bin"):
        load_head(path, backbone())
