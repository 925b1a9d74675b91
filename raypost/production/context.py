"""ProduceContext: the state that all of production shares, and every move of a group between its places.

Owns the status of production, its version and its first failure, and the moves of groups. Owns neither what is
started (scheduler.py) nor the consumer's leases (take.py) nor the gate (pausing.py), nor how it is saved and comes back
(restore.py). Every method that moves a
group is called with the pending set's lock held: whenever the lock is free, each group is in exactly one place.

    sampler or buffer --spawn--> pending --receive--> buffer | FILTERED | FAILED | EXPIRED
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from raypost.config import TaskConfig
from raypost.data.sampler import Sampler
from raypost.errors import AlignmentError, Boundary, JudgeError, ProductionError, RaypostError, blame
from raypost.ledger.ledger import MAX_WHY, Ledger, group_facts
from raypost.production.allocation import Allocation
from raypost.production.counted import measured
from raypost.production.failures import FailureWatch
from raypost.production.pending import PendingGroup, PendingSet, uninterrupted
from raypost.production.progress import ProduceProgress
from raypost.production.slots import EngineSlots
from raypost.production.strategy import AsyncProduceStrategy, SpawnPlan, groups_owed
from raypost.production.verdict import Received, check_members, decide, failed, parted, storable
from raypost.types import (
    AgentLoop,
    Buffer,
    BufferCounts,
    ExpiredGroup,
    Group,
    GroupCounts,
    GroupKey,
    ProduceBatchStatus,
    PutResult,
    Status,
    members_of,
)
from raypost.types.packed import pack_groups, unpack_groups
from raypost.types.staleness import oldest_version

log = logging.getLogger(__name__)
T = TypeVar("T")

FORGET_S = 5.0
"""How long production waits for episodes to be closed, which close by themselves later."""
MAX_DISPATCHES = 4
"""How often a group whose host died is started, before it is FAILED."""


@dataclass(slots=True)
class TaskRuntime:
    """One task at work."""

    config: TaskConfig
    sampler: Sampler
    agent_loop: AgentLoop
    strategy: AsyncProduceStrategy


class ProduceContext:
    """The state that production and consumption share."""

    def __init__(
        self,
        tasks: Sequence[TaskRuntime],
        buffer: Buffer[object],
        ledger: Ledger,
        allocation: Allocation,
        *,
        retryable: tuple[type[BaseException], ...],
        clock: Callable[[], float],
        num_slots: int | None,
    ) -> None:
        """See Producer."""
        self.tasks = {task.config.name: task for task in tasks}
        self.ledger = ledger
        self.clock = clock
        self.retryable = retryable
        self.pending = PendingSet()
        self.progress = ProduceProgress(self.tasks, lambda step: ledger.allot(step, lambda: allocation(step)))
        self.status = ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT
        self.version: int | None = None
        """Version that production works with; None until the first resume."""
        self.failure: BaseException | None = None
        self.buffer = buffer
        self.slots = EngineSlots(num_slots, {task.config.name: task.config.group_size for task in tasks})
        self._refreshed_at = 0
        """Train step that the buffer's groups were last checked for expiry at."""
        self._dispatches: Counter[GroupKey] = Counter()
        self._failures = FailureWatch(self.tasks, allocation.batch_size)
        self.claim = 0
        """Of the last call that moved groups out of the buffer: asked again with it, it gives the same answer."""

    def next_claim(self) -> int:
        """Return the claim of the next call that moves groups out of the buffer."""
        self.claim += 1
        return self.claim

    async def locked(self, step: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run one step under the lock, to its end even if the caller is cancelled."""

        async def under_lock() -> T:
            async with self.pending.lock:
                return await step()

        return await uninterrupted(under_lock())

    def fail(self, error: BaseException) -> None:
        """Record that production cannot go on; the first failure is the one that is raised."""
        if self.failure is None:
            self.failure = error
            self.pending.changed.notify()

    def set_status(self, status: ProduceBatchStatus) -> None:
        """Set the status of production; a consumer that waits looks again when it changes."""
        if status is not self.status:
            self.status = status
            self.pending.changed.notify()

    def raise_failure(self) -> None:
        """Raise what ended production, if anything did, with its own traceback."""
        if isinstance(self.failure, asyncio.CancelledError):
            raise ProductionError(f"production was cancelled; {self.describe()}")
        if self.failure is not None:
            raise self.failure

    def describe(self) -> str:
        """Return every counter, for error messages and logs."""
        progress = self.progress
        return (
            f"status {self.status}, version {self.version}, next_consumer_step {progress.next_consumer_step}, "
            f"producer_future_step {progress.producer_future_step}, target {progress.target} up to step "
            f"{progress.target_upto}, consumed {progress.consumed}, pending {self._pending_text()}, gate "
            f"{'open' if self.pending.gate_open else 'closed'}"
        )

    def _pending_text(self) -> str:
        """Return how many groups are in flight, and which the longest."""
        entries, now = sorted(self.pending.all(), key=lambda entry: entry.started_s), self.clock()
        longest = ["{}/{} for {:.0f} s".format(*one.key, now - one.started_s) for one in entries[:3]]
        return f"{len(entries)} ({', '.join(longest)}{', ...' * (len(entries) > 3)})" if entries else "0"

    # ---------------------------------------------------------------- starting groups

    async def spawn(self, task: TaskRuntime, plan: SpawnPlan, buffered: dict[Status, int]) -> None:
        """Start what was planned. Lock held, gate open.

        `buffered` are the task's groups in the buffer; those that leave it are subtracted.
        """
        missing = plan.num_groups
        sources = [status for status in plan.sources if buffered.get(status, 0) > 0]
        if missing > 0 and sources:
            packed = await self.buffer.pop(task.config.name, sources, missing, self.next_claim())
            for group in unpack_groups(packed) if packed is not None else ():
                self.ledger.continued(group.key)
                self._start(task, group, stored=True)
                missing -= 1
                first = next(status for status in sources if buffered[status])
                buffered[first] -= 1
        for _ in range(missing):
            group = task.sampler.sample()
            self.ledger.sampled(group.key)
            self._start(task, group, stored=False)

    def _start(self, task: TaskRuntime, group: Group, *, stored: bool) -> None:
        assert self.version is not None, "the gate is opened by resume, which sets the version"
        versions = [one for one in map(oldest_version, group.states) if one is not None]
        last_step = task.strategy.last_step(min(versions, default=self.version))
        work = task.agent_loop.run(group)
        self.pending.spawn(group, work, self.clock(), last_step=last_step, stored=stored)

    def room(self, task: str) -> int | None:
        """Return how many more groups of a task the engines take; None: there is no limit."""
        return self.slots.room(task, self.pending.num_by_task())

    def owed(self, task: TaskRuntime, counts: BufferCounts, step: int) -> int:
        """Return how many unfinished groups of a task the batch of `step` must wait for, see `groups_owed`."""
        if task.strategy.may_end_early:
            return 0
        name = task.config.name
        completed, interrupted = (
            self._last_steps(task, counts.oldest.get(name, {}).get(status, {}))
            for status in (Status.COMPLETED, Status.ABORTED)
        )

        def share(following: int) -> int:
            return self.progress.allocation(following)[name]

        return groups_owed(self.pending.last_steps(name) + interrupted, completed, step, share)

    @staticmethod
    def _last_steps(task: TaskRuntime, oldest: Mapping[int, int]) -> Counter[int]:
        """Return groups by the last step that trains every token of theirs; `oldest`: by the oldest token's version."""
        last_steps: Counter[int] = Counter()
        for version, groups in oldest.items():
            last_steps[task.strategy.last_step(version)] += groups
        return last_steps

    # ---------------------------------------------------------------- receiving groups

    async def settle(self) -> None:
        """Move every finished group to where it belongs. Lock held.

        A group's own failure is recorded and raised by `run`, never here: the other groups are stored all the same.
        """
        if await self.pending.settle(self._receive):
            self.pending.changed.notify()

    async def _receive(self, entries: list[PendingGroup]) -> None:
        """Decide about finished groups, store them in one call, and only then account for them.

        A call that raises counts nothing, and the groups are received again.
        """
        await self._store([self._verdict(entry) for entry in entries])

    async def _store(self, received: list[Received]) -> None:
        kept, gone = parted(received)
        packed = None
        try:
            packed = pack_groups([one.group for one in kept]) if kept else None
        # A supervision boundary: metadata that an agent loop wrote may be anything.
        except Exception:
            kept, gone = parted([*map(storable, kept), *gone])
            packed = pack_groups([one.group for one in kept]) if kept else None
        results: list[PutResult] = []
        # First the journal: the buffer never holds a group that the ledger does not know, whenever this process dies.
        self.ledger.flush()
        if packed is not None:
            results = await self.buffer.put(packed, self.progress.next_consumer_step, self.claim)
        forgotten = [one.entry.key for one in gone if one.entry.stored]
        if forgotten:
            await self.buffer.drop(forgotten)
        for one in gone:
            self._account_dropped(one)
        for one, result in zip(kept, results, strict=True):
            self._account_stored(one, result)
        # In the order of their starts: those that failed would else all come in a row.
        for one in sorted(kept + gone, key=lambda one: one.entry.key):
            broken = self._failures.count(one)
            if broken is not None:
                self.fail(ProductionError(f"{broken}; {self.describe()}"))
        expired = [one for one, put in zip(kept, results, strict=True) if put.status is Status.EXPIRED]
        await self._forget([one.entry.key for one in expired + gone])

    def _verdict(self, entry: PendingGroup) -> Received:
        """Decide what becomes of a group that ended. Changes nothing but the group."""
        if entry.task.cancelled():
            if entry.put_back:
                return self._back(entry)
            return self._again(entry, asyncio.CancelledError("its agent loop was cancelled"))
        error = entry.task.exception()
        if isinstance(error, self.retryable):
            return self._again(entry, error)
        if isinstance(error, RaypostError) and not isinstance(error, AlignmentError | JudgeError):
            return self._give_up(entry, error)
        if error is not None and not isinstance(error, Exception):
            return self._give_up(entry, error)
        strategy = self.tasks[entry.key[0]].strategy
        try:
            return decide(entry, self._checked(entry, error), strategy)
        # A supervision boundary: whatever a user's filter raises, `run` raises it.
        except Exception as raised:
            return self._give_up(entry, raised)

    def _give_up(self, entry: PendingGroup, error: BaseException) -> Received:
        self.fail(error)
        return self._back(entry)

    def _checked(self, entry: PendingGroup, error: Exception | None) -> Group:
        """Return the group that came back, checked; without one that it was given, its members failed."""
        if error is None:
            try:
                group = entry.task.result()
                check_members(entry.key, entry.last_known, group)
                return group
            # A supervision boundary: what an agent loop returns may be anything.
            except Exception as raised:
                error = raised
        log.warning("the agent loop failed group %s", entry.key, exc_info=error)
        return failed(entry, error)

    def _again(self, entry: PendingGroup, error: BaseException) -> Received:
        """Dispatch a group again whose host died, but not for ever."""
        dispatches = self._dispatches[entry.key] + 1
        if dispatches < MAX_DISPATCHES:
            log.warning("group %s is dispatched again: %s", entry.key, type(error).__name__)
            return self._back(entry, dispatches)
        why = blame(Boundary.AGENT_LOOP, f"its host died {MAX_DISPATCHES} times, last: {error!r:.500}")
        failures = Counter({Boundary.AGENT_LOOP: len(members_of(entry.last_known))})
        return Received(entry, entry.as_started(), Status.FAILED, why=why, failures=failures)

    def _back(self, entry: PendingGroup, dispatches: int = 0) -> Received:
        """Put a group back as it was when it started, to be continued."""
        group = entry.as_started()
        for state in group.states:
            if state.status is not Status.COMPLETED:
                state.status = Status.ABORTED
                state.num_aborts += entry.put_back
        return Received(entry, group, Status.ABORTED, back=True, dispatches=dispatches)

    async def put_back(self, entries: list[PendingGroup]) -> None:
        """Put groups into the buffer as they were when they started. Lock held."""
        await self._store([self._back(entry) for entry in entries])

    # ---------------------------------------------------------------- accounting for them

    def _account_dropped(self, one: Received) -> None:
        self._count(one)
        self._drop(one.entry.key, one.verdict, why=one.why, **group_facts(one.group))
        if one.verdict is Status.FAILED:
            log.warning("group %s failed: %s", one.entry.key, one.why)

    def _account_stored(self, one: Received, result: PutResult) -> None:
        key, facts = one.entry.key, {"staleness": result.staleness, **group_facts(one.group)}
        if one.back:
            facts["put_back"] = True
            if one.dispatches:
                self._dispatches[key] = one.dispatches
        else:
            self._count(one)
        if one.failures:
            facts |= {"why": one.why[:MAX_WHY], "retried": one.retried, "left_out": one.dropped}
        if one.verdict is Status.COMPLETED:
            self._dispatches.pop(key, None)
        if result.status is Status.EXPIRED:
            facts["too_old"] = result.too_old
        if result.too_old:
            self.progress.count_expired(one.group.num_tokens / len(one.group.members))
        if result.stored:
            self.ledger.stored(key, result.status, **facts)
        else:
            self._drop(key, Status.EXPIRED, **facts)

    def _count(self, one: Received) -> None:
        window, group, verdict = self.progress.metrics, one.group, one.verdict
        members = group.members
        size, before, after = len(members), one.entry.num_tokens, one.num_tokens
        window.produced_tokens += after - before if after >= before else after
        window.failed_samples += one.dropped
        window.count_failures(group.task, {str(b): n for b, n in one.failures.items()}, one.retried)
        if verdict is Status.FAILED:
            window.failed_samples += size
        if verdict in (Status.FAILED, Status.ABORTED):
            return
        # Before the filter counts: a curve of what passed it would not show what the policy does.
        rewards, seconds = [member[-1].reward for member in members], self.clock() - one.entry.started_s
        window.of_task(group.task).count(rewards, verdict is Status.FILTERED, seconds)
        self.slots.observe(group.task, [sum(state.num_tokens for state in member) for member in members])

    def _drop(self, key: GroupKey, reason: Status, **facts: Any) -> None:
        self.ledger.dropped(key, reason, **facts)
        self._dispatches.pop(key, None)

    # ---------------------------------------------------------------- what the buffer holds

    async def refresh(self, train_step: int) -> None:
        """Expire what is too old at `train_step`, and account for it. Lock held.

        What is stored later is checked when it is put, so that a step needs to be asked for once.
        """
        if train_step == self._refreshed_at:
            return
        gone: list[ExpiredGroup] = []
        if train_step >= (await self.buffer.counts()).expires_at:
            gone = await self.buffer.refresh(train_step, self.next_claim())
        self._refreshed_at = train_step
        await self._forget([expired.key for expired in gone])
        if gone:
            self.pending.changed.notify()
        for expired in gone:
            self.progress.count_expired(expired.mean_tokens)
            if expired.stored:
                self.ledger.stored(expired.key, Status.EXPIRED)
            else:
                self._drop(expired.key, Status.EXPIRED)

    async def _forget(self, keys: Sequence[GroupKey]) -> None:
        """Have the episodes closed that wait for groups which do not go on where they were."""
        for name, task in self.tasks.items():
            of_task = [key for key in keys if key[0] == name and task.config.agent_loop.parks]
            try:
                async with asyncio.timeout(FORGET_S):
                    if of_task:
                        await task.agent_loop.forget(of_task)
            except (TimeoutError, RaypostError) as error:
                log.warning("the episodes of %d ended groups end at their timeout: %r", len(of_task), error)

    def forget_refresh(self) -> None:
        """Have the buffer's groups checked for expiry again: they are others now."""
        self._refreshed_at = 0

    async def group_counts(self) -> GroupCounts:
        """Return where every group is. Lock held."""
        self.ledger.flush()
        counts = await measured(self.buffer)
        buffered = sum(sum(by_status.values()) for by_status in counts.groups.values())
        return self.ledger.counts(buffered, len(self.pending))
