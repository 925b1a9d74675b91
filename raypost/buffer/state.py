"""BufferState: all that the replay buffer knows, but for the arrays of its groups.

The state is event-sourced: `apply` alone changes it, the buffer decides which changes to make (replay_buffer.py),
the journal writes each one down before it is made (journal.py), and a buffer that died is the same changes applied
again. A change is made of JSON values and applied as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, TypedDict

from raypost.buffer.status_index import StatusIndex, StoredGroup
from raypost.ledger.ordinals import OrdinalSet
from raypost.types import BufferBounds, BufferCounts, ExpiredGroup, GroupKey, OpenLease, Status


class Change(TypedDict, total=False):
    """One change of the state. Fields that are there apply in this order."""

    reset: bool
    """Forget everything: a checkpoint is restored."""
    cut: str
    """What was lost of the journal, and everything after it; "" once the buffer agrees with the ledger again."""
    put: Sequence[StoredGroup]
    """Groups that are stored, or replace those with the same keys."""
    gone: Sequence[GroupKey]
    """Groups that ended untrained."""
    back: int
    """All groups that are handed out were taken back; claims go on behind this one."""
    out: tuple[int, Sequence[GroupKey]]
    """(claim, groups that are handed out for it)."""
    lease: tuple[int, Sequence[GroupKey], Sequence[int]]
    """(step, groups of its batch, their staleness)."""
    ack: int
    """Leases up to this step are trained."""
    expired: tuple[int, list[ExpiredGroup]]
    """(claim, the groups that its refresh found expired)."""
    trained: dict[str, list[list[int]]]
    """Ranges of the trained groups of a task."""
    full: bool
    next: int
    restored: bool


class BufferState:
    """The groups and where each one is: stored, handed out, or leased."""

    def __init__(self) -> None:
        """Begin without groups."""
        self._reset()

    def _reset(self) -> None:
        self.groups: dict[GroupKey, StoredGroup] = {}
        self.index = StatusIndex()
        """All groups by status; derived from the fields below."""
        self.out: dict[GroupKey, int] = {}
        """Groups that are handed out, in order, with their claim."""
        self.claim = 0
        """Of the last pop."""
        self.fence = 0
        """Of the last reclaim: what claims less is of a holder that is gone."""
        self.leases: dict[int, OpenLease] = {}
        self.leased: dict[GroupKey, int] = {}
        """Step of every leased group."""
        self.acknowledged = 0
        self.trained: dict[str, OrdinalSet] = {}
        self.expired: tuple[int, list[ExpiredGroup]] = (0, [])
        """What the last refresh that had a claim found."""
        self.cut = ""
        """Why the state is an older one, and not to be trusted before it was compared with the ledger; "" if it is."""
        self.full = False
        self.next = 0
        """Sequence of the next new key."""
        self.restored = False
        """Whether nothing has happened since a checkpoint was restored."""

    def is_trained(self, key: GroupKey) -> bool:
        """Return whether the group was ever acknowledged."""
        task, group_id = key
        return task in self.trained and group_id in self.trained[task]

    def place(self, group: StoredGroup) -> Status:
        """Return the status under which the index has a group."""
        if group.key in self.leased:
            return Status.ARCHIVED
        return Status.INIT if group.key in self.out else group.status

    # ---------------------------------------------------------------- what can be read

    def counts(self, tasks: Sequence[str], bounds: BufferBounds) -> BufferCounts:
        """Return the groups and bytes by task and status, and whether the buffer is full."""
        groups: dict[str, dict[Status, int]] = {task: {} for task in tasks}
        pinned: dict[str, dict[Status, int]] = {task: {} for task in tasks}
        for task, status, count, nbytes in self.index.counts():
            pinned[task][status] = nbytes
            if status is not Status.INIT:
                groups[task][status] = count
        oldest = {
            task: {status: self.index.oldest(task, status) for status in (Status.COMPLETED, Status.ABORTED)}
            for task in groups
        }
        room = None
        if bounds.max_groups is not None:
            room = max(0, bounds.max_groups - sum(sum(one.values()) for one in groups.values()))
        return BufferCounts(
            groups=groups,
            nbytes=pinned,
            is_full=self.full,
            room=room,
            oldest=oldest,
            expires_at=self.index.expires_at(),
        )

    def is_beyond(self, bounds: BufferBounds) -> bool:
        """Return whether the groups reach the high-water marks; if the buffer was full, the low ones."""
        groups = pinned = 0
        for _, status, count, nbytes in self.index.counts():
            pinned += nbytes
            if status is not Status.INIT:
                groups += count
        share = bounds.low_water if self.full else 1.0
        amounts = ((groups, bounds.max_groups), (pinned, bounds.max_bytes))
        return any(bound is not None and amount >= bound * share for amount, bound in amounts)

    # ---------------------------------------------------------------- changes

    def apply(self, change: Change) -> list[GroupKey]:
        """Make one change. Returns the groups that ended with it, in the order in which they were leased."""
        ended: list[GroupKey] = []
        if change.get("reset"):
            ended += self.groups
            self._reset()
        if "cut" in change:
            self._cut(change["cut"])
        for group in change.get("put", ()):
            self._remove(group.key)
            self.groups[group.key] = group
            self.index.add(group, group.status)
            self.next = max(self.next, group.sequence + 1)
        ended += [key for key in change.get("gone", ()) if self._remove(key)]
        if "back" in change:
            self._take_back(change["back"])
        if "out" in change:
            self._hand_out(*change["out"])
        if "lease" in change:
            self._lease(*change["lease"])
        if "ack" in change:
            ended += self._acknowledge(change["ack"])
        self._set_fields(change)
        return ended

    def _remove(self, key: GroupKey) -> bool:
        group = self.groups.get(key)
        if group is None:
            return False
        self.index.remove(group, self.place(group))
        self.out.pop(key, None)
        self.leased.pop(key, None)
        del self.groups[key]
        return True

    def _cut(self, why: str) -> None:
        """Take everything back into the buffer where its state is an older one: who has what now is not known."""
        self.cut = why
        if why:
            self._take_back(self.claim)
            for key in self.leased:
                self.index.remove(self.groups[key], Status.ARCHIVED)
                self.index.add(self.groups[key], self.groups[key].status)
            self.leases, self.leased = {}, {}

    def _take_back(self, claim: int) -> None:
        self.claim = self.fence = claim
        for group in map(self.groups.__getitem__, self.out):
            self.index.remove(group, Status.INIT)
            self.index.add(group, group.status)
        self.out.clear()

    def _hand_out(self, claim: int, keys: Sequence[GroupKey]) -> None:
        self.claim = claim
        for group in map(self.groups.__getitem__, keys):
            self.index.remove(group, group.status)
            self.index.add(group, Status.INIT)
            self.out[group.key] = claim

    def _lease(self, step: int, keys: Sequence[GroupKey], staleness: Sequence[int]) -> None:
        self.leases[step] = OpenLease(tuple(keys), tuple(staleness))
        for group in map(self.groups.__getitem__, keys):
            self.index.remove(group, group.status)
            self.index.add(group, Status.ARCHIVED)
            self.leased[group.key] = step

    def _acknowledge(self, step: int) -> list[GroupKey]:
        self.acknowledged = max(self.acknowledged, step)
        keys = [key for one in sorted(self.leases) if one <= step for key in self.leases.pop(one).keys]
        for key in keys:
            self._remove(key)
            if key[0] not in self.trained:
                self.trained[key[0]] = OrdinalSet()
            self.trained[key[0]].add(key[1])
        return keys

    def _set_fields(self, change: Change) -> None:
        self.expired = change.get("expired", self.expired)
        for task, ranges in change.get("trained", {}).items():
            self.trained[task] = OrdinalSet(ranges)
        self.full = change.get("full", self.full)
        self.next = change.get("next", self.next)
        if change.keys() != {"full"}:
            self.restored = change.get("restored", False)

    def snapshot(self) -> Iterator[Change]:
        """Yield changes that make this state from one that has only its groups."""
        yield {"back": self.fence}
        for claim, items in groupby(self.out.items(), key=lambda item: item[1]):
            yield {"out": (claim, [key for key, _ in items])}
        yield {"out": (self.claim, ()), "ack": self.acknowledged}
        for step, (keys, staleness) in self.leases.items():
            yield {"lease": (step, keys, staleness)}
        yield {
            **({"cut": self.cut} if self.cut else {}),
            "trained": {task: ordinals.ranges() for task, ordinals in self.trained.items()},
            "expired": self.expired,
            "full": self.full,
            "next": self.next,
            "restored": self.restored,
        }


def decode_change(raw: dict[str, Any]) -> Change:
    """Return the change that was written as these JSON values, with tuples in place of lists."""
    change: Change = {**raw}  # type: ignore[typeddict-item]  # named tuples follow
    if "put" in change:
        change["put"] = [
            StoredGroup(key, sequence, Status(status), *facts) for key, sequence, status, *facts in raw["put"]
        ]
    if "expired" in change:
        claim, groups = raw["expired"]
        change["expired"] = (claim, [ExpiredGroup(*facts) for facts in groups])
    return change


def tupled(value: Any) -> Any:
    """Return JSON values with tuples in place of lists."""
    if isinstance(value, dict):
        return {name: tupled(one) for name, one in value.items()}
    return tuple(map(tupled, value)) if isinstance(value, list) else value
