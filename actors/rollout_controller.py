"""RolloutController: the pool of rollout workers as one Generator.

Owns routing, the pause gate of the pool, which worker is in which state, and bringing a dead worker back:
restart (by Ray), start the engine, load the current weights, and only then serve. Owns no weights but the
refs of the current version, kept so that a worker that comes back can catch up.

    worker:  STARTING -> UP -> DOWN -> (engine started, current version loaded) -> UP

Invariants: nothing is routed to a worker that is not UP; an UP worker holds the pool's version; between
`pause` and `resume` no worker generates, whatever the mode, and a request that comes is an "abort" without
tokens. Pause, resume, weight loads and a worker's return take one lock, so a worker that comes back in the
middle of a sync cannot serve old weights; it comes back paused as the others are. What a dead worker had
frozen comes back as an "abort" without tokens and continues elsewhere from the tokens it came with.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import ray
from ray.actor import ActorHandle

from actors.remote import ACTOR_ERRORS, CallBatches, ManyCalls, within
from raypost.config import PauseMode, RolloutConfig
from raypost.errors import (
    EngineLostError,
    NoWorkersError,
    RaypostError,
    StaleWeightsError,
    WaitTimeoutError,
    WeightError,
)
from raypost.metrics import SpanLog
from raypost.pause import PauseDeadlines, stricter
from raypost.types import (
    FloatArray,
    GenerateRequest,
    GenerateResult,
    IntArray,
    Span,
    WeightReport,
    WorkerStats,
)
from raypost.weights import Manifest

log = logging.getLogger(__name__)

RECOVERY_TRIES = 5
MANY_REQUESTS = 64
"""Requests that travel together at most."""
GONE = (*ACTOR_ERRORS, EngineLostError)
"""A worker that has to be brought back: it died, or Ray started it again before anybody noticed."""


class WorkerState(StrEnum):
    """Where a worker of the pool stands."""

    STARTING = "starting"
    UP = "up"
    DOWN = "down"


@dataclass(slots=True)
class _Worker:
    name: str
    handle: ActorHandle
    spans: SpanLog
    generate: ManyCalls
    state: WorkerState = WorkerState.STARTING
    outstanding: int = 0
    busy_since: float | None = None
    """Since when it works on requests without a pause; None while it does not."""
    restarts: int = 0
    recovering: asyncio.Task[None] | None = None

    def account(self, working: bool) -> None:
        """Close the interval in which it had requests, and open the next one if it still works on some."""
        now = time.time()
        if self.busy_since is not None:
            self.spans.add("rollout", self.busy_since, now)
        self.busy_since = now if working and self.outstanding else None


@dataclass(slots=True, frozen=True)
class _Weights:
    manifest: Manifest
    buckets: list[ray.ObjectRef] = field(repr=False)


class RolloutController(CallBatches):
    """Routes generation to live workers and keeps the pool on one version."""

    def __init__(
        self, workers: dict[str, ActorHandle], rollout: RolloutConfig, sync_timeout_s: float
    ) -> None:
        super().__init__()
        self._rollout, self._sync_timeout_s = rollout, sync_timeout_s
        self._workers = [
            _Worker(name, handle, SpanLog(name), ManyCalls(handle, "generate", MANY_REQUESTS))
            for name, handle in workers.items()
        ]
        self._weights: _Weights | None = None
        self._version: int | None = None
        self._deadlines = PauseDeadlines(rollout.pause_timeout_s)
        self._paused = True
        self._mode: PauseMode | None = None
        """Of the pause in force or under way."""
        self._pausing = False
        """Whether it is a pause that holds the lock."""
        self._failure: Exception | None = None
        self._control = asyncio.Lock()
        self._changed = asyncio.Condition()

    def __repr__(self) -> str:
        return "rollout-controller"

    async def start(self) -> list[dict[str, Any]]:
        """Start all engines at once. Raises what the first failing worker raised, or WaitTimeoutError."""
        infos = await asyncio.gather(*(self._start_engine(worker) for worker in self._workers))
        for worker in self._workers:
            worker.state = WorkerState.UP
        return infos

    # ---------------------------------------------------------------- generation

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Continue `request.token_ids` on the least loaded worker.

        Paused: "abort" without tokens. A worker that dies is replaced by another one, from the tokens the
        request came with. A request past its deadline fails. Raises NoWorkersError when all are gone for good.
        """
        deadline = time.monotonic() + self._rollout.request_timeout_s
        while not self._paused:
            worker = await self._pick(deadline)
            if worker is None:
                continue
            try:
                return await self._generate_on(worker, request, deadline)
            except GONE as error:
                await self._lost(worker, error)
            except WaitTimeoutError as error:
                return GenerateResult.nothing("error", worker.name, str(error))
        return GenerateResult.nothing("abort")

    async def _pick(self, deadline: float) -> _Worker | None:
        """An UP worker; None if the pool was paused while waiting for one."""
        up = [worker for worker in self._workers if worker.state is WorkerState.UP]
        if up:
            return min(up, key=lambda worker: worker.outstanding)
        if self._failure is not None:
            raise self._failure
        states = ", ".join(f"{worker.name} is {worker.state}" for worker in self._workers)
        async with self._changed:
            try:
                await within(
                    self._changed.wait(), max(0.0, deadline - time.monotonic()), f"a rollout worker: {states}"
                )
            except WaitTimeoutError as error:
                raise NoWorkersError(str(error)) from error
        return None

    async def _generate_on(
        self, worker: _Worker, request: GenerateRequest, deadline: float
    ) -> GenerateResult:
        worker.outstanding += 1
        if worker.busy_since is None:
            worker.account(working=True)
        left = max(0.0, deadline - time.monotonic())
        try:
            return await within(
                worker.generate(request), left, f"{worker.name} to generate {request.request_id}"
            )
        finally:
            worker.outstanding -= 1
            if worker.outstanding == 0:
                worker.account(working=False)

    # ---------------------------------------------------------------- pause, weights, resume

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Close the gate, then stop the engines as `mode` says. Returns when no engine is generating. Idempotent.

        abort: open requests come back with their tokens. keep: they freeze in the engines until `resume`. wait:
        they run to their end, or are aborted after half of `pause_timeout_s`. A stricter mode (wait < keep <
        abort) overrules the pause in force, one under way included; a gentler one changes nothing.
        """
        self._paused = True
        overruled, self._mode = self._mode, stricter(self._mode, mode)
        if self._pausing and self._mode != overruled:
            # The workers end the pause that holds the lock.
            await self._pause_workers()
        await self._notify()
        async with self._control:
            self._paused, self._pausing = True, True
            try:
                self._mode = stricter(self._mode, mode)
                await self._pause_workers()
            finally:
                self._pausing = False
            for worker in self._workers:
                worker.account(working=False)

    async def _pause_workers(self) -> None:
        await self._on_every_up("pause", self._deadlines.pool_s, self._mode)

    async def resume(self, version: int) -> None:
        """Engines first, gate last. Raises StaleWeightsError unless the pool holds `version`. Idempotent."""
        async with self._control:
            if version != self._version:
                raise StaleWeightsError(f"cannot serve version {version}: the pool holds {self._version}")
            await self._on_every_up("resume", self._rollout.pause_timeout_s, version)
            self._paused, self._mode = False, None
            for worker in self._workers:
                worker.account(working=True)
        await self._notify()

    async def load_weights(self, manifest: Manifest, buckets: list[ray.ObjectRef]) -> list[WeightReport]:
        """Load a version into every live worker; what each of them says it holds afterwards.

        A worker that dies meanwhile catches up when it is back. Raises WeightError if one holds something
        else than was sent, and WaitTimeoutError if no worker is left to hold it.
        """
        deadline = time.monotonic() + self._sync_timeout_s
        async with self._control:
            self._weights, self._version = _Weights(manifest, buckets), manifest.version
        while True:
            async with self._control:
                reports = await self._on_every_up("load_weights", self._sync_timeout_s, manifest, *buckets)
                for report in reports:
                    self._verify(report)
            if reports:
                return reports
            await self._pick(deadline)

    async def canary(self, prompt_ids: IntArray) -> list[tuple[str, FloatArray]]:
        """(worker, logprobs of the prompt's tokens) for every live worker, also while paused."""
        async with self._control:
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
        """Call every UP worker; those that died are sent to recovery, other errors are raised after all ended."""
        up = [worker for worker in self._workers if worker.state is WorkerState.UP]
        calls = [
            within(getattr(worker.handle, method).remote(*args), timeout_s, f"{worker.name}.{method}")
            for worker in up
        ]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        results, errors = [], []
        for worker, outcome in zip(up, outcomes, strict=True):
            if isinstance(outcome, GONE):
                await self._lost(worker, outcome)
            elif isinstance(outcome, BaseException):
                errors.append(outcome)
            else:
                results.append((worker.name, outcome) if named else outcome)
        if errors:
            raise errors[0]
        return results

    # ---------------------------------------------------------------- death and return

    async def _lost(self, worker: _Worker, error: BaseException) -> None:
        if worker.state is not WorkerState.UP:
            return
        worker.state = WorkerState.DOWN
        log.warning(
            "%s is gone (%s); it restarts and catches up before it serves", worker.name, type(error).__name__
        )
        worker.recovering = asyncio.create_task(self._recover(worker), name=f"recover {worker.name}")

    async def _recover(self, worker: _Worker) -> None:
        """Bring a worker back, with the pool's version. Gives up after RECOVERY_TRIES."""
        for attempt in range(1, RECOVERY_TRIES + 1):
            try:
                await self._start_engine(worker)
                async with self._control:
                    await self._catch_up(worker)
                    worker.state = WorkerState.UP
                    worker.restarts += 1
                log.warning("%s serves version %s again", worker.name, self._version)
                await self._notify()
                return
            except (*ACTOR_ERRORS, RaypostError) as error:
                log.warning(
                    "%s did not come back (try %d of %d): %s", worker.name, attempt, RECOVERY_TRIES, error
                )
                await asyncio.sleep(min(30.0, 0.5 * 2**attempt))
        log.error("%s stays out of the pool after %d tries", worker.name, RECOVERY_TRIES)
        if not any(w.state is WorkerState.UP or (w is not worker and w.recovering) for w in self._workers):
            self._failure = NoWorkersError(f"no rollout worker is left: {worker.name} did not come back")
        worker.recovering = None
        await self._notify()

    async def _start_engine(self, worker: _Worker) -> dict[str, Any]:
        timeout_s = self._rollout.start_timeout_s
        return await within(worker.handle.start.remote(), timeout_s, f"the engine of {worker.name} to start")

    async def _catch_up(self, worker: _Worker) -> None:
        if self._mode is not None:
            pause = worker.handle.pause.remote(self._mode)
            await within(pause, self._deadlines.pool_s, f"{worker.name} to pause")
        if self._weights is None:
            return
        load = worker.handle.load_weights.remote(self._weights.manifest, *self._weights.buckets)
        self._verify(await within(load, self._sync_timeout_s, f"{worker.name} to catch up"))
        if not self._paused:
            resume = worker.handle.resume.remote(self._version)
            await within(resume, self._rollout.pause_timeout_s, f"{worker.name} to resume")

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # ---------------------------------------------------------------- what can be seen

    async def states(self) -> dict[str, str]:
        """State of every worker by name."""
        return {worker.name: str(worker.state) for worker in self._workers}

    async def stats(self) -> list[WorkerStats]:
        """Statistics of the live workers."""
        return await self._on_every_up("stats", self._rollout.pause_timeout_s)

    async def drain_spans(self) -> list[Span]:
        """Intervals in which each worker had requests, since the last call."""
        for worker in self._workers:
            if worker.busy_since is not None:
                worker.account(working=True)
        return [span for worker in self._workers for span in worker.spans.drain()]

    async def shutdown(self) -> None:
        """End recoveries and engines. Workers that do not answer are the caller's to kill."""
        for worker in self._workers:
            if worker.recovering is not None:
                worker.recovering.cancel()
        await asyncio.gather(
            *(within(w.handle.shutdown.remote(), 10, f"{w.name} to shut down") for w in self._workers),
            return_exceptions=True,
        )
