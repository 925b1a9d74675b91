"""Scheduler: decides what is started next, step by step.

Owns a pass of production: how far ahead each task works, and when a round is a tail batch. The rules are the
strategies', the counters ProduceProgress's, what the engines hold EngineSlots'; groups are started by the
ProduceContext. Everything here is called with the pending set's lock held.

Invariants: targets are absolute, so an interrupted pass is simply done again, and groups that expired later are
missing again; the nearest step is served first, over all tasks; each task runs as far ahead as its own bound and the
engines allow, and no step is looked at before all groups of those before it are in flight.
"""

from __future__ import annotations

from dataclasses import dataclass

from raypost.production.context import ProduceContext, TaskRuntime
from raypost.production.strategy import SpawnPlan
from raypost.types import BufferCounts, ProduceBatchStatus, Status


@dataclass(slots=True)
class _Round:
    """How far one task comes in a pass."""

    task: TaskRuntime
    buffered: dict[Status, int]
    """The task's groups in the buffer."""
    available: int
    owed: int
    """Unfinished groups that the next batch has to wait for."""
    expired: bool = False
    """It has started all that its staleness bound allows."""
    waits: bool = False
    """It waits for the consumer."""
    full: bool = False
    """Something else holds it: engines without room, or a limit of its own."""

    @property
    def name(self) -> str:
        """Name of the task."""
        return self.task.config.name

    @property
    def goes_on(self) -> bool:
        """Whether more may be started."""
        return not (self.expired or self.waits or self.full)


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
        rounds = [self._begin(task, counts) for task in context.tasks.values()]
        for one in rounds:
            await self._continue_owed(one)
        while going := [one for one in rounds if one.goes_on]:
            nearest = min(going, key=lambda one: self._progress.producer_future_step[one.name])
            await self._work_for_next(nearest, counts, last_step)
        lacking = any(self._lacks(one) or one.owed for one in rounds)
        held = [one for one in rounds if one.waits and not one.expired]
        at_bound = [
            one for one in rounds if one.expired and not one.waits and self._progress.target[one.name]
        ]
        stopped = bool(at_bound) and not lacking and not held
        context.set_status(ProduceBatchStatus.EXPIRED_BATCH if stopped else ProduceBatchStatus.NORMAL)
        return lacking

    def _begin(self, task: TaskRuntime, counts: BufferCounts) -> _Round:
        name, buffered = task.config.name, dict(counts.groups.get(task.config.name, {}))
        available = self._progress.available(name, buffered.get(Status.COMPLETED, 0))
        owed = self._context.owed(task, counts, self._progress.next_consumer_step)
        return _Round(task, buffered, available, owed)

    async def _continue_owed(self, one: _Round) -> None:
        """Start what was interrupted and cannot wait, whatever else holds production back."""
        interrupted = min(one.owed, one.buffered.get(Status.ABORTED, 0))
        if interrupted:
            await self._context.spawn(one.task, SpawnPlan(interrupted, (Status.ABORTED,)), one.buffered)

    async def _work_for_next(self, one: _Round, counts: BufferCounts, last_step: int | None) -> None:
        """Start what a task lacks up to the step it works for, and move on if then all of it is in flight."""
        progress, strategy, version, name = self._progress, one.task.strategy, self._context.version, one.name
        assert version is not None, "the gate is opened by resume, which sets the version"
        step = progress.producer_future_step[name]
        one.expired = strategy.is_production_expired(step, version)
        one.waits = strategy.waits_for_consumer(step, progress.next_consumer_step)
        one.waits |= last_step is not None and step > last_step
        # A bound of the buffer pushes back, but never starves the consumer.
        one.waits |= counts.is_full and step > progress.next_consumer_step
        if one.goes_on:
            progress.ensure_target_upto(name, step)
        if self._lacks(one):
            await self._start(one, counts)
        one.full = progress.target[name] - one.available > self._pending.num_of(name)
        # A task without a share would run through all steps within its bound, for nothing.
        one.full |= not progress.allocation(step)[name] and step > self._furthest(but=name)
        if one.goes_on:
            progress.producer_future_step[name] += 1

    def _furthest(self, but: str) -> int:
        """Return the furthest step that the consumer or another task is at."""
        steps = self._progress.producer_future_step
        return max(self._progress.next_consumer_step, *(step for name, step in steps.items() if name != but))

    def _lacks(self, one: _Round) -> bool:
        """Return whether a task's round goes on: its target is not met, nor ended early by the user's function."""
        progress, name = self._progress, one.name
        step, missing = progress.target_upto[name], progress.target[name] - one.available
        if step == 0 or not one.task.strategy.may_end_early:
            return missing > 0
        share = progress.allocation(step)[name]
        return one.task.strategy.should_continue(share - missing, share)

    async def _start(self, one: _Round, counts: BufferCounts) -> None:
        progress, name = self._progress, one.name
        step, target = progress.producer_future_step[name], progress.target[name]
        room = self._context.room(name)
        if counts.is_full:
            target = min(target, progress.target_at(name, progress.next_consumer_step))
        elif counts.room is not None and step > progress.next_consumer_step:
            # What is in flight comes into the buffer too.
            left = max(0, counts.room - len(self._pending))
            room = left if room is None else min(room, left)
        plan = one.task.strategy.plan(
            target=target,
            available=one.available,
            pending=self._pending.num_of(name),
            task_batch_size=0 if counts.is_full else progress.allocation(step)[name],
            tail_batch=self._is_tail_batch(one),
            room=room,
        )
        await self._context.spawn(one.task, plan, one.buffered)

    def _is_tail_batch(self, one: _Round) -> bool:
        """Return whether this round is a tail batch; decided when it begins, not in the middle."""
        step = self._progress.target_upto[one.name]
        if self._tails.get(one.name, (0, False))[0] != step:
            tail = one.task.strategy.starts_tail_batch(one.buffered.get(Status.EXPIRED, 0))
            self._tails[one.name] = (step, tail)
        return self._tails[one.name][1]
