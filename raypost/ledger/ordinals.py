"""OrdinalSet: which groups of a task, by number, as few numbers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence


class OrdinalSet:
    """A set of ordinals as disjoint ranges: as small as the number of gaps in it."""

    def __init__(self, ranges: Iterable[Sequence[int]] = ()) -> None:
        """`ranges` as `ranges()` gave them: (first, last + 1), ascending."""
        pairs = [(int(start), int(end)) for start, end in ranges]
        self._starts = [start for start, _ in pairs]
        self._ends = [end for _, end in pairs]

    def __contains__(self, ordinal: int) -> bool:
        """Return whether the ordinal was added."""
        at = bisect_right(self._starts, ordinal) - 1
        return at >= 0 and ordinal < self._ends[at]

    def __len__(self) -> int:
        """Return the number of ordinals."""
        return sum(self._ends) - sum(self._starts)

    def add(self, ordinal: int) -> None:
        """Add one ordinal; adding it again changes nothing."""
        at = bisect_right(self._starts, ordinal) - 1
        if at >= 0 and ordinal < self._ends[at]:
            return
        follows = at >= 0 and self._ends[at] == ordinal
        precedes = at + 1 < len(self._starts) and self._starts[at + 1] == ordinal + 1
        if follows and precedes:
            self._ends[at] = self._ends.pop(at + 1)
            del self._starts[at + 1]
        elif follows:
            self._ends[at] = ordinal + 1
        elif precedes:
            self._starts[at + 1] = ordinal
        else:
            self._starts.insert(at + 1, ordinal)
            self._ends.insert(at + 1, ordinal + 1)

    def ranges(self) -> list[list[int]]:
        """Return (first, last + 1) of every range, ascending."""
        return [[start, end] for start, end in zip(self._starts, self._ends, strict=True)]
