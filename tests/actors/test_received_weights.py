"""What a pool does with a version that its workers took from a broadcast group, on scripted engines."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest

from raypost.weights.delta import DeltaPacker
from raypost.weights.seats import Seats
from tests.actors.test_routing import Engine, Handle, Pool, pool_at, weights


def engine_of(handle: Handle) -> Engine:
    found: Any = handle.worker._life.engine
    assert isinstance(found, Engine)
    return found


async def receive(pool: Pool, version: int) -> None:
    members = await pool.controller.members()
    seats = Seats("A", 1, "gloo", 20, tuple((member.worker, member.ranks) for member in members))
    await pool.controller.receive_weights(*weights(version), seats)


@pytest.fixture(autouse=True)
def one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "A")


@pytest.mark.parametrize("way", ["swap", "load_weights"])
async def test_workers_load_what_came_by_a_group_and_one_that_came_back_since_is_sent_the_bytes(
    way: Literal["swap", "load_weights"],
) -> None:
    pool = await pool_at(1)
    await receive(pool, 2)
    pool.handles[1].die()
    pool.handles[1].restart()
    await pool.controller.report("rollout-1", 0, "it died")
    await pool.until_up()
    if way == "load_weights":
        await pool.pause()
        reports = await pool.controller.load_weights(*weights(2))
        assert [report.version for report in reports] == [2, 2]
        await pool.controller.resume(2)
    else:
        await pool.controller.swap(2)
    assert engine_of(pool.handles[0]).came == ["1 as buckets", "2 by a group"]
    assert engine_of(pool.handles[1]).came == ["1 as buckets", "2 as buckets"]
    assert [engine_of(handle).held_now[0] for handle in pool.handles] == [2, 2]


async def test_a_worker_that_comes_back_later_is_sent_the_bytes_of_what_came_by_a_group() -> None:
    pool = await pool_at(1)
    await receive(pool, 2)
    await pool.controller.swap(2)
    pool.handles[0].die()
    pool.handles[0].restart()
    await pool.controller.report("rollout-0", 0, "it died")
    await pool.until_up()
    assert engine_of(pool.handles[0]).came == ["2 as buckets"]


async def test_workers_are_sent_what_changed_and_one_that_lacks_the_rest_is_sent_all() -> None:
    pool = await pool_at(0)
    deltas: DeltaPacker[Any] = DeltaPacker(64, np.copy)
    first, second = (engine_of(handle) for handle in pool.handles)

    async def sync(version: int) -> None:
        tensors = {"rests": np.zeros(64, np.uint8), "moves": np.full(64, version, np.uint8)}
        given = [(name, data, "float32", (16,)) for name, data in tensors.items()]
        await pool.controller.stage_weights(*deltas.pack(version, given))
        await pool.controller.swap(version)

    for version in (1, 2, 3):
        await sync(version)
    assert first.came[1:] == second.came[1:] == ["1 as buckets", "2 as buckets", "3 as what changed"]
    second.holds = None
    await sync(4)
    assert (first.came[-1], second.came[-1]) == ("4 as what changed", "4 as buckets")
    pool.handles[1].die()
    pool.handles[1].restart()
    await pool.controller.report("rollout-1", 0, "it died")
    await pool.until_up()
    await sync(5)
    assert engine_of(pool.handles[1]).came == ["4 as buckets", "5 as what changed"]
    assert first.came[-1] == "5 as what changed"


async def test_a_worker_without_a_seat_takes_no_part() -> None:
    pool = await pool_at(1)
    await pool.controller.receive_weights(*weights(2), Seats("A", 1, "gloo", 20, (("rollout-0", 1),)))
    await pool.controller.swap(2)
    assert [engine_of(handle).came[-1] for handle in pool.handles] == ["2 by a group", "2 as buckets"]
