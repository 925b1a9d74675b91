"""An actor behind the protocol its library object satisfies, and waits that have an owner and a deadline.

`Remote(handle)` turns `await remote.method(...)` into an actor call; `RemotePool` sends each call to its
least loaded member and dispatches it again when that member died. Every call has a deadline; one that
passes it raises WaitTimeoutError naming the actor and the method.
"""

from __future__ import annotations

import asyncio
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


async def call(
    handle: ActorHandle, name: str, method: str, args: tuple, kwargs: dict, timeout_s: float
) -> Any:
    """One actor call with a deadline. Cancelled or late, the call is cancelled on the actor too."""
    ref = getattr(handle, method).remote(*args, **kwargs)
    try:
        return await within(ref, timeout_s, f"{name}.{method}")
    except (asyncio.CancelledError, WaitTimeoutError):
        ray.cancel(ref)
        raise


class Remote:
    """One actor as a local object: every method is a coroutine function with a deadline."""

    def __init__(self, handle: ActorHandle, name: str, timeout_s: float) -> None:
        self._handle, self._name, self._timeout_s = handle, name, timeout_s

    def __getattr__(self, method: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        if method.startswith("_"):
            raise AttributeError(method)

        async def remote_call(*args: Any, **kwargs: Any) -> Any:
            return await call(self._handle, self._name, method, args, kwargs, self._timeout_s)

        return remote_call

    def __reduce__(self) -> tuple[type, tuple]:
        return Remote, (self._handle, self._name, self._timeout_s)


class RemotePool:
    """Interchangeable actors as one local object. Calls must be idempotent: one may run twice after a death."""

    def __init__(self, handles: list[ActorHandle], name: str, timeout_s: float, tries: int = 4) -> None:
        if not handles:
            raise ValueError(f"the pool {name!r} needs at least one actor")
        self._handles, self._name, self._timeout_s, self._tries = handles, name, timeout_s, tries
        self._load = [0] * len(handles)

    def __getattr__(self, method: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        if method.startswith("_"):
            raise AttributeError(method)

        async def pool_call(*args: Any, **kwargs: Any) -> Any:
            return await self._call(method, args, kwargs)

        return pool_call

    async def _call(self, method: str, args: tuple, kwargs: dict) -> Any:
        for attempt in range(1, self._tries + 1):
            member = min(range(len(self._load)), key=self._load.__getitem__)
            name = f"{self._name}-{member}"
            self._load[member] += 1
            try:
                return await call(self._handles[member], name, method, args, kwargs, self._timeout_s)
            except ACTOR_ERRORS as error:
                if attempt == self._tries:
                    raise
                log.warning("%s died during %s (%s); dispatching again", name, method, type(error).__name__)
                await asyncio.sleep(0.5 * attempt)
            finally:
                self._load[member] -= 1
        raise AssertionError("unreachable: the last attempt returns or raises")

    def __reduce__(self) -> tuple[type, tuple]:
        return RemotePool, (self._handles, self._name, self._timeout_s, self._tries)
