"""RolloutController: the pool of rollout workers as one.

Owns the pause gate of the pool, the state of every worker, the routing table, and bringing a dead worker back:
restart (by Ray), start the engine, load the current weights, and only then serve. Owns no weights but the
refs of the current version, kept so that a worker that comes back, or wakes without weights, can catch up. Requests
do not pass here: routers (routing.py) send them to the workers of the table, and report those found dead.

    worker:  STARTING -> UP -> DOWN -> (engine started, current version loaded) -> UP

A pool that sleeps has given its devices to others: no engine is started meanwhile, so a worker that died comes back
when the pool wakes, which is with the next `load_weights` or `resume`.

Invariants: the table has no worker that is not UP, and its epoch grows with every change; an UP worker holds the
pool's version, unless a swap is under way, or the pool sleeps, and then it sleeps too; between `pause` and `resume` no
worker generates, whatever the mode, not even one that was reported dead and is alive; a request that comes is an
"abort" without tokens, however old the table is by which it came, because every worker's gate is closed; none generates
with the old version once a swap has returned. Pause, sleep, resume, swap, weight loads and a worker's return take one
lock, so a worker that comes back in the middle of a sync cannot serve old weights; it comes back paused, or serving, as
the others do. A request that was frozen in a dead worker is an "abort" without
tokens too. Which pause overrules which is decided by the workers alone; the pool knows the mode in force from their
answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import ray
from ray.actor import ActorHandle

from actors.engine.life import EngineInfo
from actors.remote import CallBatches, within
from actors.rollout.routing import GONE, TABLE_S, Route, RoutingTable
from raypost.config import RolloutConfig
from raypost.errors import (
    NoWorkersError,
    RaypostError,
    StaleWeightsError,
    WaitTimeoutError,
    WeightError,
)
from raypost.pause import PauseDeadlines, PauseMode
from raypost.types import FloatArray, IntArray, Ref, Span, WeightReport, WorkerStats
from raypost.weights.manifest import Bytes, Manifest

log = logging.getLogger(__name__)

RECOVERY_TRIES = 5


class WorkerState(StrEnum):
    """The state of a worker in the pool."""

    STARTING = "starting"
    UP = "up"
    DOWN = "down"


@dataclass(slots=True)
class PoolWorker:
    """A worker and its state, as the pool knows them."""

    name: str
    handle: ActorHandle
    state: WorkerState = WorkerState.STARTING
    incarnation: int = 0
    """How often it was brought back."""
    recovering: asyncio.Task[None] | None = None
    closing: asyncio.Task[None] | None = None
    """Closes its gate, in case it is only out of reach of whoever reported it dead."""
    starting: bool = False
    """Whether it may have an engine although it is not UP: it is on its way back."""


@dataclass(slots=True, frozen=True)
class _Weights:
    manifest: Manifest
    buckets: list[Ref[Bytes]] = field(repr=False)


class RolloutController(CallBatches):
    """Says which workers serve, and keeps the pool on one version."""

    def __init__(
        self, workers: dict[str, ActorHandle], rollout: RolloutConfig, sync_timeout_s: float
    ) -> None:
        """`sync_timeout_s`: longest time all workers may take to load one version."""
        super().__init__()
        self._rollout = rollout
        self._sync_timeout_s = sync_timeout_s
        self._workers = [PoolWorker(name, handle) for name, handle in workers.items()]
        self._weights: _Weights | None = None
        self._staged: _Weights | None = None
        self._deadlines = PauseDeadlines(rollout.pause_timeout_s)
        self._paused = True
        self._mode: PauseMode | None = None
        """Of the pause in force or under way, as the workers say."""
        self._pausing = False
        """Whether the lock is held by a pause."""
        self._asleep = False
        """True from the call of `sleep` on: no engine is started."""
        self._failure: str | None = None
        """Why no worker will come any more."""
        self._watching: asyncio.Task[None] | None = None
        self._control = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._table = self._table_of_epoch(0)

    def __repr__(self) -> str:
        """Return the role's name."""
        return "rollout-controller"

    @property
    def _version(self) -> int | None:
        return None if self._weights is None else self._weights.manifest.version

    async def start(self) -> list[EngineInfo]:
        """Start all engines at once. A worker that dies meanwhile starts again, RECOVERY_TRIES times at most.

        Raises the first failing worker's error, or WaitTimeoutError.
        """
        infos = await asyncio.gather(*(self._start_first(worker) for worker in self._workers))
        for worker in self._workers:
            worker.state = WorkerState.UP
        await self._notify()
        self._watching = asyncio.create_task(self._watch(), name="watch the workers")
        return infos

    async def _start_first(self, worker: PoolWorker) -> EngineInfo:
        for attempt in range(1, RECOVERY_TRIES + 1):
            try:
                return await self._start_engine(worker)
            except GONE as error:
                died = error
                log.warning(
                    "%s died while its engine started (try %d of %d): %s",
                    worker.name, attempt, RECOVERY_TRIES, type(error).__name__,
                )  # fmt: skip
                await asyncio.sleep(min(30.0, 0.5 * 2**attempt))
        raise RaypostError(
            f"{worker.name} died {RECOVERY_TRIES} times while its engine started ({type(died).__name__}): its log says "
            "more, and the system's log whether memory ran out"
        ) from died

    # ---------------------------------------------------------------- routing

    async def routes(self, known: int) -> RoutingTable:
        """Return the routing table once its epoch is above `known`, or as it is after TABLE_S."""
        async with self._changed:
            newer = self._changed.wait_for(lambda: self._table.epoch > known)
            with contextlib.suppress(WaitTimeoutError):
                await within(newer, TABLE_S, f"a routing table after epoch {known}")
        return self._table

    async def report(self, worker: str, incarnation: int, error: str) -> None:
        """Take note that a router found a worker dead. What it says of a former incarnation is known already."""
        for one in self._workers:
            if (one.name, one.incarnation) == (worker, incarnation):
                await self._lost(one, error)

    def _table_of_epoch(self, epoch: int) -> RoutingTable:
        up = (worker for worker in self._workers if worker.state is WorkerState.UP)
        return RoutingTable(
            epoch=epoch,
            paused=self._paused,
            up=tuple(Route(worker.name, worker.incarnation, worker.handle) for worker in up),
            states=", ".join(f"{worker.name} is {worker.state}" for worker in self._workers),
            failure=self._failure,
        )

    async def _notify(self) -> None:
        """Push the table to all routers, and wake what waits here."""
        async with self._changed:
            self._table = self._table_of_epoch(self._table.epoch + 1)
            self._changed.notify_all()

    # ---------------------------------------------------------------- pause, weights, resume

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Close the gate, then stop the engines as `mode` says. Returns when no engine is generating. Idempotent.

        abort: open requests come back with their tokens. keep: they freeze in the engines until `resume`. wait:
        they run to their end, or are aborted after half of `pause_timeout_s`. A stricter mode (wait < keep <
        abort) overrules the pause in force, one under way included; a gentler one changes nothing.
        """
        self._paused = True
        await self._notify()
        if self._pausing:
            # Not behind the lock: if this mode is stricter, the workers end the pause that holds it.
            await self._stop_workers(mode)
        async with self._control:
            self._paused = True
            self._pausing = True
            try:
                await self._stop_workers(mode)
            finally:
                self._pausing = False

    async def _stop_workers(self, mode: PauseMode) -> None:
        self._mode = self._mode or mode
        in_force = await self._on_every_up("pause", self._deadlines.pool_s, mode)
        # A worker that was reported dead may have been stopped more strictly than the others.
        self._mode = "keep" if "keep" in in_force else next(iter(in_force), self._mode)
        await self._until_closed()

    async def _until_closed(self) -> None:
        """Wait for the gates of workers that were reported dead and may be alive."""
        await asyncio.gather(*(worker.closing for worker in self._workers if worker.closing is not None))

    async def sleep(self, keep_weights: bool) -> None:
        """Give the engines' devices to others until the next `load_weights` or `resume`, which wake what they need.

        Keys and values are dropped. `keep_weights`: weights stay in main memory; else they are dropped too, and
        `resume` loads the pool's version again unless another was loaded. On CPU the same rules hold, but no memory is
        freed. Returns when no engine is on a device, and none is being started. Idempotent. Raises RaypostError unless
        the pool is paused without frozen requests.
        """
        async with self._control:
            if not self._paused or self._mode == "keep":
                now = "paused with 'keep'" if self._paused else f"serving version {self._version}"
                raise RaypostError(f"the pool is {now}: pause it with 'abort' or 'wait' before it sleeps")
            self._asleep = True
        await self._until_none_starts()
        async with self._control:
            if not self._asleep:
                raise RaypostError(
                    "the pool was woken while it fell asleep: sleep and wake one after the other"
                )
            await self._on_every_up("sleep", self._rollout.pause_timeout_s, keep_weights)

    async def _until_none_starts(self) -> None:
        """Wait for workers that are on their way back: an engine takes its device when it starts."""
        names = ", ".join(worker.name for worker in self._workers if worker.starting)
        async with self._changed:
            none_starts = self._changed.wait_for(lambda: not any(w.starting for w in self._workers))
            await within(
                none_starts, self._rollout.start_timeout_s, f"{names} to come back before the pool sleeps"
            )

    async def resume(self, version: int) -> None:
        """Engines first, gate last. A pool that sleeps wakes, with the weights it has or last loaded.

        Raises StaleWeightsError unless the pool holds `version`. Idempotent.
        """
        async with self._control:
            if version != self._version:
                raise StaleWeightsError(f"cannot serve version {version}: the pool holds {self._version}")
            if self._asleep:
                await self._load_every_up()
            await self._on_every_up("resume", self._rollout.pause_timeout_s, version)
            self._paused = False
            self._mode = None
            self._asleep = False
        await self._notify()

    async def stage_weights(self, manifest: Manifest, buckets: list[Ref[Bytes]]) -> None:
        """Bring a version close to every live engine while requests run, so that `load_weights` takes less time.

        A worker that dies meanwhile, or is not there yet, needs nothing but `load_weights`. Raises WeightError if
        what arrived differs.
        """
        await self._on_every_up("stage_weights", self._sync_timeout_s, manifest, *buckets)
        self._staged = _Weights(manifest, buckets)

    async def swap(self, version: int) -> None:
        """Change the pool to a version that `stage_weights` brought: one call to each worker, which goes on by itself.

        Open requests freeze and go on with the new version. A worker that dies meanwhile catches up when it is back.
        Idempotent. Raises StaleWeightsError unless `version` is staged, RaypostError if the pool is paused, and
        WeightError if a worker holds something else than was sent; its gate stays closed then.
        """
        async with self._control:
            if version == self._version and not self._paused:
                return
            if self._paused:
                raise RaypostError(f"the pool is paused: load version {version} and resume instead")
            if self._staged is None or self._staged.manifest.version != version:
                raise StaleWeightsError(f"cannot swap to version {version}: stage it first")
            self._weights, self._staged = self._staged, None
            await self._load_every_up("swap")
            await self._until_closed()

    async def load_weights(self, manifest: Manifest, buckets: list[Ref[Bytes]]) -> list[WeightReport]:
        """Load a version into every live worker; return what each says it holds afterwards. A pool that sleeps wakes.

        A worker that dies meanwhile catches up when it is back. Raises WeightError if one holds something
        else than was sent, and NoWorkersError if none comes back in time to hold it.
        """
        deadline = time.monotonic() + self._sync_timeout_s
        async with self._control:
            self._weights, self._staged = _Weights(manifest, buckets), None
            self._asleep = False
        await self._notify()
        while True:
            async with self._control:
                reports = await self._load_every_up()
            if reports:
                return reports
            await self._until_one_is_up(deadline)

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

    async def _load_every_up(self, method: str = "load_weights") -> list[WeightReport]:
        """Load the pool's version into the workers that hold another or none."""
        assert self._weights is not None, "the pool has a version"
        sent = self._weights
        reports = await self._on_every_up(method, self._sync_timeout_s, sent.manifest, *sent.buckets)
        for report in reports:
            self._verify(report)
        return reports

    async def canary(self, prompt_ids: IntArray) -> list[tuple[str, FloatArray]]:
        """Return (worker, logprobs of the prompt's tokens) for every live worker, also while paused.

        Raises RaypostError while the pool sleeps.
        """
        async with self._control:
            if self._asleep:
                raise RaypostError(
                    "the pool sleeps and others use its devices: load a version, or resume it, first"
                )
            return await self._on_every_up("canary", self._sync_timeout_s, prompt_ids, named=True)

    def _verify(self, report: WeightReport) -> None:
        assert self._weights is not None, "weights are verified only after they were set"
        sent = self._weights.manifest
        if (report.version, report.digest) != (sent.version, sent.digest):
            raise WeightError(
                f"{report.worker} holds version {report.version} with digest {report.digest}, but version "
                f"{sent.version} with digest {sent.digest} was sent"
            )

    async def _on_every_up(self, method: str, timeout_s: float, *args: Any, named: bool = False) -> list[Any]:
        """Call every UP worker. Those that died are recovered; other errors are raised after all calls ended."""
        up = [worker for worker in self._workers if worker.state is WorkerState.UP]
        calls = [
            within(getattr(worker.handle, method).remote(*args), timeout_s, f"{worker.name}.{method}")
            for worker in up
        ]
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

    # ---------------------------------------------------------------- death and return

    async def _watch(self) -> None:
        """Ask all workers again and again whether they are alive."""
        while True:
            await asyncio.sleep(self._rollout.liveness_timeout_s / 4)
            up = [worker for worker in self._workers if worker.state is WorkerState.UP]
            await asyncio.gather(*(self._ping(worker) for worker in up))

    async def _ping(self, worker: PoolWorker) -> None:
        incarnation, limit_s = worker.incarnation, self._rollout.liveness_timeout_s
        try:
            # A worker finds out about its engine by itself, and ends.
            await self._answer_of(worker, 1.5 * limit_s)
        except GONE as error:
            if worker.incarnation == incarnation:
                await self._lost(worker, type(error).__name__)
        except WaitTimeoutError as error:
            if worker.incarnation == incarnation and worker.state is WorkerState.UP:
                ray.kill(worker.handle, no_restart=False)
                await self._lost(worker, str(error))

    async def _answer_of(self, worker: PoolWorker, within_s: float) -> None:
        """Wait until a worker says that it is alive. Asked twice, as an engine is: see EngineLife.answers."""
        try:
            await within(worker.handle.ping.remote(), within_s, f"{worker.name} to say that it is alive")
        except WaitTimeoutError:
            what = f"{worker.name} to say that it is alive, after {within_s:.0f} s in which it did not"
            await within(worker.handle.ping.remote(), within_s / 4, what)

    async def _lost(self, worker: PoolWorker, error: str) -> None:
        if worker.state is not WorkerState.UP:
            return
        worker.state = WorkerState.DOWN
        log.warning("%s is gone (%s); it restarts and catches up before it serves", worker.name, error)
        worker.closing = asyncio.create_task(self._close(worker), name=f"close {worker.name}")
        worker.recovering = asyncio.create_task(self._recover(worker), name=f"recover {worker.name}")
        await self._notify()

    async def _close(self, worker: PoolWorker) -> None:
        """Close the gate of a worker that may be alive. A router with an older table could still reach it."""
        pause = worker.handle.pause.remote(self._mode or "abort")
        try:
            await within(pause, self._deadlines.pool_s, f"{worker.name} to pause")
        except GONE:
            return
        except WaitTimeoutError as error:
            log.warning("%s is not known to have stopped: %s", worker.name, error)

    async def _recover(self, worker: PoolWorker) -> None:
        """Bring a worker back, with the pool's version. Gives up after RECOVERY_TRIES."""
        for attempt in range(1, RECOVERY_TRIES + 1):
            try:
                await self._bring_back(worker)
                log.warning("%s serves version %s again", worker.name, self._version)
                return
            # Any error: one that ended this task would leave the pool waiting for the worker.
            except Exception as error:
                log.warning(
                    "%s did not come back (try %d of %d): %s", worker.name, attempt, RECOVERY_TRIES, error
                )
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
            await self._start_engine(worker)
            async with self._control:
                await self._catch_up(worker)
                worker.incarnation += 1
                worker.state = WorkerState.UP
        finally:
            worker.starting = False
            await self._notify()

    async def _until_awake(self, worker: PoolWorker) -> None:
        # Without a deadline: the devices are given away for as long as the trainer needs them.
        if self._asleep:
            log.warning("%s comes back when the pool wakes: others use its device", worker.name)
        async with self._changed:
            await self._changed.wait_for(lambda: not self._asleep)

    async def _start_engine(self, worker: PoolWorker) -> EngineInfo:
        timeout_s = self._rollout.start_timeout_s
        start: Awaitable[EngineInfo] = worker.handle.start.remote()
        return await within(start, timeout_s, f"the engine of {worker.name} to start")

    async def _catch_up(self, worker: PoolWorker) -> None:
        # Also while the pool serves: a worker that was only out of reach may still serve another version.
        pause = worker.handle.pause.remote(self._mode or "abort")
        await within(pause, self._deadlines.pool_s, f"{worker.name} to pause")
        if self._weights is None:
            return
        load = worker.handle.load_weights.remote(self._weights.manifest, *self._weights.buckets)
        self._verify(await within(load, self._sync_timeout_s, f"{worker.name} to catch up"))
        if not self._paused:
            resume = worker.handle.resume.remote(self._version)
            await within(resume, self._rollout.pause_timeout_s, f"{worker.name} to resume")

    # ---------------------------------------------------------------- what can be seen

    async def states(self) -> dict[str, str]:
        """Return the state of every worker by name."""
        return {worker.name: str(worker.state) for worker in self._workers}

    async def stats(self) -> list[WorkerStats]:
        """Return the statistics of the live workers."""
        return await self._on_every_up("stats", self._rollout.pause_timeout_s)

    async def drain_spans(self) -> list[Span]:
        """Return the intervals in which each live worker had requests, since the last call."""
        spans = await self._on_every_up("drain_spans", self._rollout.pause_timeout_s)
        return list(itertools.chain.from_iterable(spans))

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
