"""EAGLE-1 and EAGLE-2: decoder layers that predict the backbone's next hidden state, which its own projection reads.

Source: Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", arXiv 2401.15077, section 3;
tensor names and order as in the authors' released heads. EAGLE-2 (arXiv 2406.16858) is the same head with a dynamic
tree: `Generator(backbone, head, tree="dynamic:...")`.

At position t the head reads the embedding of token t + 1 beside the hidden state of position t, behind the backbone's
final norm, and predicts that of position t + 1. Neither its first layer nor its output has a norm, as in the released
heads. For a guess it reads its own prediction in place of the true state.

Letters: B rows, T positions, H width, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from .backbone import Backbone, Features
from .base import matched
from .cached import Pair
from .eagle import Eagle, EagleConfig
from .layer import DecoderLayer, UpperLayer
from .linear import Linear
from .projection import Borrowed
from .vocab import DraftVocab


@dataclass(kw_only=True)
class Eagle1Config(EagleConfig):
    """Shape of an EAGLE-1 head."""

    fc_bias: bool = True
    """A bias where embedding and hidden state are joined; vLLM reads heads without one only."""


class Eagle1(Eagle):
    """The head; see the module's docstring."""

    method = "eagle1"
    config_class = Eagle1Config
    config: Eagle1Config
    regresses = True

    def __init__(self, config: Eagle1Config, vocab: DraftVocab | None = None) -> None:
        super().__init__(config, vocab)
        width = config.hidden_size
        self.fc = Linear(2 * width, width, bias=config.fc_bias)
        above = (UpperLayer(config, width) for _ in range(1, config.head_layers))
        self.layers = nn.ModuleList([DecoderLayer(config, width), *above])
        self._projection: Borrowed | None = None

    def bind(self, backbone: Backbone) -> Eagle1:
        super().bind(backbone)
        self._projection = Borrowed(backbone, self.vocab)
        return self

    def seed(self) -> None:
        """The prediction starts close to the state that is read."""
        width = self.config.hidden_size
        self.fc.weight.mul_(0.1)
        self.fc.weight[:, width:] += torch.eye(width, device=self.fc.weight.device)
        if self.config.fc_bias:
            self.fc.bias.zero_()

    @property
    def stack(self) -> list[DecoderLayer]:
        return [cast(DecoderLayer, layer) for layer in self.layers]

    def true_states(self, features: Features) -> Tensor:
        return matched(features.last, self.fc.weight)

    def read(self, embedded: Tensor, hidden: Tensor) -> Pair:
        joined: Tensor = self.fc(torch.cat((embedded, hidden), -1))
        return joined, joined

    def project(self, hidden: Tensor, depth: int) -> Tensor:
        assert self._projection is not None, "the head is bound to no backbone: call head.bind(backbone) first"
        return self._projection(hidden)
