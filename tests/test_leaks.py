"""What must not travel: every kind of path and secret is found or cut, and nothing else is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_exchange import built

from headstart.errors import UserError
from headstart.heads.exchange import export_head
from headstart.heads.format import save_head
from headstart.heads.leaks import leaks, stripped
from headstart.inference.publish import PushSettings, staged

HUB = "hf_" + "aB3" * 12
SECRETS = [
    HUB,
    "sk-" + "proj-" + "aB3" * 12,
    "ghp_" + "aB3" * 12,
    "AKIA" + "ABCDEFGH12345678",
    "xoxb-" + "1234567890-abc",
    "-----BEGIN " + "RSA PRIVATE KEY-----",
    "https://me:" + "hunter2@example.org/x",
    "wandb_key: " + "0123456789abcdef" * 2,
    '"api_key": "' + "a1b2c3d4e5f6a7b8" + '"',
    "Authorization: Bearer " + "a1b2c3d4e5f6a7b8c9",
    "eyJhbGciOiJI" + ".eyJzdWIiOiIx" + ".SflKxwRJSMeKK",
]
PATHS = [
    "/home/ada/chats.jsonl", "/Users/ada/x", "~/runs/one", "/tmp/tmp12/head", "/root/.cache/huggingface",
    "/gpfs01/project/ada/data", "C:\\Users\\ada\\x.json", "file:///srv/x", "/scratch/a b/chats.jsonl",
]  # fmt: skip
INNOCENT = [
    '"eos_token": "<|im_end|>"', '"mask_token_id": 151669', '"tokens": 202791', '"tokenizer_hash": "237d1306abb03682"',
    "a and/or b", "https://huggingface.co/user/data/home/x", "user/repo", "1/2", "</think>", "tokens: 1234567890123456",
    '"layers.0.self_attn.q_proj.weight"', "github.com/a/b/c/d", '"backbone_hash": "46b5a6052296a88b"', "//", "x /y",
]  # fmt: skip


def held(folder: Path, text: str, name: str = "x.txt") -> list[str]:
    (folder / name).write_text(text)
    return leaks(folder)


@pytest.mark.parametrize("secret", SECRETS)
def test_secrets_are_found_and_not_told(secret: str, tmp_path: Path) -> None:
    said = held(tmp_path, f"a\nb {secret} c\n")
    assert said
    assert said[0].startswith("x.txt, line 2: ")
    assert secret not in " ".join(said)


@pytest.mark.parametrize("path", PATHS)
def test_paths_are_found_and_cut(path: str, tmp_path: Path) -> None:
    assert "a path of this machine" in held(tmp_path, f"from {path}.")[0]
    notes: list[str] = []
    cut = stripped({"a": [{"b": path}], "c": 3}, notes)
    assert cut["a"][0]["b"] in path
    assert not set("/\\") & set(cut["a"][0]["b"])
    assert notes == [f"a[0].b is a path of this machine, and travels as {cut['a'][0]['b']}"]


@pytest.mark.parametrize("text", INNOCENT)
def test_nothing_else_is_taken_for_either(text: str, tmp_path: Path) -> None:
    assert held(tmp_path, text) == []
    assert stripped(text, []) == text


def test_secrets_of_this_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPANY_API_KEY", "quite plain words")
    assert "a secret of this environment (quite …, 17 characters)" in held(tmp_path, "so quite plain words it is")[0]


def test_headers_of_weights_are_read(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "a.safetensors", metadata={"from": "/home/ada/run"})
    torch.save({f"note {HUB}": torch.zeros(2)}, tmp_path / "b.bin")
    said = leaks(tmp_path)
    assert said[0].startswith("a.safetensors, header: a path of this machine (/home/ada/run")
    assert said[1].startswith("b.bin, line 1: a token of the Hub")


def changed(folder: Path, change: Any) -> Path:
    path = folder / "config.json"
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))
    return folder


@pytest.mark.filterwarnings("ignore")
def test_what_is_pushed_has_neither(tmp_path: Path) -> None:
    head = built("eagle3", {})
    provenance = {"data": ["/home/ada/chats.jsonl", "shipped"], "note": "~/x/y"}
    own = save_head(head, tmp_path / "run" / "head", provenance=provenance)
    (tmp_path / "run" / "recipe.yaml").write_text("data:\n  train: [/home/ada/chats.jsonl]\n")
    other = changed(export_head(head, "vllm", tmp_path / "b"), lambda said: said.update(_name_or_path="/home/ada/m"))
    for number, source in enumerate((own, tmp_path / "run", other)):
        folder = staged(PushSettings(head=str(source), repo="ada/x"), tmp_path / f"out{number}")
        texts = [path.read_text() for path in folder.rglob("*") if path.is_file() and path.suffix != ".safetensors"]
        assert not any("ada/chats" in text or "home" in text for text in texts)
        assert leaks(folder) == []
    assert "chats.jsonl" in (tmp_path / "out1" / "recipe.yaml").read_text()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("words", "said"), [(HUB, "a token of the Hub"), ("see /home/ada/x", "a path of this machine")]
)
def test_what_cannot_be_cut_is_refused(words: str, said: str, tmp_path: Path) -> None:
    own = save_head(built("eagle3", {}), tmp_path / "head", provenance={"note": words})
    with pytest.raises(UserError, match=rf"cannot be pushed as it is; README\.md, line \d+: {said}"):
        staged(PushSettings(head=str(own), repo="ada/x"), tmp_path / "out")
