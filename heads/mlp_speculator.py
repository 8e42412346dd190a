"""The MLP speculator: a small recurrent state that reads each drafted token. For decoding only; training is refused.

Source: Wertheimer et al., "Accelerating Production LLMs with Combined Token/Embedding Speculators", arXiv 2404.19124,
section 2. With the state s of the level above (at first the backbone's hidden state at the anchor, behind its final
norm) and the embedding e of the newest token, level d says

    s' = GELU(N_d(P_d s + c E_d(e))),  logits = O_d s',  c = sqrt((1 - w^2) I / 2) / w,  w = 0.5^(0.5 / n)

for n levels of inner width I; N is a root-mean-square norm with scale and shift. The state is handed to the next level.

Letters: B rows, T positions, K nodes of one depth, n levels, H width of the backbone, I inner width, V vocabulary, Vd
draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UserError
from .backbone import Features
from .base import DraftHead, HeadConfig, Step, at_anchors, matched
from .cached import below
from .linear import Linear
from .vocab import DraftVocab


@dataclass(kw_only=True)
class MlpSpeculatorConfig(HeadConfig):
    """Shape of an MLP speculator."""

    num_heads: int = 3
    """Levels, and so the drafted tokens of a round."""
    inner_size: int | None = None
    """Width of the state; null: that of the backbone's hidden states."""
    tie_weights: bool = False
    """One embedding, norm and projection for all levels, and one inner matrix for all but the first."""
    scale_input: bool = False
    """Bring the backbone's hidden state to mean square 1/2 first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_heads < 1 or (self.inner_size is not None and self.inner_size < 1):
            raise UserError(f"num_heads is {self.num_heads}, inner_size {self.inner_size}; both have to be 1 or more")


class ShiftedNorm(nn.Module):
    """Root-mean-square norm with scale and shift."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, states: Tensor) -> Tensor:
        return torch.addcmul(self.bias, F.rms_norm(states, states.shape[-1:], None, EPS), self.weight)


EPS = 1e-6


@dataclass
class MlpSpeculatorState:
    """One request."""

    hidden: Tensor | None = None
    """(B, K, I) states of the newest nodes."""
    nodes: int = 0
    """Nodes of the round so far."""
    depth: int = 0


class MlpSpeculator(DraftHead):
    """The speculator; see the module's docstring."""

    method = "mlp_speculator"
    config_class = MlpSpeculatorConfig
    config: MlpSpeculatorConfig
    trainable = False

    def __init__(self, config: MlpSpeculatorConfig, vocab: DraftVocab | None = None) -> None:
        super().__init__(config, vocab)
        self.max_depth = levels = config.num_heads
        inner, each = config.inner_size or config.hidden_size, 1 if config.tie_weights else levels
        widths = [config.hidden_size, *([inner] * (levels - 1))][: min(levels, 2) if config.tie_weights else levels]
        # a level without a module of its own uses the last one
        self.emb = nn.ModuleList(nn.Embedding(config.vocab_size, inner) for _ in range(each))
        self.proj = nn.ModuleList(Linear(width, inner, bias=False) for width in widths)
        self.ln = nn.ModuleList(ShiftedNorm(inner) for _ in range(each))
        self.head = nn.ModuleList(Linear(inner, config.draft_vocab_size, bias=False) for _ in range(each))
        kept = 0.5 ** (0.5 / levels)
        self.share = math.sqrt((1 - kept**2) * inner / 2) / kept

    def seed(self) -> None:
        """The paper starts from random weights."""

    # -- decoding ------------------------------------------------------------------------------------------------

    def start(self, rows: int = 1) -> MlpSpeculatorState:
        return MlpSpeculatorState()

    @torch.no_grad()
    def extend(
        self, state: MlpSpeculatorState, features: Features, next_ids: Tensor, lengths: Sequence[int] | None = None
    ) -> Step:
        hidden = matched(at_anchors(features.last, lengths), self.proj[0].get_parameter("weight"))
        if self.config.scale_input:
            hidden = F.rms_norm(hidden, hidden.shape[-1:], None, EPS) / math.sqrt(2)
        state.nodes, state.depth = 0, 0
        return self._said(state, hidden, at_anchors(next_ids, lengths))

    @torch.no_grad()
    def step(self, state: MlpSpeculatorState, ids: Tensor, parents: Tensor) -> Step:
        assert state.hidden is not None, "step before extend"
        assert state.depth + 1 < self.config.num_heads, f"depth {state.depth + 1} of {self.config.num_heads} levels"
        above = below(state.hidden, parents, state.nodes)
        state.nodes, state.depth = state.nodes + ids.shape[1], state.depth + 1
        return self._said(state, above, ids)

    def _said(self, state: MlpSpeculatorState, above: Tensor, ids: Tensor) -> Step:
        """Level by level: (B, K, .) states of the level above and (B, K) tokens to what follows them."""
        proj, emb, norm = (modules[min(state.depth, len(modules) - 1)] for modules in (self.proj, self.emb, self.ln))
        state.hidden = F.gelu(norm(torch.add(proj(above), emb(ids), alpha=self.share)))
        return Step(self.project(state.hidden, state.depth), state.hidden)

    # -- training ------------------------------------------------------------------------------------------------

    def unroll(self, features: Features, ids: Tensor, anchors: Sequence[Tensor]) -> Iterator[Tensor]:
        raise UserError("an mlp_speculator head is for decoding only and cannot be trained here; hydra is its like")

    def project(self, hidden: Tensor, depth: int) -> Tensor:
        logits: Tensor = self.head[min(depth, len(self.head) - 1)](hidden)
        return logits
