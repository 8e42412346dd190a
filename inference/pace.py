"""Whether drafting pays, measured while it runs.

Now and then a round is done without drafts. The time of such rounds is that of a plain step; what a drafted round takes
by the tokens it gives is compared with it.
"""

from __future__ import annotations

import warnings
from collections import deque
from statistics import mean, median

PLAIN, DRAFTED = 4, 24  # rounds of each kind before anything is concluded
SELDOM = 64  # one round in so many is plain, later on
OFTEN = 8  # and until there are enough
LOSS = 0.97  # a measured speed-up below this is no noise


class Pace:
    """Times the rounds of a generator, over all its requests.

    `off` is True once drafting was found to be slower than plain decoding; it stays so.
    """

    def __init__(self) -> None:
        self.off = False
        self._plain: deque[float] = deque(maxlen=2 * PLAIN)  # seconds
        self._drafted: deque[tuple[float, int]] = deque(maxlen=2 * SELDOM)  # seconds, tokens
        self._rounds = 0

    def plain(self) -> bool:
        """Whether the next round is to be one without drafts."""
        self._rounds += 1
        return self.off or self._rounds % (OFTEN if len(self._plain) < PLAIN else SELDOM) == 0

    def note(self, plain: bool, seconds: float, tokens: int) -> None:
        """What a round took; of a plain one, without the drafter's work."""
        if self.off or self._rounds <= 2:  # the first ones warm up
            return
        if plain:
            self._plain.append(seconds)
        else:
            self._drafted.append((seconds, tokens))
        if plain and self.speedup is not None and self.speedup < LOSS:
            self.off = True
            warnings.warn(
                f"drafting is slower here than plain decoding (a measured speed-up of {self.speedup:.2f}): it is "
                "switched off for this generator",
                stacklevel=5,
            )

    @property
    def speedup(self) -> float | None:
        """Tokens a second with drafts, by those without; None while too few rounds were measured."""
        if len(self._plain) < PLAIN or len(self._drafted) < DRAFTED:
            return None
        seconds, tokens = zip(*self._drafted, strict=True)
        return float(median(self._plain) * mean(tokens) / median(seconds))
