"""Hydra: heads that read, besides the backbone's hidden state, the tokens drafted so far.

Source: Ankner et al., "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding", arXiv 2402.05109, section 3; the
prefix layer is that of its Hydra++ (section 4). Head d reads the hidden state at the anchor, behind the final norm of
the backbone, and the embeddings of tokens t + 1 .. t + 1 + d, side by side, and proposes token t + 2 + d. Its first
block joins them, y = R x + c + SiLU(W x + b), a linear map in place of the identity; the others are Medusa's.

With `head_arch: prefix-mlp` a decoder layer first reads the hidden states of the whole true text; its output at the
anchor takes the place of the hidden state. Guesses do not enter it.

Letters: B rows, T positions, K nodes of one depth, D heads, M anchors of a depth, H width, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UserError
from .backbone import Backbone, Features
from .base import DraftHead, Step, at_anchors, matched
from .cache import Cache
from .cached import anchored, below
from .layer import LayerConfig, Norm, UpperLayer, attend_ahead, nothing_ahead
from .linear import Linear
from .medusa import ResidualBlock
from .projection import Borrowed
from .rotary import Rotary
from .vocab import DraftVocab


@dataclass(kw_only=True)
class HydraConfig(LayerConfig):
    """Shape of Hydra heads; the fields of a decoder layer matter with head_arch prefix-mlp alone."""

    num_heads: int = 4
    """Heads, and so the drafted tokens of a round."""
    num_blocks: int = 1
    """Residual blocks of each head, the joining one included."""
    head_arch: Literal["mlp", "prefix-mlp"] = "mlp"
    """mlp: the heads read the backbone's hidden state; prefix-mlp: what a decoder layer over the text makes of it."""
    projection: Literal["shared", "own"] = "shared"
    """The backbone's output projection for all heads, or a trained one each, which starts as a copy of it."""
    projection_bias: bool = False
    """A bias behind each own projection, as in the released heads."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_heads < 1 or self.num_blocks < 1:
            raise UserError(f"num_heads is {self.num_heads}, num_blocks {self.num_blocks}; both have to be 1 or more")
        if self.projection_bias and self.projection == "shared":
            raise UserError("projection_bias is true, and projection is shared; a bias needs a projection of its own")


class JoiningBlock(nn.Module):
    """y = R x + SiLU(W x + b) from `parts` states side by side to one; at first the first of them goes through."""

    def __init__(self, width: int, parts: int) -> None:
        super().__init__()
        self.linear = Linear(parts * width, width)
        self.res_connection = Linear(parts * width, width)
        for weight in (*self.linear.parameters(), *self.res_connection.parameters()):
            nn.init.zeros_(weight)
        with torch.no_grad():
            self.res_connection.weight.fill_diagonal_(1)

    def forward(self, joined: Tensor) -> Tensor:
        mixed: Tensor = self.res_connection(joined) + F.silu(self.linear(joined))
        return mixed


@dataclass
class HydraState:
    """One request; without a prefix layer nothing of the text is kept."""

    cache: Cache
    paths: Tensor | None = None
    """(B, K, (depth + 2) * H) the anchor's state and the embeddings of the tokens on the way to the newest nodes."""
    nodes: int = 0
    """Nodes of the round so far."""
    depth: int = 0


class Hydra(DraftHead):
    """The heads; see the module's docstring."""

    method = "hydra"
    config_class = HydraConfig
    config: HydraConfig

    def __init__(self, config: HydraConfig, vocab: DraftVocab | None = None) -> None:
        super().__init__(config, vocab)
        self.max_depth = config.num_heads
        width, prefix, own = config.hidden_size, config.head_arch == "prefix-mlp", config.projection == "own"
        self.whole_last = prefix
        self.heads = nn.ModuleList(
            nn.Sequential(JoiningBlock(width, d + 2), *(ResidualBlock(width) for _ in range(config.num_blocks - 1)))
            for d in range(config.num_heads)
        )
        self.projections = nn.ModuleList(
            Linear(width, config.draft_vocab_size, bias=config.projection_bias)
            for _ in range(config.num_heads if own else 0)
        )
        self.prefix = UpperLayer(config, width) if prefix else None
        self.norm = Norm(width, config.rms_norm_eps) if prefix else None
        self._shared: Borrowed | None = None

    def bind(self, backbone: Backbone) -> Hydra:
        super().bind(backbone)
        if self.config.projection == "shared":
            self._shared = Borrowed(backbone, self.vocab)
        return self

    def seed(self) -> None:
        bias = self.backbone.output_bias
        for projection in self.projections:
            projection.get_parameter("weight").copy_(self.vocab.rows(self.backbone.output_weight))
            if self.config.projection_bias:
                projection.get_parameter("bias").copy_(torch.zeros(()) if bias is None else self.vocab.rows(bias))

    @cached_property
    def rotary(self) -> Rotary:
        return self.config.rotary()

    # -- decoding ------------------------------------------------------------------------------------------------

    def start(self, rows: int = 1) -> HydraState:
        return HydraState(Cache(rows))

    @torch.no_grad()
    def extend(
        self, state: HydraState, features: Features, next_ids: Tensor, lengths: Sequence[int] | None = None
    ) -> Step:
        if self.prefix is not None:
            state.cache.forget()
            state.cache.open(next_ids.shape[1])
            inputs, residual = self.prefix.read(matched(features.last, self._weight))
            anchor = self._normed(anchored(self.prefix, 0, state.cache, self.rotary, inputs, residual, lengths))
        else:
            anchor = matched(at_anchors(features.last, lengths), self._weight)  # (B, 1, H)
        state.paths = torch.cat((anchor, self._embedded(at_anchors(next_ids, lengths))), -1)
        state.nodes, state.depth = 0, 0
        return self._said(state)

    @torch.no_grad()
    def step(self, state: HydraState, ids: Tensor, parents: Tensor) -> Step:
        assert state.paths is not None, "step before extend"
        assert state.depth + 1 < self.config.num_heads, (
            f"depth {state.depth + 1} of {self.config.num_heads} Hydra heads"
        )
        state.paths = torch.cat((below(state.paths, parents, state.nodes), self._embedded(ids)), -1)
        state.nodes, state.depth = state.nodes + ids.shape[1], state.depth + 1
        return self._said(state)

    def _said(self, state: HydraState) -> Step:
        hidden = self.heads[state.depth](state.paths)  # (B, K, H)
        return Step(self.project(hidden, state.depth), hidden)

    # -- training ------------------------------------------------------------------------------------------------

    def unroll(self, features: Features, ids: Tensor, anchors: Sequence[Tensor]) -> Iterator[Tensor]:
        assert len(anchors) <= len(self.heads), f"{len(anchors)} depths of {len(self.heads)} Hydra heads"
        embedded = self._embedded(ids).flatten(0, 1)  # (B * T, H)
        states = self._anchored(matched(features.last, self._weight), anchors[0])  # (M, H)
        for depth, (head, at) in enumerate(zip(self.heads, anchors, strict=False)):
            if depth:
                states = states[torch.searchsorted(anchors[depth - 1], at)]
            path = torch.cat((states, *(embedded[at + 1 + k] for k in range(depth + 1))), -1)
            yield self.spared(head, path)

    def _anchored(self, last: Tensor, at: Tensor) -> Tensor:
        """(M, H) what the heads read at the anchors, from (B, T, H) hidden states."""
        if self.prefix is None:
            return last.flatten(0, 1)[at]
        length, attention = last.shape[1], self.prefix.self_attn
        inputs, residual = self.prefix.read(last)
        cos, sin = self.rotary.table(length, inputs)
        text = attention.entries(inputs, cos[:length], sin[:length])  # (B, T, k, h) each
        inputs, residual = inputs.flatten(0, 1)[at], residual.flatten(0, 1)[at]
        queries = attention.queries(inputs, cos[at % length], sin[at % length])
        mixed = attend_ahead(queries, text, nothing_ahead(text, len(at)), at)
        return self._normed(self.spared(self.prefix.finish, residual, mixed))

    def project(self, hidden: Tensor, depth: int) -> Tensor:
        if self._shared is not None:
            return self._shared(hidden)
        logits: Tensor = self.projections[depth](hidden)
        return logits

    def _normed(self, hidden: Tensor) -> Tensor:
        assert self.norm is not None
        normed: Tensor = self.norm(hidden)
        return normed

    def _embedded(self, ids: Tensor) -> Tensor:
        """(..., H) the backbone's own embedding, scale included, which is not trained."""
        with torch.no_grad():
            return self.backbone.embed(ids).to(self._weight.dtype)

    @property
    def _weight(self) -> Tensor:
        return next(self.heads.parameters())
