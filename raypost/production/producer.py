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

from raypost.errors import ConfigError, ProductionError, WaitTimeoutError
from raypost.ledger.events import LedgerEvent
from raypost.ledger.ledger import Ledger
from raypost.packed import PackedGroups
from raypost.pause import PauseMode
from raypost.production.allocation import WeightFunction
from raypost.production.context import ProduceContext, TaskRuntime
from raypost.production.pausing import CANCEL_GRACE_S, Pausing
from raypost.production.take import Take, take_again, try_take
from raypost.protocols import Buffer, BufferCounts, RolloutControl, TakeStatus
from raypost.types import GroupCounts, ProduceBatchStatus, Status

__all__ = ["Producer", "TaskRuntime"]

log = logging.getLogger(__name__)

LOG_WAIT_S = 60.0
"""A consumer that waits says so this often."""


class _Pass(Enum):
    """How one pass of production ended."""

    DONE = auto()
    """Nothing to do before the consumer or the weights move."""
    LACKING = auto()
    """Groups are missing and in flight, or there is no room for them."""
    CLOSED = auto()
    """Paused, or ended by a failure."""


@dataclasses.dataclass(slots=True, frozen=True)
class _Round:
    """How far one task came in a pass."""

    lacks: bool
    """Groups it was asked for are missing."""
    stopped: bool
    """It has all that its staleness bound allows."""
    waits: bool
    """It waits for the consumer."""


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
        pause_mode: PauseMode = "abort",
        take_timeout_s: float = 3600.0,
        weights: WeightFunction | None = None,
        retryable: tuple[type[BaseException], ...] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`batch_size` counts groups over all tasks. `weights` changes the tasks' scheduled weights. `retryable`
        are errors that mean "the process that ran the group died". Paused until the first `resume`."""
        self._context = ProduceContext(
            tasks, buffer, ledger, batch_size=batch_size, weights=weights, retryable=retryable, clock=clock
        )
        self._pausing = Pausing(self._context, control, pause_timeout_s)
        self._control = control
        self._pause_mode = pause_mode
        self._take_timeout_s = take_timeout_s
        self._transition = asyncio.Lock()
        self._tails: dict[str, tuple[int, bool]] = {}
        self._running = False
        self._last_take: TakeStatus | None = None

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
        changed = self._context.pending.changed
        try:
            while True:
                seen = changed.count
                await self._context.locked(self._pass)
                self._context.raise_failure()
                self._context.ledger.flush()
                await changed.wait(seen)
        except BaseException as error:
            self._context.fail(error)
            raise
        finally:
            self._running = False

    async def produce_batch(self, step: int) -> ProduceBatchStatus:
        """Produce until the batch of `step` is there: NORMAL. EXPIRED_BATCH if only newer weights allow it,
        UPDATE_WEIGHT_AND_ABORT if production is paused. Raises what made production impossible, and
        WaitTimeoutError when a batch takes longer than one may.
        """
        deadline = asyncio.get_running_loop().time() + self._take_timeout_s
        context, changed = self._context, self._context.pending.changed
        await context.locked(lambda: context.refresh(step))
        while True:
            seen = changed.count
            outcome = await context.locked(lambda: self._pass(last_step=step))
            context.raise_failure()
            if outcome is not _Pass.LACKING:
                return context.status
            await self._wait_for_groups(step, seen, deadline)

    async def _pass(self, last_step: int | None = None) -> _Pass:
        """Receive what finished and start what is missing. Lock held. No step after `last_step` is begun.

        Targets are absolute, so an interrupted pass is simply done again, and groups that expired later are
        missing again. Each task runs as far ahead as its own bound allows.
        """
        context = self._context
        await context.settle()
        if not context.pending.gate_open or context.failure is not None:
            return _Pass.CLOSED
        counts = await context.counts()
        rounds = [await self._produce(task, counts, last_step) for task in context.tasks.values()]
        lacking = any(one.lacks for one in rounds)
        stopped = not lacking and any(one.stopped for one in rounds) and not any(one.waits for one in rounds)
        context.set_status(ProduceBatchStatus.EXPIRED_BATCH if stopped else ProduceBatchStatus.NORMAL)
        return _Pass.LACKING if lacking else _Pass.DONE

    async def _produce(self, task: TaskRuntime, counts: BufferCounts, last_step: int | None) -> _Round:
        """Bring one task as far ahead as it may be, and start what it lacks there."""
        context, progress, strategy = self._context, self._context.progress, task.strategy
        name, version = task.config.name, context.version
        assert version is not None, "the gate is opened by resume, which sets the version"
        stock = dict(counts.groups.get(name, {}))
        available = progress.available(name, stock.get(Status.COMPLETED, 0))
        while True:
            step = progress.producer_future_step[name]
            expired = strategy.is_production_expired(step, version)
            waits = strategy.waits_for_consumer(step, progress.next_consumer_step)
            waits |= last_step is not None and step > last_step
            if not expired and not waits:
                progress.ensure_target_upto(name, step)
            lacks = self._lacks(task, available)
            if expired or waits or (lacks and not strategy.by_capacity):
                break
            progress.advance_future_step(name)
        tail = self._tail(task, stock)
        if lacks or strategy.by_capacity:
            await self._start(task, counts, stock, available, tail)
        stopped = expired and not waits and not lacks and progress.target[name] > 0
        return _Round(lacks=lacks, stopped=stopped, waits=waits and not expired)

    def _lacks(self, task: TaskRuntime, available: int) -> bool:
        """Whether a task's round goes on: its target is not met, nor ended early by the user's function."""
        progress, name = self._context.progress, task.config.name
        step, missing = progress.target_upto[name], progress.target[name] - available
        if step == 0 or not task.strategy.may_end_early:
            return missing > 0
        share = progress.allocation(step)[name]
        return task.strategy.should_continue(share - missing, share)

    async def _start(
        self, task: TaskRuntime, counts: BufferCounts, stock: dict[Status, int], available: int, tail: bool
    ) -> None:
        context, progress, name = self._context, self._context.progress, task.config.name
        step, target = progress.producer_future_step[name], progress.target[name]
        if counts.is_full:
            # Only what the consumer waits for: the bound pushes back, but never starves it.
            target = min(target, progress.target_at(name, progress.next_consumer_step))
        plan = task.strategy.plan(
            target=target,
            available=available,
            pending=context.pending.num_of(name),
            task_batch_size=0 if counts.is_full else progress.allocation(step)[name],
            tail_batch=tail,
        )
        await context.spawn(task, plan, stock)

    def _tail(self, task: TaskRuntime, stock: dict[Status, int]) -> bool:
        """Whether a task produces a tail batch in this round; decided when it begins, not in the middle."""
        name = task.config.name
        step = self._context.progress.producer_future_step[name]
        if self._tails.get(name, (0, False))[0] != step:
            self._tails[name] = (step, task.strategy.starts_tail_batch(stock.get(Status.EXPIRED, 0)))
        return self._tails[name][1]

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

    async def pause(self, mode: PauseMode | None = None) -> float:
        """Stop production as `mode` says, None: as configured; seconds it took. Idempotent.

        abort: what is generated comes back with its tokens, into the buffer. wait: requests run to their end
        first. keep: they freeze where they are, stay pending, and go on after `resume`; what must not find any
        pending (a checkpoint) pauses again with abort. What still hangs at the deadline is cancelled and put back
        as it was when it started. Raises WaitTimeoutError if the rollout pool did not confirm its pause.
        """
        context, mode = self._context, mode or self._pause_mode
        started = context.clock()
        async with self._transition:
            # First the gate, then the engines: otherwise a new request would meet a stopped engine.
            await context.pending.close_gate()
            context.status = ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT
            context.ledger.note(LedgerEvent.PAUSING, mode=mode, version=context.version)
            await self._pausing.stop(mode)
            context.ledger.note(LedgerEvent.PAUSED, mode=mode, version=context.version)
        seconds = context.clock() - started
        context.progress.metrics.pause_s += seconds
        context.ledger.flush()
        return seconds

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
            context.ledger.note(LedgerEvent.RESUMED, version=version)
            self._tails.clear()
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
        self._context.ledger.flush()

    # ---------------------------------------------------------------- account and checkpoint

    async def counts(self) -> GroupCounts:
        """Where every group is, measured: what buffer and pending set hold, not what they should hold."""
        context = self._context

        async def measure() -> GroupCounts:
            context.ledger.flush()
            counts = await context.counts()
            buffered = sum(sum(stock.values()) for stock in counts.groups.values())
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
