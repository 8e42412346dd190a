"""`Generator`: a prompt in, the backbone's own tokens out, sooner.

`decode` is the one loop: prefill gives the first token; then the drafter hands over a tree, one forward of the
unmodified backbone covers its nodes, the walk takes the backbone's own token at each node it comes to, and the accepted
path stays in the cache. Without a drafter every tree is its root, and the same loop is plain decoding.

Letters: T positions, N tree nodes, H hidden width, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..heads.backbone import Backbone, Features, Prompt
from ..heads.cache import Cache
from .detokenizer import Detokenizer
from .detokenizer import decode as decode_text
from .drafter import Drafter
from .drafters import drafter_factory
from .sampler import Sampler
from .stats import Stats, Watch
from .tree import Shape, Tree, parse_shape
from .verify import match

PREFILL = 512  # positions of one prefill forward: bounds the memory of masks and activations


@dataclass
class Output:
    """What was generated for one prompt."""

    text: str
    """Without special tokens; empty if the backbone has no tokenizer."""
    tokens: list[int]
    """The new tokens, an end of sequence included."""
    stats: Stats

    def __str__(self) -> str:
        return self.text


@dataclass
class Piece:
    """A bit of a stream. The texts of all pieces add up to the text of the output, and so do the tokens."""

    text: str
    tokens: list[int] = field(default_factory=list)
    stats: Stats | None = None
    """On the last piece only, which may have no text."""

    def __str__(self) -> str:
        return self.text


class Generator:
    """Generates with a backbone, helped by a drafter or not; the tokens are the same.

    Args:
        backbone: a `Backbone`.
        drafter: a draft head, "ngram", any `Drafter`, or None for plain decoding.
        tree: the form of a head's drafts, as `Chain`, `Static`, `Dynamic` or their text ("dynamic:4x4x8"); for "ngram"
            a chain. A form deeper than the head is cut to its depth, with a note.

    Raises:
        UserError: the head was made for another backbone, or the drafter or tree is unknown.
    """

    def __init__(self, backbone: Backbone, drafter: Any = None, *, tree: Shape | str | None = None) -> None:
        self.backbone = backbone
        shape = parse_shape(tree) if isinstance(tree, str) else tree
        self._new_drafter = drafter_factory(backbone, drafter, shape)
        self._modules = [backbone.model, *([drafter] if isinstance(drafter, nn.Module) else [])]

    def generate(self, prompt: Prompt | Sequence[Prompt], **options: Any) -> Any:
        """Generate for a prompt, or for each of a list of prompts.

        Args:
            prompt: a str (one user turn) or a list of chat messages, both through the chat template; token ids, as list
                or tensor (T,) or (1, T); or a list of these, or ids (B, T), one after another.
            options: what `model.generate` takes (max_new_tokens, do_sample, temperature, generation_config, ...), and
                `seed`. Without sampling arguments the backbone's own generation config decides.

        Returns:
            An `Output`; a list of them for a list of prompts. Entry i is sample i of the seed.

        Raises:
            UserError: an option is unknown, or the prompt is empty or too long for the backbone.
        """
        prompts = _prompts(prompt)
        prepared = self._prepared([prompt] if prompts is None else prompts, options)
        outputs = [self._output(ids, sampler) for ids, sampler in prepared]
        return outputs[0] if prompts is None else outputs

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[Piece]:
        """The same for one prompt, piece by piece, each as soon as its run of tokens is accepted."""
        if _prompts(prompt) is not None:
            raise UserError("stream takes one prompt; use generate for a list of them")
        ((ids, sampler),) = self._prepared([prompt], options)
        return self._pieces(ids, sampler)

    def _output(self, ids: list[int], sampler: Sampler) -> Output:
        stats = Stats()
        tokens = [token for run in self._runs(ids, sampler, stats) for token in run]
        return Output(decode_text(self.backbone.tokenizer, tokens), tokens, stats)

    def _pieces(self, ids: list[int], sampler: Sampler) -> Iterator[Piece]:
        stats, text = Stats(), Detokenizer(self.backbone.tokenizer)
        for run in self._runs(ids, sampler, stats):
            yield Piece(text.push(run), run)
        yield Piece(text.finish(), [], stats)

    def _prepared(self, prompts: Sequence[Any], options: Mapping[str, Any]) -> list[tuple[list[int], Sampler]]:
        """Token ids and sampler of each prompt, so that whatever is wrong with one is said before any work."""
        prepared: list[tuple[list[int], Sampler]] = []
        options = dict(options)
        for sample, prompt in enumerate(prompts):
            try:
                ids = self._encoded(prompt)
            except UserError as error:
                raise error if len(prompts) == 1 else UserError(f"prompt {sample}: {error}") from error
            sampler = Sampler.from_options(self.backbone, ids, sample=sample, **options)
            options["seed"] = sampler.seed  # where none was given, one is drawn for all
            prepared.append((ids, sampler))
        return prepared

    def _encoded(self, prompt: Any) -> list[int]:
        if not isinstance(prompt, str | Sequence | Tensor):
            raise UserError(f"a prompt is a text, a list of chat messages or token ids, not a {type(prompt).__name__}")
        ids, room = self.backbone.encode(prompt), self.backbone.max_positions
        if len(ids) >= room:
            raise UserError(f"the prompt has {len(ids)} tokens; {self.backbone.name} holds {room}, the answer included")
        return ids

    def _runs(self, ids: list[int], sampler: Sampler, stats: Stats) -> Iterator[list[int]]:
        with _evaluating(self._modules):
            yield from decode(self.backbone, self._new_drafter(), sampler, ids, stats)


@torch.inference_mode()
def decode(
    backbone: Backbone, drafter: Drafter, sampler: Sampler, prompt: Sequence[int], stats: Stats
) -> Iterator[list[int]]:
    """Yield the tokens behind a prompt, run by run: the first token, then what each round accepts.

    Ends behind an end of sequence, after `sampler.max_new_tokens`, or where the backbone's context is full. `stats` is
    complete up to the run just yielded.

    Raises:
        UserError: the drafter hands over an impossible tree.
    """
    limit = min(sampler.max_new_tokens, backbone.max_positions - len(prompt))
    assert limit > 0, f"no room behind a prompt of {len(prompt)} tokens"
    watch = Watch(stats.seconds)
    cache = backbone.new_cache(capacity=len(prompt) + min(limit, PREFILL) + 64)
    drafter.start(prompt)
    features, following = _prefill(backbone, drafter, sampler, prompt, cache)
    stats.prompt_tokens, stats.tokens = len(prompt), 1
    watch.lap("prefill")
    text, run = list(prompt), following[-1:]
    while True:
        text += run
        yield run
        watch.lap(None)
        left = limit - stats.tokens
        if left == 0 or text[-1] in sampler.eos:
            break
        drafter.advance(features, following)
        tree = drafter.draft(left - 1)  # the backbone adds a token behind the last draft
        tree.check(text[-1], backbone.vocab_size, left - 1)
        watch.lap("draft")
        features = _forward_tree(backbone, tree, cache, drafter.taps)
        walk = match(tree, backbone.logits(features.last[0]), sampler, text, left)
        watch.lap("verify")
        cache.commit([walk.path])
        features, run = features[:, walk.path], walk.tokens
        following = run
        stats.count_round(tree.depth, len(tree) - 1, len(run) - 1)
        watch.lap("rest")
    if left == 0 and limit < sampler.max_new_tokens and text[-1] not in sampler.eos:
        full = f"the {backbone.max_positions} positions of {backbone.name} are full"
        warnings.warn(f"stopped after {limit} tokens: {full}", stacklevel=2)


def _prefill(
    backbone: Backbone, drafter: Drafter, sampler: Sampler, prompt: Sequence[int], cache: Cache
) -> tuple[Features, list[int]]:
    """Fill the cache with the prompt, in pieces; all but the last go to the drafter at once.

    Returns:
        The features of the last piece and the token behind each of its positions, the first new token included.
    """
    for begin in range(0, len(prompt), PREFILL):
        end = begin + PREFILL
        ids = torch.tensor([prompt[begin:end]], device=backbone.device)  # (1, T)
        features = backbone.forward(ids, cache=cache, taps=drafter.taps)
        cache.commit_all()
        following = list(prompt[begin + 1 : end + 1])
        if end < len(prompt):
            drafter.advance(features, following)
    first = sampler.token(backbone.logits(features.last[0, -1]), prompt)
    return features, [*following, first]


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


def _prompts(prompt: Any) -> list[Any] | None:
    """The prompts of a list of prompts; None if it is one prompt."""
    if isinstance(prompt, Tensor):
        return list(prompt) if prompt.ndim == 2 and len(prompt) != 1 else None
    several = isinstance(prompt, Sequence) and not isinstance(prompt, str) and len(prompt) > 0
    return list(prompt) if several and not isinstance(prompt[0], int | Mapping) else None
