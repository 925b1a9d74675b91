"""PoolWatch: asks the workers of a pool again and again whether they are alive, and compares how fast they are.

Owns the questions and what counts as an answer; what becomes of a worker that is lost is the pool's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import ray

from actors.remote import within
from actors.rollout.member import PoolWorker, WorkerState
from actors.rollout.rates import Rates
from actors.rollout.routing import GONE
from raypost.config import RolloutConfig
from raypost.errors import WaitTimeoutError
from raypost.types import WorkerStats

log = logging.getLogger(__name__)

SLOW_RESTARTS = 2
"""A worker that is slow again after so many restarts stays slow."""


class PoolWatch:
    """The questions to the workers of one pool."""

    def __init__(
        self,
        rollout: RolloutConfig,
        workers: Callable[[], Sequence[PoolWorker]],
        stats: Callable[[], Awaitable[list[WorkerStats]]],
        lost: Callable[[PoolWorker, str], Awaitable[None]],
        changed: Callable[[], Awaitable[None]],
    ) -> None:
        """`workers`: those of now. `lost` is told of a worker and why, `changed` that shares are others."""
        self._rollout = rollout
        self._workers = workers
        self._stats = stats
        self._lost = lost
        self._changed = changed
        self.rates = Rates()

    async def run(self) -> None:
        """Ask all workers that are UP, for ever."""
        while True:
            await asyncio.sleep(self._rollout.liveness_timeout_s / 4)
            await asyncio.gather(*(self._ping(worker) for worker in self._up()))
            await self._look_for_slow()

    def _up(self) -> list[PoolWorker]:
        return [worker for worker in self._workers() if worker.state is WorkerState.UP]

    async def _look_for_slow(self) -> None:
        """Give slow workers less, and restart them where that is configured."""
        before = dict(self.rates.shares)
        slow = self.rates.look(await self._stats())
        for worker in self._up():
            if worker.name not in slow:
                continue
            log.warning(
                "%s makes %.2g of the tokens a second and request that its siblings make; it is given less",
                worker.name, self.rates.shares[worker.name],
            )  # fmt: skip
            if self._rollout.slow_worker == "restart" and worker.slow_restarts < SLOW_RESTARTS:
                worker.slow_restarts += 1
                self.rates.forget(worker.name)
                ray.kill(worker.handle, no_restart=False)
                await self._lost(worker, "it was slow")
        if self.rates.shares != before:
            await self._changed()

    async def _ping(self, worker: PoolWorker) -> None:
        incarnation, limit_s = worker.incarnation, self._rollout.liveness_timeout_s
        try:
            # A worker finds out about its engine by itself, and ends.
            await self._answer_of(worker, 1.5 * limit_s)
        except GONE as error:
            survived = await worker.survived(type(error).__name__)
            if worker.incarnation == incarnation and not survived:
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
