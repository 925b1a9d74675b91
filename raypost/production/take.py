"""The consumer's side of production: take the batch of a step.

Owns the rules of a take; everything it looks at and moves is the ProduceContext's. A batch is leased, so
asking again for the same step gives the same batch. Called with the lock held.

    status EXPIRED_BATCH and newer weights exist   nothing: sync them, then ask for the same step again
    enough groups                                  the batch, with the status of production
    no group can come any more                     ProductionError with every counter
    a round ended early, and without a group       ProductionError
    otherwise                                      wait
"""

from __future__ import annotations

from raypost.errors import ProductionError
from raypost.packed import PackedGroups
from raypost.production.context import ProduceContext
from raypost.protocols import Lease, TakeStatus
from raypost.types import ProduceBatchStatus, Status

Take = tuple[TakeStatus, PackedGroups | None]


async def try_take(context: ProduceContext, step: int, *, refresh: bool) -> Take | None:
    """The batch of `step`, an empty result that asks for a sync, or None if it is not there yet.

    `refresh` ages the buffer first; what arrives while a consumer waits is aged already when it is put.

    Raises what ended production, and ProductionError for a step out of turn or one that can never be filled.
    """
    context.raise_failure()
    progress = context.progress
    if step != progress.next_consumer_step:
        raise ProductionError(
            f"the batch of step {step} was asked for, but step {progress.next_consumer_step} is next; "
            f"{context.describe()}"
        )
    await context.settle()
    context.raise_failure()
    if refresh:
        await context.refresh(step)
    behind = context.version is not None and step - 1 > context.version
    if context.status is ProduceBatchStatus.EXPIRED_BATCH and behind:
        return await _result(context, step, None), None
    wanted = {task: groups for task, groups in progress.allocation(step).items() if groups > 0}
    there = await _there(context, wanted)
    lease = await context.buffer.lease(step, there)
    if lease is None:
        if context.pending.gate_open and not any(there.values()):
            raise ProductionError(
                f"the round of step {step} ended without a group: should_continue must hold until there is one; "
                f"{context.describe()}"
            )
        if not await _can_resolve(context, step, wanted):
            if behind:
                return await _result(context, step, None), None
            raise ProductionError(await _dead_end(context, step, wanted))
        return None
    _consume(context, lease)
    # Ages what stays: from now on it can be trained at the next step at the earliest.
    await context.refresh(step + 1)
    context.pending.changed.notify()
    return await _result(context, step, lease), lease.batch


async def _there(context: ProduceContext, wanted: dict[str, int]) -> dict[str, int]:
    """What is leased: all that is wanted, or of tasks whose rounds may end early what there is of it."""
    early = {task for task in wanted if context.tasks[task].strategy.may_end_early}
    if not early:
        return wanted
    groups = (await context.counts()).groups
    there = {task: groups.get(task, {}).get(Status.COMPLETED, 0) for task in early}
    return {task: min(share, there[task]) if task in early else share for task, share in wanted.items()}


async def take_again(context: ProduceContext, step: int) -> PackedGroups:
    """The batch of a step that was taken and is not acknowledged. Raises ProductionError if there is none."""
    lease = await context.buffer.lease(step, {}) if step in context.ledger.open_leases() else None
    if lease is None:
        raise ProductionError(f"the batch of step {step} is trained and gone; {context.describe()}")
    return lease.batch


def _consume(context: ProduceContext, lease: Lease) -> None:
    taken: dict[str, int] = {}
    for task, _ in lease.keys:
        taken[task] = taken.get(task, 0) + 1
    context.ledger.leased(lease.keys, lease.step, lease.staleness)
    context.ledger.flush()
    context.progress.consume(lease.step, taken)


async def _can_resolve(context: ProduceContext, step: int, wanted: dict[str, int]) -> bool:
    """Whether the batch can still come without newer weights."""
    if context.version is None or not context.pending.gate_open:
        return True  # a resume is still to come, perhaps with newer weights
    progress = context.progress
    for task in wanted:
        strategy = context.tasks[task].strategy
        ahead = strategy.is_production_expired(progress.producer_future_step[task], context.version)
        if progress.target_upto[task] < step and ahead:
            return False
    if context.status is not ProduceBatchStatus.EXPIRED_BATCH or len(context.pending):
        return True
    groups = (await context.counts()).groups
    # Groups that expired after production had stopped are a deficit, which starts it again.
    return any(
        progress.available(task, groups.get(task, {}).get(Status.COMPLETED, 0)) < progress.target[task]
        for task in wanted
    )


async def _dead_end(context: ProduceContext, step: int, wanted: dict[str, int]) -> str:
    groups = (await context.counts()).groups
    return (
        f"step {step} can never be filled: production stopped at its staleness bound, the step needs {wanted}, "
        f"the buffer holds {groups}; {context.describe()}"
    )


async def _result(context: ProduceContext, step: int, lease: Lease | None) -> TakeStatus:
    groups = (await context.counts()).groups
    buffered = sum(stock.get(Status.COMPLETED, 0) for stock in groups.values())
    if lease is None:
        expired = str(ProduceBatchStatus.EXPIRED_BATCH)
        return TakeStatus(status=expired, step=step, num_groups=0, buffered=buffered)
    return TakeStatus(
        status=str(context.status),
        step=step,
        num_groups=len(lease.keys),
        num_samples=lease.num_samples,
        staleness=lease.staleness,
        buffered=buffered,
        metrics=context.progress.read_metrics(),
    )
