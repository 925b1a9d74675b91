"""Producer: keeps groups of all tasks in flight, and hands out batches.

Owns the schedule: which step is produced, when production is ahead, pause and resume, the checkpoint. The
moves of groups are the ProduceContext's, the rules of a take are take.py's. One producer serves every
composition: separated placement awaits `run` for ever, colocated placement calls `produce_batch` once a step;
both go through the same pass.

    who waits                 for what                                ended by
    run                       a group to end, room, newer weights     any change; never returns while healthy
    take_batch                enough groups                           any change; its deadline
    pause                     pending groups to drain                 the last of them; its deadline
    resume                    the engines                             the engines' own deadline

Invariants: after `pause` returned nothing is pending and nothing starts before `resume`; what was interrupted
is in the buffer, never lost; versions only grow; counters are read after every await.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any

from raypost.context import ProduceContext, TaskRuntime
from raypost.errors import ProductionError, WaitTimeoutError
from raypost.ledger import Ledger
from raypost.packed import PackedGroups
from raypost.protocols import Buffer, RolloutControl, TakeStatus
from raypost.take import Take, take_again, try_take
from raypost.types import GroupCounts, ProduceBatchStatus, Status

__all__ = ["Producer", "TaskRuntime"]

log = logging.getLogger(__name__)

PAUSE_RESEND_S = 5.0
"""An abort can miss a request that was on its way: it is sent again this often until all is drained."""
CANCEL_GRACE_S = 5.0
"""How long a cancelled group may take to end before it is left behind."""
LOG_WAIT_S = 60.0
"""A consumer that waits says so this often."""


class _Pass(Enum):
    """How one pass of production ended."""

    COMPLETE = auto()
    """The step has all its groups; the next one may be begun."""
    LACKING = auto()
    """Groups are missing and in flight."""
    AHEAD = auto()
    """Nothing to do before the consumer or the weights move."""
    CLOSED = auto()
    """Paused, or ended by a failure."""


class Producer:
    """Continuous, multi-task production of groups."""

    def __init__(
        self,
        tasks: Sequence[TaskRuntime],
        buffer: Buffer,
        control: RolloutControl,
        ledger: Ledger,
        *,
        batch_size: int,
        pause_timeout_s: float,
        take_timeout_s: float = 3600.0,
        retryable: tuple[type[BaseException], ...] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`batch_size` counts groups over all tasks. `retryable` are errors that mean "the process that ran
        the group died". Paused until the first `resume`."""
        self._context = ProduceContext(
            tasks, buffer, ledger, batch_size=batch_size, retryable=retryable, clock=clock
        )
        self._control = control
        self._pause_timeout_s, self._take_timeout_s = pause_timeout_s, take_timeout_s
        self._transition = asyncio.Lock()
        self._round: tuple[int, dict[str, bool]] = (0, {})
        self._running = False
        self._last_take: TakeStatus | None = None

    # ---------------------------------------------------------------- production

    async def run(self) -> None:
        """Produce for ever. Raises, with its own traceback, whatever made production impossible."""
        if self._running:
            raise ProductionError("production is running already; one `run` serves all tasks")
        self._running = True
        changed = self._context.pending.changed
        try:
            while True:
                seen = changed.count
                outcome = await self._context.locked(self._pass)
                self._context.raise_failure()
                if outcome is not _Pass.COMPLETE:
                    await changed.wait(seen)
        except BaseException as error:
            self._context.fail(error)
            raise
        finally:
            self._running = False

    async def produce_batch(self, step: int) -> ProduceBatchStatus:
        """Produce until the batch of `step` is there: NORMAL. EXPIRED_BATCH if only newer weights allow it,
        UPDATE_WEIGHT_AND_ABORT if production is paused. Raises what made production impossible.
        """
        context, changed = self._context, self._context.pending.changed
        await context.locked(lambda: context.refresh(step))
        while True:
            seen = changed.count
            outcome = await context.locked(lambda: self._pass(last_step=step))
            context.raise_failure()
            if outcome in (_Pass.AHEAD, _Pass.CLOSED):
                return context.status
            if outcome is _Pass.LACKING:
                await changed.wait(seen)

    async def _pass(self, last_step: int | None = None) -> _Pass:
        """Receive what finished and start what is missing. Lock held. No step after `last_step` is begun.

        Targets are absolute, so an interrupted pass is simply done again, and groups that expired later are
        missing again. At the staleness bound no new step is begun, but what earlier ones lack is produced.
        """
        context = self._context
        progress, tasks = context.progress, context.tasks
        await context.settle()
        if not context.pending.gate_open or context.failure is not None:
            return _Pass.CLOSED
        assert context.version is not None, "the gate is opened by resume, which sets the version"
        step, allocation, version = progress.producer_future_step, context.allocation, context.version
        active = [task for name, task in tasks.items() if allocation[name] > 0]
        expired = any(task.strategy.is_production_expired(step, version) for task in active)
        waiting = last_step is not None and step > last_step
        waiting |= any(task.strategy.waits_for_consumer(step, progress.next_consumer_step) for task in active)
        if not expired and not waiting:
            progress.ensure_target_upto(step, allocation)
        lacking = await self._fill(allocation)
        stopped = expired and not waiting and not lacking
        context.set_status(ProduceBatchStatus.EXPIRED_BATCH if stopped else ProduceBatchStatus.NORMAL)
        if lacking:
            return _Pass.LACKING
        if expired or waiting:
            return _Pass.AHEAD
        progress.advance_future_step()
        return _Pass.COMPLETE

    async def _fill(self, allocation: dict[str, int]) -> bool:
        """Start what the targets lack; True while any task lacks groups."""
        context, progress = self._context, self._context.progress
        stocks = await context.stocks()
        tails = self._tails(stocks)
        lacking = False
        for name, task in context.tasks.items():
            available = progress.consumed[name] + stocks[name].get(Status.COMPLETED, 0)
            lacking |= available < progress.target[name]
            plan = task.strategy.plan(
                target=progress.target[name],
                available=available,
                pending=context.pending.num_of(name),
                task_batch_size=allocation[name],
                tail_batch=tails[name],
            )
            await context.spawn(task, plan, stocks[name])
        return lacking

    def _tails(self, stocks: dict[str, dict[Status, int]]) -> dict[str, bool]:
        """Which tasks produce a tail batch in this round; decided when a round begins, not in the middle."""
        step = self._context.progress.producer_future_step
        if self._round[0] != step:
            tails = {
                name: task.strategy.starts_tail_batch(stocks[name].get(Status.EXPIRED, 0))
                for name, task in self._context.tasks.items()
            }
            self._round = (step, tails)
        return self._round[1]

    # ---------------------------------------------------------------- consumption

    async def take_batch(self, step: int) -> tuple[TakeStatus, PackedGroups | None]:
        """Lease the batch of `step`; waits until it is there. Asked again, the same batch.

        (status, None) with `num_groups` 0 asks to sync newer weights and then to take the same step again.
        Raises what ended production, ProductionError if the batch can never come, and WaitTimeoutError.
        """
        context, changed = self._context, self._context.pending.changed
        started, deadline = context.clock(), asyncio.get_running_loop().time() + self._take_timeout_s
        refresh = True

        async def attempt() -> Take | None:
            if self._last_take is not None and step == self._last_take.step:
                return self._last_take, await take_again(context, step)
            taken = await try_take(context, step, refresh=refresh)
            if taken is None:
                return None
            status = dataclasses.replace(taken[0], wait_s=context.clock() - started)
            if taken[1] is not None:
                self._last_take = status
            return status, taken[1]

        while True:
            seen = changed.count
            taken = await context.locked(attempt)
            if taken is not None:
                return taken
            refresh = False
            await self._wait_for_groups(step, seen, deadline)

    async def _wait_for_groups(self, step: int, seen: int, deadline: float) -> None:
        loop, context = asyncio.get_running_loop(), self._context
        while True:
            until = min(deadline, loop.time() + LOG_WAIT_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    return await context.pending.changed.wait(seen)
            waiting = f"the consumer waits for the batch of step {step}: {context.describe()}"
            if loop.time() >= deadline:
                raise WaitTimeoutError(f"{waiting}; it waited take_timeout_s={self._take_timeout_s:.0f}")
            log.warning(waiting)

    async def acknowledge(self, step: int) -> None:
        """The batches up to `step` are trained. Idempotent."""
        await self._context.locked(lambda: self._context.acknowledge(step))

    # ---------------------------------------------------------------- pause and resume

    async def pause(self) -> float:
        """Stop production and drain what is pending into the buffer; seconds it took. Idempotent.

        What still hangs at the deadline is cancelled and put back as it was when it started. Raises
        WaitTimeoutError if the rollout pool did not confirm that its engines stopped.
        """
        context = self._context
        started = context.clock()
        async with self._transition:
            # First the gate, then the engines: otherwise a new request would meet a stopped engine.
            await context.pending.close_gate()
            context.status = ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT
            await self._stop_and_drain()
        seconds = context.clock() - started
        context.progress.metrics.pause_s += seconds
        context.ledger.flush()
        return seconds

    async def _stop_and_drain(self) -> None:
        context, loop = self._context, asyncio.get_running_loop()
        changed = context.pending.changed
        deadline = loop.time() + self._pause_timeout_s
        resend_s = min(PAUSE_RESEND_S, self._pause_timeout_s / 4)
        confirmed, resend_at = False, loop.time()
        request: asyncio.Task[bool] | None = None
        try:
            while not (confirmed and not len(context.pending)) and loop.time() < deadline:
                if request is None and loop.time() >= resend_at:
                    request = loop.create_task(self._stop_engines(), name="pause the rollout pool")
                    request.add_done_callback(lambda _: changed.notify())
                    resend_at = loop.time() + resend_s
                seen = changed.count
                if request is not None and request.done():
                    confirmed |= request.result()
                    request = None
                await context.locked(context.settle)
                if confirmed and not len(context.pending):
                    return
                until = deadline if request is not None else min(deadline, resend_at)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(until):
                        await changed.wait(seen)
        finally:
            if request is not None:
                request.cancel()
        await context.locked(self._cancel_and_put_back)
        if not confirmed:
            raise WaitTimeoutError(
                f"the rollout pool did not confirm its pause within pause_timeout_s={self._pause_timeout_s:.0f}"
            )

    async def _stop_engines(self) -> bool:
        """Ask the pool to stop and the agent loops to end judging; False if the asked process died."""
        loops = {id(task.agent_loop): task.agent_loop for task in self._context.tasks.values()}
        try:
            await self._control.pause()
            for agent_loop in loops.values():
                interrupt = getattr(agent_loop, "interrupt", None)
                if interrupt is not None:
                    await interrupt()
        except self._context.retryable as error:
            log.warning("a pause request met a dead process (%s); it is sent again", type(error).__name__)
            return False
        return True

    async def _cancel_and_put_back(self) -> None:
        context = self._context
        await context.settle()
        hanging = context.pending.running()
        for entry in hanging:
            log.error("group %s did not end within the pause; it is cancelled and put back", entry.key)
            entry.put_back = True
            entry.task.cancel()
        if hanging:
            await asyncio.wait([entry.task for entry in hanging], timeout=CANCEL_GRACE_S)
        await context.settle()
        for entry in context.pending.running():
            log.error("group %s does not end even when cancelled; it is left behind", entry.key)
            await context.put_back(entry)
            context.pending.forget(entry)

    async def resume(self, version: int) -> None:
        """Produce with `version`: engines first, the gate last. Idempotent.

        Raises ProductionError if `version` is older than the one before, and what the rollout pool raises.
        """
        context = self._context
        async with self._transition:
            if context.version is not None and version < context.version:
                raise ProductionError(
                    f"cannot resume with version {version}: version {context.version} was served"
                )
            await self._control.resume(version)
            context.version = version
            context.status = ProduceBatchStatus.NORMAL
            self._round = (0, {})
            await context.pending.open_gate()

    async def close(self) -> None:
        """Cancel everything in flight, for good. What must survive is paused and saved before."""
        await self._context.pending.close_gate()
        tasks = [entry.task for entry in self._context.pending.all()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_GRACE_S)
        for task in tasks:
            if task.done() and not task.cancelled() and task.exception() is not None:
                log.warning("%s ended with %r while production was closed", task.get_name(), task.exception())

    # ---------------------------------------------------------------- account and checkpoint

    async def counts(self) -> GroupCounts:
        """Where every group is, measured: what buffer and pending set hold, not what they should hold."""
        context = self._context

        async def measure() -> GroupCounts:
            stocks = await context.buffer.counts()
            buffered = sum(sum(stock.values()) for stock in stocks.values())
            return context.ledger.counts(buffered, len(context.pending))

        return await context.locked(measure)

    async def state_dict(self, model_step: int | None = None) -> dict[str, Any]:
        """Progress, samplers, buffer and ledger, as plain data and NumPy arrays.

        `model_step` is the step whose model is saved with it: leases up to it are acknowledged first. A lease
        beyond it is undone in the state, so the restored run takes that step again. Raises ProductionError
        unless production is paused with nothing pending.
        """
        return await self._context.locked(lambda: self._context.state_dict(model_step))

    async def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave; production stays paused until `resume`. Raises CheckpointError."""
        await self._context.locked(lambda: self._context.load_state_dict(state))
        self._last_take = None
