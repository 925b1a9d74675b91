"""What the buffer's journal says the buffer holds: its log read anew, without the buffer's own code.

frame   length of the body, checksum of that length, checksum of the body; then the body, JSON
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from raypost.buffer.journal import FORMAT
from raypost.types import GroupKey

_FRAME = struct.Struct("<IIQ")


@dataclass(slots=True)
class HeldGroups:
    """The groups of a buffer: stored, handed out or leased; and those that it saw trained."""

    groups: set[GroupKey] = field(default_factory=set)
    leases: dict[int, list[GroupKey]] = field(default_factory=dict)
    trained: set[GroupKey] = field(default_factory=set)
    acknowledged: int = 0
    twice: list[GroupKey] = field(default_factory=list)
    """Groups of an acknowledged lease that had been trained before."""

    def apply(self, change: Mapping[str, Any]) -> None:
        """Make one change of the log."""
        if change.get("reset"):
            self.groups, self.leases, self.trained, self.acknowledged = set(), {}, set(), 0
        if change.get("cut"):
            self.leases = {}
        for put in change.get("put", ()):
            self.groups.add(_key(put[0]))
        self.groups -= set(map(_key, change.get("gone", ())))
        if "lease" in change:
            step, keys, _ = change["lease"]
            self.leases[step] = list(map(_key, keys))
        if "ack" in change:
            self._acknowledge(change["ack"])
        for task, ranges in change.get("trained", {}).items():
            self.trained |= {(task, one) for start, end in ranges for one in range(start, end)}

    def _acknowledge(self, upto: int) -> None:
        self.acknowledged = max(self.acknowledged, upto)
        for step in [one for one in self.leases if one <= upto]:
            keys = self.leases.pop(step)
            self.twice += [key for key in keys if key in self.trained]
            self.trained.update(keys)
            self.groups.difference_update(keys)


def held_groups(folder: Path) -> HeldGroups | None:
    """Return what the log in `folder` says; None without one. Raises ValueError where it is damaged.

    A last record that was cut off is left out.
    """
    path = folder / "log"
    if not path.exists():
        return None
    held, data, at = HeldGroups(), path.read_bytes(), 0
    while at + _FRAME.size <= len(data):
        length, check, digest = _FRAME.unpack_from(data, at)
        if xxhash.xxh32_intdigest(length.to_bytes(4, "little")) != check:
            raise ValueError(f"the length at byte {at} of {path} is damaged")
        body = data[at + _FRAME.size : at + _FRAME.size + length]
        if len(body) < length:
            break
        if xxhash.xxh3_64_intdigest(body) != digest:
            raise ValueError(f"the record at byte {at} of {path} is damaged")
        record = json.loads(body)
        if at == 0 and record.get("format") != FORMAT:
            raise ValueError(f"{path} is of format {record.get('format')}, the audit reads format {FORMAT}")
        held.apply(record.get("change", {}))
        at += _FRAME.size + length
    return held


def _key(pair: Any) -> GroupKey:
    task, number = pair
    return str(task), int(number)
