"""How production is saved, restored from a checkpoint, and rebuilt after its process died.

What is true when the producer died, and who says so:

    the buffer      which groups are stored, as what, and which are leased
    the ledger      which groups were sampled, which ended and how, what each step was allotted, whether production was
                    paused, and with which version; as its journal has it, which lacks what was not flushed
    the samplers    nothing: a group's number is its place in the dataset, so the position is how many were sampled

Two orders of writing make these enough: a group's line is in the journal before the buffer hears of the group, so the
buffer holds none that the ledger does not know; and the ledger says that a step is trained, and what of it the trainer
left out, before the buffer ends the lease. A line that was lost is then either of a group that is sampled again, the
same one, or of something that the buffer did. What was counted since the last batch is lost, and counted by nobody.

Where the buffer lost a part of its journal, the ledger is right, and what only that part held is generated again. The
producer ends itself for it, since what it has at work may be of the state that was lost, and the next one rebuilds.

Invariants: rebuilt twice is rebuilt once; afterwards every group that has not ended is in the buffer, leased or not,
and nothing is in flight; a restored state adds up, or is refused.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from raypost.errors import CheckpointError, ProductionError
from raypost.ledger.events import LedgerEvent
from raypost.ledger.facts import GroupPlace
from raypost.production.context import ProduceContext
from raypost.types import BufferContents, Group, GroupKey, OpenLease, Rebuilt, Status
from raypost.types.packed import pack_groups

CLAIMS = 1 << 40
"""Claims of one process at most; those of the next are above them."""


# ---------------------------------------------------------------- a checkpoint


async def saved(context: ProduceContext) -> dict[str, Any]:
    """See Producer.state_dict. Lock held, nothing pending."""
    context.ledger.flush()
    return {
        "version": context.version,
        "progress": context.progress.state_dict(undone=context.ledger.open_leases()),
        "samplers": {name: task.sampler.state_dict() for name, task in context.tasks.items()},
        "buffer": await context.buffer.state_dict(),
        "ledger": context.ledger.state_dict(),
    }


async def restore(context: ProduceContext, state: dict[str, Any]) -> None:
    """See Producer.load_state_dict. Lock held."""
    if not context.pending.is_stopped:
        raise CheckpointError(f"pause before restoring: {context.describe()}")
    missing = {"version", "progress", "samplers", "buffer", "ledger"} - set(state)
    if missing:
        raise CheckpointError(f"production state lacks {sorted(missing)}: it is damaged")
    if context.ledger.last_note[0] is LedgerEvent.RESTORED:
        return  # the process that did it died, and this one was rebuilt
    context.progress.load_state_dict(state["progress"])
    for name, task in context.tasks.items():
        task.sampler.load_state_dict(state["samplers"].get(name, {}))
    # Before the ledger, whose line says that all of it was done.
    await context.buffer.load_state_dict(state["buffer"])
    context.ledger.load_state_dict(state["ledger"])
    context.version = state["version"]
    context.forget_refresh()
    await _check(context)
    await _drop_what_is_not_retried(context)


async def _check(context: ProduceContext) -> None:
    """Raise CheckpointError unless ledger, buffer, samplers and counters say the same."""
    ledger = context.ledger
    contents = await context.buffer.reclaim(context.next_claim())
    living = {key for key, _ in ledger.live()}
    if living != contents.groups.keys():
        odd = sorted(living ^ contents.groups.keys())
        raise CheckpointError(
            f"the restored state does not add up: of {len(living)} groups that the ledger has not ended and "
            f"{len(contents.groups)} in the buffer, {len(odd)} are in one of them only, for instance {odd[0]}"
        )
    for name, task in context.tasks.items():
        sampled, consumed = ledger.sampled_of(name), ledger.consumed(name)
        said = (task.sampler.position, context.progress.consumed[name])
        if said != (sampled, consumed):
            raise CheckpointError(
                f"the restored state of task {name!r} does not add up: the ledger has {sampled} groups sampled and "
                f"{consumed} taken, sampler and progress say {said[0]} and {said[1]}"
            )


async def _drop_what_is_not_retried(context: ProduceContext) -> None:
    """Drop groups that wait to be generated again, where the configuration met says that expired ones are dropped."""
    for name, task in context.tasks.items():
        if task.strategy.limits.retry:
            continue
        counts = await context.buffer.counts()
        waiting = counts.groups[name].get(Status.EXPIRED, 0)
        packed = await context.buffer.pop(name, [Status.EXPIRED], waiting, context.next_claim())
        if packed is None:
            continue
        await context.buffer.drop(packed.keys)
        for key in packed.keys:
            context.ledger.dropped(
                key, Status.EXPIRED, why="tail_batch_trigger_size is now -1: not generated again"
            )
    context.ledger.flush()


# ---------------------------------------------------------------- a death


async def rebuild(context: ProduceContext, incarnation: int) -> Rebuilt:
    """Become what production was when its process died. Lock held; see the module.

    `incarnation`: how often that happened, so that calls which the dead ones made and that come late are refused.
    Raises ProductionError if ledger and buffer contradict each other.
    """
    context.claim = max(context.claim, incarnation * CLAIMS)
    contents = await context.buffer.reclaim(context.claim)
    cut = contents.cut
    if cut:
        contents = await _mend(context)
    _check_known(context, contents)
    next_step = await _rebuild_leases(context, contents)
    account = _account_of(context, contents)
    for key in account.expired:
        context.ledger.dropped(key, Status.EXPIRED)
    for key in account.came_back:
        context.ledger.stored(key, contents.groups[key], put_back=True)
    for key in account.aged:
        context.ledger.stored(key, contents.groups[key])
    consumed = {name: context.ledger.consumed(name) for name in context.tasks}
    context.progress.rebuild(next_step, consumed, context.ledger.allotted)
    context.forget_refresh()
    await _sample_again(context, account.lost)
    rebuilt = Rebuilt(
        continued=len(account.came_back), from_prompt=len(account.lost), incarnation=incarnation, cut=cut
    )
    context.ledger.note(LedgerEvent.REBUILT, **rebuilt._asdict())
    context.ledger.flush()
    return rebuilt


async def _mend(context: ProduceContext) -> BufferContents:
    """Have a buffer whose journal was cut agree with the ledger; return what it holds then."""
    ledger, leases = context.ledger, dict[int, OpenLease]()
    for step in ledger.open_leases():
        keys = ledger.leased_keys(step)
        leases[step] = OpenLease(tuple(keys), tuple(ledger.living_group(key).staleness or 0 for key in keys))
    living = [key for key, _ in ledger.live()]
    return await context.buffer.mend(context.claim, living, leases, ledger.trained_step)


def _check_known(context: ProduceContext, contents: BufferContents) -> None:
    """Raise ProductionError if the buffer holds what the ledger says is gone, or knows nothing of."""
    leased = (key for lease in contents.leases.values() for key in lease.keys)
    odd = [key for key in contents.groups if not context.ledger.lives(key)]
    odd += [key for key in leased if not context.ledger.knows(key)]
    if odd:
        raise ProductionError(
            f"production cannot go on where it was: the buffer holds {len(odd)} groups that have ended or never were, "
            f"for instance {odd[0]}; continue the run from its last checkpoint"
        )


async def _rebuild_leases(context: ProduceContext, contents: BufferContents) -> int:
    """End the leases that the ledger says are trained, note the others; return the step that is taken next."""
    ledger, last = context.ledger, max(contents.acknowledged, *context.ledger.open_leases(), 0)
    for step, lease in sorted(contents.leases.items()):
        last = max(last, step)
        open_ones = [(key, age) for key, age in zip(*lease, strict=True) if ledger.lives(key)]
        if not open_ones:
            await context.buffer.acknowledge(step)
            continue
        for key, _ in open_ones:
            if ledger.living_group(key).place is GroupPlace.IN_FLIGHT:
                ledger.stored(key, Status.COMPLETED)  # its line was lost, and what was put was taken
        ledger.leased([key for key, _ in open_ones], step, [age for _, age in open_ones])
    return last + 1


@dataclass(slots=True)
class _Account:
    """Groups by what the buffer says of them, where that is not what the ledger says."""

    came_back: list[GroupKey]
    """In flight when the producer died, and stored before."""
    aged: list[GroupKey]
    """Found too old, or put, by a call whose answer nobody heard."""
    expired: list[GroupKey]
    """Dropped by such a call."""
    lost: list[GroupKey]
    """In flight when the producer died, and never stored."""


def _account_of(context: ProduceContext, contents: BufferContents) -> _Account:
    account = _Account([], [], [], [])
    leased = {key for lease in contents.leases.values() for key in lease.keys}
    for key, group in context.ledger.living():
        status = contents.groups.get(key)
        if key in leased or group.place is GroupPlace.LEASED:
            continue  # of a lease that was lost with the buffer's journal, its batch may be in training
        if status is None:
            dropped = group.place is GroupPlace.BUFFERED and key in contents.dropped
            (account.expired if dropped else account.lost).append(key)
        elif group.place is GroupPlace.IN_FLIGHT:
            account.came_back.append(key)
        elif group.status != status:
            account.aged.append(key)
    return account


async def _sample_again(context: ProduceContext, lost: list[GroupKey]) -> None:
    """Set the samplers behind what was sampled, and store what only the dead process had, as when it was sampled."""
    ordinals: dict[str, list[int]] = defaultdict(list)
    for name, group_id in lost:
        ordinals[name].append(group_id)
    groups: list[Group] = []
    for name, task in context.tasks.items():
        position = context.ledger.sampled_of(name)
        groups += task.sampler.continue_at(position, ordinals[name])
    for state in (state for group in groups for state in group.states):
        state.status = Status.ABORTED
    if groups:
        results = await context.buffer.put(
            pack_groups(groups), context.progress.next_consumer_step, context.claim
        )
        for group, result in zip(groups, results, strict=True):
            context.ledger.stored(group.key, result.status, put_back=True)
