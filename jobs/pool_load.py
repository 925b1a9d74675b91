"""PoolLoad: what was measured of a rollout pool and of the trainer's waits, for raypost/production/scaling.py.

Owns the samples of a window, and the trainer's clock, which all pools of a run share. A look that falls into a pause
counts nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from raypost.config import RolloutConfig
from raypost.production.scaling import PoolStats
from raypost.types import ProduceBatchStatus, TakeStatus, WorkerStats

T = TypeVar("T")
MANY_TAKES = 1000
"""Of the trainer, that are remembered at most."""


class _Look(NamedTuple):
    at_s: float
    seconds: float
    """Since the look before."""
    wait_s: float
    """Of those the trainer waited for a batch."""
    busy: float
    requests: int


@dataclass(slots=True)
class _Trainer:
    """Its takes and waits."""

    takes: deque[tuple[float, bool]] = field(default_factory=lambda: deque(maxlen=MANY_TAKES))
    """When, and whether production stood at its staleness bound."""
    waited_s: float = 0.0
    waits_since: float | None = None
    paused: bool = False


class PoolLoad:
    """Looks at a pool, and the takes of the trainer."""

    def __init__(
        self,
        window_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        beside: PoolLoad | None = None,
    ) -> None:
        """`window_s`: how long a look is remembered. `beside`: that of another pool of the run."""
        self._window_s = window_s
        self._clock = clock
        self._looks: deque[_Look] = deque()
        self._trainer: _Trainer = _Trainer() if beside is None else beside._trainer
        self._since_s = clock()
        """From when on takes count."""
        self._last: tuple[float, float] | None = None
        self._changed_s: float | None = None
        self._grew = False
        self.start_s = 0.0
        """That the last worker took to serve."""

    @classmethod
    def of(cls, rollout: RolloutConfig, beside: PoolLoad | None = None) -> PoolLoad:
        """Return one that remembers what the configured policy of a pool needs."""
        window_s = rollout.autoscale.window_s if rollout.autoscale is not None else 60.0
        return cls(window_s, time.monotonic if beside is None else beside._clock, beside)

    @property
    def paused(self) -> bool:
        """Whether production stands still on purpose."""
        return self._trainer.paused

    @paused.setter
    def paused(self, paused: bool) -> None:
        self._trainer.paused = paused

    async def take(self, taking: Awaitable[tuple[TakeStatus, T]]) -> tuple[TakeStatus, T]:
        """Return a take's result; meanwhile the trainer waits."""
        self._trainer.waits_since = self._clock()
        try:
            status, batch = await taking
        finally:
            self._trainer.waited_s, self._trainer.waits_since = self.waited_s(), None
        expired = status.status == ProduceBatchStatus.EXPIRED_BATCH or not status.num_groups
        self._trainer.takes.append((self._clock(), expired))
        return status, batch

    def waited_s(self) -> float:
        """Return the seconds that the trainer has waited, the wait under way included."""
        since_s = self._trainer.waits_since
        return self._trainer.waited_s + (0.0 if since_s is None else self._clock() - since_s)

    def changed(self, now_s: float, *, grew: bool) -> None:
        """Begin anew: the pool is given another size."""
        self._changed_s, self._grew = now_s, grew
        self.forget()

    def forget(self) -> None:
        """Forget what was measured."""
        self._looks.clear()
        self._since_s = self._clock()
        self._last = None

    def look(self, workers: Sequence[WorkerStats], now_s: float) -> None:
        """Take a sample; what lies between two counts as the later says."""
        last, self._last = self._last, (now_s, self.waited_s())
        if self.paused or not workers:
            self._last = None
        elif last is not None:
            busy = sum(one.running > 0 for one in workers) / len(workers)
            requests = sum(one.running for one in workers)
            seconds, waited_s = now_s - last[0], self.waited_s() - last[1]
            self._looks.append(_Look(now_s, seconds, waited_s, busy, requests))
        while self._looks and self._looks[0].at_s <= now_s - 2 * self._window_s:
            self._looks.popleft()

    def stats(self, workers: int, coming: int, slots: int, now_s: float) -> PoolStats:
        """Return what the looks come to. `coming`: workers that come or go; nothing counts before they did."""
        if coming:
            self.forget()
        seconds = sum(one.seconds for one in self._looks)
        over = seconds or 1.0
        from_s = max(self._since_s, now_s - 2 * self._window_s)
        takes = [expired for at_s, expired in self._trainer.takes if at_s >= from_s]
        return PoolStats(
            workers=workers,
            coming=coming,
            measured_s=seconds,
            wait=min(1.0, sum(one.wait_s for one in self._looks) / over),
            busy=sum(one.busy * one.seconds for one in self._looks) / over,
            requests=sum(one.requests * one.seconds for one in self._looks) / over,
            slots=slots,
            at_bound=sum(takes) / max(1, len(takes)),
            start_s=self.start_s,
            changed_s=self._changed_s,
            grew=self._grew,
        )
