"""llama2.c checkpoints as transformers models, against a naive twin; their tokenizers; and one real model."""

from __future__ import annotations

import os
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from headstart.errors import UserError

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
from gpu import checks, llama2c

DATA = Path(os.environ.get("HEADSTART_TEST_DATA", "")) / "stories260k"
needs_stories = pytest.mark.skipif(not DATA.is_dir(), reason="HEADSTART_TEST_DATA names no folder with stories260k/")

NUMBERS = (16, 24, 3, 4, 2, 11, 20)  # width, MLP, layers, heads, key-value heads, vocabulary, positions


def weights(numbers: tuple[int, ...], seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors by llama2.c's names, in the order of the file."""
    dim, hidden, layers, heads, kv_heads, vocab, longest = numbers
    kv, draw = dim // heads * kv_heads, np.random.default_rng(seed)
    shapes = {
        "token_embedding_table": (abs(vocab), dim), "rms_att_weight": (layers, dim), "wq": (layers, dim, dim),
        "wk": (layers, kv, dim), "wv": (layers, kv, dim), "wo": (layers, dim, dim), "rms_ffn_weight": (layers, dim),
        "w1": (layers, hidden, dim), "w2": (layers, dim, hidden), "w3": (layers, hidden, dim),
        "rms_final_weight": (dim,), "freq_cis_real": (longest, dim // heads // 2),
        "freq_cis_imag": (longest, dim // heads // 2),
    }  # fmt: skip
    if vocab < 0:
        shapes["wcls"] = (-vocab, dim)
    return {name: draw.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}


def checkpoint(path: Path, numbers: tuple[int, ...], tensors: dict[str, np.ndarray]) -> Path:
    path.write_bytes(struct.pack("<7i", *numbers) + b"".join(tensor.tobytes() for tensor in tensors.values()))
    return path


def naive(numbers: tuple[int, ...], w: dict[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """(T, V) logits, token by token, with rotary pairs (0, 1), (2, 3), ... as the checkpoint has them."""
    dim, _, layers, heads, kv_heads, _, _ = numbers
    size, keys, values, logits = dim // heads, {}, {}, []

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return weight * x / np.sqrt((x * x).mean() + 1e-5)

    def turned(x: np.ndarray, place: int) -> np.ndarray:
        x = x.copy()
        for i in range(0, len(x), 2):
            angle = place / 10000 ** ((i % size) / size)
            a, b = x[i], x[i + 1]
            x[i], x[i + 1] = a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)
        return x

    for place, token in enumerate(tokens):
        x = w["token_embedding_table"][token].astype(np.float64)
        for layer in range(layers):
            y = norm(x, w["rms_att_weight"][layer])
            query = turned(w["wq"][layer] @ y, place)
            keys[layer, place], values[layer, place] = turned(w["wk"][layer] @ y, place), w["wv"][layer] @ y
            found = np.zeros(dim)
            for head in range(heads):
                own, shared = slice(head * size, (head + 1) * size), head // (heads // kv_heads) * size
                there = slice(shared, shared + size)
                scores = np.array([query[own] @ keys[layer, t][there] for t in range(place + 1)]) / np.sqrt(size)
                shares = np.exp(scores - scores.max())
                found[own] = sum(s * values[layer, t][there] for t, s in enumerate(shares / shares.sum()))
            x = x + w["wo"][layer] @ found
            y = norm(x, w["rms_ffn_weight"][layer])
            gate = w["w1"][layer] @ y
            x = x + w["w2"][layer] @ (gate / (1 + np.exp(-gate)) * (w["w3"][layer] @ y))
        logits.append(w.get("wcls", w["token_embedding_table"]) @ norm(x, w["rms_final_weight"]))
    return np.stack(logits)


@pytest.mark.parametrize("vocab", [11, -11], ids=["tied", "own projection"])
def test_a_checkpoint_becomes_the_same_model(tmp_path: Path, vocab: int) -> None:
    numbers = (*NUMBERS[:5], vocab, NUMBERS[6])
    tensors = weights(numbers)
    model = llama2c.load_model(checkpoint(tmp_path / "model.bin", numbers, tensors))
    tokens = [3, 0, 10, 10, 7, 2]
    with torch.no_grad():
        found = model.double()(torch.tensor([tokens])).logits[0].numpy()
    np.testing.assert_allclose(found, naive(numbers, tensors, tokens), rtol=1e-4, atol=1e-4)


def test_pairs_become_halves() -> None:
    rows = torch.arange(8.0)[:, None]  # two heads of width 4
    assert llama2c.halves(rows, 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_a_checkpoint_that_is_none_is_refused(tmp_path: Path) -> None:
    whole = checkpoint(tmp_path / "model.bin", NUMBERS, weights(NUMBERS)).read_bytes()
    broken = {"cut short": whole[:-4], "too long": whole + b"0000", "no header": b"abc", "other": b"GGUF" * 1000}
    for name, content in broken.items():
        (tmp_path / "broken.bin").write_bytes(content)
        with pytest.raises(UserError, match=r"broken\.bin: has \d+ bytes"):
            llama2c.load_model(tmp_path / "broken.bin")
            pytest.fail(f"{name} was taken for a checkpoint")
    with pytest.raises(UserError, match="cannot be read"):
        llama2c.load_model(tmp_path / "missing.bin")


BYTES = [f"<0x{n:02X}>" for n in range(256)]
PIECES = ["<unk>", "\n<s>\n", "\n</s>\n", *BYTES, " h", "he", " he", "ll", "llo", " ", *"helo"]


def token_file(path: Path, pieces: list[str] = PIECES) -> Path:
    """Scores fall with the place, from the first piece that is no byte."""
    rows = [struct.pack("<fi", float(min(259 - place, 0)), len(text.encode())) + text.encode() for place, text in
            enumerate(pieces)]  # fmt: skip
    path.write_bytes(struct.pack("<i", 7) + b"".join(rows))
    return path


def test_a_tokenizer_merges_by_score_and_falls_back_on_bytes(tmp_path: Path) -> None:
    tokenizer = llama2c.load_tokenizer(token_file(tmp_path / "tok.bin"))

    def pieces(text: str) -> list[str]:
        return [PIECES[token] for token in tokenizer(text, add_special_tokens=False)["input_ids"]]

    # " h" scores above "he", so " he" of " h" and "e" it is; "llo" needs "ll" first
    assert pieces("hello") == [" he", "llo"]
    assert pieces("hehe") == [" he", "he"]
    assert pieces("é\n") == [" ", "<0xC3>", "<0xA9>", "<0x0A>"]
    for text in ("hello", "hehe", "é\n", "hello hello", "日本"):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    chat = [{"role": "user", "content": "he"}, {"role": "assistant", "content": " hello"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<s>he hello</s>"
    ids = tokenizer("<s>he hello</s>", add_special_tokens=False)["input_ids"]
    assert [ids[0], *(PIECES[token] for token in ids[1:-1]), ids[-1]] == [1, " he", " he", "llo", 2]


def test_a_tokenizer_that_is_none_is_refused(tmp_path: Path) -> None:
    whole = token_file(tmp_path / "tok.bin").read_bytes()
    for content in (whole[:-1], whole[:9], b"", b"\x00" * 7):
        (tmp_path / "broken.bin").write_bytes(content)
        with pytest.raises(UserError, match=r"broken\.bin: no llama2\.c tokenizer"):
            llama2c.load_tokenizer(tmp_path / "broken.bin")


@needs_stories
def test_stories260k_writes_its_story() -> None:
    model = llama2c.load_model(DATA / "stories260K.bin")
    tokenizer = llama2c.load_tokenizer(DATA / "tok512.bin")
    with torch.no_grad():
        tokens = model.generate(torch.tensor([[1]]), max_new_tokens=40, do_sample=False)[0]
    text = tokenizer.decode(tokens, skip_special_tokens=True).strip()
    assert text.startswith(checks.STORY)
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == tokens[1:].tolist()
