"""Tiny models and a tiny tokenizer for the tests: random weights, made in memory, no network.

- `backbone(family)`: a random two- to four-layer model of a family, in fp32, with the tiny tokenizer.
- `tokenizer()`: words and bytes, 96 ids, with a chat template in the ChatML shape.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headstart.heads.backbone import Backbone

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|im_end|>", "<|im_start|>", "<pad>"]
VOCAB = 96

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),  # biases on q, k, v
    "qwen3": ("Qwen3", {"head_dim": 16}),  # head_dim unlike hidden / heads, norms on q and k
    "mistral": ("Mistral", {"sliding_window": 8}),  # every layer windowed
    "gemma": ("Gemma", {"head_dim": 16, "hidden_act": "gelu_pytorch_tanh"}),  # scaled embedding, norm with 1 + w
}
"""Family to transformers class prefix and the fields in which it differs from the common tiny shape."""


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of 96 ids: special tokens, then the printable characters and a few merges by bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [c for c in alphabet if c.isascii()] + ["Ġ", "Ċ"]
    vocabulary = {token: i for i, token in enumerate(SPECIAL + letters[: VOCAB - len(SPECIAL) - 2] + ["Ġ", "Ċ"])}
    model = models.BPE(vocab=vocabulary, merges=[], unk_token="<pad>")
    raw = Tokenizer(model)
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", bos_token="<|im_start|>", pad_token="<pad>"
    )
    made.chat_template = TEMPLATE
    return made


def model(family: str = "llama", *, seed: int = 0, attention: str = "sdpa", **changes: Any) -> Any:
    """A tiny random causal LM of a family; `changes` override config fields."""
    prefix, special = FAMILIES[family]
    fields: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 2, "initializer_range": 0.3,
    }  # fmt: skip
    config = getattr(transformers, f"{prefix}Config")(**{**fields, **special, **changes})
    config._attn_implementation = attention
    torch.manual_seed(seed)
    made = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    for weight in made.parameters():
        if weight.ndim == 1:  # norms and biases away from their neutral start, so that leaving one out is seen
            with torch.no_grad():
                weight.add_(0.2 * torch.randn_like(weight))
    return made


def backbone(family: str = "llama", **changes: Any) -> Backbone:
    """`model(...)` with the tiny tokenizer, as a Backbone."""
    return Backbone(model(family, **changes), tokenizer(), name=f"tiny-{family}")


def chats(count: int = 8, seed: int = 0) -> list[list[dict[str, str]]]:
    """Small chats whose words the tiny tokenizer knows."""
    generator = torch.Generator().manual_seed(seed)
    words = ["red", "blue", "green", "one", "two", "three", "up", "down", "left", "right", "sun", "moon"]

    def sentence(length: int) -> str:
        return " ".join(words[int(i)] for i in torch.randint(len(words), (length,), generator=generator))

    return [
        [{"role": "user", "content": sentence(3)}, {"role": "assistant", "content": sentence(6)}]
        + ([{"role": "user", "content": sentence(2)}, {"role": "assistant", "content": sentence(4)}] if i % 2 else [])
        for i in range(count)
    ]
