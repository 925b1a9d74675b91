"""How fast each rollout worker is beside its siblings: tokens for each second that a request is in its engine.

Slow is not dead: a worker on a throttled or shared device answers every liveness check. Pure: it is given the workers'
counters and gives each its share. Owns no routing and no restart.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from raypost.types import WorkerStats

SLOW = 0.25
"""A worker below this part of its siblings' median rate is slow."""
FAST_AGAIN = 0.5
"""A slow worker above this part is not slow any more."""
ENOUGH = 16
"""Requests that some worker must have answered before rates are compared."""
TIMES = 3
"""A worker is slow after so many comparisons in a row."""
LEAST_SHARE = 0.02
"""So much of a sibling's part a slow worker still gets: otherwise nobody would learn that it recovered."""


@dataclass(slots=True)
class Rates:
    """The comparisons so far."""

    shares: dict[str, float] = field(default_factory=dict)
    """Of each slow worker, its rate as a part of its siblings' median."""
    _before: dict[str, WorkerStats] = field(default_factory=dict)
    _times: dict[str, int] = field(default_factory=dict)

    def look(self, stats: Sequence[WorkerStats]) -> list[str]:
        """Compare the workers once they have done enough since the last time; return those that are newly slow."""
        for one in stats:
            before = self._before.get(one.worker)
            if before is None or one.answered < before.answered or one.request_s < before.request_s:
                self.forget(one.worker)  # another process
                self._before[one.worker] = one
        done = {one.worker: one.answered - self._before[one.worker].answered for one in stats}
        if len(stats) < 2 or max(done.values()) < ENOUGH:
            return []
        rates = {one.worker: self._rate(one) for one in stats}
        self._before.update({one.worker: one for one in stats})
        return [name for name in rates if self._judge(name, rates)]

    def forget(self, worker: str) -> None:
        """Begin anew with a worker: it was restarted."""
        for known in (self.shares, self._before, self._times):
            known.pop(worker, None)

    def _rate(self, now: WorkerStats) -> float | None:
        before = self._before[now.worker]
        seconds = now.request_s - before.request_s
        return (now.generated_tokens - before.generated_tokens) / seconds if seconds > 0 else None

    def _judge(self, name: str, rates: dict[str, float | None]) -> bool:
        """Take note of one comparison; returns whether the worker is slow from now on."""
        own, others = rates[name], [rate for one, rate in rates.items() if one != name and rate is not None]
        if own is None or not others or (median := statistics.median(others)) <= 0:
            return False
        share = own / median
        if share >= (FAST_AGAIN if name in self.shares else SLOW):
            self._times.pop(name, None)
            self.shares.pop(name, None)
            return False
        was_slow = name in self.shares
        self._times[name] = self._times.get(name, 0) + 1
        if self._times[name] >= TIMES:
            self.shares[name] = max(LEAST_SHARE, share)
        return name in self.shares and not was_slow
