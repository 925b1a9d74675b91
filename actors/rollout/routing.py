"""Router: sends requests straight to the workers that the pool's controller says serve.

Owns which worker a request goes to, its deadline, and sending it elsewhere when a worker dies. Owns neither the gate
nor the workers' health: the controller has both, and tells every router by a RoutingTable, which has an epoch.

    controller   routes(known)  answers once the epoch is above `known`: so a router learns of every change
                 report(...)    takes a worker that a router found dead out of the table, once an incarnation
    router       pick a worker of the table -> worker.generate -> its answer; dead: report, and pick again

A table may be old when it is used. Nothing depends on its age: whether a request is generated is decided by the gate
of the worker, which the controller closes and opens. A table only saves the way to the controller.

Invariants: a router refuses a request only if the controller says now that the pool is paused; it never asks a worker
again in the incarnation in which it found it dead; every request ends by its deadline.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import Protocol

from ray.actor import ActorHandle

from actors.remote import ACTOR_ERRORS, ManyCalls, remote, within
from raypost.errors import EngineLostError, NoWorkersError, WaitTimeoutError
from raypost.pause import PauseMode
from raypost.types import GenerateRequest, GenerateResult

log = logging.getLogger(__name__)

GONE = (*ACTOR_ERRORS, EngineLostError)
"""Errors of a worker that has to be brought back: it died, or Ray has already restarted it without its engine."""
MANY_REQUESTS = 64
"""Requests that travel together at most."""
TABLE_S = 20.0
"""After which a router gets the table again, changed or not."""
CALL_TIMEOUT_S = 60.0
"""Deadline of calls to the controller."""
ASK_AGAIN_S = 1.0
"""After a controller did not answer."""


@dataclass(frozen=True, slots=True)
class Route:
    """A worker that serves. Its incarnation grows each time that it is brought back."""

    worker: str
    incarnation: int
    handle: ActorHandle = field(repr=False)


@dataclass(frozen=True, slots=True)
class RoutingTable:
    """What routers know of a pool."""

    epoch: int
    """Grows with every change."""
    paused: bool
    up: tuple[Route, ...]
    states: str
    """Of all workers, for messages."""
    failure: str | None = None
    """Why no worker will come any more."""


class RoutingRole(Protocol):
    """What a router needs of the pool's controller."""

    async def routes(self, known: int) -> RoutingTable:
        """Return the table once its epoch is above `known`, or as it is after TABLE_S."""
        ...

    async def report(self, worker: str, incarnation: int, error: str) -> None:
        """Take note that a worker was found dead. Repeatable; of a former incarnation it changes nothing."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """See RolloutControl."""
        ...

    async def resume(self, version: int) -> None:
        """See RolloutControl."""
        ...

    async def swap(self, version: int) -> None:
        """See SwapControl."""
        ...


def router_to(controller: str, timeout_s: float) -> Router:
    """Return a router to the workers of the actor `controller`. `timeout_s`: see Router."""
    role = remote(controller, RoutingRole, timeout_s=CALL_TIMEOUT_S, many={"routes": MANY_REQUESTS})
    return Router(role, timeout_s)


class Router:
    """A Generator over the workers of one pool, which it can have paused.

    It belongs to one event loop, and is pickled as its arguments.
    """

    def __init__(self, controller: RoutingRole, timeout_s: float) -> None:
        """`timeout_s`: longest time that one request may take, the wait for a worker included."""
        self._controller = controller
        self._timeout_s = timeout_s
        self._table: RoutingTable | None = None
        self._calls: dict[str, ManyCalls] = {}
        self._outstanding: dict[str, int] = {}
        self._dead: set[tuple[str, int]] = set()
        """Incarnations found dead that the table still has."""
        self._turn = 0
        self._following: asyncio.Task[None] | None = None

    def __reduce__(self) -> tuple[type[Router], tuple[RoutingRole, float]]:
        """Pickle as the arguments."""
        return Router, (self._controller, self._timeout_s)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Continue `request.token_ids` on the worker with the fewest requests of this router.

        Paused: "abort" without tokens. A worker that dies is replaced by another one, from the tokens the
        request came with. A request past its deadline fails. Raises NoWorkersError when all are gone for good or none
        comes in time, and RayActorError when the controller is gone.
        """
        deadline = time.monotonic() + self._timeout_s
        while (route := await self._pick(deadline)) is not None:
            try:
                return await self._generate_on(route, request, deadline)
            except GONE as error:
                self._dead.add((route.worker, route.incarnation))
                await self._controller.report(route.worker, route.incarnation, type(error).__name__)
            except WaitTimeoutError as error:
                return GenerateResult.nothing("error", route.worker, str(error))
        return GenerateResult.nothing("abort")

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Have the whole pool paused; see RolloutControl."""
        await self._controller.pause(mode)

    async def resume(self, version: int) -> None:
        """Have the whole pool resumed; see RolloutControl."""
        await self._controller.resume(version)

    async def swap(self, version: int) -> None:
        """Have the whole pool change its version; see SwapControl."""
        await self._controller.swap(version)

    async def _generate_on(self, route: Route, request: GenerateRequest, deadline: float) -> GenerateResult:
        call = self._calls.get(route.worker)
        if call is None:
            call = self._calls[route.worker] = ManyCalls(route.handle, "generate", MANY_REQUESTS)
        self._outstanding[route.worker] = self._outstanding.get(route.worker, 0) + 1
        left = max(0.0, deadline - time.monotonic())
        try:
            result: GenerateResult = await within(
                call(request, together=request.group),
                left,
                f"{route.worker} to generate {request.request_id}",
            )
            return result
        finally:
            self._outstanding[route.worker] -= 1

    async def _pick(self, deadline: float) -> Route | None:
        """Return a worker that serves, None if the pool is paused."""
        table = self._table
        if table is None or table.paused:
            # Only the controller knows whether that still holds.
            table = self._take(await self._controller.routes(-1))
        self._follow()
        while not table.paused:
            up = [one for one in table.up if (one.worker, one.incarnation) not in self._dead]
            if up:
                # Where several have as few, not always the first: other routers count their own requests alone.
                self._turn += 1
                up = up[self._turn % len(up) :] + up[: self._turn % len(up)]
                return min(up, key=lambda one: self._outstanding.get(one.worker, 0))
            if table.failure is not None:
                raise NoWorkersError(table.failure)
            left = max(0.0, deadline - time.monotonic())
            newer = self._controller.routes(table.epoch)
            try:
                table = self._take(await within(newer, left, f"a rollout worker: {table.states}"))
            except WaitTimeoutError as error:
                raise NoWorkersError(str(error)) from error
        return None

    def _take(self, table: RoutingTable) -> RoutingTable:
        """Use a table, unless a newer one is known; return the one in use."""
        if self._table is None or table.epoch > self._table.epoch:
            self._table = table
            self._dead &= {(one.worker, one.incarnation) for one in table.up}
        return self._table

    def _follow(self) -> None:
        """Have the controller push every change from now on."""
        if self._following is None:
            self._following = asyncio.create_task(self._follow_for_ever(), name="routing table")

    async def _follow_for_ever(self) -> None:
        while True:
            assert self._table is not None, "a table was asked for first"
            try:
                self._take(await self._controller.routes(self._table.epoch))
            except (*ACTOR_ERRORS, WaitTimeoutError) as error:
                # Workers serve without it.
                log.warning("no routing table from the rollout controller: %s", error)
                await asyncio.sleep(ASK_AGAIN_S)
