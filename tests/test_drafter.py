"""Drafters: trees grown as their definition says, states kept right, lookup without rescans."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

import zoo
from headstart.heads.base import DraftHead, Step
from headstart.heads.methods import METHODS
from headstart.heads.vocab import DraftVocab
from headstart.inference.drafter import HeadDrafter
from headstart.inference.generator import Generator
from headstart.inference.lookup import LookupDrafter
from headstart.inference.tree import Chain, Dynamic, Shape, Static, Tree

Path = tuple[int, ...]


class TableHead(DraftHead):
    """Logits are a fixed random function of the drafted path (target ids), so that every tree has one right form."""

    max_depth = None

    def __init__(self, size: int = 7, vocab: DraftVocab | None = None, seed: int = 0) -> None:
        torch.nn.Module.__init__(self)
        self.vocab = vocab or DraftVocab(None, size)
        self.salt = seed
        self.calls = 0

    def logits(self, path: Path) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((self.salt, path)) % 2**31)
        return 2 * torch.randn(self.vocab.size, generator=generator)

    def start(self, rows: int = 1) -> list[Path]:
        return []

    def extend(self, state: list[Path], features: Any, next_ids: torch.Tensor, lengths: Any = None) -> Step:
        state.clear()
        return Step(self.logits(())[None, None], None)

    def step(self, state: list[Path], ids: torch.Tensor, parents: torch.Tensor) -> Step:
        self.calls += 1
        assert ids.shape == parents.shape
        above = [state[parent] if parent >= 0 else () for parent in parents[0].tolist()]
        given = [(*path, token) for path, token in zip(above, ids[0].tolist(), strict=True)]
        assert len({len(path) for path in given}) == 1, "one call, one depth"
        state += given
        return Step(torch.stack([self.logits(path) for path in given])[None], None)


def drafted(head: DraftHead, shape: Shape, budget: int = 99) -> Tree:
    drafter = HeadDrafter(head, shape, torch.device("cpu"))
    drafter.start([1])
    drafter.advance(None, [3])  # type: ignore[arg-type]
    return drafter.draft(budget)


def paths_of(tree: Tree) -> list[Path]:
    """The tokens on the way to each node, the root left out."""
    paths: list[Path] = [()]
    for node in range(1, len(tree)):
        paths.append((*paths[tree.parents[node]], tree.tokens[node]))
    return paths[1:]


def ranked(head: TableHead, path: Path) -> list[tuple[int, float]]:
    """Target ids and log q behind a path, best first."""
    logq = head.logits(path).log_softmax(-1)
    return [(int(head.vocab.ids[i]), float(logq[i])) for i in logq.argsort(descending=True)]


def dynamic_by_definition(head: TableHead, shape: Dynamic) -> dict[Path, float]:
    """EAGLE-2 in plain words: expand the best of each depth, then keep the best of all."""
    pool: dict[Path, float] = {}
    frontier: dict[Path, float] = {(): 0.0}
    for _ in range(shape.depth):
        level = {
            (*path, token): score + logq
            for path, score in frontier.items()
            for token, logq in ranked(head, path)[: shape.top_k]
        }
        pool |= level
        frontier = dict(sorted(level.items(), key=lambda item: -item[1])[: shape.top_k])
    return dict(sorted(pool.items(), key=lambda item: -item[1])[: shape.nodes])


@pytest.mark.parametrize("vocab", [None, DraftVocab([1, 2, 5, 8, 13, 21], 30)])
@pytest.mark.parametrize(
    "shape", [Dynamic(1, 1, 1), Dynamic(3, 1, 2), Dynamic(4, 3, 8), Dynamic(3, 4, 60), Dynamic(2, 50, 9)], ids=str
)
def test_dynamic_trees(shape: Dynamic, vocab: DraftVocab | None) -> None:
    for seed in range(5):
        head = TableHead(vocab=vocab, seed=seed)
        tree, expected = drafted(head, shape), dynamic_by_definition(head, shape)
        assert tree.tokens[0] == 3
        assert set(paths_of(tree)) == set(expected)
        assert len(paths_of(tree)) == len(expected)
        assert head.calls == shape.depth - 1


def test_certain_drafts_keep_their_parents() -> None:
    """Where q is 1, parent and child are equally probable; the child must not outlive its parent."""
    head = TableHead()
    head.logits = lambda path: torch.tensor([0.0, 200.0, 0, 0, 0, 0, -math.inf])  # type: ignore[method-assign]
    for nodes in range(1, 5):
        tree = drafted(head, Dynamic(4, 2, nodes))
        assert paths_of(tree) == [(1,) * d for d in range(1, nodes + 1)]
    head.logits = lambda path: torch.full((7,), math.nan)  # type: ignore[method-assign]
    assert len(drafted(head, Dynamic(3, 2, 5))) == 6  # a broken head gives a useless tree, and still a tree


def test_static_trees() -> None:
    shape = Static(((0,), (1,), (3,), (0, 0), (0, 2), (3, 1), (0, 2, 0), (3, 1, 1), (3, 1, 2)))
    for vocab in (None, DraftVocab([1, 2, 5, 8], 30)):
        head = TableHead(vocab=vocab)
        found = paths_of(drafted(head, shape))
        for ranks, path in zip(shape.paths, found, strict=True):
            tokens: Path = ()
            for rank in ranks:
                tokens = (*tokens, ranked(head, tokens)[rank][0])
            assert path == tokens
        assert head.calls == 2


def test_a_chain_is_the_static_tree_of_first_ranks() -> None:
    head = TableHead()
    chain = drafted(head, Chain(3))
    assert chain == drafted(head, Static(((0,), (0, 0), (0, 0, 0))))
    assert chain.depths == (0, 1, 2, 3)


@pytest.mark.parametrize("shape", [Chain(4), Static(((0,), (1,), (0, 0), (1, 0), (0, 0, 0))), Dynamic(4, 3, 8)])
def test_budget_and_depth_of_the_head_are_kept(shape: Shape) -> None:
    head = TableHead()
    for budget in range(5):
        assert drafted(head, shape, budget).depth == min(budget, shape.depth)
    assert drafted(head, shape, 0).tokens == [3]
    head.max_depth = 2
    assert drafted(head, shape).depth == 2
    head.max_depth = 1
    head.calls = 0
    assert drafted(head, shape).depth == 1
    assert head.calls == 0, "nothing is computed behind the last depth"


# -- real heads ------------------------------------------------------------------------------------------------------


class Watched(HeadDrafter):
    """Drafts like its head, hands over what the test scripts in its place, and compares its state with a fresh one."""

    def __init__(self, head: DraftHead, shape: Shape, right: float, reference: list[int]) -> None:
        super().__init__(head, shape, torch.device("cpu"))
        self.right, self.reference, self.random = right, reference, random.Random(0)
        self.seen: list[Any] = []
        self.text: list[int] = []
        self.checks: list[float] = []

    def start(self, prompt: Any) -> None:
        super().start(prompt)
        self.text = [prompt[0]]

    def advance(self, features: Any, next_ids: Any) -> None:
        super().advance(features, next_ids)
        self.seen.append(features)
        self.text += next_ids

    def draft(self, budget: int) -> Tree:
        fresh = HeadDrafter(self.head, self.shape, self.device)
        fresh.start(self.text[:1])
        features = type(self.seen[0])(
            torch.cat([features.last for features in self.seen], 1),
            torch.cat([features.taps for features in self.seen], 1) if self.taps else None,
        )
        fresh.advance(features, self.text[1:])
        assert self.anchored is not None
        assert fresh.anchored is not None
        self.checks.append(float((self.anchored.logits[0, -1] - fresh.anchored.logits[0, -1]).abs().max()))
        own, again = super().draft(budget), fresh.draft(budget)
        assert own == again, "the same text gives the same draft"
        return self._scripted(own)

    def _scripted(self, tree: Tree) -> Tree:
        """Of the same form, with the true tokens on its leftmost path for as long as luck holds."""
        tokens, node = list(tree.tokens), 0
        for token in self.reference[len(self.text) :]:
            if not tree.children[node] or self.random.random() >= self.right:
                break
            siblings, node = tree.children[node], tree.children[node][0]
            for other in siblings:  # no twins: whoever carries it takes what stood here
                if tokens[other] == token:
                    tokens[other] = tokens[node]
            tokens[node] = token
        return Tree(tokens, tree.parents)


@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("shape", [Chain(4), Dynamic(4, 3, 8)], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_the_state_is_that_of_the_true_text_after_every_round(method: str, shape: Shape, right: float) -> None:
    """Nothing made from a guess stays, nothing is missing after full acceptance, nothing starts one token off."""
    backbone = zoo.backbone()
    torch.manual_seed(1)
    head = METHODS[method].build(backbone)
    with torch.no_grad():
        for weight in head.parameters():  # heads start as copies or zeros; here every path through them is to matter
            weight.add_(0.1 * torch.randn_like(weight))
    prompt = [5, 17, 40, 8, 60, 33, 21]
    options = {"max_new_tokens": 24, "eos_token_id": -1}
    plain = Generator(backbone).generate(prompt, **options)
    drafter = Watched(head, shape, right, prompt + plain.tokens)
    found = Generator(backbone, drafter).generate(prompt, **options)
    assert found.tokens == plain.tokens
    assert len(drafter.checks) == found.stats.rounds
    assert max(drafter.checks) < 1e-4
    if right == 1.0:
        assert found.stats.accepted[0] == found.stats.offered[0], "the script was meant to be accepted"


# -- lookup ----------------------------------------------------------------------------------------------------------


def continuation_by_definition(text: list[int], longest: int, shortest: int, count: int) -> list[int]:
    """Scan for the longest suffix that occurred before, latest occurrence first, and copy token by token."""
    for n in range(min(longest, len(text) - 1), shortest - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                copied = list(text)
                for k in range(count):
                    copied.append(copied[end + k])
                return copied[len(text) :]
    return []


@pytest.mark.parametrize(("longest", "shortest"), [(3, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("symbols", [2, 4, 30])
def test_lookup_equals_a_scan(symbols: int, longest: int, shortest: int) -> None:
    generator = random.Random(symbols)
    drafter = LookupDrafter(6, longest, shortest)
    for _ in range(2):  # a second request knows nothing of the first
        text = [generator.randrange(symbols) for _ in range(3)]
        drafter.start(text)
        drafter.advance(None, text[1:])
        for _ in range(60):
            run = [generator.randrange(symbols) for _ in range(generator.randint(1, 3))]
            drafter.advance(None, run)
            text += run
            tree = drafter.draft(budget=6)
            assert tree.tokens == [text[-1], *continuation_by_definition(text, longest, shortest, 6)]
            assert tree == Tree.chain(tree.tokens)


def test_lookup_continues_a_period_however_short_the_text() -> None:
    drafter = LookupDrafter(5)
    drafter.start([7])
    assert drafter.draft(5).tokens == [7]
    drafter.advance(None, [7])
    assert drafter.draft(5).tokens == [7] * 6
    assert drafter.draft(2).tokens == [7] * 3
    assert drafter.draft(0).tokens == [7]


def test_lookup_does_constant_work_a_token() -> None:
    drafter = LookupDrafter()
    drafter.start([0])
    drafter.advance(None, list(range(1, 5000)))
    assert len(drafter.index) <= 3 * 5000
