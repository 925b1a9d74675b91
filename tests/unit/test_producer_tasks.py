"""Several tasks, admission, bounds that push back, rounds that end early; under a virtual clock."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from raypost.errors import ConfigError, ProductionError
from raypost.types import BufferBounds, ProduceBatchStatus, Status
from raypost.types.packed import PackedGroups, unpack_groups
from tests.unit.production import World, producing, take_after_sync, task_config, train_step, virtual


def tasks_of(packed: PackedGroups) -> Counter[str]:
    return Counter(one.task for one in unpack_groups(packed))


def test_a_task_at_its_bound_does_not_stop_the_others() -> None:
    """Trap 28: with one bound for all, `eager` would stand still as soon as `strict` does."""

    async def main() -> None:
        strict, eager = task_config("strict", max_staleness=0), task_config("eager", max_staleness=3)
        world = World(strict, eager, batch_size=4)
        async with producing(world):
            await asyncio.sleep(100)
            groups = (await world.buffer.counts()).groups
            assert groups["strict"] == {Status.COMPLETED: 2}
            assert groups["eager"] == {Status.COMPLETED: 8}
            progress = world.producer.progress
            assert progress.target_upto == {"strict": 1, "eager": 4}
            for step in range(1, 6):
                status, packed = await train_step(world, step)
                assert tasks_of(packed) == {"strict": 2, "eager": 2}
                ages = dict.fromkeys(("strict", "eager"), 0)
                for one, age in zip(unpack_groups(packed), status.staleness, strict=True):
                    ages[one.task] = max(ages[one.task], age)
                assert ages["strict"] == 0 and ages["eager"] <= 3

    virtual(main())


def test_a_synchronous_task_waits_for_its_turn_beside_one_that_runs_ahead() -> None:
    async def main() -> None:
        world = World(task_config("sync", kind="sync"), task_config("ahead", max_staleness=2), batch_size=4)
        async with producing(world):
            await asyncio.sleep(100)
            groups = (await world.buffer.counts()).groups
            assert (groups["sync"], groups["ahead"]) == ({Status.COMPLETED: 2}, {Status.COMPLETED: 6})
            for step in range(1, 5):
                await train_step(world, step)

    virtual(main())


def test_a_batch_that_waits_for_a_task_at_its_bound_asks_for_a_sync() -> None:
    """The weights of step 1 are there, but `strict` may not work for step 2 before it has them."""

    async def main() -> None:
        strict, eager = task_config("strict", max_staleness=0), task_config("eager", max_staleness=3)
        world = World(strict, eager, batch_size=4)
        world.pool.seconds = lambda one: 500 if one.group_id >= 4 and one.task == "eager" else 1
        async with producing(world):
            await world.producer.take_batch(1)
            status, packed = await world.producer.take_batch(2)
            assert (packed, status.num_groups) == (None, 0)
            await world.producer.acknowledge(1)
            await world.producer.pause()
            await world.producer.resume(1)
            _, packed = await world.take(2)
            assert tasks_of(packed) == {"strict": 2, "eager": 2}

    virtual(main())


def test_weights_change_with_the_step_and_are_asked_for_once() -> None:
    async def main() -> None:
        asked = []

        def moving(step: int, weights: dict[str, float]) -> dict[str, float]:
            asked.append(step)
            return {"a": 1.0, "b": float(step - 1)}

        world = World(task_config("a", max_staleness=2), task_config("b"), batch_size=4, weights=moving)
        async with producing(world):
            split = [tasks_of((await train_step(world, step))[1])["b"] for step in range(1, 5)]
        assert split == [0, 2, 3, 3]
        assert sorted(asked) == sorted(set(asked))

    virtual(main())


def test_a_weight_function_that_fails_ends_production_and_says_where() -> None:
    async def main() -> None:
        world = World(
            task_config("a"), task_config("b"), batch_size=2, weights=lambda step, w: {"a": 0.0, "b": 0.0}
        )
        await world.producer.resume(0)
        running = world.start()
        with pytest.raises(ConfigError, match="step 1"):
            await running
        with pytest.raises(ConfigError, match="step 1"):
            await world.producer.take_batch(1)

    virtual(main())


def test_all_batches_within_the_bound_are_in_flight_at_once() -> None:
    """N34, N36 and N37 through the producer: (eta + 1) x batch beyond what the version has consumed."""

    async def main() -> None:
        world = World(task_config(max_staleness=2), batch_size=4, size=500)
        world.pool.seconds = lambda one: 10
        async with producing(world):
            await asyncio.sleep(1)
            assert world.pool.generating == 12
            for step in range(1, 7):
                await train_step(world, step)
                await asyncio.sleep(0.1)
                counts = await world.producer.counts()
                assert counts.buffered + counts.in_flight == 12
        on_policy = World(task_config(max_staleness=0), batch_size=4)
        async with producing(on_policy):
            for step in range(1, 5):
                status, _ = await train_step(on_policy, step)
                assert max(status.staleness) == 0
                await asyncio.sleep(0.1)
                counts = await on_policy.producer.counts()
                assert counts.buffered + counts.in_flight == 4

    virtual(main())


def test_the_slow_are_waited_for_instead_of_dropped() -> None:
    """One group in four takes longer than the bound lasts: by age it would never be trained."""

    async def main() -> None:
        world = World(task_config(max_staleness=1), batch_size=4, size=500)
        world.pool.seconds = lambda one: 40 if one.group_id % 4 == 0 else 2
        trained: list[int] = []
        async with producing(world):
            for step in range(1, 16):
                status, packed = await train_step(world, step)
                assert max(status.staleness) <= 1
                trained += [one.group_id for one in unpack_groups(packed)]
                await asyncio.sleep(3)
            assert (await world.producer.counts()).expired == 0
        assert sum(group_id % 4 == 0 for group_id in trained) in (14, 15)

    virtual(main())


def test_groups_start_until_the_engines_are_full_and_the_next_step_comes_first() -> None:
    """Slots for six requests and a quarter more that wait in the engines: eight groups of two, half of them at work."""

    async def main() -> None:
        near, far = task_config("near", max_staleness=9), task_config("far", max_staleness=9)
        world = World(near, far, batch_size=4, num_slots=6, size=500)
        world.pool.seconds = lambda one: 10
        async with producing(world):
            await asyncio.sleep(1)
            assert Counter(world.producer.pending.num_by_task()) == {"near": 4, "far": 4}
            assert max(world.producer.progress.target_upto.values()) <= 3
            for step in range(1, 5):
                await train_step(world, step)
            # Members of one length are at work together: what was learned of them leaves room for fewer groups.
            await asyncio.sleep(1)
            assert 4 <= len(world.producer.pending) <= 6

    virtual(main())


def test_a_bound_that_never_binds_costs_no_look_at_steps_that_nobody_works_for() -> None:
    async def main() -> None:
        idle = task_config("idle", weight=0.0, weight_schedule={500_000: 1.0})
        world = World(task_config("busy"), idle, batch_size=4, interval=1_000_000, num_slots=16)
        world.pool.seconds = lambda one: 10
        async with producing(world):
            await asyncio.sleep(1)
            assert len(world.producer.progress._allocations) <= 8

    virtual(main())


def test_what_is_too_old_for_its_tokens_is_not_made() -> None:
    """The mask is nearer than the bound: groups made beyond it would come to the trainer without a token."""

    async def main() -> None:
        world = World(task_config(max_staleness=9, max_token_staleness=1), batch_size=2, size=500)
        async with producing(world):
            await asyncio.sleep(1000)
            assert (await world.producer.counts()).sampled == 4
            _, packed = await world.take(1)
            await asyncio.sleep(100)
            status, _ = await world.producer.take_batch(2)
            assert (status.status, status.num_groups) == ("expired_batch", 0)
            for step in range(2, 8):
                status, packed = await take_after_sync(world, step)
                assert all(
                    member.response_mask.any() for one in unpack_groups(packed) for member in one.states
                )
            assert (await world.producer.counts()).expired == 0

    virtual(main())


def test_a_full_buffer_stops_production_but_never_starves_the_consumer() -> None:
    async def main() -> None:
        bounds = BufferBounds(max_groups=6, low_water=0.5)
        world = World(task_config(max_staleness=9), batch_size=2, bounds=bounds)
        async with producing(world):
            await asyncio.sleep(100)
            counts = await world.buffer.counts()
            assert counts.is_full and 6 <= counts.groups["default"][Status.COMPLETED] <= 8
            seen = []
            for step in range(1, 12):
                _, packed = await world.producer.take_batch(step)
                assert packed is not None and packed.num_groups == 2
                await world.producer.acknowledge(step)
                await world.producer.pause()
                await world.producer.resume(step)
                await asyncio.sleep(20)
                where = await world.producer.counts()
                seen.append(where.buffered + where.in_flight)
            assert max(seen) <= 8
            assert min(seen) < max(seen), "below the low-water mark production was free again"

    virtual(main())


def test_a_buffer_full_of_interrupted_groups_still_fills_the_next_batch() -> None:
    """Everything in it is ABORTED: without continuing them it would stay full for ever."""

    async def main() -> None:
        bounds = BufferBounds(max_groups=4, low_water=0.5)
        world = World(task_config(max_staleness=9, over_sample_threshold=2.0), batch_size=2, bounds=bounds)
        world.pool.seconds = lambda one: 5
        async with producing(world):
            await asyncio.sleep(2.5)
            await world.producer.pause()
            counts = await world.buffer.counts()
            assert counts.is_full and counts.groups["default"] == {Status.ABORTED: 6}
            await world.producer.resume(1)
            started = len(world.pool.started)
            await asyncio.sleep(0.1)
            assert len(world.pool.started) - started == 2
            _, packed = await world.producer.take_batch(1)
            assert packed is not None

    virtual(main())


def test_a_full_buffer_goes_on_with_what_the_next_batch_must_not_miss() -> None:
    """The next batch could be filled without the slow group, which would then be too old for the one after."""

    async def main() -> None:
        bounds = BufferBounds(max_groups=4, low_water=0.5)
        world = World(task_config(max_staleness=1), batch_size=2, bounds=bounds)
        world.pool.seconds = lambda one: 30 if one.group_id == 0 else 1
        async with producing(world):
            await asyncio.sleep(1.5)
            await train_step(world, 1)
            await asyncio.sleep(3)
            await world.producer.pause()
            counts = await world.buffer.counts()
            assert counts.is_full and counts.groups["default"] == {Status.COMPLETED: 3, Status.ABORTED: 1}
            await world.producer.resume(1)
            _, packed = await world.take(2)
            assert 0 in {one.group_id for one in unpack_groups(packed)}

    virtual(main())


def test_a_round_may_end_early_where_it_is_called_once_a_step() -> None:
    async def main() -> None:
        world = World(
            task_config(), batch_size=6, should_continue=lambda completed, target: completed < target / 2
        )
        world.pool.seconds = lambda one: 1 + one.group_id
        await world.producer.resume(0)
        for step in range(1, 4):
            assert await world.producer.produce_batch(step) is ProduceBatchStatus.NORMAL
            await world.producer.pause()
            status, packed = await world.producer.take_batch(step)
            assert packed is not None and 3 <= packed.num_groups <= 6
            assert status.num_groups == packed.num_groups
            await world.producer.acknowledge(step)
            await world.producer.resume(step)
        progress = world.producer.progress
        assert progress.target == {"default": 18}
        assert progress.consumed["default"] + progress.waived["default"] == 18
        assert (await world.producer.counts()).lost == 0
        await world.producer.close()

    virtual(main())


def test_a_round_that_ends_without_a_group_is_an_error_and_not_waited_for() -> None:
    async def main() -> None:
        world = World(task_config(), should_continue=lambda completed, target: False)
        await world.producer.resume(0)
        await world.producer.produce_batch(1)
        with pytest.raises(ProductionError, match="round of step 1 ended without a group: should_continue"):
            await world.producer.take_batch(1)

    virtual(main())


def test_a_round_that_may_end_early_is_refused_where_the_consumer_would_starve() -> None:
    async def main() -> None:
        world = World(task_config(), should_continue=lambda completed, target: False)
        await world.producer.resume(0)
        with pytest.raises(ConfigError, match="starve"):
            await world.producer.run()

    virtual(main())


def test_a_trajectory_interrupted_too_often_waits_for_the_tail_batch() -> None:
    """Its tokens are kept, and it is not continued before the round that takes such groups first."""

    async def main() -> None:
        strategy = task_config(
            max_staleness=50, max_pending=2, tail_batch_trigger_size=2, tail_batch_max_tries=2
        )
        world = World(strategy, batch_size=2, size=500)
        world.pool.seconds = lambda one: 12 if one.group_id < 2 else 1
        async with producing(world):
            for version in range(1, 3):
                await asyncio.sleep(2.5)
                await world.producer.pause()
                await world.producer.resume(version)
            # The round in which they gave up took them first: `resume` began a new one.
            await asyncio.sleep(0.1)
            assert set(world.pool.started[-2:]) == {0, 1}
            _, packed = await world.take(1)
            assert all(len(set(m.policy_versions)) == 3 for one in unpack_groups(packed) for m in one.states)

    virtual(main())


def test_a_trajectory_interrupted_too_often_is_left_alone_until_there_are_enough() -> None:
    async def main() -> None:
        strategy = task_config(
            max_staleness=50, max_pending=2, tail_batch_trigger_size=3, tail_batch_max_tries=1
        )
        world = World(strategy, batch_size=2, size=500)
        world.pool.seconds = lambda one: 12 if one.group_id < 2 else 1
        async with producing(world):
            await asyncio.sleep(2.5)
            await world.producer.pause()
            assert (await world.buffer.counts()).groups["default"] == {Status.EXPIRED: 2}
            assert world.producer.progress.metrics.expired_groups == 0
            await world.producer.resume(1)
            _, packed = await world.take(1)
            assert {one.group_id for one in unpack_groups(packed)} == {2, 3}

    virtual(main())


def test_a_pool_that_dies_in_a_put_counts_nothing_twice() -> None:
    """A call to the buffer that raises ends production; what had ended is received when it is asked again."""

    async def main() -> None:
        world = World(batch_size=2)
        put, failures = world.buffer.put, [ConnectionError("buffer is gone")]

        async def failing(*args: Any) -> Any:
            if failures:
                raise failures.pop()
            return await put(*args)

        world.buffer.put = failing  # type: ignore[method-assign, assignment]
        await world.producer.resume(0)
        running = world.start()
        with pytest.raises(ConnectionError):
            await running
        assert world.producer.progress.metrics.produced_samples == 0
        await world.producer.pause()
        counts = await world.producer.counts()
        assert (counts.lost, counts.in_flight, counts.buffered) == (0, 0, counts.sampled)
        with pytest.raises((ConnectionError, ProductionError)):
            await world.producer.take_batch(1)

    virtual(main())
