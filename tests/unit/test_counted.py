"""What production knows of the buffer's counts without asking."""

from __future__ import annotations

from typing import Any, cast

import pytest

from raypost.buffer.replay_buffer import ReplayBuffer
from raypost.production.counted import counted, measured
from raypost.types import Buffer, BufferCounts, Status, TaskLimits
from raypost.types.packed import PackedGroups, pack_groups
from tests.unit.buffer_groups import group
from tests.unit.production import World, producing, task_config, train_step, virtual


class Asked:
    """A buffer that notes which of its methods were called, each a round trip."""

    def __init__(self, buffer: ReplayBuffer) -> None:
        self.buffer, self.calls = buffer, list[str]()

    async def then_counts(self, method: str, *args: Any) -> tuple[Any, BufferCounts]:
        self.calls.append(method)
        return await self.buffer.then_counts(method, *args)

    def __getattr__(self, method: str) -> Any:
        self.calls.append(method)
        return getattr(self.buffer, method)


def completed(counts: BufferCounts) -> int:
    return counts.groups.get("default", {}).get(Status.COMPLETED, 0)


async def test_counts_come_with_each_change_and_are_asked_for_when_they_are_measured() -> None:
    asked = Asked(ReplayBuffer({"default": TaskLimits(2)}))
    buffer = counted(cast(Buffer[PackedGroups], asked))

    async def known() -> list[int]:
        return [completed(await buffer.counts()) for _ in range(2)]

    assert await known() == [0, 0] and asked.calls == ["counts"]
    await buffer.put(pack_groups([group(n, [0, 0]) for n in range(3)]), 1)
    assert await known() == [3, 3]
    assert await buffer.lease(1, {"default": 4}) is None and await buffer.refresh(1) == []
    assert await known() == [3, 3]
    assert await buffer.lease(1, {"default": 1}) is not None
    assert await known() == [2, 2]
    assert len(await buffer.refresh(9)) == 2
    assert await known() == [0, 0] and asked.calls.count("counts") == 1
    asked.buffer = ReplayBuffer({"default": TaskLimits(2)})
    await asked.buffer.put(pack_groups([group(7, [9, 9])]), 9)
    assert completed(await measured(buffer)) == 1, "what the buffer itself says"
    assert await known() == [1, 1]


async def test_counts_are_asked_for_again_after_a_call_that_raised() -> None:
    asked = Asked(ReplayBuffer({"default": TaskLimits(2)}))
    buffer = counted(cast(Buffer[PackedGroups], asked))
    assert completed(await buffer.counts()) == 0
    packed = pack_groups([group(7, [0])])

    async def lost(method: str, *args: Any) -> Any:
        await asked.buffer.then_counts(method, *args)
        raise ConnectionError("the answer was lost")

    answered, asked.then_counts = asked.then_counts, lost  # type: ignore[method-assign]
    with pytest.raises(ConnectionError):
        await buffer.put(packed, 1)
    asked.then_counts = answered  # type: ignore[method-assign]
    assert completed(await buffer.counts()) == 1


def test_a_step_costs_production_few_calls_to_the_buffer() -> None:
    async def main() -> list[str]:
        world = World(task_config(max_staleness=0), batch_size=4)
        world.pool.seconds = lambda one: 2
        async with producing(world):
            await train_step(world, 1)
            asked = Asked(world.buffer)
            # Below the memory of its counts.
            world.producer._context.buffer._buffer = asked  # type: ignore[attr-defined]
            await train_step(world, 2)
        return asked.calls

    calls = virtual(main())
    puts = calls.count("put")
    assert calls == ["put"] * puts + ["lease", "acknowledge", "counts"], "the last one is the test's own"
