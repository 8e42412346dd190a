"""EAGLE heads by the book, for the tests: a plain causal transformer over the true text and the guesses behind it.

Shares no code with the product: no cache, no tree, no steps that run ahead, everything computed anew for each guess.
Tensor names are those of the released heads; upper layers are `layers.1`, `layers.2`, ...

Letters: T true positions, n positions of a sequence, H width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ACTS = {"silu": F.silu, "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh")}


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x: Tensor, theta: float) -> Tensor:
    """(n, heads, h), each at its position, pair by pair: component i with component i + h / 2."""
    half = x.shape[-1] // 2
    out = x.clone()
    for position in range(len(x)):
        for i in range(half):
            angle = torch.tensor(position / theta ** (i / half))
            one, other = x[position, :, i], x[position, :, i + half]
            out[position, :, i] = one * angle.cos() - other * angle.sin()
            out[position, :, i + half] = other * angle.cos() + one * angle.sin()
    return out


class Weights:
    """Tensors of one layer, and how its attention is shaped."""

    def __init__(self, tensors: dict[str, Tensor], prefix: str, config: Any) -> None:
        self.tensors, self.prefix, self.config = tensors, prefix, config

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.tensors[f"{self.prefix}{name}.weight"], self.tensors.get(f"{self.prefix}{name}.bias"))

    def norm(self, name: str, x: Tensor) -> Tensor:
        return rms(x, self.tensors[f"{self.prefix}{name}.weight"], self.config.rms_norm_eps)

    def layer(self, inputs: Tensor, residual: Tensor) -> Tensor:
        """Causal attention over (n, .) inputs, then the MLP; (n, H)."""
        config, n = self.config, len(inputs)
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        q, k = self.linear("self_attn.q_proj", inputs), self.linear("self_attn.k_proj", inputs)
        if config.qk_norm == "all":
            q, k = self.norm("self_attn.q_norm", q), self.norm("self_attn.k_norm", k)
        q, k = q.view(n, heads, -1), k.view(n, groups, -1)
        if config.qk_norm == "head":
            q, k = self.norm("self_attn.q_norm", q), self.norm("self_attn.k_norm", k)
        theta = config.rope_parameters["rope_theta"]
        q, k = turned(q, theta), turned(k, theta)
        v = self.linear("self_attn.v_proj", inputs).view(n, groups, -1)
        mixed = torch.empty_like(q)
        for head in range(heads):
            group = head // (heads // groups)
            scores = q[:, head] @ k[:, group].T / q.shape[-1] ** 0.5
            scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
            mixed[:, head] = scores.softmax(-1) @ v[:, group]
        hidden = residual + self.linear("self_attn.o_proj", mixed.flatten(1))
        z = self.norm("post_attention_layernorm", hidden)
        gated = ACTS[config.hidden_act](self.linear("mlp.gate_proj", z)) * self.linear("mlp.up_proj", z)
        return hidden + self.linear("mlp.down_proj", gated)

    def upper(self, hidden: Tensor) -> Tensor:
        return self.layer(self.norm("input_layernorm", hidden), hidden)


def eagle3(head: Any, taps: Tensor, embedded: Tensor, anchor: int, depths: int) -> list[tuple[Tensor, Tensor]]:
    """For each depth what goes on (H,) and the logits, from one anchor along the true tokens.

    Args:
        taps: (T, F * H).
        embedded: (T, H) of the tokens themselves.
    """
    tensors, config = {name: one.detach() for name, one in head.state_dict().items()}, head.config
    top = Weights(tensors, "", config)
    first = Weights(tensors, "midlayer.", config)
    if config.norm_before_fc:
        taps = top.norm("input_norm", taps)
    if config.fc_norm:
        parts = taps.view(len(taps), len(config.taps), -1)
        taps = torch.cat([top.norm(f"fc_norm.{i}", parts[:, i]) for i in range(len(config.taps))], -1)
    states = top.linear("fc", taps)[: anchor + 1]
    found = []
    for _ in range(depths):
        read = first.norm("hidden_norm", states)
        inputs = torch.cat((first.norm("input_layernorm", embedded[1 : len(states) + 1]), read), -1)
        hidden = first.layer(inputs, read if config.norm_before_residual else states)
        for number in range(1, config.head_layers):
            hidden = Weights(tensors, f"layers.{number}.", config).upper(hidden)
        normed = top.norm("norm", hidden[-1])
        found.append((normed if config.norm_output else hidden[-1], top.linear("lm_head", normed)))
        states = torch.cat((states, found[-1][0][None]))
    return found


def eagle1(head: Any, last: Tensor, embedded: Tensor, anchor: int, depths: int) -> list[Tensor]:
    """For each depth the predicted hidden state (H,), from one anchor along the true tokens.

    Args:
        last: (T, H) behind the final norm.
        embedded: (T, H) of the tokens themselves.
    """
    tensors, config = {name: one.detach() for name, one in head.state_dict().items()}, head.config
    states, found = last[: anchor + 1], []
    for _ in range(depths):
        joined = Weights(tensors, "", config).linear("fc", torch.cat((embedded[1 : len(states) + 1], states), -1))
        hidden = Weights(tensors, "layers.0.", config).layer(joined, joined)
        for number in range(1, config.head_layers):
            hidden = Weights(tensors, f"layers.{number}.", config).upper(hidden)
        found.append(hidden[-1])
        states = torch.cat((states, hidden[-1:]))
    return found
