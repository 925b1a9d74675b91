"""Scheduling, takes and what becomes of groups, under a virtual clock. Rows N8, N10, N12, N16, N17, N20,
N21, N24, N29 to N31.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from raypost.config import AgentLoopConfig
from raypost.errors import ProductionError, WaitTimeoutError
from raypost.types import ProduceBatchStatus, Status
from raypost.types.packed import unpack_groups
from tests.unit.production import (
    Sealed,
    World,
    fate,
    producing,
    take_after_sync,
    task_config,
    train_step,
    virtual,
)


def test_on_policy_training_sees_only_the_newest_version() -> None:
    async def main() -> None:
        world = World(task_config(max_staleness=0), batch_size=3)
        async with producing(world):
            for step in range(1, 6):
                status, packed = await train_step(world, step)
                assert status.staleness == (0, 0, 0)
                versions = {
                    int(v) for one in unpack_groups(packed) for m in one.states for v in m.policy_versions
                }
                assert versions == {step - 1}

    virtual(main())


def test_staleness_never_reaches_its_bound_and_does_come_close() -> None:
    async def main() -> None:
        world = World(task_config(max_staleness=2, over_sample_threshold=1.0), batch_size=2)
        seen: set[int] = set()
        async with producing(world):
            for step in range(1, 12):
                await asyncio.sleep(20)
                seen |= set((await train_step(world, step))[0].staleness)
        assert max(seen) == 2 and min(seen) >= 0

    virtual(main())


def test_interrupted_groups_are_continued_first_and_their_old_versions_kept() -> None:
    async def main() -> None:
        world = World(task_config(max_staleness=3, max_pending=2), batch_size=2)
        world.pool.seconds = lambda one: 4
        async with producing(world):
            await asyncio.sleep(2.5)
            await world.producer.pause()
            assert (await world.buffer.counts()).groups["default"] == {Status.ABORTED: 2}
            await world.producer.resume(1)
            _, packed = await world.take(1)
            for one in unpack_groups(packed)[:2]:
                assert one.states[0].policy_versions.tolist() == [0, 0, 1, 1]
                assert one.states[0].num_aborts == 1
            assert world.pool.started[:4] == [0, 1, 0, 1]

    virtual(main())


def test_oversampling_is_fixed_and_what_is_left_counts_for_the_next_step() -> None:
    """N8."""

    async def main() -> None:
        world = World(task_config(max_staleness=0, over_sample_threshold=1.0), batch_size=4, interval=2)
        async with producing(world):
            await asyncio.sleep(0.5)
            assert (await world.producer.counts()).in_flight == 12
            await world.producer.take_batch(1)
            await asyncio.sleep(10)
            assert (await world.producer.counts()).sampled == 12

    virtual(main())


def test_production_stops_at_its_horizon() -> None:
    async def main() -> None:
        world = World(task_config(max_staleness=1), batch_size=2)
        async with producing(world):
            await asyncio.sleep(1000)
            assert (await world.producer.counts()).as_dict()["sampled"] == 4

    virtual(main())


def test_sync_production_begins_a_step_when_the_one_before_was_taken() -> None:
    async def main() -> None:
        world = World(task_config(kind="sync"), batch_size=2, interval=3)
        async with producing(world):
            for step in (1, 2, 3):
                await asyncio.sleep(100)
                assert (await world.producer.counts()).sampled == 2 * step
                status, _packed = await world.producer.take_batch(step)
                assert (status.status, status.staleness) == ("normal", (step - 1, step - 1))
            await asyncio.sleep(100)
            assert (await world.producer.take_batch(4))[0].status == "expired_batch"

    virtual(main())


def test_same_seed_gives_the_same_batches_in_sync_mode() -> None:
    async def main(slow: int) -> list[list[int]]:
        world = World(task_config(kind="sync"), batch_size=4)
        world.pool.seconds = lambda one: 1 + (one.group_id * slow) % 5
        batches = []
        async with producing(world):
            for step in range(1, 5):
                _, packed = await train_step(world, step)
                batches.append([one.states[0].metadata["answer"] for one in unpack_groups(packed)])
        return batches

    assert virtual(main(1)) == virtual(main(3))


# ---------------------------------------------------------------- the consumer's protocol


async def expired_world(batch_size: int = 2) -> World:
    """Production stopped at its bound: version 0, steps 1 and 2 produced."""
    world = World(task_config(max_staleness=1), batch_size=batch_size)
    await world.producer.resume(0)
    world.start()
    await asyncio.sleep(100)
    return world


def test_take_at_the_bound_is_full_while_no_newer_weights_exist() -> None:
    """N30."""

    async def main() -> None:
        world = await expired_world()
        status, packed = await world.producer.take_batch(1)
        assert (status.status, status.num_groups, status.num_samples) == ("expired_batch", 2, 4)
        assert packed is not None and packed.num_groups == 2 and status.buffered == 2

    virtual(main())


def test_take_at_the_bound_is_empty_once_newer_weights_exist_and_keeps_the_data() -> None:
    """N29, and the same step is asked for again after the sync."""

    async def main() -> None:
        world = await expired_world()
        await world.producer.take_batch(1)
        await asyncio.sleep(100)
        world.producer.progress.metrics.failed_samples = 7
        for _ in range(2):
            status, packed = await world.producer.take_batch(2)
            assert (status.status, status.num_groups, packed) == ("expired_batch", 0, None)
        assert (await world.buffer.counts()).groups["default"][Status.COMPLETED] == 2
        await world.producer.acknowledge(1)
        await world.producer.pause()
        await world.producer.resume(1)
        status, packed = await world.producer.take_batch(2)
        assert status.num_groups == 2 and packed is not None
        assert status.metrics.failed_samples == 7

    virtual(main())


async def stale_leftovers(trigger: int, **options: Any) -> World:
    """Production stopped at its bound with version 1; the batch of step 2 is taken, and of eight groups that began
    with version 0 the batches of steps 1 and 2 took four: the rest, started beyond the bound, expired."""
    strategy = task_config(
        max_staleness=1, over_sample_threshold=2.0, tail_batch_trigger_size=trigger, **options
    )
    world = World(strategy, batch_size=2)
    world.pool.seconds = lambda one: 1 if one.group_id < 2 else 4
    await world.producer.resume(0)
    world.start()
    await world.producer.take_batch(1)
    await asyncio.sleep(1.5)
    await world.producer.acknowledge(1)
    await world.producer.pause()
    await world.producer.resume(1)
    await asyncio.sleep(100)
    status, _ = await world.producer.take_batch(2)
    assert (status.status, status.staleness, status.buffered) == ("expired_batch", (1, 1), 2)
    assert status.metrics.expired_groups == 4
    return world


def test_groups_that_expire_after_production_stopped_are_produced_anew() -> None:
    """N17, and N31 resolved instead of raised: what lacks below the bound may still be produced."""

    async def main() -> None:
        world = await stale_leftovers(trigger=-1)
        counts = await world.producer.counts()
        assert (counts.expired, counts.lost) == (4, 0)
        status, packed = await take_after_sync(world, 3)
        assert packed is not None and status.staleness == (1, 1)
        assert min(one.group_id for one in unpack_groups(packed)) >= 8

    virtual(main())


def test_expired_groups_are_generated_again_if_asked_for() -> None:
    """N16 through the producer: nothing is dropped, the same groups come back with new tokens."""

    async def main() -> None:
        world = await stale_leftovers(trigger=0)
        status, packed = await take_after_sync(world, 3)
        assert packed is not None and status.staleness == (1, 1)
        _, again = await take_after_sync(world, 4)
        assert max(one.group_id for one in unpack_groups(again)) < 8
        counts = await world.producer.counts()
        assert (counts.expired, counts.lost) == (0, 0)

    virtual(main())


@pytest.mark.parametrize("trigger", [-1, 0])
def test_episodes_of_groups_that_expire_are_closed(trigger: int) -> None:
    async def main() -> None:
        playing = AgentLoopConfig(kind="environment", environment="a:b")
        world = await stale_leftovers(trigger=trigger, agent_loop=playing)
        assert len(world.pool.forgotten) == len(set(world.pool.forgotten)) == 4
        assert (await stale_leftovers(trigger=trigger)).pool.forgotten == [], "one turn leaves nothing behind"

    virtual(main())


def test_expired_groups_wait_until_a_tail_batch_is_full() -> None:
    """N10 through the producer: the two that the next batch lacks are theirs, and nothing is started beyond it."""

    async def main() -> None:
        world = await stale_leftovers(trigger=4)
        assert (await world.buffer.counts()).groups["default"][Status.EXPIRED] == 4
        await world.producer.acknowledge(2)
        await world.producer.pause()
        before = len(world.pool.started)
        await world.producer.resume(2)
        await asyncio.sleep(0.1)
        again = world.pool.started[before:]
        assert again == [4, 5]

    virtual(main())


def test_a_batch_that_can_never_come_is_an_error_with_every_counter() -> None:
    """N31."""

    async def main() -> None:
        world = await expired_world()
        world.producer.progress._allocations[1] = {"default": 20}
        with pytest.raises(ProductionError) as caught:
            await world.producer.take_batch(1)
        for counter in (
            "expired_batch",
            "version 0",
            "target",
            "consumed",
            "COMPLETED",
            "pending 0",
            "step 1",
        ):
            assert counter in str(caught.value)

    virtual(main())


def test_a_consumer_that_waits_learns_at_once_that_production_stopped() -> None:
    async def main() -> None:
        world = World()
        await world.producer.resume(0)
        context = world.producer._context
        context.progress.next_consumer_step = 3
        waiting = asyncio.create_task(world.producer.take_batch(3))
        await asyncio.sleep(1)
        context.set_status(ProduceBatchStatus.EXPIRED_BATCH)
        await asyncio.sleep(1)
        assert waiting.done() and (await waiting)[0].num_groups == 0

    virtual(main())


def test_a_batch_passes_the_producer_unopened_and_is_given_again() -> None:
    async def main() -> None:
        world = World(batch_size=2, sealed=True)
        async with producing(world):
            for step in (1, 2):
                status, batch = await world.producer.take_batch(step)
                again, same = await world.producer.take_batch(step)
                assert type(batch) is type(same) is Sealed
                assert status is again and (status.num_groups, status.num_samples) == (2, 4)
                await world.producer.acknowledge(step)
                await world.producer.pause()
                await world.producer.resume(step)

    virtual(main())


def test_take_wakes_up_when_the_last_group_arrives() -> None:
    async def main() -> None:
        world = World(task_config(max_staleness=0), batch_size=3)
        async with producing(world):
            status, _ = await world.producer.take_batch(1)
            assert asyncio.get_running_loop().time() == pytest.approx(3.0)
            assert status.wait_s == pytest.approx(3.0)

    virtual(main())


def test_a_step_taken_twice_is_the_same_batch_and_is_consumed_once() -> None:
    async def main() -> None:
        world = World(batch_size=2)
        async with producing(world):
            first, again = await world.take(1), await world.take(1)
            assert first[0] == again[0]
            assert first[1].keys == again[1].keys
            assert (await world.producer.counts()).buffered >= 2
            await world.producer.acknowledge(1)
            await world.producer.acknowledge(1)
            assert (await world.producer.counts()).trained == 2
            with pytest.raises(ProductionError, match="trained and gone"):
                await world.producer.take_batch(1)

    virtual(main())


def test_a_consumer_that_took_two_steps_and_comes_back_gets_both_again() -> None:
    async def main() -> None:
        world = World(task_config(max_staleness=3), batch_size=2)
        async with producing(world):
            first, second = await world.take(1), await world.take(2)
            for status, packed in (first, second):
                again, same = await world.take(status.step)
                assert again == status and same.keys == packed.keys
            await world.producer.acknowledge(1)
            assert (await world.take(2))[1].keys == second[1].keys
            assert (await world.take(3))[0].step == 3

    virtual(main())


def test_a_cancelled_take_costs_nothing() -> None:
    async def main() -> None:
        world = World(batch_size=2)
        async with producing(world):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(world.producer.take_batch(1), 0.5)
            status, _ = await world.producer.take_batch(1)
            assert status.num_groups == 2

    virtual(main())


def test_a_step_out_of_turn_is_refused() -> None:
    async def main() -> None:
        world = World()
        async with producing(world):
            with pytest.raises(ProductionError, match="step 1 was acknowledged, but never taken"):
                await world.producer.acknowledge(1)
            with pytest.raises(ProductionError, match="step 3 was asked for, but step 1 is next"):
                await world.producer.take_batch(3)

    virtual(main())


def test_a_take_that_waits_too_long_says_for_what() -> None:
    async def main() -> None:
        world = World()
        with pytest.raises(WaitTimeoutError, match="batch of step 1: status update_weight_and_abort"):
            await world.producer.take_batch(1)

    virtual(main())


# ---------------------------------------------------------------- what becomes of groups


def test_filtered_groups_are_counted_before_they_are_dropped_and_replaced() -> None:
    """N20."""

    async def main() -> None:
        world = World(
            task_config(group_size=3, max_staleness=0), batch_size=2, is_valid=lambda one: one.group_id != 0
        )
        async with producing(world):
            status, packed = await world.take(1)
            metrics = status.metrics
            assert (metrics.raw_rewards_sum, metrics.raw_rewards_count) == (3.0, 9)
            assert (metrics.filtered_samples, metrics.produced_samples) == (3, 9)
            assert set(packed.group_ids.tolist()) == {1, 2}
            (batch,) = status.tasks.values()
            assert (batch.num_samples, batch.rewards_sum, batch.rewards_count) == (6, 2.0, 6)
            assert (batch.response_tokens, batch.staleness) == (len(packed.response_ids), [0, 0])
            assert (await world.producer.counts()).filtered == 1

    virtual(main())


def test_groups_of_equal_rewards_are_dropped_if_asked_for() -> None:
    async def main(drop: bool) -> int:
        world = World(task_config(drop_uniform_rewards=drop), batch_size=2)
        world.pool.fate = fate(uniform={0})
        async with producing(world):
            await world.producer.take_batch(1)
            return (await world.producer.counts()).filtered

    assert virtual(main(True)) == 1
    assert virtual(main(False)) == 0


def test_failed_groups_are_counted_without_a_reward_and_replaced() -> None:
    """N21."""

    async def main() -> None:
        world = World(task_config(group_size=4, max_staleness=0), batch_size=2)
        world.pool.fate = fate(failed={0})
        async with producing(world):
            status, packed = await world.take(1)
            assert status.metrics.failed_samples == 4
            assert status.metrics.raw_rewards_count == 8
            assert set(packed.group_ids.tolist()) == {1, 2}
            assert (await world.producer.counts()).failed == 1

    virtual(main())


def test_only_new_tokens_are_counted_as_produced() -> None:
    """N24: lengths 3, 2, 4 in three parts."""

    async def main() -> None:
        world = World(task_config(group_size=2, max_staleness=9, max_pending=1), batch_size=1)
        world.pool.seconds = lambda one: 9
        counted = []
        async with producing(world, version=None):
            for version, seconds in ((5, 3.5), (7, 2.5), (8, 4.5)):
                await world.producer.resume(version)
                await asyncio.sleep(seconds)
                await world.producer.pause()
                counted.append(world.producer.progress.read_metrics().produced_tokens)
        assert [tokens // 2 for tokens in counted] == [3, 2, 4]

    virtual(main())


def test_several_tasks_share_a_batch_by_weight_and_one_without_weight_is_idle() -> None:
    """N12."""

    async def main() -> None:
        tasks = task_config("a", weight=2.0), task_config("b", weight=1.0), task_config("c", weight=0.0)
        world = World(*tasks, batch_size=6)
        async with producing(world):
            _, packed = await world.take(1)
            names = [one.task for one in unpack_groups(packed)]
            assert (names.count("a"), names.count("b"), names.count("c")) == (4, 2, 0)
            assert world.samplers["c"].position == 0

    virtual(main())


def test_an_agent_loop_that_does_not_close_episodes_holds_nothing_up() -> None:
    async def main() -> None:
        playing = AgentLoopConfig(kind="environment", environment="a:b")
        hanging = World(task_config(max_staleness=1, agent_loop=playing))

        async def forget(keys: Any) -> None:
            await asyncio.sleep(1e9)

        hanging.pool.forget = forget  # type: ignore[method-assign]
        hanging.pool.fate = lambda group: "failed" if group.group_id == 0 else "ok"
        await hanging.producer.resume(0)
        hanging.start()
        status, _ = await hanging.producer.take_batch(1)
        assert status.status == "normal" and (await hanging.producer.counts()).failed == 1

    virtual(main())
