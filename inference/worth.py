"""`Worth`: which of two drafters' nodes are expected to pay, learned from the rounds before.

With R tokens for a unit of cost in the long run, a round is the better the larger its expected tokens minus R times its
cost (Dinkelbach 1967, on ratios). So a node is verified where the probability that it is accepted is above R times what
one node more costs, and a drafter is asked where what it is expected to add is above R times what asking costs.

Letters: N tree nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

from .costs import DEFAULT_COSTS, Costs
from .tree import Tree

NODES = 24  # of one tree, at most
FIRST_RATE = 2.0  # tokens in the time of one, before any were seen
READ = 0.004  # of a plain step: what a head takes for one token of a text, where nobody measured it
SELDOM = 32  # rounds without asking, after which the second drafter gets another try


class Trust:
    """How far a drafter's shares can be believed, by depth from 1; older rounds count less and less.

    Args:
        guess: what shares are multiplied by at first.
        weight: rounds that this counts as much as.
    """

    def __init__(self, guess: float = 1.0, weight: float = 20.0, keep: float = 0.995) -> None:
        self.guess, self.weight, self.keep = guess, weight, keep
        self._said: list[float] = []  # sums over rounds whose walk came to drafts of this depth: what was said of them
        self._right: list[float] = []  # how many of these went on to one of them
        self._came: list[float] = []  # how many there were

    def factor(self, depth: int) -> float:
        """What shares of this depth are to be multiplied by, to be probabilities of acceptance."""
        right, said = self._at(self._right, depth), self._at(self._said, depth)
        return (right + self.weight * self.guess) / (said + self.weight)

    def further(self, depth: int, more: int) -> list[float]:
        """What 1 to `more` further depths are expected to give for a draft of this depth that is accepted."""
        total, survival, gains = 0.0, 1.0, []
        for deeper in range(depth + 1, depth + more + 1):
            usual = 0.6 * self.guess * self.weight
            survival *= (self._at(self._right, deeper) + usual) / (self._at(self._came, deeper) + self.weight)
            total += survival
            gains.append(total)
        return gains

    def chances(self, tree: Tree) -> list[float]:
        """(N,) the probability that each node is accepted. Where the drafter says no shares, siblings share alike."""
        found = [1.0]
        for node in range(1, len(tree)):
            above = tree.parents[node]
            found.append(found[above] * min(1.0, _share(tree, node) * self.factor(tree.depths[node])))
        return found

    def note(self, tree: Tree, tokens: Sequence[int]) -> None:
        """What followed the root; what would have followed behind these tokens is not known."""
        node = 0
        for depth, token in enumerate(tokens):
            below = tree.children[node]
            if not below:
                return
            for sums in (self._said, self._right, self._came):
                sums.extend([0.0] * (depth + 1 - len(sums)))
            child = tree.child(node, token)
            more = sum(_share(tree, one) for one in below), float(child is not None), 1.0
            for sums, one in zip((self._said, self._right, self._came), more, strict=True):
                sums[depth] = self.keep * sums[depth] + one
            if child is None:
                return
            node = child

    @staticmethod
    def _at(sums: Sequence[float], depth: int) -> float:
        return sums[depth - 1] if depth <= len(sums) else 0.0


class Worth:
    """What is known of two drafters, shared by all requests of a generator or engine.

    Args:
        costs: of a round, in any unit.
        read: what the second drafter takes for each token that it reads, in the same unit.
    """

    def __init__(self, costs: Costs = DEFAULT_COSTS, read: float | None = None) -> None:
        self.costs, plain = costs, costs.of(1, 0)
        self.read = READ * plain if read is None else read
        self._first: dict[int, Trust] = {}
        self.second = Trust()
        self._tokens, self._spent = 16.0 * FIRST_RATE, 16.0 * plain  # sums over rounds
        self._added, self._depth, self._nodes = 1.0, 2.0, 4.0  # of the second drafter, means over its rounds
        self._since = 0

    def first(self, matched: int) -> Trust:
        """Of a lookup that found so many tokens again: what is longer is more often right."""
        return self._first.setdefault(matched.bit_length(), Trust(guess=0.6))

    @property
    def rate(self) -> float:
        """Tokens for a unit of cost, in the long run."""
        return self._tokens / max(self._spent, 1e-12)

    def asks(self, looked: Tree, chances: Sequence[float], held: int, budget: int) -> bool:
        """Whether the second drafter is to be asked.

        Args:
            looked: what the first one drafted, with the chances of its nodes.
            held: tokens that the second would have to read first.
            budget: tokens that may still come.
        """
        rate = self.rate
        missed = 1.0 - min(1.0, sum(chances[node] for node in looked.children[0]))
        verified = (self.costs.of(1 + self._nodes, 0) - self.costs.of(1, 0)) + self.costs.of(1, self._depth)
        gain = missed * self._added - rate * (verified - self.costs.of(1, 0))
        rounds = max(1.0, min(budget, 2 * SELDOM) / max(1.0, rate * self.costs.of(1, 0)))
        if gain * rounds > rate * self.read * max(0, held - NODES) and gain > 0:
            return True
        self._since += 1
        if self._since < SELDOM:
            return False
        self._since = 0
        return True

    def kept(self, tree: Tree, chances: Sequence[float]) -> Tree:
        """The nodes that pay, as a tree: with each of them its parent is there."""
        order = sorted(range(1, len(tree)), key=lambda node: (-chances[node], node))[:NODES]
        rate, expected, count = self.rate, 0.0, 0
        best = -rate * self.costs.of(1, 0)
        for number, node in enumerate(order, 1):
            expected += chances[node]
            value = expected - rate * self.costs.of(1 + number, 0)
            if value > best:
                best, count = value, number
        return tree.part(order[:count])

    def drafted(self, tree: Tree, tokens: Sequence[int]) -> None:
        """What the second drafter gave, and what followed."""
        self.second.note(tree, tokens)
        node, right = 0, 0
        for token in tokens:
            child = tree.child(node, token)
            if child is None:
                break
            node, right = child, right + 1
        for name, value in (("_added", right), ("_depth", tree.depth), ("_nodes", len(tree) - 1)):
            setattr(self, name, 0.97 * getattr(self, name) + 0.03 * value)

    def ended(self, nodes: int, depth: int, tokens: int) -> None:
        """A round: nodes verified, depth that the second drafter was asked for, tokens emitted."""
        self._tokens = 0.99 * self._tokens + tokens
        self._spent = 0.99 * self._spent + self.costs.of(nodes, depth)


def _share(tree: Tree, node: int) -> float:
    """The drafter's probability of a node, given its parent."""
    above = tree.parents[node]
    if tree.shares is None:
        return 1.0 / len(tree.children[above])
    return min(1.0, tree.shares[node] / tree.shares[above]) if tree.shares[above] > 0 else 0.0
