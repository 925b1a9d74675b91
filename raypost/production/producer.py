"""Producer: keeps groups of all tasks in flight, and hands out batches.

Owns the calls of the driver, and the waits behind them. What is started is decided by the Scheduler, what a
batch is by the BatchTaker, how production stops and goes on by Pausing; the moves of groups are the
ProduceContext's. One producer serves every composition: separate placement awaits `run` for ever, colocated
placement calls `produce_batch` once a step; both do the same passes.

    who waits                 for what                                ended by
    run                       a group to end, room, newer weights     any change; never returns while healthy
    take_batch                enough groups                           any change; its deadline
    pause                     pending groups to end                   the last of them; its deadline
    resume                    the engines                             the engines' own deadline

Invariants: after `pause` returned nothing is pending and nothing starts before `resume`; what was interrupted
is in the buffer, never lost; versions only grow; counters are read again after every await.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Generic, TypeVar

from raypost.errors import ConfigError, ProductionError, WaitTimeoutError
from raypost.ledger.ledger import Ledger
from raypost.observe.waits import waiting
from raypost.production import restore
from raypost.production.allocation import Allocation
from raypost.production.context import ProduceContext, TaskRuntime
from raypost.production.counted import counted
from raypost.production.pausing import Pausing
from raypost.production.scheduler import Scheduler
from raypost.production.take import BatchT, BatchTaker
from raypost.types import (
    Buffer,
    GroupCounts,
    GroupKey,
    ProduceBatchStatus,
    Rebuilt,
    RolloutControl,
    TakeStatus,
)
from raypost.types.pause import PauseMode

__all__ = ["Producer", "TaskRuntime"]

log = logging.getLogger(__name__)
T = TypeVar("T")

LOG_WAIT_S = 60.0
"""Seconds between two warnings that a consumer still waits."""


class Producer(Generic[BatchT]):
    """Continuous, multi-task production of groups."""

    def __init__(
        self,
        tasks: Sequence[TaskRuntime],
        buffer: Buffer[BatchT],
        control: RolloutControl,
        ledger: Ledger,
        allocation: Allocation,
        *,
        pause_timeout_s: float,
        take_timeout_s: float,
        num_slots: int | None = None,
        retryable: tuple[type[BaseException], ...] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start paused: nothing is produced before the first `resume`.

        `allocation` splits a batch over the tasks. `num_slots` are the sequences that all engines run at once; None:
        unknown, and all that the staleness bounds allow is in flight. `retryable` are errors that mean "the process
        that ran the group died".
        """
        buffer = counted(buffer)
        context = ProduceContext(
            tasks, buffer, ledger, allocation, retryable=retryable, clock=clock, num_slots=num_slots
        )
        self.progress = context.progress
        """Counters of what was asked for and taken."""
        self.pending = context.pending
        """Groups in flight."""
        self._context = context
        self._scheduler = Scheduler(context)
        self._taker = BatchTaker(context, buffer)
        self._pausing = Pausing(context, control, pause_timeout_s)
        self._take_timeout_s = take_timeout_s
        self._running = False

    # ---------------------------------------------------------------- production

    async def run(self) -> None:
        """Produce for ever. Raises, with its own traceback, whatever made production impossible.

        Raises ConfigError for a task whose rounds may end early: the consumer would wait for the rest.
        """
        early = [name for name, task in self._context.tasks.items() if task.strategy.may_end_early]
        if early:
            raise ConfigError(
                f"tasks {early} set should_continue, which would starve a consumer that waits for whole batches: "
                "use it only where produce_batch is called once a step"
            )
        if self._running:
            raise ProductionError("production is running already; one `run` serves all tasks")
        self._running = True
        try:
            while True:
                seen = self.pending.changed.count
                await self._context.locked(self._scheduler.advance)
                self._context.raise_failure()
                self._context.ledger.flush()
                await self.pending.changed.wait(seen)
        except BaseException as error:
            self._context.fail(error)
            raise
        finally:
            self._running = False

    def resize(self, num_slots: int) -> None:
        """Work for engines that run another number of sequences at once from now on."""
        self._context.slots.resize(num_slots)
        self.pending.changed.notify()

    async def produce_batch(self, step: int) -> ProduceBatchStatus:
        """Produce until the batch of `step` is there: NORMAL; EXPIRED_BATCH if only newer weights allow it.

        UPDATE_WEIGHT_AND_ABORT if production is paused. Raises what made production impossible, and
        WaitTimeoutError when a batch takes longer than one may.
        """

        async def produce() -> ProduceBatchStatus | None:
            await self._context.refresh(step)
            lacking = await self._scheduler.advance(last_step=step)
            self._context.raise_failure()
            return None if lacking else self._context.status

        return await self._until(step, produce)

    # ---------------------------------------------------------------- consumption

    async def take_batch(self, step: int) -> tuple[TakeStatus, BatchT | None]:
        """Lease the batch of `step`; waits until it is there. Asked again, the same batch.

        (status, None) with `num_groups` 0 asks to sync newer weights and then to take the same step again.
        Raises what ended production, ProductionError if the batch can never come, and WaitTimeoutError.
        """
        since_s = self._context.clock()
        return await self._until(step, lambda: self._taker.take(step, since_s))

    async def acknowledge(self, step: int, left_out: Mapping[GroupKey, str] | None = None) -> None:
        """Record that the batches up to `step` are trained. Idempotent.

        `left_out`: groups of these that the trainer did not train, and why; they end as FAILED.
        """
        await self._context.locked(lambda: self._taker.acknowledge(step, left_out or {}))

    async def _until(self, step: int, attempt: Callable[[], Coroutine[Any, Any, T | None]]) -> T:
        """Attempt under the lock, again after every change, until there is a result."""
        loop, changed = asyncio.get_running_loop(), self.pending.changed
        deadline = loop.time() + self._take_timeout_s
        while True:
            seen = changed.count
            result = await self._context.locked(attempt)
            if result is not None:
                return result
            while changed.count == seen:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(min(deadline, loop.time() + LOG_WAIT_S)):
                        with waiting(f"the batch of step {step}", self._take_timeout_s):
                            await changed.wait(seen)
                        break
                state = f"the consumer waits for the batch of step {step}: {self._context.describe()}"
                if loop.time() >= deadline:
                    raise WaitTimeoutError(f"{state}; it waited take_timeout_s={self._take_timeout_s:.0f}")
                log.warning(state)

    # ---------------------------------------------------------------- pause and resume

    async def pause(self, mode: PauseMode = "abort") -> float:
        """Stop production; returns the seconds it took. Idempotent.

        abort: what is generated comes back with its tokens, into the buffer. wait: requests run to their end
        first. keep: they freeze where they are, stay pending, and go on after `resume`; what must not find any
        pending (a checkpoint) pauses again with abort. What still hangs at the deadline is cancelled and put back
        as it was when it started. Raises WaitTimeoutError if the rollout pool did not confirm its pause.
        """
        return await self._pausing.pause(mode)

    async def resume(self, version: int) -> None:
        """Produce with `version`: engines first, the gate last. Idempotent.

        Raises ProductionError if `version` is older than the one before, and what the rollout pool raises.
        """
        self._scheduler.begin_rounds()
        await self._pausing.resume(version)

    async def go_on(self) -> None:
        """Have the rollout pool serve again, if production is not paused: it may have forgotten that it did."""
        await self._pausing.resume_pool()

    async def swap(self, version: int, swap: Callable[[int], Awaitable[None]]) -> float:
        """Go on with `version`; returns the seconds it took. Idempotent. As `pause` with keep, load and `resume`.

        `swap` is awaited with the gate for new groups closed, and brings the version into the engines. Raises
        ProductionError if `version` is older than the one before, and what `swap` raises: the gate stays closed then.
        """
        self._scheduler.begin_rounds()
        return await self._pausing.swap(version, swap)

    async def close(self) -> None:
        """Cancel everything in flight, for good. What must survive is paused and saved before."""
        await self._pausing.close()

    # ---------------------------------------------------------------- account and checkpoint

    async def counts(self) -> GroupCounts:
        """Return where every group is, measured: what buffer and pending set hold, not what they should hold."""
        return await self._context.locked(self._context.group_counts)

    async def state_dict(self, model_step: int | None = None) -> dict[str, Any]:
        """Return progress, samplers, buffer and ledger, as plain data and NumPy arrays.

        `model_step` is the step whose model is saved with it: leases up to it are acknowledged first. A lease
        beyond it is undone in the state, so the restored run takes that step again. Raises ProductionError
        unless production is paused with nothing pending.
        """

        async def save() -> dict[str, Any]:
            if not self.pending.is_stopped:
                raise ProductionError(f"pause with mode abort before saving: {self._context.describe()}")
            if model_step is not None:
                await self._taker.acknowledge(model_step, {})
            return await restore.saved(self._context)

        return await self._context.locked(save)

    async def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave; production stays paused until `resume`. Idempotent.

        Raises CheckpointError if the state is damaged, does not add up, or is of another configuration.
        """
        await self._context.locked(lambda: restore.restore(self._context, state))
        self._taker.forget()

    async def rebuild(self, incarnation: int) -> Rebuilt:
        """Become the producer whose process died, as its ledger, which this one was given, and the buffer say.

        Its groups in flight are dispatched again from what was stored of them, or from their prompts; it goes on
        producing if it did. `incarnation`: how often a producer of this run died. Idempotent. Raises ProductionError if
        ledger and buffer contradict each other, and what the rollout pool raises.
        """
        rebuilt = await self._context.locked(lambda: restore.rebuild(self._context, incarnation))
        await self._pausing.take_over()
        return rebuilt
