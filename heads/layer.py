"""The decoder layer that EAGLE-style heads share: shaped after the backbone's, trained from scratch.

- `LayerConfig`: its shape, read from the backbone's config.
- `DecoderLayer`: attention and gated MLP with root-mean-square norms; `UpperLayer` has one before the attention, too.
- `attend`: attention over a cache, for drafting.
- `attend_ahead`: attention of training queries that have run ahead of a text, in memory linear in its length.

Letters: B rows, T positions, K nodes, S slots, M queries at anchors, E entries ahead of the text, H width, W width of
the attention's inputs, n query heads, k key-value heads, g = n / k, h width of a head.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.activations import ACT2FN

from ..errors import UserError, first_line
from .anatomy import one_layer
from .backbone import Backbone
from .base import HeadConfig
from .linear import Linear
from .rotary import Rotary, rope_of, rotated

_COUNTS = (
    "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "max_position_embeddings",
)  # fmt: skip
_SCORES = {"cpu": 1 << 21}  # attention scores held at a time in training; other devices have more room
_SCORES_ELSEWHERE = 1 << 26


@dataclass(kw_only=True)
class LayerConfig(HeadConfig):
    """A head with a decoder layer."""

    num_attention_heads: int
    """Query heads."""
    num_key_value_heads: int
    """Key and value heads; query heads share them in groups."""
    head_dim: int
    """Width of a head."""
    intermediate_size: int
    """Width of the MLP."""
    hidden_act: str = "silu"
    """Activation of the MLP, by its transformers name."""
    rms_norm_eps: float = 1e-6
    """Epsilon of the norms."""
    attention_bias: bool = False
    """Biases on queries, keys and values."""
    output_bias: bool = False
    """Bias behind the attention."""
    mlp_bias: bool = False
    """Biases in the MLP."""
    qk_norm: Literal["none", "head", "all"] = "none"
    """Norms on queries and keys: of each attention head (Qwen3, Gemma 3), or of all together (OLMo 2)."""
    max_position_embeddings: int = 2048
    """Positions that the rotary embedding was made for."""
    rope_parameters: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    """Rotary embedding, as transformers writes it."""
    trained_positions: int | None = None
    """Tokens that texts were cut to in its training: behind them it drafts nothing. None: not known."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it has to be at least 1")
        if not (math.isfinite(self.rms_norm_eps) and self.rms_norm_eps >= 0):
            raise UserError(f"rms_norm_eps is {self.rms_norm_eps}; it has to be 0 or more")
        theta = self.rope_parameters.get("rope_theta", 1.0)
        if isinstance(theta, int | float) and not (math.isfinite(theta) and theta > 0):
            raise UserError(f"rope_theta is {theta}; it has to be above 0")
        if int(self.head_dim * self.rope_parameters.get("partial_rotary_factor", 1.0)) % 2:
            raise UserError(f"head_dim is {self.head_dim}; the rotary embedding turns pairs, so it has to be even")
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"num_attention_heads is {self.num_attention_heads} and num_key_value_heads is "
                f"{self.num_key_value_heads}; the first has to be a multiple of the second"
            )
        if self.hidden_act not in ACT2FN:
            raise UserError(f"hidden_act is {self.hidden_act!r}; transformers has no activation of that name")
        try:
            self.rotary()
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"rope_parameters is {self.rope_parameters}, and transformers has no rotary embedding of this kind "
                f"({type(error).__name__}: {first_line(error)})"
            ) from error

    @classmethod
    def shape(cls, backbone: Backbone) -> dict[str, Any]:
        config, width = one_layer(backbone.config), backbone.hidden_size
        heads = config.num_attention_heads
        act = _first(config, "hidden_act", "hidden_activation", "activation_function") or "silu"
        return super().shape(backbone) | {
            "num_attention_heads": heads,
            "num_key_value_heads": _first(config, "num_key_value_heads") or heads,
            "head_dim": _first(config, "head_dim") or width // heads,
            "intermediate_size": _widest(_first(config, "intermediate_size")) or 4 * width,
            "hidden_act": act if act in ACT2FN else "silu",
            "rms_norm_eps": _first(config, "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon") or 1e-6,
            "attention_bias": _has(backbone, "q_proj.bias"),
            "output_bias": _has(backbone, "o_proj.bias"),
            "mlp_bias": _has(backbone, "up_proj.bias"),
            "qk_norm": _qk_norm(backbone),
            "max_position_embeddings": _first(config, "max_position_embeddings") or 2048,
            "rope_parameters": rope_of(config),
        }

    def rotary(self) -> Rotary:
        return Rotary(self.rope_parameters, self.head_dim, self.max_position_embeddings)


class Norm(nn.RMSNorm):
    """Root-mean-square norm, computed in the dtype of its weight also where autocast hands it a narrower one."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.to(self.weight.dtype))


class Attention(nn.Module):
    """The four projections; who sees whom is up to the caller.

    Args:
        width: W, of what it reads.
        output: H, of what it gives.
    """

    def __init__(self, config: LayerConfig, width: int, output: int) -> None:
        super().__init__()
        self.heads, self.groups, self.head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        queries, keys, bias = self.heads * self.head_dim, self.groups * self.head_dim, config.attention_bias
        self.q_proj = Linear(width, queries, bias=bias)
        self.k_proj = Linear(width, keys, bias=bias)
        self.v_proj = Linear(width, keys, bias=bias)
        self.o_proj = Linear(queries, output, bias=config.output_bias)
        self.qk_norm = config.qk_norm
        if config.qk_norm != "none":
            widths = (self.head_dim, self.head_dim) if config.qk_norm == "head" else (queries, keys)
            self.q_norm, self.k_norm = (Norm(one, config.rms_norm_eps) for one in widths)

    def queries(self, inputs: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(..., W) to (..., n, h), turned."""
        queries = self.q_proj(inputs)
        return rotated(self._normed(queries, "q_norm", self.heads), cos, sin)

    def entries(self, inputs: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """(..., W) to keys, turned, and values (..., k, h)."""
        keys, values = self.k_proj(inputs), self.v_proj(inputs).unflatten(-1, (self.groups, self.head_dim))
        return rotated(self._normed(keys, "k_norm", self.groups), cos, sin), values

    def _normed(self, states: Tensor, name: str, heads: int) -> Tensor:
        """(..., heads * h) to (..., heads, h) behind the norm of that name, if there is one."""
        if self.qk_norm == "all":
            states = getattr(self, name)(states)
        states = states.view(*states.shape[:-1], heads, self.head_dim)
        return getattr(self, name)(states) if self.qk_norm == "head" else states


class Gated(nn.Module):
    """The gated MLP."""

    def __init__(self, config: LayerConfig, width: int) -> None:
        super().__init__()
        inner, bias = config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(width, inner, bias=bias)
        self.up_proj = Linear(width, inner, bias=bias)
        self.down_proj = Linear(inner, width, bias=bias)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, hidden: Tensor) -> Tensor:
        projected: Tensor = self.down_proj(self.act(self.gate_proj(hidden)) * self.up_proj(hidden))
        return projected


class DecoderLayer(nn.Module):
    """Attention that reads `inputs`-wide states, then the MLP; what precedes the attention is up to the method.

    Args:
        width: H, of its output.
        inputs: W; None: H.
    """

    def __init__(self, config: LayerConfig, width: int, inputs: int | None = None) -> None:
        super().__init__()
        self.self_attn = Attention(config, inputs or width, width)
        self.mlp = Gated(config, width)
        self.post_attention_layernorm = Norm(width, config.rms_norm_eps)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """(..., H) residual and (..., n * h) attention to the layer's output (..., H), before any norm."""
        hidden = residual + self.self_attn.o_proj(attended)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class UpperLayer(DecoderLayer):
    """The common decoder layer: it reads what the layer below gives, behind a norm."""

    def __init__(self, config: LayerConfig, width: int) -> None:
        super().__init__(config, width)
        self.input_layernorm = Norm(width, config.rms_norm_eps)

    def read(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(..., H) to what the attention reads, and what its result is added to."""
        return self.input_layernorm(hidden), hidden


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attention over cached entries.

    Args:
        queries: (B, K, n, h).
        keys, values: (B, k, S, h).
        mask: (B, 1, K, S) to be added; None: every query sees every slot.

    Returns:
        (B, K, n * h).
    """
    rows, width, heads, head_dim = queries.shape
    groups = keys.shape[1]
    shared = heads // groups
    # the queries that share keys stand in one row of the attention: no copy of the keys for each of them
    grouped = queries.view(rows, width, groups, shared, head_dim).permute(0, 2, 3, 1, 4)  # (B, k, g, K, h)
    grouped = grouped.reshape(rows, groups, shared * width, head_dim)
    mask = mask if mask is None else mask.repeat(1, 1, shared, 1)
    mixed = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)  # (B, k, g * K, h)
    return mixed.view(rows, groups, shared, width, head_dim).permute(0, 3, 1, 2, 4).flatten(2)


def attend_ahead(queries: Tensor, text: tuple[Tensor, Tensor], ahead: tuple[Tensor, Tensor], at: Tensor) -> Tensor:
    """Attention of queries that stand on a text and have run E steps ahead of it.

    Query m stands at position t of row b. It sees the entries of positions 0..t of that row, and its own E ahead.
    Exact; queries go in blocks which are computed once more in the backward pass, so that no scores are kept.

    Args:
        queries: (M, n, h).
        text: keys and values (B, T, k, h) of the text.
        ahead: keys and values (M, E, k, h) of each query's own steps.
        at: (M,) b * T + t, ascending.

    Returns:
        (M, n * h).
    """
    length = text[0].shape[1]
    room = max(1, _SCORES.get(queries.device.type, _SCORES_ELSEWHERE) // (queries.shape[1] * length))
    places = at % length
    keys, values = (part.unbind() for part in text)  # row by row, so that gradients of a block are no larger than it
    mixed = []
    for start, stop, row, seen in _blocks(at.tolist(), length, room):
        block = [queries[start:stop], keys[row][:seen], values[row][:seen], *(part[start:stop] for part in ahead)]
        block.append(places[start:stop])
        if torch.is_grad_enabled():
            mixed.append(checkpoint(_attend_block, *block, use_reentrant=False, preserve_rng_state=False))
        else:
            mixed.append(_attend_block(*block))
    return torch.cat(mixed) if mixed else queries.flatten(1)


def nothing_ahead(text: tuple[Tensor, Tensor], count: int) -> tuple[Tensor, Tensor]:
    """Keys and values (M, 0, k, h) of queries that have not run ahead of the text yet."""
    keys, values = (part.new_empty(count, 0, *part.shape[2:]) for part in text)
    return keys, values


def _blocks(at: list[int], length: int, room: int) -> Iterator[tuple[int, int, int, int]]:
    """Runs of at most `room` queries of one row: start, stop, the row, and how many of its positions they see."""
    start = 0
    while start < len(at):
        row = at[start] // length
        stop = min(start + room, bisect_left(at, (row + 1) * length, start))
        yield start, stop, row, at[stop - 1] % length + 1
        start = stop


def _attend_block(
    queries: Tensor, keys: Tensor, values: Tensor, ahead_keys: Tensor, ahead_values: Tensor, places: Tensor
) -> Tensor:
    """(m, n, h) queries of one row over (s, k, h) of its text and (m, E, k, h) of their own; (m, n * h)."""
    count, heads, head_dim = queries.shape
    seen, groups = keys.shape[:2]
    grouped = (queries * head_dim**-0.5).view(count, groups, -1, head_dim).transpose(0, 1)  # (k, m, g, h)
    scores = (grouped.reshape(groups, -1, head_dim) @ keys.permute(1, 2, 0)).view(groups, count, -1, seen)
    later = torch.arange(seen, device=places.device) > places[:, None]  # (m, s)
    scores.masked_fill_(later[:, None], -torch.inf)
    own = grouped @ ahead_keys.permute(2, 0, 3, 1)  # (k, m, g, E)
    weights = torch.cat((scores, own), -1).softmax(-1, dtype=torch.float32).to(values.dtype)
    mixed = weights[..., :seen].reshape(groups, -1, seen) @ values.transpose(0, 1)  # (k, m * g, h)
    mixed = mixed.view(groups, count, -1, head_dim) + weights[..., seen:] @ ahead_values.permute(2, 0, 1, 3)
    return mixed.transpose(0, 1).reshape(count, heads * head_dim)


def _widest(value: Any) -> Any:
    """The largest, where a config says one for each layer."""
    return max(value) if isinstance(value, list | tuple) else value


def _first(config: Any, *names: str) -> Any:
    """The first of these fields that the config has."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _has(backbone: Backbone, ending: str) -> bool:
    """Has the backbone's decoder a parameter of this name? Not every config that has biases says so."""
    return any(name.replace("base_layer.", "").endswith(ending) for name, _ in backbone.decoder.named_parameters())


def _qk_norm(backbone: Backbone) -> str:
    """Which norms the backbone has on its queries."""
    parameters = backbone.decoder.named_parameters()
    shapes = [tuple(weight.shape) for name, weight in parameters if name.endswith("q_norm.weight")]
    if not shapes:
        return "none"
    config = one_layer(backbone.config)
    heads = config.num_attention_heads
    head_dim = _first(config, "head_dim") or backbone.hidden_size // heads
    return "all" if shapes[0] == (heads * head_dim,) and heads > 1 else "head"
