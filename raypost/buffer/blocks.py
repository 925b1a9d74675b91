"""Blocks: the groups of one put, kept together as they came, and the records that name one group in them.

Owns where the arrays of a group are. A group is cut out of its block only when it is asked for, and neighbours are
taken together, so that thousands of groups a second cost a few large copies instead of many small ones.

Invariant: more than half of the groups of a block are still wanted; `compact` moves what is left over of others
into a block of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from raypost.packed import PackedGroups, join_groups, slice_groups
from raypost.types import GroupKey, Status


@dataclass(slots=True, eq=False)
class Block:
    """Groups in arrays of their own."""

    packed: PackedGroups
    records: dict[int, Record] = field(default_factory=dict)
    """Those of its groups that are wanted, by their place in it."""

    def hold(self, record: Record) -> None:
        """Keep what `record`, which is of this block, names."""
        self.records[record.index] = record


@dataclass(slots=True, eq=False)
class Record:
    """One group as the buffer owns it."""

    key: GroupKey
    block: Block
    index: int
    """Its place in the block."""
    nbytes: int
    status: Status
    """Which shelf it stands on: EXPIRED also where only its number of tries put it there."""
    sequence: int
    """Place among equally old ones: when its key was first put."""
    oldest: int
    """Version of its oldest token, NEVER without one."""
    expires_at: int
    """First train step at which one of its members is expired."""

    @property
    def packed(self) -> PackedGroups:
        """The group alone: views of its block."""
        return slice_groups(self.block.packed, self.index, self.index + 1)


def gather(records: Sequence[Record]) -> PackedGroups:
    """The groups of all records, in their order, in new arrays. Raises ValueError without records."""
    parts, first = [], 0
    while first < len(records):
        block, index = records[first].block, records[first].index
        last = first + 1
        while (
            last < len(records)
            and records[last].block is block
            and records[last].index == index + last - first
        ):
            last += 1
        parts.append(slice_groups(block.packed, index, index + last - first))
        first = last
    return join_groups(parts)


def release(records: Iterable[Record]) -> None:
    """Nobody wants these groups any more."""
    blocks = {}
    for record in records:
        if record.block.records.pop(record.index, None) is not None:
            blocks[id(record.block)] = record.block
    for block in blocks.values():
        compact(block)


def compact(block: Block) -> None:
    """Move what is wanted of a block that is for the most part not into one of its own."""
    if 0 < 2 * len(block.records) <= block.packed.num_groups:
        rest = list(block.records.values())
        smaller = Block(gather(rest))
        for index, record in enumerate(rest):
            record.block = smaller
            record.index = index
            smaller.hold(record)
