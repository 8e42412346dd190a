"""Trees of drafted tokens, and the shapes that a drafter may give them.

`Tree` is one round's draft; `Chain`, `Static` and `Dynamic` say how one is to be grown; `parse_shape` reads them from a
command line. `python -m headstart.inference.tree [SHAPE]` draws one.

Letters: N nodes, the root included. Depth counts from the root, which has depth 0; drafts have depth 1 and more here,
and draft depth d (from 0, as everywhere else) is tree depth d + 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import UserError
from .costs import DEFAULT_COSTS, Costs

MAX_NODES = 1024  # of one tree: bounds the memory of masks and logits


class Layout(NamedTuple):
    """What follows from the parents alone; computed once for each list of parents."""

    depths: tuple[int, ...]  # (N,)
    children: tuple[tuple[int, ...], ...]  # by node, in order
    ancestors: Tensor  # (N, N) bool, [n, m]: m is n or one of its ancestors


@dataclass(frozen=True)
class Tree:
    """Drafted tokens below the last emitted one.

    Raises:
        UserError: the lists do not make a tree (the node is named).
    """

    tokens: Sequence[int]
    """(N,) token ids; `tokens[0]` is the root, the last emitted token."""
    parents: Sequence[int]
    """(N,) node numbers; `parents[0]` is -1, every other parent comes before its children."""
    laws: Mapping[int, Tensor] | None = field(default=None, compare=False, repr=False)
    """Of drafts drawn at random: by node, the law (V,) that its children were drawn from, in order and without
    replacement. A node that got no children needs none."""
    shares: Sequence[float] | None = field(default=None, compare=False, repr=False)
    """(N,) the drafter's probability of the path to each node, where it says it: q along the path."""

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise UserError(f"a tree of {len(self.tokens)} tokens needs as many parents, not {len(self.parents)}")
        assert self._layout  # made here, so that a malformed tree never exists

    @cached_property
    def _layout(self) -> Layout:
        return _layout(tuple(self.parents))

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> Tree:
        """The first token is the root, each other one the child of the one before."""
        return cls(tokens, list(range(-1, len(tokens) - 1)))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def depths(self) -> tuple[int, ...]:
        """(N,) distance from the root."""
        return self._layout.depths

    @property
    def depth(self) -> int:
        """Of the deepest node: the longest run that could be accepted."""
        return max(self.depths)

    @property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """By node, in order."""
        return self._layout.children

    @property
    def ancestors(self) -> Tensor:
        """(N, N) bool: row n marks n and its ancestors. Shared by all trees of this form: not to be written to."""
        return self._layout.ancestors

    def child(self, node: int, token: int) -> int | None:
        """The first child of `node` that carries `token`."""
        for child in self.children[node]:
            if self.tokens[child] == token:
                return child
        return None

    def part(self, nodes: Iterable[int]) -> Tree:
        """The tree of its root and these nodes; with each of them its parent has to be there."""
        kept = [0, *sorted(nodes)]
        place = {node: number for number, node in enumerate(kept)}
        parents = [-1, *(place[self.parents[node]] for node in kept[1:])]
        laws = None if self.laws is None else {place[node]: law for node, law in self.laws.items() if node in place}
        shares = None if self.shares is None else [self.shares[node] for node in kept]
        return Tree([self.tokens[node] for node in kept], parents, laws, shares)

    def check(self, root: int, vocab_size: int, budget: int) -> None:
        """That a drafter kept to its task.

        Raises:
            UserError: another root, a token outside the vocabulary, a node deeper than `budget`, the same token twice
                below one node, or more than `MAX_NODES` nodes.
        """
        if len(self) > MAX_NODES:
            raise UserError(f"node {MAX_NODES}: a tree has at most {MAX_NODES} nodes, this one {len(self)}")
        if self.tokens[0] != root:
            raise UserError(f"node 0: a draft is rooted in the last token, {root}, not in {self.tokens[0]}")
        taken: set[tuple[int, int]] = set()
        for node, (token, depth) in enumerate(zip(self.tokens, self.depths, strict=True)):
            if isinstance(token, bool) or not isinstance(token, int):
                raise UserError(f"node {node}: a token is an int, not {token!r}")
            if (self.parents[node], token) in taken:
                raise UserError(f"node {node}: token {token} is there twice below node {self.parents[node]}")
            taken.add((self.parents[node], token))
            if not 0 <= token < vocab_size:
                raise UserError(f"node {node}: token {token} lies outside the backbone's vocabulary of {vocab_size}")
            if depth > budget:
                raise UserError(f"node {node}: lies {depth} deep where the drafter was asked for at most {budget}")

    def draw(self, label: Callable[[int], str] = str) -> str:
        """The tree as text, one node a line; `label` writes a token."""
        lines: list[str] = []

        def visit(node: int, indent: str, stem: str, below: str) -> None:
            lines.append(f"{indent}{stem}{label(self.tokens[node])}")
            *others, last = self.children[node] or (None,)
            for child in others:
                visit(child, indent + below, "├─ ", "│  ")
            if last is not None:
                visit(last, indent + below, "└─ ", "   ")

        visit(0, "", "", "")
        return "\n".join(lines)


@lru_cache(maxsize=512)
def _layout(parents: tuple[int, ...]) -> Layout:
    if not parents or parents[0] != -1:
        found = parents[0] if parents else "nothing"
        raise UserError(f"node 0: is the root, whose parent is written -1, not {found}")
    children: list[list[int]] = [[] for _ in parents]
    depths = [0]
    with torch.inference_mode(False):  # the cached tensor may be used anywhere
        ancestors = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents[1:], 1):
        if parent not in range(node):
            raise UserError(f"node {node}: its parent has to be an earlier node, 0 to {node - 1}, not {parent}")
        children[parent].append(node)
        depths.append(depths[parent] + 1)
        ancestors[node] |= ancestors[parent]
    return Layout(tuple(depths), tuple(map(tuple, children)), ancestors)


# -- shapes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chain:
    """One guess a depth: the drafter's best."""

    depth: int

    def __post_init__(self) -> None:
        _positive("chain", depth=self.depth)

    @property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        return tuple((0,) * d for d in range(1, self.depth + 1))

    def __str__(self) -> str:
        return f"chain:{self.depth}"


@dataclass(frozen=True)
class Static:
    """The same tree every round, given as paths of ranks (Medusa, Cai et al. 2024, section 2.1.2).

    `(0, 2)` is the third best token of depth 1 below the best one of depth 0. Sorted by depth, then by rank.

    Raises:
        UserError: a path is empty, twice there, has a negative rank, or lacks its parent.
    """

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        paths = sorted((tuple(path) for path in self.paths), key=lambda path: (len(path), path))
        object.__setattr__(self, "paths", tuple(paths))
        known: set[tuple[int, ...]] = {()}
        for path in paths:
            if not path or min(path) < 0:
                raise UserError(f"static tree, path {list(path)}: a path is a list of ranks, each 0 or more")
            if path in known:
                raise UserError(f"static tree, path {list(path)}: is there twice")
            if path[:-1] not in known:
                raise UserError(f"static tree, path {list(path)}: its parent {list(path[:-1])} is missing")
            known.add(path)
        if not paths:
            raise UserError("static tree: has no paths")

    @property
    def depth(self) -> int:
        return len(self.paths[-1])

    def __str__(self) -> str:
        return "static:" + ",".join(".".join(map(str, path)) for path in self.paths)


@dataclass(frozen=True)
class Dynamic:
    """The most probable tree by the drafter's own q (EAGLE-2, Li et al. 2024, section 4).

    Each depth expands the `top_k` nodes with the highest product of q along their path, each into its `top_k` best
    tokens; of all nodes seen, the `nodes` most probable are verified (the root not counted).
    """

    depth: int
    top_k: int
    nodes: int

    def __post_init__(self) -> None:
        _positive("dynamic", depth=self.depth, top_k=self.top_k, nodes=self.nodes)

    def __str__(self) -> str:
        return f"dynamic:{self.depth}x{self.top_k}x{self.nodes}"


@dataclass(frozen=True)
class Gain:
    """A dynamic tree as large and deep as its expected gain is worth by a table of costs (gain.py)."""

    depth: int
    top_k: int
    costs: Costs = DEFAULT_COSTS
    """What verification and drafting take; by default relative ones of a small model on a CPU."""
    nodes: int = MAX_NODES - 1
    """Drafts of a tree, at most."""

    def __post_init__(self) -> None:
        _positive("gain", depth=self.depth, top_k=self.top_k)

    def __str__(self) -> str:
        return f"gain:{self.depth}x{self.top_k}"


@dataclass(frozen=True)
class Auto:
    """Whatever gives the most expected tokens a second on this machine, for this text and load (policy.py); plain
    decoding where nothing pays."""

    depth: int = 8
    """Never deeper than this."""
    top_k: int = 4
    """Children of a node, at most."""
    nodes: int = 24
    """Drafts of a tree, at most."""

    def __post_init__(self) -> None:
        _positive("auto", depth=self.depth, top_k=self.top_k, nodes=self.nodes)

    def __str__(self) -> str:
        return "auto"


Shape = Chain | Static | Dynamic | Gain | Auto


@lru_cache(maxsize=128)
def limited(shape: Shape, depth: int) -> Shape:
    """The shape without what lies deeper than `depth` (1 or more)."""
    if depth >= shape.depth:
        return shape
    if isinstance(shape, Static):
        return Static(tuple(path for path in shape.paths if len(path) <= depth))
    return replace(shape, depth=depth)


def parse_shape(text: str) -> Shape:
    """`chain:4`, `dynamic:5x4x10` (depth, top-k, nodes), `gain:6x4` (depth, top-k), `static:0,1,0.0,0.1` (paths of
    ranks) or `auto`.

    Raises:
        UserError: it is none of these.
    """
    kind, _, rest = text.strip().partition(":")
    if text.strip() == "auto":
        return Auto()
    try:
        if kind == "chain":
            return Chain(int(rest))
        if kind == "dynamic":
            depth, top_k, nodes = map(int, rest.split("x"))
            return Dynamic(depth, top_k, nodes)
        if kind == "gain":
            depth, top_k = map(int, rest.split("x"))
            return Gain(depth, top_k)
        if kind == "static":
            return Static(tuple(tuple(map(int, path.split("."))) for path in rest.split(",")))
    except ValueError:
        pass
    forms = "chain:DEPTH, dynamic:DEPTHxTOPKxNODES, gain:DEPTHxTOPK, static:0,1,0.0 (paths of ranks) or auto"
    raise UserError(f"tree {text!r}: expected {forms}")


def _positive(kind: str, **values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise UserError(f"{kind} tree: {name} has to be 1 or more, not {value}")


def _demo(arguments: Sequence[str]) -> str:
    """A tree of words, or the ranks of a given chain or static tree."""
    if not arguments:
        words = ["The", " sky", " sun", " is", " was", " shines", " blue", " clear", " because"]
        return Tree(range(9), [-1, 0, 0, 1, 1, 2, 3, 3, 6]).draw(lambda token: words[token].strip())
    shape = parse_shape(arguments[0])
    if isinstance(shape, Dynamic | Gain | Auto):
        raise UserError(f"{shape}: such a tree has no form before a drafter has seen a text")
    numbers = {path: node for node, path in enumerate(((), *shape.paths))}
    parents = [-1, *(numbers[path[:-1]] for path in shape.paths)]
    return Tree([0, *(path[-1] for path in shape.paths)], parents).draw()


if __name__ == "__main__":
    print(_demo(sys.argv[1:]))
