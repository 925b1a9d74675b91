"""Scheduling numbers (N8 to N10, N14, N28) and the pending set."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from raypost.config import StrategyConfig
from raypost.production.pending import PendingGroup, Signal, uninterrupted
from raypost.production.strategy import (
    AsyncProduceStrategy,
    SyncProduceStrategy,
    build_strategy,
    desired_pending,
    groups_owed,
    oversample_budget,
)
from raypost.types import Status
from raypost.types.staleness import NEVER
from tests.unit.production import finish, group, opened, strategy, virtual


@pytest.mark.parametrize(
    ("ratio", "batch", "budget"), [(0.15, 10, 2), (1.0, 4, 4), (0.0, 8, 0), (0.07, 100, 7), (0.01, 4, 1)]
)
def test_oversample_budget_is_a_fraction_of_one_batch_rounded_up(
    ratio: float, batch: int, budget: int
) -> None:
    """N9."""
    assert oversample_budget(ratio, batch) == budget


@pytest.mark.parametrize(
    ("target", "available", "budget", "desired"), [(10, 9, 4, 5), (12, 9, 1, 4), (4, 4, 4, 0), (4, 9, 1, 0)]
)
def test_desired_pending_fills_the_gap_and_the_budget(
    target: int, available: int, budget: int, desired: int
) -> None:
    """N8 and N14; nothing is started for a target that is met."""
    assert desired_pending(target, available, budget) == desired


def test_plan_starts_what_is_not_pending_yet() -> None:
    """N14: target 12, consumed 4 and COMPLETED 5, pending 2, budget 1."""
    strategy = AsyncProduceStrategy(StrategyConfig(over_sample_threshold=0.25, tail_batch_trigger_size=-1), 1)
    plan = strategy.plan(target=12, available=9, pending=2, task_batch_size=4, tail_batch=False)
    assert (plan.num_groups, plan.sources) == (2, (Status.ABORTED,))
    full = strategy.plan(target=12, available=9, pending=9, task_batch_size=4, tail_batch=False)
    assert full.num_groups == 0


@pytest.mark.parametrize(
    ("trigger", "expired", "tail"),
    [(3, 2, False), (3, 3, True), (0, 9, False), (-1, 9, False), (1, 0, False)],
)
def test_tail_batch_begins_with_enough_expired_groups(trigger: int, expired: int, tail: bool) -> None:
    """N10."""
    strategy = build_strategy(StrategyConfig(tail_batch_trigger_size=trigger), 1)
    assert strategy.starts_tail_batch(expired) is tail


def test_tail_batch_takes_expired_groups_first_and_samples_nothing_beyond() -> None:
    """N10."""
    strategy = AsyncProduceStrategy(StrategyConfig(over_sample_threshold=1.0, tail_batch_trigger_size=3), 1)
    normal = strategy.plan(target=4, available=0, pending=0, task_batch_size=4, tail_batch=False)
    tail = strategy.plan(target=4, available=0, pending=0, task_batch_size=4, tail_batch=True)
    assert (normal.num_groups, normal.sources) == (8, (Status.ABORTED,))
    assert (tail.num_groups, tail.sources) == (4, (Status.EXPIRED, Status.ABORTED))


def test_immediate_retry_takes_expired_groups_first_and_keeps_oversampling() -> None:
    strategy = AsyncProduceStrategy(StrategyConfig(over_sample_threshold=1.0, tail_batch_trigger_size=0), 1)
    plan = strategy.plan(target=4, available=0, pending=0, task_batch_size=4, tail_batch=False)
    assert (plan.num_groups, plan.sources) == (8, (Status.EXPIRED, Status.ABORTED))
    assert strategy.limits.retry


def test_sync_is_async_with_nothing_ahead() -> None:
    config = StrategyConfig(
        kind="sync", max_staleness=3, over_sample_threshold=2.0, tail_batch_trigger_size=-1
    )
    strategy = build_strategy(config, 4)
    assert isinstance(strategy, SyncProduceStrategy)
    assert (strategy.limits.stale_threshold, strategy.limits.retry) == (4, False)
    plan = strategy.plan(target=4, available=0, pending=0, task_batch_size=4, tail_batch=False)
    assert plan.num_groups == 4
    assert strategy.waits_for_consumer(3, next_consumer_step=2)
    assert not strategy.waits_for_consumer(2, next_consumer_step=2)
    ahead = build_strategy(StrategyConfig(max_staleness=1), 4)
    assert ahead.limits.stale_threshold == 8 and not ahead.waits_for_consumer(8, 1)


@pytest.mark.parametrize(
    ("target", "accepted", "running", "max_pending", "room"),
    [
        (12, 0, 0, 100, 12),  # N34: concurrency 100, batch 4, eta 2, version 0
        (32, 0, 0, 100, 32),  # N34: version 5
        (32, 15, 0, 20, 17),  # N35: concurrency 20, batch 8, eta 3, 15 accepted, rejected ones do not count
        (32, 0, 0, 20, 20),
        (16, 4, 3, 0, 9),
        (4, 4, 1, 0, 0),
    ],
)
def test_capacity_counts_batches_that_may_be_worked_for(
    target: int, accepted: int, running: int, max_pending: int, room: int
) -> None:
    """N34 and N35: `target` is (eta + version + 1) x batch."""
    config = StrategyConfig(max_pending=max_pending)
    counts = {"target": target, "available": accepted, "pending": running}
    plan = build_strategy(config, 1).plan(**counts, task_batch_size=4, tail_batch=False)
    assert plan.num_groups == room


def test_production_runs_as_far_ahead_as_the_nearest_bound_allows() -> None:
    plain = build_strategy(StrategyConfig(max_staleness=2), 4)
    assert (plain.horizon, plain.limits.stale_threshold) == (12, 12)
    assert (plain.last_step(3), plain.is_production_expired(15, 3)) == (15, False)
    assert plain.is_production_expired(16, 3)
    masked = build_strategy(StrategyConfig(max_staleness=4, max_token_staleness=1, tail_batch_max_tries=2), 4)
    assert (masked.limits.token_stale_threshold, masked.limits.max_tries) == (8, 2)
    assert (masked.horizon, masked.limits.stale_threshold) == (8, 20)


def test_the_engines_limit_what_is_started_but_not_what_is_missing() -> None:
    plan = strategy().plan(target=8, available=1, pending=2, task_batch_size=4, tail_batch=False, room=3)
    assert plan.num_groups == 3
    plan = strategy().plan(target=8, available=1, pending=2, task_batch_size=4, tail_batch=False, room=9)
    assert plan.num_groups == 5


def fewest_that_must_end(unfinished: list[int], completed: list[int], step: int, batch: int) -> int:
    """What `groups_owed` is, found by trying: how many must join the batch so that the rest can still be trained."""
    for ended in range(min(len(unfinished), batch) + 1):
        ready = sorted(completed + sorted(unfinished)[:ended])
        rest = sorted(ready[batch:] + sorted(unfinished)[ended:])
        if all(step + 1 + place // batch <= last for place, last in enumerate(rest)):
            return ended
    return -1


@given(
    unfinished=st.lists(st.integers(5, 9), max_size=7),
    completed=st.lists(st.integers(5, 9), max_size=7),
    batch=st.integers(1, 4),
)
def test_a_batch_waits_for_as_few_as_keep_the_rest_trainable(
    unfinished: list[int], completed: list[int], batch: int
) -> None:
    fewest = fewest_that_must_end(unfinished, completed, 5, batch)
    assume(fewest >= 0)
    owed = groups_owed(Counter(unfinished), Counter(completed), 5, lambda step: batch)
    assert owed == fewest


def test_a_batch_waits_neither_for_what_cannot_be_trained_nor_for_what_does_not_age() -> None:
    assert groups_owed({4: 3, NEVER: 5}, {}, 5, lambda step: 2) == 0
    assert groups_owed({5: 9}, {}, 5, lambda step: 2) == 2
    assert groups_owed({5: 9}, {5: 2}, 5, lambda step: 2) == 0
    shares = {5: 2, 6: 0, 7: 1}
    assert groups_owed({7: 2}, {9: 2}, 5, shares.__getitem__) == 1


def test_a_limit_of_groups_in_flight_holds_whatever_is_missing() -> None:
    strategy = AsyncProduceStrategy(StrategyConfig(max_pending=3, over_sample_threshold=1.0), 1)
    plan = strategy.plan(target=4, available=0, pending=1, task_batch_size=4, tail_batch=False)
    assert plan.num_groups == 2


class Drops:
    """Collects what a pending set hands out."""

    def __init__(self) -> None:
        self.keys: list[int] = []

    async def receive(self, entries: list[PendingGroup]) -> None:
        await asyncio.sleep(0)
        self.keys += [entry.key[1] for entry in entries]


def test_every_finished_group_is_received_once_by_whoever_comes_first() -> None:
    """N28: the union is all, the intersection empty."""

    async def main() -> None:
        pending, first, second = await opened(1, 1, 2, 9), Drops(), Drops()

        async def settle(drops: Drops) -> None:
            for _ in range(5):
                async with pending.lock:
                    await pending.settle(drops.receive)
                await asyncio.sleep(0.7)

        await asyncio.gather(settle(first), settle(second))
        assert sorted(first.keys + second.keys) == [0, 1, 2]
        assert len(pending) == 1 and pending.num_of("default") == 1

    virtual(main())


def test_a_receiver_that_raises_loses_no_group() -> None:
    async def main() -> None:
        pending, drops = await opened(0, 0, 0), Drops()
        await asyncio.sleep(1)

        async def failing(entries: list[PendingGroup]) -> None:
            raise ConnectionError

        async with pending.lock:
            with pytest.raises(ConnectionError):
                await pending.settle(failing)
            assert len(pending) == 3
            assert await pending.settle(drops.receive) == 3
        assert sorted(drops.keys) == [0, 1, 2]

    virtual(main())


def test_nothing_starts_behind_a_closed_gate_or_without_the_lock() -> None:
    async def main() -> None:
        pending = await opened()
        one = group(0, [])
        work = finish(one, 0)
        with pytest.raises(AssertionError, match="under the lock"):
            pending.spawn(one, work, 0.0)
        await pending.close_gate()
        async with pending.lock:
            with pytest.raises(AssertionError, match="gate open"):
                pending.spawn(one, work, 0.0)
        work.close()

    virtual(main())


def test_closing_the_gate_waits_for_a_step_that_is_starting_groups() -> None:
    async def main() -> None:
        pending = await opened()
        one = group(0, [])

        async def starting() -> None:
            async with pending.lock:
                await asyncio.sleep(5)
                pending.spawn(one, finish(one, 1), 0.0)

        start = asyncio.create_task(starting())
        await asyncio.sleep(1)
        await pending.close_gate()
        assert start.done() and len(pending) == 1

    virtual(main())


def test_signal_between_look_and_wait_is_not_missed() -> None:
    async def main() -> None:
        signal = Signal()
        seen = signal.count
        signal.notify()
        await signal.wait(seen)
        waiting = [asyncio.create_task(signal.wait(signal.count)) for _ in range(3)]
        await asyncio.sleep(1)
        assert not any(one.done() for one in waiting)
        signal.notify()
        await asyncio.gather(*waiting)

    virtual(main())


def test_a_locked_step_ends_before_its_callers_cancellation() -> None:
    async def main() -> None:
        ended = []

        async def step() -> None:
            await asyncio.sleep(3)
            ended.append(True)

        caller = asyncio.create_task(uninterrupted(step()))
        await asyncio.sleep(1)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert ended == [True]

    virtual(main())
