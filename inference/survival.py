"""How far drafts survive verification, by depth, learned while running.

Depth d counts from 1 here, as in trees. Letters: N tree nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

from .tree import Tree

GUESS = 0.6  # of drafts of which nothing is known: given that the one above was accepted


class Survival:
    """Counts of drafted rounds, older ones less and less; before there are any, those of `above` hold.

    Args:
        above: what this is taken for at first; None: a guess.
        weight: rounds that this counts as much as.
        keep: what is left of a round's weight one round later.
        known: by depth, the share of rounds in which a draft there was accepted, as somebody measured it.
    """

    def __init__(
        self, above: Survival | None = None, weight: float = 8.0, keep: float = 0.98, known: Sequence[float] = ()
    ) -> None:
        self.above, self.weight, self.keep, self.known = above, weight, keep, list(known)
        self.rounds = 0.0
        self.nodes = self.depth = 0.0  # sums over rounds
        self._asked: list[float] = []  # by depth: rounds in which drafts so deep were asked for
        self._reached: list[float] = []  # rounds accepted so deep
        self._offered: list[float] = []  # rounds whose walk came to a node with drafts of this depth below it
        self._taken: list[float] = []  # and went on to one of them
        self._said: list[float] = []  # what the drafter made of that, where it said so
        self._right: list[float] = []  # `_taken` of those

    def note(self, tree: Tree, tokens: Sequence[int], asked: int, drafted: int) -> None:
        """A round.

        Args:
            tokens: what was emitted; the last one is the backbone's own.
            asked: how deep was to be drafted if that paid.
            drafted: how deep was drafted, be it cut off again.
        """
        asked = max(asked, tree.depth)
        self.rounds = self.keep * self.rounds + 1
        self.nodes, self.depth = self.keep * self.nodes + len(tree) - 1, self.keep * self.depth + drafted
        for counts in (self._asked, self._reached, self._offered, self._taken, self._said, self._right):
            counts.extend([0.0] * (asked - len(counts)))
            counts[:] = [self.keep * count for count in counts]
        for depth in range(asked):
            self._asked[depth] += 1
        node = 0
        for depth, token in enumerate([*tokens[:-1], None]):
            below = tree.children[node]
            if not below:
                break
            child = None if token is None else tree.child(node, token)
            went = child is not None
            self._offered[depth] += 1
            self._taken[depth] += went
            self._reached[depth] += went
            if tree.shares is not None and tree.shares[node] > 0:
                said = sum(tree.shares[one] for one in below) / tree.shares[node]
                self._said[depth] += said
                self._right[depth] += went
            if child is None:
                break
            node = child

    def share(self, depth: int) -> float:
        """The probability that a round that is to be drafted so deep is accepted there."""
        return self.shares(depth)[-1]

    def shares(self, most: int) -> list[float]:
        """The same for depths 1 to `most`: never more than one above. In one pass, since every round asks for it."""
        found, least = self._shares_above(most), float("inf")
        for place, above in enumerate(found):
            least = found[place] = min(least, self._mixed(self._reached, self._asked, place + 1, above))
        return found

    def given(self, depth: int) -> float:
        """The same, given that it came to one above, and had drafts there."""
        above = GUESS if self.above is None else self.above.given(depth)
        return self._mixed(self._taken, self._offered, depth, above)

    def factor(self, depth: int) -> float:
        """What the drafter's probabilities at this depth are to be multiplied by, to be those of acceptance."""
        above = 1.0 if self.above is None else self.above.factor(depth)
        return self._mixed(self._right, self._said, depth, above)

    def tokens(self, depth: int) -> float:
        """Expected tokens of a round drafted so deep: one, and the probability of each depth to be accepted."""
        return 1 + sum(self.shares(depth))

    def further(self, depth: int, more: int) -> list[float]:
        """What 1 to `more` further depths are expected to give for a draft of this depth that is accepted."""
        total, survival, gains = 0.0, 1.0, []
        for d in range(depth + 1, depth + more + 1):
            survival *= self.given(d)
            total += survival
            gains.append(total)
        return gains

    def form(self) -> tuple[float, float]:
        """Mean drafts and depth of a drafted round."""
        nodes, depth = (6.0, 3.0) if self.above is None else self.above.form()
        total = self.rounds + self.weight
        return (self.nodes + self.weight * nodes) / total, (self.depth + self.weight * depth) / total

    def _shares_above(self, most: int) -> list[float]:
        depths, known = range(1, most + 1), self.known
        if known:
            return [known[min(d, len(known)) - 1] * GUESS ** max(0, d - len(known)) for d in depths]
        return [GUESS**d for d in depths] if self.above is None else self.above.shares(most)

    def _mixed(self, counts: Sequence[float], of: Sequence[float], depth: int, above: float) -> float:
        """Counts there over all, and `weight` of those as above."""
        count, all_ = (counts[depth - 1], of[depth - 1]) if depth <= len(counts) else (0.0, 0.0)
        return (count + self.weight * above) / (all_ + self.weight)


def believed(tree: Tree, survival: Survival) -> list[float]:
    """(N,) the probability that each node is accepted: q along its path, corrected depth by depth.

    Where the drafter says no q, the share of rounds that are accepted so deep, for the whole depth.
    """
    if tree.shares is None:
        return [1.0, *(survival.share(depth) for depth in tree.depths[1:])]
    found = [1.0]
    for node in range(1, len(tree)):
        above = tree.parents[node]
        q = tree.shares[node] / tree.shares[above] if tree.shares[above] > 0 else 0.0
        found.append(found[above] * min(1.0, q * survival.factor(tree.depths[node])))
    return found
