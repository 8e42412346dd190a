"""`Policy`: how much is drafted in the next round, by expected tokens a second.

Expected tokens of a round are 1 + the sum over nodes of the probability that the node is accepted (Leviathan et al.
2023, eq. 1, for chains; Sequoia, Chen et al. 2024, section 3, for trees), and its cost is T_verify(rows, nodes) +
T_draft(rows, depth), as measured here. Of each request it is learned while it runs how far drafts survive. Where the
best form is plain decoding, drafts are tried again as seldom as costs `EXPLORING` of the time. Rounds without drafts,
now and then, show whether the measured costs are those of the loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from statistics import median

from .costs import CostModel, Costs
from .survival import Survival, believed
from .tree import Auto, Tree

EXPLORING = 0.01  # of the time may go into drafts that are not expected to pay
SELDOM = 64  # one drafted round in so many gives way to a plain one
OFTEN = 6  # and until costs were compared a few times: until then, drafts that do not pay may look as if they did
ENOUGH = 3  # such comparisons
HORIZON = 64  # tokens over which what is read before the first draft has to pay
MARGIN = 1.01  # drafting has to be so much faster


class Case:
    """One request: how far its drafts survive, and what its drafter has not read yet."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.survival = policy, Survival(policy.survival, weight=6.0, keep=0.95)
        self.held = 0
        """Tokens that its drafter would have to read first."""
        self._tree: Tree | None = None
        self._depths = (0, 0)

    def drafted(self, tree: Tree | None, asked: int, drafted: int) -> None:
        """The tree of the round under way, how deep it could have become, and how deep it was drafted; None: nothing
        was."""
        self._tree, self._depths = tree, (asked, drafted)

    def ended(self, tokens: Sequence[int]) -> None:
        """The round emitted these."""
        if self._tree is not None:
            for survival in (self.survival, self.policy.survival):
                survival.note(self._tree, tokens, *self._depths)
        self._tree = None


class Policy:
    """Shared by all requests of a generator or engine.

    Args:
        costs: measured ones.
        shape: the most that may be drafted.
        known: by depth, the share of rounds in which a draft there is accepted, where that was measured before.
    """

    def __init__(self, costs: CostModel, shape: Auto, known: Sequence[float] = ()) -> None:
        self.costs, self.shape = costs, shape
        self.survival = Survival(None, weight=32.0 if known else 8.0, keep=0.995, known=known)
        self.measure: Callable[[Sequence[int]], CostModel] | None = None
        """Measures the costs for these numbers of rows, too."""
        self.rows = 1
        """How many share the next forward."""
        self._spent = self._passed = 0.0  # seconds, by the model: lost to trying drafts, and in all
        self._drafted: list[float] = []  # what drafted rounds took over what they should, since the last plain one
        self._ratios: dict[int, deque[float]] = {}  # by rows: the same over that of a plain one
        self._since = 0  # rounds since the last plain one

    def begin(self) -> Case:
        """A new request."""
        return Case(self)

    def prepare(self, rows: int) -> None:
        """Know the costs for up to so many rows."""
        wanted = sorted({1, *(2**n for n in range(1, rows.bit_length())), rows})
        if self.measure is not None and set(wanted) - self.costs.by_rows.keys():
            self.costs = self.measure(wanted)

    def at(self) -> Costs:
        """The costs of the next round."""
        return self.costs.at(self.rows)

    def depth(self, cases: Sequence[Case], most: int, free: bool = False) -> int:
        """How deep the next round is to be drafted, at most; 0: not at all.

        Args:
            cases: of all rows that share it.
            most: deeper than this makes no sense.
            free: the drafter stops by itself where more does not pay.
        """
        horizon, most, plain = min(HORIZON, most + 1), min(most, self.shape.depth), self.at().of(1, 0)
        self._passed += plain
        if most < 1:
            return 0
        forms = [case.survival.form() for case in cases]
        usual = max(1, round(sum(deep for _, deep in forms) / len(cases)))
        costs = {depth: self._cost(forms, min(depth, usual) if free else depth) for depth in range(1, most + 1)}
        drafts = accumulate(map(sum, zip(*(case.survival.shares(most) for case in cases), strict=True)))
        tokens = {depth: len(cases) + more for depth, more in enumerate(drafts, 1)}
        rates = {depth: tokens[depth] / costs[depth] for depth in ([most] if free else costs)}
        best = max(rates, key=lambda depth: rates[depth])
        read, rate = self.costs.read * sum(case.held for case in cases), len(cases) / plain
        saved = horizon * len(cases) * (1 / rate - 1 / rates[best])
        if rates[best] > MARGIN * rate and saved > read:
            return 0 if self._compares() else best
        lost = (1 - rates[best] / rate) * costs[best] + read
        if self._spent + max(lost, 0.0) > EXPLORING * self._passed:
            return 0
        self._spent += max(lost, 0.0)
        return best

    def _cost(self, forms: Sequence[tuple[float, float]], depth: int) -> float:
        """Of a round drafted so deep, with trees as wide as they usually are."""
        widest = 2.0
        for nodes, deep in forms:
            widest = max(widest, 1 + nodes * min(1.0, depth / max(deep, 1.0)))
        return self.at().of(round(widest), depth) * self.ratio

    @property
    def ratio(self) -> float:
        """What drafted rounds take more than the measured costs say, where plain ones take what they say."""
        found = self._ratios.get(self.rows, ())
        return min(2.0, max(0.5, median([1.0, *found]))) if len(found) >= ENOUGH else 1.0

    def _compares(self) -> bool:
        """Whether a plain round is due, to compare with."""
        self._since += 1
        return self._since >= (OFTEN if len(self._ratios.get(self.rows, ())) < ENOUGH else SELDOM)

    def took(self, seconds: float, nodes: int, depth: int) -> None:
        """What a round took, the drafter's work included; for `depth` 0, nothing was asked of the drafter."""
        relative = seconds / max(self.at().of(nodes, depth), 1e-12)
        if depth:
            self._drafted.append(relative)
            return
        self._since = 0
        if len(self._drafted) >= 4:
            ratio = median(self._drafted[-16:]) / max(relative, 1e-12)
            self._ratios.setdefault(self.rows, deque(maxlen=9)).append(ratio)
        self._drafted = []

    def cut(self, cases: Sequence[Case], trees: Sequence[Tree]) -> list[Tree]:
        """The trees of all rows, each with its best nodes, as many as give the most tokens a second.

        Rows are padded to the widest tree, so that the others may be as wide.
        """
        chances = [believed(tree, case.survival) for case, tree in zip(cases, trees, strict=True)]
        ordered = [sorted(range(1, len(p)), key=lambda node, p=p: (-p[node], node)) for p in chances]  # type: ignore
        deepest, costs = max((tree.depth for tree in trees), default=0), self.at()
        best, width, expected = len(trees) / costs.of(1, deepest), 1, float(len(trees))
        for nodes in range(2, self.shape.nodes + 2):
            expected += sum(
                p[order[nodes - 2]] for p, order in zip(chances, ordered, strict=True) if len(order) > nodes - 2
            )
            rate = expected / costs.of(nodes, deepest)
            if rate > best:
                best, width = rate, nodes
        return [tree.part(order[: width - 1]) for tree, order in zip(trees, ordered, strict=True)]
