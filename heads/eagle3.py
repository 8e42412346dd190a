"""EAGLE-3: decoder layers that read fused hidden states, then their own output.

Source: Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test",
arXiv 2503.01840, section 3; tensor names and order as in the authors' released heads. The switches of later heads
("EAGLE-3.1", as vLLM and SGLang read them) are `norm_before_fc`, `fc_norm`, `norm_before_residual` and `norm_output`.

At position t of the true text the layer reads the embedding of token t + 1 and the fused features of position t. For a
guess it reads the embedding of the guess and the output that proposed it, at the next rotary position. Its output goes
to the next step before the final norm, and to the logits behind it.

Letters: B rows, T positions, H width of the backbone, W width of the head, F taps, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from ..errors import UserError
from .backbone import Backbone, Features
from .base import matched
from .cached import Pair
from .eagle import Eagle, EagleConfig
from .layer import DecoderLayer, Norm, UpperLayer
from .linear import Linear
from .vocab import DraftVocab

START = 2.0  # root mean square of the fused states of a new head
LOOKED_AT = 64  # tokens that show how large the backbone's states are


@dataclass(kw_only=True)
class Eagle3Config(EagleConfig):
    """Shape of an EAGLE-3 head."""

    taps: tuple[int, ...]
    """Hidden states that are fused, low to high: 0 is the embedding output, k the output of layer k - 1."""
    width: int | None = None
    """Width of the head's own states; null: the backbone's. Another width means an embedding of its own, too."""
    embedding: Literal["shared", "own"] = "shared"
    """The backbone's embedding, or one of its own, which starts as a copy and is trained."""
    norm_before_fc: bool = False
    """A norm over all taps together before they are fused."""
    fc_norm: bool = False
    """A norm over each tap before they are fused."""
    norm_before_residual: bool = False
    """What the first layer adds its attention to is the hidden state behind its norm, not before it."""
    norm_output: bool = False
    """The next step reads the output behind the final norm, not before it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        top = self.num_layers or max(self.taps, default=0)  # 0: not known yet
        wrong = [k for k in self.taps if not 0 <= k <= top]
        if wrong or not self.taps:
            raise UserError(f"taps are {list(self.taps)}; the backbone's hidden states are 0..{self.num_layers}")
        if len(set(self.taps)) < len(self.taps):
            raise UserError(f"taps are {list(self.taps)}: one of them stands there twice")
        if self.width is not None and self.width < 1:
            raise UserError(f"width is {self.width}; it has to be at least 1")

    @property
    def own_width(self) -> int:
        """W."""
        return self.width or self.hidden_size

    @property
    def own_embedding(self) -> bool:
        return self.embedding == "own" or self.own_width != self.hidden_size

    @classmethod
    def shape(cls, backbone: Backbone) -> dict[str, Any]:
        return super().shape(backbone) | {"taps": default_taps(backbone.num_layers)}


def default_taps(layers: int) -> tuple[int, int, int]:
    """2, N // 2, N - 3 of a model with N layers, as the paper's heads; closer together where N is below 7."""
    middle = layers // 2
    return max(0, min(2, middle - 1)), middle, max(layers - 3, middle + 1)


class FusedLayer(DecoderLayer):
    """A decoder layer whose attention reads embedding and hidden state side by side, each behind a norm."""

    def __init__(self, config: Eagle3Config) -> None:
        width = config.own_width
        super().__init__(config, width, 2 * width)
        self.input_layernorm = Norm(width, config.rms_norm_eps)
        self.hidden_norm = Norm(width, config.rms_norm_eps)
        self.norm_before_residual = config.norm_before_residual

    def read(self, embedded: Tensor, hidden: Tensor) -> Pair:
        """(..., W) and (..., W) to (..., 2W), and the (..., W) that the attention's result is added to."""
        normed = self.hidden_norm(hidden)
        inputs = torch.cat((self.input_layernorm(embedded), normed), -1)
        return inputs, normed if self.norm_before_residual else hidden


class Eagle3(Eagle):
    """The head; see the module's docstring."""

    method = "eagle3"
    whole_last = False
    config_class = Eagle3Config
    config: Eagle3Config

    def __init__(self, config: Eagle3Config, vocab: DraftVocab | None = None) -> None:
        super().__init__(config, vocab)
        self.taps = config.taps
        width, eps, fused = config.own_width, config.rms_norm_eps, len(config.taps) * config.hidden_size
        self.fc = Linear(fused, width, bias=False)
        self.midlayer = FusedLayer(config)
        # named by their numbers, so that the first layer keeps the name that released heads give it
        self.layers = nn.ModuleDict({str(n): UpperLayer(config, width) for n in range(1, config.head_layers)})
        self.norm = Norm(width, eps)
        self.lm_head = Linear(width, config.draft_vocab_size, bias=False)
        self.input_norm = Norm(fused, eps) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList(
            Norm(config.hidden_size, eps) for _ in range(len(config.taps) if config.fc_norm else 0)
        )
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if config.own_embedding else None

    def seed(self) -> None:
        """The fused states start close to the highest tap, brought to a size at which what the layer adds counts beside
        them. The logits start in the order in which the backbone makes them of a state, by its projection and the gains
        of its final norm, with a spread of about 1 for every backbone. A head of another width sees all of this through
        the same random directions."""
        backbone, width = self.backbone, self.config.hidden_size
        narrow = self.config.own_width != width
        basis = torch.eye(width)
        if narrow:  # the same for every vocabulary
            basis = torch.empty(self.config.own_width, width)
            nn.init.orthogonal_(basis, generator=torch.Generator().manual_seed(0))
        basis = basis.to(self.fc.weight.device)  # (W, H)
        self.fc.weight.mul_(0.1)
        self.fc.weight[:, -width:] += basis
        for place, size in enumerate(self._sizes()):
            self.fc.weight[:, place * width : (place + 1) * width] *= START / size
        rows = self.vocab.rows(backbone.output_weight).to(basis.dtype)
        signs = torch.ones(width, device=backbone.device, dtype=backbone.dtype)
        signs[1::2] = -1  # mean 0 and mean square 1, so that any norm leaves its own weights, and a bias cancels below
        gains = ((backbone.norm(signs) - backbone.norm(-signs)) / 2 * signs).to(basis.dtype)
        some = backbone.output_weight[:: max(1, backbone.vocab_size // 4096)].to(basis.dtype)  # whatever the vocabulary
        rows = rows * gains / (some * gains).pow(2).sum(1).mean().sqrt().clamp(min=1e-6)
        self.lm_head.weight.copy_(rows @ basis.T if narrow else rows)
        if self.embed_tokens is not None:
            every = torch.arange(self.config.vocab_size, device=backbone.device)
            embedded = backbone.embed(every).to(basis.dtype)
            self.embed_tokens.weight.copy_(embedded @ basis.T if narrow else embedded)

    def shares(self) -> dict[str, float]:
        """`fc` reads states as large as the backbone makes them, while a step of Adam is as long whatever a weight is
        multiplied with: its learning rate is divided by their size."""
        size = sum(one**2 for one in self._sizes()) / len(self.taps)
        return {"fc.weight": min(1.0, size**-0.5)}

    @torch.no_grad()
    def _sizes(self) -> list[float]:
        """Root mean square of each tap as `fc` reads it, at the middle one of some positions of any text."""
        if self.input_norm is not None or len(self.fc_norm):
            return [1.0] * len(self.taps)
        backbone = self.backbone
        ids = torch.randint(backbone.vocab_size, (1, LOOKED_AT), generator=torch.Generator().manual_seed(0))
        features = backbone.forward(ids.to(backbone.device), taps=self.taps)
        assert features.taps is not None
        taps = features.taps[0].float().view(LOOKED_AT, len(self.taps), -1)  # (T, F, H)
        sizes: list[float] = taps.pow(2).mean(-1).sqrt().median(0).values.clamp(min=1e-3).tolist()
        return sizes

    @property
    def stack(self) -> list[DecoderLayer]:
        return [self.midlayer, *(cast(DecoderLayer, layer) for layer in self.layers.values())]

    def true_states(self, features: Features) -> Tensor:
        """(B, T, F * H) taps to (B, T, W)."""
        assert features.taps is not None, f"an EAGLE-3 head reads hidden states {self.taps}; the features have none"
        taps = matched(features.taps, self.fc.weight)
        if self.input_norm is not None:
            taps = self.input_norm(taps)
        if len(self.fc_norm):
            parts = torch.split(taps, self.config.hidden_size, -1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        fused: Tensor = self.fc(taps)
        return fused

    def read(self, embedded: Tensor, hidden: Tensor) -> Pair:
        return self.midlayer.read(embedded, hidden)

    def handed_on(self, output: Tensor) -> Tensor:
        normed: Tensor = self.norm(output) if self.config.norm_output else output
        return normed

    def embedded(self, ids: Tensor) -> Tensor:
        """(..., W) the backbone's own embedding, scale included, which is not trained; or the head's."""
        if self.embed_tokens is None:
            return super().embedded(ids)
        embedded: Tensor = self.embed_tokens(ids)
        return embedded

    def project(self, hidden: Tensor, depth: int) -> Tensor:
        logits: Tensor = self.lm_head(hidden if self.config.norm_output else self.norm(hidden))
        return logits
