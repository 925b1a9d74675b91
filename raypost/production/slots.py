"""EngineSlots: how many groups in flight keep the engines full.

Owns the estimate, per task, of how much of a group is at work: its members run at once and end one by one, so over its
life only `mean / max` of their lengths is in an engine. Owns no group and starts none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

SPARE = 1.25
"""Requests in flight for each slot of the engines: those beyond it wait in them, to start when a slot falls free."""
FIRST_SHARE = 0.5
"""Assumed of a task before its first group has ended."""
LEARNING_RATE = 1 / 16


class EngineSlots:
    """The sequences that the engines run at once, shared by the tasks."""

    def __init__(self, num_slots: int | None, group_sizes: Mapping[str, int]) -> None:
        """`num_slots` of all engines together; None: unknown, and no limit."""
        self._num_slots = num_slots
        self._sizes = dict(group_sizes)
        self._shares = dict.fromkeys(group_sizes, FIRST_SHARE)

    def resize(self, num_slots: int) -> None:
        """Take note that all engines together run another number of sequences."""
        self._num_slots = num_slots

    def observe(self, task: str, lengths: Sequence[int]) -> None:
        """Learn from the response lengths, in tokens, of a group that ended."""
        longest = max(lengths)
        if longest > 0:
            share = sum(lengths) / (len(lengths) * longest)
            self._shares[task] += LEARNING_RATE * (share - self._shares[task])

    def room(self, task: str, pending: Mapping[str, int]) -> int | None:
        """Return how many more groups of `task` the engines take; `pending` groups of each are in flight."""
        if self._num_slots is None:
            return None
        free = SPARE * self._num_slots - sum(self._requests(one) * groups for one, groups in pending.items())
        return max(0, math.ceil(free / self._requests(task)))

    def _requests(self, task: str) -> float:
        """Return the requests that a group has in the engines, over its life."""
        return self._sizes[task] * self._shares[task]
