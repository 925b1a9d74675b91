"""WorkerPool: the rollout workers of a pool, those that join and leave, and what becomes of those that die.

Owns the life of every worker in the pool (member.py), the routing table, and bringing a worker in, for the first time
or after its death: a process (by Ray), the engine, the current weights, and only then requests. What the pool holds and
whether it serves is the controller's, which is a WorkerPool (controller.py). Which workers there are to be is decided
where their actors are owned (jobs/elastic.py): a controller may die without them.

    join     REQUESTED -> STARTING -> CATCHING_UP -> UP            beside production, which does not notice
    death    UP -> DOWN -> STARTING -> CATCHING_UP -> UP
    leave    UP -> DRAINING -> GONE                                what it ran goes on elsewhere, with its tokens

A pool that sleeps has given its devices to others: no engine is started meanwhile, so a worker that died comes back
when the pool wakes, which is with the next `load_weights` or `resume`.

Invariants: the table has no worker that is not UP, and its epoch grows with every change, also over the controllers
that died; so do the workers' incarnations. No name is used again for another worker. One that leaves generates nothing
after a pause, and nothing with an old version after a swap: either ends its wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from ray.actor import ActorHandle

from actors.engine.life import EngineInfo
from actors.many_calls import CallBatches
from actors.remote import within
from actors.rollout.member import RECOVERY_TRIES, PoolWorker, WorkerState
from actors.rollout.rebuild import once_known
from actors.rollout.routing import GONE, LIFE, TABLE_S, Route, RoutingTable
from actors.rollout.watch import PoolWatch
from raypost.config import RolloutConfig
from raypost.errors import NoWorkersError, WaitTimeoutError
from raypost.observe.spans import Span
from raypost.types import WorkerStats
from raypost.types.pause import PauseDeadlines, PauseMode

log = logging.getLogger(__name__)

Drain = Literal["abort", "wait"]
LEFT = 256
"""So many workers that left are known to have left, and not to have been given up."""


class WorkerPool(CallBatches):
    """The workers, which of them serve, and how those that died come back."""

    def __init__(
        self,
        workers: Mapping[str, str],
        rollout: RolloutConfig,
        find: Callable[[str], ActorHandle],
        incarnation: int,
    ) -> None:
        """`workers`: by their name the name of their actor, which `find` finds.

        `incarnation`: how often the controller of these workers was started again.
        """
        super().__init__()
        self._rollout = rollout
        self._incarnation = incarnation
        first = incarnation * LIFE
        self._find = find
        self._workers = [
            PoolWorker(name, handle, incarnation=first)
            for name, actor in workers.items()
            if (handle := self._found(actor)) is not None
        ]
        self._left: deque[str] = deque(maxlen=LEFT)
        self._spans: list[Span] = []
        """When workers were on their way in or out, and what those that left did, that nobody has asked for yet."""
        self.late_results = 0  # answers of workers that had been given up by then
        self._deadlines = PauseDeadlines(rollout.pause_timeout_s)
        self._paused = True
        self._mode: PauseMode | None = None
        """Of the pause in force or under way, as the workers say."""
        self._asleep = False
        """True from the call of `sleep` on: no engine is started."""
        self._failure: str | None = None
        """Why no worker will come any more."""
        self._watching: asyncio.Task[None] | None = None
        self._watch = PoolWatch(rollout, lambda: self._workers, self.stats, self._lost, self._notify)
        self._control = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._is_known, self._knowing = incarnation == 0, asyncio.Lock()
        self._table = self._table_of_epoch(first)

    def _found(self, actor: str) -> ActorHandle | None:
        """Return the handle of an actor; None, in a controller that was started again, of one that has left."""
        try:
            return self._find(actor)
        except ValueError:
            if not self._incarnation:
                raise
            return None

    async def know(self) -> None:
        """Find the workers again, if the controller was started again and has not yet."""
        if self._is_known:
            return
        async with self._knowing:
            if not self._is_known:
                await self._rebuild()
                self._is_known = True

    @abstractmethod
    async def _rebuild(self) -> None:
        """Ask the workers what they are, and become what they say."""

    @abstractmethod
    async def _until_supplied(self) -> None:
        """Wait until the weights of the pool's version are at hand."""

    @abstractmethod
    async def _catch_up(self, worker: PoolWorker) -> None:
        """Have a worker that came back hold what the pool holds, and serve if that serves. The lock is held."""

    @property
    @abstractmethod
    def _version(self) -> int | None:
        """That the pool holds."""

    # ---------------------------------------------------------------- start

    @once_known
    async def start(self) -> list[EngineInfo]:
        """Start all engines at once. A worker that dies meanwhile starts again, RECOVERY_TRIES times at most.

        Repeated: only what the engines say. Raises the first failing worker's error, or WaitTimeoutError.
        """
        first = [worker for worker in self._workers if worker.state is WorkerState.STARTING]
        asked = first or [worker for worker in self._workers if worker.state is WorkerState.UP]
        infos = await asyncio.gather(*(one.start_first(self._rollout.start_timeout_s) for one in asked))
        for worker in first:
            worker.state = WorkerState.UP
        await self._notify()
        self._watch_workers()
        return infos

    # ---------------------------------------------------------------- routing

    @once_known
    async def routes(self, known: int) -> RoutingTable:
        """Return the routing table once its epoch is above `known`, or as it is after TABLE_S."""
        async with self._changed:
            newer = self._changed.wait_for(lambda: self._table.epoch > known)
            with contextlib.suppress(WaitTimeoutError):
                await within(newer, TABLE_S, f"a routing table after epoch {known}")
        return self._table

    @once_known
    async def report(self, worker: str, incarnation: int, error: str) -> bool:
        """Take note that a router found a worker dead. What it says of a former incarnation is known already.

        Returns whether the worker is well: then it was a call that was lost, or its answer.
        """
        for one in self._workers:
            if (one.name, one.incarnation) == (worker, incarnation) and one.state is WorkerState.UP:
                if await one.survived(error):
                    return True
                if one.incarnation == incarnation:
                    await self._lost(one, error)
        return False

    @once_known
    async def late(self, worker: str) -> None:
        """Count an answer that came when its worker had been given up, and that was not used."""
        self.late_results += 1
        log.warning("%s answered after it was given up; its answer is not used", worker)

    def _table_of_epoch(self, epoch: int) -> RoutingTable:
        up = (worker for worker in self._workers if worker.state is WorkerState.UP)
        shares = self._watch.rates.shares
        return RoutingTable(
            epoch=epoch,
            paused=self._paused,
            up=tuple(
                Route(one.name, one.incarnation, one.handle, shares.get(one.name, 1.0), one.room)
                for one in up
            ),
            leaving=frozenset(
                (*self._left, *(one.name for one in self._workers if one.state is WorkerState.DRAINING))
            ),
            states=", ".join(f"{worker.name} is {worker.state}" for worker in self._workers),
            failure=self._failure,
        )

    async def _notify(self) -> None:
        """Push the table to all routers, and wake what waits here."""
        async with self._changed:
            self._table = self._table_of_epoch(self._table.epoch + 1)
            self._changed.notify_all()

    # ---------------------------------------------------------------- calls to all

    async def _until_one_is_up(self, deadline: float) -> None:
        """Raise NoWorkersError if none comes by `deadline`, or none ever will."""
        async with self._changed:
            some = self._changed.wait_for(lambda: self._table.up or self._failure is not None)
            waiting_for = f"a rollout worker: {self._table.states}"
            try:
                await within(some, max(0.0, deadline - time.monotonic()), waiting_for)
            except WaitTimeoutError as error:
                raise NoWorkersError(str(error)) from error
        if not self._table.up:
            raise NoWorkersError(str(self._failure))

    async def _on_every_up(self, method: str, timeout_s: float, *args: Any, named: bool = False) -> list[Any]:
        """Call every UP worker. Those that died are recovered; other errors are raised after all calls ended."""
        up = [worker for worker in self._workers if worker.state is WorkerState.UP]
        calls = [worker.call(method, timeout_s, f"to {method}", *args) for worker in up]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        results, errors = [], []
        for worker, outcome in zip(up, outcomes, strict=True):
            if isinstance(outcome, GONE):
                await self._lost(worker, type(outcome).__name__)
            elif isinstance(outcome, BaseException):
                errors.append(outcome)
            else:
                results.append((worker.name, outcome) if named else outcome)
        if errors:
            raise errors[0]
        return results

    # ---------------------------------------------------------------- join and leave

    @once_known
    async def join(self, name: str) -> None:
        """Take the actor `name` into the pool, which it serves once it holds what the pool holds. Idempotent.

        Returns at once. A worker that gets no process, or no engine, is dropped: `states` has it no more.
        """
        if any(worker.name == name for worker in self._workers) or name in self._left:
            return
        await self._request(PoolWorker(name, self._find(name), incarnation=self._incarnation * LIFE))

    async def _request(self, worker: PoolWorker) -> None:
        worker.state = WorkerState.REQUESTED
        self._workers.append(worker)
        worker.recovering = asyncio.create_task(self._enter(worker), name=f"{worker.name} joins")
        await self._notify()

    async def _enter(self, worker: PoolWorker) -> None:
        """Wait for a worker's process, and bring it in."""
        try:
            # Whoever asked for it gives it up before, and ends it.
            await worker.until_it_has_a_process(2 * self._rollout.start_timeout_s)
        except (*GONE, WaitTimeoutError) as error:
            log.warning("%s does not join: %s", worker.name, error)
        else:
            await self._recover(worker)
        if worker.state is not WorkerState.UP:
            await self._forget(worker)

    @once_known
    async def leave(self, name: str, drain: Drain, timeout_s: float) -> None:
        """Give a worker nothing more, and forget it once its requests are over and its engine has ended. Idempotent.

        abort: requests come back with their tokens, and routers continue them elsewhere. wait: they run to their end
        for at most `timeout_s`, or until the next sync, and are aborted then.
        """
        worker = next((one for one in self._workers if one.name == name), None)
        if worker is None:
            return
        async with self._control:
            if worker.state is not WorkerState.DRAINING:
                was, worker.state = worker.state, WorkerState.DRAINING
                worker.since_s = time.time()
                if worker.recovering is not None:
                    worker.recovering.cancel()
                # One that starts answers when it has started, for which no pause is to wait; its gate is closed.
                worker.served = was is WorkerState.UP
                if worker.served:
                    draining = self._drain(worker, timeout_s if drain == "wait" else 0.0)
                    worker.closing = asyncio.create_task(draining, name=f"drain {name}")
        await self._notify()
        if worker.closing is not None:
            await asyncio.shield(worker.closing)
        if worker.served:
            self._spans += [*await worker.end(), worker.waited()]
        await self._forget(worker)

    async def _drain(self, worker: PoolWorker, wait_s: float) -> None:
        version = self._version
        await worker.run_out(wait_s, until=lambda: self._paused or self._version != version)
        await worker.close("abort", self._deadlines.pool_s)

    async def _forget(self, worker: PoolWorker) -> None:
        if worker in self._workers:
            worker.state = WorkerState.GONE
            self._workers.remove(worker)
            self._left.append(worker.name)
            self._watch.rates.forget(worker.name)
        await self._notify()

    # ---------------------------------------------------------------- death and return

    def _watch_workers(self) -> None:
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch.run(), name="watch the workers")

    async def _lost(self, worker: PoolWorker, error: str) -> None:
        if worker.state is not WorkerState.UP:
            return
        log.warning("%s is gone (%s); it restarts and catches up before it serves", worker.name, error)
        self._take_out(worker)
        await self._notify()

    def _take_out(self, worker: PoolWorker) -> None:
        worker.state, worker.since_s = WorkerState.DOWN, time.time()
        # A router with an older table could still reach it.
        closing = worker.close(self._mode or "abort", self._deadlines.pool_s)
        worker.closing = asyncio.create_task(closing, name=f"close {worker.name}")
        worker.recovering = asyncio.create_task(self._recover(worker), name=f"recover {worker.name}")

    async def _recover(self, worker: PoolWorker) -> None:
        """Bring a worker back, with the pool's version. Gives up after RECOVERY_TRIES."""
        for attempt in range(1, RECOVERY_TRIES + 1):
            try:
                await self._bring_back(worker)
                log.warning("%s serves version %s", worker.name, self._version)
                return
            # Any error: one that ended this task would leave the pool waiting for the worker.
            except Exception as error:
                log.warning(
                    "%s did not come back (try %d of %d): %s", worker.name, attempt, RECOVERY_TRIES, error
                )
                worker.state = WorkerState.DOWN
                await asyncio.sleep(min(30.0, 0.5 * 2**attempt))
        log.error("%s stays out of the pool after %d tries", worker.name, RECOVERY_TRIES)
        if not any(w.state is WorkerState.UP or (w is not worker and w.recovering) for w in self._workers):
            self._failure = f"no rollout worker is left: {worker.name} did not come back"
        worker.recovering = None
        await self._notify()

    async def _bring_back(self, worker: PoolWorker) -> None:
        await self._until_awake(worker)
        worker.starting = True
        try:
            await worker.start(self._rollout.start_timeout_s)
            worker.state = WorkerState.CATCHING_UP
            await self._until_supplied()
            async with self._control:
                await self._catch_up(worker)
                worker.incarnation += 1
                worker.state = WorkerState.UP
                self._spans.append(worker.waited())
                self._failure = None
        finally:
            worker.starting = False
            await self._notify()

    async def _until_awake(self, worker: PoolWorker) -> None:
        # Without a deadline: the devices are given away for as long as the trainer needs them.
        if self._asleep:
            log.warning("%s comes back when the pool wakes: others use its device", worker.name)
        async with self._changed:
            await self._changed.wait_for(lambda: not self._asleep)

    # ---------------------------------------------------------------- what can be seen

    @once_known
    async def states(self) -> dict[str, str]:
        """Return the state of every worker by name; of one that left, none."""
        return {one.name: one.described(self._watch.rates.shares.get(one.name)) for one in self._workers}

    @once_known
    async def stats(self) -> list[WorkerStats]:
        """Return the statistics of the live workers."""
        stats = await self._on_every_up("stats", self._rollout.pause_timeout_s)
        return [replace(one, share=self._watch.rates.shares.get(one.worker, 1.0)) for one in stats]

    @once_known
    async def drain_spans(self) -> list[Span]:
        """Return the intervals in which each live worker had requests, since the last call."""
        spans = await self._on_every_up("drain_spans", self._rollout.pause_timeout_s)
        left, self._spans = self._spans, []
        return [*left, *itertools.chain.from_iterable(spans)]

    async def shutdown(self) -> None:
        """End recoveries and engines. Workers that do not answer are killed by the caller."""
        if self._watching is not None:
            self._watching.cancel()
        for worker in self._workers:
            if worker.recovering is not None:
                worker.recovering.cancel()
        await asyncio.gather(
            *(within(w.handle.shutdown.remote(), 10, f"{w.name} to shut down") for w in self._workers),
            return_exceptions=True,
        )
