"""The buffer: order, ageing, leases, restore. Rows N3, N16 to N19."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from raypost.errors import CheckpointError, ConfigError, LedgerError
from raypost.packed import PackedGroups, pack_groups, unpack_groups
from raypost.protocols import TaskLimits
from raypost.replay_buffer import ReplayBuffer
from raypost.types import Group, GroupKey, Status
from tests.unit.production import group

Popped = PackedGroups | None


def make(threshold: int = 4, retry: bool = False) -> ReplayBuffer:
    return ReplayBuffer({"default": TaskLimits(threshold, retry), "other": TaskLimits(threshold, retry)})


async def put(buffer: ReplayBuffer, one: Group, train_step: int = 1) -> Any:
    return await buffer.put(pack_groups([one]), train_step)


def ids(packed: Popped) -> list[int]:
    return [] if packed is None else [one.group_id for one in unpack_groups(packed)]


async def lease_ids(buffer: ReplayBuffer, step: int, count: int) -> list[int]:
    lease = await buffer.lease(step, {"default": count})
    return [] if lease is None else [group_id for _, group_id in lease.keys]


async def test_stalest_first_and_first_in_first_out_among_equals() -> None:
    """N19: staleness 0, 2, 1, 2 inserted in that order."""
    buffer = make()
    for group_id, version in enumerate([4, 2, 3, 2]):
        await put(buffer, group(group_id, [version]), 5)
    assert [await lease_ids(buffer, 5 + n, 1) for n in range(1)] == [[1]]
    assert [ids(await buffer.pop("default", Status.COMPLETED)) for _ in range(4)] == [[3], [2], [0], []]


async def test_equal_batches_are_identical_however_their_groups_arrived() -> None:
    orders = []
    for arrival in ([0, 1, 2], [2, 0, 1]):
        buffer = make()
        for group_id in arrival:
            await put(buffer, group(group_id, [0]))
        orders.append(await lease_ids(buffer, 1, 3))
    assert orders == [[0, 1, 2], [0, 1, 2]]


async def test_refresh_keeps_the_order_among_equals() -> None:
    """N18."""
    buffer = make()
    for group_id in range(4):
        await put(buffer, group(group_id, [0]))
    for step in (2, 3, 3):
        assert await buffer.refresh(step) == []
    assert [ids(await buffer.pop("default", Status.COMPLETED)) for _ in range(4)] == [[0], [1], [2], [3]]


async def test_expired_group_without_retry_is_dropped_at_put_and_at_refresh() -> None:
    """N17, and N3: the threshold itself is too old."""
    buffer = make(threshold=1)
    result = await put(buffer, group(0, [3], [1]), 4)
    assert (result.status, result.stored, result.staleness) == (Status.EXPIRED, False, 2)
    assert (await put(buffer, group(1, [3], [3, 3]), 4)).stored
    assert await buffer.refresh(4) == []
    (gone,) = await buffer.refresh(5)
    assert (gone.key, gone.stored, gone.mean_tokens) == (("default", 1), False, 1.5)
    assert await buffer.counts() == {"default": {}, "other": {}}


async def test_expired_group_with_retry_keeps_its_fresh_members() -> None:
    """N16."""
    buffer = make(threshold=1, retry=True)
    result = await put(buffer, group(0, [3, 3], [2]), 4)
    assert (result.status, result.stored) == (Status.EXPIRED, True)
    popped = await buffer.pop("default", Status.EXPIRED)
    assert popped is not None
    fresh, stale = unpack_groups(popped)[0].states
    assert (fresh.status, fresh.reward, fresh.num_tokens) == (Status.COMPLETED, 1.0, 2)
    assert (stale.status, stale.reward, stale.num_tokens) == (Status.EXPIRED, None, 0)


async def test_fresh_members_of_an_expired_group_age_too_and_are_reported_once() -> None:
    buffer = make(threshold=2, retry=True)
    await put(buffer, group(0, [3], [2]), 4)
    (first,) = await buffer.refresh(5)
    assert (first.key, first.stored, first.mean_tokens) == (("default", 0), True, 1.0)
    assert await buffer.refresh(6) == []
    popped = await buffer.pop("default", Status.EXPIRED)
    assert popped is not None
    assert [one.status for one in unpack_groups(popped)[0].states] == [Status.EXPIRED, Status.EXPIRED]


async def test_aborted_groups_age_as_well() -> None:
    buffer = make(threshold=1)
    await put(buffer, group(0, [0], status=Status.ABORTED))
    assert [one.key for one in await buffer.refresh(2)] == [("default", 0)]


@pytest.mark.parametrize("status", [Status.FAILED, Status.FILTERED])
async def test_failed_and_filtered_groups_are_never_stored(status: Status) -> None:
    buffer = make()
    result = await put(buffer, group(0, [0], status=status))
    assert (result.status, result.stored) == (status, False)
    assert (await buffer.counts())["default"] == {}


async def test_second_put_replaces_and_keeps_the_place() -> None:
    buffer = make()
    for group_id in (0, 1):
        await put(buffer, group(group_id, [0]))
    await put(buffer, group(0, [0, 0, 0]))
    assert await buffer.counts() == {"default": {Status.COMPLETED: 2}, "other": {}}
    popped = await buffer.pop("default", Status.COMPLETED)
    assert ids(popped) == [0] and unpack_groups(popped)[0].num_tokens == 3


async def test_repeated_put_of_a_leased_or_trained_group_changes_nothing() -> None:
    buffer = make()
    await put(buffer, group(0, [0]))
    await buffer.lease(1, {"default": 1})
    assert (await put(buffer, group(0, [0]))).stored
    assert await buffer.counts() == {"default": {Status.ARCHIVED: 1}, "other": {}}
    await buffer.acknowledge(1)
    await put(buffer, group(0, [0]))
    assert await buffer.counts() == {"default": {}, "other": {}}


async def test_lease_is_all_or_nothing() -> None:
    buffer = make()
    await put(buffer, group(0, [0]))
    await put(buffer, group(1, [0], status=Status.ABORTED))
    assert await buffer.lease(1, {"default": 2}) is None
    assert await buffer.lease(1, {"default": 1, "other": 1}) is None
    assert await buffer.counts() == {"default": {Status.COMPLETED: 1, Status.ABORTED: 1}, "other": {}}


async def test_lease_of_a_step_is_the_same_until_acknowledged() -> None:
    buffer = make()
    for group_id in range(3):
        await put(buffer, group(group_id, [0]))
    first, again = await buffer.lease(1, {"default": 2}), await buffer.lease(1, {"default": 1})
    assert first is not None and again is not None
    assert first.keys == again.keys and first.staleness == again.staleness == (0, 0)
    assert (await buffer.counts())["default"] == {Status.COMPLETED: 1, Status.ARCHIVED: 2}
    assert await buffer.acknowledge(1) == first.keys
    assert await buffer.acknowledge(1) == ()
    with pytest.raises(LedgerError, match="train twice"):
        await buffer.lease(1, {"default": 1})


async def test_lease_never_holds_expired_groups_even_unrefreshed() -> None:
    buffer = make(threshold=2)
    await put(buffer, group(0, [0]))
    await put(buffer, group(1, [1]), 2)
    assert await buffer.lease(3, {"default": 2}) is None
    assert await lease_ids(buffer, 3, 1) == [1]


async def test_stored_groups_do_not_share_memory_with_the_sender() -> None:
    buffer = make()
    packed = pack_groups([group(0, [0, 0])])
    await buffer.put(packed, 1)
    packed.columns[1][:] = 99
    popped = await buffer.pop("default", Status.COMPLETED)
    assert popped is not None and 99 not in popped.columns[1]


async def test_unknown_task_is_named() -> None:
    with pytest.raises(ConfigError, match="knows no task 'x'"):
        await put(make(), group(0, [0], task="x"))


async def test_restored_buffer_gives_the_same_groups_in_the_same_order() -> None:
    buffer, other = make(), make()
    for group_id, version in enumerate([2, 0, 1, 0]):
        await put(buffer, group(group_id, [version], [version, 3]), 3)
    await put(buffer, group(4, [2], status=Status.ABORTED), 3)
    await other.load_state_dict(await buffer.state_dict())
    for status, count in ((Status.COMPLETED, 4), (Status.ABORTED, 1)):
        for _ in range(count):
            mine, theirs = await buffer.pop("default", status), await other.pop("default", status)
            assert mine is not None and theirs is not None
            assert mine.header == theirs.header
            pairs = zip(mine.columns, theirs.columns, strict=True)
            assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in pairs)


async def test_open_lease_is_completed_again_after_restore_and_an_acknowledged_one_is_gone() -> None:
    buffer, other = make(), make()
    for group_id in range(3):
        await put(buffer, group(group_id, [0]))
    await buffer.lease(1, {"default": 1})
    await buffer.acknowledge(1)
    await buffer.lease(2, {"default": 1})
    await other.load_state_dict(await buffer.state_dict())
    assert await other.counts() == {"default": {Status.COMPLETED: 2}, "other": {}}
    assert await lease_ids(other, 2, 2) == [1, 2]
    with pytest.raises(LedgerError):
        await other.lease(1, {"default": 0})


async def test_bad_restores_are_refused() -> None:
    buffer = make()
    await put(buffer, group(0, [0]))
    state = await buffer.state_dict()
    with pytest.raises(CheckpointError, match="restored over"):
        await buffer.load_state_dict(state)
    with pytest.raises(CheckpointError, match="has tasks"):
        await ReplayBuffer({"x": TaskLimits(1)}).load_state_dict(state)
    with pytest.raises(CheckpointError, match="damaged"):
        await make().load_state_dict({**state, "status": []})


class BufferMachine(RuleBasedStateMachine):
    """The buffer against a dict of what must be in it."""

    retry = True

    def __init__(self) -> None:
        super().__init__()
        self.buffer = make(threshold=2, retry=self.retry)
        self.step, self.following = 1, 0
        self.where: dict[GroupKey, str] = {}

    def do(self, work: Any) -> Any:
        try:
            work.send(None)
        except StopIteration as stop:
            return stop.value
        raise AssertionError("the buffer never waits")

    @rule(ages=st.lists(st.integers(0, 3), min_size=1, max_size=3), aborted=st.booleans())
    def put_one(self, ages: list[int], aborted: bool) -> None:
        members = [[max(0, self.step - 1 - age)] for age in ages]
        one = group(self.following, *members, status=Status.ABORTED if aborted else Status.COMPLETED)
        self.following += 1
        result = self.do(put(self.buffer, one, self.step))
        assert result.stored == (self.retry or result.staleness < 2)
        if result.stored:
            self.where[one.key] = "stored"

    @rule(status=st.sampled_from([Status.ABORTED, Status.EXPIRED, Status.COMPLETED]))
    def pop_one(self, status: Status) -> None:
        packed = self.do(self.buffer.pop("default", status))
        if packed is not None:
            (one,) = unpack_groups(packed)
            assert self.where.pop(one.key) == "stored"

    @rule(count=st.integers(1, 3))
    def lease_one(self, count: int) -> None:
        lease = self.do(self.buffer.lease(self.step, {"default": count}))
        if lease is not None and self.where[lease.keys[0]] == "stored":
            assert len(lease.keys) == count and max(lease.staleness) < 2
            assert list(lease.staleness) == sorted(lease.staleness, reverse=True)
            for key in lease.keys:
                assert self.where[key] == "stored"
                self.where[key] = "leased"

    @rule()
    def acknowledge_and_step(self) -> None:
        keys = self.do(self.buffer.acknowledge(self.step))
        assert set(keys) == {key for key, place in self.where.items() if place == "leased"}
        for key in keys:
            del self.where[key]
        self.step += 1

    @rule()
    def refresh(self) -> None:
        for expired in self.do(self.buffer.refresh(self.step)):
            assert self.where[expired.key] == "stored"
            if not expired.stored:
                del self.where[expired.key]

    @rule()
    def restore(self) -> None:
        other = make(threshold=2, retry=self.retry)
        self.do(other.load_state_dict(self.do(self.buffer.state_dict())))
        self.buffer = other
        self.where = dict.fromkeys(self.where, "stored")

    @invariant()
    def holds_exactly_what_it_must(self) -> None:
        counts = self.do(self.buffer.counts())["default"]
        leased = sum(place == "leased" for place in self.where.values())
        assert counts.get(Status.ARCHIVED, 0) == leased
        assert sum(counts.values()) == len(self.where)


class DroppingBufferMachine(BufferMachine):
    retry = False


TestBufferThatRetries = BufferMachine.TestCase
TestBufferThatDrops = DroppingBufferMachine.TestCase
for case in (TestBufferThatRetries, TestBufferThatDrops):
    case.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


async def test_buffer_works_from_many_tasks_at_once() -> None:
    buffer = make()
    await asyncio.gather(*(put(buffer, group(group_id, [0])) for group_id in range(50)))
    assert len(await lease_ids(buffer, 1, 50)) == 50
