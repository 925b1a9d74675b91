"""BatchTaker: the consumer's side of production.

Owns the leases of the consumer: taking the batch of a step, giving it again, and ending its lease once it is
trained. A batch is passed on as the buffer gives it and never opened. Called with the pending set's lock held.

    status EXPIRED_BATCH and newer weights exist   nothing: sync them, then ask for the same step again
    a group in flight would be too old later       wait for it
    enough groups                                  the batch, with the status of production
    no group can come any more                     ProductionError with every counter
    a round ended early, and without a group       ProductionError
    otherwise                                      wait
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Generic, TypeVar

from raypost.errors import ProductionError
from raypost.production.context import ProduceContext
from raypost.types import (
    BatchMetrics,
    Buffer,
    GroupKey,
    Lease,
    ProduceBatchStatus,
    ProductionMetrics,
    Status,
    TakeStatus,
)

BatchT = TypeVar("BatchT")


class BatchTaker(Generic[BatchT]):
    """Leases one batch a step, in turn."""

    def __init__(self, context: ProduceContext, buffer: Buffer[BatchT]) -> None:
        """Lease from `buffer`, the context's own."""
        self._context = context
        self._buffer = buffer
        self._ledger = context.ledger
        self._pending = context.pending
        self._progress = context.progress
        self._taken: dict[int, TakeStatus] = {}
        """What was said of the steps since the last that is trained, and of that."""

    async def take(self, step: int, since_s: float) -> tuple[TakeStatus, BatchT | None] | None:
        """Return the batch of `step`, (status, None) to ask for a sync, or None if it is not there yet.

        `since_s` is when the consumer began to wait, by the context's clock. Raises what ended production, and
        ProductionError for a step out of turn or one that can never be filled.
        """
        if step in self._taken or step in self._ledger.open_leases():
            return await self._take_again(step, since_s)
        context, progress = self._context, self._progress
        context.raise_failure()
        if step != progress.next_consumer_step:
            raise ProductionError(
                f"the batch of step {step} was asked for, but step {progress.next_consumer_step} is next; "
                f"{context.describe()}"
            )
        await context.settle()
        context.raise_failure()
        await context.refresh(step)
        behind = context.version is not None and step - 1 > context.version
        if context.status is ProduceBatchStatus.EXPIRED_BATCH and behind:
            return await self._ask_for_sync(step, since_s), None
        wanted = {task: groups for task, groups in progress.allocation(step).items() if groups > 0}
        sizes = await self._sizes(wanted)
        if self._pending.gate_open and await self._is_owed(step, wanted):
            return None
        there = await self._completed()
        lease = None
        if all(there[task] >= groups for task, groups in sizes.items()):
            lease = await self._buffer.lease(step, sizes)
        if lease is not None:
            return await self._consume(lease, since_s), lease.batch
        if self._pending.gate_open and not any(sizes.values()):
            raise ProductionError(
                f"the round of step {step} ended without a group: should_continue must hold until there is one; "
                f"{context.describe()}"
            )
        if await self._can_resolve(step, wanted):
            return None
        if behind:
            return await self._ask_for_sync(step, since_s), None
        raise ProductionError(
            f"step {step} can never be filled: production stopped at its staleness bound, the step needs {wanted}, "
            f"the buffer holds {(await self._buffer.counts()).groups}; {context.describe()}"
        )

    async def acknowledge(self, step: int, left_out: Mapping[GroupKey, str]) -> None:
        """Record that the steps up to `step` are trained: their leases end. Idempotent.

        `left_out`: groups that the trainer left out, and why. Raises ProductionError for a step that was never taken.
        """
        if step >= self._progress.next_consumer_step:
            raise ProductionError(
                f"step {step} was acknowledged, but never taken; {self._context.describe()}"
            )
        # First the journal: what the trainer left out is known to nobody else.
        self._ledger.trained(step, left_out)
        self._ledger.flush()
        await self._buffer.acknowledge(step)
        self._progress.forget(step)
        self._taken = {taken: status for taken, status in self._taken.items() if taken >= step}
        self._pending.changed.notify()  # there is room again

    def forget(self) -> None:
        """Forget what was taken: another state was restored."""
        self._taken.clear()

    async def _sizes(self, wanted: dict[str, int]) -> dict[str, int]:
        """Return the groups to lease by task: all that are wanted, or, if rounds may end early, what there is."""
        early = {task for task in wanted if self._context.tasks[task].strategy.may_end_early}
        if not early:
            return wanted
        there = await self._completed()
        return {task: min(share, there[task]) if task in early else share for task, share in wanted.items()}

    async def _is_owed(self, step: int, wanted: dict[str, int]) -> bool:
        """Return whether the batch has to wait for groups, at work or started next, that would be too old later."""
        counts = await self._buffer.counts()
        return any(self._context.owed(self._context.tasks[task], counts, step) for task in wanted)

    async def _take_again(self, step: int, since_s: float) -> tuple[TakeStatus, BatchT]:
        lease = await self._buffer.lease(step, {}) if step in self._ledger.open_leases() else None
        if lease is None:
            raise ProductionError(f"the batch of step {step} is trained and gone; {self._context.describe()}")
        if step not in self._taken:
            # A producer that died took it; what it had counted until then died with it.
            self._taken[step] = await self._status_of(lease, since_s, ProductionMetrics())
        return self._taken[step], lease.batch

    async def _consume(self, lease: Lease[BatchT], since_s: float) -> TakeStatus:
        self._ledger.leased(lease.keys, lease.step, lease.staleness)
        self._ledger.flush()
        self._progress.consume(lease.step, Counter(task for task, _ in lease.keys))
        # Expire what stays: from now on it can be trained at the next step at the earliest.
        await self._context.refresh(lease.step + 1)
        self._pending.changed.notify()
        self._taken[lease.step] = await self._status_of(lease, since_s, self._progress.read_metrics())
        return self._taken[lease.step]

    async def _status_of(
        self, lease: Lease[BatchT], since_s: float, metrics: ProductionMetrics
    ) -> TakeStatus:
        return TakeStatus(
            status=self._context.status,
            step=lease.step,
            num_groups=len(lease.keys),
            num_samples=lease.num_samples,
            staleness=lease.staleness,
            wait_s=self._context.clock() - since_s,
            buffered=sum((await self._completed()).values()),
            metrics=metrics,
            tasks=self._of_tasks(lease),
        )

    def _of_tasks(self, lease: Lease[BatchT]) -> dict[str, BatchMetrics]:
        """Return what the batch has of each task, as far as the ledger knows its groups."""
        found: dict[str, BatchMetrics] = {}
        for key, staleness in zip(lease.keys, lease.staleness, strict=True):
            of_task, group = found.setdefault(key[0], BatchMetrics()), self._ledger.living_group(key)
            of_task.staleness.append(staleness)
            of_task.num_samples += group.members
            of_task.response_tokens += group.tokens
            of_task.rewards_sum += group.reward * group.rewarded
            of_task.rewards_count += group.rewarded
        return found

    async def _ask_for_sync(self, step: int, since_s: float) -> TakeStatus:
        return TakeStatus(
            status=ProduceBatchStatus.EXPIRED_BATCH,
            step=step,
            num_groups=0,
            wait_s=self._context.clock() - since_s,
            buffered=sum((await self._completed()).values()),
        )

    async def _can_resolve(self, step: int, wanted: dict[str, int]) -> bool:
        """Return whether the batch can still come without newer weights."""
        context, progress = self._context, self._progress
        if context.version is None or not self._pending.gate_open:
            return True  # a resume is still to come, perhaps with newer weights
        for task in wanted:
            strategy = context.tasks[task].strategy
            ahead = strategy.is_production_expired(progress.producer_future_step[task], context.version)
            if progress.target_upto[task] < step and ahead:
                return False
        if context.status is not ProduceBatchStatus.EXPIRED_BATCH or len(self._pending):
            return True
        there = await self._completed()
        # Groups that expired after production had stopped are a deficit, which starts it again.
        return any(progress.available(task, there[task]) < progress.target[task] for task in wanted)

    async def _completed(self) -> dict[str, int]:
        """Return the COMPLETED groups in the buffer by task."""
        groups = (await self._buffer.counts()).groups
        return {task: groups.get(task, {}).get(Status.COMPLETED, 0) for task in self._context.tasks}
