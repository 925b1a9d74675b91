"""An actor behind the protocol its library object satisfies, and waits that have an owner and a deadline.

`Remote(name)` turns `await remote.method(...)` into an actor call; `RemotePool` sends each call to its
least loaded member and dispatches it again when that member died. Every call has a deadline; one that
passes it raises WaitTimeoutError naming the actor and the method.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from raypost.errors import WaitTimeoutError

T = TypeVar("T")
log = logging.getLogger(__name__)

ACTOR_ERRORS = (RayActorError,)
"""What a caller sees when the actor behind a handle died or is restarting; the call may have run."""


async def within(awaitable: Awaitable[T], timeout_s: float, waiting_for: str) -> T:
    """Await with a deadline. Raises WaitTimeoutError that says what was waited for."""
    try:
        return await asyncio.wait_for(awaitable, timeout_s)
    except TimeoutError as error:
        if isinstance(error, WaitTimeoutError):
            raise
        raise WaitTimeoutError(f"waited {timeout_s:.0f} s for {waiting_for}") from error


class Remote:
    """One named actor as a local object: every method is a coroutine function with a deadline.

    It travels as a name, so an actor that was given one can be restarted whatever became of the giver.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        self._name, self._timeout_s = name, timeout_s
        self._handle: ActorHandle | None = None

    def __getattr__(self, method: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        if method.startswith("_"):
            raise AttributeError(method)
        return functools.partial(self._call, method)

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self._handle is None:
            self._handle = ray.get_actor(self._name)
        ref = getattr(self._handle, method).remote(*args, **kwargs)
        try:
            return await within(ref, self._timeout_s, f"{self._name}.{method}")
        except (asyncio.CancelledError, WaitTimeoutError):
            ray.cancel(ref)
            raise

    def __reduce__(self) -> tuple[type, tuple]:
        return Remote, (self._name, self._timeout_s)


class RemotePool:
    """Interchangeable actors as one local object. Calls must be idempotent: one may run twice after a death."""

    def __init__(self, names: list[str], timeout_s: float, tries: int = 4) -> None:
        if not names:
            raise ValueError("a pool needs at least one actor")
        self._names, self._timeout_s, self._tries = names, timeout_s, tries
        self._members = [Remote(name, timeout_s) for name in names]
        self._load = [0] * len(names)

    def __getattr__(self, method: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        if method.startswith("_"):
            raise AttributeError(method)
        return functools.partial(self._call, method)

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        for attempt in range(1, self._tries + 1):
            member = min(range(len(self._load)), key=self._load.__getitem__)
            self._load[member] += 1
            try:
                return await self._members[member]._call(method, *args, **kwargs)
            except ACTOR_ERRORS as error:
                if attempt == self._tries:
                    raise
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

    def __reduce__(self) -> tuple[type, tuple]:
        return RemotePool, (self._names, self._timeout_s, self._tries)
