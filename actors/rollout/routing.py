"""Router: sends requests straight to the workers that the pool's controller says serve.

Owns which worker a request goes to, its deadline, and sending it elsewhere when a worker dies or leaves. Owns neither
the gate nor the workers' health: the controller has both, and tells every router by a RoutingTable, which has an epoch.

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
import functools
import logging
import time
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from ray.actor import ActorHandle

from actors.many_calls import ManyCalls
from actors.remote import ACTOR_ERRORS, ROLE_TRIES, remote, within
from actors.rollout.loads import Loads, Room
from raypost.errors import EngineLostError, NoWorkersError, WaitTimeoutError
from raypost.types import GenerateRequest, GenerateResult
from raypost.types.pause import PauseMode

log = logging.getLogger(__name__)

GONE = (*ACTOR_ERRORS, EngineLostError)
"""Errors of a worker that has to be brought back: it died, or Ray has already restarted it without its engine."""
MANY_REQUESTS = 64
"""Requests that travel together at most."""
LIFE = 1 << 32
"""Epochs of one controller at most, and incarnations of its workers; those of the next are above them."""
TABLE_S = 20.0
"""After which a router gets the table again, changed or not."""
CALL_TIMEOUT_S = 60.0
"""Deadline of calls to the controller."""
ONE_ROOM = Room(slots=64, tokens=0)
"""Of workers that do not say what they hold: all have the same."""
ASK_AGAIN_S = 1.0
"""After a controller did not answer."""


@dataclass(frozen=True, slots=True)
class Route:
    """A worker that serves. Its incarnation grows each time that it is brought back."""

    worker: str
    incarnation: int
    handle: ActorHandle = field(repr=False)
    share: float = 1.0
    """Of a slow worker, its speed as a part of its siblings': so much less it is given."""
    room: Room = ONE_ROOM
    """What its engine says it holds at once."""


@dataclass(frozen=True, slots=True)
class RoutingTable:
    """What routers know of a pool."""

    epoch: int
    """Grows with every change."""
    paused: bool
    up: tuple[Route, ...]
    states: str
    """Of all workers, for messages."""
    leaving: frozenset[str] = frozenset()
    """Workers that are given nothing more, and whose answers are good."""
    failure: str | None = None
    """Why no worker will come any more."""

    def has(self, route: Route) -> bool:
        """Return whether a worker serves in the incarnation of `route`."""
        return any((one.worker, one.incarnation) == (route.worker, route.incarnation) for one in self.up)

    def gave_up(self, route: Route) -> bool:
        """Return whether the pool gave a worker up since it had this route: nothing that it answers is used.

        A controller that was started again calls all incarnations anew.
        """
        if route.worker in self.leaving:
            return False
        now = next((one.incarnation for one in self.up if one.worker == route.worker), None)
        return now is None or (now // LIFE == route.incarnation // LIFE and now > route.incarnation)


@dataclass(frozen=True, slots=True)
class _Open:
    """The requests that one incarnation of a worker has."""

    route: Route
    outcomes: set[asyncio.Future[GenerateResult]] = field(default_factory=set)

    def give_up(self) -> None:
        """End the wait for them: they go on elsewhere."""
        for outcome in self.outcomes:
            if not outcome.done():
                outcome.set_exception(EngineLostError(f"{self.route.worker} was given up by the pool"))


class RoutingRole(Protocol):
    """What a router needs of the pool's controller."""

    async def routes(self, known: int) -> RoutingTable:
        """Return the table once its epoch is above `known`, or as it is after TABLE_S."""
        ...

    async def report(self, worker: str, incarnation: int, error: str) -> bool:
        """Take note that a worker was found dead, and return whether it is well after all.

        Repeatable; of a former incarnation it changes nothing.
        """
        ...

    async def late(self, worker: str) -> None:
        """Count an answer of a worker that was given up before it came."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """See RolloutControl."""
        ...

    async def resume(self, version: int) -> None:
        """See RolloutControl."""
        ...

    async def swap(self, version: int, wait_s: float = 0.0) -> None:
        """See SwapControl."""
        ...


def router_to(controller: str, timeout_s: float) -> Router:
    """Return a router to the workers of the actor `controller`. `timeout_s`: see Router."""
    role = remote(
        [controller], RoutingRole, timeout_s=CALL_TIMEOUT_S, many={"routes": MANY_REQUESTS}, tries=ROLE_TRIES
    )
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
        self._loads = Loads()
        self._dead: set[tuple[str, int]] = set()
        """Incarnations found dead that the table still has."""
        self._open: dict[tuple[str, int], _Open] = {}
        """Requests by worker and incarnation."""
        self._telling: set[asyncio.Task[None]] = set()
        self._following: asyncio.Task[None] | None = None

    def __reduce__(self) -> tuple[type[Router], tuple[RoutingRole, float]]:
        """Pickle as the arguments."""
        return Router, (self._controller, self._timeout_s)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Continue `request.token_ids` on the worker with the most room for it, or the one that has its prefix.

        Paused: "abort" without tokens. A worker that dies, or that the pool gives up, is replaced by another one, from
        the tokens the request came with; one that leaves, from those that it has made. A request past its deadline
        fails. Raises NoWorkersError when all are gone for good or none comes in time, and RayActorError when the
        controller is gone.
        """
        deadline = time.monotonic() + self._timeout_s
        made: GenerateResult | None = None
        while (route := await self._pick(deadline, request)) is not None:
            try:
                result = await self._generate_on(route, request, deadline)
            except GONE as error:
                if not await self._controller.report(route.worker, route.incarnation, type(error).__name__):
                    self._dead.add((route.worker, route.incarnation))
                continue
            except WaitTimeoutError as error:
                return GenerateResult.nothing("error", route.worker, str(error))
            left = result.finish_reason == "abort" and await self._left(route)
            if left and self._take_no_more(route):
                continue
            made = result if made is None else joined(made, result)
            if not left or len(result.response_ids) >= request.sample_params.max_tokens:
                return made
            request = rest_of(request, result)
        return made or GenerateResult.nothing("abort")

    async def _left(self, route: Route) -> bool:
        """Return whether a worker aborted because it leaves a pool that serves."""
        table = self._table
        if table is None or (table.has(route) and not table.paused):
            table = self._take(await self._controller.routes(-1))
        return not table.paused and not table.has(route)

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Have the whole pool paused; see RolloutControl."""
        await self._controller.pause(mode)

    async def resume(self, version: int) -> None:
        """Have the whole pool resumed; see RolloutControl."""
        await self._controller.resume(version)

    async def swap(self, version: int, wait_s: float = 0.0) -> None:
        """Have the whole pool change its version; see SwapControl."""
        await self._controller.swap(version, wait_s)

    def _take_no_more(self, route: Route) -> bool:
        """Return whether what a worker answered just now is too late; it is counted then."""
        late = self._table is not None and self._table.gave_up(route)
        if late:
            self._count_late(route.worker)
        return late

    async def _generate_on(self, route: Route, request: GenerateRequest, deadline: float) -> GenerateResult:
        call = self._calls.get(route.worker)
        if call is None:
            call = self._calls[route.worker] = ManyCalls(route.handle, "generate", MANY_REQUESTS)
        tokens = most_tokens(request)
        self._loads.begin(route.worker, tokens)
        left = max(0.0, deadline - time.monotonic())
        outcome = asyncio.get_running_loop().create_future()
        answer = call.begin(request, together=request.group)
        answer.add_done_callback(functools.partial(self._settle, route.worker, outcome))
        waiting = self._open.setdefault((route.worker, route.incarnation), _Open(route))
        waiting.outcomes.add(outcome)
        try:
            result: GenerateResult = await within(
                outcome, left, f"{route.worker} to generate {request.request_id}"
            )
        except (WaitTimeoutError, asyncio.CancelledError):
            answer.cancel()
            raise
        finally:
            waiting.outcomes.discard(outcome)
            self._loads.end(route.worker, tokens)
        self._loads.heard(route.worker, result.left, time.monotonic())
        return result

    def _settle(
        self, worker: str, outcome: asyncio.Future[GenerateResult], answer: asyncio.Future[GenerateResult]
    ) -> None:
        """Give an answer to whoever waits for it; one that nobody waits for any more is counted, and not used."""
        if answer.cancelled():
            outcome.cancel()
        elif (error := answer.exception()) is not None:
            if not outcome.done():
                outcome.set_exception(error)
        elif outcome.done():
            self._count_late(worker)
        else:
            outcome.set_result(answer.result())

    def _count_late(self, worker: str) -> None:
        telling = asyncio.ensure_future(self._controller.late(worker))
        self._telling.add(telling)
        telling.add_done_callback(self._told)

    def _told(self, telling: asyncio.Task[None]) -> None:
        self._telling.discard(telling)
        if not telling.cancelled() and (error := telling.exception()) is not None:
            log.warning("a late answer is not counted: %s", error)

    async def _pick(self, deadline: float, request: GenerateRequest) -> Route | None:
        """Return a worker that serves, None if the pool is paused."""
        table = self._table
        if table is None or table.paused:
            # Only the controller knows whether that still holds.
            table = self._take(await self._controller.routes(-1))
        self._follow()
        while not table.paused:
            up = [one for one in table.up if (one.worker, one.incarnation) not in self._dead]
            if up:
                trajectory = request.request_id.rpartition("/")[0]
                return self._loads.pick(up, trajectory, most_tokens(request), time.monotonic())
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
            for key, open_ in list(self._open.items()):
                if not table.has(open_.route):
                    if table.gave_up(open_.route):
                        open_.give_up()
                    if not open_.outcomes:
                        del self._open[key]
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


def most_tokens(request: GenerateRequest) -> int:
    """Return how many tokens a request's keys and values are of when its response is as long as it may be."""
    return len(request.token_ids) + request.sample_params.max_tokens


def rest_of(request: GenerateRequest, made: GenerateResult) -> GenerateRequest:
    """Return the request for what is still to be generated after `made`."""
    asked, done = request.sample_params, len(made.response_ids)
    params = replace(asked, max_tokens=asked.max_tokens - done, min_tokens=max(0, asked.min_tokens - done))
    return replace(
        request, token_ids=np.concatenate([request.token_ids, made.response_ids]), sample_params=params
    )


def joined(first: GenerateResult, rest: GenerateResult) -> GenerateResult:
    """Return the result of a request that two workers answered, one after the other."""
    return replace(
        rest,
        response_ids=np.concatenate([first.response_ids, rest.response_ids]),
        logprobs=np.concatenate([first.logprobs, rest.logprobs]),
        policy_versions=np.concatenate([first.policy_versions, rest.policy_versions]),
    )
