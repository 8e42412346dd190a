"""Requests as they come to an `Engine`: so many clients, each asking again once it was answered (closed loop), or at
random times, whether or not those before were answered (open loop).

An answer is a row: `tokens`; `asked` and `came`, seconds since the stretch began (`came`: when a run of tokens came,
and how many); `rounds`, `accepted`, `drafted` (nodes), `depths` (of all rounds together),
`drafting` (rounds with a draft), and `seconds` by part, this
request's share of what was done for several at once. In an open loop `asked` is when the request was due, also where
the engine was in the middle of a step and took it later: else an engine that stalls would look better than it is.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from time import perf_counter, sleep
from typing import Any, NamedTuple

from .engine import Engine
from .request import Request
from .rows import Row
from .stats import Stats


class Ask(NamedTuple):
    """One request before it is made."""

    ids: list[int]
    options: dict[str, Any]


def arrivals(count: int, rate: float, seed: int = 0) -> list[float]:
    """Seconds at which requests come, `rate` a second on average: a Poisson process, whose gaps are drawn from an
    exponential law."""
    chance = random.Random(f"arrivals {seed}")
    return list(itertools.accumulate(chance.expovariate(rate) for _ in range(count)))


def served(
    engine: Engine,
    asks: Sequence[Ask],
    *,
    clients: int | None = None,
    times: Sequence[float] | None = None,
    tick: Callable[[], None] = lambda: None,
) -> list[Row]:
    """The answers of an engine, in the order of the asks.

    Args:
        clients: closed loop: so many requests are on their way.
        times: open loop: when each comes, in ascending order.
        tick: called for each that is done.
    """
    assert (clients is None) != (times is None), "either a closed loop or an open one"
    begun, made, live = perf_counter(), list[tuple[float, Request]](), list[Request]()
    while live or len(made) < len(asks):
        now = perf_counter() - begun
        while len(made) < len(asks) and (len(live) < (clients or 0) if times is None else times[len(made)] <= now):
            ask, due = asks[len(made)], now if times is None else times[len(made)]
            live.append(engine.submit(ask.ids, **ask.options))
            made.append((due, live[-1]))
        if live:
            engine.step()
        elif times is not None:
            sleep(max(0.0, times[len(made)] - now))
        for request in [one for one in live if one.done]:
            live.remove(request)
            tick()
    return [_row(request, asked, begun) for asked, request in made]


def _row(request: Request, asked: float, begun: float) -> Row:
    if request.error is not None:
        return {"asked": asked, "failed": str(request.error)}
    return {
        "tokens": request.tokens,
        "asked": round(asked, 6),
        "came": [[round(at - begun, 6), count] for at, count in request.came],
        **counted(request.stats),
    }


def counted(stats: Stats) -> Row:
    """What a row has of the stats of an answer."""
    return {
        "rounds": stats.rounds,
        "accepted": sum(stats.accepted),
        "drafted": stats.drafted,
        "depths": sum(stats.offered),
        "drafting": sum(stats.offered[:1]),
        "seconds": {part: round(seconds, 6) for part, seconds in stats.seconds.items()},
    }
