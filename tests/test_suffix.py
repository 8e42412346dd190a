"""Suffixes: the automaton against a scan, the drafts against their definition, the store within its bounds."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from headstart.errors import UserError
from headstart.inference.automaton import Place, SuffixAutomaton, Writer
from headstart.inference.suffix import SuffixDrafter, SuffixStore
from headstart.inference.tree import Chain, Dynamic, Tree


def occurrences(texts: Sequence[Sequence[int]], part: Sequence[int]) -> list[tuple[int, int]]:
    """(text, end) of each place at which the part stands."""
    n = len(part)
    return [
        (t, end) for t, text in enumerate(texts) for end in range(n, len(text) + 1) if list(text[end - n : end]) == part
    ]


def longest(texts: Sequence[Sequence[int]], said: list[int], reach: int) -> list[int]:
    """The longest suffix of `said`, of at most `reach` tokens, that stands in the texts."""
    for n in range(min(reach, len(said)), 0, -1):
        if occurrences(texts, said[-n:]):
            return said[-n:]
    return []


def following(texts: Sequence[Sequence[int]], context: list[int]) -> tuple[list[int], dict[int, int]]:
    """What followed the context, counted; where nothing ever did, its longest suffix that something followed."""
    while context:
        counts: dict[int, int] = {}
        for text, end in occurrences(texts, context):
            if end < len(texts[text]):
                token = texts[text][end]
                counts[token] = counts.get(token, 0) + 1
        if counts:
            return context, counts
        context = context[1:]
    return [], {}


@pytest.mark.parametrize("reach", [1, 3, 32])
@pytest.mark.parametrize("symbols", [1, 2, 4, 20])
def test_matches_and_counts_equal_a_scan(symbols: int, reach: int) -> None:
    generator = random.Random(10 * symbols + reach)
    for _ in range(4):
        book, texts, said, place = SuffixAutomaton(reach), [[], [], []], list[int](), Place()  # type: ignore[var-annotated]
        writers, matched = [Writer() for _ in texts], list[int]()
        for _ in range(40):
            which, token = generator.randrange(len(texts)), generator.randrange(symbols)  # texts grow side by side
            book.write(writers[which], token)
            texts[which].append(token)
            said.append(generator.randrange(symbols))
            place = book.follow(place, said[-1])
            # a match is followed as it goes on: it never turns up in what was written behind its back
            matched = longest(texts, [*matched, said[-1]], reach)
            assert place.length == len(matched)
            context = said[len(said) - place.length :] if place.length else []
            assert not context or occurrences(texts, context)
            found = {token: share for token, share, _ in book.continuations(place)}
            _, counts = following(texts, context)
            total = sum(counts.values())
            assert found == {token: pytest.approx(count / total) for token, count in counts.items()}


def test_work_and_size_are_linear() -> None:
    for text in ([7] * 3000, [random.Random(0).randrange(2) for _ in range(3000)], list(range(3000))):
        book, writer = SuffixAutomaton(), Writer()
        for token in text:
            book.write(writer, token)
        assert len(book.links) <= 2 * len(text)
        assert sum(map(len, book.following)) <= 3 * len(text)


@pytest.mark.parametrize("symbols", [2, 4, 30])
@pytest.mark.parametrize("reach", [2, 32])
def test_chains_follow_the_most_frequent_continuation(symbols: int, reach: int) -> None:
    generator = random.Random(symbols)
    drafter = SuffixDrafter(Chain(6), reach=reach)
    for _ in range(2):  # a second request knows nothing of the first
        text = [generator.randrange(symbols) for _ in range(3)]
        drafter.start(text)
        drafter.advance(None, text[1:])
        for _ in range(40):
            run = [generator.randrange(symbols) for _ in range(generator.randint(1, 3))]
            drafter.advance(None, run)
            text += run
            tree, context = drafter.draft(6), longest([text[:-1]], text, reach)
            assert drafter.matched == len(context)
            assert tree == Tree.chain(tree.tokens)
            assert tree.tokens[0] == text[-1]
            for token in tree.tokens[1:]:
                context, counts = following([text], context)
                assert counts[token] == max(counts.values())
                latest = {c: max(end for _, end in occurrences([text], [*context, c])) for c in counts}
                best = max(counts, key=lambda c: (counts[c], latest[c]))
                assert token == best, "of equals, the latest"
                context = [*context, token][-reach:]
            assert len(tree) == 7 or not following([text], context)[1]


@pytest.mark.parametrize("shape", [Dynamic(3, 2, 4), Dynamic(4, 3, 9), Dynamic(2, 9, 30)], ids=str)
def test_trees_take_the_largest_shares_first(shape: Dynamic) -> None:
    generator = random.Random(5)
    for _ in range(40):
        text = [generator.randrange(3) for _ in range(generator.randint(2, 40))]
        drafter = SuffixDrafter(shape, reach=3)
        drafter.start(text)
        drafter.advance(None, text[1:])
        every = dict(paths_by_definition(text, longest([text[:-1]], text, 3), shape, 3, 1.0, ()))
        tree = drafter.draft(9)
        tree.check(text[-1], 3, shape.depth)
        paths: list[tuple[int, ...]] = [()]
        for token, parent in list(zip(tree.tokens, tree.parents, strict=True))[1:]:
            paths.append((*paths[parent], token))
        found = sorted((every[path] for path in paths[1:]), reverse=True)
        assert found == pytest.approx(sorted(every.values(), reverse=True)[: shape.nodes])
        assert drafter.draft(1).depth == min(1, len(every))
        assert drafter.draft(0).tokens == [text[-1]]


def paths_by_definition(
    text: list[int], context: list[int], shape: Dynamic, reach: int, share: float, path: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every path a tree may have, and the product of shares along it."""
    context, counts = following([text], context)
    if len(path) == shape.depth or not counts:
        return
    latest = {c: max(end for _, end in occurrences([text], [*context, c])) for c in counts}
    for token in sorted(counts, key=lambda c: (-counts[c], -latest[c]))[: shape.top_k]:
        part = share * counts[token] / sum(counts.values())
        yield (*path, token), part
        yield from paths_by_definition(text, [*context, token][-reach:], shape, reach, part, (*path, token))


def test_a_period_goes_on_however_short_the_text() -> None:
    drafter = SuffixDrafter(Chain(5))
    drafter.start([7])
    assert drafter.draft(5).tokens == [7]
    drafter.advance(None, [7])
    assert drafter.draft(5).tokens == [7] * 6


def test_a_store_is_shared_and_holds_outputs_only() -> None:
    store = SuffixStore()
    one = SuffixDrafter(Chain(4), store)
    one.start([1, 2, 3])
    one.advance(None, [2, 3])
    assert store.tokens == 0, "a prompt is no output"
    one.advance(None, [20, 21, 22, 23])
    assert store.tokens == 4
    two = SuffixDrafter(Chain(4), store)
    two.start([5, 20])
    two.advance(None, [20])
    assert two.draft(4).tokens == [20, 21, 22, 23]
    two.advance(None, [21])
    assert two.draft(4).tokens == [21, 22, 23]
    store.add([21, 30, 31])
    assert SuffixDrafter(Chain(4)).taps == ()


def test_requests_that_run_side_by_side_do_not_mix() -> None:
    store = SuffixStore()
    drafters = [SuffixDrafter(Chain(4), store) for _ in range(2)]
    for drafter in drafters:
        drafter.start([1])
    for step in range(10):
        for which, drafter in enumerate(drafters):
            drafter.advance(None, [100 * (which + 1) + step])
    third = SuffixDrafter(Chain(4), store)
    third.start([0])
    third.advance(None, [102])
    assert third.draft(4).tokens == [102, 103, 104, 105, 106]
    third.advance(None, [205])
    assert third.draft(4).tokens == [205, 206, 207, 208, 209]


def test_a_store_is_bounded_and_forgets_the_oldest() -> None:
    store = SuffixStore(tokens=100)
    for begin in range(0, 1000, 10):
        store.add(range(begin, begin + 10))
        assert store.tokens <= 100
    drafter = SuffixDrafter(Chain(3), store)
    for token, known in ((991, True), (961, True), (5, False), (801, False)):
        drafter.start([0])
        drafter.advance(None, [token])
        assert (len(drafter.draft(3)) > 1) == known
    with pytest.raises(UserError, match="2 tokens or more, not 1"):
        SuffixStore(1)
