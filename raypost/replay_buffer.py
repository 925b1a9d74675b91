"""ReplayBuffer: groups by (task, status), owned here until they are trained or dropped.

Owns the order (stalest first, ties first in first out), ageing and expiry, and leases: a batch that is taken
stays here until it is acknowledged. Owns neither staleness arithmetic (staleness.py) nor what is produced.

    put -> COMPLETED -> lease -> (ARCHIVED in `counts`) -> acknowledge -> gone
        -> ABORTED | EXPIRED -> pop -> (generated again) -> put

Invariants: a group is in one place only; ageing keeps the order among equals; FAILED and FILTERED groups are
never stored; a leased or acknowledged group is never stored again by a repeated put; nothing at or above its
threshold is ever leased. Implements `protocols.Buffer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from raypost.errors import CheckpointError, ConfigError, LedgerError
from raypost.ledger import OrdinalSet
from raypost.packed import PackedGroups, pack_groups, unpack_groups
from raypost.protocols import ExpiredGroup, Lease, PutResult, TaskLimits
from raypost.staleness import is_expired, oldest_version, staleness_of
from raypost.types import Group, GroupKey, SampleParams, Status


@dataclass(slots=True)
class _Record:
    group: Group
    status: Status
    sequence: int
    oldest: list[int | None]
    """Oldest version of each member; kept, because ageing asks for it twice a step."""
    staleness: int = 0

    @property
    def order(self) -> tuple[int, int]:
        return (-self.staleness, self.sequence)

    def staleness_at(self, train_step: int) -> int:
        return max(0 if version is None else staleness_of(version, train_step) for version in self.oldest)


@dataclass(slots=True)
class _OpenLease:
    records: list[_Record]
    staleness: tuple[int, ...]


def mean_tokens(group: Group) -> float:
    """Mean response length of a group's members, tokens."""
    return group.num_tokens / len(group.states)


class ReplayBuffer:
    """All groups between production and training."""

    def __init__(self, limits: dict[str, TaskLimits]) -> None:
        self._limits = dict(limits)
        self._shelves: dict[tuple[str, Status], dict[GroupKey, _Record]] = {}
        self._records: dict[GroupKey, _Record] = {}
        self._leases: dict[int, _OpenLease] = {}
        self._leased: dict[GroupKey, _Record] = {}
        self._trained = {task: OrdinalSet() for task in limits}
        self._acknowledged = 0
        self._sequence = 0

    # ---------------------------------------------------------------- production's side

    async def put(self, packed: PackedGroups, train_step: int) -> PutResult:
        """Store ONE group (packed alone), aged at `train_step`. A second put of the same key replaces it and
        keeps its place in the order; once it is leased or trained, a second put changes nothing."""
        (group,) = unpack_groups(_owned(packed))
        limits, key = self._limits_of(group.task), group.key
        past = self._leased.get(key)
        if past is not None or group.group_id in self._trained[group.task]:
            return PutResult(status=Status.COMPLETED, staleness=past.staleness if past else 0, stored=True)
        known = self._remove(key)
        record = _Record(
            group=group,
            status=group.status,
            sequence=known.sequence if known else self._sequence,
            oldest=[oldest_version(state) for state in group.states],
        )
        self._sequence += known is None
        if record.status in (Status.FAILED, Status.FILTERED):
            return PutResult(status=record.status, staleness=record.staleness_at(train_step), stored=False)
        age = record.staleness_at(train_step)
        stored = not _expire(record, limits, train_step) or limits.retry
        if stored:
            self._store(record)
        return PutResult(status=record.status, staleness=age, stored=stored)

    async def refresh(self, train_step: int) -> list[ExpiredGroup]:
        """Age everything again at `train_step`; returns what newly expired. Leased groups do not age."""
        expired = []
        for key, record in list(self._records.items()):
            limits = self._limits[record.group.task]
            before, length = record.status, mean_tokens(record.group)
            if not _expire(record, limits, train_step):
                continue
            self._shelves[key[0], before].pop(key)
            if limits.retry:
                self._shelf(record)[key] = record
            else:
                del self._records[key]
            if before is not Status.EXPIRED:
                expired.append(ExpiredGroup(key=key, stored=limits.retry, mean_tokens=length))
        return expired

    async def pop(self, task: str, status: Status) -> PackedGroups | None:
        """Remove and return the first group of that task and status (stalest first), or None."""
        self._limits_of(task)
        shelf = self._shelves.get((task, status))
        if not shelf:
            return None
        record = min(shelf.values(), key=lambda one: one.order)
        self._remove(record.group.key)
        return pack_groups([record.group])

    # ---------------------------------------------------------------- the consumer's side

    async def lease(self, step: int, per_task: dict[str, int]) -> Lease | None:
        """Lease exactly that many COMPLETED groups a task, stalest first, or None and change nothing.

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
            chosen.sort(key=lambda record: (-record.staleness_at(step), record.group.key))
            for record in chosen:
                self._remove(record.group.key)
                self._leased[record.group.key] = record
            self._leases[step] = _OpenLease(chosen, tuple(record.staleness_at(step) for record in chosen))
        lease = self._leases[step]
        groups = [record.group for record in lease.records]
        keys = tuple(group.key for group in groups)
        return Lease(step=step, keys=keys, staleness=lease.staleness, packed=pack_groups(groups))

    def _choose(self, step: int, per_task: dict[str, int]) -> list[_Record]:
        chosen: list[_Record] = []
        for task, wanted in per_task.items():
            threshold = self._limits_of(task).stale_threshold
            shelf = self._shelves.get((task, Status.COMPLETED), {})
            fresh = [one for one in shelf.values() if not is_expired(one.staleness_at(step), threshold)]
            if len(fresh) < wanted:
                return []
            chosen += sorted(fresh, key=lambda one: (-one.staleness_at(step), one.sequence))[:wanted]
        return chosen

    async def acknowledge(self, step: int) -> tuple[GroupKey, ...]:
        """End all leases up to `step`: these groups are trained. Returns their keys; () when repeated."""
        self._acknowledged = max(self._acknowledged, step)
        keys = []
        for leased_step in sorted(one for one in self._leases if one <= step):
            for record in self._leases.pop(leased_step).records:
                key = record.group.key
                del self._leased[key]
                self._trained[key[0]].add(key[1])
                keys.append(key)
        return tuple(keys)

    async def counts(self) -> dict[str, dict[Status, int]]:
        """Groups by task and status; leased ones count as ARCHIVED until acknowledged."""
        counts: dict[str, dict[Status, int]] = {task: {} for task in self._limits}
        for (task, status), shelf in self._shelves.items():
            if shelf:
                counts[task][status] = len(shelf)
        for task, _ in self._leased:
            counts[task][Status.ARCHIVED] = counts[task].get(Status.ARCHIVED, 0) + 1
        return counts

    # ---------------------------------------------------------------- shelves

    def _limits_of(self, task: str) -> TaskLimits:
        if task not in self._limits:
            raise ConfigError(f"the buffer knows no task {task!r}, only {sorted(self._limits)}")
        return self._limits[task]

    def _shelf(self, record: _Record) -> dict[GroupKey, _Record]:
        return self._shelves.setdefault((record.group.task, record.status), {})

    def _store(self, record: _Record) -> None:
        self._records[record.group.key] = record
        self._shelf(record)[record.group.key] = record

    def _remove(self, key: GroupKey) -> _Record | None:
        record = self._records.pop(key, None)
        if record is not None:
            del self._shelf(record)[key]
        return record

    # ---------------------------------------------------------------- checkpoint

    async def state_dict(self) -> dict[str, Any]:
        """Everything needed to restore the buffer, as plain data and NumPy arrays."""
        leased_for = {id(one): step for step, lease in self._leases.items() for one in lease.records}
        records = sorted([*self._records.values(), *self._leased.values()], key=lambda one: one.sequence)
        return {
            "groups": _plain(pack_groups([record.group for record in records])),
            "status": [str(record.status) for record in records],
            "sequence": [record.sequence for record in records],
            "staleness": [record.staleness for record in records],
            "leased_for": [leased_for.get(id(record), 0) for record in records],
            "next_sequence": self._sequence,
            "acknowledged": self._acknowledged,
            "trained": {task: ordinals.ranges() for task, ordinals in self._trained.items()},
        }

    async def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore into an empty buffer. A lease that was open becomes COMPLETED groups again: whoever saved
        the state acknowledged every step that the model saved with it has trained.

        Raises CheckpointError if the buffer is not empty, or the state is damaged or of other tasks.
        """
        if self._records or self._leased:
            raise CheckpointError(
                f"a buffer with {len(self._records) + len(self._leased)} groups cannot be restored over"
            )
        try:
            groups = unpack_groups(_packed(state["groups"]))
            facts = list(zip(state["status"], state["sequence"], state["staleness"], strict=True))
            trained = {str(task): OrdinalSet(ranges) for task, ranges in state["trained"].items()}
            pairs = list(zip(groups, facts, strict=True))
            following, acknowledged = int(state["next_sequence"]), int(state["acknowledged"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"damaged buffer state: {error!r}") from error
        foreign = (set(trained) | {group.task for group in groups}) - set(self._limits)
        if foreign:
            raise CheckpointError(
                f"buffer state has tasks {sorted(foreign)}, this run has {sorted(self._limits)}"
            )
        for group, (status, sequence, staleness) in pairs:
            oldest = [oldest_version(member) for member in group.states]
            self._store(_Record(group, Status(status), int(sequence), oldest, int(staleness)))
        self._trained.update(trained)
        self._sequence, self._acknowledged = following, acknowledged


def _expire(record: _Record, limits: TaskLimits, train_step: int) -> bool:
    """Age a record; True if members expired. With retry they are reset and their siblings kept."""
    stale = [
        version is not None and is_expired(staleness_of(version, train_step), limits.stale_threshold)
        for version in record.oldest
    ]
    if any(stale):
        record.status = Status.EXPIRED
        for index, state in enumerate(record.group.states):
            if limits.retry and stale[index]:
                state.reset()
                record.oldest[index] = None
            if stale[index] or not limits.retry:
                state.status = Status.EXPIRED
    record.staleness = record.staleness_at(train_step)
    return any(stale)


def _owned(packed: PackedGroups) -> PackedGroups:
    """With arrays of its own: those that arrive may be views of memory that belongs to the sender."""
    columns = tuple(np.array(column) for column in packed.columns)
    return PackedGroups(packed.header, columns, packed.offsets, packed.group_sizes)


def _plain(packed: PackedGroups) -> dict[str, Any]:
    header = []
    for one in packed.header:
        header.append({**one, "status": str(one["status"]), "sample_params": asdict(one["sample_params"])})
    return {
        "header": header,
        "columns": list(packed.columns),
        "offsets": list(packed.offsets),
        "group_sizes": packed.group_sizes,
    }


def _packed(plain: dict[str, Any]) -> PackedGroups:
    header = []
    for one in plain["header"]:
        params: dict[str, Any] = dict(one["sample_params"])
        params["stop_token_ids"] = tuple(params["stop_token_ids"])
        header.append({**one, "status": Status(one["status"]), "sample_params": SampleParams(**params)})
    columns, offsets = _arrays(plain["columns"]), _arrays(plain["offsets"])
    return PackedGroups(header, columns, offsets, np.asarray(plain["group_sizes"], np.int32))


def _arrays(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(np.asarray(value) for value in values)
