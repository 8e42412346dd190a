"""Drafters: what guesses the next tokens, one tree a round.

`Drafter` is all that generation knows of them; `HeadDrafter` grows its trees with a trained head, `NoDrafter` never
guesses.

Letters: T positions, K nodes of one depth, Vd draft vocabulary. A head numbers the nodes of a round in the order in
which `step` was given them; -1 is the anchor, whose child is every draft of depth 0.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..errors import UserError
from ..heads.backbone import Features
from ..heads.base import DraftHead, Step
from .chance import Chance
from .drawn import drawn, spread
from .gain import Belief, grow
from .growth import grown
from .tree import Auto, Gain, Shape, Static, Tree, limited


@runtime_checkable
class Drafter(Protocol):
    """Guesses what follows the true text. Serves one request at a time.

    A round is `draft`, and, if the text goes on, `advance` with what the backbone made of it.
    """

    taps: tuple[int, ...]
    """Hidden states of the backbone that `advance` is to be given, besides the last."""

    def start(self, prompt: Sequence[int]) -> None:
        """A new request: forget the last one. The text itself comes through `advance`."""

    def advance(self, features: Features, next_ids: Sequence[int]) -> None:
        """True features of the next T positions, and the true token behind each: token t + 1 for position t.

        Called for the prompt (in pieces, the first position first) and after each round, for the accepted path.
        Whatever was computed from guesses is worth nothing from here on.

        Args:
            features: (1, T, .) on the backbone's device.
            next_ids: T tokens; the last of them is the last of the text.
        """

    def draft(self, budget: int) -> Tree:
        """A tree rooted in the last token of the text, at most `budget` deep (0: the root alone)."""


@runtime_checkable
class SamplingDrafter(Drafter, Protocol):
    """A drafter that can draw its drafts at random and say from which law: what the rules chain, siblings, block and
    traversal ask for."""

    def sample(self, budget: int, chance: Chance, law: Callable[[Tensor], Tensor]) -> Tree:
        """A tree as `draft` gives it, but with drawn tokens, and with `laws`.

        The children of a node are drawn from one law without replacement, and stay in draw order; no drawn token is
        left out again. Whether there is a child may depend on anything but its own token and those of later siblings.

        Args:
            chance: all randomness of this round's drafts.
            law: (K, V) logits, -inf for what cannot be drafted, to (K, V) float64 probabilities on the CPU, by the
                request's temperature, top_k, top_p and min_p. Another law is as exact if `laws` says it.
        """


class NoDrafter:
    """Plain decoding, as a drafter."""

    taps: tuple[int, ...] = ()

    def start(self, prompt: Sequence[int]) -> None:
        pass

    def advance(self, features: Features, next_ids: Sequence[int]) -> None:
        self.last = next_ids[-1]

    def draft(self, budget: int) -> Tree:
        return Tree.chain([self.last])

    def sample(self, budget: int, chance: Chance, law: Callable[[Tensor], Tensor]) -> Tree:
        return Tree.chain([self.last])


class HeadDrafter:
    """Grows trees of a given shape with a head that is bound to its backbone.

    Nothing is moved to the host before the tree is complete.
    """

    def __init__(self, head: DraftHead, shape: Shape, device: torch.device) -> None:
        self.head, self.shape, self.device = head, shape, device
        self.taps = head.taps
        widest = max((max(path) for path in shape.paths), default=0) if isinstance(shape, Static) else 0
        if widest >= head.vocab.size:
            raise UserError(f"{shape} asks for the guess of rank {widest}; the head has {head.vocab.size}, from 0")
        self.depth = min(shape.depth, head.max_depth or shape.depth)
        config = getattr(head, "config", None)
        self.limit: int = getattr(config, "trained_positions", None) or 1 << 30
        self.belief: Belief | None = None
        """How far its q is to be trusted, where trees are grown by expected gain."""
        self.state: Any = None
        self.anchored: Step | None = None
        self.root, self.length = -1, 1

    def start(self, prompt: Sequence[int]) -> None:
        self.state, self.anchored, self.length = self.head.start(), None, 1
        if len(prompt) >= self.limit:
            self._beyond()

    def advance(self, features: Features, next_ids: Sequence[int]) -> None:
        self.root, self.length = next_ids[-1], self.length + len(next_ids)
        if self.length > self.limit:
            return
        ids = torch.tensor([next_ids], device=self.device)  # (1, T)
        self.anchored = self.head.extend(self.state, features, ids)

    def _deep(self, budget: int) -> int:
        """How deep the next tree may be."""
        return min(self.depth, budget, self.room(self.length))

    def room(self, length: int) -> int:
        """How deep may be drafted behind a text of so many tokens."""
        if length >= self.limit:
            self._beyond()
        return self.limit - length

    def _beyond(self) -> None:
        """Say once of a head that it drafts no more."""
        if not self.head.spent:
            self.head.spent = True
            note = (
                f"the {self.head.method} head was trained on texts of up to {self.limit} tokens: behind these, tokens"
            )
            warnings.warn(f"{note} are decoded plainly", stacklevel=2)

    def draft(self, budget: int) -> Tree:
        depth = self._deep(budget)
        if depth < 1:
            return Tree.chain([self.root])
        assert self.anchored is not None, "draft before advance"
        logits = self.anchored.logits[0, -1:]  # (1, Vd) at the anchor
        shape = limited(self.shape, depth)
        if isinstance(shape, Gain):
            return grow(shape, self.root, logits, self._step, self.head.vocab.to_target, self.belief)
        assert not isinstance(shape, Auto), "a policy says what is to be grown"
        return grown(shape, [self.root], logits[None], self._steps, self.head.vocab.to_target)[0]

    def sample(self, budget: int, chance: Chance, law: Callable[[Tensor], Tensor]) -> Tree:
        depth = self._deep(budget)
        if depth < 1:
            return Tree.chain([self.root])
        assert self.anchored is not None, "draft before advance"
        if isinstance(self.shape, Gain):
            raise UserError(
                f"tree={self.shape} leaves out drafts by their tokens, which drawn ones may not; use dynamic"
            )
        vocab, numbers = self.head.vocab, {0: -1}  # by node of the tree, the head's number
        ids = None if vocab.full else vocab.ids

        def expand(tokens: Sequence[int], nodes: Sequence[int], parents: Sequence[int]) -> Tensor:
            above = [numbers[parent] for parent in parents]
            numbers.update({node: len(numbers) - 1 + place for place, node in enumerate(nodes)})
            logits = self._step(*(torch.tensor(column, device=self.device) for column in (tokens, above)))
            return spread(logits, ids, vocab.vocab_size)

        first = spread(self.anchored.logits[0, -1:], ids, vocab.vocab_size)  # (1, V) at the anchor
        return drawn(limited(self.shape, depth), self.root, first, expand, chance, law)

    def _step(self, ids: Tensor, parents: Tensor) -> Tensor:
        """(K,) target ids and the head's numbers of their parents to (K, Vd) logits behind them."""
        return self._steps(ids[None], parents[None])[0]

    def _steps(self, ids: Tensor, parents: Tensor) -> Tensor:
        """The same for (1, K) of them: (1, K, Vd)."""
        return self.head.step(self.state, ids, parents).logits
