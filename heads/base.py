"""What every draft head offers, whatever its method.

A head stands on an *anchor*: position t, whose true features are known, together with the true token t + 1. Depth d
counts drafted tokens from 0: from anchor t, depth d proposes token t + 2 + d.

- Decoding: `start` a request, `extend` it by true tokens, then `step` through guesses depth by depth; the next `extend`
  forgets them.
- Training: `unroll` gives for each depth what `project` turns into logits, computed from the true tokens. Step d of it
  equals draft step d along those tokens; tests/test_heads.py holds every method to that.

A method is one file, read from top to bottom: config, module, draft step, training unroll; and an entry in `METHODS`.

Letters: B rows, T positions, K nodes of one depth, D depths, M_d anchors of depth d, H width, V vocabulary, Vd draft
vocabulary.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..errors import UserError
from ..settings import build as build_settings
from ..settings import dump
from . import chat
from .backbone import Backbone, Features
from .linear import Linear
from .projection import Borrowed
from .vocab import DraftVocab


@dataclass
class Step:
    """What a head says behind some nodes."""

    logits: Tensor
    """(B, K, Vd) for the next depth, one row for each node given; behind `extend` K is 1, the anchor."""
    hidden: Tensor | None
    """(B, K, H) what a child of these nodes reads; None where nothing is handed down."""


MOST_TOKENS = 1 << 26  # far above any: what a damaged config claims is not made room for


@dataclass(kw_only=True)
class HeadConfig:
    """What every method needs to know; each adds fields of its own."""

    hidden_size: int
    """Width of the backbone's hidden states."""
    vocab_size: int
    """Rows of the backbone's output projection."""
    draft_vocab_size: int
    """Tokens that the head can propose."""
    num_layers: int
    """Decoder layers of the backbone; 0 in a head from elsewhere whose files do not say, until it is bound."""
    backbone: str = ""
    """Name of the backbone that the head was made for."""
    backbone_revision: str = ""
    """Its commit, where it came from the Hub."""
    backbone_hash: str = ""
    """Fingerprint of its weights."""
    tokenizer_hash: str = ""
    """Fingerprint of its tokenizer; empty where there was none."""
    template_hash: str = ""
    """Fingerprint of its chat template."""
    adapter_hash: str = ""
    """Hash of the adapter beside the head, if it was trained on a backbone which that one changes (Medusa-2)."""

    def __post_init__(self) -> None:
        if self.vocab_size > MOST_TOKENS:
            raise UserError(f"vocab_size is {self.vocab_size}; no vocabulary has more than {MOST_TOKENS} tokens")
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise UserError(f"draft_vocab_size is {self.draft_vocab_size}; it has to be 1 to {self.vocab_size}")

    @classmethod
    def facts(cls, backbone: Backbone) -> dict[str, Any]:
        """The fields that follow from the backbone, for a head with its full vocabulary: its shape and whose it is."""
        return {
            **cls.shape(backbone),
            "backbone": plain_name(backbone.name),
            "backbone_revision": backbone.revision,
            "backbone_hash": backbone.fingerprint(),
            **_fingerprints(backbone),
        }

    @classmethod
    def shape(cls, backbone: Backbone) -> dict[str, Any]:
        """Those of them that follow from how the backbone is shaped, whatever its weights."""
        return {
            "hidden_size": backbone.hidden_size,
            "vocab_size": backbone.vocab_size,
            "draft_vocab_size": backbone.vocab_size,
            "num_layers": backbone.num_layers,
        }


class DraftHead(nn.Module):
    """A trainable head on a frozen backbone.

    Args:
        config: its shape.
        vocab: the tokens it can propose; None: all.
    """

    method: ClassVar[str]
    config_class: ClassVar[type[HeadConfig]]
    config: HeadConfig
    taps: tuple[int, ...] = ()
    """Hidden states of the backbone that it reads besides `Features.last`."""
    max_depth: int | None = None
    """Drafted tokens it can propose in a round; None: any number."""
    trainable: bool = True
    """False: a method for decoding only, whose `unroll` raises."""
    regresses: bool = False
    """Whether what `unroll` yields at depth d guesses `Features.last` at t + 1 + d: then losses on features fit."""
    whole_last: bool = True
    """Whether training reads `Features.last` at every position up to an anchor; False: at the anchors alone."""
    checkpointing: bool = False
    """Whether what `spared` runs in training is computed once more in the backward pass, and not kept until then."""
    source: str = ""
    """Where it was loaded from."""
    home: Path | None = None
    """Its folder, if that is the user's own: what is measured of the head is kept there."""

    def __init__(self, config: HeadConfig, vocab: DraftVocab | None = None) -> None:
        super().__init__()
        self.config = config
        self.vocab = vocab or DraftVocab(None, config.vocab_size)
        if (self.vocab.size, self.vocab.vocab_size) != (config.draft_vocab_size, config.vocab_size):
            raise UserError(
                f"the draft vocabulary holds {self.vocab.size} of {self.vocab.vocab_size} tokens; "
                f"the head's config says {config.draft_vocab_size} of {config.vocab_size}"
            )
        self._backbone: Backbone | None = None
        self.spent = False
        """Whether it was said that texts became longer than those it was trained on."""

    # -- belonging to a backbone ---------------------------------------------------------------------------------

    @classmethod
    def build(
        cls, backbone: Backbone, config: HeadConfig | None = None, *, vocab: DraftVocab | None = None, **fields: Any
    ) -> Self:
        """A new head, shaped by and initialised from the backbone, in fp32 on its device, and bound to it.

        Args:
            config: None: what follows from the backbone.
            vocab: the tokens it can propose; None: all.
            fields: config fields that are to be otherwise.

        Raises:
            UserError: a field is unknown or has the wrong type, or a smaller vocabulary is asked for but not given.
        """
        values = cls.config_class.facts(backbone) if config is None else dump(config)
        if vocab is not None:
            values["draft_vocab_size"] = vocab.size
        made = build_settings(cls.config_class, {**values, **fields}, lambda key: f"{cls.method} head")
        if vocab is None and made.draft_vocab_size != made.vocab_size:
            raise UserError(
                f"a draft vocabulary of {made.draft_vocab_size} tokens was asked for, but not which of the "
                f"{made.vocab_size}: give vocab=DraftVocab.count(rows, vocab_size, size)"
            )
        head = cls(made, vocab).to(backbone.device).bind(backbone)
        with torch.no_grad():
            head.seed()
        return head

    def bind(self, backbone: Backbone) -> Self:
        """Check that the head belongs to this backbone, and borrow its embedding and projection.

        What is borrowed is no part of the module: it is never trained, moved or saved with it.

        Raises:
            UserError: width, layers, vocabulary or tokenizer differ; names both values. Other weights, adapters or
                templates of the same shape are told in a warning.
        """
        config, made_for = self.config, self.config.backbone or "another backbone"
        hashes = _fingerprints(backbone)
        pairs: list[tuple[str, object, object]] = [
            ("hidden states of width", config.hidden_size, backbone.hidden_size),
            ("a vocabulary of", config.vocab_size, backbone.vocab_size),
            ("decoder layers:", config.num_layers or backbone.num_layers, backbone.num_layers),
        ]
        if config.tokenizer_hash and backbone.tokenizer is not None:
            pairs.append(("a tokenizer with hash", config.tokenizer_hash, hashes["tokenizer_hash"]))
        for what, ours, theirs in pairs:
            if ours != theirs:
                raise UserError(
                    f"the {self.method} head was made for {made_for}, with {what} {ours}; {backbone.name} has "
                    f"{theirs}. Use the backbone that it was trained on, or train a head for this one"
                )
        if not config.num_layers:
            self.config = replace(config, num_layers=backbone.num_layers)
        if self._backbone is not backbone and (others := self._differences(backbone, hashes)):
            note = f"the {self.method} head was trained on {'; '.join(others)}: what is generated is exact all the same"
            warnings.warn(f"{note}, but fewer of its drafts may be right", stacklevel=2)
        self._backbone = backbone
        return self

    def pack(self) -> None:
        """Lay out the weights, as they are now, for the kernels of a CPU (packed.py): decoding is quicker. A head that
        is trained on is packed again before it decodes."""
        for part in (*self.modules(), *vars(self).values()):
            if isinstance(part, Linear | Borrowed):
                part.pack()

    def _differences(self, backbone: Backbone, hashes: dict[str, str]) -> list[str]:
        """In what the backbone differs from the one it was trained on: weights or template, with both hashes."""
        config, found = self.config, []
        if config.backbone_hash and not self._of_weights(backbone):
            made_for = config.backbone or "a backbone"
            found.append(
                f"weights {config.backbone_hash} ({made_for}), and {backbone.name} has {backbone.fingerprint()}"
            )
        template = hashes.get("template_hash")
        if config.template_hash and template and config.template_hash != template:
            found.append(f"chat template {config.template_hash}, and the tokenizer of {backbone.name} has {template}")
        return found

    def _of_weights(self, backbone: Backbone) -> bool:
        """Whether the backbone has the weights it was trained on, or may have them but for the precision of either."""
        known, adapter = self.config.backbone_hash, self.config.adapter_hash
        if (adapter and adapter == backbone.adapter) or backbone.rounded:  # an adapter says what its backbone is
            return True
        return known == backbone.fingerprint() or known == backbone.fingerprint(torch.float16)

    @property
    def backbone(self) -> Backbone:
        """The backbone it is bound to."""
        assert self._backbone is not None, "the head is bound to no backbone: call head.bind(backbone) first"
        return self._backbone

    @abstractmethod
    def seed(self) -> None:
        """Start the weights from the bound backbone where the method does so."""

    def shares(self) -> dict[str, float]:
        """Learning rates of parameters that AdamW moves, as multiples of the common one, by name; of others it is 1."""
        return {}

    # -- decoding ------------------------------------------------------------------------------------------------

    @abstractmethod
    def start(self, rows: int = 1) -> Any:
        """A state for a new request of B rows; each method has its own kind."""

    @abstractmethod
    def extend(self, state: Any, features: Features, next_ids: Tensor, lengths: Sequence[int] | None = None) -> Step:
        """Take in true tokens: all guesses so far are forgotten, and the last true position becomes the anchor.

        Args:
            features: of the next T positions of each row, (B, T, .).
            next_ids: (B, T) the true token behind each position.
            lengths: true positions of each row where they differ, 0 to T; what lies behind them is padding, and a row
                of 0 stays as it is (nothing that is said of it means anything).

        Returns:
            The step of the anchors, K = 1: depth 0.
        """

    @abstractmethod
    def step(self, state: Any, ids: Tensor, parents: Tensor) -> Step:
        """Take in the guesses of one depth, each call one deeper than the last, the first at depth 0.

        Args:
            ids: (B, K) target ids.
            parents: (B, K) numbers of nodes of the depth above, in the order in which the round's nodes were given,
                counted from 0; -1 is the anchor.

        Returns:
            What follows them: logits of the next depth.
        """

    # -- training ------------------------------------------------------------------------------------------------

    @abstractmethod
    def unroll(self, features: Features, ids: Tensor, anchors: Sequence[Tensor]) -> Iterator[Tensor]:
        """For each depth d = 0..D-1 what `project` reads, (M_d, H), at the anchors of that depth.

        The tokens between anchor and proposal are those of the data, never the head's own guesses.

        Args:
            features: of whole rows, (B, T, .).
            ids: (B, T) their tokens; rows are padded on the right if at all.
            anchors: D tensors (M_d,) int64, ascending: b * T + t for an anchor at position t of row b, whose tokens up
                to t + 1 + d are true ones of that row. Those of depth d are among those of depth d - 1.
        """

    @abstractmethod
    def project(self, hidden: Tensor, depth: int) -> Tensor:
        """(..., H) of `unroll` at this depth to (..., Vd) logits."""

    def spared(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """`function(*inputs)`; with `checkpointing`, of all it computes only the inputs are kept."""
        if self.checkpointing and torch.is_grad_enabled():
            kept: Tensor = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
            return kept
        return function(*inputs)


def matched(states: Tensor, weight: Tensor) -> Tensor:
    """`states` in the dtype of the weights that read them; under autocast that is autocast's business."""
    return states if torch.is_autocast_enabled(states.device.type) else states.to(weight.dtype)


def at_anchors(states: Tensor, lengths: Sequence[int] | None) -> Tensor:
    """(B, 1, ...) of (B, T, ...): the last true position of each row, of which there are `lengths`; None: T in all."""
    if lengths is None:
        return states[:, -1:]
    return states[torch.arange(len(lengths)), torch.tensor(lengths) - 1, None]


def _fingerprints(backbone: Backbone) -> dict[str, str]:
    if backbone.tokenizer is None:
        return {}
    return {f"{part}_hash": value for part, value in chat.fingerprint(backbone.tokenizer).items()}


def plain_name(name: str) -> str:
    """A folder by its last part: files that travel name no paths of one machine."""
    return Path(name).name if Path(name).is_absolute() or name.startswith((".", "~")) else name
