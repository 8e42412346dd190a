"""The models and texts that are checked on: a tiny real one, and random ones of the sizes that people use.

A random model speaks `WORDS` words alone: the rows of its output projection behind them are zero. The others are large
enough for its choices to be clear, and its embedding for the last word to matter most, without which its texts soon
stand still. So it costs what its size costs, a few steps learn something of it, and words and ids turn into each other
without loss.

Letters: V vocabulary, H hidden width.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from gpu.llama2c import TEMPLATE, load_model, load_tokenizer
from headstart.files import write_jsonl
from headstart.heads.backbone import Backbone, Features
from headstart.inference.plain import decode_group
from headstart.inference.tree import Tree

WORDS = 512
OPENINGS = ("Once upon a time", "One day", "Lily and Tom", "There was a big dog", "Tim had a red ball", "The sun")


@dataclass(frozen=True)
class Size:
    """Of a random Llama model."""

    name: str
    width: int
    layers: int
    inner: int
    heads: int
    kv_heads: int
    vocab: int

    @property
    def parameters(self) -> int:
        attention = 2 * self.width**2 * (1 + self.kv_heads / self.heads)
        return int(self.layers * (attention + 3 * self.width * self.inner) + 2 * self.vocab * self.width)


TINY = Size("tiny", 48, 4, 96, 4, 2, 768)
SMALL = Size("small", 256, 6, 768, 8, 4, 8192)
MIDDLE = Size("middle", 1024, 16, 2816, 16, 8, 32768)
LARGE = (Size("1B", 2048, 22, 5632, 32, 8, 32768), Size("8B", 4096, 32, 14336, 32, 8, 131072))


def largest(free: float) -> Size | None:
    """The largest of `LARGE` of which three copies in bf16 would fit into so many bytes: room for states and heads."""
    fitting = [size for size in LARGE if 3 * 2 * size.parameters <= free]
    return fitting[-1] if fitting else None


@dataclass
class Subject:
    """A model that is checked on, in fp32 and in bf16."""

    name: str
    exact: Backbone
    """In fp32."""
    prompts: list[list[int]]
    """For generation."""
    openings: list[list[int]]
    """What texts to learn from begin with."""
    heads: dict[str, Path] = field(default_factory=dict)
    """Folders of the heads trained on it, by method."""

    @cached_property
    def half(self) -> Backbone:
        """In bf16."""
        model = empty(self.exact.model.config, self.exact.device, torch.bfloat16)
        model.load_state_dict(self.exact.model.state_dict())
        return Backbone(model, self.exact.tokenizer, self.name)


def stories_folder() -> Path | None:
    """Where stories260K lies; None if the test data are not at hand."""
    data = os.environ.get("HEADSTART_TEST_DATA")
    folder = Path(data) / "stories260k" if data else None
    return folder if folder is not None and folder.is_dir() else None


def stories(folder: Path, device: torch.device, texts: int) -> Subject:
    """stories260K: a real model of 260,000 parameters, which writes English stories."""
    tokenizer = load_tokenizer(folder / "tok512.bin")
    model: Any = load_model(folder / "stories260K.bin").to(device)
    starts = [[1, *tokenizer(text, add_special_tokens=False)["input_ids"]] for text in OPENINGS]
    openings = [starts[number % len(starts)] for number in range(texts)]
    return Subject("stories260K", Backbone(model, tokenizer, "stories260K"), starts[:3], openings)


def random_subject(size: Size, device: torch.device, texts: int) -> Subject:
    """A random model that learns and checks on random words."""
    backbone = random_backbone(size, device, torch.float32)
    draws = torch.randint(3, WORDS, (texts + 3, 8), generator=torch.Generator().manual_seed(1)).tolist()
    openings = [[1, *words] for words in draws]
    return Subject(backbone.name, backbone, openings[:3], openings[3:])


def random_backbone(size: Size, device: torch.device, dtype: torch.dtype) -> Backbone:
    config = LlamaConfig(
        hidden_size=size.width,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        vocab_size=size.vocab,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    torch.manual_seed(0)
    model = empty(config, device, dtype)
    with torch.no_grad():
        rows = model.lm_head.weight  # (V, H)
        rows.zero_()
        rows[3:WORDS].normal_(std=4 / size.width**0.5)  # logits of deviation 4 behind a norm
        model.model.embed_tokens.weight.normal_()
    return Backbone(model, words_tokenizer(), f"random Llama {size.name}")


def empty(config: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """A model with random weights, made where it is used: the large ones would take minutes on a CPU.

    As transformers loads them, and unlike `model.to(dtype)`: the rotary frequencies stay fp32.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return LlamaForCausalLM(config).eval()  # type: ignore[no-untyped-call]
    finally:
        torch.set_default_dtype(before)


def words_tokenizer() -> PreTrainedTokenizerFast:
    """`w3` to `w511`, set apart by spaces."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{number}": number for number in range(3, WORDS)}}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write_chats(path: Path, backbone: Backbone, openings: Sequence[list[int]], new_tokens: int) -> int:
    """Chats that the backbone itself has written behind these openings; returns the number of tokens it wrote."""
    replies = decode_group(backbone, openings, max_new_tokens=new_tokens, temperature=0.7, seed=1)
    read = backbone.tokenizer.decode
    rows = []
    for opening, reply in zip(openings, replies, strict=True):
        asked = read(opening, skip_special_tokens=True)
        said = read(opening + reply, skip_special_tokens=True)[len(asked) :]
        rows.append([{"role": "user", "content": asked}, {"role": "assistant", "content": said}])
    write_jsonl(path, ({"messages": row} for row in rows))
    return sum(map(len, replies))


class Scripted:
    """A drafter that knows the answer. In its trees every right token stands behind a wrong sibling.

    Args:
        answer: what the backbone emits behind the prompt.
        depth: right tokens that it drafts at most; with `wavering`, one less each round, and then from the start again.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, answer: Sequence[int], depth: int, *, siblings: bool = False, wavering: bool = False) -> None:
        self.answer, self.depth, self.siblings, self.wavering = list(answer), depth, siblings, wavering
        self.emitted = self.root = self.rounds = 0

    def start(self, prompt: Sequence[int]) -> None:
        self.emitted, self.rounds = 1 - len(prompt), 0  # the prompt's features come first, and the last gives a token

    def advance(self, features: Features, next_ids: Sequence[int]) -> None:
        self.emitted += len(next_ids)
        self.root = next_ids[-1]

    def draft(self, budget: int) -> Tree:
        depth = self.depth - self.rounds % (self.depth + 1) if self.wavering else self.depth
        self.rounds += 1
        right = self.answer[self.emitted :][: min(depth, budget)]
        if not self.siblings:
            return Tree.chain([self.root, *right])
        tokens, parents, above = [self.root], [-1], 0
        for token in right:
            tokens += [token + 1 if token < WORDS - 1 else token - 1, token]
            parents += [above, above]
            above = len(tokens) - 1
        return Tree(tokens, parents)
