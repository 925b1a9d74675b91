"""The buffer's actor on a local Ray: killed in the middle of its traffic, it loses nothing and repeats nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from actors.placement import spawn
from actors.replay_buffer import ReplayBufferActor, remote_buffer
from raypost.errors import BufferCutError
from raypost.types import BufferBounds, GroupKey, Status, TaskLimits
from raypost.types.packed import pack_groups
from tests.unit.buffer_groups import group

pytestmark = pytest.mark.usefixtures("local_ray")
DEADLINE_S = 240.0
GROUPS, BATCH, PRODUCERS, KILLS = 600, 6, 3, 5


class ProcessId:
    """Lets the test find the process it kills."""

    def process_id(self) -> int:
        return os.getpid()


class KillableBuffer(ReplayBufferActor, ProcessId):
    pass


class Caller:
    """Asks until it is answered, as whoever calls a buffer must."""

    def __init__(self, handle: Any) -> None:
        self.handle, self.retries = handle, 0

    async def __call__(self, method: str, *args: Any) -> Any:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                try:
                    ref = getattr(self.handle, method).remote(*args)
                    # A lease comes as two objects, its batch apart.
                    return await (ref[0] if isinstance(ref, list) else ref)
                except RayActorError:
                    self.retries += 1
                    await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def buffer(name: str, folder: Path | None, attempt: str = "a", **options: Any) -> AsyncIterator[Caller]:
    limits = {"default": TaskLimits(None, retry=True)}
    where = None if folder is None else str(folder)
    handle = spawn(KillableBuffer, limits, BufferBounds(), where, attempt, name=name, **options)
    try:
        yield Caller(handle)
    finally:
        ray.kill(handle)


async def kill(call: Caller) -> None:
    os.kill(await call("process_id"), signal.SIGKILL)


async def test_kills_in_the_middle_of_traffic_lose_nothing_and_duplicate_nothing(tmp_path: Path) -> None:
    """Producers put new groups and continue interrupted ones, a consumer leases and acknowledges, and the
    process is killed at random moments; every group is trained exactly once."""
    generator = random.Random(7)
    async with buffer("buffer-killed", tmp_path / "buffer", max_restarts=-1) as call:
        trained: list[GroupKey] = []

        async def produce(first: int) -> None:
            for start in range(first, GROUPS, BATCH * PRODUCERS):
                made = [
                    group(n, [0] * 20, [0], status=Status.ABORTED if n % 5 == 0 else Status.COMPLETED)
                    for n in range(start, min(start + BATCH, GROUPS))
                ]
                results = await call("put", pack_groups(made), 1)
                assert [(one.status, one.stored) for one in results] == [(one.status, True) for one in made]

        async def resume() -> None:
            """Continue what was interrupted, as the one producer that claims."""
            done, claim = 0, 0
            while done < GROUPS // 5:
                claim += 1
                packed = await call("pop", "default", [Status.ABORTED], 3, claim)
                if packed is None:
                    await asyncio.sleep(0.01)
                    continue
                done += packed.num_groups
                finished = [group(group_id, [0] * 30) for _, group_id in packed.keys]
                await call("put", pack_groups(finished), 1)

        async def consume() -> None:
            step = 1
            while len(trained) < GROUPS:
                lease = await call("lease", step, {"default": min(BATCH, GROUPS - len(trained))})
                if lease is None:
                    await asyncio.sleep(0.005)
                    continue
                await call("acknowledge", step)
                trained.extend(lease.keys)
                step += 1

        async def murder() -> None:
            for kills in range(1, KILLS + 1):
                while len(trained) < kills * GROUPS // (KILLS + 1):
                    await asyncio.sleep(generator.uniform(0.001, 0.01))
                await kill(call)

        async with asyncio.timeout(240):
            producing = [produce(n * BATCH) for n in range(PRODUCERS)]
            await asyncio.gather(*producing, resume(), consume(), murder())
        assert call.retries >= KILLS
        assert len(trained) == GROUPS and len(set(trained)) == GROUPS
        counts = await call("counts")
        assert counts.groups == {"default": {}}
        assert (await call("reclaim", 10**6)).groups == {}


async def test_killed_buffer_is_what_it_was_without_a_checkpoint(tmp_path: Path) -> None:
    async with buffer("buffer-restarted", tmp_path / "buffer", max_restarts=-1) as call:
        await call("put", pack_groups([group(n, [0]) for n in range(4)]), 1)
        await call("put", pack_groups([group(4, [0], status=Status.ABORTED)]), 1)
        lease = await call("lease", 1, {"default": 2})
        await call("pop", "default", [Status.ABORTED], 1, 1)
        before = await call("counts")
        await kill(call)
        assert await call("counts") == before
        assert (await call("lease", 1, {"default": 2})).keys == lease.keys
        assert (await call("pop", "default", [Status.ABORTED], 1, 1)).keys == (("default", 4),)
        assert (await call("reclaim", 2)).groups[("default", 4)] is Status.ABORTED
    async with buffer("buffer-again", tmp_path / "buffer", attempt="b") as call:
        assert (await call("counts")).groups == {"default": {}}


async def test_a_batch_is_leased_by_reference_and_again_for_the_same_step() -> None:
    async with buffer("buffer-by-ref", None) as call:
        await call("put", pack_groups([group(n, [0] * 50_000) for n in range(2)]), 1)
        store = remote_buffer("buffer-by-ref", timeout_s=DEADLINE_S, tries=1)
        lease, again = [await store.lease(1, {"default": 2}) for _ in range(2)]
        assert lease is not None and again is not None
        assert isinstance(lease.batch, ray.ObjectRef) and lease.num_samples == 2
        assert (lease.keys, lease.staleness) == (again.keys, again.staleness)
        first, second = await lease.batch, await again.batch
        assert first.keys == second.keys == lease.keys and len(first.columns[1]) == 100_000
        assert await store.lease(2, {"default": 1}) is None


@pytest.mark.parametrize("journal", [False, True])
async def test_buffer_that_comes_back_without_its_journal_says_so(tmp_path: Path, journal: bool) -> None:
    """Without one it ends; one whose beginning is damaged is cut there, and the buffer waits to be mended."""
    folder = tmp_path / "buffer"
    async with buffer(f"buffer-lost-{journal}", folder if journal else None, max_restarts=-1) as call:
        await call("put", pack_groups([group(0, [0])]), 1)
        process_id = await call("process_id")
        if journal:
            (folder / "log").write_bytes(b"no journal")
        os.kill(process_id, signal.SIGKILL)
        if journal:
            with pytest.raises(BufferCutError, match="beginning cannot be read"):
                await call("counts")
            assert "cannot be read" in (await call("reclaim", 9)).cut
            assert (await call("mend", 9, [("default", 0)], {}, 0)).groups == {}
            assert (await call("put", pack_groups([group(0, [0])]), 1, 10))[0].stored
            return
        async with asyncio.timeout(DEADLINE_S):
            for _ in range(200):
                try:
                    await call.handle.counts.remote()
                except RayActorError as error:
                    if "its groups are lost" in str(error):
                        return
                await asyncio.sleep(0.1)
    raise AssertionError("the restarted buffer answers as if nothing had been lost")


async def test_counts_come_with_every_change_and_a_lease_with_its_batch_also_from_the_next_process(
    tmp_path: Path,
) -> None:
    async with buffer("buffer-counted", tmp_path / "buffer", max_restarts=-1) as call:
        there = remote_buffer("buffer-counted", timeout_s=60.0, tries=8)
        put = ("put", pack_groups([group(n, [0]) for n in range(3)]), 1, 0)
        results, counts = await there.then_counts(*put)
        assert [one.stored for one in results] == [True] * 3
        assert counts.groups["default"] == {Status.COMPLETED: 3}
        for _ in range(2):
            await kill(call)
            lease, counts = await there.then_counts("lease", 1, {"default": 2})
            assert counts.groups["default"] == {Status.COMPLETED: 1, Status.ARCHIVED: 2}
            assert (await lease.batch).keys == lease.keys == (("default", 0), ("default", 1))
        none, counts = await there.then_counts("lease", 2, {"default": 2})
        assert none is None and counts == await there.counts()
