"""ProduceContext: what production and consumption share, and every move of a group between its places.

Owns the wiring of tasks, buffer, ledger, progress and pending set, the status of production and its first
failure. Owns no schedule (producer.py) and no take (take.py). Every method that moves a group is called with
the pending set's lock held: so at any time the lock is free, each group is in exactly one place.

    sampler or buffer --spawn--> pending --receive--> buffer | FILTERED | FAILED | EXPIRED
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from raypost.config import TaskConfig
from raypost.errors import CheckpointError, ProductionError
from raypost.ledger import Ledger
from raypost.packed import pack_groups, unpack_groups
from raypost.progress import ProduceProgress, allocate
from raypost.protocols import AgentLoop, Buffer
from raypost.sampler import Sampler
from raypost.strategy import AsyncProduceStrategy, PendingGroup, PendingSet, SpawnPlan, uninterrupted
from raypost.types import Group, GroupKey, ProduceBatchStatus, Status

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_DISPATCHES = 4
"""How often a group whose host died is started, before it is FAILED."""
MIN_FAILED_IN_A_ROW = 32
"""So many failures without a success mean that the task, not the group, is broken."""


@dataclass(slots=True)
class TaskRuntime:
    """One task at work. `is_valid` decides whether a judged group is trained; None trains all."""

    config: TaskConfig
    sampler: Sampler[Any]
    agent_loop: AgentLoop
    strategy: AsyncProduceStrategy
    is_valid: Callable[[Group], bool] | None = None


class ProduceContext:
    """The state that production and consumption share."""

    def __init__(
        self,
        tasks: Sequence[TaskRuntime],
        buffer: Buffer,
        ledger: Ledger,
        *,
        batch_size: int,
        retryable: tuple[type[BaseException], ...] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`retryable` errors mean "the process that ran the group died": it is dispatched again."""
        self.tasks = {task.config.name: task for task in tasks}
        self.buffer, self.ledger, self.batch_size, self.clock = buffer, ledger, batch_size, clock
        self.retryable = retryable
        self.pending = PendingSet()
        self.progress = ProduceProgress(self.tasks)
        self.status = ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT
        self.version: int | None = None
        """Version that production works with; None until the first resume."""
        self.failure: BaseException | None = None
        self._dispatches: Counter[GroupKey] = Counter()
        self._failed_in_a_row = 0

    @property
    def allocation(self) -> dict[str, int]:
        """Groups of each task in one batch."""
        return allocate(self.batch_size, {name: task.config.weight for name, task in self.tasks.items()})

    async def locked(self, step: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run one step under the lock, to its end even if the caller is cancelled."""

        async def under_lock() -> T:
            async with self.pending.lock:
                return await step()

        result: T = await uninterrupted(under_lock())
        return result

    def fail(self, error: BaseException) -> None:
        """Production cannot go on; the first failure is the one that is raised."""
        if self.failure is None:
            self.failure = error
            self.pending.changed.notify()

    def set_status(self, status: ProduceBatchStatus) -> None:
        """Production's status; a consumer that waits looks again when it changes."""
        if status is not self.status:
            self.status = status
            self.pending.changed.notify()

    def raise_failure(self) -> None:
        """Raise what ended production, with its own traceback; nothing if it is well."""
        if isinstance(self.failure, asyncio.CancelledError):
            raise ProductionError(f"production was cancelled; {self.describe()}")
        if self.failure is not None:
            raise self.failure

    def describe(self) -> str:
        """Every counter, for error messages and logs."""
        progress = self.progress
        return (
            f"status {self.status}, version {self.version}, next_consumer_step {progress.next_consumer_step}, "
            f"producer_future_step {progress.producer_future_step}, target {progress.target} up to step "
            f"{progress.target_upto}, consumed {progress.consumed}, pending {len(self.pending)}, gate "
            f"{'open' if self.pending.gate_open else 'closed'}"
        )

    # ---------------------------------------------------------------- starting groups

    async def spawn(self, task: TaskRuntime, plan: SpawnPlan, stock: dict[Status, int]) -> None:
        """Start what was planned; `stock` are the task's groups in the buffer now. Lock held, gate open."""
        for _ in range(plan.num_groups):
            group = await self._next_group(task, plan.sources, stock)
            self.pending.spawn(group, task.agent_loop.run(group), self.clock())

    async def _next_group(
        self, task: TaskRuntime, sources: tuple[Status, ...], stock: dict[Status, int]
    ) -> Group:
        for status in sources:
            if stock.get(status, 0) < 1:
                continue
            stock[status] -= 1
            packed = await self.buffer.pop(task.config.name, status)
            if packed is not None:
                (group,) = unpack_groups(packed)
                self.ledger.continued(group.key)
                return group
        group = task.sampler.sample()
        self.ledger.sampled(group.key)
        return group

    # ---------------------------------------------------------------- receiving groups

    async def settle(self) -> None:
        """Move every finished group to where it belongs. Lock held. A group's own failure is recorded and
        raised by `run`, never here: the groups beside it still get home."""
        if await self.pending.settle(self._receive):
            self.pending.changed.notify()

    async def _receive(self, entry: PendingGroup) -> None:
        if entry.task.cancelled():
            if entry.put_back:
                await self.put_back(entry)
            else:
                await self._dispatch_again(entry, asyncio.CancelledError("its agent loop was cancelled"))
            return
        error = entry.task.exception()
        if isinstance(error, self.retryable):
            await self._dispatch_again(entry, error)
            return
        if error is None:
            try:
                group = entry.task.result()
                verdict = self._judged(entry, group)
            # A supervision boundary: whatever a user's filter raises, `run` raises it.
            except Exception as raised:
                error = raised
        if error is not None:
            self.fail(error)
            await self.put_back(entry)
            return
        await self._accept(entry, group, verdict)

    def _judged(self, entry: PendingGroup, group: Group) -> Status:
        """Status the group gets, after the filter. Members that cannot be trained are marked FAILED."""
        came = [state.sample_index for state in group.states]
        sent = [state.sample_index for state in entry.last_known]
        if group.key != entry.key or came != sent:
            raise ProductionError(
                f"the agent loop of task {entry.key[0]!r} was given group {entry.key} with samples {sent} and "
                f"returned {group.key} with {came}: it must return the same trajectories"
            )
        for state in group.states:
            state.check_aligned()
            if state.status is Status.COMPLETED and (state.reward is None or not math.isfinite(state.reward)):
                state.status, state.error = Status.FAILED, f"completed with reward {state.reward}"
            elif state.status in (Status.INIT, Status.EXPIRED):
                # Not generated although it was asked for: it waits for its turn like an interrupted one.
                state.status = Status.ABORTED
        if group.status is Status.COMPLETED and not self._is_valid(group):
            return Status.FILTERED
        return group.status

    def _is_valid(self, group: Group) -> bool:
        task = self.tasks[group.task]
        uniform = len({state.reward for state in group.states}) == 1
        if task.strategy.drop_uniform_rewards and uniform:
            return False
        return task.is_valid is None or task.is_valid(group)

    async def _accept(self, entry: PendingGroup, group: Group, verdict: Status) -> None:
        if verdict in (Status.FAILED, Status.FILTERED):
            self._count(entry, group, verdict)
            errors = [state.error for state in group.states if state.error]
            why = errors[0] if errors else "not valid for training"
            self._drop(entry.key, verdict, why=why)
            if verdict is Status.FAILED:
                self._count_failure(entry.key, why)
            return
        length = group.num_tokens / len(group.states)
        result = await self.buffer.put(pack_groups([group]), self.progress.next_consumer_step)
        self._count(entry, group, verdict)
        if verdict is Status.COMPLETED:
            self._dispatches.pop(entry.key, None)
        if result.status is Status.EXPIRED:
            self.progress.count_expired(length)
        if result.stored:
            self.ledger.stored(entry.key, result.status, staleness=result.staleness, tokens=group.num_tokens)
        else:
            self._drop(entry.key, Status.EXPIRED, staleness=result.staleness, tokens=group.num_tokens)

    def _count(self, entry: PendingGroup, group: Group, verdict: Status) -> None:
        window, size = self.progress.metrics, len(group.states)
        before, after = entry.num_tokens, group.num_tokens
        window.produced_tokens += after - before if after >= before else after
        if verdict is Status.FAILED:
            window.failed_samples += size
            return
        if verdict is Status.ABORTED:
            return
        self._failed_in_a_row = 0
        window.produced_samples += size
        window.group_s.append(self.clock() - entry.started_s)
        for state in group.states:
            # Before the filter counts: a curve of what passed it would not show what the policy does.
            window.raw_rewards_sum += state.reward or 0.0
            window.raw_rewards_count += 1
        if verdict is Status.FILTERED:
            window.filtered_samples += size

    def _drop(self, key: GroupKey, reason: Status, **facts: Any) -> None:
        self.ledger.dropped(key, reason, **facts)
        self._dispatches.pop(key, None)

    def _count_failure(self, key: GroupKey, why: str) -> None:
        log.warning("group %s failed: %s", key, why)
        self._failed_in_a_row += 1
        limit = max(MIN_FAILED_IN_A_ROW, 4 * self.batch_size)
        if self._failed_in_a_row >= limit:
            self.fail(
                ProductionError(
                    f"{self._failed_in_a_row} groups in a row failed (bound {limit}), the last, {key}, with: "
                    f"{why}; fix the agent loop, judge or engine; {self.describe()}"
                )
            )

    async def _dispatch_again(self, entry: PendingGroup, error: BaseException) -> None:
        self._dispatches[entry.key] += 1
        if self._dispatches[entry.key] < MAX_DISPATCHES:
            log.warning("group %s is dispatched again: %s", entry.key, type(error).__name__)
            await self.put_back(entry)
            return
        self.progress.metrics.failed_samples += len(entry.last_known)
        why = f"its host died {MAX_DISPATCHES} times, last: {error!r:.500}"
        self._drop(entry.key, Status.FAILED, why=why)
        self._count_failure(entry.key, why)

    async def put_back(self, entry: PendingGroup) -> None:
        """Put a group into the buffer as it was when it started, to be continued. Lock held."""
        states = [replace(state) for state in entry.last_known]
        for state in states:
            if state.status is not Status.COMPLETED:
                state.status = Status.ABORTED
                state.num_aborts += entry.put_back
        group = Group(task=entry.key[0], group_id=entry.key[1], states=states)
        result = await self.buffer.put(pack_groups([group]), self.progress.next_consumer_step)
        if result.stored:
            self.ledger.stored(entry.key, result.status, put_back=True)
        else:
            self.progress.count_expired(group.num_tokens / len(states))
            self._drop(entry.key, Status.EXPIRED, staleness=result.staleness)

    # ---------------------------------------------------------------- ageing

    async def refresh(self, train_step: int) -> None:
        """Age the buffer at `train_step` and account for what expired. Lock held."""
        gone = await self.buffer.refresh(train_step)
        if gone:
            self.pending.changed.notify()
        for expired in gone:
            self.progress.count_expired(expired.mean_tokens)
            if expired.stored:
                self.ledger.stored(expired.key, Status.EXPIRED)
            else:
                self._drop(expired.key, Status.EXPIRED)

    async def stocks(self) -> dict[str, dict[Status, int]]:
        """The buffer's groups by task and status; every task is in it. Lock held."""
        counts = await self.buffer.counts()
        return {name: dict(counts.get(name, {})) for name in self.tasks}

    # ---------------------------------------------------------------- trained, saved, restored

    async def acknowledge(self, step: int) -> None:
        """The steps up to `step` are trained: their leases end. Idempotent. Lock held.

        Raises ProductionError for a step that was never taken.
        """
        if step >= self.progress.next_consumer_step:
            raise ProductionError(f"step {step} was acknowledged, but never taken; {self.describe()}")
        await self.buffer.acknowledge(step)
        self.ledger.trained(step)
        self.ledger.flush()

    async def state_dict(self, model_step: int | None) -> dict[str, Any]:
        """See Producer.state_dict. Lock held."""
        if self.pending.gate_open or len(self.pending):
            raise ProductionError(f"pause before saving: {self.describe()}")
        if model_step is not None:
            await self.acknowledge(model_step)
        progress = self.progress.state_dict()
        for step, groups in self.ledger.open_leases().items():
            progress["next_consumer_step"] = min(progress["next_consumer_step"], step)
            for task, count in groups.items():
                progress["consumed"][task] -= count
        self.ledger.flush()
        return {
            "version": self.version,
            "progress": progress,
            "samplers": {name: task.sampler.state_dict() for name, task in self.tasks.items()},
            "buffer": await self.buffer.state_dict(),
            "ledger": self.ledger.state_dict(),
        }

    async def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Producer.load_state_dict. Lock held."""
        if self.pending.gate_open or len(self.pending):
            raise CheckpointError(f"pause before restoring: {self.describe()}")
        missing = {"version", "progress", "samplers", "buffer", "ledger"} - set(state)
        if missing:
            raise CheckpointError(f"production state lacks {sorted(missing)}: it is damaged")
        self.ledger.load_state_dict(state["ledger"])
        self.progress.load_state_dict(state["progress"])
        for name, task in self.tasks.items():
            task.sampler.load_state_dict(state["samplers"].get(name, {}))
        await self.buffer.load_state_dict(state["buffer"])
        self.version = state["version"]
