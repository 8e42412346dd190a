"""Medusa: heads side by side on the last hidden state, one for each depth.

Source: Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", section 2.1,
arXiv 2401.10774. Head d reads the backbone's hidden state at the anchor, behind its final norm, through residual blocks
y = x + SiLU(W x + b), and proposes token t + 2 + d. With W and b zero it starts as the backbone's own prediction.

Letters: B rows, T positions, K nodes of one depth, D heads, M anchors of a depth, H width, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UserError
from .backbone import Backbone, Features
from .base import DraftHead, HeadConfig, Step, at_anchors, matched
from .linear import Linear
from .projection import Borrowed
from .vocab import DraftVocab


@dataclass(kw_only=True)
class MedusaConfig(HeadConfig):
    """Shape of Medusa heads."""

    num_heads: int = 4
    """Heads, and so the drafted tokens of a round."""
    num_blocks: int = 1
    """Residual blocks of each head."""
    projection: Literal["shared", "own"] = "shared"
    """The backbone's output projection for all heads, or a trained one each, which starts as a copy of it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_heads < 1 or self.num_blocks < 1:
            raise UserError(f"num_heads is {self.num_heads}, num_blocks {self.num_blocks}; both have to be 1 or more")


class ResidualBlock(nn.Module):
    """y = x + SiLU(W x + b), the identity at first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + F.silu(self.linear(hidden))


@dataclass
class MedusaState:
    """One request: what the anchor says of every depth."""

    hidden: Tensor | None = None
    """(B, D, H) behind the blocks of each head, at the anchor."""
    logits: Tensor | None = None
    """(B, D, Vd) where the heads share a projection: it is read once for all of them."""
    depth: int = 0


class Medusa(DraftHead):
    """The heads; see the module's docstring."""

    method = "medusa"
    whole_last = False
    config_class = MedusaConfig
    config: MedusaConfig

    def __init__(self, config: MedusaConfig, vocab: DraftVocab | None = None) -> None:
        super().__init__(config, vocab)
        self.max_depth = config.num_heads
        self.regresses = config.projection == "shared"
        width = config.hidden_size
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(width) for _ in range(config.num_blocks))) for _ in range(config.num_heads)
        )
        self.projections = nn.ModuleList(
            Linear(width, config.draft_vocab_size, bias=False)
            for _ in range(config.num_heads if config.projection == "own" else 0)
        )
        self._shared: Borrowed | None = None

    def bind(self, backbone: Backbone) -> Medusa:
        super().bind(backbone)
        if self.config.projection == "shared":
            self._shared = Borrowed(backbone, self.vocab)
        return self

    def seed(self) -> None:
        for projection in self.projections:
            projection.get_parameter("weight").copy_(self.vocab.rows(self.backbone.output_weight))

    # -- decoding ------------------------------------------------------------------------------------------------

    def start(self, rows: int = 1) -> MedusaState:
        return MedusaState()

    @torch.no_grad()
    def extend(
        self, state: MedusaState, features: Features, next_ids: Tensor, lengths: Sequence[int] | None = None
    ) -> Step:
        anchor = matched(at_anchors(features.last, lengths), self._weight)  # (B, 1, H)
        state.hidden = torch.cat([head(anchor) for head in self.heads], 1)
        state.logits = self.project(state.hidden, 0) if self._shared else None
        state.depth = 0
        return Step(self._logits(state), None)

    @torch.no_grad()
    def step(self, state: MedusaState, ids: Tensor, parents: Tensor) -> Step:
        assert state.hidden is not None, "step before extend"
        state.depth += 1
        return Step(self._logits(state).expand(-1, ids.shape[1], -1), None)

    def _logits(self, state: MedusaState) -> Tensor:
        """(B, 1, Vd) of the state's depth; every node of it says the same."""
        depth = slice(state.depth, state.depth + 1)
        assert state.depth < self.config.num_heads, f"depth {state.depth} of {self.config.num_heads} Medusa heads"
        if state.logits is not None:
            return state.logits[:, depth]
        assert state.hidden is not None
        return self.project(state.hidden[:, depth], state.depth)

    # -- training ------------------------------------------------------------------------------------------------

    def unroll(self, features: Features, ids: Tensor, anchors: Sequence[Tensor]) -> Iterator[Tensor]:
        assert len(anchors) <= len(self.heads), f"{len(anchors)} depths of {len(self.heads)} Medusa heads"
        last = features.last.flatten(0, 1)  # (B * T, H)
        for head, at in zip(self.heads, anchors, strict=False):
            yield self.spared(head, matched(last[at], self._weight))

    def project(self, hidden: Tensor, depth: int) -> Tensor:
        if self._shared is None:
            logits: Tensor = self.projections[depth](hidden)
            return logits
        return self._shared(hidden)

    @property
    def _weight(self) -> Tensor:
        return next(self.heads.parameters())
