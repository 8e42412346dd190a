"""Whether drafting pays, measured while it runs.

Now and then a round is done without drafts. Its time is that of a plain step, and is compared with the drafted rounds
just before it, so that a machine that becomes faster or slower meanwhile does not matter.
"""

from __future__ import annotations

import warnings
from collections import deque
from statistics import mean, median

LEAST = 6  # comparisons before anything is concluded
SELDOM = 64  # one round in so many is plain, later on
OFTEN = 8  # and until there are enough
LOSS = 0.97  # a measured speed-up below this is no noise


class Pace:
    """Times the rounds of a generator, over all its requests.

    `off` is True once drafting was found to be slower than plain decoding; it stays so.
    """

    def __init__(self) -> None:
        self.off = False
        self._speedups: deque[float] = deque(maxlen=2 * LEAST)
        self._drafted: list[tuple[float, int]] = []  # seconds and tokens of the rounds since the last plain one
        self._rounds = 0

    def plain(self) -> bool:
        """Whether the next round is to be one without drafts."""
        self._rounds += 1
        return self.off or self._rounds % (OFTEN if len(self._speedups) < LEAST else SELDOM) == 0

    def note(self, plain: bool, seconds: float, tokens: int) -> None:
        """What a round took; of a plain one, without the drafter's work."""
        if self.off or self._rounds <= 2:  # the first ones warm up
            return
        if not plain:
            self._drafted.append((seconds, tokens))
            return
        if self._drafted:
            taken, given = zip(*self._drafted, strict=True)
            self._speedups.append(seconds * mean(given) / median(taken))
        self._drafted = []
        if self.speedup is not None and self.speedup < LOSS:
            self.off = True
            warnings.warn(
                f"drafting is slower here than plain decoding (a measured speed-up of {self.speedup:.2f}): it is "
                "switched off for this generator",
                stacklevel=5,
            )

    @property
    def speedup(self) -> float | None:
        """Tokens a second with drafts, by those without; None while too few rounds were compared."""
        return median(self._speedups) if len(self._speedups) >= LEAST else None
