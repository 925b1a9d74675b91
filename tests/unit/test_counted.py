"""What production knows of the buffer's counts without asking."""

from __future__ import annotations

from typing import Any, cast

from raypost.buffer.replay_buffer import ReplayBuffer
from raypost.production.counted import counted, measured
from raypost.types import Buffer, BufferCounts, Status, TaskLimits
from raypost.types.packed import PackedGroups, pack_groups
from tests.unit.buffer_groups import group
from tests.unit.production import World, producing, task_config, train_step, virtual


class Asked:
    """A buffer that notes which of its methods were called."""

    def __init__(self, buffer: ReplayBuffer) -> None:
        self.buffer, self.calls = buffer, list[str]()

    def __getattr__(self, method: str) -> Any:
        self.calls.append(method)
        return getattr(self.buffer, method)


def completed(counts: BufferCounts) -> int:
    return counts.groups.get("default", {}).get(Status.COMPLETED, 0)


async def test_counts_are_asked_for_once_after_each_change_and_again_when_they_are_measured() -> None:
    asked = Asked(ReplayBuffer({"default": TaskLimits(2)}))
    buffer = counted(cast(Buffer[PackedGroups], asked))

    async def known() -> list[int]:
        return [completed(await buffer.counts()) for _ in range(2)]

    assert await known() == [0, 0] and asked.calls == ["counts"]
    await buffer.put(pack_groups([group(n, [0, 0]) for n in range(3)]), 1)
    assert await known() == [3, 3]
    assert await buffer.lease(1, {"default": 4}) is None and await buffer.refresh(1) == []
    assert await known() == [3, 3] and asked.calls.count("counts") == 2, "nothing changed"
    assert await buffer.lease(1, {"default": 1}) is not None
    assert await known() == [2, 2]
    assert len(await buffer.refresh(9)) == 2
    assert await known() == [0, 0] and asked.calls.count("counts") == 4
    asked.buffer = ReplayBuffer({"default": TaskLimits(2)})
    await asked.buffer.put(pack_groups([group(7, [9, 9])]), 9)
    assert completed(await measured(buffer)) == 1, "what the buffer itself says"
    assert await known() == [1, 1]


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
    changes = [call for call in calls if call in ("put", "lease", "acknowledge", "refresh", "pop")]
    assert calls.count("counts") <= len(changes), calls
