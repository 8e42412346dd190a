"""Recorded acceptance: what a drafter would have drafted at every place of a text that is known already.

Since no drafter changes a text, one recording tells how far every setting would have come at each place: `replay` walks
through it as a round does. A tree of a head holds the true path as far as it goes; for chains and static trees, the
ranks of the true tokens along that path decide, for dynamic ones their places in the order of q.

Letters: T positions, D depths, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..heads.backbone import Backbone, Features
from .drafter import Drafter, HeadDrafter
from .tree import Auto, Chain, Dynamic, Gain, Shape, Static, Tree

RANKS = 16  # children of a node that a static tree may have

Moment = dict[str, Any]
"""Of one place in a text: `ranks`, by depth, of a head's true tokens (those before the first that is out of reach), or
`chain`, how many tokens another drafter's chain gets right; and `places`, by top-k: for each node of the true path, by
the depth limit of the tree, how many nodes come before it. `room`, where it is short: how deep a head may draft there,
near the length that it was trained for."""


class Replayed(NamedTuple):
    """What a setting came to over some texts."""

    tokens: int
    rounds: int
    nodes: int
    """Drafts, all rounds together."""
    depths: int
    """Drafted depths, all rounds together."""
    accepted: tuple[int, ...]
    """By depth, rounds that accepted a draft there."""

    @property
    def acceptance_length(self) -> float:
        return 1 + sum(self.accepted) / self.rounds if self.rounds else 1.0


@torch.inference_mode()
def moments(
    backbone: Backbone,
    make: Callable[[], Drafter],
    prompt: Sequence[int],
    tokens: Sequence[int],
    depth: int,
    top_ks: Sequence[int] = (),
) -> list[Moment]:
    """A moment for each token of an answer that a round could stand on: all but the last.

    Args:
        make: makes a drafter; of a head, with any shape.
        tokens: the whole answer, however it was decoded.
        depth: drafted so deep.
        top_ks: of the dynamic trees that are to be known; for heads.
    """
    if len(tokens) < 2:
        return []
    drafter = make()
    text = [*prompt, *tokens]
    features = backbone.forward(torch.tensor([text[:-1]], device=backbone.device), taps=drafter.taps)
    if type(drafter) is not HeadDrafter:
        return [{"chain": _reached(tree, rest)} for tree, rest in _drafts(drafter, features, text, len(prompt), depth)]
    found: list[Moment] = list(_ranks(drafter, features, text, len(prompt), depth))
    for top_k in top_ks:
        shaped = make()
        assert isinstance(shaped, HeadDrafter), "all drafters of a kind"
        shaped.shape = Dynamic(depth, top_k, top_k + depth * top_k**2)
        shaped.depth = min(depth, drafter.head.max_depth or depth)
        for moment, (tree, rest) in zip(found, _drafts(shaped, features, text, len(prompt), depth), strict=True):
            moment.setdefault("places", {})[str(top_k)] = _places(tree, rest)
    return found


def _drafts(drafter: Drafter, features: Features, text: Sequence[int], begin: int, depth: int) -> Any:
    """The drafts behind each token of the answer but the last, and what truly follows."""
    drafter.start(text[:begin])
    taken = 0
    for end in range(begin, len(text) - 1):
        piece = Features(features.last[:, taken:end], None if features.taps is None else features.taps[:, taken:end])
        drafter.advance(piece, text[taken + 1 : end + 1])
        taken = end
        yield drafter.draft(depth), text[end + 1 :]


def _ranks(drafter: HeadDrafter, features: Features, text: Sequence[int], begin: int, depth: int) -> Any:
    """By place, the ranks of the true tokens in what the head says along the true path, and its room where it is
    short."""
    head = drafter.head
    known = {int(token): place for place, token in enumerate(head.vocab.ids.tolist())}
    drafter.start(text[:begin])
    taken, depth = 0, min(depth, head.max_depth or depth)
    for end in range(begin, len(text) - 1):
        piece = Features(features.last[:, taken:end], None if features.taps is None else features.taps[:, taken:end])
        drafter.advance(piece, text[taken + 1 : end + 1])
        taken, ranks, room = end, list[int](), drafter.room(end + 1)
        if room < 1:
            yield {"ranks": ranks, "room": 0}
            continue
        assert drafter.anchored is not None, "no anchor behind a text"
        logits = drafter.anchored.logits[0, -1]  # (Vd,)
        for token in text[end + 1 : end + 1 + min(depth, room)]:
            place = known.get(token)
            rank = RANKS if place is None else int((logits > logits[place]).sum())
            if rank >= RANKS:
                break
            ranks.append(rank)
            if len(ranks) < depth:
                ids = torch.tensor([[token]], device=drafter.device)
                above = torch.tensor([[len(ranks) - 2]], device=drafter.device)
                logits = head.step(drafter.state, ids, above).logits[0, 0]
        yield {"ranks": ranks} if room >= depth else {"ranks": ranks, "room": room}


def _path(tree: Tree, rest: Sequence[int]) -> list[int]:
    """The nodes of the tree that carry what truly follows."""
    path, node = list[int](), 0
    for token in rest:
        child = tree.child(node, token)
        if child is None:
            break
        path.append(child)
        node = child
    return path


def _reached(tree: Tree, rest: Sequence[int]) -> int:
    return len(_path(tree, rest))


def _places(tree: Tree, rest: Sequence[int]) -> list[list[int]]:
    """For each node of the true path, by the depth limit from its own depth on: how many nodes come before it."""
    if len(tree) == 1:  # the head has no room
        return []
    assert tree.shares is not None, "a dynamic tree knows its q"
    deepest, shares, found = tree.depth, tree.shares, []
    for node in _path(tree, rest):
        before = [0] * (deepest + 1)
        for other in range(1, len(tree)):
            if (-shares[other], other) < (-shares[node], node):
                before[tree.depths[other]] += 1
        found.append([sum(before[: limit + 1]) for limit in range(tree.depths[node], deepest + 1)])
    return found


# -- replayed --------------------------------------------------------------------------------------------------------


def accepted(moment: Moment, shape: Shape | None, room: int | None = None) -> int:
    """How many drafts of this setting would have been accepted there; None: plain decoding.

    Args:
        room: tokens that drafts may be, where a text ends soon: a tree is no deeper, and others fit into its nodes.
    """
    if shape is None:
        return 0
    if "chain" in moment:
        return min(int(moment["chain"]), shape.depth)
    if isinstance(shape, Chain | Static):
        paths, path = _paths(shape), list[int]()
        for rank in moment["ranks"]:
            path.append(rank)
            if tuple(path) not in paths:
                return len(path) - 1
        return len(path)
    assert isinstance(shape, Dynamic), f"{shape} cannot be replayed"
    count, deepest = 0, shape.depth if room is None else min(shape.depth, room)
    for depth, limits in enumerate(moment["places"][str(shape.top_k)], 1):
        if depth > deepest or limits[min(deepest - depth, len(limits) - 1)] >= shape.nodes:
            break
        count += 1
    return count


def _paths(shape: Chain | Static) -> set[tuple[int, ...]]:
    return set(shape.paths)


def replay(texts: Sequence[Sequence[Moment]], shape: Shape | None) -> Replayed:
    """The rounds of a setting over recorded texts: each emits what it accepts and one token more."""
    rounds = nodes = depths = tokens = 0
    counts = [0] * (shape.depth if shape is not None else 0)
    for text in texts:
        place, tokens = 0, tokens + 1 + len(text)
        while place < len(text):
            left = len(text) - place  # tokens still to come; the last of them is never a draft's
            budget = min(left - 1, text[place].get("room", left))
            got = min(accepted(text[place], shape, budget), budget)
            for depth in range(got):
                counts[depth] += 1
            size, deep = _size(text[place], shape, budget)
            rounds, nodes, depths, place = rounds + 1, nodes + size, depths + deep, place + got + 1
    return Replayed(tokens, rounds, nodes, depths, tuple(counts))


def _size(moment: Moment, shape: Shape | None, budget: int) -> tuple[int, int]:
    """Drafts and depth of a tree."""
    if shape is None or budget < 1:
        return 0, 0
    depth = min(shape.depth, budget)
    if isinstance(shape, Dynamic):
        return min(shape.nodes, shape.top_k + (depth - 1) * shape.top_k**2), depth
    assert not isinstance(shape, Gain | Auto), f"{shape} cannot be replayed"
    return sum(len(path) <= depth for path in shape.paths), depth
