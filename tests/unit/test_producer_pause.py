"""Pause, resume, failures, single rounds and the checkpoint, under a virtual clock. Rows N26, N27, N32."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from raypost.checkpoint import CheckpointDir
from raypost.errors import (
    CheckpointError,
    LedgerError,
    NoWorkersError,
    ProductionError,
    StaleWeightsError,
    WaitTimeoutError,
    WeightError,
)
from raypost.ledger.ledger import LEDGER_FILE, Ledger
from raypost.ledger.life import group_life
from raypost.ledger.summary import ledger_summary
from raypost.types import Group, ProduceBatchStatus, Status
from raypost.types.packed import PackedGroups, pack_groups, unpack_groups
from raypost.types.pause import PauseMode
from tests.unit.production import (
    Pool,
    World,
    fate,
    group,
    producing,
    take_after_sync,
    task_config,
    train_step,
    virtual,
)

# ---------------------------------------------------------------- pause and resume


def test_pause_drains_into_the_buffer_and_nothing_starts_before_resume() -> None:
    """N26."""

    async def main() -> None:
        world = World(task_config(max_pending=2), batch_size=2)
        async with producing(world):
            await asyncio.sleep(0.5)
            seconds = await world.producer.pause()
            assert seconds >= 0 and world.pool.generating == 0
            counts = await world.producer.counts()
            assert (counts.in_flight, counts.buffered) == (0, 2)
            assert await world.producer.pause() == 0
            await asyncio.sleep(1000)
            assert len(world.pool.started) == 2
            await world.producer.resume(0)
            await world.producer.resume(0)
            await world.producer.take_batch(1)

    virtual(main())


def test_swap_starts_nothing_meanwhile_and_groups_go_on_with_the_new_version() -> None:
    async def main() -> None:
        world = World(task_config(max_pending=2), batch_size=2)
        world.pool.seconds, world.pool.swap_s = lambda one: 4, 3.0
        async with producing(world):
            await asyncio.sleep(1.5)
            assert await world.producer.swap(1, world.pool.swap) == pytest.approx(3.0)
            started = len(world.pool.started)
            _, packed = await world.producer.take_batch(1)
            assert started == 2 and packed is not None
            members = [state for one in unpack_groups(packed) for state in one.states]
            assert {tuple(state.policy_versions) for state in members} == {(0, 1, 1, 1)}
            with pytest.raises(ProductionError, match="version 1 was served"):
                await world.producer.swap(0, world.pool.swap)

    virtual(main())


def test_swap_that_fails_leaves_the_gate_closed() -> None:
    async def main() -> None:
        world = World(task_config(max_pending=2), batch_size=2)

        async def fails(version: int) -> None:
            raise WeightError("holds other bytes")

        async with producing(world):
            await asyncio.sleep(0.5)
            with pytest.raises(WeightError, match="holds other bytes"):
                await world.producer.swap(1, fails)
            await asyncio.sleep(1000)
            assert len(world.pool.started) == 2
            await world.producer.resume(1)
            await world.producer.take_batch(1)

    virtual(main())


def test_a_lost_abort_is_sent_again() -> None:
    async def main() -> None:
        world = World(batch_size=2, pause_timeout_s=60)
        world.pool.lost_pauses, world.pool.seconds = 1, lambda one: 500
        async with producing(world):
            await asyncio.sleep(1.5)
            assert await world.producer.pause() == pytest.approx(5.0)
            assert (world.pool.pauses, world.pool.generating) == (2, 0)
            assert world.pool.interrupts == 2

    virtual(main())


@pytest.mark.parametrize(("how", "seconds"), [("hang", 20.0), ("stubborn", 25.0)])
def test_what_hangs_is_cancelled_at_the_deadline_and_put_back_not_lost(how: str, seconds: float) -> None:
    """N27, without the loss."""

    async def main() -> None:
        world = World(task_config(max_pending=2), batch_size=2, pause_timeout_s=20)
        world.pool.fate = fate(**{how: {0}})
        async with producing(world):
            await asyncio.sleep(0.5)
            assert await world.producer.pause() == pytest.approx(seconds)
            counts = await world.producer.counts()
            assert (counts.in_flight, counts.buffered, counts.lost) == (0, 2, 0)
            await world.producer.state_dict()
            world.pool.fate = fate()
            await world.producer.resume(0)
            _, packed = await world.take(1)
            assert set(packed.group_ids.tolist()) == {0, 1}
            assert set(packed.num_aborts.tolist()) == {1}

    virtual(main())


def test_a_pool_that_does_not_confirm_its_pause_is_an_error_and_the_gate_stays_closed() -> None:
    async def main() -> None:
        world = World(batch_size=1, pause_timeout_s=20)

        async def never(mode: PauseMode = "abort") -> None:
            await asyncio.sleep(1e9)

        world.pool.pause = never  # type: ignore[method-assign]
        async with producing(world):
            await asyncio.sleep(0.5)
            with pytest.raises(WaitTimeoutError, match="did not confirm"):
                await world.producer.pause()
            started = len(world.pool.started)
            await asyncio.sleep(100)
            assert len(world.pool.started) == started

    virtual(main())


def test_versions_never_go_back_and_engines_come_first() -> None:
    async def main() -> None:
        world = World()
        await world.producer.resume(3)
        with pytest.raises(ProductionError, match="version 3 was served"):
            await world.producer.resume(2)

        async def refuse(version: int) -> None:
            raise StaleWeightsError("not loaded")

        await world.producer.pause()
        world.pool.resume = refuse  # type: ignore[method-assign]
        with pytest.raises(StaleWeightsError):
            await world.producer.resume(4)
        running = world.start()
        await asyncio.sleep(10)
        assert world.pool.started == []
        running.cancel()

    virtual(main())


# ---------------------------------------------------------------- failures


def test_what_is_nobodys_fault_ends_run_at_once_with_its_traceback_and_loses_nothing() -> None:
    async def main() -> None:
        world = World(task_config(max_pending=4), batch_size=4)
        world.pool.seconds = lambda one: 1
        world.pool.fate = lambda one: "no workers" if one.group_id == 2 else "ok"
        await world.producer.resume(0)
        running = world.start()
        waiting = asyncio.create_task(world.producer.take_batch(1))
        with pytest.raises(NoWorkersError, match="group 2") as caught:
            await running
        assert any(entry.name == "_run" for entry in caught.traceback)
        with pytest.raises(NoWorkersError):
            await waiting
        await world.producer.pause()
        counts = await world.producer.counts()
        assert (counts.buffered, counts.in_flight, counts.lost) == (4, 0, 0)
        await world.producer.state_dict()

    virtual(main())


def test_a_filter_that_raises_ends_run_and_loses_nothing() -> None:
    async def main() -> None:
        def broken(one: Group) -> bool:
            raise KeyError("reward")

        world = World(batch_size=2, is_valid=broken)
        await world.producer.resume(0)
        with pytest.raises(KeyError):
            await world.start()
        await world.producer.pause()
        assert (await world.producer.counts()).lost == 0

    virtual(main())


def test_a_group_whose_host_died_is_started_again_and_failed_in_the_end() -> None:
    async def main() -> None:
        pool, deaths = Pool(), {"left": 2}

        def fate_of(one: Group) -> str:
            if one.group_id == 0 and deaths["left"]:
                deaths["left"] -= 1
                return "died"
            return "died" if one.group_id == 1 else "ok"

        pool.fate = fate_of
        world = World(task_config(max_staleness=0), batch_size=2, pool=pool)
        async with producing(world):
            _, packed = await world.take(1)
            assert set(packed.group_ids.tolist()) == {0, 2}
            assert pool.started.count(0) == 3 and pool.started.count(1) == 4
            assert (await world.producer.counts()).failed == 1

    virtual(main())


def test_nothing_but_failures_ends_production_instead_of_eating_the_dataset() -> None:
    async def main() -> None:
        world = World(batch_size=2)
        world.pool.fate = lambda one: "failed"
        await world.producer.resume(0)
        with pytest.raises(ProductionError, match=r"32 groups in a row failed .* with: agent_loop: scripted"):
            await world.start()

    virtual(main())


def test_a_cancelled_run_is_no_silence_for_the_consumer() -> None:
    async def main() -> None:
        world = World()
        await world.producer.resume(0)
        running = world.start()
        await asyncio.sleep(0.5)
        with pytest.raises(ProductionError, match="running already"):
            await world.producer.run()
        running.cancel()
        with pytest.raises(ProductionError, match="was cancelled"):
            await world.producer.take_batch(1)

    virtual(main())


# ---------------------------------------------------------------- one round, and the checkpoint


def test_one_round_produces_its_step_and_no_more() -> None:
    async def main() -> None:
        world = World(task_config(max_staleness=3), batch_size=2)
        await world.producer.resume(0)
        for step in (1, 2, 3):
            assert await world.producer.produce_batch(step) is ProduceBatchStatus.NORMAL
            assert await world.producer.produce_batch(step) is ProduceBatchStatus.NORMAL
            await world.producer.pause()
            status, _ = await world.producer.take_batch(step)
            assert (status.num_groups, (await world.producer.counts()).sampled) == (2, 2 * step)
            await world.producer.acknowledge(step)
            assert await world.producer.produce_batch(step + 1) is ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT
            await world.producer.resume(step)
        strict = World(batch_size=1)
        await strict.producer.resume(0)
        assert await strict.producer.produce_batch(1) is ProduceBatchStatus.NORMAL

    virtual(main())


def test_one_round_beyond_the_bound_asks_for_newer_weights() -> None:
    async def main() -> None:
        world = World(task_config(max_staleness=0), batch_size=1)
        await world.producer.resume(0)
        assert await world.producer.produce_batch(2) is ProduceBatchStatus.EXPIRED_BATCH

    virtual(main())


def test_saving_needs_a_pause() -> None:
    async def main() -> None:
        world = World()
        async with producing(world):
            await asyncio.sleep(0.5)
            with pytest.raises(ProductionError, match="before saving"):
                await world.producer.state_dict()

    virtual(main())


async def saved_after(step: int, **take: bool) -> tuple[World, dict[str, Any]]:
    world = World(task_config(max_staleness=1, over_sample_threshold=1.0), batch_size=2)
    await world.producer.resume(0)
    world.start()
    for one in range(1, step + 1):
        await train_step(world, one)
    if take.get("ahead"):
        await world.producer.take_batch(step + 1)
    await world.producer.pause()
    return world, await world.producer.state_dict(model_step=step)


def test_a_restored_run_stays_paused_then_goes_on_with_the_same_groups() -> None:
    """N32."""

    async def main() -> None:
        before, state = await saved_after(4)
        after = World(task_config(max_staleness=1, over_sample_threshold=1.0), batch_size=2)
        await after.producer.load_state_dict(state)
        after.start()
        await asyncio.sleep(100)
        assert after.pool.started == []
        assert await after.producer.counts() == await before.producer.counts()
        with pytest.raises(ProductionError, match="version 4 was served"):
            await after.producer.resume(2)
        batches = []
        for world in (before, after):
            await world.producer.resume(4)
            _, packed = await world.take(5)
            batches.append(packed.group_ids.tolist())
            assert (await world.producer.counts()).lost == 0
        assert batches[0] == batches[1]
        assert after.samplers["default"].position == before.samplers["default"].position

    virtual(main())


def test_a_checkpoint_on_disk_restores_production_behind_a_snapshot_of_its_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raypost.ledger.journal.TAIL_BYTES", 500)

    async def world(version: int) -> World:
        ledger = Ledger(tmp_path / LEDGER_FILE)
        made = World(task_config(max_staleness=1, over_sample_threshold=1.0), batch_size=2, ledger=ledger)
        if version:
            await made.producer.load_state_dict(CheckpointDir.load_state(tmp_path, "producer"))
        await made.producer.resume(version)
        made.start()
        return made

    async def main() -> None:
        before = await world(0)
        for step in (1, 2):
            await train_step(before, step)
        await before.producer.pause()
        CheckpointDir.save_state(tmp_path, "producer", await before.producer.state_dict(model_step=2))
        saved = await before.producer.counts()
        await before.producer.resume(2)
        for step in (3, 4, 5):
            await train_step(before, step)
        assert json.loads((tmp_path / LEDGER_FILE).read_text().splitlines()[0])["event"] == "snapshot"
        after = await world(2)
        assert (await after.producer.counts()).trained == saved.trained == 4
        for step in (3, 4, 5):
            await train_step(after, step)
        await after.producer.pause()
        counts, summary = await after.producer.counts(), ledger_summary(tmp_path)
        assert (counts.trained, counts.lost) == (10, 0)
        assert (summary.problems, summary.counts) == ([], counts)
        ends = [group_life(tmp_path, f"default/{n}").end for n in range(counts.sampled)]
        assert ends.count("trained") == 10 and ends.count(None) == counts.buffered

    virtual(main())


def test_a_batch_taken_but_not_in_the_saved_model_is_taken_again() -> None:
    async def main() -> None:
        before, state = await saved_after(2, ahead=True)
        first = await before.take(3)
        after = World(task_config(max_staleness=1, over_sample_threshold=1.0), batch_size=2)
        await after.producer.load_state_dict(state)
        assert (await after.producer.counts()).trained == 4
        again = await after.take(3)
        assert first[1].keys == again[1].keys
        # Its groups are counted as there, not as taken: else production would stop that much too early.
        await after.producer.resume(2)
        after.start()
        await after.producer.acknowledge(3)
        for step in range(4, 8):
            status, _ = await asyncio.wait_for(take_after_sync(after, step), 100)
            assert status.num_groups == 2
        await asyncio.sleep(100)
        progress = after.producer.progress
        assert sum(progress.consumed.values()) == 2 * 7

    virtual(main())


def test_a_batch_that_is_in_the_saved_model_is_never_taken_again() -> None:
    async def main() -> None:
        world = World(batch_size=2)
        await world.producer.resume(0)
        world.start()
        _, packed = await world.take(1)
        trained = set(packed.group_ids.tolist())
        await world.producer.pause()
        state = await world.producer.state_dict(model_step=1)
        after = World(batch_size=2)
        await after.producer.load_state_dict(state)
        await after.producer.resume(1)
        after.start()
        _, packed = await after.take(2)
        assert not trained & set(packed.group_ids.tolist())

    virtual(main())


def test_damaged_foreign_and_late_restores_are_refused() -> None:
    async def main() -> None:
        world, state = await saved_after(1)
        fresh = World(task_config(max_staleness=1), batch_size=2)
        with pytest.raises(CheckpointError, match="lacks"):
            await fresh.producer.load_state_dict({"progress": {}})
        with pytest.raises(CheckpointError, match="restored over"):
            await world.producer.load_state_dict(state)
        with pytest.raises(CheckpointError):
            await World(task_config("other"), batch_size=2).producer.load_state_dict(state)

    virtual(main())


def test_a_group_put_behind_the_ledgers_back_is_noticed() -> None:
    async def main() -> None:
        world = World(batch_size=1)
        await world.buffer.put(pack_groups([group(9, [0], [0])]), 1)
        with pytest.raises(LedgerError, match="never sampled"):
            await world.producer.take_batch(1)

    virtual(main())


def versions_of(packed: PackedGroups) -> set[tuple[int, ...]]:
    return {tuple(int(v) for v in m.policy_versions) for one in unpack_groups(packed) for m in one.states}


def test_keep_freezes_requests_and_they_go_on_with_the_new_weights() -> None:
    async def main() -> None:
        world = World(task_config(max_staleness=3, max_pending=2), batch_size=2)
        world.pool.seconds = lambda one: 4
        async with producing(world):
            await asyncio.sleep(2.5)
            await world.producer.pause("keep")
            counts = await world.producer.counts()
            assert (counts.in_flight, counts.buffered) == (2, 0)
            await asyncio.sleep(100)
            assert (await world.producer.counts()).in_flight == 2
            await world.producer.resume(1)
            _, packed = await world.take(1)
            assert versions_of(packed) == {(0, 0, 1, 1)}
            assert world.pool.started[:2] == [0, 1] and world.pool.interrupts == 0

    virtual(main())


def test_what_is_frozen_comes_back_when_a_checkpoint_must_find_nothing_pending() -> None:
    async def main() -> None:
        world = World(task_config(max_staleness=3, max_pending=2), batch_size=2)
        world.pool.seconds = lambda one: 4
        async with producing(world):
            await asyncio.sleep(2.5)
            await world.producer.pause("keep")
            with pytest.raises(ProductionError, match="mode abort"):
                await world.producer.state_dict(0)
            await world.producer.pause("abort")
            assert (await world.producer.counts()).in_flight == 0
            assert (await world.buffer.counts()).groups["default"] == {Status.ABORTED: 2}
            await world.producer.state_dict(0)

    virtual(main())


def test_wait_lets_requests_run_to_their_end() -> None:
    async def main() -> None:
        world = World(task_config(max_staleness=3, max_pending=2), batch_size=2)
        world.pool.seconds = lambda one: 20
        async with producing(world):
            await asyncio.sleep(2.5)
            assert 17 <= await world.producer.pause("wait") <= 18.5
            assert (await world.buffer.counts()).groups["default"] == {Status.COMPLETED: 2}
            assert world.pool.pauses == 1 and world.pool.interrupts == 0

    virtual(main())


def test_wait_aborts_what_takes_longer_than_the_deadline() -> None:
    async def main() -> None:
        world = World(task_config(max_staleness=0), batch_size=2, pause_timeout_s=10.0)
        world.pool.seconds = lambda one: 1 + 99 * (one.group_id == 1)
        async with producing(world):
            await asyncio.sleep(2.5)
            assert 10 <= await world.producer.pause("wait") <= 12
            statuses = (await world.buffer.counts()).groups["default"]
            assert statuses == {Status.COMPLETED: 1, Status.ABORTED: 1}
            assert world.pool.interrupts >= 1

    virtual(main())


def test_a_round_that_never_ends_says_which_group_it_waits_for() -> None:
    async def main() -> None:
        world = World(batch_size=2, take_timeout_s=300.0)
        world.pool.fate = fate(hang={1})
        await world.producer.resume(0)
        with pytest.raises(WaitTimeoutError, match=r"step 1.*pending 1 \(default/1 for 300 s\)"):
            await world.producer.produce_batch(1)
        await world.producer.close()

    virtual(main())
