"""Text as it comes adds up to the text of all tokens, and never shows half a character."""

from __future__ import annotations

import functools
import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headstart.inference.detokenizer import Detokenizer, decode

TEXTS = [
    "Ein Mädchen lief über die Straße; 漢字とかな, 🙂👍🏽 e\u0301 done.",
    "  spaces   and\n\nlines \t ' quotes ' , commas .  ",
    "\ufffd a mark that is really there \ufffd",
    "плохо " * 30,
]


@functools.cache
def byte_level() -> PreTrainedTokenizerFast:
    """Every byte a token, as in GPT-2, Llama 3 and Qwen."""
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return _made(models.BPE(vocab=vocabulary, merges=[]), pre_tokenizer, decoders.ByteLevel())


@functools.cache
def byte_fallback() -> PreTrainedTokenizerFast:
    """Letters are tokens and everything else goes by bytes; a word's space is part of it, as in Llama 2 and Mistral."""
    letters = [chr(c) for c in range(33, 127)] + ["▁"]
    names = ["<unk>", *letters, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {name: number for number, name in enumerate(names)}
    model = models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>")
    decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _made(model, pre_tokenizers.Metaspace(), decoder)


def _made(model, pre_tokenizer, decoder) -> PreTrainedTokenizerFast:
    raw = Tokenizer(model)
    raw.pre_tokenizer, raw.decoder = pre_tokenizer, decoder
    raw.add_special_tokens([AddedToken("<|end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>", clean_up_tokenization_spaces=True)


@pytest.mark.parametrize("tokenizer", [byte_level(), byte_fallback()], ids=["bytes", "fallback"])
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_add_up_and_are_whole(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert decode(tokenizer, tokens).strip() == text.strip()
    for seed in range(6):
        generator = random.Random(seed)
        stream, pieces, start = Detokenizer(tokenizer), [], 0
        while start < len(tokens):
            end = start + generator.randint(1, 1 + seed)
            pieces.append(stream.push(tokens[start:end]))
            start = end
        assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text
        assert "".join(pieces) + stream.finish() == decode(tokenizer, tokens)


def random_bytes(generator: random.Random) -> list[int]:
    """Broken characters, special tokens in between, an end in the middle of a character."""
    size = len(byte_level())
    return [size - 1 if generator.random() < 0.1 else generator.randrange(size) for _ in range(200)]


def random_fallback(generator: random.Random) -> list[int]:
    """Letters, characters by bytes (some of them broken off), special tokens in between."""
    tokenizer, tokens = byte_fallback(), list[int]()
    for _ in range(60):
        word = generator.choice(["a", "▁", "b", "é", "漢", "🙂"])
        found = [f"<0x{byte:02X}>" for byte in word.encode()] if word > "~" and word != "▁" else [word]
        found = found[: generator.choice([1, 4, 4, 4, 4, 4])]
        tokens += tokenizer.convert_tokens_to_ids([*found, *(["<|end|>"] if generator.random() < 0.2 else [])])
    return tokens


@pytest.mark.parametrize(
    ("tokenizer", "tokens_of"),
    [(byte_level(), random_bytes), (byte_fallback(), random_fallback)],
    ids=["bytes", "fallback"],
)
def test_any_tokens_add_up(tokenizer: PreTrainedTokenizerFast, tokens_of) -> None:
    for seed in range(40):
        generator = random.Random(seed)
        tokens = tokens_of(generator)
        whole = decode(tokenizer, tokens)
        stream, text = Detokenizer(tokenizer), ""
        while tokens:
            width = generator.randint(1, 5)
            text += stream.push(tokens[:width])
            tokens = tokens[width:]
        assert text + stream.finish() == whole


def test_text_is_that_of_the_tokenizer() -> None:
    for tokenizer in (byte_level(), byte_fallback()):
        for text in TEXTS:
            tokens = tokenizer.encode(text, add_special_tokens=False)
            assert decode(tokenizer, tokens) == tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
    tokens = byte_level().encode("漢字", add_special_tokens=False)
    assert decode(byte_level(), tokens[:-1]) == byte_level().decode(tokens[:-1]) == "漢\ufffd"


def test_a_broken_character_takes_nothing_back() -> None:
    """A limit in the middle of a character, where the tokenizer's own decode would lose those before it, too."""
    tokenizer = byte_fallback()
    tokens = tokenizer.encode("a🙂漢", add_special_tokens=False)
    assert "🙂" not in tokenizer.decode(tokens[:-1])
    assert decode(tokenizer, tokens[:-1]) == "a🙂\ufffd\ufffd"
    letter = tokenizer.convert_tokens_to_ids("b")
    assert decode(tokenizer, [*tokens[:-1], letter, letter]) == "a🙂\ufffd\ufffdbb"


def test_the_window_stays_small() -> None:
    tokenizer = byte_level()
    stream = Detokenizer(tokenizer)
    tokens = tokenizer.encode("Straße 漢字 " * 400, add_special_tokens=False)
    widest = 0
    for token in tokens:
        stream.push([token])
        widest = max(widest, len(stream.window))
    assert widest < 70


def test_without_a_tokenizer_there_is_no_text() -> None:
    stream = Detokenizer(None)
    assert stream.push([1, 2]) == stream.finish() == ""
