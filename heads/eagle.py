"""What the EAGLE methods share: decoder layers that read an embedding beside a hidden state, then their own output.

At position t of the true text the first layer reads the embedding of token t + 1 beside what stands for the backbone's
state at t. For a guess it reads the embedding of the guess beside the output that proposed it, at the next rotary
position. Training does the same along the true tokens, which EAGLE-3 calls training-time test and HASS (Zhang et al.,
"Learning Harmonized Representations for Speculative Sampling", arXiv 2408.15766) multi-step alignment.

A method says how the states of the true text are made (`true_states`), what the first layer reads (`read`), and what of
its output goes on (`handed_on`).

Letters: B rows, T positions, K nodes of one depth, P nodes of a round so far, M anchors of a depth, W width of the
layers, k key-value heads, h width of a head.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from ..errors import UserError
from .backbone import Features
from .base import DraftHead, Step
from .cache import Cache
from .cached import Pair, anchored, answer, below, seeing, write
from .layer import DecoderLayer, LayerConfig, UpperLayer, attend_ahead, nothing_ahead
from .mask import causal
from .rotary import Rotary


@dataclass(kw_only=True)
class EagleConfig(LayerConfig):
    """Shape of an EAGLE head."""

    head_layers: int = 1
    """Decoder layers of the head."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_layers < 1:
            raise UserError(f"head_layers is {self.head_layers}; it has to be at least 1")


@dataclass
class EagleState:
    """One request: entries made from true states lie committed in the cache, those of guesses behind them."""

    cache: Cache
    hidden: Tensor | None = None
    """(B, K, W) outputs at the newest nodes; the anchor's behind `extend`."""
    seen: Tensor | None = None
    """(B, K, P) bool: the newest nodes and which nodes of the round each sees; None while each sees all (a chain)."""
    depth: int = 0


class Eagle(DraftHead):
    """An autoregressive head."""

    config: EagleConfig

    @property
    @abstractmethod
    def stack(self) -> list[DecoderLayer]:
        """The layers, from the first up; all above it are `UpperLayer`s."""

    @abstractmethod
    def true_states(self, features: Features) -> Tensor:
        """(B, T, W) what stands at true positions where guesses have outputs."""

    @abstractmethod
    def read(self, embedded: Tensor, hidden: Tensor) -> Pair:
        """Embeddings and states to what the first layer's attention reads, and what its result is added to."""

    def handed_on(self, output: Tensor) -> Tensor:
        """(..., W) output of the last layer to what the next step and `project` read."""
        return output

    def embedded(self, ids: Tensor) -> Tensor:
        """(..., W) the backbone's own embedding, scale included, which is not trained."""
        with torch.no_grad():
            return self.backbone.embed(ids).to(self.stack[0].mlp.up_proj.weight.dtype)

    @cached_property
    def rotary(self) -> Rotary:
        return self.config.rotary()

    # -- decoding ------------------------------------------------------------------------------------------------

    def start(self, rows: int = 1) -> EagleState:
        return EagleState(Cache(rows))

    @torch.no_grad()
    def extend(
        self, state: EagleState, features: Features, next_ids: Tensor, lengths: Sequence[int] | None = None
    ) -> Step:
        cache, layers, width = state.cache, self.stack, next_ids.shape[1]
        inputs, residual = self.read(self.embedded(next_ids), self.true_states(features))
        cache.forget()
        cache.open(width)
        if len(layers) > 1:
            mask = seeing(cache, causal(width, inputs.device) if width > 1 else None, inputs)
            inputs, residual = self._lower(cache, inputs, residual, self.rotary.at(cache.lengths, width, inputs), mask)
        output = anchored(layers[-1], len(layers) - 1, cache, self.rotary, inputs, residual, lengths)
        state.hidden, state.seen, state.depth = self.handed_on(output), None, 0
        return Step(self.project(state.hidden, 0), state.hidden)

    @torch.no_grad()
    def step(self, state: EagleState, ids: Tensor, parents: Tensor) -> Step:
        assert state.hidden is not None, "step before extend"
        cache = state.cache
        inputs, residual = self.read(self.embedded(ids), self._descend(state, parents, cache.pending))
        turn = self.rotary.at([length + state.depth for length in cache.lengths], 1, inputs)
        cache.open(ids.shape[1])
        mask = seeing(cache, state.seen, inputs)
        inputs, residual = self._lower(cache, inputs, residual, turn, mask)
        number, top = len(self.stack) - 1, self.stack[-1]
        output = answer(top, residual, inputs, write(top, number, cache, inputs, turn), turn, mask)
        state.hidden, state.depth = self.handed_on(output), state.depth + 1
        return Step(self.project(state.hidden, state.depth), state.hidden)

    def _lower(self, cache: Cache, inputs: Tensor, residual: Tensor, turn: Pair, mask: Tensor | None) -> Pair:
        """Through all layers but the last, whose inputs come out."""
        layers = self.stack
        for number, layer in enumerate(layers[:-1]):
            entries = write(layer, number, cache, inputs, turn)
            inputs, residual = _upper(layers, number).read(answer(layer, residual, inputs, entries, turn, mask))
        return inputs, residual

    def _descend(self, state: EagleState, parents: Tensor, before: int) -> Tensor:
        """(B, K, W) what the parents hand down; notes which nodes their children see."""
        assert state.hidden is not None
        rows, width = parents.shape
        if before == state.depth and width == 1:
            return state.hidden  # still a chain
        seen = state.seen
        if seen is None:
            shape = rows, state.hidden.shape[1], before
            seen = torch.ones(shape, dtype=torch.bool, device=parents.device)
        own = torch.eye(width, dtype=torch.bool, device=parents.device).expand(rows, -1, -1)
        state.seen = torch.cat((below(seen, parents, before), own), -1)  # (B, K, P)
        return below(state.hidden, parents, before)

    # -- training ------------------------------------------------------------------------------------------------

    def unroll(self, features: Features, ids: Tensor, anchors: Sequence[Tensor]) -> Iterator[Tensor]:
        layers, length = self.stack, ids.shape[1]
        embedded = self.embedded(ids)  # (B, T, W)
        # the last position wraps round; no anchor sees it
        inputs, residual = self.read(embedded.roll(-1, 1), self.true_states(features))
        cos, sin = self.rotary.table(length + len(anchors), inputs)
        texts, inputs, residual = self._text(inputs, residual, (cos[:length], sin[:length]))
        inputs, residual = (states.flatten(0, 1)[anchors[0]] for states in (inputs, residual))  # (M, .)
        ahead = [nothing_ahead(text, len(inputs)) for text in texts]
        hidden = residual
        for depth, at in enumerate(anchors):
            turn = cos[at % length + depth], sin[at % length + depth]  # (M, 1, h)
            if depth:
                kept = torch.searchsorted(anchors[depth - 1], at)  # (M,) among the anchors of the depth above
                inputs, residual = self.read(embedded.flatten(0, 1)[at + 1 + depth], hidden[kept])
                for number, layer in enumerate(layers):
                    entries = layer.self_attn.entries(inputs, *turn)
                    ahead[number] = _longer(ahead[number], entries, kept)
                    if number + 1 < len(layers):
                        queries = layer.self_attn.queries(inputs, *turn)
                        mixed = attend_ahead(queries, texts[number], ahead[number], at)
                        output = self.spared(layer.finish, residual, mixed)
                        inputs, residual = _upper(layers, number).read(output)
            queries = layers[-1].self_attn.queries(inputs, *turn)
            mixed = attend_ahead(queries, texts[-1], ahead[-1], at)
            hidden = self.handed_on(self.spared(layers[-1].finish, residual, mixed))
            yield hidden

    def _text(self, inputs: Tensor, residual: Tensor, turn: Pair) -> tuple[list[Pair], Tensor, Tensor]:
        """Entries (B, T, k, h) of the true text in every layer, and what the last layer reads at each position."""
        layers, texts = self.stack, []
        rows, length = inputs.shape[:2]
        for number, layer in enumerate(layers):
            texts.append(layer.self_attn.entries(inputs, *turn))
            if number + 1 < len(layers):
                queries = layer.self_attn.queries(inputs, *turn).flatten(0, 1)  # (B * T, n, h)
                everywhere = torch.arange(rows * length, device=inputs.device)
                mixed = attend_ahead(queries, texts[-1], nothing_ahead(texts[-1], rows * length), everywhere)
                output = self.spared(layer.finish, residual, mixed.view(rows, length, -1))
                inputs, residual = _upper(layers, number).read(output)
        return texts, inputs, residual


def _upper(layers: list[DecoderLayer], number: int) -> UpperLayer:
    """The layer above this one."""
    return cast(UpperLayer, layers[number + 1])


def _longer(ahead: Pair, entries: Pair, kept: Tensor) -> Pair:
    """(M, E, k, h) entries ahead of the text, for those that go on, with those of one more step."""
    keys, values = (torch.cat((old[kept], new[:, None]), 1) for old, new in zip(ahead, entries, strict=True))
    return keys, values
