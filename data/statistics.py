"""What a set of prepared rows is like: lengths, supervised share, duplicates, languages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from .language import language_of
from .store import share

SHARES = (0, 25, 50, 75, 95, 99, 100)  # percentiles
WIDTH = 30  # signs of the longest bar


@dataclass
class Statistics:
    """Adds up rows."""

    lengths: list[int] = field(default_factory=list)
    """Tokens of each row."""
    supervised: list[int] = field(default_factory=list)
    """Supervised tokens of each row."""
    chats: Counter[str] = field(default_factory=Counter)
    """How often each chat occurs, by its key."""
    languages: Counter[str] = field(default_factory=Counter)
    """Rows by the language of what is supervised in them."""

    def add(self, key: str, place: str, mask: Sequence[int], said: str) -> None:
        """Count a row.

        Args:
            place: where its chat stands; the parts of a chat in several rows are one chat.
            said: the text that is supervised in it.
        """
        self.lengths.append(len(mask))
        self.supervised.append(int(np.sum(mask)))
        if key not in self.chats or place.partition(", part ")[2] in ("", "1"):
            self.chats[key] += 1
        self.languages[language_of(said)] += 1

    def lines(self) -> Iterator[str]:
        """The statistics as text, a line each."""
        if not self.lengths:
            yield "no row"
            return
        rows, again = len(self.lengths), [count for count in self.chats.values() if count > 1]
        yield f"{rows:,} rows of {self.chats.total():,} chats, {share(sum(self.lengths), sum(self.supervised))}"
        yield f"{'percentile of rows':<22}" + "".join(f"{percent:>9}" for percent in SHARES)
        for name, values in (("tokens", self.lengths), ("supervised", self.supervised)):
            found = np.percentile(values, SHARES, method="nearest")
            yield f"{name:<22}" + "".join(f"{int(value):>9,}" for value in found)
        shares = 100 * np.array(self.supervised) / np.array(self.lengths)
        found = np.percentile(shares, SHARES, method="nearest")
        yield f"{'supervised share, %':<22}" + "".join(f"{value:>9.1f}" for value in found)
        yield "lengths"
        yield from self._bars()
        yield f"chats that are there more than once: {len(again):,}" + (f", up to {max(again)} times" if again else "")
        total = self.languages.total()
        named = (f"{name} {count:,} ({100 * count / total:.1f}%)" for name, count in self.languages.most_common())
        yield f"languages (guessed): {', '.join(named)}"

    def _bars(self) -> Iterator[str]:
        """Rows by length, in steps of two."""
        steps = Counter(max(length - 1, 0).bit_length() for length in self.lengths)
        most = max(steps.values())
        for step in range(min(steps), max(steps) + 1):
            bar = "█" * max(round(WIDTH * steps[step] / most), int(steps[step] > 0))
            yield f"  up to {2**step:>7,} {bar:<{WIDTH}} {steps[step]:,}"
