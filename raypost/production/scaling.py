"""How many rollout workers a run needs: a pure policy over what was measured.

    decide(stats, limits, now_s) -> Noop(reason) | Resize(target, reason)

Owns the decision and its words; owns no clock, no worker and no measurement. The pool that is needed follows from two
shares of the time. A trainer that waits for batches a share w of the time would use 1 / (1 - w) of what the pool makes.
Engines that have requests a share u of the time could do with u of their number. So

    needed = workers * u / (1 - w)

which counts neither pauses nor syncs nor evaluations, since no batch is waited for, and no engine looked at, in them.

Invariants: the target is within its bounds and at most `max_step` away; nothing is decided while workers are on their
way, within the cooldown, or from less than a window; a pool that grew does not shrink for CALM times the cooldown, so
steady load turns the direction at most once in that time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

STARVING = 0.08
"""A trainer that waits for a larger share of its time starves."""
SATED = 0.02
"""Below this share it does not notice the engines."""
SPARE = 1.05
"""So many times what is needed stays when a pool shrinks."""
AT_BOUND = 0.5
"""Of the takes that found production at its staleness bound: from here on engines are not what lacks."""
CALM = 5.0


class ScalingLimits(Protocol):
    """Bounds of a decision; config.AutoscaleConfig has these."""

    @property
    def min(self) -> int:
        """Fewest workers."""
        ...

    @property
    def max(self) -> int:
        """Most workers."""
        ...

    @property
    def window_s(self) -> float:
        """Time that must have been measured."""
        ...

    @property
    def cooldown_s(self) -> float:
        """Least time between two changes."""
        ...

    @property
    def max_step(self) -> int:
        """Most workers that come or go at once."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """What was measured of a pool since its size was changed last, at most the last window."""

    workers: int
    """That serve."""
    coming: int
    """That were asked for and do not serve yet, or leave."""
    measured_s: float
    """Of production: without pauses."""
    wait: float
    """Share of that time in which the trainer waited for a batch."""
    busy: float
    """Share of that time in which an engine had requests: the mean over the workers."""
    requests: float
    """In all engines, on average."""
    slots: int
    """Sequences that one engine runs at once."""
    at_bound: float
    """Share of the takes that found production at its staleness bound, where only newer weights help."""
    start_s: float
    """That a worker takes to serve, the last one."""
    changed_s: float | None = None
    """When the size was changed last; None: never."""
    grew: bool = False
    """Whether that made the pool larger."""


@dataclass(frozen=True, slots=True)
class Noop:
    """The pool stays as it is."""

    reason: str


@dataclass(frozen=True, slots=True)
class Resize:
    """The pool is to have another size."""

    target: int
    reason: str


def decide(stats: PoolStats, limits: ScalingLimits, now_s: float) -> Noop | Resize:
    """Return what is to become of a pool at `now_s`, a clock that does not go back."""
    bounded = min(max(stats.workers, limits.min), limits.max)
    if stats.coming:
        return Noop(f"{stats.coming} workers come or go")
    if stats.workers and bounded != stats.workers:
        return Resize(bounded, f"{stats.workers} workers are outside of {limits.min} to {limits.max}")
    if stats.measured_s < limits.window_s:
        return Noop(f"{stats.measured_s:.0f} of {limits.window_s:g} s are measured")
    since_s = math.inf if stats.changed_s is None else now_s - stats.changed_s
    cooldown_s = max(limits.cooldown_s, stats.start_s)
    if since_s < cooldown_s:
        return Noop(f"the size was changed {since_s:.0f} s ago, less than {cooldown_s:.0f} s")
    if stats.wait > STARVING:
        return _grown(stats, limits)
    if stats.wait < SATED and not (stats.grew and since_s < CALM * cooldown_s):
        return _shrunk(stats, limits)
    return Noop(f"training waits {stats.wait:.0%} of its time")


def _grown(stats: PoolStats, limits: ScalingLimits) -> Noop | Resize:
    starving = f"training waits {stats.wait:.0%} of its time"
    if stats.at_bound >= AT_BOUND:
        return Noop(f"{starving}, but production stands at its staleness bound: only newer weights help")
    if stats.requests < stats.workers:
        return Noop(f"{starving}, but {stats.workers} workers have {stats.requests:.1f} requests in all")
    needed = stats.workers * stats.busy / (1 - min(stats.wait, 0.9))
    target = min(math.ceil(needed), stats.workers + limits.max_step, limits.max)
    if target <= stats.workers:
        return Noop(f"{starving}, with {stats.workers} of at most {limits.max} workers")
    return Resize(target, f"{starving} with {stats.workers} workers")


def _shrunk(stats: PoolStats, limits: ScalingLimits) -> Noop | Resize:
    needed = max(stats.workers * stats.busy * SPARE, stats.requests / stats.slots)
    target = max(math.ceil(needed), stats.workers - limits.max_step, limits.min)
    idle = f"engines have requests {stats.busy:.0%} of the time, and training hardly waits"
    return Resize(target, idle) if target < stats.workers else Noop(idle)
