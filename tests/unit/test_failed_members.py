"""Whose fault: members that the world failed are played again, left out, or take their group with them."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raypost.config import parse_config
from raypost.errors import ConfigError, ProductionError
from raypost.ledger.ledger import LEDGER_FILE, Ledger
from raypost.production.build import strategy_of
from raypost.types import Group, RolloutState, Status
from raypost.types.packed import unpack_groups
from tests.unit.production import Pool, World, producing, task_config, virtual


class Flaky:
    """Fails members at random, the same in every run; counts what was played and judged."""

    def __init__(self, rate: float, seed: int) -> None:
        self._random, self._rate = random.Random(seed), rate
        self.played = 0

    def __call__(self, state: RolloutState) -> str | None:
        self.played += 1
        return "environment: scripted" if self._random.random() < self._rate else None


def lost_groups(rate: float, retries: int, groups: int = 100, seed: int = 11) -> tuple[float, float]:
    """Return the fraction of groups of 8 that were lost, and plays of members for one that was asked for."""

    async def main() -> tuple[float, float]:
        pool, flaky = Pool(), Flaky(rate, seed)
        pool.member, pool.seconds = flaky, lambda one: 1
        task = task_config(group_size=8, max_retries=retries, max_staleness=0)
        world = World(task, batch_size=groups, size=100_000, pool=pool)
        async with producing(world):
            await world.take(1)
            counts = await world.producer.counts()
        ended = counts.failed + groups
        return counts.failed / ended, flaky.played / (8 * counts.sampled)

    return virtual(main())


def test_at_two_percent_of_failures_under_one_percent_of_the_groups_is_lost() -> None:
    """It is the table of docs/production.md; without retries 15 % are lost."""
    without, _ = lost_groups(0.02, 0)
    assert 0.08 < without < 0.22
    lost, played = lost_groups(0.02, 2)
    assert lost < 0.01 and played < 1.05
    assert lost_groups(0.10, 2)[0] < lost_groups(0.10, 1)[0] < lost_groups(0.10, 0)[0]


def by_attempt(*failures: str | None) -> Callable[[RolloutState], str | None]:
    """Member 1 of group 0 ends so in its attempts, one after the other; all others are fine."""
    left = list(failures)
    return lambda state: left.pop(0) if state.group_id == 0 and state.sample_index == 1 and left else None


def played(
    member: Callable[[RolloutState], str | None], **options: Any
) -> tuple[list[Group], World, list[tuple[int, int]]]:
    """Return the batch of step 1, its world, and (sample, tokens that it began with) of each attempt of group 0."""

    async def main() -> tuple[list[Group], World, list[tuple[int, int]]]:
        pool, attempts = Pool(), list[tuple[int, int]]()
        pool.member, pool.seconds = member, lambda one: 2
        generate = pool._generate

        async def watched(state: RolloutState, length: int, fate: str) -> None:
            if state.group_id == 0:
                attempts.append((state.sample_index, state.num_tokens))
            await generate(state, length, fate)

        pool._generate = watched  # type: ignore[method-assign]
        options.setdefault("max_retries", 2)
        world = World(task_config(group_size=3, max_staleness=0, **options), batch_size=2, pool=pool)
        async with producing(world):
            _, packed = await world.take(1)
        return unpack_groups(packed), world, attempts

    return virtual(main())


def test_a_failed_member_starts_again_alone_and_its_siblings_keep_their_tokens() -> None:
    batch, world, attempts = played(by_attempt("environment: gone", "engine: lost", None))
    assert attempts == [(0, 0), (1, 0), (2, 0), (1, 0), (1, 0)]
    assert {one.group_id for one in batch} == {0, 1}
    (group,) = [one for one in batch if one.group_id == 0]
    assert [state.num_retries for state in group.states] == [0, 2, 0]
    assert [state.status for state in group.states] == [Status.COMPLETED] * 3
    metrics = world.producer.progress.metrics
    assert (metrics.failures, metrics.retries) == ({}, {})  # the take has read them


@pytest.mark.parametrize("boundary", ["judge", "sandbox"])
def test_a_member_whose_judge_failed_keeps_its_response_and_is_judged_again(boundary: str) -> None:
    _, _, attempts = played(by_attempt(f"{boundary}: down", None))
    assert attempts == [(0, 0), (1, 0), (2, 0), (1, 2)]


def test_failures_and_retries_are_counted_by_task_and_boundary() -> None:
    async def main() -> None:
        pool = Pool()
        pool.member = by_attempt("judge: down", "says no boundary", None)
        world = World(task_config(max_staleness=0, max_retries=2), batch_size=1, pool=pool)
        async with producing(world):
            status, _ = await world.take(1)
        assert status.metrics.failures == {"default": {"judge": 1, "agent_loop": 1}}
        assert status.metrics.retries == {"default": 2}
        assert (status.metrics.failed_samples, status.metrics.produced_samples) == (0, 2)

    virtual(main())


def test_a_member_that_fails_for_good_takes_its_group_with_it_by_name(tmp_path: Path) -> None:
    async def main() -> None:
        pool = Pool()
        pool.member = by_attempt(*["environment: gone"] * 3)
        ledger = Ledger(tmp_path / LEDGER_FILE)
        world = World(task_config(max_staleness=0, max_retries=2), batch_size=1, pool=pool, ledger=ledger)
        async with producing(world):
            _, packed = await world.take(1)
            assert packed.group_ids.tolist() == [1]
            assert pool.started.count(0) == 3

    virtual(main())
    lines = [json.loads(line) for line in (tmp_path / LEDGER_FILE).read_text().splitlines()]
    (ended,) = [line for line in lines if line["event"] == "failed"]
    assert ended["why"] == "environment: gone"
    again = [line for line in lines if line["event"] == "stored" and line.get("why") == "environment: gone"]
    assert [line["retried"] for line in again] == [1, 1]


def test_a_group_goes_on_without_a_member_down_to_the_smallest_size() -> None:
    gone = by_attempt(*["environment: gone"] * 3)
    batch, _, attempts = played(gone, on_failed_member="drop_member", min_group_size=2)
    (group,) = [one for one in batch if one.group_id == 0]
    assert [state.sample_index for state in group.states] == [0, 2]
    assert attempts[3:] == [(1, 0), (1, 0)]

    gone = by_attempt(*["environment: gone"] * 3)
    batch, _, _ = played(gone, on_failed_member="drop_member", min_group_size=3)
    assert {one.group_id for one in batch} == {1, 2}


@pytest.mark.parametrize(
    ("advantage", "smallest"),
    [({"kind": "grpo"}, 2), ({"kind": "pass_at_k", "k": 3}, 4), ({"kind": "reinforce_pp"}, 1)],
)
def test_the_smallest_group_is_what_the_advantage_allows(advantage: dict[str, Any], smallest: int) -> None:
    def config(**strategy: Any) -> Any:
        source = {"kind": "reasoning_gym", "dataset": "chain_sum"}
        task = {"source": source, "strategy": {"on_failed_member": "drop_member", **strategy}}
        train = {"num_steps": 1, "batch_size": 2, "advantage": advantage}
        return parse_config({"model": {"name": "tiny"}, "tasks": [task], "train": train})

    assert strategy_of(config().tasks[0], config()).fewest_members == smallest
    assert strategy_of(config().tasks[0], config(min_group_size=5)).fewest_members == smallest
    five = config(min_group_size=5)
    assert strategy_of(five.tasks[0], five).fewest_members == 5
    for refused in (smallest - 1, 9):
        with pytest.raises(ConfigError, match=r"min_group_size"):
            config(min_group_size=refused)
    with pytest.raises(ConfigError, match="not used with on_failed_member 'drop_group'"):
        config(on_failed_member="drop_group", min_group_size=5)


# ---------------------------------------------------------------- everybody's fault


def test_a_fault_of_everybody_ends_the_run_early_with_its_text_and_its_rate() -> None:
    async def main() -> None:
        world = World(task_config(group_size=8, max_retries=2), batch_size=64, size=100_000)
        world.pool.member = lambda state: "judge: no such host"
        await world.producer.resume(0)
        with pytest.raises(ProductionError) as caught:
            await world.start()
        assert "32 groups in a row failed (bound 32), and " in str(caught.value)
        assert "(100%; by judge " in str(caught.value) and "with: judge: no such host" in str(caught.value)
        assert len(world.pool.started) <= 2 * 64 + 32

    virtual(main())


def test_a_task_that_works_does_not_hide_another_that_never_does() -> None:
    async def main() -> None:
        fine, broken = task_config("fine"), task_config("broken")
        world = World(fine, broken, batch_size=2, size=100_000)
        world.pool.member = lambda state: "judge: down" if state.task == "broken" else None
        await world.producer.resume(0)
        with pytest.raises(ProductionError, match="task 'broken': 32 groups in a row failed"):
            await world.start()

    virtual(main())


def test_a_task_that_worked_may_fail_for_longer() -> None:
    async def main() -> None:
        world = World(task_config(max_staleness=9), batch_size=16, size=100_000)
        world.pool.seconds = lambda one: 1
        world.pool.member = lambda state: "judge: down" if 8 <= state.group_id < 8 + 40 else None
        async with producing(world) as running:
            await asyncio.sleep(20)
            assert not running.done()
            assert (await world.producer.counts()).failed == 40

    virtual(main())


# ---------------------------------------------------------------- what an agent loop may return


def without_logprobs(group: Group) -> Group:
    group.states[0].logprobs = None  # type: ignore[assignment]
    return group


def short_logprobs(group: Group) -> Group:
    group.states[0].logprobs = np.zeros(1, np.float32)[:0]
    return group


def of_another_group(group: Group) -> Group:
    group.states[0].group_id = 77
    return group


def another_group(group: Group) -> Group:
    return Group(task=group.task, group_id=77, states=group.states)


def with_a_lock(group: Group) -> Group:
    group.states[0].metadata = {"lock": threading.Lock()}
    return group


def archived(group: Group) -> Group:
    group.states[0].status = Status.ARCHIVED
    return group


def of_no_status(group: Group) -> Group:
    group.states[0].status = "done"  # type: ignore[assignment]
    return group


def text_as_reward(group: Group) -> Group:
    group.states[0].reward = "good"  # type: ignore[assignment]
    return group


def nothing(group: Group) -> Group:
    return None  # type: ignore[return-value]


def raises(group: Group) -> Group:
    raise TypeError("it has a bug")


@pytest.mark.parametrize("retries", [0, 1])
@pytest.mark.parametrize(
    ("spoilt", "why"),
    [
        (without_logprobs, "NoneType"),
        (short_logprobs, "lengths differ"),
        (of_another_group, "must return the same"),
        (another_group, "must return the same"),
        (with_a_lock, "lock"),
        (archived, "status archived"),
        (of_no_status, "status done"),
        (text_as_reward, "completed with reward 'good'"),
        (nothing, "NoneType"),
        (raises, "TypeError: it has a bug"),
    ],
)
def test_a_group_that_cannot_be_used_is_failed_by_name_and_the_others_go_on(
    spoilt: Callable[[Group], Group], why: str, retries: int, tmp_path: Path
) -> None:
    async def main() -> None:
        world = World(
            task_config(max_staleness=0, max_retries=retries),
            batch_size=2,
            ledger=Ledger(tmp_path / LEDGER_FILE),
        )
        play = world.pool.run

        async def spoil(group: Group) -> Group:
            done = await play(group)
            return spoilt(done) if done.group_id == 1 else done

        world.pool.run = spoil  # type: ignore[method-assign]
        async with producing(world):
            status, packed = await world.take(1)
            assert set(packed.group_ids.tolist()) == {0, 2}
            assert (await world.producer.counts()).failed == 1
            assert set(status.metrics.failures["default"]) == {"agent_loop"}

    virtual(main())
    lines = [json.loads(line) for line in (tmp_path / LEDGER_FILE).read_text().splitlines()]
    (ended,) = [line for line in lines if line["event"] == "failed"]
    assert ended["group"] == 1 and ended["why"].startswith("agent_loop: ") and why in ended["why"]


def test_siblings_do_not_share_what_is_written_for_one() -> None:
    async def main() -> None:
        world = World(batch_size=1)
        group = world.samplers["default"].sample()
        group.states[0].metadata["note"] = "mine"
        assert "note" not in group.states[1].metadata

    virtual(main())


def test_a_group_that_could_not_be_stored_is_decided_upon_once_more() -> None:
    """A buffer that fails a put gets the same group again: nothing is counted or played twice."""

    async def main() -> None:
        pool = Pool()
        pool.member = by_attempt("environment: gone", None)
        world = World(task_config(max_staleness=0, max_retries=1), batch_size=1, pool=pool)
        put, calls = world.buffer.put, list[int]()

        async def failing_once(*args: Any) -> Any:
            calls.append(1)
            if len(calls) == 1:
                raise ConnectionError("the buffer was away")
            return await put(*args)

        world.buffer.put = failing_once  # type: ignore[method-assign, assignment]
        await world.producer.resume(0)
        with pytest.raises(ConnectionError):
            await world.producer.produce_batch(1)
        await world.producer.produce_batch(1)
        status, packed = await world.take(1)
        (group,) = unpack_groups(packed)
        assert [state.num_retries for state in group.states] == [0, 1]
        assert status.metrics.failures == {"default": {"environment": 1}}

    virtual(main())
