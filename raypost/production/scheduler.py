"""Scheduler: decides what is started next, task by task.

Owns a pass of production: how far ahead each task works, and when a round is a tail batch. The rules are the
strategies', the counters ProduceProgress's; groups are started by the ProduceContext. Everything here is called
with the pending set's lock held.

Invariants: targets are absolute, so an interrupted pass is simply done again, and groups that expired later are
missing again; each task runs as far ahead as its own bound allows.
"""

from __future__ import annotations

import dataclasses

from raypost.production.context import ProduceContext, TaskRuntime
from raypost.protocols import BufferCounts
from raypost.types import ProduceBatchStatus, Status


@dataclasses.dataclass(slots=True, frozen=True)
class _Round:
    """How far one task came in a pass."""

    lacks: bool
    """Groups it was asked for are missing."""
    stopped: bool
    """It has all that its staleness bound allows."""
    waits: bool
    """It waits for the consumer."""


class Scheduler:
    """Starts what the tasks' strategies call for."""

    def __init__(self, context: ProduceContext) -> None:
        """Schedule the context's tasks."""
        self._context = context
        self._pending = context.pending
        self._progress = context.progress
        self._tails: dict[str, tuple[int, bool]] = {}

    def begin_rounds(self) -> None:
        """Decide anew whether the rounds of all tasks are tail batches."""
        self._tails.clear()

    async def advance(self, last_step: int | None = None) -> bool:
        """Receive what finished and start what is missing, for no step after `last_step`.

        Returns whether groups are still missing: in flight, or without room. False while production is paused, or
        after a failure.
        """
        context = self._context
        await context.settle()
        if not self._pending.gate_open or context.failure is not None:
            return False
        counts = await context.buffer.counts()
        rounds = [await self._produce(task, counts, last_step) for task in context.tasks.values()]
        lacking = any(one.lacks for one in rounds)
        stopped = not lacking and any(one.stopped for one in rounds) and not any(one.waits for one in rounds)
        context.set_status(ProduceBatchStatus.EXPIRED_BATCH if stopped else ProduceBatchStatus.NORMAL)
        return lacking

    async def _produce(self, task: TaskRuntime, counts: BufferCounts, last_step: int | None) -> _Round:
        """Bring one task as far ahead as it may be, and start what it lacks there."""
        progress, strategy, version = self._progress, task.strategy, self._context.version
        name = task.config.name
        assert version is not None, "the gate is opened by resume, which sets the version"
        buffered = dict(counts.groups.get(name, {}))
        available = progress.available(name, buffered.get(Status.COMPLETED, 0))
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
            progress.producer_future_step[name] += 1
        tail = self._is_tail_batch(task, buffered)
        if lacks or strategy.by_capacity:
            await self._start(task, counts, buffered, available, tail)
        stopped = expired and not waits and not lacks and progress.target[name] > 0
        return _Round(lacks=lacks, stopped=stopped, waits=waits and not expired)

    def _lacks(self, task: TaskRuntime, available: int) -> bool:
        """Return whether a task's round goes on: its target is not met, nor ended early by the user's function."""
        progress, name = self._progress, task.config.name
        step, missing = progress.target_upto[name], progress.target[name] - available
        if step == 0 or not task.strategy.may_end_early:
            return missing > 0
        share = progress.allocation(step)[name]
        return task.strategy.should_continue(share - missing, share)

    async def _start(
        self, task: TaskRuntime, counts: BufferCounts, buffered: dict[Status, int], available: int, tail: bool
    ) -> None:
        progress, name = self._progress, task.config.name
        step, target = progress.producer_future_step[name], progress.target[name]
        if counts.is_full:
            # Only what the consumer waits for: the bound pushes back, but never starves it.
            target = min(target, progress.target_at(name, progress.next_consumer_step))
        plan = task.strategy.plan(
            target=target,
            available=available,
            pending=self._pending.num_of(name),
            task_batch_size=0 if counts.is_full else progress.allocation(step)[name],
            tail_batch=tail,
        )
        await self._context.spawn(task, plan, buffered)

    def _is_tail_batch(self, task: TaskRuntime, buffered: dict[Status, int]) -> bool:
        """Return whether this round is a tail batch; decided when it begins, not in the middle."""
        name = task.config.name
        step = self._progress.producer_future_step[name]
        if self._tails.get(name, (0, False))[0] != step:
            self._tails[name] = (step, task.strategy.starts_tail_batch(buffered.get(Status.EXPIRED, 0)))
        return self._tails[name][1]
