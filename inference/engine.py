"""`Engine`: many requests at once, each with the tokens that it would get alone.

Requests wait in a queue until there is room, and then have a row: a line of slots for keys and values. A step is a
piece of every prompt that is still to be read, in one forward, and a round of all rows that have read theirs, in
another: every row brings its own tree, padded to the widest with nodes that nobody sees, and keeps its own accepted
run. Rows leave as soon as they are done. Rows that decode stand before those that still read.

Letters: B rows, T positions, N tree nodes, H hidden width, V vocabulary.
"""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch

from ..errors import UserError
from ..heads.backbone import Backbone, Features, Prompt
from ..heads.slots import Lent, Slots
from .auto_rows import head_rows
from .intake import Asked, Intake
from .output import Output, Piece
from .padding import forest, padded, texts
from .prefill import LEAST, attempted
from .request import Request
from .row import Row
from .ruling import MATCH, law_of
from .tree import Shape, Tree

PREFILL = 512  # prompt tokens of one step: bounds what a long prompt makes the others wait, and the memory of a forward
LONG = 2048  # tokens of a row, where `max_tokens` is not given


class Engine:
    """Decodes requests together; see `Generator` for backbone, drafter, tree and rule.

    Args:
        max_rows: requests at work at once, at most. One where texts of this backbone cannot share a forward (longrope),
            or where the drafter is an object of the user's own, which serves one text at a time.
        max_tokens: slots for keys and values, all rows together; the memory for them is taken at once (`bytes`). A
            request needs its prompt, its limit of new tokens, and room for a tree. By default `max_rows` rows of 2048
            tokens, or of the backbone's context if that is shorter.

    Raises:
        UserError: as for `Generator`, or a number is too small.
    """

    def __init__(
        self,
        backbone: Backbone,
        drafter: Any = None,
        *,
        max_rows: int = 8,
        max_tokens: int | None = None,
        tree: Shape | str | None = None,
        rule: str = MATCH,
    ) -> None:
        self._set_up(Intake(backbone, drafter, tree, rule), max_rows, max_tokens, PREFILL)

    @classmethod
    def of(cls, intake: Intake, max_rows: int, max_tokens: int | None = None, prefill: int | None = None) -> Engine:
        """An engine for what a `Generator` has read already; `prefill`: prompt tokens of one step."""
        engine = cls.__new__(cls)
        engine._set_up(intake, max_rows, max_tokens, prefill or PREFILL)
        return engine

    @torch.inference_mode()
    def _set_up(self, intake: Intake, max_rows: int, max_tokens: int | None, prefill: int) -> None:
        if max_rows < 1:
            raise UserError(f"max_rows is {max_rows}; at least 1 is needed")
        if max_tokens is not None and max_tokens < 1:
            raise UserError(f"max_tokens is {max_tokens}; at least 1 slot is needed")
        backbone, drafter = intake.backbone, intake.factory(intake.rule)()
        self._intake, self._taps, self._prefill = intake, drafter.taps, prefill
        self.max_rows = max_rows if intake.together else 1
        self.max_tokens = max_tokens or self.max_rows * (min(backbone.max_positions, LONG) + intake.width)
        self._waiting: deque[Request] = deque()
        self._rows: list[Row] = []
        self._decoding = 0  # of them, those that have read their prompt: they come first
        self._lock, self._inside = threading.RLock(), False
        self._turn: asyncio.Future[bool] | None = None
        with intake.evaluating():
            cache = backbone.new_cache(capacity=1)
            probe = backbone.forward(
                torch.zeros(1, 1, dtype=torch.long, device=backbone.device), cache=cache, taps=self._taps
            )
            self._slots = Slots(self.max_tokens, cache)
            self._heads = head_rows(drafter, probe, self.max_tokens, self.max_rows)

    # -- what is there -----------------------------------------------------------------------------------------------

    @property
    def bytes(self) -> int:
        """Memory of all slots, of backbone and head, and of features that wait for the head; it never grows."""
        return self._slots.bytes + (self._heads.bytes if self._heads else 0)

    @property
    def waiting(self) -> int:
        """Requests that have no row yet."""
        return sum(not request.done for request in self._waiting)

    @property
    def running(self) -> int:
        """Requests that have a row."""
        return len(self._rows)

    # -- requests ----------------------------------------------------------------------------------------------------

    def submit(
        self, prompt: Prompt | None = None, *, callback: Callable[[Piece], None] | None = None, **options: Any
    ) -> Request:
        """Ask for an answer; it waits for its turn.

        Args:
            prompt: a str (one user turn), chat messages or token ids.
            callback: called with each piece as soon as it is there; the last one has the stats.
            options: as for `Generator.generate`.

        Raises:
            UserError: as `Generator.generate`; several answers are asked for; or the request needs more slots than
                there are.
        """
        return self._taken(prompt, options, callback, single=True)[0]

    def submit_all(self, prompt: Prompt | Sequence[Prompt], **options: Any) -> list[Request]:
        """The same for a list of prompts, or several answers each (num_return_sequences): as `Generator.generate`
        numbers them, entry i is sample i of the seed."""
        return self._taken(prompt, options, None)

    def _taken(
        self, prompt: Any, options: dict[str, Any], callback: Callable[[Piece], None] | None, single: bool = False
    ) -> list[Request]:
        if options.pop("streamer", None) is not None:
            raise UserError("a request has a stream of its own, and takes a callback; a streamer is for generate")
        prepared, several = self._intake.read(prompt, options)
        if single and several:
            raise UserError("submit takes one prompt and one answer; submit_all takes more of them")
        for asked in prepared:
            self._check(asked)
        return [self.take(asked, callback) for asked in prepared]

    def take(self, asked: Asked, callback: Callable[[Piece], None] | None = None) -> Request:
        """A request for what was read already, and fits."""
        request = Request(self, self._intake.backbone.tokenizer, asked, callback)
        self._waiting.append(request)
        return request

    def _check(self, asked: Asked) -> None:
        need, intake = self._intake.need(asked), self._intake
        if asked.lent is not None:
            raise UserError("an engine has slots of its own, and takes over no cache; use Generator.generate")
        if need > self.max_tokens:
            raise UserError(
                f"the request needs {need} slots ({len(asked.ids)} for its prompt, {intake.room(asked)} for new "
                f"tokens, {intake.width} for a tree), and max_tokens is {self.max_tokens}"
            )

    # -- running -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Work until every request is done."""
        while self.step():
            pass

    async def turn(self) -> None:
        """A step in a thread of its own; all coroutines that wait meanwhile share it."""
        if self._turn is None or self._turn.done():
            self._turn = asyncio.ensure_future(asyncio.to_thread(self.step))
        await asyncio.shield(self._turn)

    def step(self) -> bool:
        """Read a piece of the prompts, and decode a round; returns whether there is more to do.

        Raises:
            Exception: a forward failed. All requests that were at work have that error; those that wait go on.
        """
        with self._lock:
            if self._inside:
                raise UserError("a callback runs inside a step of the engine, and cannot run the engine itself")
            self._inside = True
            try:
                with torch.inference_mode(), self._intake.evaluating():
                    return self._step()
            finally:
                self._inside = False

    def _step(self) -> bool:
        try:
            self._sweep()
            self._admit()
            if self._decoding < len(self._rows):
                self._read()
                self._sweep()
            if self._decoding:
                self._round()
            self._sweep()
        except BaseException as error:  # Ctrl-C falls anywhere: no row and no line is to be trusted
            for row in self._rows:
                row.request.fail(error if isinstance(error, Exception) else RuntimeError("interrupted"))
            self._rows, self._decoding = [], 0
            for slots in self._pools:
                slots.clear()
            raise
        return bool(self._rows or self._waiting)

    # -- rows come and go --------------------------------------------------------------------------------------------

    @property
    def _pools(self) -> list[Slots]:
        return [self._slots] + ([self._heads.slots] if self._heads else [])

    def _admit(self) -> None:
        """Rows for those that wait, first come, first served."""
        while self._waiting:
            request = self._waiting[0]
            if not request.done:
                longest = max(self._intake.need(each.asked) for each in (request, *(row.request for row in self._rows)))
                lines = min(self.max_rows, self.max_tokens // longest)
                if len(self._rows) >= lines:
                    return
                self._begin(request, longest, lines)
            self._waiting.popleft()

    def _begin(self, request: Request, longest: int, lines: int) -> None:
        row = Row(request, self._intake.backbone, self._own_drafter(request), self._intake.room(request.asked))
        if self._heads is not None and row.drafter is None:
            row.case = self._heads.begin()
        request.times["started"] = perf_counter()
        with row.guarded():
            row.begin()
        for slots in self._pools:
            # lines are left as they are where they do: to change them, all that is in them is copied
            if slots.capacity < longest or len(slots.lengths) >= slots.lines:
                slots.arrange(lines)
            slots.admit()
        self._rows.append(row)

    def _own_drafter(self, request: Request) -> Any:
        """A drafter for this request alone; None where the head drafts for all."""
        law = law_of(request.asked.rule)
        if self._heads is not None and (law is None or not (law.sampled or law.chain)):
            return None
        return self._intake.factory(request.asked.rule)()

    def _sweep(self) -> None:
        """Rows whose requests are done leave."""
        for place in reversed(range(len(self._rows))):
            request = self._rows[place].request
            if request.done:
                self._leave(place, wipe=request.error is not None)

    def _leave(self, place: int, wipe: bool) -> None:
        for slots in self._pools if wipe else ():
            slots.wipe(place)
        if place < self._decoding:  # the last of those that decode, then the last of all, move up
            self._decoding -= 1
            self._move(self._decoding, place)
            place = self._decoding
        self._move(len(self._rows) - 1, place)
        self._rows.pop()
        for slots in self._pools:
            slots.pop()

    def _move(self, source: int, target: int) -> None:
        if source != target:
            self._rows[target] = self._rows[source]
            for slots in self._pools:
                slots.move(source, target)

    def _join(self, place: int) -> None:
        """A row that has read its prompt goes to those that decode."""
        first, self._decoding = self._decoding, self._decoding + 1
        if place != first:
            self._rows[place], self._rows[first] = self._rows[first], self._rows[place]
            for slots in self._pools:
                slots.swap(place, first)

    # -- prompts -----------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """One forward over the next piece of every prompt that is not read yet."""
        mark, backbone, begin = perf_counter(), self._intake.backbone, self._decoding
        rows = self._rows[begin:]
        width = min(max(1, self._prefill // len(rows)), self._slots.capacity - max(self._slots.lengths[begin:]))
        pieces = [row.text[row.read : row.read + width] for row in rows]
        counts = list(map(len, pieces))
        features, cache = self._forward(begin, pieces, texts(counts, backbone.device))
        if features is None:
            self._halve(rows, sum(counts))
            return
        cache.commit([range(count) for count in counts])
        self._slots.take(cache, begin)
        last = [place for place, row in enumerate(rows) if row.read + counts[place] == len(row.text)]
        if self._heads is not None:
            behind = [row.text[row.read + 1 : row.read + count + 1] for row, count in zip(rows, counts, strict=True)]
            self._heads.read(
                begin, features, [tokens if self._headed(row) else [] for row, tokens in zip(rows, behind, strict=True)]
            )
        ends = torch.tensor([counts[place] - 1 for place in last], device=features.last.device)
        logits = backbone.logits(features.last[last, ends]) if last else None  # (B, V) of those that are through
        for place, row in enumerate(rows):
            with row.guarded():
                known = logits[last.index(place)] if logits is not None and place in last else None
                row.prefilled(features[place : place + 1, : counts[place]], known)
        self._share(rows, "prefill", mark)
        for place in last:
            self._join(begin + place)

    def _halve(self, rows: Sequence[Row], tokens: int) -> None:
        """Memory ran out over so many tokens: smaller pieces from here on, or an end to those that read."""
        self._prefill, said = min(self._prefill, tokens) // 2, f"memory ran out over {tokens} positions of prompts"
        if self._prefill >= LEAST:
            warnings.warn(f"{said}: {self._prefill} are read at a time", stacklevel=5)
            return
        self._prefill = PREFILL
        for row in rows:
            row.request.fail(UserError(f"{said}, of {len(row.text)} in this one: too long for this device"))

    def _forward(self, begin: int, ids: Sequence[Sequence[int]], seen: Any) -> tuple[Features | None, Lent]:
        """Over so many rows from `begin` on, and the cache where it is pending; None where memory runs out."""
        cache, given = self._slots.lend(begin, begin + len(ids)), padded(ids, self._intake.backbone.device)
        forward = partial(self._intake.backbone.forward, given, cache=cache, ancestors=seen, taps=self._taps)
        return attempted(forward, given.device), cache

    # -- rounds ------------------------------------------------------------------------------------------------------

    def _round(self) -> None:
        """Drafts, one forward over the trees of all rows, and what each of them accepts."""
        mark = begun = perf_counter()
        backbone, rows = self._intake.backbone, self._rows[: self._decoding]
        trees = self._trees(rows)
        mark = self._share(rows, "draft", mark)
        features, cache = self._forward(0, [tree.tokens for tree in trees], forest(trees, backbone.device))
        if features is None:  # without drafts there may be room
            trees = [Tree.chain(tree.tokens[:1]) for tree in trees]
            features, cache = self._forward(0, [tree.tokens for tree in trees], None)
        if features is None:
            raise UserError(f"memory runs out over one token of each of {len(rows)} rows: give a smaller max_rows")
        true = torch.cat([features.last[place, : len(tree)] for place, tree in enumerate(trees)])  # without padding
        logits = torch.split(backbone.logits(true), list(map(len, trees)))  # (N, V) of each row
        kept: list[list[int]] = [[] for _ in trees]
        for place, (row, tree) in enumerate(zip(rows, trees, strict=True)):
            with row.guarded():
                if not row.request.done:
                    kept[place] = row.judge(tree, features[place : place + 1], logits[place])
        mark = self._share(rows, "verify", mark)
        cache.commit(kept)
        self._slots.take(cache, 0)
        self._share(rows, "rest", mark)
        if self._heads is not None:
            self._heads.took(perf_counter() - begun, trees)

    def _trees(self, rows: Sequence[Row]) -> list[Tree]:
        """A tree for each row; for those that are done or go wrong, the root alone."""
        together: list[Tree] | None = None
        headed = [self._headed(row) for row in rows]
        if self._heads is not None and any(headed):
            together = self._heads.drafts(rows, headed)
        trees = []
        for place, row in enumerate(rows):
            trees.append(Tree.chain(row.text[-1:]))
            with row.guarded():
                if not row.request.done and (headed[place] or row.drafter is not None):
                    trees[place] = row.draft(together[place] if together else None, self._intake.width)
        return trees

    def _headed(self, row: Row) -> bool:
        """Whether the head for all drafts for this row, and may still do so."""
        return self._heads is not None and row.drafter is None and self._heads.room(len(row.text)) >= 0

    def _share(self, rows: Sequence[Row], part: str, mark: float) -> float:
        """Each row's share of the time since then; returns the time now."""
        now = perf_counter()
        for row in rows:
            row.request.stats.seconds[part] += (now - mark) / len(rows)
        return now


def decode_all(intake: Intake, asked: Sequence[Asked], max_rows: int) -> list[Output]:
    """The outputs of all of these, up to `max_rows` at a time.

    Raises:
        Exception: what went wrong with the first of them that did.
    """
    rows = min(max_rows, len(asked)) if intake.together else 1
    engine = Engine.of(intake, rows, rows * max(map(intake.need, asked)))
    requests = [engine.take(each) for each in asked]
    while engine.step():
        for request in requests:
            if request.error is not None:
                raise request.error
    return [request.output for request in requests]
