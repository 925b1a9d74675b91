"""ReplayBuffer: groups by (task, status), owned here until they are trained or dropped.

Decides what happens to the groups: their order, their expiry, what is handed out to be continued, and leases: a
batch that is taken stays here until it is acknowledged. Every decision is a Change, which the journal writes down
(journal.py), the state applies (state.py) and the arrays follow (group_store.py). Owns neither staleness arithmetic
(staleness.py) nor what is produced.

    put -> COMPLETED -> lease -> (ARCHIVED in `counts`) -> acknowledge -> gone
        -> ABORTED | EXPIRED -> pop -> (out) -> put | drop | reclaim

Invariants: a group is in one place only; time keeps the order among equals; FAILED and FILTERED groups are never
stored; a leased or acknowledged group is never stored again by a repeated put; nothing at or above its threshold is
ever leased; a change is journaled before it is made; a buffer whose journal was cut answers nothing before it agrees
with the ledger again. Implements `types.buffer.Buffer`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

from raypost.buffer.encoding import equal_plain
from raypost.buffer.expiry import Expiry, staleness_at
from raypost.buffer.group_store import GroupStore
from raypost.buffer.journal import BufferJournal
from raypost.buffer.saved import check_format, restoring, saved
from raypost.buffer.state import BufferState, Change
from raypost.buffer.status_index import StoredGroup
from raypost.errors import BufferCutError, CheckpointError, LedgerError
from raypost.types import (
    BufferBounds,
    BufferContents,
    BufferCounts,
    ExpiredGroup,
    GroupKey,
    Lease,
    OpenLease,
    PutResult,
    Status,
    TaskLimits,
)
from raypost.types.packed import PackedGroups, group_statuses, has_status, join_groups, slice_groups


class ReplayBuffer:
    """All groups between production and training."""

    def __init__(
        self,
        limits: dict[str, TaskLimits],
        bounds: BufferBounds | None = None,
        journal: BufferJournal | None = None,
    ) -> None:
        """Begin with what `journal` holds.

        Raises CheckpointError if that is of other tasks, and ConfigError for limits under which a group
        would wait forever.
        """
        self._expiry = Expiry(limits)
        self._bounds = bounds or BufferBounds()
        self._journal = journal
        self.state = BufferState()
        """Changed by the buffer alone."""
        self.groups = GroupStore()
        """The arrays of the state's groups."""
        if journal is not None:
            for packed in journal.recover(self.state):
                self.groups.add(packed)
            self._expiry.check_tasks(
                {task for task, _ in self.state.groups} | self.state.trained.keys(), str(journal.folder)
            )

    # ---------------------------------------------------------------- production's side

    async def put(self, packed: PackedGroups, train_step: int, claim: int = 0) -> list[PutResult]:
        """Store groups, aged at `train_step`; one result each, in order.

        A known key is replaced and keeps its place in the order; a leased or trained one changes nothing. Raises
        ConfigError for an unknown task and LedgerError for a key that is there twice, or a `claim` that is not 0 and of
        a former holder; then nothing is stored.
        """
        state, keys = self.state, packed.keys
        self._check_holder(claim)
        for task in set(packed.tasks):
            self._expiry.limits_of(task)
        if len(set(keys)) < len(keys):
            raise LedgerError(f"one put has the same group twice: {sorted(keys)}")
        copied, sequence = join_groups([packed]), state.next
        results: list[PutResult] = []
        stored: list[StoredGroup] = []
        parts: list[int | PackedGroups] = []
        gone: list[GroupKey] = []
        facts = zip(keys, group_statuses(copied), self._expiry.facts(copied), strict=True)
        for index, (key, status, of_age) in enumerate(facts):
            known = state.groups.get(key)
            if key in state.leased or state.is_trained(key):
                age = staleness_at(known, train_step) if known else 0
                results.append(_result(Status.COMPLETED, age, stored=True))
                continue
            place = known.sequence if known else sequence
            group = StoredGroup(key, place, status, *of_age)
            result = self._admit(group, copied, index, train_step)
            results.append(result)
            if not result.stored:
                gone.append(key)
                continue
            sequence += known is None
            part: int | PackedGroups = index
            if result.too_old:
                part = self._expiry.reset(slice_groups(copied, index, index + 1), train_step)
                group = self._expired(group, part)
            elif result.status is not status:
                group = group._replace(status=result.status)
            stored.append(group)
            parts.append(part)
        known_gone = [key for key in gone if key in state.groups]
        if stored or known_gone:
            self._commit({"put": stored, "gone": known_gone}, _chosen(copied, parts))
        return results

    def _admit(self, group: StoredGroup, copied: PackedGroups, index: int, train_step: int) -> PutResult:
        status, age = group.status, staleness_at(group, train_step)
        if status in (Status.FAILED, Status.FILTERED):
            return _result(status, age, stored=False)
        if train_step >= group.expires_at:
            retry = self._expiry.limits_of(group.key[0]).retry
            return _result(Status.EXPIRED, age, stored=retry, too_old=True)
        if status is Status.ABORTED and self._expiry.is_tried_out(slice_groups(copied, index, index + 1)):
            # It stands with the expired ones, yet keeps its tokens: only its turn changes.
            status = Status.EXPIRED
        return _result(status, age, stored=True)

    def _expired(self, group: StoredGroup, alone: PackedGroups) -> StoredGroup:
        """Return what the state says of a group whose expired members were reset to `alone`."""
        (facts,) = self._expiry.facts(alone)
        return StoredGroup(group.key, group.sequence, Status.EXPIRED, *facts)

    async def refresh(self, train_step: int, claim: int = 0) -> list[ExpiredGroup]:
        """Age everything again at `train_step`; returns what newly expired.

        Groups that are leased or out do not age. The last `claim`, where it is not 0, asked again gives the same
        answer. Raises LedgerError for a claim of a former holder.
        """
        state = self.state
        self._check_holder(claim)
        if claim and claim == state.expired[0]:
            return state.expired[1]
        kept: list[StoredGroup] = []
        parts: list[PackedGroups] = []
        gone: list[GroupKey] = []
        expired: list[ExpiredGroup] = []
        for key, group in state.groups.items():
            if train_step < group.expires_at or key in state.out or key in state.leased:
                continue
            retry, alone = self._expiry.limits_of(key[0]).retry, self.groups.view(key)
            if not retry or not has_status(alone, Status.EXPIRED):
                mean = int(alone.response_offsets[-1]) / alone.num_members
                expired.append(ExpiredGroup(key=key, stored=retry, mean_tokens=mean))
            if retry:
                parts.append(self._expiry.reset(alone, train_step))
                kept.append(self._expired(group, parts[-1]))
            else:
                gone.append(key)
        if kept or gone:
            change: Change = {"put": kept, "gone": gone}
            if claim:
                change["expired"] = (claim, expired)
            self._commit(change, join_groups(parts) if parts else None)
        return expired

    async def pop(self, task: str, sources: Sequence[Status], limit: int, claim: int) -> PackedGroups | None:
        """Hand out up to `limit` groups to be continued, or None if there are none.

        All of the first status go first, then the next; the buffer's order within. Claims begin at 1. The last one
        asked again gives those of its groups that are still out. Raises LedgerError for one before the last.
        """
        self._expiry.limits_of(task)
        self._check_whole()
        state = self.state
        if claim < state.claim:
            raise LedgerError(
                f"claim {claim} came after claim {state.claim}: its groups would be handed out twice"
            )
        if claim == state.claim:
            keys = [key for key, given in state.out.items() if given == claim]
        else:
            waiting = (key for status in sources for key in state.index.keys(task, status))
            keys = list(islice(waiting, limit))
            self._commit({"out": (claim, keys)})
        return self.groups.gather(keys) if keys else None

    async def drop(self, keys: Sequence[GroupKey]) -> None:
        """Forget popped groups that ended untrained. Groups that are not out are ignored."""
        self._check_whole()
        gone = [key for key in keys if key in self.state.out]
        if gone:
            self._commit({"gone": gone})

    async def reclaim(self, claim: int) -> BufferContents:
        """Take back all popped groups as they were, since nobody holds them any more; returns what the buffer holds.

        The next holder's claims are above `claim`; a call that claims less is refused from here on. Raises LedgerError
        unless `claim` is above that of every pop.
        """
        state = self.state
        if claim < state.claim:
            raise LedgerError(f"claim {claim} came after claim {state.claim}: its holder was replaced")
        if state.out or claim != state.fence:
            self._commit({"back": claim})
        return self._contents()

    def _contents(self) -> BufferContents:
        state = self.state
        return BufferContents(
            groups={key: one.status for key, one in state.groups.items() if key not in state.leased},
            leases=dict(state.leases),
            acknowledged=state.acknowledged,
            dropped=tuple(one.key for one in state.expired[1] if not one.stored),
            cut=state.cut,
        )

    async def mend(
        self,
        claim: int,
        living: Collection[GroupKey],
        leases: Mapping[int, OpenLease],
        acknowledged: int,
        batches: Mapping[int, PackedGroups] | None = None,
    ) -> BufferContents:
        """Make a buffer whose journal was cut agree with the ledger, which says these; then it answers again.

        `batches`: those of open leases that are kept elsewhere. A lease with neither its batch nor all of its groups is
        not made again: it can be acknowledged, and not given again. Repeated, it changes nothing. Raises LedgerError
        for a claim of a former holder.
        """
        self._check_claim(claim)
        if self.state.cut:
            living = set(living)
            self._forget([key for key in self.state.groups if key not in living])
            for step, lease in sorted(leases.items()):
                self._lease_again(step, lease, (batches or {}).get(step))
            self._commit({"ack": acknowledged, "cut": ""})
        return self._contents()

    def _lease_again(self, step: int, lease: OpenLease, batch: PackedGroups | None) -> None:
        """Make a lease that was lost: of its batch if that is there, else of its groups if all of them are."""
        change: Change = {"lease": (step, lease.keys, lease.staleness)}
        if batch is not None and batch.keys == lease.keys:
            batch, first = join_groups([batch]), self.state.next
            facts = enumerate(zip(batch.keys, self._expiry.facts(batch), strict=True), first)
            change["put"] = [StoredGroup(key, at, Status.COMPLETED, *of_age) for at, (key, of_age) in facts]
            self._commit(change, batch)
            return
        known = [self.state.groups.get(key) for key in lease.keys]
        if all(one is not None and one.status is Status.COMPLETED for one in known):
            self._commit(change)
        else:
            self._forget([one.key for one in known if one is not None])

    def _forget(self, keys: list[GroupKey]) -> None:
        if keys:
            self._commit({"gone": keys})

    def lose(self, why: str) -> None:
        """Note that what it held is lost: until it was mended it answers nothing."""
        self._commit({"cut": why})

    def _check_whole(self) -> None:
        if self.state.cut:
            raise BufferCutError(
                f"the replay buffer came back without all that it held: {self.state.cut}; it waits until the producer, "
                "which knows what it must hold, has made it whole"
            )

    def _check_holder(self, claim: int) -> None:
        self._check_whole()
        self._check_claim(claim)

    def _check_claim(self, claim: int) -> None:
        if claim and claim < self.state.fence:
            raise LedgerError(
                f"claim {claim} is of a holder that was replaced: claims go on behind {self.state.fence}"
            )

    # ---------------------------------------------------------------- the consumer's side

    async def lease(self, step: int, per_task: dict[str, int]) -> Lease[PackedGroups] | None:
        """Lease exactly that many COMPLETED groups a task in the buffer's order, or None and change nothing.

        Tokens at or above the task's token threshold are masked in the batch alone. Asked again for a step whose lease
        is open, it returns the same lease. Equally stale groups of a batch stand by task and group_id, so that equal
        batches are identical however their groups arrived. Raises LedgerError for a step that is acknowledged.
        """
        self._check_whole()
        state = self.state
        if step not in state.leases:
            if step <= state.acknowledged:
                raise LedgerError(
                    f"step {step} is acknowledged up to {state.acknowledged}: its batch would train twice"
                )
            chosen = self._choose(step, per_task)
            if not chosen:
                return None
            ages = sorted((-staleness_at(group, step), group.key) for group in chosen)
            self._commit({"lease": (step, [key for _, key in ages], [-age for age, _ in ages])})
        lease = state.leases[step]
        batch = self.groups.gather(lease.keys)
        self._expiry.mask(batch, step)
        return Lease(
            step=step, keys=lease.keys, staleness=lease.staleness, num_samples=batch.num_members, batch=batch
        )

    def _choose(self, step: int, per_task: dict[str, int]) -> list[StoredGroup]:
        chosen: list[StoredGroup] = []
        for task, wanted in per_task.items():
            self._expiry.limits_of(task)
            if self.state.index.count(task, Status.COMPLETED) < wanted:
                return []
            completed = map(self.state.groups.__getitem__, self.state.index.keys(task, Status.COMPLETED))
            fresh = list(islice((group for group in completed if step < group.expires_at), max(0, wanted)))
            if len(fresh) < wanted:
                return []
            chosen += fresh
        return chosen

    async def acknowledge(self, step: int) -> tuple[GroupKey, ...]:
        """End all leases up to `step`: these groups are trained. Returns their keys; () when repeated."""
        self._check_whole()
        return tuple(self._commit({"ack": step})) if step > self.state.acknowledged else ()

    async def counts(self) -> BufferCounts:
        """Return the groups and bytes by task and status, and whether the buffer is full."""
        self._check_whole()
        return self.state.counts(self._expiry.tasks, self._bounds)

    async def then_counts(self, method: str, *args: Any) -> tuple[Any, BufferCounts]:
        """Return the answer to a call, and the counts after it."""
        return await getattr(self, method)(*args), await self.counts()

    # ---------------------------------------------------------------- changes

    def _commit(self, change: Change, packed: PackedGroups | None = None) -> list[GroupKey]:
        """Journal and make one change; `packed` are the groups that it puts. Returns those that ended."""
        ended = self._apply(change, packed)
        self.groups.remove(ended)
        if packed is not None:
            self.groups.add(packed)
        full = self.state.is_beyond(self._bounds)
        if full != self.state.full:
            self._apply({"full": full})
        if self._journal is not None:
            self._journal.tidy()
        return ended

    def _apply(self, change: Change, packed: PackedGroups | None = None) -> list[GroupKey]:
        if self._journal is None:
            return self.state.apply(change)
        return self._journal.append(change, packed)

    # ---------------------------------------------------------------- checkpoint

    async def state_dict(self) -> dict[str, Any]:
        """Return everything needed to restore the buffer, as plain data and NumPy arrays.

        Groups that are out are saved as they were.
        """
        self._check_whole()
        return saved(self.state, self.groups, self._expiry.tasks)

    async def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore into an empty buffer.

        A lease that was open becomes COMPLETED groups again: all steps that the model saved with this state has
        trained were acknowledged before. Repeated before anything else happened, it does nothing. Raises
        CheckpointError if the buffer is not empty, or the state is damaged or of other tasks.
        """
        check_format(state)
        if self.state.restored and equal_plain(
            {**await self.state_dict(), "leased_for": 0}, {**state, "leased_for": 0}
        ):
            return
        if self.groups:
            raise CheckpointError(f"a buffer with {len(self.groups)} groups cannot be restored over")
        self._commit(*restoring(state, self._expiry))


def _chosen(packed: PackedGroups, parts: Sequence[int | PackedGroups]) -> PackedGroups | None:
    """Join the groups of `packed` at these indices, or those that are given in their place."""
    if not parts:
        return None
    if list(parts) == list(range(packed.num_groups)):
        return packed
    return join_groups([slice_groups(packed, one, one + 1) if isinstance(one, int) else one for one in parts])


@lru_cache(maxsize=256)
def _result(status: Status, staleness: int, stored: bool, too_old: bool = False) -> PutResult:
    # One object for equal results: it crosses to the caller once a call, not once a group.
    return PutResult(status=status, staleness=staleness, stored=stored, too_old=too_old)
