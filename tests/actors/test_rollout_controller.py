"""The pool over scripted workers on a local Ray: routing, pause, weights, death and return."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import RayActorError

from actors.placement import spawn
from actors.rollout.controller import RolloutController
from actors.rollout.routing import Router, router_to
from raypost.config import RolloutConfig
from raypost.errors import StaleWeightsError, WeightError
from raypost.types import GenerateRequest, GenerateResult, SampleParams
from raypost.weights.manifest import Manifest, pack
from tests.actors import scripted

pytestmark = pytest.mark.usefixtures("local_ray")
DEADLINE_S = 240


def manifest(version: int) -> tuple[Manifest, list[ray.ObjectRef]]:
    data = np.full(8, version, np.uint8)
    made, buckets = pack(version, [("w", data, "float32", (2,))], 1 << 20)
    return made, [ray.put(bucket) for bucket in buckets]


def request(name: str, max_tokens: int = 4) -> GenerateRequest:
    ids = np.arange(3, dtype=np.int32)
    return GenerateRequest(request_id=name, token_ids=ids, sample_params=SampleParams(max_tokens=max_tokens))


class Pool:
    """A controller actor and its scripted workers."""

    def __init__(
        self,
        token_s: float,
        count: int = 2,
        liar: int | None = None,
        dies_unless: Path | None = None,
        **rollout: Any,
    ) -> None:
        names = {f"rollout-{n}": f"scripted-{id(self)}-{n}" for n in range(count)}
        self.workers = {
            f"rollout-{n}": spawn(
                scripted.ScriptedWorker,
                f"rollout-{n}",
                token_s,
                n == liar,
                0.0,
                dies_unless,
                name=names[f"rollout-{n}"],
                max_restarts=-1,
            )
            for n in range(count)
        }
        config = RolloutConfig(num_workers=count, **rollout)
        self.timeout_s = config.request_timeout_s
        self.name = f"controller-{id(self)}"
        self.controller = spawn(RolloutController, names, config, 20.0, name=self.name, max_restarts=-1)
        self.routers: dict[asyncio.AbstractEventLoop, Router] = {}

    @property
    def router(self) -> Router:
        """One for each test: it belongs to a loop."""
        return self.routers.setdefault(asyncio.get_running_loop(), router_to(self.name, self.timeout_s))

    def generate(self, asked: GenerateRequest) -> asyncio.Task[GenerateResult]:
        return asyncio.create_task(self.router.generate(asked))

    async def serve(self, version: int) -> None:
        await self.controller.load_weights.remote(*manifest(version))
        await self.controller.resume.remote(version)

    async def pace(self, token_s: float) -> None:
        """Have all workers make a token every `token_s`: slowly until what is tested has happened, then at once."""
        for worker in self.workers.values():
            await worker.slow_down.remote(token_s)

    async def until_begun(self, count: int) -> None:
        """Wait until so many requests that are under way have a token."""
        async with asyncio.timeout(DEADLINE_S):
            while sum([await worker.begun.remote() for worker in self.workers.values()]) < count:
                await asyncio.sleep(0.02)

    async def until_up(self, name: str) -> None:
        for _ in range(DEADLINE_S * 20):
            if (await self.controller.states.remote())[name] == "up":
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"{name} did not come back")

    def end(self) -> None:
        for handle in (self.controller, *self.workers.values()):
            ray.kill(handle)


@pytest.fixture(scope="module")
def pool(local_ray: None) -> Iterator[Pool]:
    """One for all tests that need nothing special: starting actors takes seconds. Each serves a version first."""
    shared = Pool(token_s=0.01)
    ray.get(shared.controller.start.remote(), timeout=DEADLINE_S)
    yield shared
    shared.end()


async def with_pool(test: Callable[[Pool], Awaitable[None]], **options: Any) -> None:
    pool = Pool(**options)
    try:
        await asyncio.wait_for(pool.controller.start.remote(), DEADLINE_S)
        await asyncio.wait_for(test(pool), DEADLINE_S)
    finally:
        pool.end()


async def test_requests_are_spread_and_carry_the_version(pool: Pool) -> None:
    await pool.serve(7)
    results = await asyncio.gather(*(pool.generate(request(f"r{n}")) for n in range(8)))
    assert {result.worker for result in results} == set(pool.workers)
    assert all(result.policy_versions.tolist() == [7] * 4 for result in results)


async def test_nothing_generates_between_pause_and_resume(pool: Pool) -> None:
    await pool.serve(1)
    running = [pool.generate(request(f"r{n}", 1000)) for n in range(6)]
    await pool.until_begun(6)
    await pool.controller.pause.remote()
    assert [stats.running for stats in await pool.controller.stats.remote()] == [0, 0]
    for result in await asyncio.gather(*running):
        assert result.finish_reason == "abort" and 0 < len(result.response_ids) < 1000
    late = await pool.generate(request("late"))
    assert late.finish_reason == "abort" and len(late.response_ids) == 0
    await pool.serve(2)
    again = await pool.generate(request("again"))
    assert again.policy_versions.tolist() == [2] * 4


async def test_dead_workers_requests_continue_elsewhere_and_it_returns_with_the_current_version(
    pool: Pool,
) -> None:
    await pool.serve(3)
    await pool.pace(0.1)
    running = [pool.generate(request(f"r{n}", 60)) for n in range(6)]
    await pool.until_begun(6)
    pool.workers["rollout-0"].die.remote()
    await pool.workers["rollout-1"].slow_down.remote(0.01)
    results: list[GenerateResult] = await asyncio.gather(*running)
    assert [len(result.response_ids) for result in results] == [60] * 6
    await pool.until_up("rollout-0")
    assert (await pool.workers["rollout-0"].stats.remote()).version == 3
    served = await asyncio.gather(*(pool.generate(request(f"s{n}")) for n in range(8)))
    assert {result.worker for result in served} == set(pool.workers)


async def test_worker_that_hangs_is_found_ended_and_brought_back_and_its_requests_go_on_elsewhere() -> None:
    async def test(pool: Pool) -> None:
        await pool.serve(3)
        calls = [pool.generate(request(f"r{n}", 200)) for n in range(4)]
        await pool.until_begun(4)
        pool.workers["rollout-0"].hang.remote()
        for _ in range(DEADLINE_S * 20):
            if (await pool.controller.states.remote())["rollout-0"] == "down":
                break
            await asyncio.sleep(0.05)
        results = await asyncio.gather(*calls)
        assert {one.finish_reason for one in results} == {"length"}
        await pool.until_up("rollout-0")
        results = await asyncio.gather(*(pool.generate(request(f"s{n}", 4)) for n in range(8)))
        assert {one.worker for one in results} == {"rollout-0", "rollout-1"}
        assert {int(v) for one in results for v in one.policy_versions} == {3}

    await with_pool(test, token_s=0.01, liveness_timeout_s=5.0)


async def test_slow_worker_is_found_and_restarted_and_then_as_fast_as_the_others() -> None:
    async def test(pool: Pool) -> None:
        await pool.serve(1)
        pool.workers["rollout-0"].slow_down.remote(0.1)
        seen: set[str] = set()
        calls = [pool.generate(request(f"r{n}", 4)) for n in range(8)]
        for n in range(DEADLINE_S * 20):
            seen.add((await pool.controller.states.remote())["rollout-0"].partition(":")[0])
            if "down" in seen:
                break
            calls = [one for one in calls if not one.done()]
            calls += [pool.generate(request(f"s{n}", 4)) for _ in range(8 - len(calls))]
            await asyncio.sleep(0.05)
        assert "down" in seen
        await asyncio.gather(*calls)
        await pool.until_up("rollout-0")
        results = await asyncio.gather(*(pool.generate(request(f"t{n}", 4)) for n in range(16)))
        assert {one.worker for one in results} == {"rollout-0", "rollout-1", "rollout-2"}

    await with_pool(test, token_s=0.005, count=3, liveness_timeout_s=5.0, slow_worker="restart")


async def test_worker_that_dies_while_its_engine_starts_is_started_again(tmp_path: Path) -> None:
    async def test(pool: Pool) -> None:
        await pool.serve(1)
        assert set((await pool.controller.states.remote()).values()) == {"up"}

    await with_pool(test, token_s=0.0, dies_unless=tmp_path / "died")
    assert (tmp_path / "died").exists()


async def test_worker_that_returns_during_a_pause_stays_paused_and_holds_the_new_version(pool: Pool) -> None:
    await pool.serve(1)
    await pool.controller.pause.remote()
    with contextlib.suppress(RayActorError):
        await pool.workers["rollout-0"].die.remote()
    reports = await pool.controller.load_weights.remote(*manifest(2))
    assert reports
    await pool.until_up("rollout-0")
    direct = await pool.workers["rollout-0"].generate.remote(request("direct"))
    assert direct.finish_reason == "abort", "the gate of a returned worker must be closed during a pause"
    assert (await pool.workers["rollout-0"].stats.remote()).version == 2


async def test_worker_that_dies_while_the_pool_sleeps_comes_back_when_it_wakes(pool: Pool) -> None:
    await pool.serve(1)
    await pool.controller.pause.remote()
    await pool.controller.sleep.remote(False)
    with contextlib.suppress(RayActorError):
        await pool.workers["rollout-0"].die.remote()
    await pool.controller.sleep.remote(False)
    await asyncio.wait_for(_until_answers(pool.workers["rollout-0"]), DEADLINE_S)
    states = [await worker.state.remote() for worker in pool.workers.values()]
    assert states == [(False, None, None), (True, "all", None)], "no engine starts on a device that is lent"
    await pool.serve(2)
    await pool.until_up("rollout-0")
    served = await asyncio.gather(*(pool.generate(request(f"s{n}")) for n in range(8)))
    assert {result.worker for result in served} == set(pool.workers)
    assert all(result.policy_versions.tolist() == [2] * 4 for result in served)


async def test_keep_freezes_requests_and_they_go_on_under_the_next_version(pool: Pool) -> None:
    await pool.serve(1)
    await pool.pace(0.1)
    running = [pool.generate(request(f"r{n}", 60)) for n in range(6)]
    await pool.until_begun(6)
    await pool.controller.pause.remote("keep")
    assert [stats.running for stats in await pool.controller.stats.remote()] == [0, 0]
    late = await pool.generate(request("late"))
    assert (late.finish_reason, len(late.response_ids)) == ("abort", 0)
    await pool.pace(0.01)
    await pool.controller.load_weights.remote(*manifest(2))
    ready, _ = await asyncio.wait(running, timeout=0.3)
    assert ready == set()
    await pool.controller.resume.remote(2)
    for result in await asyncio.gather(*running):
        assert result.finish_reason == "length"
        assert sorted(set(result.policy_versions.tolist())) == [1, 2]


async def test_wait_lets_requests_end_and_refuses_new_ones(pool: Pool) -> None:
    await pool.serve(1)
    await pool.pace(0.1)
    running = [pool.generate(request(f"r{n}", 60)) for n in range(6)]
    await pool.until_begun(6)
    pause = pool.controller.pause.remote("wait")
    async with asyncio.timeout(DEADLINE_S):
        while (late := await pool.generate(request("late", 1))).finish_reason != "abort":
            assert not any(one.done() for one in running)
    assert len(late.response_ids) == 0
    await pool.pace(0.01)
    await pause
    results = await asyncio.gather(*running)
    assert {result.finish_reason for result in results} == {"length"}


@pytest.mark.parametrize("first", ["wait", "keep"])
async def test_abort_overrules_a_gentler_pause_even_one_under_way(pool: Pool, first: str) -> None:
    await pool.serve(1)
    running = [pool.generate(request(f"r{n}", 10_000)) for n in range(6)]
    await pool.until_begun(6)
    gentle = pool.controller.pause.remote(first)
    await asyncio.sleep(0.2)
    await asyncio.wait_for(pool.controller.pause.remote("abort"), DEADLINE_S)
    await asyncio.wait_for(gentle, DEADLINE_S)
    for result in await asyncio.wait_for(asyncio.gather(*running), DEADLINE_S):
        assert result.finish_reason == "abort" and len(result.response_ids) > 0
    await pool.controller.pause.remote(first)
    assert {await worker.paused_as.remote() for worker in pool.workers.values()} == {"abort"}
    await pool.serve(2)
    again = await pool.generate(request("again"))
    assert again.policy_versions.tolist() == [2] * 4


@pytest.mark.parametrize(("mode", "victim"), [("keep", "rollout-0"), ("wait", "rollout-1")])
async def test_worker_that_dies_in_a_pause_gives_its_requests_up_and_comes_back_paused_alike(
    pool: Pool, mode: str, victim: str
) -> None:
    await pool.serve(1)
    await pool.pace(0.1)
    running = [pool.generate(request(f"r{n}", 100)) for n in range(6)]
    await pool.until_begun(6)
    pause = pool.controller.pause.remote(mode)
    await asyncio.sleep(0.05)
    with contextlib.suppress(RayActorError):
        await pool.workers[victim].die.remote()
    survivor = next(name for name in pool.workers if name != victim)
    await pool.workers[survivor].slow_down.remote(0.01)
    await pause
    # Until the pool has noticed the death, the worker counts as up.
    over = 3 if mode == "keep" else 6
    async with asyncio.timeout(DEADLINE_S):
        while sum(one.done() for one in running) < over:
            await asyncio.sleep(0.05)
    await pool.controller.load_weights.remote(*manifest(2))
    await pool.until_up(victim)
    assert {await worker.paused_as.remote() for worker in pool.workers.values()} == {mode}
    direct = await pool.workers[victim].generate.remote(request("direct"))
    assert direct.finish_reason == "abort", "the gate of a returned worker must be closed during a pause"
    await pool.controller.resume.remote(2)
    results: list[GenerateResult] = await asyncio.wait_for(asyncio.gather(*running), DEADLINE_S)
    assert sorted(result.finish_reason for result in results) == ["abort"] * 3 + ["length"] * 3
    assert all(len(result.response_ids) == 0 for result in results if result.finish_reason == "abort")
    again = await asyncio.gather(*(pool.generate(request(f"a{n}")) for n in range(8)))
    assert {result.worker for result in again} == set(pool.workers)
    assert all(result.policy_versions.tolist() == [2] * 4 for result in again)


async def test_time_in_which_requests_are_frozen_is_no_rollout_time() -> None:
    async def check(pool: Pool) -> None:
        await pool.serve(1)
        running = pool.generate(request("r", 40))
        await pool.until_begun(1)
        await pool.controller.pause.remote("keep")
        paused = time.time()
        await asyncio.sleep(0.3)
        resumed = time.time()
        await pool.pace(0.01)
        await pool.controller.resume.remote(1)
        await running
        spans = await pool.controller.drain_spans.remote()
        assert len(spans) == 2
        assert spans[0].end_s <= paused and resumed <= spans[1].start_s

    await with_pool(check, token_s=0.1, count=1)


async def test_sync_fails_when_a_worker_holds_other_bytes_than_were_sent() -> None:
    async def check(pool: Pool) -> None:
        with pytest.raises(WeightError, match="rollout-1 holds version 1 with digest lie"):
            await pool.controller.load_weights.remote(*manifest(1))

    await with_pool(check, token_s=0.01, liar=1)


async def test_version_that_is_not_held_is_not_served(pool: Pool) -> None:
    await pool.serve(1)
    with pytest.raises(StaleWeightsError, match="cannot serve version 2: the pool holds 1"):
        await pool.controller.resume.remote(2)


async def test_request_past_its_deadline_fails_and_names_the_worker() -> None:
    async def check(pool: Pool) -> None:
        await pool.serve(1)
        result = await pool.generate(request("slow", 10_000))
        assert result.finish_reason == "error"
        assert "rollout-0 to generate slow" in (result.error or "")

    await with_pool(check, token_s=0.05, count=1, request_timeout_s=1)


async def test_worker_started_again_behind_the_pools_back_is_brought_back_before_it_serves(
    pool: Pool,
) -> None:
    """Nobody called it when it died: the pool learns of it from a worker that says it has no engine."""
    await pool.serve(5)
    with contextlib.suppress(RayActorError):
        await pool.workers["rollout-0"].die.remote()
    await asyncio.wait_for(_until_answers(pool.workers["rollout-0"]), DEADLINE_S)
    assert (await pool.controller.states.remote())["rollout-0"] == "up"
    await pool.controller.pause.remote()
    await pool.controller.resume.remote(5)
    results = await asyncio.gather(*(pool.generate(request(f"r{n}")) for n in range(4)))
    assert all(result.policy_versions.tolist() == [5] * 4 for result in results)
    await pool.until_up("rollout-0")
    async with asyncio.timeout(DEADLINE_S):  # the router may hear of it a moment later
        served = set[str]()
        while served != set(pool.workers):
            results = await asyncio.gather(*(pool.generate(request(f"s{n}")) for n in range(8)))
            served = {result.worker for result in results}


async def _until_answers(worker: Any) -> None:
    while True:
        with contextlib.suppress(RayActorError):
            await worker.stats.remote()
            return
        await asyncio.sleep(0.1)
