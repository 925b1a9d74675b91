"""FailureWatch: sees when failures repeat for everybody, so that they end production instead of eating the dataset.

Owns the counts of what failed, by task. What becomes of a group that failed is decided in verdict.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from raypost.errors import Boundary
from raypost.production.verdict import Received
from raypost.types import Status

MIN_IN_A_ROW = 32
"""So many failures without a success mean that the task, not the group, is broken."""


@dataclass(slots=True)
class _Row:
    """What came back of one task."""

    fruitless: int = 0
    """Groups in a row in which members failed and none was completed, those included that are played again."""
    lost: int = 0
    """FAILED groups in a row."""
    worked: bool = False
    """Whether a group of it was ever completed."""
    completed: int = 0
    failures: Counter[Boundary] = field(default_factory=Counter)


class FailureWatch:
    """Counts failures in a row, by task: one that works does not hide another that never does."""

    def __init__(self, tasks: Iterable[str], batch_size: int) -> None:
        """Begin at zero. A task that worked may fail for longer than one that never did: for four batches."""
        self._rows = {task: _Row() for task in tasks}
        self._limit = max(MIN_IN_A_ROW, 4 * batch_size)

    def count(self, received: Received) -> str | None:
        """Count a group that came back; return what ends production, None if it goes on."""
        row = self._rows[received.group.task]
        row.completed += received.completed
        row.failures += received.failures
        if received.verdict in (Status.COMPLETED, Status.FILTERED):
            row.lost, row.worked = 0, True
        elif received.verdict is Status.FAILED:
            row.lost += 1
        if received.completed:
            row.fruitless = 0
        elif received.failures:
            row.fruitless += 1
        limit = self._limit if row.worked else MIN_IN_A_ROW
        if max(row.fruitless, row.lost) < limit:
            return None
        num_failed = row.failures.total()
        played = num_failed + row.completed
        by = ", ".join(f"{boundary} {number}" for boundary, number in row.failures.most_common())
        return (
            f"task {received.group.task!r}: {max(row.fruitless, row.lost)} groups in a row failed (bound {limit}), and "
            f"{num_failed} of {played} trajectories since production began ({num_failed / played:.0%}; by {by}); the "
            f"last group, {received.entry.key}, with: {received.why}; fix what is named there"
        )
