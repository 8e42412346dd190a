"""A llama2.c checkpoint and its tokenizer, as transformers knows them.

The checkpoint (version 0 of https://github.com/karpathy/llama2.c) is a header of seven int32

    dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, max_seq_len

and fp32 tensors end to end: embedding; then each for all layers: norm before attention, wq, wk, wv, wo, norm before the
MLP, w1, w2, w3; then the final norm and two tables of the rotary embedding. A negative vocab_size says that an output
projection of its own comes last; else it is the embedding. The norms' epsilon is 1e-5, the rotary base 10,000.

Letters: L layers, V vocabulary, H hidden width, M width of the MLP, n heads, d width of a head.
"""

from __future__ import annotations

import math
import struct
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headstart.errors import UserError

HEADER = struct.Struct("<7i")
SPECIAL = ("<unk>", "<s>", "</s>")  # the first three tokens, whatever the file calls them
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ message.content + eos_token }}"
    "{% else %}{{ bos_token + message.content }}{% endif %}{% endfor %}"
)
"""A chat is a story: the user's turn begins it, the reply goes on."""


def load_model(path: Path) -> Any:
    """The Llama model of a checkpoint, in fp32 on the CPU.

    Raises:
        UserError: the file is missing, or not as long as its header says.
    """
    raw = _read(path)
    if len(raw) < HEADER.size:
        raise UserError(f"{path}: has {len(raw)} bytes; the header of a llama2.c checkpoint alone has {HEADER.size}")
    numbers = HEADER.unpack_from(raw)
    shapes = _shapes(*numbers) if min(numbers[:5]) > 0 else {}
    sizes = [math.prod(shape) for shape in shapes.values()]
    if not shapes or len(raw) != HEADER.size + 4 * sum(sizes):
        raise UserError(
            f"{path}: has {len(raw)} bytes, which are not those that its header {list(numbers)} asks for; a whole "
            "llama2.c checkpoint of version 0 is needed, in fp32"
        )
    config = _config(*numbers)
    flat = torch.frombuffer(bytearray(raw[HEADER.size :]), dtype=torch.float32)
    starts = accumulate(sizes, initial=0)
    pieces = zip(shapes.items(), sizes, starts, strict=False)
    tensors = {name: flat[start : start + size].view(shape) for (name, shape), size, start in pieces}
    model: Any = LlamaForCausalLM(config).eval()  # type: ignore[no-untyped-call]
    model.load_state_dict(_state(tensors, config), strict=True)
    return model


def load_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a `tok*.bin`: byte pairs by score, with bytes to fall back on, and `TEMPLATE`.

    The file holds the length of the longest token (int32), then for each token its score (fp32), length (int32), bytes.

    Raises:
        UserError: the file is missing or cut short.
    """
    tokens = _tokens(path)
    for place, name in enumerate(SPECIAL):
        tokens[place] = (name, 0.0)
    vocabulary = {token: place for place, (token, _) in enumerate(tokens)}
    model = models.BPE(vocab=vocabulary, merges=_merges(tokens), unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    made = Tokenizer(model)
    made.normalizer = normalizers.Prepend(" ")  # as sentencepiece: a text begins like a word inside it
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def halves(weight: Tensor, heads: int) -> Tensor:
    """(n * d, H) rows for rotary pairs (0, 1), (2, 3), ... of each head to rows for (0, d/2), (1, d/2 + 1), ..."""
    rows, width = weight.shape
    return weight.view(heads, rows // heads // 2, 2, width).transpose(1, 2).reshape(rows, width)


def _config(dim: int, hidden: int, layers: int, heads: int, kv_heads: int, vocab: int, longest: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=dim,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=abs(vocab),
        max_position_embeddings=longest,
        tie_word_embeddings=vocab > 0,
        rms_norm_eps=1e-5,
        bos_token_id=1,
        eos_token_id=[1, 2],  # a story ends where the next one begins
        pad_token_id=2,
    )


def _shapes(
    dim: int, hidden: int, layers: int, heads: int, kv_heads: int, vocab: int, longest: int
) -> dict[str, tuple[int, ...]]:
    """The file's tensors, in its order."""
    kv, table = kv_heads * (dim // heads), (longest, dim // heads // 2)
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (abs(vocab), dim),
        "attention_norm": (layers, dim),
        "wq": (layers, dim, dim),
        "wk": (layers, kv, dim),
        "wv": (layers, kv, dim),
        "wo": (layers, dim, dim),
        "mlp_norm": (layers, dim),
        "w1": (layers, hidden, dim),
        "w2": (layers, dim, hidden),
        "w3": (layers, hidden, dim),
        "final_norm": (dim,),
        "cosines": table,
        "sines": table,
    }
    return shapes if vocab > 0 else {**shapes, "projection": (abs(vocab), dim)}


def _state(tensors: dict[str, Tensor], config: LlamaConfig) -> dict[str, Tensor]:
    """The same by transformers' names."""
    state = {
        "model.embed_tokens.weight": tensors["embedding"],
        "model.norm.weight": tensors["final_norm"],
        "lm_head.weight": tensors.get("projection", tensors["embedding"]),
    }
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    assert kv_heads is not None, "the header says how many"
    for layer in range(config.num_hidden_layers):
        state |= {
            f"model.layers.{layer}.{name}.weight": weight
            for name, weight in {
                "input_layernorm": tensors["attention_norm"][layer],
                "self_attn.q_proj": halves(tensors["wq"][layer], heads),
                "self_attn.k_proj": halves(tensors["wk"][layer], kv_heads),
                "self_attn.v_proj": tensors["wv"][layer],
                "self_attn.o_proj": tensors["wo"][layer],
                "post_attention_layernorm": tensors["mlp_norm"][layer],
                "mlp.gate_proj": tensors["w1"][layer],
                "mlp.down_proj": tensors["w2"][layer],
                "mlp.up_proj": tensors["w3"][layer],
            }.items()
        }
    return state


def _tokens(path: Path) -> list[tuple[str, float]]:
    """Text and score of each token."""
    raw, tokens, place = _read(path), list[tuple[str, float]](), 4
    try:
        while place < len(raw):
            score, length = struct.unpack_from("<fi", raw, place)
            (text,) = struct.unpack_from(f"{length}s", raw, place + 8)
            tokens.append((text.decode(), score))
            place += 8 + length
    except (struct.error, UnicodeDecodeError) as error:
        raise UserError(f"{path}: no llama2.c tokenizer, or cut short, at byte {place} ({error})") from None
    if len(tokens) < len(SPECIAL):
        raise UserError(f"{path}: no llama2.c tokenizer; it holds {len(tokens)} tokens")
    return tokens


def _merges(tokens: list[tuple[str, float]]) -> list[Any]:
    """Pairs of tokens that make a third one, those of the highest score first."""
    known = {token for token, _ in tokens[len(SPECIAL) :]}
    return [
        (token[:cut], token[cut:])
        for token, _ in sorted(tokens[len(SPECIAL) :], key=lambda one: -one[1])
        if not (token.startswith("<0x") and token.endswith(">"))
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
