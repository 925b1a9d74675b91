"""Actors behind the protocols of their roles, and waits that have an owner and a deadline.

`remote(name, ProducerRole, timeout_s=...)` is the actor `name` as a ProducerRole: `await producer.pause(...)` is an
actor call whose name and arguments the type checker knows. Of several names it is a pool: each call goes to the least
loaded member, and to another one when that died. Every call has a deadline; one that passes it raises
WaitTimeoutError naming the actor and the method.

Methods that are called many times at once (`many`) go in batches (many_calls.py).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar, cast

import ray
from ray._private.state import actors
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayActorError

from actors.many_calls import ManyCalls
from raypost.errors import RaypostError, WaitTimeoutError
from raypost.observe.waits import waiting

R = TypeVar("R")
T = TypeVar("T")
log = logging.getLogger(__name__)

STARTING = ("DEPENDENCIES_UNREADY", "PENDING_CREATION", "RESTARTING")
"""States of an actor in which its constructor has not returned yet."""
ACTOR_ERRORS = (RayActorError,)
"""Raised when the actor behind a handle died or is restarting; the call may have run."""
POOL_TRIES = 4
"""How often a call to a pool is made to members that are there."""
ROLE_TRIES = 8
"""The same where nobody else can take the only actor's part: some 14 s in all."""
RESTART_S, RESTART_POLL_S = 300.0, 0.5
"""How long a call waits for restarts, and how often Ray is asked about them."""
LONG_S = 60.0
"""A call that took longer before its actor died is tried as often again as a new one."""
REPEATS = 8
"""How often a call that was lost is made again."""
ASKED = 5
"""How often a process is asked before it is taken for gone."""


def raised(error: BaseException) -> BaseException:
    """Return what an actor raised: the text of Ray's error of it begins with the places in its code."""
    return getattr(error, "cause", None) or error


async def within(awaitable: Awaitable[T], timeout_s: float | None, waiting_for: str) -> T:
    """Await with a deadline, None: without; meanwhile it is an open wait of this process (raypost.observe.waits).

    Raises WaitTimeoutError that says what was waited for.
    """
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            with waiting(waiting_for, timeout_s):
                return await awaitable
    except TimeoutError as error:
        if timeout_s is None or not deadline.expired():
            raise
        raise WaitTimeoutError(f"waited {timeout_s:.0f} s for {waiting_for}") from error


async def repeated(
    call: Callable[[], Awaitable[T]], is_well: Callable[[], Awaitable[bool]], repeats: int = REPEATS
) -> T:
    """Make a call that may be delivered twice; again if it or its answer was lost, and the one called `is_well`.

    Raises what the last call raised.
    """
    try:
        return await call()
    except ActorUnavailableError:
        if not repeats or not await is_well():
            raise
    return await repeated(call, is_well, repeats - 1)


async def asked(question: Callable[[], Awaitable[T]]) -> T:
    """Return the answer to a question that changes nothing, asked ASKED times while it is lost."""

    async def whoever() -> bool:
        return True

    return await repeated(question, whoever, ASKED - 1)


async def is_still(process: object, who: Callable[[], Awaitable[object]]) -> bool:
    """Return whether `who` answers that it is `process`; not if it gives no answer."""
    try:
        return await asked(who) == process
    except (*ACTOR_ERRORS, RaypostError):
        return False


def deaths() -> int:
    """Return how often the actor that runs here was started again because its process had died; 0 outside of one."""
    actor_id = ray.get_runtime_context().get_actor_id() if ray.is_initialized() else None
    return 0 if actor_id is None else int(actors(actor_id=actor_id)["NumRestarts"])


def is_starting(handle: ActorHandle) -> bool:
    """Return whether an actor has no process that takes calls, but will have one: what is called now is lost."""
    return actors(actor_id=handle._actor_id.hex()).get("State") in STARTING


class Watched:
    """Base of an actor class whose deaths somebody waits for."""

    async def lives(self) -> None:
        """Never return: the call fails when the process ends."""
        await asyncio.Event().wait()


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

    `tries`: how often a call to a pool is made. While all its actors restart, it waits for one of them.

    Nothing checks that the actor has the methods of `role`: this is the one place where a handle gets its type. The
    other arguments are those of Remote and RemotePool.
    """
    made: Remote | RemotePool
    if isinstance(name, str):
        made = Remote(name, timeout_s, many, timeouts_s)
    else:
        made = RemotePool(name, timeout_s, tries, many, timeouts_s)
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
        self._looking: asyncio.Task[bool] | None = None
        self._looked_s = 0.0

    async def _is_starting(self) -> bool:
        """Return whether the actor restarts, as it was at most RESTART_POLL_S ago; False where Ray does not know it."""
        if self._handle is None:
            return False
        if self._looking is None or time.monotonic() - self._looked_s > RESTART_POLL_S:
            self._looked_s = time.monotonic()
            self._looking = asyncio.create_task(asyncio.to_thread(is_starting, self._handle))
        return await asyncio.shield(self._looking)

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
        timeouts_s: Mapping[str, float | None] | None = None,
    ) -> None:
        """Refer to the actors `names`; a pool of one waits while its actor restarts. The rest as for Remote."""
        if not names:
            raise ValueError("a pool needs at least one actor")
        self._names = list(names)
        self._timeout_s = timeout_s
        self._tries = tries
        self._many = dict(many or {})
        self._timeouts_s = dict(timeouts_s or {})
        self._members = [Remote(name, timeout_s, many, timeouts_s) for name in names]
        self._load = [0] * len(names)

    def __getattr__(self, method: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        """Return the actor's method."""
        if method.startswith("_"):
            raise AttributeError(method)
        return functools.partial(self._call, method)

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        died = [0] * len(self._load)
        attempt, end = 0, time.monotonic() + RESTART_S
        while True:
            member = await self._free(died, end)
            attempt, since_s = attempt + 1, time.monotonic()
            self._load[member] += 1
            try:
                return await self._members[member]._call(method, *args, **kwargs)
            except ACTOR_ERRORS as error:
                if time.monotonic() - since_s > LONG_S:
                    attempt, end = 1, time.monotonic() + RESTART_S
                if attempt >= self._tries:
                    raise
                died[member] += 1
                name, kind = self._names[member], type(error).__name__
                log.warning("%s gave no answer to %s (%s); the call is made again", name, method, kind)
                # Of a death, as of a call that was lost, Ray knows after a second or two.
                await asyncio.sleep(max(0.0, 0.5 * attempt - (time.monotonic() - since_s)))
            finally:
                self._load[member] -= 1

    async def _free(self, died: Sequence[int], end: float) -> int:
        """Return the member to call next; `died`: how often each failed this call.

        Where all of them did, it waits until `end` for one to be back: how long that takes depends on the machine.
        """
        # By its load alone a dead one would be asked for ever: it has nothing to do.
        first, *others = sorted(range(len(self._load)), key=lambda number: (died[number], self._load[number]))
        if not died[first]:
            return first
        with waiting(f"one of {', '.join(self._names)} to be started again", RESTART_S):
            while time.monotonic() < end:
                for member in (first, *others):
                    if not await self._members[member]._is_starting():
                        return member
                await asyncio.sleep(RESTART_POLL_S)
        return first

    async def on(self, name: str | None, method: str, *args: Any) -> Any:
        """Call the member `name`; any other one if there is none, or if it died."""
        if name in self._names:
            member = self._names.index(name)
            self._load[member] += 1
            try:
                return await self._members[member]._call(method, *args)
            except ACTOR_ERRORS as error:
                log.warning(
                    "%s gave no answer to %s (%s); the call is made again", name, method, type(error).__name__
                )
            finally:
                self._load[member] -= 1
        return await self._call(method, *args)

    async def on_every(self, method: str, *args: Any) -> None:
        """Call every member; one that died has nothing to do."""
        calls = (member._call(method, *args) for member in self._members)
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, ACTOR_ERRORS):
                raise outcome

    def __reduce__(self) -> tuple[type[RemotePool], tuple[Any, ...]]:
        """Pickle as the arguments."""
        return type(self), (self._names, self._timeout_s, self._tries, self._many, self._timeouts_s)
