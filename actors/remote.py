"""Actors behind the protocols of their roles, and waits that have an owner and a deadline.

`remote(name, ProducerRole, timeout_s=...)` is the actor `name` as a ProducerRole: `await producer.pause(...)` is an
actor call whose name and arguments the type checker knows. Of several names it is a pool: each call goes to the least
loaded member, and to another one when that died. Every call has a deadline; one that passes it raises
WaitTimeoutError naming the actor and the method.

A call costs its two processes a millisecond of computing, whatever it carries. So methods that are called many
times at once (`many`) go in batches: what is called in one turn of the event loop travels together, and what ends
in one turn comes back together (`CallBatches`, on the other side). Every call still ends by itself: it waits for no
other, fails alone, and is cancelled alone. Only calls that are made `together`, because none of their answers is of use
without the others, are answered so: when the last of them ends, or HOLD_S after the first.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import pickle
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from raypost.errors import RaypostError, WaitTimeoutError

R = TypeVar("R")
T = TypeVar("T")
log = logging.getLogger(__name__)

ACTOR_ERRORS = (RayActorError,)
"""Raised when the actor behind a handle died or is restarting; the call may have run."""
POOL_TRIES = 4
FORGOTTEN_S = 300.0
"""Time after which a batch whose answers nobody asks for is given up."""
HOLD_S = 2.0
"""Longest time that an answer waits for the others of its set: so much work is lost at most when the actor dies."""


async def within(awaitable: Awaitable[T], timeout_s: float | None, waiting_for: str) -> T:
    """Await with a deadline, None: without. Raises WaitTimeoutError that says what was waited for."""
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            return await awaitable
    except TimeoutError as error:
        if timeout_s is None or not deadline.expired():
            raise
        raise WaitTimeoutError(f"waited {timeout_s:.0f} s for {waiting_for}") from error


# ---------------------------------------------------------------- many calls at a time

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
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._send)
        future = loop.create_future()
        self._waiting.append((args, together, future))
        return await future

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


# ---------------------------------------------------------------- an actor as a local object


def remote(
    name: str | Sequence[str],
    role: type[R],
    *,
    timeout_s: float,
    timeouts_s: Mapping[str, float | None] | None = None,
    many: Mapping[str, int] | None = None,
    tries: int = POOL_TRIES,
) -> R:
    """Return a named actor as the role it plays; several names are a pool of interchangeable actors.

    `tries`: how often a call to a pool is made, also while its only actor restarts.

    Nothing checks that the actor has the methods of `role`: this is the one place where a handle gets its type. The
    other arguments are those of Remote and RemotePool.
    """
    made: Remote | RemotePool
    if isinstance(name, str):
        made = Remote(name, timeout_s, many, timeouts_s)
    else:
        made = RemotePool(name, timeout_s, tries, many)
    return cast(R, made)


class Remote:
    """One named actor as a local object: every method is a coroutine function with a deadline.

    It is pickled as a name, so it outlives the process that made it.
    """

    def __init__(
        self,
        name: str,
        timeout_s: float,
        many: Mapping[str, int] | None = None,
        timeouts_s: Mapping[str, float | None] | None = None,
    ) -> None:
        """Refer to the actor `name`; it is looked up at the first call.

        `many` are the methods whose calls travel together, with how many of them do so at most. `timeouts_s` are the
        methods with a deadline of their own; None: without one, and the call goes on when its caller no longer waits.
        """
        self._name = name
        self._timeout_s = timeout_s
        self._many = dict(many or {})
        self._timeouts_s = dict(timeouts_s or {})
        self._handle: ActorHandle | None = None
        self._batched: dict[str, ManyCalls] = {}

    def __getattr__(self, method: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        """Return the actor's method."""
        if method.startswith("_"):
            raise AttributeError(method)
        return functools.partial(self._call, method)

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self._handle is None:
            self._handle = ray.get_actor(self._name)
            sizes = self._many.items()
            self._batched = {name: ManyCalls(self._handle, name, size) for name, size in sizes}
        waiting_for = f"{self._name}.{method}"
        timeout_s = self._timeouts_s.get(method, self._timeout_s)
        if method in self._batched:
            assert not kwargs, "calls that travel together have positional arguments"
            return await within(self._batched[method](*args), timeout_s, waiting_for)
        ref = getattr(self._handle, method).remote(*args, **kwargs)
        # Of several returns the first is the answer; the others stay where they are.
        first, *others = ref if isinstance(ref, list) else [ref]
        try:
            answer = await within(first, timeout_s, waiting_for)
        except (asyncio.CancelledError, WaitTimeoutError):
            if timeout_s is not None:
                ray.cancel(first)
            raise
        return (answer, *others) if others else answer

    def __reduce__(self) -> tuple[type[Remote], tuple[Any, ...]]:
        """Pickle as the arguments."""
        return Remote, (self._name, self._timeout_s, self._many, self._timeouts_s)


class RemotePool:
    """Interchangeable actors as one local object. Calls must be idempotent: one may run twice after a death."""

    def __init__(
        self,
        names: Sequence[str],
        timeout_s: float,
        tries: int = POOL_TRIES,
        many: Mapping[str, int] | None = None,
    ) -> None:
        """Refer to the actors `names`; a pool of one repeats calls while its actor restarts. `many` as for Remote."""
        if not names:
            raise ValueError("a pool needs at least one actor")
        self._names = list(names)
        self._timeout_s = timeout_s
        self._tries = tries
        self._many = dict(many or {})
        self._members = [Remote(name, timeout_s, many=many) for name in names]
        self._load = [0] * len(names)

    def __getattr__(self, method: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        """Return the actor's method."""
        if method.startswith("_"):
            raise AttributeError(method)
        return functools.partial(self._call, method)

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        died = [0] * len(self._load)
        for attempt in range(1, self._tries + 1):
            # A dead one has nothing to do: by its load alone it would be asked for ever.
            member = min(range(len(self._load)), key=lambda number: (died[number], self._load[number]))
            self._load[member] += 1
            try:
                return await self._members[member]._call(method, *args, **kwargs)
            except ACTOR_ERRORS as error:
                if attempt == self._tries:
                    raise
                died[member] += 1
                name, kind = self._names[member], type(error).__name__
                log.warning("%s died during %s (%s); dispatching again", name, method, kind)
                await asyncio.sleep(0.5 * attempt)
            finally:
                self._load[member] -= 1
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def on_every(self, method: str, *args: Any) -> None:
        """Call every member; one that died has nothing to do."""
        calls = (member._call(method, *args) for member in self._members)
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, ACTOR_ERRORS):
                raise outcome

    def __reduce__(self) -> tuple[type[RemotePool], tuple[Any, ...]]:
        """Pickle as the arguments."""
        return type(self), (self._names, self._timeout_s, self._tries, self._many)
