"""What is asked of a backbone and a drafter, read and refused before any work is done.

`Intake` is what `Generator` and `Engine` have in common: the drafter by rule, and options to `Asked`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

from ..errors import UserError
from ..heads.backbone import Backbone
from ..heads.cache import HANDED_OVER, fitting
from .auto import auto_factory
from .chance import DRAFTING
from .drafter import Drafter, SamplingDrafter
from .drafters import chained, drafter_factory, modules_of, serves_one, width_of
from .prompts import encoded
from .ruling import law_of
from .sampler import NoToken, Sampler
from .tree import Auto, Shape, Tree, parse_shape
from .tuned import tuned_tree


class Asked(NamedTuple):
    """One answer that is asked for."""

    ids: list[int]
    sampler: Sampler
    rule: str
    lent: Any = None
    """A cache of transformers that is to be taken over."""


class Intake:
    """See `Generator` for the arguments."""

    def __init__(self, backbone: Backbone, drafter: Any, tree: Shape | str | None, rule: str) -> None:
        self.backbone, self.rule = backbone, rule
        self.drafter, self.shape = drafter, parse_shape(tree) if isinstance(tree, str) else tree
        self.tuned = tuned_tree(backbone, drafter) if tree is None else None
        self.shape = self.shape or self.tuned
        self._factories: dict[bool, Callable[[], Drafter]] = {}  # by whether drafts have to be chains
        self._fitting: set[str] = set()  # rules that were found to go with the drafter
        self._modules = [backbone.model, *modules_of(drafter)]
        backbone.pack()
        self.factory(rule)

    def read(self, prompt: Any, options: Mapping[str, Any]) -> tuple[list[Asked], bool]:
        """All answers that are asked for, so that whatever is wrong with one is said before any work; and whether they
        are to come as a list."""
        self.backbone.pack()  # follows weights that changed
        options = dict(options)
        rule = options.pop("rule", None) or self.rule
        self.factory(rule)
        refuse_foreseeing(rule, options.get("logits_processor"))
        aliases = [options.pop(name, None) for name in ("input_ids", "inputs")]  # as generate calls them
        lent = [options.pop(name, None) for name in HANDED_OVER]
        if prompt is None:
            prompt = next((ids for ids in aliases if ids is not None), [])
        padded = (options.pop(name, None) for name in ("attention_mask", "position_ids"))
        prompts, several = encoded(self.backbone, prompt, *padded)
        requests: list[Asked] = []
        for row, (ids, padding) in enumerate(prompts):
            asked, begun = 1, len(requests)
            while len(requests) - begun < asked:
                known = {"sample": len(requests), "row": row, "padding": padding}
                sampler = Sampler.from_options(self.backbone, ids, **known, **options)
                options["seed"] = sampler.seed  # where none was given, one is drawn for all
                requests.append(Asked(ids, sampler, rule))
                asked = sampler.returned
        for given in lent:
            if given is not None:
                requests = [self.taking_over(given, requests)]
        return requests, several or len(requests) > 1

    def factory(self, rule: str) -> Callable[[], Drafter]:
        """What makes the drafter of a new request for this rule.

        Raises:
            UserError: there is no such rule, or the drafter cannot give what it asks for.
        """
        law = law_of(rule)
        chain = law is not None and law.chain
        if chain not in self._factories:
            self._factories[chain] = self._made(chained(self.drafter, self.shape, rule) if chain else self.shape)
        asked = law is not None and law.sampled and rule not in self._fitting
        if asked and not isinstance(self._factories[chain](), SamplingDrafter):
            name = self.drafter if isinstance(self.drafter, str) else type(self.drafter).__name__
            raise UserError(
                f"rule={rule} judges drafts by the law they were drawn from, and the drafter {name} draws none; use "
                "rule=match or rule=fixed, or a drafter with a method `sample`"
            )
        self._fitting.add(rule)
        return self._factories[chain]

    def _made(self, shape: Shape | None) -> Callable[[], Drafter]:
        if isinstance(shape, Auto):
            with self.evaluating():
                return auto_factory(self.backbone, self.drafter, shape)
        return drafter_factory(self.backbone, self.drafter, shape)

    def room(self, asked: Asked) -> int:
        """New tokens at most: the limit, or what the backbone's context leaves."""
        return min(asked.sampler.max_new_tokens, self.backbone.max_positions - len(asked.ids))

    def taking_over(self, given: Any, requests: Sequence[Asked]) -> Asked:
        """The one request, with a cache of the user's.

        Raises:
            UserError: it cannot be taken over, or there are several answers.
        """
        first = requests[0]
        fitting(given, len(first.ids), self.room(first), len(requests))
        return first._replace(lent=given)

    def need(self, asked: Asked) -> int:
        """Slots that an answer takes: for its prompt, for new tokens, for a tree behind them."""
        return len(asked.ids) + self.room(asked) + self.width

    @cached_property
    def width(self) -> int:
        """Nodes of a tree, at most, where rows share a forward."""
        return width_of(self.factory(self.rule)())

    @cached_property
    def together(self) -> bool:
        """Whether several texts can be decoded at once."""
        return self.backbone.batches and not serves_one(self.factory(self.rule))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """All modules in eval mode meanwhile, and each as it was afterwards."""
        training = []
        stack = list(self._modules)
        while stack:  # at each step of an engine; `modules()` makes a name for each, which takes five times as long
            module = stack.pop()
            if module.training:
                module.training = False
                training.append(module)
            stack += [child for child in module._modules.values() if child is not None]
        try:
            yield
        finally:
            for module in training:
                module.training = True


def refuse_foreseeing(rule: str, processors: Any) -> None:
    """Refuse processors that may keep a state where the rule shows them tokens that may not come."""
    law = law_of(rule)
    if law is not None and not law.lazy and processors:
        raise UserError(
            f"rule={rule} looks ahead at tokens that may not come, so that a logits_processor with a state would "
            "go wrong; use rule=siblings, rule=chain or rule=match with one of your own"
        )


@contextmanager
def named(sampler: Sampler, place: str) -> Iterator[None]:
    """Says where it was that no token could be chosen."""
    try:
        yield
    except NoToken as error:
        raise UserError(f"row {sampler.sample}, {place}: {error}") from error


def tell_cut(backbone: Backbone, sampler: Sampler, limit: int, left: int) -> None:
    """Warn of an answer, `left` tokens short of its limit, that ended because the backbone's context is full."""
    if left == 0 and limit < sampler.max_new_tokens and not sampler.over:
        full = f"the {backbone.max_positions} positions of {backbone.name} are full"
        warnings.warn(f"stopped after {limit} tokens: {full}", stacklevel=3)


def draft(drafter: Drafter, sampler: Sampler | None, length: int, budget: int) -> Tree:
    """The drafts of a round; drawn with this sampler's chance and warpers, if one is given.

    `budget`: the backbone adds a token behind the last draft.
    """
    if sampler is None:
        tree = drafter.draft(budget)
    else:
        assert isinstance(drafter, SamplingDrafter), "the rule asks for drafts that are drawn"
        tree = drafter.sample(budget, sampler.chance(length, DRAFTING), sampler.drafted)
    if not isinstance(tree, Tree):
        raise UserError(f"{type(drafter).__name__} drafted a {type(tree).__name__}; it has to be a Tree")
    return tree
