"""`Generator`: a prompt in, the backbone's own tokens out, sooner.

`decode` is the one loop: prefill gives the first token; then the drafter hands over a tree, one forward of the
unmodified backbone covers its nodes, the walk takes the backbone's own token at each node it comes to, and the accepted
path stays in the cache. Without a drafter every tree is its root, and the same loop is plain decoding.

Letters: T positions, N tree nodes, H hidden width, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import UserError
from ..heads.backbone import Backbone, Features, Prompt
from ..heads.cache import HANDED_OVER, Cache, check_lent, fitting, hand_back
from . import door
from .chance import DRAFTING
from .detokenizer import Detokenizer
from .detokenizer import decode as decode_text
from .drafter import Drafter, NoDrafter, SamplingDrafter
from .drafters import chained, drafter_factory, modules_of
from .output import Output as Output
from .output import Piece as Piece
from .pace import Pace
from .prefill import prefill
from .prompts import encoded
from .ruling import MATCH, judged, law_of
from .sampler import NoToken, Sampler
from .stats import Stats, Watch
from .tree import Shape, Tree, parse_shape
from .verify import match

PREFILL = 512  # positions of one prefill forward: bounds the memory of masks and activations


class Request(NamedTuple):
    """One answer that is asked for."""

    ids: list[int]
    sampler: Sampler
    rule: str
    lent: Any = None
    """A cache of transformers that is to be taken over."""


class Generator:
    """Generates with a backbone, helped by a drafter or not; the tokens are the same.

    Args:
        backbone: a `Backbone`.
        drafter: a draft head, "ngram", any `Drafter`, or None for plain decoding.
        tree: the form of a head's drafts, as `Chain`, `Static`, `Dynamic` or their text ("dynamic:4x4x8"); for "ngram"
            a chain. A form deeper than the head is cut to its depth, with a note.
        rule: how drafts are verified, by name: "match", or one of `rules.RULES`. All but "typical" keep the
            backbone's distribution; with "match" a seed gives the same tokens whatever drafts.
        auto_off: measure while generating whether drafting pays, by a few rounds without drafts, and go on plainly
            where it does not, with a note.

    Raises:
        UserError: the head was made for another backbone, or drafter, tree or rule are unknown or do not go together.
    """

    def __init__(
        self,
        backbone: Backbone,
        drafter: Any = None,
        *,
        tree: Shape | str | None = None,
        rule: str = MATCH,
        auto_off: bool = False,
    ) -> None:
        self.backbone, self.rule = backbone, rule
        self._drafter, self._shape = drafter, parse_shape(tree) if isinstance(tree, str) else tree
        self._factories: dict[bool, Callable[[], Drafter]] = {}  # by whether drafts have to be chains
        self._fitting: set[str] = set()  # rules that were found to go with the drafter
        self._modules = [backbone.model, *modules_of(drafter)]
        self._pace = Pace() if auto_off and drafter is not None else None
        self._factory(rule)

    def generate(self, prompt: Prompt | Sequence[Prompt] | None = None, *, streamer: Any = None, **options: Any) -> Any:
        """Generate for a prompt, or for each of a list of prompts.

        Args:
            prompt: a str (one user turn) or a list of chat messages, both through the chat template; token ids, as list
                or tensor (T,) or (1, T); or a list of these, or ids (B, T), one after another. May be named
                `input_ids`, too, so that `generate(**tokenizer(...))` works.
            streamer: as in `model.generate`: is given the prompt, then each token, then the end.
            options: what `model.generate` takes (max_new_tokens, do_sample, temperature, generation_config, ...), and
                `seed`, `rule`, `frequency_penalty`, `presence_penalty`, `output_logprobs`. Without sampling arguments
                the backbone's own generation config decides.

        Returns:
            An `Output`; a list of them for a list of prompts, or where num_return_sequences is above 1: all answers to
            the first prompt, then all to the second. Entry i is sample i of the seed.

        Raises:
            UserError: an option is unknown or not supported, or the prompt is empty or too long for the backbone.
        """
        prepared, several = self._prepared(prompt, options)
        if streamer is not None and len(prepared) > 1:
            raise UserError(f"a streamer takes one answer, and {len(prepared)} were asked for")
        outputs = [self._output(request, streamer) for request in prepared]
        return outputs if several else outputs[0]

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[Piece]:
        """The same for one prompt, piece by piece, each as soon as its run of tokens is accepted."""
        if options.pop("streamer", None) is not None:
            raise UserError("stream gives the pieces itself; a streamer is for generate")
        prepared, several = self._prepared(prompt, options)
        if several:
            raise UserError("stream takes one prompt and one answer; use generate for more of them")
        return self._pieces(prepared[0])

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        seed: int | None = None,
        rule: str | None = None,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """transformers' own door: `model.generate(..., custom_generate=generator)` comes here with all it has prepared.

        Args:
            model: has to be the backbone's.
            input_ids: (B, T), padded on the left as attention_mask among `model_kwargs` says.
            seed, rule: may be given to `generate`; a streamer may not, as transformers does not hand it over.

        Returns:
            What `generate` returns: ids (B, T + new), or a `GenerateDecoderOnlyOutput`.

        Raises:
            UserError: it is another model, or something is asked for that is not supported.
        """
        rule = rule or self.rule
        self._factory(rule)
        _refuse_foreseeing(rule, [one for one in logits_processor if not door.is_theirs(one)])
        prepared = (logits_processor, stopping_criteria, generation_config, seed, model_kwargs)
        rows = door.received(self.backbone, model, input_ids, *prepared)
        if streamer is not None and len(rows) > 1:
            raise UserError(f"a streamer takes one answer, and {len(rows)} were asked for")
        requests = [Request(*row, rule) for row in rows]
        given = door.lent(model_kwargs, len(rows))
        if given is not None:
            requests = [_taking_over(given, requests, self.backbone)]
        outputs = [self._output(request, streamer) for request in requests]
        return door.answered(input_ids, outputs, generation_config)

    def _output(self, request: Request, streamer: Any) -> Output:
        stats, tokens = Stats(), list[int]()
        if streamer is not None:
            streamer.put(torch.tensor([request.ids]))
        for run in self._runs(request, stats):
            tokens += run
            for token in run if streamer is not None else ():
                streamer.put(torch.tensor([token]))
        if streamer is not None:
            streamer.end()
        record = request.sampler.record
        kept: dict[str, Any] = {} if record is None else record.kept()
        return Output(decode_text(self.backbone.tokenizer, tokens), tokens, stats, **kept)

    def _pieces(self, request: Request) -> Iterator[Piece]:
        stats, text = Stats(), Detokenizer(self.backbone.tokenizer)
        for run in self._runs(request, stats):
            yield Piece(text.push(run), run)
        yield Piece(text.finish(), [], stats)

    def _prepared(self, prompt: Any, options: Mapping[str, Any]) -> tuple[list[Request], bool]:
        """All answers that are asked for, so that whatever is wrong with one is said before any work; and whether they
        are to come as a list."""
        options = dict(options)
        rule = options.pop("rule", None) or self.rule
        self._factory(rule)
        _refuse_foreseeing(rule, options.get("logits_processor"))
        named = [options.pop(name, None) for name in ("input_ids", "inputs")]  # as generate calls them
        lent = [options.pop(name, None) for name in HANDED_OVER]
        if prompt is None:
            prompt = next((ids for ids in named if ids is not None), [])
        padded = (options.pop(name, None) for name in ("attention_mask", "position_ids"))
        prompts, several = encoded(self.backbone, prompt, *padded)
        requests: list[Request] = []
        for row, (ids, padding) in enumerate(prompts):
            asked, begun = 1, len(requests)
            while len(requests) - begun < asked:
                known = {"sample": len(requests), "row": row, "padding": padding}
                sampler = Sampler.from_options(self.backbone, ids, **known, **options)
                options["seed"] = sampler.seed  # where none was given, one is drawn for all
                requests.append(Request(ids, sampler, rule))
                asked = sampler.returned
        for given in lent:
            if given is not None:
                requests = [_taking_over(given, requests, self.backbone)]
        return requests, several or len(requests) > 1

    def _factory(self, rule: str) -> Callable[[], Drafter]:
        """What makes the drafter of a new request for this rule.

        Raises:
            UserError: there is no such rule, or the drafter cannot give what it asks for.
        """
        law = law_of(rule)
        chain = law is not None and law.chain
        if chain not in self._factories:
            shape = chained(self._drafter, self._shape, rule) if chain else self._shape
            self._factories[chain] = drafter_factory(self.backbone, self._drafter, shape)
        asked = law is not None and law.sampled and rule not in self._fitting
        if asked and not isinstance(self._factories[chain](), SamplingDrafter):
            name = self._drafter if isinstance(self._drafter, str) else type(self._drafter).__name__
            raise UserError(
                f"rule={rule} judges drafts by the law they were drawn from, and the drafter {name} draws none; use "
                "rule=match or rule=fixed, or a drafter with a method `sample`"
            )
        self._fitting.add(rule)
        return self._factories[chain]

    def _runs(self, request: Request, stats: Stats) -> Iterator[list[int]]:
        ids, sampler, rule, lent = request
        drafter = NoDrafter() if self._pace is not None and self._pace.off else self._factory(rule)()
        more = {"pace": self._pace, "lent": lent}
        with _evaluating(self._modules):
            yield from decode(self.backbone, drafter, sampler, ids, stats, rule, **more)


@torch.inference_mode()
def decode(
    backbone: Backbone,
    drafter: Drafter,
    sampler: Sampler,
    prompt: Sequence[int],
    stats: Stats,
    rule: str = MATCH,
    *,
    pace: Pace | None = None,
    lent: Any = None,
) -> Iterator[list[int]]:
    """Yield the tokens behind a prompt, run by run: the first token, then what each round accepts.

    Ends where the sampler says so (an end of sequence, a stop string, any stopping criterion), after
    `sampler.max_new_tokens`, or where the backbone's context is full. `stats` is complete up to the run just yielded.

    Args:
        rule: "match", or the name of another rule, whose drafter can do what it asks for.
        pace: measures whether drafting pays, and ends it where it does not.
        lent: a cache of transformers: what it holds has to belong to the prompt, and in the end it holds all but the
            last token.

    Raises:
        UserError: the drafter hands over an impossible tree, or no token can be chosen (round and row are named).
    """
    law = law_of(rule)
    verify, sampled = match if law is None else judged(law), law is not None and law.sampled and not sampler.greedy
    stats.lossless = law is None or law.lossless
    limit = min(sampler.max_new_tokens, backbone.max_positions - len(prompt))
    assert limit > 0, f"no room behind a prompt of {len(prompt)} tokens"
    watch = Watch(stats.seconds)
    cache = backbone.new_cache(capacity=len(prompt) + min(limit, PREFILL) + 64)
    sampler.begin()
    drafter.start(prompt)
    with _named(sampler, "prefill"):
        features, following = prefill(backbone, drafter, prompt, cache, PREFILL)
        check_lent(lent, cache)
        following.append(sampler.token(backbone.logits(features.last[0, -1]), prompt))
    stats.prompt_tokens, stats.tokens = len(prompt), 1
    text, run = list(prompt), following[-1:]
    sampler.ended([*text, *run] if sampler.reads else run)
    watch.lap("prefill")
    while True:
        text += run
        yield run
        watch.lap(None)
        left = limit - stats.tokens
        if left == 0 or sampler.over:
            break
        plain = pace is not None and pace.plain()
        if pace is None or not pace.off:
            drafter.advance(features, following)
        budget = min(left - 1, backbone.together(len(text)))
        tree = Tree.chain(run[-1:]) if plain else _draft(drafter, sampler if sampled else None, len(text), budget)
        tree.check(text[-1], backbone.vocab_size, budget)
        watch.lap("draft")
        begun = stats.total_seconds - (0.0 if plain else watch.last)
        features = _forward_tree(backbone, tree, cache, drafter.taps)
        with _named(sampler, f"round {stats.rounds + 1}"):
            walk = verify(tree, backbone.logits(features.last[0]), sampler, text, left)
        watch.lap("verify")
        cache.commit([walk.path])
        features, run = features[:, walk.path], walk.tokens
        following = run
        stats.count_round(tree.depth, len(tree) - 1, len(run) - 1)
        watch.lap("rest")
        if pace is not None:
            pace.note(plain, stats.total_seconds - begun, len(run))
    hand_back(cache, lent)
    if left == 0 and limit < sampler.max_new_tokens and not sampler.over:
        full = f"the {backbone.max_positions} positions of {backbone.name} are full"
        warnings.warn(f"stopped after {limit} tokens: {full}", stacklevel=2)


def _draft(drafter: Drafter, sampler: Sampler | None, length: int, budget: int) -> Tree:
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


def _taking_over(given: Any, requests: Sequence[Request], backbone: Backbone) -> Request:
    """The one request, with a cache of the user's.

    Raises:
        UserError: it cannot be taken over, or there are several answers.
    """
    first = requests[0]
    limit = min(first.sampler.max_new_tokens, backbone.max_positions - len(first.ids))
    fitting(given, len(first.ids), limit, len(requests))
    return first._replace(lent=given)


def _refuse_foreseeing(rule: str, processors: Any) -> None:
    law = law_of(rule)
    if law is not None and not law.lazy and processors:
        raise UserError(
            f"rule={rule} looks ahead at tokens that may not come, so that a logits_processor with a state would "
            "go wrong; use rule=siblings, rule=chain or rule=match with one of your own"
        )


@contextmanager
def _named(sampler: Sampler, place: str) -> Iterator[None]:
    """Says where it was that no token could be chosen."""
    try:
        yield
    except NoToken as error:
        raise UserError(f"row {sampler.sample}, {place}: {error}") from error


def _forward_tree(backbone: Backbone, tree: Tree, cache: Cache, taps: Sequence[int]) -> Features:
    """One forward over the N nodes; a chain needs no mask of its own."""
    ids = torch.tensor([tree.tokens], device=backbone.device)  # (1, N)
    ancestors = None if tree.depth == len(tree) - 1 else tree.ancestors.to(backbone.device)
    return backbone.forward(ids, cache=cache, ancestors=ancestors, taps=taps)


@contextmanager
def _evaluating(roots: Sequence[nn.Module]) -> Iterator[None]:
    """All modules in eval mode meanwhile, and each as it was afterwards."""
    training = [module for root in roots for module in root.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
