"""EAGLE-3: one decoder layer that reads three fused hidden states, then its own output.

Source: Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test",
arXiv 2503.01840, section 3; tensor names and order as in the authors' released heads.

At position t of the true text the layer reads the embedding of token t + 1 and the fused features of position t. For a
guess it reads the embedding of the guess and the output that proposed it, at the next rotary position. Its output goes
to the next step before the final norm, and to the logits behind it.

Letters: B rows, T positions, K nodes of one depth, P nodes of a round so far, M anchors of a depth, H width, F taps,
V vocabulary, Vd draft vocabulary, k key-value heads, h width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from .backbone import Backbone, Features
from .base import DraftHead, Step, matched
from .cache import Cache
from .layer import DecoderLayer, LayerConfig, Norm, Rotary, attend, attend_ahead
from .mask import attention_mask
from .vocab import DraftVocab

Pair = tuple[Tensor, Tensor]


@dataclass(kw_only=True)
class Eagle3Config(LayerConfig):
    """Shape of an EAGLE-3 head."""

    taps: tuple[int, ...]
    """Hidden states that are fused, low to high: 0 is the embedding output, k the output of layer k - 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = [k for k in self.taps if not 0 <= k <= self.num_layers]
        if wrong or not self.taps:
            raise UserError(f"taps are {list(self.taps)}; the backbone's hidden states are 0..{self.num_layers}")

    @classmethod
    def facts(cls, backbone: Backbone) -> dict[str, Any]:
        return super().facts(backbone) | {"taps": default_taps(backbone.num_layers)}


def default_taps(layers: int) -> tuple[int, int, int]:
    """2, N // 2, N - 3 of a model with N layers, as the paper's heads; closer together where N is below 7."""
    middle = layers // 2
    return max(0, min(2, middle - 1)), middle, max(layers - 3, middle + 1)


class FusedLayer(DecoderLayer):
    """A decoder layer whose attention reads embedding and hidden state side by side, each behind a norm."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = Norm(config.hidden_size, config.rms_norm_eps)

    def inputs(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """(..., H) and (..., H) to (..., 2H)."""
        return torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), -1)


@dataclass
class Eagle3State:
    """One request: entries made from true features lie committed in the cache, those of guesses behind them."""

    cache: Cache
    hidden: Tensor | None = None
    """(B, K, H) outputs at the newest nodes; the anchor's behind `extend`."""
    seen: Tensor | None = None
    """(B, K, P) bool: the newest nodes and which nodes of the round each sees; None while each sees all (a chain)."""
    first: int = -1
    """Number of the first of the newest nodes; -1 is the anchor."""
    depth: int = 0


class Eagle3(DraftHead):
    """The head; see the module's docstring."""

    method = "eagle3"
    config_class = Eagle3Config
    config: Eagle3Config

    def __init__(self, config: Eagle3Config, vocab: DraftVocab | None = None) -> None:
        super().__init__(config, vocab)
        self.taps = config.taps
        width = config.hidden_size
        self.fc = nn.Linear(len(config.taps) * width, width, bias=False)
        self.midlayer = FusedLayer(config)
        self.norm = Norm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self._rotary: Rotary | None = None

    def seed(self) -> None:
        """The logits start as the backbone makes them: its projection rows, behind the scale of its final norm. The
        fused states start close to the highest tap, which is the one nearest to them."""
        backbone = self.backbone
        width = self.config.hidden_size
        self.fc.weight.mul_(0.1)
        self.fc.weight[:, -width:] += torch.eye(width, device=self.fc.weight.device)
        self.lm_head.weight.copy_(self.vocab.rows(backbone.output_weight))
        signs = torch.ones(self.config.hidden_size, device=backbone.device, dtype=backbone.dtype)
        signs[1::2] = -1  # mean 0 and mean square 1, so that any norm leaves its own weights, and a bias cancels below
        self.norm.weight.copy_((backbone.norm(signs) - backbone.norm(-signs)) / 2 * signs)

    @property
    def rotary(self) -> Rotary:
        if self._rotary is None:
            self._rotary = Rotary(self.config)
        return self._rotary

    # -- decoding ------------------------------------------------------------------------------------------------

    def start(self, rows: int = 1) -> Eagle3State:
        return Eagle3State(Cache(rows))

    @torch.no_grad()
    def extend(
        self, state: Eagle3State, features: Features, next_ids: Tensor, lengths: Sequence[int] | None = None
    ) -> Step:
        cache, width = state.cache, next_ids.shape[1]
        counts = [width] * cache.rows if lengths is None else list(lengths)
        rows, ends = torch.arange(cache.rows), torch.tensor(counts) - 1
        visible = None if min(counts) == width else (torch.arange(width) <= ends[:, None])[:, None].to(next_ids.device)
        fused = self._fused(features)  # (B, T, H)
        inputs = self.midlayer.inputs(self._embedded(next_ids), fused)
        cache.forget()
        keys, values = self._write(cache, inputs, self.rotary.at(cache.lengths, width, inputs))
        places = [length + count - 1 for length, count in zip(cache.lengths, counts, strict=True)]
        last, inputs = fused[rows, ends, None], inputs[rows, ends, None]  # only the anchors ask
        hidden = self._answer(cache, last, inputs, (keys, values), self.rotary.at(places, 1, inputs), visible)
        if visible is None:
            cache.commit_all()
        else:
            cache.commit([range(count) for count in counts])
        state.hidden, state.seen, state.first, state.depth = hidden, None, -1, 0
        return Step(self.project(hidden, 0), hidden)

    @torch.no_grad()
    def step(self, state: Eagle3State, ids: Tensor, parents: Tensor) -> Step:
        assert state.hidden is not None, "step before extend"
        cache, before = state.cache, state.cache.pending
        above = self._descend(state, parents, before)  # (B, K, H)
        inputs = self.midlayer.inputs(self._embedded(ids), above)
        turn = self.rotary.at([length + state.depth for length in cache.lengths], 1, inputs)
        hidden = self._answer(cache, above, inputs, self._write(cache, inputs, turn), turn, state.seen)
        state.hidden, state.first, state.depth = hidden, before, state.depth + 1
        return Step(self.project(hidden, state.depth), hidden)

    def _write(self, cache: Cache, inputs: Tensor, turn: Pair) -> Pair:
        """Put entries of (B, T, 2H) inputs behind the others; keys and values (B, k, S, h) of all."""
        cache.open(inputs.shape[1])
        keys, values = self.midlayer.self_attn.entries(inputs, *turn)
        return cache.update(keys.transpose(1, 2), values.transpose(1, 2), 0)

    def _answer(
        self, cache: Cache, residual: Tensor, inputs: Tensor, entries: Pair, turn: Pair, visible: Tensor | None
    ) -> Tensor:
        """(B, K, H) output of nodes that see the committed text, and of what is pending `visible` (B, K, P) or all."""
        queries = self.midlayer.self_attn.queries(inputs, *turn)
        mask = None
        if visible is not None or min(cache.lengths) < max(cache.lengths):
            all_pending = torch.ones(1, cache.pending, dtype=torch.bool, device=inputs.device)
            mask = attention_mask(cache.lengths, all_pending if visible is None else visible, queries.dtype)
        return self.midlayer.finish(residual, attend(queries, *entries, mask))

    def _descend(self, state: Eagle3State, parents: Tensor, before: int) -> Tensor:
        """(B, K, H) what the parents hand down; notes which nodes their children see."""
        assert state.hidden is not None
        rows, width = parents.shape
        if before == state.depth and width == 1:
            return state.hidden  # still a chain
        device = parents.device
        row, place = torch.arange(rows, device=device)[:, None], parents - state.first  # (B, 1), (B, K)
        seen = state.seen
        if seen is None:
            seen = torch.ones(rows, state.hidden.shape[1], before, dtype=torch.bool, device=device)
        own = torch.eye(width, dtype=torch.bool, device=device).expand(rows, -1, -1)
        state.seen = torch.cat((seen[row, place], own), -1)  # (B, K, P)
        return state.hidden[row, place]

    # -- training ------------------------------------------------------------------------------------------------

    def unroll(self, features: Features, ids: Tensor, anchors: Sequence[Tensor]) -> Iterator[Tensor]:
        layer, width = self.midlayer, ids.shape[1]
        fused, embedded = self._fused(features), self._embedded(ids)  # (B, T, H)
        text_inputs = layer.inputs(embedded.roll(-1, 1), fused)  # the last position wraps round; no anchor sees it
        cos, sin = self.rotary.table(width + len(anchors), text_inputs)
        text = layer.self_attn.entries(text_inputs, cos[:width], sin[:width])  # (B, T, k, h) each
        hidden, inputs = (states.flatten(0, 1)[anchors[0]] for states in (fused, text_inputs))  # (M, H), (M, 2H)
        keys, values = (part.new_empty(len(inputs), 0, *part.shape[2:]) for part in text)  # (M, d, k, h): the steps'
        for depth, at in enumerate(anchors):
            turn = cos[at % width + depth], sin[at % width + depth]  # (M, 1, h)
            if depth:
                kept = torch.searchsorted(anchors[depth - 1], at)  # (M,) among the anchors of the depth above
                hidden = hidden[kept]
                inputs = layer.inputs(embedded.flatten(0, 1)[at + 1 + depth], hidden)
                key, value = layer.self_attn.entries(inputs, *turn)
                keys, values = torch.cat((keys[kept], key[:, None]), 1), torch.cat((values[kept], value[:, None]), 1)
            queries = layer.self_attn.queries(inputs, *turn)
            hidden = layer.finish(hidden, attend_ahead(queries, text, (keys, values), at))
            yield hidden

    def project(self, hidden: Tensor, depth: int) -> Tensor:
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits

    def _fused(self, features: Features) -> Tensor:
        """(B, T, F * H) taps to (B, T, H)."""
        assert features.taps is not None, f"an EAGLE-3 head reads hidden states {self.taps}; the features have none"
        fused: Tensor = self.fc(matched(features.taps, self.fc.weight))
        return fused

    def _embedded(self, ids: Tensor) -> Tensor:
        """(..., H) the backbone's own embedding, scale included, which is not trained."""
        with torch.no_grad():
            return self.backbone.embed(ids).to(self.fc.weight.dtype)
