"""Collectors: policy versions, pauses, failures, and the end."""

from __future__ import annotations

import asyncio
import queue
import subprocess
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from raypost.collector import Collector, DialogTurn
from raypost.collector.gated_generator import GatedGenerator
from raypost.errors import ConfigError, ProductionError
from raypost.types import GenerateRequest, GenerateResult, SampleParams, Status
from raypost.types.turns import turns_of
from tests.unit.collecting import Engine, Pool, alone, collect, environment, listed, quick, sizes
from tests.unit.production import virtual

# ---------------------------------------------------------------- policy versions


def test_an_update_pauses_loads_and_goes_on_and_interrupted_trajectories_keep_their_turns() -> None:
    """Every trajectory has turns of 10 s; the update comes in the middle of each one's second."""

    async def main() -> None:
        engine = Engine(seconds=10.0)
        seen: list[Any] = []

        async def load(version: int) -> None:
            assert engine.running == 0
            counts = await collector.counts()
            seen.append((version, counts.in_flight, counts.buffered))
            engine.version = version

        collector = collect(
            engine,
            num_groups=12,
            yield_completed_trajectories=True,
            total_dialog_turns=30,
            weight_updater=load,
        )
        async with collector:
            first = await anext(aiter(collector))
            assert first[0].policy_versions.tolist() == [0, 0]
            await asyncio.sleep(5)
            assert await collector.update_policy() == 1 and collector.policy_version == 1
            # 12 that were interrupted or wait, and the delivered one, until the next is asked for.
            assert seen == [(1, 0, 13)]
            rest = [one for batch in await listed(collector) for one in batch]
        assert collector.num_turns >= 30
        spanning = [one for one in rest if len(set(one.policy_versions[one.response_mask])) == 2]
        assert len(spanning) == 8
        for one in spanning:
            versions = [int(one.policy_versions[turn.start]) for turn in turns_of(one)]
            assert versions == [0] + [1] * (len(versions) - 1)
            assert one.num_aborts == 1 and one.reward == len(versions)

    virtual(main())


def test_the_version_of_a_turn_is_that_of_its_oldest_token() -> None:
    class Spanning(Engine):
        async def generate(self, request: GenerateRequest) -> GenerateResult:
            result = await super().generate(request)
            return replace(result, policy_versions=np.asarray([4, 5], np.int32))

    (batch,) = virtual(listed(collect(Spanning(), dialog_turns_per_batch=8, total_dialog_turns=8)))
    assert {turn.policy_version for turn in batch} == {4}


def test_versions_may_be_given_and_never_go_back() -> None:
    async def main() -> None:
        async with collect(policy_version=7, dialog_turns_per_batch=1) as collector:
            assert collector.policy_version == 7
            assert await collector.update_policy(20) == 20
            with pytest.raises(ProductionError, match="20 was served"):
                await collector.update_policy(3)
            assert collector.policy_version == 20

    virtual(main())


def test_versions_as_uuids_are_one_a_version_and_unique_to_the_collector() -> None:
    async def main() -> None:
        engine = Engine()
        options: dict[str, Any] = {"version_type": "uuid", "dialog_turns_per_batch": 1}

        async def load(version: int) -> None:
            engine.version = version

        async with collect(engine, **options, weight_updater=load) as collector:
            iterator = aiter(collector)
            (turn,) = await anext(iterator)
            first = collector.policy_version
            assert isinstance(first, uuid.UUID) and turn.policy_version == first == collector.version_id(0)
            second = await collector.update_policy()
            assert second != first and second == collector.version_id(1)
            seen = {turn.policy_version for _ in range(40) for turn in await anext(iterator)}
            assert second in seen and seen <= {first, second}
        assert collect(**options).policy_version != first

    virtual(main())


def test_whoever_empties_a_full_queue_can_update_the_policy_first() -> None:
    full: queue.Queue[DialogTurn] = queue.Queue(maxsize=1)
    loaded: list[int] = []
    collector = collect(quick(), queue=full, total_dialog_turns=9, weight_updater=loaded.append)
    done = collector.start()
    while not full.full():
        time.sleep(0.001)
    with ThreadPoolExecutor(1) as caller:
        assert caller.submit(collector.update_policy_and_wait).result(timeout=120) == 1
    assert loaded == [1] and len([full.get(timeout=120) for _ in range(9)]) == 9
    assert done.result(timeout=120) == 9
    collector.close()


def test_without_partial_rollout_an_interrupted_trajectory_starts_again() -> None:
    async def main() -> None:
        engine = Engine(seconds=10.0)

        async def load(version: int) -> None:
            engine.version = version

        options: dict[str, Any] = {"task": {"strategy": {"enable_partial_rollout": False}}, "num_groups": 12}
        async with collect(engine, **options, weight_updater=load, total_dialog_turns=40) as collector:
            batches = aiter(collector)
            await anext(batches)
            await asyncio.sleep(5)
            await collector.update_policy()
            turns = [turn async for batch in batches for turn in batch]
        assert all(len(set(turn.trajectory.policy_versions) - {-1}) == 1 for turn in turns)
        assert any(turn.trajectory.num_aborts for turn in turns)

    virtual(main())


def test_a_failed_update_is_raised_and_production_goes_on_with_the_old_version() -> None:
    async def main() -> None:
        async def broken(version: int) -> None:
            raise OSError("no such checkpoint")

        async with collect(weight_updater=broken, dialog_turns_per_batch=1) as collector:
            iterator = aiter(collector)
            await anext(iterator)
            with pytest.raises(OSError, match="no such checkpoint"):
                await collector.update_policy()
            assert collector.policy_version == 0
            for _ in range(20):
                await anext(iterator)

    virtual(main())


def test_an_update_that_waits_lets_a_turn_end_and_leaves_the_next_for_later() -> None:
    async def main() -> None:
        engine = Engine(seconds=10.0)
        options: dict[str, Any] = {"pause_mode": "wait", "yield_completed_trajectories": True}
        async with collect(engine, **options, num_groups=12, total_dialog_turns=30) as collector:
            batches = aiter(collector)
            await anext(batches)
            await asyncio.sleep(5)
            before = asyncio.get_running_loop().time()
            await collector.update_policy()
            assert asyncio.get_running_loop().time() - before == pytest.approx(5)
            rest = [one async for batch in batches for one in batch]
        interrupted = [one for one in rest if one.num_aborts]
        assert {len(turns_of(one)) for one in interrupted} == {3} and len(interrupted) == 4

    virtual(main())


def test_a_generator_that_is_a_pool_is_paused_itself() -> None:
    async def main() -> None:
        pool = Pool()
        async with collect(pool, dialog_turns_per_batch=1) as collector:
            iterator = aiter(collector)
            await anext(iterator)
            await collector.update_policy()
        assert pool.calls[0] == 0 and set(pool.calls[1:-1]) == {"abort"} and pool.calls[-1] == 1

    virtual(main())


def test_with_a_batch_size_the_rules_of_training_hold() -> None:
    async def main() -> None:
        engine = Engine()

        async def load(version: int) -> None:
            engine.version = version

        task = {"strategy": {"max_staleness": 1}, "group_size": 2}
        async with collect(engine, task=task, batch_size=3, weight_updater=load) as collector:
            step = 0
            async for batch in collector:
                step += 1
                assert len({turn.trajectory.group_id for turn in batch}) == 3
                assert min(turn.policy_version for turn in batch) >= step - 2
                if step == 6:
                    break
                await collector.update_policy()
        assert engine.version == 5

    virtual(main())


def test_with_a_batch_size_a_policy_that_is_never_updated_ends_it_with_the_reason() -> None:
    async def main() -> None:
        task = {"strategy": {"max_staleness": 1}}
        with pytest.raises(ProductionError, match="update_policy after every batch"):
            await listed(collect(task=task, batch_size=3))
        await alone()

    virtual(main())


# ---------------------------------------------------------------- failures and the end


def test_a_broken_environment_is_failed_for_its_reason_and_the_rest_is_collected(tmp_path: Any) -> None:
    from raypost.ledger.ledger import Ledger

    journal = tmp_path / "ledger.jsonl"

    async def main() -> None:
        options: dict[str, Any] = {"dialog_turns_per_batch": 4, "total_dialog_turns": 100}
        async with collect(environment=environment("some"), ledger=Ledger(journal), **options) as collector:
            batches = await listed(collector)
            counts = await collector.counts()
        assert {turn.trajectory.metadata["number"] % 3 for batch in batches for turn in batch} == {0, 1}
        assert counts.failed > 0 and counts.lost == 0

    virtual(main())
    assert "ValueError('no world for 2')" in journal.read_text()


def test_if_everything_fails_the_collector_raises_with_the_reason() -> None:
    async def main() -> None:
        with pytest.raises(ProductionError, match=r"in a row failed.*no world for"):
            await listed(collect(environment=environment("always")))
        await alone()

    virtual(main())


async def closed(collector: Collector) -> None:
    batches = aiter(collector)
    await anext(batches)
    await collector.aclose()


async def broken_off(collector: Collector) -> None:
    async for _ in collector:
        break
    # The loop of an abandoned iterator closes it in a task of its own.
    await asyncio.sleep(10)


@pytest.mark.parametrize("end", [closed, broken_off])
def test_closing_leaves_no_task_pending(end: Callable[[Collector], Awaitable[None]]) -> None:
    async def main() -> None:
        engine = Engine(seconds=5.0)
        collector = collect(engine, dialog_turns_per_batch=1)
        await end(collector)
        assert engine.running == 0
        await alone()
        await collector.aclose()
        with pytest.raises(ProductionError, match="closed"):
            await listed(collector)

    virtual(main())


def test_a_cancelled_wait_loses_no_turn() -> None:
    async def main() -> None:
        async with collect(
            Engine(seconds=10.0), dialog_turns_per_batch=7, total_dialog_turns=14
        ) as collector:
            batches: list[Any] = []
            while len(batches) < 2:
                try:
                    async with asyncio.timeout(3):
                        batches.append(await anext(aiter(collector)))
                except TimeoutError:
                    continue
        keys = {(turn.trajectory.group_id, turn.index) for batch in batches for turn in batch}
        assert sizes(batches) == [7, 7] and len(keys) == 14

    virtual(main())


# ---------------------------------------------------------------- the gate, and the import


REQUEST = GenerateRequest(
    request_id="r", token_ids=np.asarray([5], np.int32), sample_params=SampleParams(max_tokens=4)
)


def gated(check: Callable[[GatedGenerator, Engine], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        engine = Engine(seconds=10.0)
        gate = GatedGenerator(engine)
        await gate.resume(0)
        await check(gate, engine)
        await alone()

    virtual(main())


def test_the_gate_aborts_open_requests_and_refuses_new_ones_until_it_opens() -> None:
    async def check(gate: GatedGenerator, engine: Engine) -> None:
        running = asyncio.create_task(gate.generate(REQUEST))
        await asyncio.sleep(1)
        await gate.pause()
        assert engine.running == 0
        assert (await running).finish_reason == "abort"
        assert len((await gate.generate(REQUEST)).response_ids) == 0
        await gate.resume(1)
        assert (await gate.generate(REQUEST)).finish_reason == "stop"

    gated(check)


def test_the_gate_waits_for_open_requests_and_cannot_keep_them() -> None:
    async def check(gate: GatedGenerator, engine: Engine) -> None:
        running = asyncio.create_task(gate.generate(REQUEST))
        await asyncio.sleep(1)
        with pytest.raises(ConfigError, match="cannot be kept"):
            await gate.pause("keep")
        await gate.pause("wait")
        assert running.done() or engine.running == 0
        assert (await running).finish_reason == "stop"

    gated(check)


def test_a_cancelled_caller_cancels_its_request() -> None:
    async def check(gate: GatedGenerator, engine: Engine) -> None:
        running = asyncio.create_task(gate.generate(REQUEST))
        await asyncio.sleep(1)
        running.cancel()
        await asyncio.wait([running])
        await asyncio.sleep(0)
        assert engine.running == 0 and running.cancelled()

    gated(check)


def test_importing_raypost_loads_no_collector_and_the_function_is_found_in_any_order() -> None:
    code = (
        "import sys, raypost; assert 'raypost.collector' not in sys.modules; assert 'numpy' not in sys.modules\n"
        "import raypost.collector; assert callable(raypost.collect); from raypost import collect\n"
        "assert 'torch' not in sys.modules and 'ray' not in sys.modules\n"
        "assert not hasattr(raypost, 'gather')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_status_of_what_is_collected_is_completed() -> None:
    batches = virtual(listed(collect(yield_completed_trajectories=True, total_dialog_turns=6)))
    assert {one.status for batch in batches for one in batch} == {Status.COMPLETED}
