"""`AutoRows`: a head that drafts for all rows of an engine, as much as the policy expects to pay.

Letters: B rows, T positions.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..heads.backbone import Features
from .auto import AutoDrafter
from .drafter import Drafter, HeadDrafter
from .head_rows import HeadRows
from .held import joined
from .policy import Case, Policy
from .row import Row
from .tree import Gain, Tree

FEW = 16  # tokens that the rows of a round read together; more of them are read row by row


def head_rows(drafter: Drafter, probe: Features, tokens: int, rows: int) -> HeadRows | None:
    """What drafts for all rows of an engine; None: each row has a drafter of its own.

    Args:
        drafter: what would draft for one row.
        probe: features of one position.
        tokens: slots in all.
        rows: at work at once, at most.
    """
    if isinstance(drafter, AutoDrafter):
        drafter.policy.prepare(rows)
        inner = drafter.inner
        return AutoRows(inner, probe, tokens, drafter.policy) if type(inner) is HeadDrafter else None
    if type(drafter) is HeadDrafter and not isinstance(drafter.shape, Gain):  # those grow row by row
        return HeadRows(drafter, probe, tokens)
    return None


class AutoRows(HeadRows):
    """See `HeadRows`; what the head is to read waits in the rows until drafts are asked for."""

    def __init__(self, drafter: HeadDrafter, probe: Features, tokens: int, policy: Policy) -> None:
        super().__init__(drafter, probe, tokens)
        self.policy, self._asked, self._telling = policy, 0, True
        each = [one for one in (probe.last, probe.taps) if one is not None]
        self._held = tokens * sum(one.shape[-1] * one.element_size() for one in each)

    @property
    def bytes(self) -> int:
        return super().bytes + self._held

    def begin(self) -> Case | None:
        return self.policy.begin()

    def read(self, begin: int, features: Features, next_ids: Sequence[Sequence[int]]) -> None:
        pass  # the rows keep it

    def drafts(self, rows: Sequence[Row], headed: Sequence[bool]) -> list[Tree]:
        cases = [row.case for row, drafted in zip(rows, headed, strict=True) if drafted and row.case is not None]
        policy, policy.rows = self.policy, len(rows)
        budgets = [min(row.budget, self.room(len(row.text))) if on else 0 for row, on in zip(rows, headed, strict=True)]
        self._asked = policy.depth(cases, max(budgets))
        if not self._asked:
            for case in cases:
                case.drafted(None, 0, 0)
            return [Tree.chain(row.text[-1:]) for row in rows]
        self._catch_up(rows, headed)
        trees = self.trees(
            [row.features for row in rows if row.features is not None],
            [row.following if drafted else [] for row, drafted in zip(rows, headed, strict=True)],
            [min(budget, self._asked) for budget in budgets],
        )
        mine = [place for place, drafted in enumerate(headed) if drafted]
        for place, case, tree in zip(mine, cases, policy.cut(cases, [trees[place] for place in mine]), strict=True):
            case.drafted(tree, min(self._asked, budgets[place]), self._asked)
            trees[place] = tree
        return trees

    def took(self, seconds: float, trees: Sequence[Tree]) -> None:
        if self._telling:
            self.policy.took(seconds, max(map(len, trees)), self._asked)

    def _catch_up(self, rows: Sequence[Row], headed: Sequence[bool]) -> None:
        """Rows that hold much read it, each for itself, up to the last token; that is for all together."""
        self._telling = True
        for place, (row, drafted) in enumerate(zip(rows, headed, strict=True)):
            if not drafted or row.case is None:
                continue
            pieces = joined(row.held)
            for features, ids in pieces[:-1]:
                super().read(place, features, [ids])
            features, ids = pieces[-1]
            if len(ids) > FEW:
                super().read(place, features[:, :-1], [ids[:-1]])
                features, ids, self._telling = features[:, -1:], ids[-1:], False
            row.features, row.following, row.held, row.case.held = features, list(ids), [], 0
