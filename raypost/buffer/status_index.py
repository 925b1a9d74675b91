"""StatusIndex: groups by task and status, in the order in which they are handed out, with their sums.

Derived from the buffer's state (state.py), which is the only one that changes it. Counting never looks at a group.

Invariant: every list is sorted by (age, sequence). Time does not change that order, since all groups age at once.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from raypost.types import GroupKey, Status
from raypost.types.staleness import NEVER


class StoredGroup(NamedTuple):
    """What the buffer's state says of one group."""

    key: GroupKey
    sequence: int
    """Order among equally old ones: when its key was first put."""
    status: Status
    """COMPLETED, ABORTED or EXPIRED; EXPIRED also where only its number of tries made it so."""
    oldest: int
    """Version of its oldest token, NEVER without one."""
    expires_at: int
    """First train step at which one of its members is expired."""
    nbytes: int


_Rank = tuple[int, int, GroupKey]


@dataclass(slots=True)
class _Bucket:
    ranks: list[_Rank] = field(default_factory=list)
    oldest: Counter[int] = field(default_factory=Counter)
    expires_at: Counter[int] = field(default_factory=Counter)
    nbytes: int = 0

    def count(self, group: StoredGroup, by: int) -> None:
        self.nbytes += by * group.nbytes
        for counter, value in ((self.oldest, group.oldest), (self.expires_at, group.expires_at)):
            counter[value] += by
            if not counter[value]:
                del counter[value]


class StatusIndex:
    """Groups by task and status. Leased groups stand under ARCHIVED, those that are handed out under INIT."""

    def __init__(self) -> None:
        """Begin without groups."""
        self._buckets: dict[tuple[str, Status], _Bucket] = {}

    def add(self, group: StoredGroup, status: Status) -> None:
        """Add a group that stands under no status."""
        bucket = self._buckets.setdefault((group.key[0], status), _Bucket())
        insort(bucket.ranks, self._rank(group))
        bucket.count(group, 1)

    def remove(self, group: StoredGroup, status: Status) -> None:
        """Remove a group that stands under `status`."""
        bucket = self._buckets[group.key[0], status]
        rank = self._rank(group)
        at = bisect_left(bucket.ranks, rank)
        assert bucket.ranks[at] == rank
        del bucket.ranks[at]
        bucket.count(group, -1)

    def keys(self, task: str, status: Status) -> Iterator[GroupKey]:
        """Yield the groups of one task and status, in order. The index may not change meanwhile."""
        bucket = self._buckets.get((task, status))
        return (key for _, _, key in bucket.ranks) if bucket else iter(())

    def count(self, task: str, status: Status) -> int:
        """Return how many groups of one task have that status."""
        bucket = self._buckets.get((task, status))
        return len(bucket.ranks) if bucket else 0

    def counts(self) -> Iterator[tuple[str, Status, int, int]]:
        """Yield (task, status, groups, bytes) wherever there is a group."""
        for (task, status), bucket in self._buckets.items():
            if bucket.ranks:
                yield task, status, len(bucket.ranks), bucket.nbytes

    def oldest(self, task: str, status: Status) -> dict[int, int]:
        """Return how many groups of one task and status have each version as that of their oldest token."""
        bucket = self._buckets.get((task, status))
        return dict(bucket.oldest) if bucket else {}

    def expires_at(self) -> int:
        """Return the first train step at which a group expires that is neither leased nor handed out."""
        here = (
            bucket.expires_at
            for (_, status), bucket in self._buckets.items()
            if status not in (Status.ARCHIVED, Status.INIT)
        )
        return min((step for steps in here for step in steps), default=NEVER)

    def _rank(self, group: StoredGroup) -> _Rank:
        return (group.oldest, group.sequence, group.key)
