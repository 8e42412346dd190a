"""The walk, against token-by-token decoding along the tree."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from headstart.inference.sampler import Sampler
from headstart.inference.tree import Tree
from headstart.inference.verify import match

VOCAB = 5


class Asked(Sampler):
    """Never plain; notes what it was asked."""

    plain = False  # type: ignore[assignment]

    def token(self, logits: torch.Tensor, prefix: Any) -> int:
        self.asked = [*getattr(self, "asked", []), (logits, list(prefix))]
        return super().token(logits, prefix)


def random_case(seed: int) -> tuple[Tree, torch.Tensor]:
    generator = random.Random(seed)
    size = generator.randint(1, 14)
    parents = [-1, *(generator.randrange(node) for node in range(1, size))]
    tokens = [generator.randrange(VOCAB) for _ in range(size)]
    return Tree(tokens, parents), torch.randn(size, VOCAB, generator=torch.Generator().manual_seed(seed))


def by_definition(tree: Tree, logits: torch.Tensor, eos: frozenset[int], limit: int) -> tuple[list[int], list[int]]:
    node, path, tokens = 0, [0], []
    while True:
        token = int(logits[node].argmax())
        tokens.append(token)
        matches = [n for n in range(len(tree)) if tree.parents[n] == node and tree.tokens[n] == token]
        if not matches or token in eos or len(tokens) == limit:
            return path, tokens
        node = matches[0]
        path.append(node)


@pytest.mark.parametrize("eos", [frozenset(), frozenset([2])])
@pytest.mark.parametrize("limit", [1, 2, 50])
def test_the_walk_takes_the_backbones_own_token_at_every_node(eos: frozenset[int], limit: int) -> None:
    longest = 0
    for seed in range(300):
        tree, logits = random_case(seed)
        expected = by_definition(tree, logits, eos, limit)
        prefix = [7, 8, tree.tokens[0]]
        quick = match(tree, logits, Sampler(eos=eos), prefix, limit)
        assert (quick.path, quick.tokens) == expected
        sampler = Asked(eos=eos)
        slow = match(tree, logits, sampler, prefix, limit)
        assert slow == quick
        assert prefix == [7, 8, tree.tokens[0]]
        assert len(sampler.asked) == len(slow.tokens), "asked at visited nodes only, once each"
        for place, (row, text) in enumerate(sampler.asked):
            assert torch.equal(row, logits[slow.path[place]])
            assert text == prefix + slow.tokens[:place]
        longest = max(longest, len(slow.tokens))
    assert longest >= min(limit, 3)


def test_of_equal_logits_the_lowest_id_is_taken() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 0.5, 1.0]])
    for sampler in (Sampler(), Asked()):
        assert match(Tree.chain([0]), logits, sampler, [0], 5).tokens == [1]
