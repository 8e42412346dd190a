"""A causal LM as drafter: a smaller one, a quantised copy of the backbone, or the backbone's own first layers.

`DraftModel` stands where a head stands: `read` takes in true text, `step` takes guesses depth by depth. Its cache holds
true tokens only. Guesses lie behind them as pending ones; those that turned out true are kept, since what was computed
for them is what the true text gives, and whatever was never fed (the last draft of a run that was accepted whole, and
the token behind it) is fed together at the beginning of the next round.

Letters: T positions, K nodes of one depth, P pending guesses, V vocabulary that draft model and backbone share.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from ..heads.backbone import Backbone, Features
from ..heads.base import Step
from ..heads.cache import Cache
from ..heads.vocab import DraftVocab
from .chance import Chance
from .drafter import HeadDrafter
from .tree import Shape, Tree

_PIECE = 512  # positions of one forward: bounds the memory of masks and activations


@dataclass
class Known:
    """What a draft model has read in one request."""

    cache: Cache
    seen: Tensor
    """(P, P) bool: which guesses each guess sees."""
    ids: list[int] = field(default_factory=list)
    """The true tokens in the cache."""
    guesses: list[Tensor] = field(default_factory=list)
    """(K,) token ids of the guesses behind them, depth by depth."""
    parents: list[Tensor] = field(default_factory=list)
    """(K,) the guess that each of them follows; -1: the last true token."""


class DraftModel:
    """A causal LM with the same tokens as the backbone, as source of guesses.

    Args:
        backbone: the draft model.
        vocab_size: tokens of the backbone that is drafted for; what either has beyond the other is padding.
    """

    taps: tuple[int, ...] = ()
    max_depth: int | None = None

    def __init__(self, backbone: Backbone, vocab_size: int) -> None:
        self.backbone = backbone
        self.vocab = DraftVocab(range(min(vocab_size, backbone.vocab_size)), vocab_size)
        self.noted = False

    def start(self, rows: int = 1) -> Known:
        """A new request."""
        return Known(self.backbone.new_cache(rows), self._nothing())

    def room(self, text: Sequence[int]) -> int:
        """How deep may be drafted behind the text; 0, with a note the first time, where the model holds no more."""
        room = self.backbone.max_positions - len(text) + 1  # the last draft is never fed
        if room < 1 and not self.noted:
            self.noted = True
            most = f"{self.backbone.name} holds texts of {self.backbone.max_positions} tokens"
            warnings.warn(f"{most}: it drafts nothing behind longer ones", stacklevel=2)
        return min(max(room, 0), self.backbone.together(len(text)))

    def read(self, known: Known, text: Sequence[int]) -> Step:
        """Bring the cache to the true text, feeding only what it lacks.

        Args:
            text: all true tokens. Where it differs from what was read before, the cache goes back to where it does not.

        Returns:
            What follows the last token, K = 1.
        """
        self._settle(known, text)
        missing = list(text[len(known.ids) :])
        last = self.backbone.vocab_size - 1  # ids beyond it are padding of the backbone, which no text should hold
        for begin in range(0, len(missing), _PIECE):
            part = [min(token, last) for token in missing[begin : begin + _PIECE]]
            features = self.backbone.forward(torch.tensor([part], device=self.backbone.device), cache=known.cache)
            known.cache.commit_all()
        known.ids += missing
        return self._step(features.last[:, -1:])

    def step(self, known: Known, ids: Tensor, parents: Tensor) -> Step:
        """Take in the guesses of one depth, as `DraftHead.step` does: (1, K) ids and numbers of their parents."""
        none = known.seen.new_zeros(1, known.seen.shape[1])
        above = torch.cat([known.seen, none])[parents[0]]  # (K, P); -1 finds the last row, which sees no guess
        own = torch.eye(ids.shape[1], dtype=torch.bool, device=ids.device)
        seeing = torch.cat([above, own], 1)  # (K, P + K)
        features = self.backbone.forward(ids, cache=known.cache, ancestors=seeing)
        padding = known.seen.new_zeros(known.seen.shape[0], ids.shape[1])
        known.seen = torch.cat([torch.cat([known.seen, padding], 1), seeing])
        known.guesses.append(ids[0])
        known.parents.append(parents[0])
        return self._step(features.last)

    def chain(self, known: Known, text: Sequence[int], depth: int) -> Iterator[int]:
        """Its best guesses behind the text, one by one; what is not asked for is not computed."""
        ids = torch.empty(1, 1)
        for place in range(depth):
            if place == 0:
                logits = self.read(known, text).logits
            else:
                parents = torch.tensor([[place - 2]], device=self.backbone.device)  # -1: the last true token
                logits = self.step(known, ids, parents).logits
            ids = logits.argmax(-1)  # (1, 1)
            yield int(ids)

    def _settle(self, known: Known, text: Sequence[int]) -> None:
        """Keep what is true of the cache, guesses included; at least the last token of the text is left to be fed."""
        most = min(len(known.ids), len(text) - 1)
        if known.ids == list(text[: len(known.ids)]) and most == len(known.ids):
            path = _accepted(known, text[most:-1])
            known.cache.commit([path])
            known.ids += text[most : most + len(path)]
        else:
            same = next((i for i in range(most) if known.ids[i] != text[i]), most)
            known.cache.truncate([same])
            del known.ids[same:]
        known.guesses, known.parents, known.seen = [], [], self._nothing()

    def _step(self, hidden: Tensor) -> Step:
        return Step(self.backbone.logits(hidden)[..., : self.vocab.size], None)

    def _nothing(self) -> Tensor:
        return torch.zeros(0, 0, dtype=torch.bool, device=self.backbone.device)


def _accepted(known: Known, tokens: Sequence[int]) -> list[int]:
    """The guesses that these tokens go through, from the last true one down."""
    if not known.guesses:
        return []
    ids, parents = torch.cat(known.guesses).tolist(), torch.cat(known.parents).tolist()
    path, node = list[int](), -1
    for token in tokens:
        children = (n for n, parent in enumerate(parents) if parent == node and ids[n] == token)
        child = next(children, None)
        if child is None:
            break
        path.append(child)
        node = child
    return path


class ModelDrafter(HeadDrafter):
    """Grows trees with a draft model; nothing is computed before a draft is asked for."""

    def __init__(self, model: DraftModel, shape: Shape) -> None:
        super().__init__(cast(Any, model), shape, model.backbone.device)
        self.model = model
        self.text: list[int] = []

    def start(self, prompt: Sequence[int]) -> None:
        super().start(prompt)
        self.text = [prompt[0]]

    def advance(self, features: Features, next_ids: Sequence[int]) -> None:
        self.text += next_ids
        self.root = next_ids[-1]

    def draft(self, budget: int) -> Tree:
        return super().draft(self._ready(budget))

    def sample(self, budget: int, chance: Chance, law: Callable[[Tensor], Tensor]) -> Tree:
        return super().sample(self._ready(budget), chance, law)

    def _ready(self, budget: int) -> int:
        """How deep can be drafted; where that is at all, the model has read the text."""
        depth = min(budget, self.depth)
        depth = min(depth, self.model.room(self.text)) if depth > 0 else 0
        if depth > 0:
            self.anchored = self.model.read(self.state, self.text)
        return depth


def same_tokens(ours: Any, theirs: Any) -> bool:
    """Whether two tokenizers cut texts into the same ids; without one of them, that is taken for granted.

    Tokens that were added later, such as those of a chat template, may be missing in one of them.
    """
    if ours is None or theirs is None or ours is theirs:
        return True
    one, other = _trained(ours), _trained(theirs)
    added, more = ours.get_added_vocab(), theirs.get_added_vocab()
    return one == other and all(more.get(token, place) == place for token, place in added.items())


def _trained(tokenizer: Any) -> dict[str, int]:
    """Tokens and ids without those that were added later."""
    added = tokenizer.get_added_vocab()
    return {token: place for token, place in tokenizer.get_vocab().items() if token not in added}
