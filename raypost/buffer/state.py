"""BufferState: where every group of the replay buffer is, as the journal remembers it.

Owns the meaning of a change, and how the state is said in as few changes as possible. Holds no group.

A change is a dict of JSON values, applied as a whole:

    put      [[task, group_id, index, sequence, status], ...]    stored in `block`
    move     as put, but only where the group is changes
    gone     [[task, group_id], ...]    ended untrained
    out      [[task, group_id], ...]    handed out for `claim`
    back     true                       all that are out were taken back
    lease    [step, [[task, group_id], ...], [staleness, ...]]
    ack      step
    expired  [claim, [[task, group_id, stored, mean_tokens], ...]]
    full, next, trained, reclaimed, restored    as the field of that name
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from raypost.ledger.ledger import OrdinalSet
from raypost.types import GroupKey, Status

Change = dict[str, Any]


class Block(NamedTuple):
    """A piece of a data file: the groups of one put."""

    segment: int
    offset: int
    length: int
    checksum: int
    num_groups: int

    @property
    def group_bytes(self) -> int:
        """Bytes of one of its groups, on average."""
        return self.length // self.num_groups


@dataclass(slots=True, frozen=True)
class Entry:
    """One group."""

    block: Block
    index: int
    """Its place in the block."""
    sequence: int
    status: Status
    """Of its shelf; one that is out goes back to it when it is reclaimed."""


@dataclass(slots=True)
class BufferState:
    """All that the buffer knows but for the groups themselves."""

    entries: dict[GroupKey, Entry] = field(default_factory=dict)
    out: dict[GroupKey, int] = field(default_factory=dict)
    """Groups that are handed out, in order, with their claim."""
    claim: int = 0
    """Of the last pop that handed out groups."""
    reclaimed: tuple[GroupKey, ...] = ()
    """What the last reclaim took back; forgotten by the next pop."""
    leases: dict[int, tuple[tuple[GroupKey, ...], tuple[int, ...]]] = field(default_factory=dict)
    acknowledged: int = 0
    trained: dict[str, OrdinalSet] = field(default_factory=dict)
    expired: tuple[int, tuple[tuple[GroupKey, bool, float], ...]] = (0, ())
    """What the last refresh that had a claim found."""
    full: bool = False
    next: int = 0
    """Sequence of the next new key."""
    restored: bool = False
    """Nothing has happened since a checkpoint was restored."""

    def apply(self, change: Change) -> tuple[list[Block], list[Block]]:
        """Apply one change; the blocks that got a live group each, and those that lost one."""
        came, went = [], []
        for name in ("put", "move"):
            if name in change:
                block, facts = Block(*change["block"]), change[name]
                went += self._forget(map(_key, facts))
                came += [block] * len(facts)
                for task, group_id, index, sequence, status in facts:
                    self.entries[task, group_id] = Entry(block, index, sequence, Status(status))
        ended = [*change.get("gone", ()), *change.get("put", ())]
        for key in map(_key, ended):
            self.out.pop(key, None)
        went += self._forget(map(_key, change.get("gone", ())))
        self._hand_over(change)
        if "ack" in change:
            went += self._acknowledge(change["ack"])
        self._set_fields(change)
        return came, went

    def _hand_over(self, change: Change) -> None:
        if "back" in change:
            self.reclaimed = tuple(self.out)
            self.claim = 0
            self.out.clear()
        if "out" in change:
            self.claim = change["claim"]
            self.reclaimed = ()
            self.out.update((_key(key), self.claim) for key in change["out"])
        if "lease" in change:
            step, keys, staleness = change["lease"]
            self.leases[step] = (tuple(map(_key, keys)), tuple(staleness))

    def _set_fields(self, change: Change) -> None:
        if "expired" in change:
            claim, facts = change["expired"]
            self.expired = (claim, tuple((_key(fact), bool(fact[2]), float(fact[3])) for fact in facts))
        for task, ranges in change.get("trained", {}).items():
            self.trained[task] = OrdinalSet(ranges)
        if "reclaimed" in change:
            self.reclaimed = tuple(map(_key, change["reclaimed"]))
        self.full = bool(change.get("full", self.full))
        self.next = int(change.get("next", self.next))
        happened = change.keys() - {"move", "block", "full"}
        self.restored = bool(change.get("restored", self.restored and not happened))

    def _forget(self, keys: Iterable[GroupKey]) -> list[Block]:
        entries = (self.entries.pop(key, None) for key in keys)
        return [entry.block for entry in entries if entry is not None]

    def _acknowledge(self, step: int) -> list[Block]:
        self.acknowledged = max(self.acknowledged, step)
        keys = [key for one in sorted(self.leases) if one <= step for key in self.leases.pop(one)[0]]
        for task, group_id in keys:
            self.trained.setdefault(task, OrdinalSet()).add(group_id)
        return self._forget(keys)

    def by_block(self) -> dict[Block, list[tuple[GroupKey, Entry]]]:
        """Live groups by the block they are in."""
        blocks: dict[Block, list[tuple[GroupKey, Entry]]] = {}
        for key, entry in self.entries.items():
            blocks.setdefault(entry.block, []).append((key, entry))
        return blocks

    def snapshot(self) -> Iterator[Change]:
        """Changes that make this state from an empty one."""
        for block, entries in self.by_block().items():
            facts = [[*key, one.index, one.sequence, str(one.status)] for key, one in entries]
            yield {"block": block, "put": facts}
        for claim, items in groupby(self.out.items(), key=lambda item: item[1]):
            yield {"out": [key for key, _ in items], "claim": claim}
        yield {"out": [], "claim": self.claim, "ack": self.acknowledged}
        for step, (keys, staleness) in self.leases.items():
            yield {"lease": [step, keys, staleness]}
        yield {
            "trained": {task: ordinals.ranges() for task, ordinals in self.trained.items()},
            "expired": [self.expired[0], [[*key, stored, mean] for key, stored, mean in self.expired[1]]],
            "reclaimed": self.reclaimed,
            "full": self.full,
            "next": self.next,
            "restored": self.restored,
        }


def put_change(
    facts: Iterable[tuple[GroupKey, int, Status]], gone: Sequence[GroupKey], following: int
) -> Change:
    """The change that stores groups, (key, sequence, status) each in the order of their block, and ends others;
    `following` is the sequence of the next new key."""
    put = [[*key, index, sequence, str(status)] for index, (key, sequence, status) in enumerate(facts)]
    change: Change = {"next": following}
    if put:
        change["put"] = put
    if gone:
        change["gone"] = gone
    return change


def _key(values: Any) -> GroupKey:
    return (values[0], values[1])
