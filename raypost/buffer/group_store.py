"""GroupStore: the arrays of the groups that the buffer holds, by key.

Owns memory, not what becomes of a group. Groups stay in the arrays in which they came and are copied out together
with their neighbours, so that thousands of groups a second cost a few large copies instead of many small ones.

Invariant: more than half of the groups of every chunk are still stored; when fewer are, they move into a chunk of
their own and the old one is freed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from raypost.types import GroupKey
from raypost.types.packed import PackedGroups, join_groups, slice_groups


@dataclass(slots=True, eq=False)
class _Chunk:
    packed: PackedGroups
    stored: dict[int, GroupKey]
    """Groups that are still stored, by their index in `packed`."""


class GroupStore:
    """Groups in columnar form."""

    def __init__(self) -> None:
        """Begin without groups."""
        self._places: dict[GroupKey, tuple[_Chunk, int]] = {}

    def __len__(self) -> int:
        """Return the number of groups."""
        return len(self._places)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, those of groups that are gone but not yet freed included."""
        chunks = {id(chunk): chunk for chunk, _ in self._places.values()}
        return sum(chunk.packed.nbytes for chunk in chunks.values())

    def add(self, packed: PackedGroups) -> None:
        """Store groups, which replace those with the same keys. The store owns the arrays from here on."""
        keys = packed.keys
        self.remove(keys)
        chunk = _Chunk(packed, dict(enumerate(keys)))
        for index, key in enumerate(keys):
            self._places[key] = (chunk, index)

    def remove(self, keys: Iterable[GroupKey]) -> None:
        """Forget groups. Unknown keys are ignored."""
        chunks = {}
        for key in keys:
            place = self._places.pop(key, None)
            if place is not None:
                chunk, index = place
                del chunk.stored[index]
                chunks[id(chunk)] = chunk
        for chunk in chunks.values():
            if 0 < 2 * len(chunk.stored) <= chunk.packed.num_groups:
                rest = list(chunk.stored.values())
                packed = self.gather(rest)
                chunk.stored.clear()
                smaller = _Chunk(packed, dict(enumerate(rest)))
                self._places.update((key, (smaller, index)) for index, key in enumerate(rest))

    def view(self, key: GroupKey) -> PackedGroups:
        """Return one group as views of the store's arrays. Raises KeyError."""
        chunk, index = self._places[key]
        return slice_groups(chunk.packed, index, index + 1)

    def gather(self, keys: Sequence[GroupKey]) -> PackedGroups:
        """Copy groups, in the order of `keys`. Raises KeyError, and ValueError without keys."""
        places = [self._places[key] for key in keys]
        parts, first = [], 0
        while first < len(places):
            chunk, index = places[first]
            last = first + 1
            while last < len(places) and places[last][0] is chunk and places[last][1] == index + last - first:
                last += 1
            parts.append(slice_groups(chunk.packed, index, index + last - first))
            first = last
        return join_groups(parts)
