"""`Row`: a request at work in an engine, between its prompt and its last token.

Letters: T positions, N tree nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from ..heads.backbone import Backbone, Features
from .drafter import Drafter
from .growth import trimmed
from .intake import draft, named, tell_cut
from .policy import Case
from .request import Request
from .ruling import ruling_of
from .tree import Tree


class Row:
    """What one request has read and said, and what its drafter is still to be told.

    Args:
        drafter: its own; None: the engine drafts for it.
        limit: new tokens, at most.
    """

    def __init__(self, request: Request, backbone: Backbone, drafter: Drafter | None, limit: int) -> None:
        ids, self.sampler, rule, _ = request.asked
        self.request, self.backbone, self.drafter, self.limit = request, backbone, drafter, limit
        self.verify, self.drawn, request.stats.lossless = ruling_of(rule, self.sampler)
        self.text = list(ids)
        self.read = 0
        """Tokens of the prompt that are in the cache."""
        self.features: Features | None = None
        """(1, T, .) of the last tokens, which the drafter does not know yet."""
        self.following: list[int] = []
        """The token behind each of them."""
        self.budget = 0
        """How deep may be drafted."""
        self.case: Case | None = None
        """Of a policy: what is known of how far drafts survive here."""
        self.held: list[tuple[Features, list[int]]] = []
        """Under a policy: all features that the head was not given yet, each with the tokens behind its positions."""
        request.stats.prompt_tokens = len(ids)

    def begin(self) -> None:
        self.sampler.begin()
        if self.drafter is not None:
            self.drafter.start(self.text)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """What goes wrong with this row is told to whoever asked for it, and to nobody else."""
        try:
            yield
        except Exception as error:
            self.request.fail(error)

    def prefilled(self, features: Features, logits: Tensor | None) -> None:
        """Some more of the prompt was read: (1, T, .) features, and (V,) logits behind the last token of all."""
        end = self.read + features.last.shape[1]
        following = self.text[self.read + 1 : end + 1]
        self.read = end
        if logits is None:
            if self.drafter is not None:
                self.drafter.advance(features, following)
            self._hold(features, following)
            return
        with named(self.sampler, "prefill"):
            first = self.sampler.token(logits, self.text)
        self._hold(features, [*following, first])
        if self.drafter is None:  # the rest is known to the engine's
            features, following = features[:, -1:], []
        self.features, self.following = features, [*following, first]
        self.request.stats.tokens = 1
        self.sampler.ended([*self.text, first])
        self._emit([first])

    def draft(self, tree: Tree | None, widest: int) -> Tree:
        """This round's tree, from its own drafter if none is given, with `widest` nodes at most."""
        if self.drafter is not None:
            assert self.features is not None, "a round before the prompt was read"
            self.drafter.advance(self.features, self.following)
            tree = draft(self.drafter, self.sampler if self.drawn else None, len(self.text), self.budget)
        assert tree is not None, "nobody drafts for this row"
        tree.check(self.text[-1], self.backbone.vocab_size, self.budget)
        return trimmed(tree, self.budget, widest)

    def judge(self, tree: Tree, features: Features, logits: Tensor) -> list[int]:
        """Emit what the round accepts; returns the nodes that stay.

        Args:
            features: (1, N, .) at least, of the nodes.
            logits: (N, V) behind them.
        """
        stats = self.request.stats
        with named(self.sampler, f"round {stats.rounds + 1}"):
            walk = self.verify(tree, logits, self.sampler, self.text, self.limit - stats.tokens)
        self.features, self.following = features[:, walk.path], walk.tokens
        if self.case is not None:
            self.case.ended(walk.tokens)
        self._hold(self.features, walk.tokens)
        stats.count_round(tree.depth, len(tree) - 1, len(walk.tokens) - 1)
        self._emit(walk.tokens)
        return walk.path

    def _hold(self, features: Features, following: list[int]) -> None:
        if self.case is not None:
            self.held.append((features, following))
            self.case.held += len(following)

    def _emit(self, run: list[int]) -> None:
        if self.request.done:  # cancelled meanwhile
            return
        self.text += run
        self.request.push(run)
        left = self.limit - self.request.stats.tokens
        self.budget = min(left - 1, self.backbone.together(len(self.text)))
        if self.sampler.over or left == 0:
            self.request.finish()
        tell_cut(self.backbone, self.sampler, self.limit, left)
