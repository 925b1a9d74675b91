"""StatusIndex: groups by (task, status) in the order in which they are handed out, with what they pin.

Owns order and sums, so that counting never looks at a group. Owns no rule (replay_buffer.py).

Invariant: a shelf is sorted by (age, sequence); ageing never changes that order, since all groups age at once.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from raypost.buffer.blocks import Record
from raypost.types import GroupKey, Status


class Held:
    """Records that stand on no shelf: leased, or handed out."""

    def __init__(self) -> None:
        self._records: dict[GroupKey, Record] = {}
        self._counts: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records.values())

    @property
    def nbytes(self) -> int:
        """Bytes that all records pin."""
        return sum(nbytes for _, nbytes in self._counts.values())

    def get(self, key: GroupKey) -> Record | None:
        """The record of that key, or None."""
        return self._records.get(key)

    def add(self, record: Record) -> None:
        """Hold a record whose key is not held."""
        assert record.key not in self._records
        self._records[record.key] = record
        record.block.hold(record)
        self._count(record, 1)

    def remove(self, key: GroupKey) -> Record | None:
        """Let go of the record of that key; None if there is none."""
        record = self._records.pop(key, None)
        if record is not None:
            self._count(record, -1)
        return record

    def counts(self) -> Iterator[tuple[str, int, int]]:
        """(task, groups, bytes) of every task that has any."""
        return ((task, groups, nbytes) for task, (groups, nbytes) in self._counts.items() if groups)

    def _count(self, record: Record, sign: int) -> None:
        count = self._counts.setdefault(record.key[0], [0, 0])
        count[0] += sign
        count[1] += sign * record.nbytes


_Place = tuple[int, int, GroupKey]


class StatusIndex:
    """Records by task and status."""

    def __init__(self, *, by_age: bool) -> None:
        """`by_age`: oldest version first, then sequence; else by sequence alone."""
        self._by_age = by_age
        self._records: dict[GroupKey, Record] = {}
        self._places: dict[tuple[str, Status], list[_Place]] = {}
        self._nbytes: dict[tuple[str, Status], int] = {}

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records.values())

    @property
    def nbytes(self) -> int:
        """Bytes that all records pin."""
        return sum(self._nbytes.values())

    def get(self, key: GroupKey) -> Record | None:
        """The record of that key, or None."""
        return self._records.get(key)

    def add(self, record: Record) -> None:
        """Store a record whose key is not stored."""
        key = record.key
        assert key not in self._records
        self._records[key] = record
        record.block.hold(record)
        shelf = (key[0], record.status)
        insort(self._places.setdefault(shelf, []), self._place(record))
        self._nbytes[shelf] = self._nbytes.get(shelf, 0) + record.nbytes

    def remove(self, key: GroupKey) -> Record | None:
        """Take the record of that key out; None if there is none."""
        record = self._records.pop(key, None)
        if record is not None:
            shelf = (key[0], record.status)
            places = self._places[shelf]
            del places[bisect_left(places, self._place(record))]
            self._nbytes[shelf] -= record.nbytes
        return record

    def in_order(self, task: str, status: Status) -> Iterator[Record]:
        """The records of one shelf, in order. They may not be removed meanwhile."""
        return (self._records[key] for _, _, key in self._places.get((task, status), ()))

    def counts(self) -> Iterator[tuple[str, Status, int, int]]:
        """(task, status, groups, bytes) of every shelf that is not empty."""
        for (task, status), places in self._places.items():
            if places:
                yield task, status, len(places), self._nbytes[task, status]

    def _place(self, record: Record) -> _Place:
        return (record.oldest if self._by_age else 0, record.sequence, record.key)
