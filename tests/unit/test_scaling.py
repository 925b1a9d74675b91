"""The policy that sizes the rollout pool, on a virtual clock, with a synthetic run around it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest

from raypost.config import AutoscaleConfig
from raypost.production.scaling import Noop, PoolStats, Resize, decide

LIMITS = AutoscaleConfig(min=1, max=40, window_s=60, cooldown_s=120, max_step=4)
STEADY = PoolStats(
    workers=4, coming=0, measured_s=60, wait=0.0, busy=1.0, requests=100, slots=64, at_bound=0.0, start_s=30
)


@dataclass
class Synthetic:
    """Engines that make batches, a buffer with a bound, and a trainer that takes them, a second at a time."""

    trainer_s: Callable[[float], float]
    """Seconds of a train step at a time."""
    batch_s: Callable[[float], float]
    """Seconds in which one engine makes a batch, at a time."""
    failing: float = 0.0
    """Share of the time in which an engine is down."""
    workers: int = 1
    limits: AutoscaleConfig = LIMITS
    start_s: int = 30
    horizon: float = 2.0
    """Batches that the staleness bound allows ahead."""
    seed: int = 0
    sizes: list[tuple[float, int]] = field(default_factory=list)

    def run(self, until_s: int) -> None:
        self.sizes.append((0, self.workers))
        rng = random.Random(self.seed)
        buffered, training_s, coming, arrives = 0.0, 0.0, 0, -1
        changed_s, grew, waited, busy = None, False, list[bool](), list[float]()
        window = 2 * int(self.limits.window_s)
        for now in range(until_s):
            if now == arrives:
                self.workers, coming = self.workers + coming, 0
                self.sizes.append((now, self.workers))
                waited, busy = [], []
            alive = sum(rng.random() >= self.failing for _ in range(self.workers))
            room = max(0.0, self.horizon - buffered)
            made = min(room, alive / self.batch_s(now))
            buffered += made
            capacity = self.workers / self.batch_s(now)
            waits = training_s <= 0 and buffered < 1
            if training_s <= 0 and buffered >= 1:
                buffered, training_s = buffered - 1, self.trainer_s(now)
            training_s -= 1
            waited = [*waited[1 - window :], waits]
            busy = [*busy[1 - window :], min(1.0, made / capacity) if capacity else 0.0]
            stats = PoolStats(
                workers=self.workers, coming=coming, measured_s=len(busy),
                wait=sum(waited) / len(waited), busy=sum(busy) / len(busy),
                requests=64 * self.workers, slots=64, at_bound=0.0, start_s=self.start_s, changed_s=changed_s,
                grew=grew,
            )  # fmt: skip
            stats = replace(stats, requests=stats.busy * 64 * self.workers)
            decision = decide(stats, self.limits, now)
            if isinstance(decision, Resize):
                changed_s, grew = float(now), decision.target > self.workers
                waited, busy = [], []
                if grew:
                    coming, arrives = decision.target - self.workers, now + self.start_s
                else:
                    self.workers = decision.target
                    self.sizes.append((now, self.workers))

    def reversals(self, since_s: float = 0, until_s: float = math.inf) -> int:
        sizes = [size for at, size in self.sizes if since_s <= at < until_s]
        steps = [b - a for a, b in pairwise(sizes) if a != b]
        return sum((a > 0) != (b > 0) for a, b in pairwise(steps))

    def size_at(self, time_s: float) -> int:
        return next(size for at, size in reversed(self.sizes) if at <= time_s)


def close(workers: int, smallest: int) -> bool:
    """Whether a pool is within 15 % of the smallest, or one worker where that is more."""
    return smallest * 0.85 <= workers <= max(smallest * 1.15, smallest + 1)


@pytest.mark.parametrize("smallest", [1, 2, 3, 7, 12, 20])
@pytest.mark.parametrize("first", [1, 6, 30])
def test_the_pool_comes_close_to_the_smallest_that_keeps_the_trainer_busy_and_stays(
    smallest: int, first: int
) -> None:
    # The trainer takes 10 s, an engine makes a batch in just less than `smallest` times that.
    run = Synthetic(lambda _: 10, lambda _: 10 * (smallest - 0.3), workers=first)
    run.run(2 * 3600)
    assert close(run.workers, smallest), run.sizes
    assert run.reversals() <= 1, run.sizes
    settled = [size for at, size in run.sizes if at > 5400]
    assert len(set(settled)) <= 2, run.sizes


def test_lengths_that_double_in_the_middle_double_the_pool() -> None:
    run = Synthetic(lambda _: 10, lambda at: 37 if at < 3600 else 74, workers=4)
    run.run(9000)
    assert close(run.size_at(3600), 4) and close(run.workers, 8), run.sizes


def test_a_trainer_that_becomes_twice_as_fast_gets_twice_the_engines_and_gives_them_back() -> None:
    run = Synthetic(lambda at: 5 if 3600 < at < 9000 else 10, lambda _: 57, workers=6)
    run.run(9000 + 7200)
    assert close(run.size_at(3600), 6) and close(run.size_at(9000), 12) and close(run.workers, 6), run.sizes


@pytest.mark.parametrize("seed", range(3))
def test_engines_of_which_one_in_ten_fails_are_made_up_for_without_flapping(seed: int) -> None:
    run = Synthetic(lambda _: 10, lambda _: 95, failing=0.1, workers=2, seed=seed)
    run.run(7200)
    assert close(run.workers, math.ceil(9.5 / 0.9)), run.sizes
    assert all(run.reversals(start, start + 600) <= 1 for start in range(0, 7200, 600)), run.sizes


@pytest.mark.parametrize(
    ("changed", "expected", "reason"),
    [
        ({"wait": 0.5}, 8, "training waits 50%"),
        ({"wait": 0.3}, 6, "training waits 30%"),
        ({"wait": 0.5, "workers": 38}, 40, "training waits"),
        ({"wait": 0.9}, 8, "training waits 90%"),
        ({"busy": 0.3}, 2, "engines have requests 30%"),
        ({"busy": 0.3, "requests": 180}, 3, "engines have requests"),
        ({"busy": 0.01, "workers": 30}, 26, "engines have requests"),
        ({"workers": 60}, 40, "outside of 1 to 40"),
    ],
)
def test_a_pool_is_resized_within_its_bounds_and_steps(
    changed: dict[str, float], expected: int, reason: str
) -> None:
    decision = decide(replace(STEADY, **changed), LIMITS, 1000.0)  # type: ignore[arg-type]
    assert isinstance(decision, Resize) and decision.target == expected and reason in decision.reason


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"wait": 0.05}, "training waits 5%"),
        ({"wait": 0.5, "coming": 1}, "1 workers come or go"),
        ({"wait": 0.5, "measured_s": 59}, "59 of 60 s are measured"),
        ({"wait": 0.5, "changed_s": 900.0}, "changed 100 s ago, less than 120 s"),
        ({"wait": 0.5, "changed_s": 800.0, "start_s": 300}, "less than 300 s"),
        ({"wait": 0.5, "at_bound": 0.6}, "staleness bound: only newer weights help"),
        ({"wait": 0.5, "requests": 2}, "4 workers have 2.0 requests in all"),
        ({"wait": 0.5, "workers": 40}, "of at most 40 workers"),
        ({"busy": 0.96}, "engines have requests 96%"),
        ({"busy": 0.3, "changed_s": 700.0, "grew": True}, "training waits 0%"),
    ],
)
def test_a_pool_is_left_alone_with_a_reason(changed: dict[str, float], reason: str) -> None:
    decision = decide(replace(STEADY, **changed), LIMITS, 1000.0)  # type: ignore[arg-type]
    assert isinstance(decision, Noop) and reason in decision.reason, decision
