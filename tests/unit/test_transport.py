"""By which way a version comes to the engines, and what is done where that way fails, with scripted ends."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from actors.training.transport import MOST_SKIPPED, Brought, Transport
from raypost.config import SyncConfig
from raypost.errors import WeightError
from raypost.weights.delta import DeltaPacker
from raypost.weights.manifest import DOWN, UP, Manifest, pack, pack_adapters
from raypost.weights.seats import Backend, Member, Seats


class World:
    """A trainer on node A and a pool, which write down what they are asked."""

    def __init__(self, *nodes: str) -> None:
        self.pool = [Member(f"rollout-{i}", 0, node, 1) for i, node in enumerate(nodes)]
        self.calls: list[str] = []
        self.opened = 0
        self.sending = ""
        self.receiving: Exception | None = None

    async def node(self) -> str:
        return "A"

    async def open_group(self, members: Sequence[Member], backend: Backend, timeout_s: float) -> Seats:
        self.opened += 1
        workers = tuple((member.worker, member.ranks) for member in members)
        return Seats("A", self.opened, backend, timeout_s, workers)

    async def send(self, version: int, seats: Seats) -> str:
        names = " ".join(name for name, _ in seats.workers)
        self.calls.append(f"send {version} from {seats.first_bucket} by {seats.backend} to {names}")
        return self.sending

    async def members(self) -> list[Member]:
        return list(self.pool)

    async def receive_weights(self, manifest: Manifest, buckets: list[Any], seats: Seats) -> None:
        if self.receiving is not None:
            raise self.receiving

    async def stage_weights(self, manifest: Manifest, buckets: list[Any]) -> None:
        self.calls.append(f"stage {manifest.version}")


def version(number: int) -> tuple[Manifest, list[Any]]:
    return pack(number, [("w", np.full(8, number, np.uint8), "float32", (2,))], 1 << 20)


def between(world: World, transport: str = "gloo") -> Transport:
    ends: Any = world
    return Transport(ends, ends, SyncConfig.model_validate({"transport": transport}))


async def bring(transport: Transport, number: int) -> Brought:
    return await transport.bring(*version(number), await transport.members())


@pytest.mark.parametrize(
    ("wanted", "nodes", "way"),
    [
        ("auto", ("A", "A"), "object_store"),
        ("auto", ("A", "B"), "gloo"),
        ("auto", ("B",), "gloo"),
        ("auto", (), "object_store"),
        ("object_store", ("B",), "object_store"),
        ("gloo", ("A",), "gloo"),
        ("nccl", ("A", "B"), "nccl"),
    ],
)
async def test_the_way_is_what_was_asked_for_or_follows_from_the_nodes(
    wanted: str, nodes: tuple[str, ...], way: str
) -> None:
    world = World(*nodes)
    brought = await bring(between(world, wanted), 0)
    assert (brought.transport, brought.failed) == (way, "")
    names = " ".join(f"rollout-{i}" for i in range(len(nodes)))
    assert world.calls == ["stage 0" if way == "object_store" else f"send 0 from 0 by {way} to {names}"]


async def test_engines_that_share_devices_with_ranks_take_the_object_store_by_themselves() -> None:
    world: Any = World("B")
    assert (await bring(Transport(world, world, SyncConfig(), True), 0)).transport == "object_store"


async def test_a_group_lasts_until_the_pool_changes() -> None:
    world = World("A", "B")
    transport = between(world)
    for number in range(3):
        await bring(transport, number)
    assert world.opened == 1
    world.pool.append(Member("rollout-2", 0, "B", 2))
    await bring(transport, 3)
    assert world.opened == 2 and world.calls[-1].endswith("rollout-0 rollout-1 rollout-2")
    world.pool[0] = world.pool[0]._replace(incarnation=1)
    await bring(transport, 4)
    del world.pool[1]
    await bring(transport, 5)
    assert world.opened == 4 and world.calls[-1].endswith("to rollout-0 rollout-2")


@pytest.mark.parametrize("end", ["sender", "receiver"])
async def test_what_a_group_cannot_bring_comes_by_the_object_store_and_is_said(end: str) -> None:
    world = World("B")
    transport = between(world)
    world.sending = "rank 0 failed: it timed out" if end == "sender" else ""
    world.receiving = WeightError("'w' arrived otherwise") if end == "receiver" else None
    brought = await bring(transport, 0)
    assert brought.transport == "object_store" and world.calls[-1] == "stage 0"
    assert brought.failed == (world.sending or "'w' arrived otherwise")
    world.sending, world.receiving = "", None
    assert (await bring(transport, 1)).transport == "gloo" and world.opened == 2


async def test_a_group_that_fails_again_and_again_is_tried_less_and_less_often() -> None:
    world = World("B")
    world.sending = "it timed out"
    transport = between(world)
    failed = [(await bring(transport, number)).failed for number in range(100)]
    assert all(failed) and "not tried, since it failed 2 times in a row" in failed
    places = [number for number, one in enumerate(failed) if one == "it timed out"]
    gaps = [b - a - 1 for a, b in itertools.pairwise(places)]
    assert gaps == [0, 2, 6, 14, 30] + [MOST_SKIPPED] * (len(gaps) - 5)


async def test_an_error_that_is_not_about_weights_is_not_hidden() -> None:
    world = World("B")
    world.receiving = asyncio.InvalidStateError("a mistake")
    with pytest.raises(asyncio.InvalidStateError):
        await bring(between(world), 0)


async def test_a_base_is_sent_once_to_each_group() -> None:
    world = World("B")
    transport = between(world)
    base, _ = pack(0, [("w", np.zeros(16, np.uint8), "float32", (2, 2))], 1 << 20)
    factors = [
        (f"w{DOWN}", np.zeros(8, np.uint8), "float32", (1, 2)),
        (f"w{UP}", np.zeros(8, np.uint8), "float32", (2, 1)),
    ]
    found: list[Brought] = []
    for number in range(4):
        if number == 2:
            world.pool.append(Member("rollout-1", 0, "B", 1))
        manifest, _ = pack_adapters(number, base, factors, {"w": 1.0}, 1 << 20)
        found.append(await transport.bring(manifest, [], await transport.members()))
    assert [one.split()[3] for one in world.calls] == ["0", "1", "0", "1"]
    whole = sum(manifest.bucket_sizes)
    assert [one.nbytes for one in found] == [whole, whole - 16, whole, whole - 16]


@pytest.mark.parametrize("shares_devices", [False, True])
async def test_what_did_not_change_is_sent_to_each_group_once_unless_engines_give_their_weights_up(
    shares_devices: bool,
) -> None:
    world = World("B")
    ends: Any = world
    sync = SyncConfig.model_validate({"transport": "gloo"})
    transport = Transport(ends, ends, sync, shares_devices)
    deltas: DeltaPacker[Any] = DeltaPacker(64, np.copy)
    found: list[Brought] = []
    for number in range(6):
        if number == 4:
            world.pool.append(Member("rollout-1", 0, "B", 1))
        tensors = {"rests": np.zeros(64, np.uint8), "moves": np.full(64, number, np.uint8)}
        given = [(name, data, "float32", (16,)) for name, data in tensors.items()]
        found.append(await transport.bring(*deltas.pack(number, given), await transport.members()))
    first = [0, 0, 0, 0, 0, 0] if shares_devices else [0, 0, 1, 1, 0, 1]
    assert [int(one.split()[3]) for one in world.calls] == first
    assert [(one.nbytes, one.spared) for one in found] == [(128 - 64 * n, 64 * n) for n in first]
