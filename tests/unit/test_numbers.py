"""The acceptance scenarios of docs/scenarios.md, N1 to N50, on raypost's own objects.

One row a scenario, one case for each of its numbers. Where raypost differs on purpose from other systems, the
row's docstring says so. `ELSEWHERE` names the scenarios that another test has, or that cannot be asked for here.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raypost.agent_loop.single_turn import SingleTurnAgentLoop
from raypost.buffer.replay_buffer import ReplayBuffer
from raypost.checkpoint import CheckpointDir
from raypost.errors import CheckpointError, ProductionError
from raypost.plan.cluster import ClusterResources, shortages
from raypost.production.allocation import allocate
from raypost.production.pending import PendingGroup
from raypost.production.strategy import AsyncProduceStrategy
from raypost.types import Group, Status, TaskLimits, group_status
from raypost.types.packed import unpack_groups
from tests.factories import make_config, plain_config, refusal_of
from tests.named_tests import README, REFERENCE, names_of
from tests.unit.buffer_groups import counts, group, ids, lease_ids, now, only, put
from tests.unit.production import (
    World,
    fate,
    opened,
    producing,
    progress_of,
    state,
    strategy,
    task_config,
    train_step,
    virtual,
)
from tests.unit.scripted_generator import Scorer, ScriptedGenerator, decode, of, result

INIT, COMPLETED, ABORTED = Status.INIT, Status.COMPLETED, Status.ABORTED
EXPIRED, FAILED = Status.EXPIRED, Status.FAILED

ELSEWHERE = {
    38: "unit/test_corrections.py::test_interpolated_logprobs_mix_versions_of_one_batch_by_their_staleness",
    39: "unit/test_advantage.py::test_numbers_of_known_groups",
    40: "unit/test_rewards.py::test_groups_whose_mean_return_lies_outside_the_bounds_are_dropped",
    41: "unit/test_rewards.py::test_a_balanced_choice_has_the_mean_nearest_the_middle_and_the_widest_spread",
    42: "weights travel through the object store: no collective group has ranks that could be wrong",
    45: "unit/test_packing.py has it in other words: every rank gets the same number, made up with empty ones",
    46: "unit/test_rewards.py::test_overlong_penalty_of_e_tokens_too_many_is_e_over_the_buffer",
    48: "no configuration runs rollout alone or training alone, so no two of them can be asked for at once",
}
"""The test below tests/, or why there is none, by number."""

Row = Callable[..., Any]
TABLE: dict[int, tuple[Row, tuple[tuple[Any, ...], ...]]] = {}


def row(number: int, *cases: tuple[Any, ...]) -> Callable[[Row], Row]:
    """Row N`number`, called with each of its cases, or once without any."""

    def register(check: Row) -> Row:
        assert number not in TABLE, f"N{number} is there twice"
        TABLE[number] = (check, cases or ((),))
        return check

    return register


def plan(one: AsyncProduceStrategy, batch: int, tail_batch: bool = False, **counts: int) -> Any:
    return one.plan(task_batch_size=batch, tail_batch=tail_batch, **counts)


def buffer(threshold: int | None, **limits: Any) -> ReplayBuffer:
    return ReplayBuffer({"default": TaskLimits(threshold, **limits)})


# ---------------------------------------------------------------- versions and staleness


@row(1, (0, 1, 1), (0, 4, 4), (1, 1, 2), (1, 4, 8), (2, 3, 9))
def stale_threshold(max_staleness: int, interval: int, threshold: int) -> None:
    assert strategy(interval, max_staleness=max_staleness).limits.stale_threshold == threshold


@row(2, ([3, 3], 5, 1), ([1, 3, 3], 5, 3), ([], 9, 0), ([4], 5, 0))
def staleness_of_a_trajectory(versions: list[int], train_step: int, staleness: int) -> None:
    (stored,) = put(buffer(None), group(0, versions), train_step=train_step)
    assert stored.staleness == staleness


@row(3, (4, 0, True), (5, 1, False))
def expired_at_the_threshold(train_step: int, staleness: int, kept: bool) -> None:
    (stored,) = put(buffer(1), group(0, [3]), train_step=train_step)
    assert (stored.staleness, stored.stored) == (staleness, kept)


@row(4, (1, 0, 1, False), (2, 0, 1, True), (4, 0, 4, False), (5, 0, 4, True))
def production_that_would_be_too_old(future_step: int, version: int, threshold: int, expired: bool) -> None:
    one = strategy(interval=threshold, max_staleness=0)
    assert one.is_production_expired(future_step, version) is expired


@row(5, ([1, 1, 3, 3], [1, 0, 1, 1], [0, 0, 1, 1]), ([1, 3, 3, 3], [1, 0, 1, 1], [0, 0, 1, 1]))
def stale_tokens_are_masked_in_the_batch(versions: list[int], mask: list[int], trained: list[int]) -> None:
    held = buffer(9, token_stale_threshold=2)
    put(held, group(0, versions, masks=[mask]), train_step=5)
    lease = now(held.lease(5, {"default": 1}))
    assert lease is not None and lease.batch.masks.tolist() == [bool(one) for one in trained]


@row(6, ([1, 1], [1, 1], EXPIRED))
@row(7, ([1, 1], [0, 0], COMPLETED))
def member_without_a_token_to_train(versions: list[int], mask: list[int], status: Status) -> None:
    held = buffer(9, token_stale_threshold=2, retry=True)
    (stored,) = put(held, group(0, versions, masks=[mask]), train_step=5)
    assert (stored.status, stored.staleness < 9) == (status, True)


# ---------------------------------------------------------------- how much is started


@row(8, (9, 0, 5), (9, 5, 0), (10, 0, 0))
def oversampling_beyond_a_target_of_10(available: int, pending: int, started: int) -> None:
    """If all five finish there are 14."""
    one = strategy(over_sample_threshold=1.0)
    assert plan(one, 4, target=10, available=available, pending=pending).num_groups == started


@row(9)
def oversampling_is_rounded_up() -> None:
    one = strategy(over_sample_threshold=0.15)
    assert plan(one, 10, target=10, available=0, pending=0).num_groups == 12


@row(10, (2, 8, (ABORTED,)), (3, 4, (EXPIRED, ABORTED)))
def tail_batch_of_three(num_expired: int, started: int, sources: tuple[Status, ...]) -> None:
    one = strategy(over_sample_threshold=1.0, tail_batch_trigger_size=3)
    tail_batch = one.starts_tail_batch(num_expired)
    got = plan(one, 4, tail_batch, target=4, available=0, pending=0)
    assert (got.num_groups, got.sources) == (started, sources)


@row(11, (10, {"a": 1, "b": 1, "c": 1}, [4, 3, 3]), (1, {"a": 0.6, "b": 0.4}, [1, 0]))
def batch_split_by_weight(batch_size: int, weights: dict[str, float], shares: list[int]) -> None:
    assert list(allocate(batch_size, weights).values()) == shares


@row(12)
async def task_without_weight_is_idle() -> None:
    world = World(task_config("a"), task_config("b", weight=0.0), batch_size=2)
    async with producing(world):
        _, packed = await world.take(1)
    assert {one.task for one in unpack_groups(packed)} == {"a"}
    assert world.producer.progress.allocation(1) == {"a": 2, "b": 0}
    assert world.samplers["b"].position == 0


@row(13)
def targets_are_raised_once() -> None:
    progress = progress_of(4)
    for _ in range(2):
        progress.ensure_target_upto("default", 3)
        assert (progress.target["default"], progress.target_upto["default"]) == (12, 3)


@row(14)
def gap_between_target_and_what_there_is() -> None:
    progress, one = progress_of(4), strategy(over_sample_threshold=0.25)
    progress.ensure_target_upto("default", 3)
    progress.consume(1, {"default": 4})
    target, available = progress.target["default"], progress.available("default", 5)
    assert available == 9
    assert plan(one, 4, target=target, available=available, pending=0).num_groups == 4
    assert plan(one, 4, target=target, available=available, pending=2).num_groups == 2


@row(
    15,
    ([COMPLETED, ABORTED], ABORTED),
    ([COMPLETED, FAILED, ABORTED], FAILED),
    ([INIT, INIT], INIT),
    ([INIT, COMPLETED], INIT),
)
def status_of_a_group(members: list[Status], status: Status) -> None:
    """Differs: a group with a member that was never generated is INIT, not COMPLETED."""
    assert group_status([state([], status=member) for member in members]) is status


# ---------------------------------------------------------------- the buffer


@row(16)
def expired_group_that_is_retried() -> None:
    held = buffer(1, retry=True)
    (stored,) = put(held, group(0, [3, 3], [2]), train_step=4)
    assert (stored.status, stored.stored) == (EXPIRED, True)
    fresh, stale = only(now(held.pop("default", [EXPIRED], 1, 1))).states
    assert (fresh.status, fresh.num_tokens, fresh.reward) == (COMPLETED, 2, 1.0)
    assert (stale.status, stale.num_tokens, stale.reward) == (EXPIRED, 0, None)


@row(17)
def expired_group_that_is_dropped() -> None:
    held = buffer(1)
    (stored,) = put(held, group(0, [3, 3], [2]), train_step=4)
    assert (stored.status, stored.stored, stored.too_old) == (EXPIRED, False, True)
    assert counts(held) == {}


@row(18)
def refresh_keeps_the_order() -> None:
    held = buffer(9)
    put(held, *(group(n, [0]) for n in (2, 0, 1)))
    for step in (2, 3):
        assert now(held.refresh(step)) == []
    assert ids(now(held.pop("default", [COMPLETED], 9, 1))) == [2, 0, 1]


@row(19)
def stalest_first_and_in_order_among_equals() -> None:
    held = buffer(9)
    put(held, *(group(n, [4 - staleness]) for n, staleness in enumerate([0, 2, 1, 2])), train_step=5)
    assert ids(now(held.pop("default", [COMPLETED], 9, 1))) == [1, 3, 2, 0]


# ---------------------------------------------------------------- what becomes of a group


@row(20)
async def filtered_group_counts_before_it_is_dropped() -> None:
    world = World(task_config(group_size=3), batch_size=1, is_valid=lambda one: one.group_id > 0)
    world.pool.seconds = lambda one: 1 + 99 * one.group_id
    generate = world.pool.run

    async def judged(group: Group) -> Group:
        done = await generate(group)
        for member, reward in zip(done.states, (1.0, 0.0, 1.0), strict=True):
            member.reward = reward
        return done

    world.pool.run = judged  # type: ignore[method-assign]
    async with producing(world):
        await asyncio.sleep(2)
        window = world.producer.progress.metrics
        assert (window.raw_rewards_sum, window.raw_rewards_count) == (2.0, 3)
        assert (window.filtered_samples, window.produced_samples) == (3, 3)
        assert counts(world.buffer) == {}


@row(21)
async def failed_group_has_no_reward() -> None:
    world = World(task_config(group_size=4), batch_size=1)
    world.pool.fate, world.pool.seconds = fate(failed={0}), lambda one: 1 + 99 * one.group_id
    async with producing(world):
        await asyncio.sleep(2)
        window = world.producer.progress.metrics
        assert (window.failed_samples, window.raw_rewards_count, window.raw_rewards_sum) == (4, 0, 0.0)


@row(22)
async def continuation_sends_what_there_is_and_asks_for_the_rest() -> None:
    engine = ScriptedGenerator(lambda request: result([9] * request.sample_params.max_tokens, "length"))
    begun = state([0] * 30, status=ABORTED, max_tokens=100, prompt_ids=list(range(3, 13)))
    (done,) = (await SingleTurnAgentLoop(engine, Scorer(), decode).run(of(begun))).states
    (request,) = engine.requests
    assert (len(request.token_ids), request.sample_params.max_tokens) == (40, 70)
    assert (done.num_tokens, done.sample_params.max_tokens, done.status) == (100, 100, COMPLETED)


@row(23)
async def two_interruptions_keep_every_version() -> None:
    parts = iter([result([9] * 3, "abort", 5), result([9] * 2, "abort", 7), result([9] * 4, "stop", 8)])
    loop, one = (
        SingleTurnAgentLoop(ScriptedGenerator(lambda _: next(parts)), Scorer(), decode),
        of(state([], status=INIT)),
    )
    for _ in range(3):
        one = await loop.run(one)
    (done,) = one.states
    assert done.policy_versions.tolist() == [5, 5, 5, 7, 7, 8, 8, 8, 8]
    assert (len(done.logprobs), len(done.response_mask)) == (9, 9)


@row(24)
async def only_new_tokens_are_produced() -> None:
    world = World(task_config(group_size=1, max_staleness=9, max_pending=1), batch_size=1)
    world.pool.seconds = lambda one: 9
    async with producing(world, version=None):
        for version, seconds, tokens in ((5, 3.5, 3), (7, 2.5, 2), (8, 4.5, 4)):
            await world.producer.resume(version)
            await asyncio.sleep(seconds)
            await world.producer.pause()
            assert world.producer.progress.read_metrics().produced_tokens == tokens


@row(25)
async def completed_member_of_an_interrupted_group() -> None:
    """Differs: it stays COMPLETED with its reward, and is judged once."""
    engine, judge = ScriptedGenerator(lambda _: result([9], "abort")), Scorer(rewards=[0.0])
    kept, other = state([1], reward=0.25), state([], sample_index=1, status=INIT)
    done = await SingleTurnAgentLoop(engine, judge, decode).run(of(kept, other))
    assert (done.status, kept.status, kept.reward) == (ABORTED, COMPLETED, 0.25)
    assert (len(engine.requests), judge.calls) == (1, [])


# ---------------------------------------------------------------- the pending set and the pause


@row(26)
async def pause_drains_what_is_about_to_end() -> None:
    world = World(task_config(max_pending=2), batch_size=2)
    async with producing(world):
        await asyncio.sleep(0.5)
        assert 0 < await world.producer.pause("wait") <= 2
        assert len(world.producer.pending) == 0
        assert counts(world.buffer) == {COMPLETED: 2}


@row(27)
async def pause_cancels_what_hangs() -> None:
    """Differs: it is put back into the buffer, not lost."""
    world = World(task_config(max_pending=1), batch_size=1, pause_timeout_s=20)
    world.pool.fate = fate(hang={0})
    async with producing(world):
        await asyncio.sleep(0.5)
        assert await world.producer.pause() == pytest.approx(20)
        assert counts(world.buffer) == {ABORTED: 1}
        await world.producer.state_dict()


@row(28)
async def every_finished_group_is_received_once() -> None:
    pending = await opened(1, 1, 2)
    received: list[int] = []

    async def receive(entries: list[PendingGroup]) -> None:
        await asyncio.sleep(0)
        received.extend(entry.key[1] for entry in entries)

    async def settle() -> None:
        for _ in range(5):
            async with pending.lock:
                await pending.settle(receive)
            await asyncio.sleep(0.7)

    await asyncio.gather(settle(), settle())
    assert (sorted(received), len(pending)) == ([0, 1, 2], 0)


# ---------------------------------------------------------------- takes and the checkpoint


async def stopped_at_the_bound() -> World:
    """Version 0; the batches of steps 1 and 2 are in the buffer, and no more may be made."""
    world = World(task_config(max_staleness=1), batch_size=2)
    await world.producer.resume(0)
    world.start()
    await asyncio.sleep(100)
    return world


@row(29)
async def take_while_newer_weights_wait_to_be_synced() -> None:
    world = await stopped_at_the_bound()
    await world.producer.take_batch(1)
    status, packed = await world.producer.take_batch(2)
    assert (status.status, status.num_groups, packed) == ("expired_batch", 0, None)
    assert counts(world.buffer)[COMPLETED] == 2


@row(30)
async def take_at_the_bound() -> None:
    world = await stopped_at_the_bound()
    status, packed = await world.producer.take_batch(1)
    assert packed is not None and (status.status, status.num_groups) == ("expired_batch", 2)


@row(31)
async def take_that_can_never_succeed() -> None:
    world = await stopped_at_the_bound()
    world.producer.progress._allocations[1] = {"default": 20}
    with pytest.raises(ProductionError) as caught:
        await world.producer.take_batch(1)
    for counter in ("next_consumer_step 1", "target", "consumed", "pending 0", "COMPLETED", "version 0"):
        assert counter in str(caught.value)


async def saved_after(step: int) -> dict[str, Any]:
    """State saved as the main loop does it: after the step's batch, before its weights are served."""
    world = World(batch_size=2)
    async with producing(world):
        for one in range(1, step):
            await train_step(world, one)
        await world.producer.take_batch(step)
        await world.producer.acknowledge(step)
        await world.producer.pause()
        return await world.producer.state_dict(model_step=step)


@row(32)
async def checkpoint_of_step_4() -> None:
    """Differs: the step is the checkpoint's own, for model and production alike; neither keeps one of its own."""
    saved = await saved_after(4)
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = CheckpointDir(Path(folder), keep=1, fingerprint={})
        CheckpointDir.save_state(checkpoints.begin(4), "producer", saved)
        checkpoints.commit(4)
        found = checkpoints.latest()
        assert found is not None and found[0] == 4
        state = CheckpointDir.load_state(found[1], "producer")
    world = World(batch_size=2)
    await world.producer.load_state_dict(state)
    assert world.producer.progress.next_consumer_step == 5
    assert (await world.producer.counts()).trained == 8
    async with producing(world, version=4):
        assert (await world.producer.take_batch(5))[0].num_groups == 2


@row(33)
async def state_without_the_buffer() -> None:
    """Differs: a checkpoint always contains the buffer, so there is nothing to rewind; without it, it is refused."""
    saved = await saved_after(1)
    del saved["buffer"]
    with pytest.raises(CheckpointError, match="lacks \\['buffer'\\]"):
        await World(batch_size=2).producer.load_state_dict(saved)


# ---------------------------------------------------------------- admission


@row(34, (4, 2, 0, 12), (4, 2, 5, 32))
@row(35, (8, 3, 0, 17, 15, 0, 0, 20))
@row(
    36,
    *((4, 2, version, 12 - running, 0, running, 4 * version) for version in (0, 1, 7) for running in (0, 5)),
)
@row(37, *((8, 0, version, 8 - running, 0, running, 8 * version) for version in (0, 3) for running in (0, 8)))
def capacity(
    batch: int,
    eta: int,
    version: int,
    room: int,
    accepted: int = 0,
    running: int = 0,
    consumed: int = 0,
    limit: int = 100,
) -> None:
    """`max_staleness` is AReaL's eta, `max_pending` its concurrency. Counters that were restored say the same."""
    one = strategy(max_staleness=eta, max_pending=limit)
    saved, progress = progress_of(batch), progress_of(batch)
    for step in range(1, consumed // batch + 1):
        saved.consume(step, {"default": batch})
    progress.load_state_dict(saved.state_dict())
    while not one.is_production_expired(progress.producer_future_step["default"], version):
        progress.ensure_target_upto("default", progress.producer_future_step["default"])
        progress.producer_future_step["default"] += 1
    available = progress.available("default", accepted)
    got = plan(one, batch, target=progress.target["default"], available=available, pending=running)
    assert got.num_groups == room


@row(43)
def too_stale_is_excluded() -> None:
    """Differs: a batch is not drawn at random by weight; what is left comes stalest first."""
    held = buffer(6)
    stored = put(held, *(group(n, [version]) for n, version in enumerate((4, 9, 5))), train_step=11)
    assert [one.stored for one in stored] == [False, True, True]
    assert ids(now(held.pop("default", [COMPLETED], 9, 1))) == [2, 1]


@row(44)
def at_most_one_version_behind() -> None:
    held = buffer(2)
    put(held, *(group(n, [version]) for n, version in enumerate((0, 2, 2, 3))), train_step=4)
    assert lease_ids(held, 4, default=3) == [1, 2, 3]


# ---------------------------------------------------------------- configurations


@row(47)
def evaluation_between_syncs() -> None:
    text = refusal_of(plain_config(sync__sync_weights_interval=2, eval__interval=3))
    assert "eval.interval is 3, no multiple of sync.sync_weights_interval 2" in text


@row(49)
def run_without_an_end() -> None:
    assert "train.num_steps: required" in refusal_of(plain_config(train={"batch_size": 8}))


@row(50, (1, 1), (2, 0))
def rollout_and_training_on_the_same_gpu(gpus: int, problems: int) -> None:
    """Each actor reserves its own; where both do not fit, the run is refused."""
    config = make_config(device="cuda")
    assert len(shortages(config, ClusterResources([{"CPU": 8, "GPU": gpus}]))) == problems


# ---------------------------------------------------------------- the table


def params() -> Iterator[Any]:
    for number, (check, cases) in sorted(TABLE.items()):
        for place, case in enumerate(cases, 1):
            yield pytest.param(check, case, id=f"N{number}" + (f"-{place}" if len(cases) > 1 else ""))


@pytest.mark.parametrize(("check", "case"), list(params()))
def test_row(check: Row, case: tuple[Any, ...]) -> None:
    outcome = check(*case)
    if asyncio.iscoroutine(outcome):
        virtual(outcome)


def test_every_number_is_a_row_or_named_elsewhere() -> None:
    assert sorted([*TABLE, *ELSEWHERE]) == list(range(1, 51))
    named = [where.split("::") for where in ELSEWHERE.values() if "::" in where]
    assert [f"{file}::{name}" for file, name in named if name not in names_of(file)] == []


def test_every_row_that_the_readme_names_exists() -> None:
    named = {int(number) for _, _, number in REFERENCE.findall(README.read_text()) if number}
    assert named and named <= set(TABLE)
