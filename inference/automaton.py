"""A suffix automaton that grows token by token and counts what it has seen.

Every state stands for the substrings that end at the same places of the texts read so far; its link leads to the
longest suffix of them that also ends elsewhere (Blumer et al. 1985; for several texts in one automaton, states are
shared). A token costs a constant amount of work, amortised, and `reach` steps for the counts.
"""

from __future__ import annotations

from dataclasses import dataclass

ROOT = 0


@dataclass
class Place:
    """Where a text stands in an automaton: its longest suffix that occurs there, of at most `reach` tokens."""

    state: int = ROOT
    length: int = 0
    """Tokens of that suffix; 0: none is known."""


@dataclass
class Writer:
    """How far a text has been read into an automaton."""

    last: int = ROOT
    """The state of the whole text."""
    place: Place | None = None
    """Its last `reach + 1` tokens, whose suffixes are counted: a match and what followed it."""


class SuffixAutomaton:
    """Texts, with the counts of all their substrings of up to `reach` + 1 tokens.

    Args:
        reach: the longest suffix that is looked for.
    """

    def __init__(self, reach: int = 32) -> None:
        self.reach = reach
        self.following: list[dict[int, int]] = [{}]  # by state: token -> state
        self.links, self.lengths = [-1], [0]
        self.counts, self.latest = [0], [0]  # how often it occurred; when last
        self.tokens = 0  # read so far, in all texts

    def write(self, writer: Writer, token: int) -> None:
        """The text of `writer` goes on with this token."""
        writer.last = self._extended(writer.last, token)
        writer.place = self._follow(writer.place or Place(), token, self.reach + 1)
        self.tokens += 1
        state = writer.place.state
        while state != ROOT:
            self.counts[state] += 1
            self.latest[state] = self.tokens
            state = self.links[state]

    def follow(self, place: Place, token: int) -> Place:
        """The longest suffix known of what stood at `place`, with this token behind it."""
        return self._follow(place, token, self.reach)

    def _follow(self, place: Place, token: int, most: int) -> Place:
        state, length = self.settled(place)
        while state != ROOT and token not in self.following[state]:
            state = self.links[state]
            length = self.lengths[state]
        if token not in self.following[state]:
            return Place()
        grown = Place(self.following[state][token], min(length + 1, most))
        return Place(*self.settled(grown))

    def settled(self, place: Place) -> tuple[int, int]:
        """State and length of a place, whose state may have been split since it was found."""
        state = place.state
        while state != ROOT and self.lengths[self.links[state]] >= place.length:
            state = self.links[state]
        return state, place.length

    def continuations(self, place: Place, most: int | None = None) -> list[tuple[int, float, Place]]:
        """Tokens that followed, their shares and where they lead: the most frequent first, of equals the latest; `most`
        of them, or all.

        Where nothing ever followed the suffix, that is where the text ends, the next shorter one is asked, so that a
        text which repeats itself is continued for ever.
        """
        state, length = self.settled(place)
        while state != ROOT and not self.following[state]:
            state = self.links[state]
            length = self.lengths[state]
        if state == ROOT:
            return []
        here = Place(state, length)
        # one token longer than any match, so that the whole match counts
        found = [(token, self._follow(here, token, self.reach + 1).state) for token in self.following[state]]
        found.sort(key=lambda item: (-self.counts[item[1]], -self.latest[item[1]]))
        total = sum(self.counts[after] for _, after in found)
        return [(token, self.counts[after] / total, self.follow(here, token)) for token, after in found[:most]]

    def _extended(self, last: int, token: int) -> int:
        """The state of a text that stood at state `last` and goes on with this token."""
        known = self.following[last].get(token)
        if known is not None:  # as another text did
            return known if self.lengths[known] == self.lengths[last] + 1 else self._split(last, token)
        state = self._added(self.lengths[last] + 1, {}, 0, 0)
        walk = last
        while walk != -1 and token not in self.following[walk]:
            self.following[walk][token] = state
            walk = self.links[walk]
        if walk == -1:
            self.links[state] = ROOT
        else:
            known = self.following[walk][token]
            fits = self.lengths[known] == self.lengths[walk] + 1
            self.links[state] = known if fits else self._split(walk, token)
        return state

    def _split(self, state: int, token: int) -> int:
        """Give the shorter substrings of the state behind `token` a state of their own."""
        long = self.following[state][token]
        short = self._added(self.lengths[state] + 1, dict(self.following[long]), self.counts[long], self.latest[long])
        self.links[short] = self.links[long]
        self.links[long] = short
        while state != -1 and self.following[state].get(token) == long:
            self.following[state][token] = short
            state = self.links[state]
        return short

    def _added(self, length: int, following: dict[int, int], count: int, latest: int) -> int:
        self.following.append(following)
        self.links.append(ROOT)
        self.lengths.append(length)
        self.counts.append(count)
        self.latest.append(latest)
        return len(self.lengths) - 1
