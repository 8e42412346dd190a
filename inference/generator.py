"""`Generator`: a prompt in, the backbone's own tokens out, sooner.

`decode` is the one loop: prefill gives the first token; then the drafter hands over a tree, one forward of the
unmodified backbone covers its nodes, the walk takes the backbone's own token at each node it comes to, and the accepted
path stays in the cache. Without a drafter every tree is its root, and the same loop is plain decoding.

Letters: T positions, N tree nodes, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..errors import UserError
from ..heads.backbone import Backbone, Features, Prompt
from ..heads.cache import Cache, check_lent, hand_back
from ..heads.compiled import Compiled, compiled, slots
from . import door
from .auto import AutoDrafter
from .detokenizer import Detokenizer
from .drafter import Drafter, NoDrafter
from .engine import decode_all
from .intake import Asked, Intake, draft, named, refuse_foreseeing, tell_cut
from .output import Output as Output
from .output import Piece as Piece
from .pace import Pace
from .prefill import prefill
from .ruling import MATCH, ruling_of
from .sampler import Sampler
from .stats import Stats, Watch
from .tree import Shape, Tree

PREFILL = 512  # positions of one prefill forward: bounds the memory of masks and activations
ROOM = 64  # slots for a tree behind the text, at first


class Generator:
    """Generates with a backbone, helped by a drafter or not; the tokens are the same.

    Args:
        backbone: a `Backbone`.
        drafter: a draft head, "ngram", any `Drafter`, or None for plain decoding.
        tree: the form of a head's drafts, as `Chain`, `Static`, `Dynamic` or their text ("dynamic:4x4x8"); for "ngram"
            a chain. A form deeper than the head is cut to its depth, with a note. "auto" takes in each round what gives
            the most expected tokens a second (policy.py). None: what `headstart tune` chose for the head on this
            machine, else the default.
        rule: how drafts are verified, by name: "match", or one of `rules.RULES`. All but "typical" keep the
            backbone's distribution; with "match" a seed gives the same tokens whatever drafts.
        auto_off: measure while generating whether drafting pays, by a few rounds without drafts, and go on plainly
            where it does not, with a note. Answers of one call are then decoded one after another.
        max_rows: answers of one call that are decoded at once, at most.
        compile: run rounds through `torch.compile`, with trees padded to a few widths; True, or a mode of
            `torch.compile`. The first rounds take long, while graphs are made. Answers of one call are then decoded
            one after another. What cannot be compiled goes on without, with a note.

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
        max_rows: int = 8,
        compile: bool | str = False,
    ) -> None:
        self.backbone, self.max_rows = backbone, max_rows
        self._compiled = compiled(backbone, compile)
        self._pace = Pace() if auto_off and drafter is not None else None
        self._intake = Intake(backbone, drafter, tree, rule)

    @property
    def tuned(self) -> Shape | None:
        """The tree that `headstart tune` chose for this head, where it is the one in use."""
        return self._intake.tuned

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
        prepared, several = self._intake.read(prompt, options)
        _check_streamer(streamer, len(prepared))
        own = any(options.get(name) for name in ("logits_processor", "stopping_criteria"))
        if min(len(prepared), self.max_rows) > 1 and not own and self._pace is None and self._compiled is None:
            return decode_all(self._intake, prepared, self.max_rows)
        # what a user brings may keep a state, and is given one text after the other
        outputs = [self._output(request, streamer) for request in prepared]
        return outputs if several else outputs[0]

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[Piece]:
        """The same for one prompt, piece by piece, each as soon as its run of tokens is accepted."""
        if options.pop("streamer", None) is not None:
            raise UserError("stream gives the pieces itself; a streamer is for generate")
        prepared, several = self._intake.read(prompt, options)
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
        rule = rule or self._intake.rule
        self._intake.factory(rule)
        refuse_foreseeing(rule, [one for one in logits_processor if not door.is_theirs(one)])
        prepared = (logits_processor, stopping_criteria, generation_config, seed, model_kwargs)
        rows = door.received(self.backbone, model, input_ids, *prepared)
        _check_streamer(streamer, len(rows))
        requests = [Asked(*row, rule) for row in rows]
        given = door.lent(model_kwargs, len(rows))
        if given is not None:
            requests = [self._intake.taking_over(given, requests)]
        outputs = [self._output(request, streamer) for request in requests]
        return door.answered(input_ids, outputs, generation_config)

    def _output(self, request: Asked, streamer: Any) -> Output:
        stats, tokens = Stats(), list[int]()
        if streamer is not None:
            streamer.put(torch.tensor([request.ids]))
        for run in self._runs(request, stats):
            tokens += run
            for token in run if streamer is not None else ():
                streamer.put(torch.tensor([token]))
        if streamer is not None:
            streamer.end()
        return Output.of(self.backbone.tokenizer, tokens, stats, request.sampler.record)

    def _pieces(self, request: Asked) -> Iterator[Piece]:
        stats, text = Stats(), Detokenizer(self.backbone.tokenizer)
        for run in self._runs(request, stats):
            yield Piece(text.push(run), run)
        yield Piece(text.finish(), [], stats)

    def _runs(self, request: Asked, stats: Stats) -> Iterator[list[int]]:
        ids, sampler, rule, lent = request
        drafter = NoDrafter() if self._pace is not None and self._pace.off else self._intake.factory(rule)()
        more = {"pace": self._pace, "lent": lent, "compiled": self._compiled}
        with self._intake.evaluating():
            yield from decode(self.backbone, drafter, sampler, ids, stats, rule, **more)


def _check_streamer(streamer: Any, answers: int) -> None:
    if streamer is None:
        return
    lacking = [name for name in ("put", "end") if not callable(getattr(streamer, name, None))]
    if lacking:
        given = f"{type(streamer).__name__}, without {' and '.join(lacking)}"
        raise UserError(f"streamer is {given}; one, like TextStreamer of transformers, has the methods put and end")
    if answers > 1:
        raise UserError(f"a streamer takes one answer, and {answers} were asked for")


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
    compiled: Compiled | None = None,
) -> Iterator[list[int]]:
    """Yield the tokens behind a prompt, run by run: the first token, then what each round accepts.

    Ends where the sampler says so (an end of sequence, a stop string, any stopping criterion), after
    `sampler.max_new_tokens`, or where the backbone's context is full. `stats` is complete up to the run just yielded.

    Args:
        rule: "match", or the name of another rule, whose drafter can do what it asks for.
        pace: measures whether drafting pays, and ends it where it does not.
        lent: a cache of transformers: what it holds has to belong to the prompt, and in the end it holds all but the
            last token.
        compiled: what stands for `backbone.forward` behind the prompt.

    Raises:
        UserError: the drafter hands over an impossible tree, or no token can be chosen (round and row are named).
    """
    verify, drawn, stats.lossless = ruling_of(rule, sampler)
    limit = min(sampler.max_new_tokens, backbone.max_positions - len(prompt))
    assert limit > 0, f"no room behind a prompt of {len(prompt)} tokens"
    watch = Watch(stats.seconds)
    capacity = len(prompt) + min(limit, PREFILL) + ROOM
    cache = backbone.new_cache(capacity=capacity if compiled is None else slots(capacity))
    forward = backbone.forward if compiled is None else compiled.forward
    sampler.begin()
    drafter.start(prompt)
    with named(sampler, "prefill"):
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
        tree = Tree.chain(run[-1:]) if plain else draft(drafter, sampler if drawn else None, len(text), budget)
        tree.check(text[-1], backbone.vocab_size, budget)
        watch.lap("draft")
        verified = stats.total_seconds
        begun = verified - (0.0 if plain else watch.last)
        features = _forward_tree(forward, tree, cache, drafter.taps, backbone.device)
        with named(sampler, f"round {stats.rounds + 1}"):
            walk = verify(tree, backbone.logits(features.last[0]), sampler, text, left)
        watch.lap("verify")
        cache.commit([walk.path])
        features, run = features[:, walk.path], walk.tokens
        following = run
        stats.count_round(tree.depth, len(tree) - 1, len(run) - 1)
        watch.lap("rest")
        if pace is not None:
            pace.note(plain, stats.total_seconds - begun, len(run))
        if isinstance(drafter, AutoDrafter) and not plain:
            drafter.timed(stats.total_seconds - verified)
    hand_back(cache, lent)
    tell_cut(backbone, sampler, limit, left)


def _forward_tree(
    forward: Callable[..., Features], tree: Tree, cache: Cache, taps: Sequence[int], device: torch.device
) -> Features:
    """One forward over the N nodes; a chain needs no mask of its own."""
    ids = torch.tensor([tree.tokens], device=device)  # (1, N)
    ancestors = None if tree.depth == len(tree) - 1 else tree.ancestors.to(device)
    return forward(ids, cache=cache, ancestors=ancestors, taps=taps)
