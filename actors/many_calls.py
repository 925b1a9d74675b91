"""Many calls of one method at a time.

A call costs its two processes a millisecond of computing, whatever it carries. So methods that are called many
times at once (`many` of remote.py) go in batches: what is called in one turn of the event loop travels together, and
what ends in one turn comes back together (`CallBatches`, on the other side). Every call still ends by itself: it waits
for no other, fails alone, and is cancelled alone. Only calls that are made `together`, because none of their answers is
of use without the others, are answered so: when the last of them ends, or HOLD_S after the first.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import pickle
import time
import traceback
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayTaskError

from raypost.errors import RaypostError

log = logging.getLogger(__name__)

FORGOTTEN_S = 300.0
"""Time after which a batch whose answers nobody asks for is given up."""
HOLD_S = 2.0
"""Longest time that an answer waits for the others of its set: so much work is lost at most when the actor dies."""

Answers = tuple[list[tuple[int, Any]], list[tuple[int, BaseException]]]
"""(number, result) and (number, error) of calls that ended."""
NO_SETS: Mapping[int, str] = {}
Call = tuple[tuple[Any, ...], str | None, asyncio.Future[Any]]
"""Arguments of a call, the name of its set, and its result."""


@dataclass(slots=True)
class _Batch:
    """Calls that came together, on the side that runs them."""

    sets: Mapping[int, str] = field(default_factory=dict)
    """Name of the set of calls that are to be answered together, of those that are in one."""
    running: dict[int, asyncio.Task[Any]] = field(default_factory=dict)
    results: list[tuple[int, Any]] = field(default_factory=list)
    errors: list[tuple[int, BaseException]] = field(default_factory=list)
    some: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while there are answers to give now, or none will come any more."""
    holding: asyncio.TimerHandle | None = None
    """Ends the wait of answers that are held back."""
    asking: int = 0
    asked_s: float = 0.0

    def ended(self, number: int, task: asyncio.Task[Any]) -> None:
        """Record the end of a call, unless it was called off."""
        if self.running.pop(number, None) is None:
            if not task.cancelled():
                task.exception()  # nobody wants to know it, and asyncio is not to complain
            return
        if task.cancelled():
            self.errors.append((number, asyncio.CancelledError()))
        elif (error := task.exception()) is not None:
            self.errors.append((number, portable(error)))
        else:
            self.results.append((number, task.result()))
        self._answer(number)

    def _answer(self, number: int) -> None:
        """Have the answers given, unless others of the call's set are still to come."""
        name = self.sets.get(number)
        if name is None or not any(self.sets.get(one) == name for one in self.running):
            self.some.set()
        elif self.holding is None:
            self.holding = asyncio.get_running_loop().call_later(HOLD_S, self.some.set)

    def call_off(self, number: int) -> None:
        """Cancel a call; it gives no answer."""
        task = self.running.pop(number, None)
        if task is not None:
            task.cancel()
        if self.results or self.errors or not self.running:
            self.some.set()


class CallBatches:
    """Base of an actor class whose methods can be called many at a time."""

    def __init__(self) -> None:
        """Remember no batch yet."""
        self._batches: dict[str, _Batch] = {}

    async def call_many(
        self, ticket: str, method: str, calls: Sequence[tuple[Any, ...]], sets: Mapping[int, str] = NO_SETS
    ) -> Answers:
        """Start `method(*args)` for every call and answer those that end first; `call_more` answers the rest.

        `sets`: for the number of a call the name of the set with which it is to be answered.
        """
        self._forget_orphans()
        batch = self._batches[ticket] = _Batch(sets)
        for number, args in enumerate(calls):
            task = asyncio.create_task(getattr(self, method)(*args), name=f"{method} {ticket}/{number}")
            batch.running[number] = task
            task.add_done_callback(functools.partial(batch.ended, number))
        return await self._answers(ticket, batch)

    async def call_more(self, ticket: str) -> Answers:
        """Wait for more calls of the batch to end and answer them. Raises RaypostError if it is unknown."""
        batch = self._batches.get(ticket)
        if batch is None:
            raise RaypostError(f"batch {ticket} is not known to {self!r}: all its answers were given")
        return await self._answers(ticket, batch)

    async def call_off(self, ticket: str, numbers: Sequence[int]) -> None:
        """Cancel some calls of a batch. Those that ended are ignored."""
        batch = self._batches.get(ticket)
        if batch is None:
            return
        for number in numbers:
            batch.call_off(number)
        if not batch.running and not batch.asking:
            del self._batches[ticket]

    async def _answers(self, ticket: str, batch: _Batch) -> Answers:
        batch.asking += 1
        try:
            await batch.some.wait()
        finally:
            batch.asking = batch.asking - 1
            batch.asked_s = time.monotonic()
        batch.some.clear()
        if batch.holding is not None:
            batch.holding.cancel()
            batch.holding = None
        results = batch.results
        batch.results = []
        errors = batch.errors
        batch.errors = []
        if not batch.running:
            self._batches.pop(ticket, None)
        return results, errors

    def _forget_orphans(self) -> None:
        """End batches whose caller is gone."""
        oldest = time.monotonic() - FORGOTTEN_S
        for ticket, batch in list(self._batches.items()):
            if not batch.asking and batch.asked_s < oldest:
                log.warning("%r ends batch %s, for which nobody asks any more", self, ticket)
                del self._batches[ticket]
                for number in list(batch.running):
                    batch.call_off(number)


def portable(error: BaseException) -> BaseException:
    """Return the error with its traceback as a note; a RuntimeError with both if it cannot be pickled."""
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, RayTaskError):
        error = error.cause
    error.add_note(trace)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception as problem:  # foreign errors may refuse in any way
        return RuntimeError(f"{error!r} (which cannot travel: {problem!r}): {trace}")
    return error


class ManyCalls:
    """One method of one actor, called many times at once. The actor's class is a CallBatches."""

    def __init__(self, handle: ActorHandle, method: str, batch_size: int) -> None:
        """At most `batch_size` calls travel together."""
        self._handle = handle
        self._method = method
        self._batch_size = batch_size
        self._waiting: list[Call] = []
        self._off: dict[str, list[int]] = {}
        self._exchanges: set[asyncio.Task[None]] = set()

    async def __call__(self, *args: Any, together: str | None = None) -> Any:
        """Return the result. Raises what the call raised, and RayActorError if the actor died before it ended.

        `together`: calls made at once with the same name are answered together.
        """
        return await self.begin(*args, together=together)

    def begin(self, *args: Any, together: str | None = None) -> asyncio.Future[Any]:
        """Make a call, as above, that others wait for, or nobody."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._send)
        future = loop.create_future()
        self._waiting.append((args, together, future))
        return future

    def _send(self) -> None:
        waiting = [one for one in self._waiting if not one[-1].done()]
        self._waiting = []
        for first in range(0, len(waiting), self._batch_size):
            part = waiting[first : first + self._batch_size]
            ticket = uuid.uuid4().hex
            exchange = asyncio.create_task(self._exchange(ticket, part), name=f"{self._method} {ticket}")
            self._exchanges.add(exchange)
            exchange.add_done_callback(self._exchanges.discard)

    async def _exchange(self, ticket: str, part: list[Call]) -> None:
        open_calls = dict(enumerate(future for _, _, future in part))
        sets = {number: name for number, (_, name, _) in enumerate(part) if name is not None}
        for number, future in open_calls.items():
            future.add_done_callback(functools.partial(self._cancelled, ticket, number))
        try:
            ref = self._handle.call_many.remote(ticket, self._method, [args for args, _, _ in part], sets)
            del part
            while True:
                results, errors = await ref
                for number, result in results:
                    _settle(open_calls.pop(number), result)
                for number, error in errors:
                    _fail(open_calls.pop(number), error)
                if all(future.done() for future in open_calls.values()):
                    return
                ref = self._handle.call_more.remote(ticket)
        # A boundary: whatever ends the exchange is what its calls raise.
        except (Exception, asyncio.CancelledError) as error:
            lost = [number for number, future in open_calls.items() if not future.done()]
            for number in lost:
                _fail(open_calls[number], error)
            # It may be the answer that was lost, not the actor.
            self._handle.call_off.remote(ticket, lost)

    def _cancelled(self, ticket: str, number: int, future: asyncio.Future[Any]) -> None:
        if not future.cancelled():
            return
        if not self._off:
            asyncio.get_running_loop().call_soon(self._call_off)
        self._off.setdefault(ticket, []).append(number)

    def _call_off(self) -> None:
        off = self._off
        self._off = {}
        for ticket, numbers in off.items():
            self._handle.call_off.remote(ticket, numbers)


def _settle(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if future.done():
        return
    if isinstance(error, asyncio.CancelledError):
        future.cancel()
    else:
        future.set_exception(error)
