"""ReplayBuffer: groups by (task, status), owned here until they are trained or dropped.

Owns the order, ageing and expiry, what is handed out to be continued, and leases: a batch that is taken stays
here until it is acknowledged. Owns neither staleness arithmetic (staleness.py) nor what is produced; what must
survive the death of its process is the journal's (buffer_journal.py).

    put -> COMPLETED -> lease -> (ARCHIVED in `counts`) -> acknowledge -> gone
        -> ABORTED | EXPIRED -> pop -> (out) -> put | drop | reclaim

Invariants: a group is in one place only; ageing keeps the order among equals; FAILED and FILTERED groups are
never stored; a leased or acknowledged group is never stored again by a repeated put; nothing at or above its
threshold is ever leased; a change is journaled before it is made. Implements `protocols.Buffer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, Literal

from raypost.buffer.blocks import Block, Record, compact, gather, release
from raypost.buffer.encoding import equal_plain, from_plain, to_plain
from raypost.buffer.expiry import Expiry, staleness_at
from raypost.buffer.journal import BufferJournal
from raypost.buffer.state import Change, put_change
from raypost.buffer.status_index import Held, StatusIndex
from raypost.errors import CheckpointError, LedgerError
from raypost.ledger.ledger import OrdinalSet
from raypost.packed import PackedGroups, group_statuses, has_status, join_groups, split_groups
from raypost.protocols import BufferBounds, BufferCounts, ExpiredGroup, Lease, PutResult, TaskLimits
from raypost.types import GroupKey, Status

Order = Literal["stalest_first", "fifo"]


@dataclass(slots=True, frozen=True)
class _OpenLease:
    records: tuple[Record, ...]
    staleness: tuple[int, ...]


class ReplayBuffer:
    """All groups between production and training."""

    def __init__(
        self,
        limits: dict[str, TaskLimits],
        bounds: BufferBounds | None = None,
        order: Order = "stalest_first",
        journal: BufferJournal | None = None,
    ) -> None:
        """Begins with what `journal` holds. Raises CheckpointError if that is damaged or of other tasks, and
        ConfigError for limits under which a group would wait for ever."""
        self._expiry = Expiry(limits)
        self._bounds = bounds or BufferBounds()
        self._journal = journal
        self._index = StatusIndex(by_age=order == "stalest_first")
        self._out = Held()
        self._leased = Held()
        self._claim: tuple[int, tuple[GroupKey, ...]] = (0, ())
        self._reclaimed: tuple[GroupKey, ...] = ()
        self._expired: tuple[int, list[ExpiredGroup]] = (0, [])
        self._leases: dict[int, _OpenLease] = {}
        self._trained = {task: OrdinalSet() for task in limits}
        self._acknowledged = 0
        self._sequence = 0
        self._full = False
        self._restored = False
        if journal is not None:
            self._recover(journal)

    # ---------------------------------------------------------------- production's side

    async def put(self, packed: PackedGroups, train_step: int) -> list[PutResult]:
        """Store groups, aged at `train_step`; one result each, in order. A known key is replaced and keeps its
        place in the order; a leased or trained one changes nothing. Raises ConfigError for an unknown task and
        LedgerError for a key that is there twice; then nothing is stored."""
        keys = packed.keys
        for task in set(packed.tasks):
            self._expiry.limits_of(task)
        if len(set(keys)) < len(keys):
            raise LedgerError(f"one put has the same group twice: {sorted(keys)}")
        results, gone, stored, whole = [], [], [], True
        sequence = self._sequence
        block = Block(join_groups([packed]))
        for came in self._expiry.records(block, group_statuses(packed)):
            past = self._leased.get(came.key)
            if past is not None or came.key[1] in self._trained[came.key[0]]:
                age = staleness_at(past, train_step) if past else 0
                results.append(_result(Status.COMPLETED, age, stored=True))
                whole = False
                continue
            record, result = self._admitted(came, train_step)
            results.append(result)
            whole = whole and result.stored and record.block is block
            if not result.stored:
                gone.append(record.key)
                continue
            known = self._index.get(record.key) or self._out.get(record.key)
            record.sequence = known.sequence if known else sequence
            sequence += known is None
            stored.append(record)
        self._store(stored, gone, sequence, packed if whole else None)
        compact(block)
        return results

    def _admitted(self, record: Record, train_step: int) -> tuple[Record, PutResult]:
        stored = record.status not in (Status.FAILED, Status.FILTERED)
        age, too_old = staleness_at(record, train_step), stored and train_step >= record.expires_at
        if too_old:
            stored = self._expiry.limits_of(record.key[0]).retry
            record.status = Status.EXPIRED
            if stored:
                record = self._expiry.reset(record, train_step)
        elif record.status is Status.ABORTED and self._expiry.is_tried_out(record):
            # It stands with the expired ones, yet keeps its tokens: only its turn changes.
            record.status = Status.EXPIRED
        return record, _result(record.status, age, stored, too_old)

    def _store(
        self, stored: list[Record], gone: list[GroupKey], sequence: int, packed: PackedGroups | None = None
    ) -> None:
        """Journal and make one change. `packed`: all of `stored` as one, where that is at hand."""
        known = [key for key in gone if self._index.get(key) or self._out.get(key)]
        if stored or known:
            self._write(put_change(_facts(stored), known, sequence), stored, packed)
        keys = (*known, *(record.key for record in stored))
        release(past for key in keys if (past := self._index.remove(key) or self._out.remove(key)))
        for record in stored:
            self._index.add(record)
        self._sequence = sequence
        self._settle()

    async def refresh(self, train_step: int, claim: int = 0) -> list[ExpiredGroup]:
        """Age everything again at `train_step`; returns what newly expired. Groups that are leased or out do
        not age. The last `claim`, where it is not 0, asked again gives the same answer."""
        if claim and claim == self._expired[0]:
            return self._expired[1]
        old = [record for record in self._index if train_step >= record.expires_at]
        if not old:
            return []
        kept, gone, expired = [], [], []
        for record in old:
            retry = self._expiry.limits_of(record.key[0]).retry
            alone = record.packed
            if not has_status(alone, Status.EXPIRED):
                mean = int(alone.response_offsets[-1]) / alone.num_samples
                expired.append(ExpiredGroup(key=record.key, stored=retry, mean_tokens=mean))
            if retry:
                kept.append(self._expiry.reset(record, train_step))
            else:
                gone.append(record.key)
        change = put_change(_facts(kept), gone, self._sequence)
        if claim:
            change["expired"] = [claim, [[*one.key, one.stored, one.mean_tokens] for one in expired]]
        self._write(change, kept)
        self._expired = (claim, expired)
        for record in old:
            self._index.remove(record.key)
        release(old)
        for record in kept:
            self._index.add(record)
        self._settle()
        return expired

    async def pop(self, task: str, sources: Sequence[Status], limit: int, claim: int) -> PackedGroups | None:
        """Hand out up to `limit` groups to be continued: all of the first status, then the next; the buffer's
        order within. None if there are none.

        Claims begin at 1. The last one asked again gives those of its groups that are still out. Raises
        LedgerError for one before the last.
        """
        self._expiry.limits_of(task)
        last, keys = self._claim
        if claim < last:
            raise LedgerError(f"claim {claim} came after claim {last}: its groups would be handed out twice")
        if claim == last:
            again = [record for key in keys if (record := self._out.get(key))]
            return gather(again) if again else None
        shelves = (record for status in sources for record in self._index.in_order(task, status))
        chosen = list(islice(shelves, limit))
        keys = tuple(record.key for record in chosen)
        if chosen:
            self._write({"out": keys, "claim": claim})
            self._reclaimed = ()
        self._claim = (claim, keys)
        for record in chosen:
            self._index.remove(record.key)
            self._out.add(record)
        self._settle()
        return gather(chosen) if chosen else None

    async def drop(self, keys: Sequence[GroupKey]) -> None:
        """Forget popped groups that ended untrained. Groups that are not out are ignored."""
        self._store([], [key for key in keys if self._out.get(key)], self._sequence)

    async def reclaim(self) -> tuple[GroupKey, ...]:
        """Take back all popped groups as they were: whoever held them is gone, and claims begin again at 1.
        Returns their keys; the same ones when repeated before the next pop."""
        if self._out:
            self._write({"back": True})
            self._reclaimed = tuple(record.key for record in self._out)
            for record in self._out:
                self._index.add(record)
            self._out = Held()
        elif self._claim[0]:
            # Nothing comes back, but after a death of the buffer too claims begin at 1.
            self._write({"out": [], "claim": 0, "reclaimed": self._reclaimed})
        self._claim = (0, ())
        self._settle()
        return self._reclaimed

    # ---------------------------------------------------------------- the consumer's side

    async def lease(self, step: int, per_task: dict[str, int]) -> Lease[PackedGroups] | None:
        """Lease exactly that many COMPLETED groups a task in the buffer's order, or None and change nothing.
        Tokens at or above the task's token threshold are masked in the batch alone.

        Asked again for a step whose lease is open, it returns the same lease. Equally stale groups of a batch
        stand by task and group_id, so that equal batches are identical however their groups arrived. Raises
        LedgerError for a step that is acknowledged.
        """
        if step not in self._leases:
            if step <= self._acknowledged:
                raise LedgerError(
                    f"step {step} is acknowledged up to {self._acknowledged}: its batch would train twice"
                )
            chosen = self._choose(step, per_task)
            if not chosen:
                return None
            chosen.sort(key=lambda record: (-staleness_at(record, step), record.key))
            lease = _OpenLease(tuple(chosen), tuple(staleness_at(record, step) for record in chosen))
            self._write({"lease": [step, [record.key for record in chosen], lease.staleness]})
            for record in chosen:
                self._index.remove(record.key)
            self._open(step, lease)
        lease = self._leases[step]
        batch = gather(lease.records)
        self._expiry.mask(batch, step)
        return Lease(
            step=step,
            keys=batch.keys,
            staleness=lease.staleness,
            num_samples=batch.num_samples,
            batch=batch,
        )

    def _choose(self, step: int, per_task: dict[str, int]) -> list[Record]:
        chosen: list[Record] = []
        for task, wanted in per_task.items():
            self._expiry.limits_of(task)
            shelf = self._index.in_order(task, Status.COMPLETED)
            fresh = list(islice((record for record in shelf if step < record.expires_at), max(0, wanted)))
            if len(fresh) < wanted:
                return []
            chosen += fresh
        return chosen

    def _open(self, step: int, lease: _OpenLease) -> None:
        self._leases[step] = lease
        for record in lease.records:
            self._leased.add(record)

    async def acknowledge(self, step: int) -> tuple[GroupKey, ...]:
        """End all leases up to `step`: these groups are trained. Returns their keys; () when repeated."""
        if step <= self._acknowledged:
            return ()
        self._write({"ack": step})
        self._acknowledged = step
        leases = [self._leases.pop(one) for one in sorted(self._leases) if one <= step]
        ended = [record for lease in leases for record in lease.records]
        for record in ended:
            self._leased.remove(record.key)
            self._trained[record.key[0]].add(record.key[1])
        release(ended)
        self._settle()
        return tuple(record.key for record in ended)

    async def counts(self) -> BufferCounts:
        """Groups and bytes by task and status, and whether the buffer is full."""
        groups: dict[str, dict[Status, int]] = {task: {} for task in self._trained}
        nbytes: dict[str, dict[Status, int]] = {task: {} for task in self._trained}
        for task, status, count, pinned in self._index.counts():
            groups[task][status], nbytes[task][status] = count, pinned
        for task, count, pinned in self._leased.counts():
            groups[task][Status.ARCHIVED], nbytes[task][Status.ARCHIVED] = count, pinned
        for task, _, pinned in self._out.counts():
            nbytes[task][Status.INIT] = nbytes[task].get(Status.INIT, 0) + pinned
        return BufferCounts(groups=groups, nbytes=nbytes, is_full=self._full)

    def _settle(self) -> None:
        """After a change: see whether the buffer is full, and keep the journal small."""
        groups = len(self._index) + len(self._leased)
        pinned = self._index.nbytes + self._leased.nbytes + self._out.nbytes
        share = self._bounds.low_water if self._full else 1.0
        full = any(
            bound is not None and amount >= bound * share
            for amount, bound in ((groups, self._bounds.max_groups), (pinned, self._bounds.max_bytes))
        )
        if full != self._full:
            self._full = full
            if self._journal is not None:
                self._journal.append({"full": full})
        if self._journal is not None:
            self._journal.tidy()

    # ---------------------------------------------------------------- journal and checkpoint

    def _write(
        self, change: Change, stored: Sequence[Record] = (), packed: PackedGroups | None = None
    ) -> None:
        """Journal a change before it is made; `stored` are the groups it puts, `packed` the same as one."""
        self._restored = False
        if self._journal is not None:
            self._journal.append(change, packed or (gather(stored) if stored else None))

    def _recover(self, journal: BufferJournal) -> None:
        state = journal.state
        self._check_tasks({task for task, _ in state.entries} | set(state.trained), str(journal.folder))
        records = {}
        for key, alone in journal.payloads():
            entry = state.entries[key]
            records[key] = self._expiry.record(alone, entry.status, entry.sequence)
        for step, (keys, staleness) in state.leases.items():
            self._open(step, _OpenLease(tuple(records.pop(key) for key in keys), staleness))
        for key in state.out:
            self._out.add(records.pop(key))
        for record in records.values():
            self._index.add(record)
        claimed = tuple(key for key, claim in state.out.items() if claim == state.claim)
        self._claim = (state.claim, claimed)
        self._reclaimed = state.reclaimed
        claim, facts = state.expired
        self._expired = (claim, [ExpiredGroup(key=k, stored=s, mean_tokens=m) for k, s, m in facts])
        self._trained.update((task, OrdinalSet(one.ranges())) for task, one in state.trained.items())
        self._acknowledged = state.acknowledged
        self._sequence = state.next
        self._full = state.full
        self._restored = state.restored

    def _check_tasks(self, tasks: set[str], where: str) -> None:
        foreign = tasks - set(self._trained)
        if foreign:
            raise CheckpointError(
                f"{where} has tasks {sorted(foreign)}, this run has {sorted(self._trained)}"
            )

    async def state_dict(self) -> dict[str, Any]:
        """Everything needed to restore the buffer, as plain data and NumPy arrays. Groups that are out are
        saved as they were."""
        leased_for = {one.key: step for step, lease in self._leases.items() for one in lease.records}
        records = sorted([*self._index, *self._out, *self._leased], key=lambda one: one.sequence)
        return {
            "groups": to_plain(gather(records)) if records else None,
            "status": [str(record.status) for record in records],
            "sequence": [record.sequence for record in records],
            "leased_for": [leased_for.get(record.key, 0) for record in records],
            "next_sequence": self._sequence,
            "acknowledged": self._acknowledged,
            "trained": {task: ordinals.ranges() for task, ordinals in self._trained.items()},
        }

    async def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore into an empty buffer. A lease that was open becomes COMPLETED groups again: whoever saved
        the state acknowledged every step that the model saved with it has trained.

        Repeated before anything else happened, it does nothing. Raises CheckpointError if the buffer is not
        empty, or the state is damaged or of other tasks.
        """
        held = len(self._index) + len(self._leased) + len(self._out)
        if self._restored and equal_plain(
            {**await self.state_dict(), "leased_for": 0}, {**state, "leased_for": 0}
        ):
            return
        if held:
            raise CheckpointError(f"a buffer with {held} groups cannot be restored over")
        try:
            packed = from_plain(state["groups"]) if state["groups"] is not None else None
            parts = split_groups(packed) if packed is not None else []
            self._check_tasks({part.tasks[0] for part in parts} | set(state["trained"]), "buffer state")
            facts = zip(parts, state["status"], state["sequence"], strict=True)
            records = [self._expiry.record(part, Status(status), int(at)) for part, status, at in facts]
            trained = {str(task): OrdinalSet(ranges) for task, ranges in state["trained"].items()}
            following, acknowledged = int(state["next_sequence"]), int(state["acknowledged"])
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise CheckpointError(f"damaged buffer state: {error!r}") from error
        if self._journal is not None:
            change = put_change(_facts(records), [], following)
            change |= {"ack": acknowledged, "restored": True, "trained": state["trained"]}
            self._journal.replace(change, packed)
        for record in records:
            self._index.add(record)
        self._trained.update(trained)
        self._sequence = following
        self._acknowledged = acknowledged
        self._restored = True
        self._settle()


@lru_cache(maxsize=256)
def _result(status: Status, staleness: int, stored: bool, too_old: bool = False) -> PutResult:
    # One object for equal results: it crosses to the caller once a call, not once a group.
    return PutResult(status=status, staleness=staleness, stored=stored, too_old=too_old)


def _facts(records: Sequence[Record]) -> list[tuple[GroupKey, int, Status]]:
    return [(record.key, record.sequence, record.status) for record in records]
