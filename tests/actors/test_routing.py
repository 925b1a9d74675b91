"""Requests on their way past the controller, without Ray and vLLM: real routers, pool, workers and gates over an engine
that fails the test when it makes a token while the pool is paused, or under weights that are not the pool's."""

from __future__ import annotations

import asyncio
import os
import pickle
import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from ray.exceptions import ActorUnavailableError, RayActorError

from actors.rollout.controller import RolloutController
from actors.rollout.routing import Router, RoutingRole, RoutingTable, router_to
from actors.rollout.weights import Says
from actors.rollout.worker import RolloutWorker
from raypost.config import RolloutConfig
from raypost.config.engine import EngineConfig
from raypost.errors import NotStagedError, NoWorkersError, StaleWeightsError, WaitTimeoutError, WeightError
from raypost.types import GenerateRequest, GenerateResult, SampleParams
from raypost.types.pause import PauseMode
from raypost.weights.manifest import Bytes, Manifest, pack
from raypost.weights.seats import Seats

ROLLOUT = RolloutConfig(num_workers=2, pause_timeout_s=8.0)
TOKEN_S = 0.002


class World:
    """What every token must agree with."""

    def __init__(self) -> None:
        self.versions: set[int] = set()
        """Of the pool that serves; none while it is paused, two during a swap."""
        self.wrong: list[str] = []


class Engine:
    """Makes a token every TOKEN_S, of the version loaded."""

    vocab_size = 50
    cache_tokens = 0
    is_dead = asleep = False

    def __init__(self, name: str, world: World) -> None:
        self.name, self.world = name, world
        self.held_now: tuple[int, str, bool] = (-1, "", False)
        self.stopped: str | None = "abort"
        self.killed = False
        self.staged: Manifest | None = None
        self.holds: Manifest | None = None
        self.came: list[str] = []
        """How each version came."""

    async def process_ids(self) -> list[int]:
        return []

    async def warm_up(self) -> None:
        pass

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        versions: list[int] = []
        while len(versions) < request.sample_params.max_tokens and self.stopped != "abort":
            await asyncio.sleep(TOKEN_S)
            if self.killed:
                await asyncio.Event().wait()
            if self.stopped is None:
                if self.held_now[0] not in self.world.versions:
                    self.world.wrong.append(
                        f"{self.name}: {self.held_now[0]} where the pool has {self.world.versions}"
                    )
                versions.append(self.held_now[0])
        done = len(versions) == request.sample_params.max_tokens
        return GenerateResult(
            response_ids=np.ones(len(versions), np.int32),
            logprobs=np.zeros(len(versions), np.float32),
            policy_versions=np.asarray(versions, np.int32),
            finish_reason="length" if done else "abort",
            worker="",
        )

    async def pause(self, mode: str, clear_cache: bool = True) -> None:
        self.stopped = mode
        await asyncio.sleep(2 * TOKEN_S)

    async def resume(self) -> None:
        self.stopped = None

    async def held(self) -> Says:
        return self.held_now

    async def stage(self, manifest: Manifest, buckets: Sequence[Bytes]) -> None:
        if self.staged == manifest:
            return
        if len(buckets) < len(manifest.bucket_sizes) - manifest.spares(self.holds):
            raise NotStagedError(f"version {manifest.version} is not here")
        self.staged = manifest
        part = "buckets" if len(buckets) == len(manifest.bucket_sizes) else "what changed"
        self.came.append(f"{manifest.version} as {part}")

    async def receive(self, manifest: Manifest, seats: Seats, worker: str) -> None:
        assert worker == self.name and seats.rank_of(worker, 0) > 0
        self.staged = manifest
        self.came.append(f"{manifest.version} by a group")

    async def load(self, manifest: Manifest) -> tuple[None, Says]:
        await asyncio.sleep(TOKEN_S)
        self.held_now, self.holds = (manifest.version, manifest.digest, False), manifest
        return None, self.held_now

    def shutdown(self) -> None:
        self.killed = True


class Worker(RolloutWorker):
    def __init__(self, name: str, world: World) -> None:
        engine = EngineConfig(
            device="cpu", dtype="float32", max_model_len=4096, seed=0, sleep_mode=False, rollout=ROLLOUT
        )
        super().__init__(name, "", engine, 0)
        self.world = world
        self.asked: list[GenerateRequest] = []
        self.cache_tokens = 0

    def _make_engine(self) -> Any:
        engine = Engine(self._name, self.world)
        engine.cache_tokens = self.cache_tokens
        return engine

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.asked.append(request)
        return await super().generate(request)


class Handle:
    """An actor handle to a worker in this process, which can die with its calls and be restarted."""

    def __init__(self, name: str, world: World) -> None:
        self.name, self.world = name, world
        self.dead = asyncio.Event()
        self.worker = Worker(name, world)
        self.former: list[Worker] = []
        """Dead processes, which answer nothing."""
        self.asked_dead: list[str] = []
        self.calls = 0
        self.methods: list[str] = []
        """All that were called."""
        self.delay_s = 0.0
        """Of its pauses."""
        self.lost: list[tuple[str, bool]] = []
        """Methods of which the next call is lost, or its answer where that is True."""

    def restart(self) -> None:
        self.former.append(self.worker)
        self.dead = asyncio.Event()
        self.worker = Worker(self.name, self.world)

    def die(self) -> None:
        self.dead.set()
        if self.worker._life.engine is not None:
            self.worker._life.engine.shutdown()

    def __getattr__(self, method: str) -> Any:
        def remote(*args: Any) -> asyncio.Future[Any]:
            answer = asyncio.ensure_future(self.call(method, *args))
            # Some calls are not waited for, and fail in silence.
            answer.add_done_callback(lambda one: one.cancelled() or one.exception())
            return answer

        return SimpleNamespace(remote=remote)

    async def call(self, method: str, *args: Any) -> Any:
        self.calls += 1
        self.methods.append(method)
        if self.dead.is_set():
            self.asked_dead.append(method)
            raise RayActorError
        if (lost := next((one for one in self.lost if one[0] == method), None)) is not None:
            self.lost.remove(lost)
            if lost[1]:
                await getattr(self.worker, method)(*args)
            raise ActorUnavailableError("lost", None)
        if method == "pause":
            await asyncio.sleep(self.delay_s)
        answer = asyncio.ensure_future(getattr(self.worker, method)(*args))
        died = asyncio.create_task(self.dead.wait())
        await asyncio.wait({answer, died}, return_when=asyncio.FIRST_COMPLETED)
        died.cancel()
        if not answer.done():
            answer.cancel()
            raise RayActorError
        return answer.result()

    @property
    def open(self) -> int:
        return len(self.worker._gate.requests)


class DeafRouter(Router):
    """Is told nothing: its table is as old as it can be."""

    def _follow(self) -> None:
        pass


class Counted:
    """A controller that counts how often it is asked, and can be made silent."""

    def __init__(self, controller: RolloutController, silent: bool = False) -> None:
        self.controller, self.silent, self.asked = controller, silent, 0

    async def routes(self, known: int) -> RoutingTable:
        if self.silent and known >= 0:
            raise WaitTimeoutError("waited 60 s for rollout-controller.routes")
        self.asked += 1
        return await self.controller.routes(known)

    async def report(self, worker: str, incarnation: int, error: str) -> bool:
        return await self.controller.report(worker, incarnation, error)

    async def late(self, worker: str) -> None:
        await self.controller.late(worker)


class Pool:
    def __init__(self, count: int = 2) -> None:
        self.world = World()
        self.handles = [Handle(f"rollout-{n}", self.world) for n in range(count)]
        self.controller = self.new_controller(0)
        self.router, self.deaf = self.new_router(), DeafRouter(self.controller, 20.0)

    def new_controller(self, incarnation: int) -> RolloutController:
        handles = {one.name: one for one in self.handles}
        names = {name: name for name in handles}
        return RolloutController(names, ROLLOUT, 20.0, None, cast(Any, handles.__getitem__), incarnation)

    def new_router(self, timeout_s: float = 20.0) -> Router:
        return Router(self.controller, timeout_s)

    async def pause(self, mode: PauseMode = "abort") -> None:
        await self.controller.pause(mode)
        self.world.versions = set()

    async def serve(self, version: int) -> None:
        await self.controller.load_weights(*weights(version))
        self.world.versions = {version}
        await self.controller.resume(version)

    async def swap(self, version: int) -> None:
        await self.controller.stage_weights(*weights(version))
        self.world.versions.add(version)
        await self.controller.swap(version)
        self.world.versions = {version}

    async def until_up(self) -> None:
        async with asyncio.timeout(60):
            while set((await self.controller.states()).values()) != {"up"}:
                await asyncio.sleep(0.01)


def weights(version: int) -> tuple[Manifest, Any]:
    """Manifest and buckets; values are their own refs."""
    return pack(version, [("w", np.full(8, version % 251, np.uint8), "float32", (2,))], 1 << 20)


async def pool_at(version: int, count: int = 2) -> Pool:
    pool = Pool(count)
    await pool.controller.start()
    await pool.serve(version)
    return pool


def request(name: str = "r", max_tokens: int = 4) -> GenerateRequest:
    ids = np.arange(3, dtype=np.int32)
    return GenerateRequest(request_id=name, token_ids=ids, sample_params=SampleParams(max_tokens=max_tokens))


def start(router: Router, count: int, max_tokens: int) -> list[asyncio.Task[GenerateResult]]:
    return [asyncio.create_task(router.generate(request(f"r{n}", max_tokens))) for n in range(count)]


def refused(result: GenerateResult) -> bool:
    return (result.finish_reason, len(result.response_ids)) == ("abort", 0)


# ---------------------------------------------------------------- no request slips past a pause


@pytest.mark.parametrize("mode", ["abort", "keep", "wait"])
async def test_request_with_a_table_from_before_the_pause_is_refused_by_the_workers_own_gate(
    mode: PauseMode,
) -> None:
    pool = await pool_at(1)
    assert (await pool.deaf.generate(request())).finish_reason == "length"
    await pool.pause(mode)
    late = await asyncio.gather(*start(pool.deaf, 6, 4))
    assert all(map(refused, late)) and {one.worker for one in late} == {"rollout-0", "rollout-1"}
    assert refused(await pool.router.generate(request()))
    await pool.serve(2)
    assert (await pool.deaf.generate(request())).policy_versions.tolist() == [2] * 4
    assert pool.world.wrong == []


async def test_request_is_not_refused_because_the_news_of_a_resume_is_late() -> None:
    """A refusal costs a group a trip through the buffer, and counts as an interruption."""
    pool = await pool_at(1)
    await pool.pause()
    assert refused(await pool.deaf.generate(request()))
    await pool.serve(2)
    assert (await pool.deaf.generate(request())).policy_versions.tolist() == [2] * 4


async def test_worker_that_is_alive_though_reported_dead_is_stopped_by_a_pause_and_comes_back() -> None:
    pool = await pool_at(1)
    running = start(pool.deaf, 6, 2000)
    await asyncio.sleep(0.02)
    pool.handles[0].delay_s = 0.2
    await pool.controller.report("rollout-0", 0, "RayActorError")
    await pool.pause()
    assert [handle.open for handle in pool.handles] == [0, 0]
    assert {one.finish_reason for one in await asyncio.gather(*running)} == {"abort"}
    assert refused(await pool.deaf.generate(request()))
    await pool.serve(2)
    await pool.until_up()
    results = await asyncio.gather(*start(pool.deaf, 8, 4))
    assert {one.worker for one in results} == {"rollout-0", "rollout-1"}
    assert pool.world.wrong == []


@pytest.mark.parametrize("ran", [False, True])
async def test_worker_stays_in_the_pool_when_a_request_to_it_or_its_answer_was_lost(ran: bool) -> None:
    pool = await pool_at(1, count=1)
    (handle,) = pool.handles
    handle.lost = [("call_many", ran), ("ping", ran), ("call_many", ran)]
    results = await asyncio.gather(*start(pool.router, 4, 4))
    assert all(one.policy_versions.tolist() == [1] * 4 for one in results)
    table = await pool.controller.routes(-1)
    assert [one.incarnation for one in table.up] == [0] and not handle.lost


async def test_worker_whose_process_is_another_one_is_brought_back_however_the_call_ended() -> None:
    pool = await pool_at(1, count=1)
    (handle,) = pool.handles
    handle.restart()
    handle.worker.ping = lambda: asyncio.sleep(0, os.getpid() + 1)  # type: ignore[method-assign]
    handle.lost = [("call_many", False)]
    assert (await pool.router.generate(request())).policy_versions.tolist() == [1] * 4
    assert [one.incarnation for one in (await pool.controller.routes(-1)).up] == [1]


async def test_worker_that_comes_back_in_a_sync_serves_only_the_new_version_whatever_table_leads_to_it() -> (
    None
):
    pool = await pool_at(1)
    assert (await pool.deaf.generate(request())).finish_reason == "length"
    await pool.pause()
    pool.handles[0].die()
    await pool.controller.report("rollout-0", 0, "RayActorError")
    pool.handles[0].restart()
    await pool.until_up()
    assert all(map(refused, await asyncio.gather(*start(pool.deaf, 4, 4))))
    await pool.serve(2)
    results = await asyncio.gather(*start(pool.deaf, 8, 4))
    assert {one.worker for one in results} == {"rollout-0", "rollout-1"}
    assert {int(v) for one in results for v in one.policy_versions} == {2}
    assert pool.world.wrong == []


@pytest.mark.parametrize("seed", range(6))
async def test_whatever_happens_every_token_is_of_the_version_that_the_pool_serves(seed: int) -> None:
    """Pauses of all modes, swaps, loads, deaths, reports of workers that are alive, and requests all the time."""
    rng = random.Random(seed)
    pool = await pool_at(1)
    results: list[GenerateResult] = []
    ended = False

    async def ask(router: Router) -> None:
        while not ended:
            results.append(await router.generate(request("r", rng.randrange(1, 40))))
            await asyncio.sleep(0)

    asking = [asyncio.create_task(ask(router)) for router in (pool.router, pool.deaf) for _ in range(4)]
    for version in range(2, 14):
        await asyncio.sleep(rng.random() * 0.05)
        victim = rng.choice(pool.handles)
        event = rng.choice(["none", "death", "report"])
        if event == "death":
            victim.die()
            asyncio.get_running_loop().call_later(rng.random() * 0.05, victim.restart)
        elif event == "report":
            for route in pool.controller._table.up:
                if route.worker == victim.name:
                    await pool.controller.report(route.worker, route.incarnation, "RayActorError")
        await asyncio.sleep(rng.random() * 0.02)
        modes: list[PauseMode | None] = ["abort", "keep", "wait", None, None]
        mode = rng.choice(modes)
        if mode is None:
            await pool.swap(version)
            continue
        await pool.pause(mode)
        await asyncio.sleep(rng.random() * 0.02)
        await pool.serve(version)
    await pool.until_up()
    await asyncio.sleep(0.1)
    ended = True
    await asyncio.wait_for(asyncio.gather(*asking), 60)
    assert pool.world.wrong == []
    assert {one.finish_reason for one in results} <= {"length", "abort"}
    assert max(int(one.policy_versions.max(initial=-1)) for one in results) == 13


async def test_swap_freezes_what_runs_and_goes_on_with_the_version_that_is_staged() -> None:
    pool = await pool_at(1)
    running = start(pool.router, 4, 40)
    await asyncio.sleep(5 * TOKEN_S)
    epoch = pool.controller._table.epoch
    await pool.swap(2)
    await pool.controller.swap(2)
    results = await asyncio.gather(*running)
    assert {one.finish_reason for one in results} == {"length"}
    assert all(sorted(set(one.policy_versions)) == [1, 2] for one in results)
    assert (pool.world.wrong, pool.controller._table.epoch) == ([], epoch), "no router had to be told"


async def test_swap_needs_the_version_staged_and_has_a_pool_that_is_paused_serve_it() -> None:
    pool = await pool_at(1)
    with pytest.raises(StaleWeightsError, match="cannot swap to version 2: stage it first"):
        await pool.controller.swap(2)
    await pool.controller.stage_weights(*weights(2))
    await pool.pause()
    assert refused(await pool.router.generate(request()))
    await pool.swap(2)
    assert (await pool.router.generate(request())).policy_versions.tolist() == [2] * 4
    assert pool.world.wrong == []


def of_weights(handle: Handle) -> list[str]:
    """Return the calls that bring a worker its weights, and forget all that were made."""
    made = [one for one in handle.methods if one in ("stage_weights", "swap", "load_weights")]
    handle.methods.clear()
    return made


async def test_swap_that_waits_for_its_version_is_one_call_to_each_worker_and_is_acknowledged_by_it() -> None:
    pool = await pool_at(1)
    assert [of_weights(handle) for handle in pool.handles] == [["load_weights"]] * 2
    running = start(pool.router, 4, 40)
    pool.world.versions.add(2)
    swapping = asyncio.create_task(pool.controller.swap(2, 20.0))
    await asyncio.sleep(5 * TOKEN_S)
    assert [of_weights(handle) for handle in pool.handles] == [[], []] and not swapping.done()
    await pool.controller.stage_weights(*weights(2))
    await swapping
    pool.world.versions = {2}
    reports = await pool.controller.load_weights(*weights(2))
    assert [(report.worker, report.version) for report in reports] == [("rollout-0", 2), ("rollout-1", 2)]
    assert [of_weights(handle) for handle in pool.handles] == [["swap"]] * 2
    assert {one.finish_reason for one in await asyncio.gather(*running)} == {"length"}
    assert pool.world.wrong == []
    await pool.pause()
    await pool.controller.load_weights(*weights(2))
    assert [of_weights(handle) for handle in pool.handles] == [["load_weights"]] * 2, "a paused pool is asked"


async def test_version_that_does_not_come_ends_the_swap_that_waits_for_it_and_the_pool_serves_on() -> None:
    pool = await pool_at(1)
    with pytest.raises(WaitTimeoutError, match="version 2 to be staged"):
        await pool.controller.swap(2, 0.01)
    assert (await pool.router.generate(request())).policy_versions.tolist() == [1] * 4
    await pool.controller.stage_weights(*weights(2))
    assert of_weights(pool.handles[0])[-1] == "stage_weights", "nobody waits for it any more"


async def test_workers_that_came_since_a_swap_or_are_gone_do_not_stand_in_its_acknowledgement() -> None:
    pool = await pool_at(1)
    await pool.swap(2)
    pool.handles[0].die()
    await pool.controller.report("rollout-0", 0, "it died")
    assert [one.worker for one in await pool.controller.load_weights(*weights(2))] == ["rollout-1"]


async def test_worker_that_holds_something_else_after_a_swap_does_not_serve() -> None:
    pool = await pool_at(1)
    engine = pool.handles[0].worker._life.engine

    async def load(manifest: Manifest) -> tuple[None, Says]:
        return None, (manifest.version, "other", False)

    engine.load = load  # type: ignore[method-assign, union-attr]
    with pytest.raises(WeightError, match="rollout-0 holds version 2 with digest other instead of version 2"):
        await pool.swap(2)
    assert refused(await pool.handles[0].worker.generate(request()))


async def test_worker_that_dies_in_a_swap_comes_back_with_the_new_version() -> None:
    pool = await pool_at(1)
    running = start(pool.router, 6, 200)
    await asyncio.sleep(5 * TOKEN_S)
    swapping = asyncio.create_task(pool.swap(2))
    await asyncio.sleep(TOKEN_S / 2)
    pool.handles[0].die()
    await swapping
    pool.handles[0].restart()
    await pool.until_up()
    await asyncio.gather(*running)
    results = await asyncio.gather(*start(pool.router, 8, 4))
    assert {one.worker for one in results} == {"rollout-0", "rollout-1"}
    assert {int(v) for one in results for v in one.policy_versions} == {2}
    assert pool.world.wrong == []


# ---------------------------------------------------------------- deaths, and what is known of them


async def test_request_goes_on_elsewhere_at_once_when_its_worker_dies_though_no_news_came() -> None:
    pool = await pool_at(1)
    running = start(pool.deaf, 4, 30)
    await asyncio.sleep(0.02)
    pool.handles[0].die()
    results = await asyncio.wait_for(asyncio.gather(*running), 15)
    assert [len(one.response_ids) for one in results] == [30] * 4
    assert {one.worker for one in results} == {"rollout-1"}
    assert "call_many" not in pool.handles[0].asked_dead
    assert (await pool.controller.states())["rollout-0"] == "down"
    pool.handles[0].restart()
    await pool.until_up()
    served = await asyncio.gather(*start(pool.router, 8, 4))
    assert {one.worker for one in served} == {"rollout-0", "rollout-1"}


async def test_late_report_of_a_former_incarnation_changes_nothing() -> None:
    pool = await pool_at(1)
    pool.handles[0].die()
    await pool.controller.report("rollout-0", 0, "RayActorError")
    await pool.controller.report("rollout-0", 0, "RayActorError")
    pool.handles[0].restart()
    await pool.until_up()
    await pool.controller.report("rollout-0", 0, "RayActorError")
    await pool.controller.report("rollout-7", 0, "RayActorError")
    assert set((await pool.controller.states()).values()) == {"up"}


async def test_request_waits_for_a_worker_until_its_deadline_and_names_them_all() -> None:
    pool = await pool_at(1, count=1)
    pool.handles[0].die()
    with pytest.raises(NoWorkersError, match="waited 0 s for a rollout worker: rollout-0 is down"):
        await pool.new_router(timeout_s=0.2).generate(request())
    waiting = asyncio.create_task(pool.router.generate(request()))
    await asyncio.sleep(0.05)
    pool.handles[0].restart()
    assert (await asyncio.wait_for(waiting, 60)).finish_reason == "length"


async def test_requests_fail_at_once_when_no_worker_will_come_any_more() -> None:
    pool = await pool_at(1, count=1)
    pool.handles[0].die()
    waiting = asyncio.create_task(pool.router.generate(request()))
    await asyncio.sleep(0.05)
    pool.controller._failure = "no rollout worker is left: rollout-0 did not come back"
    await pool.controller._notify()
    for asked in (waiting, pool.router.generate(request())):
        with pytest.raises(NoWorkersError, match="rollout-0 did not come back"):
            await asyncio.wait_for(asked, 60)


async def test_request_past_its_deadline_is_an_error_and_is_taken_out_of_the_worker() -> None:
    pool = await pool_at(1, count=1)
    slow = await pool.new_router(timeout_s=0.1).generate(request("slow", 4000))
    assert (slow.finish_reason, len(slow.response_ids)) == ("error", 0)
    assert "rollout-0 to generate slow" in (slow.error or "")
    async with asyncio.timeout(60):
        while pool.handles[0].open:
            await asyncio.sleep(0.01)


async def test_workers_serve_on_while_the_controller_does_not_answer() -> None:
    pool = await pool_at(1)
    router = Router(cast(RoutingRole, Counted(pool.controller, silent=True)), 20.0)
    for _ in range(3):
        assert (await router.generate(request())).finish_reason == "length"


# ---------------------------------------------------------------- which worker, and how many calls


async def test_a_group_costs_one_call_a_worker() -> None:
    pool = await pool_at(1)
    await pool.router.generate(request())
    before = [handle.calls for handle in pool.handles]
    asked = (replace(request(f"r{n}", 4 + 3 * n), group="sums/0") for n in range(8))
    results = await asyncio.gather(*map(pool.router.generate, asked))
    assert [len(one.response_ids) for one in results] == [4 + 3 * n for n in range(8)]
    assert [handle.calls - calls for handle, calls in zip(pool.handles, before, strict=True)] == [1, 1]


async def until_open(pool: Pool, count: int) -> None:
    """Wait until the workers have so many requests."""
    async with asyncio.timeout(60):
        while sum(handle.open for handle in pool.handles) < count:
            await asyncio.sleep(0.01)


async def test_requests_go_to_the_worker_with_the_fewest_also_where_several_routers_ask() -> None:
    pool = await pool_at(1)
    routers = [pool.new_router() for _ in range(4)]
    running = [one for router in routers for one in start(router, 3, 2000)]
    await until_open(pool, 12)
    first, second = (handle.open for handle in pool.handles)
    assert first + second == 12 and abs(first - second) <= len(routers)
    more = start(routers[0], 3, 2000)
    await until_open(pool, 15)
    mine = routers[0]._loads
    assert [mine.own(handle.name).requests for handle in pool.handles] == [3, 3]
    await pool.pause()
    await asyncio.gather(*running, *more)
    assert {mine.own(handle.name) for handle in pool.handles} == {(0, 0)}


async def test_requests_go_where_the_engines_say_that_there_is_room_for_them_also_after_the_controller_died() -> (
    None
):
    pool = Pool()
    pool.handles[0].worker.cache_tokens, pool.handles[1].worker.cache_tokens = 30_000, 10_000
    await pool.controller.start()
    await pool.serve(1)

    async def spread() -> list[int]:
        running = start(pool.new_router(), 12, 2000)
        await until_open(pool, 12)
        found = [handle.open for handle in pool.handles]
        await pool.pause()
        await asyncio.gather(*running)
        return found

    assert await spread() == [9, 3]
    await pool.serve(2)
    pool.controller = pool.new_controller(1)
    await pool.controller.know()
    assert await spread() == [9, 3]


async def test_what_an_engine_has_of_other_routers_counts_at_once() -> None:
    pool = await pool_at(1)
    router = pool.new_router()
    running = start(pool.deaf, 20, 2000)
    await asyncio.gather(*start(router, 4, 1))
    assert [work.requests for _, work in router._loads._others.values()] == [10, 10]
    await pool.pause()
    await asyncio.gather(*running)


async def test_router_asks_the_controller_once_while_the_pool_serves() -> None:
    pool = await pool_at(1)
    counted = Counted(pool.controller)
    router = Router(cast(RoutingRole, counted), 20.0)
    await router.generate(request())
    await asyncio.gather(*start(router, 20, 4))
    assert counted.asked == 2, "once for the table, once for what follows"


async def test_pool_can_be_paused_and_resumed_by_its_router() -> None:
    pool = await pool_at(1)
    await pool.router.pause()
    assert refused(await pool.router.generate(request()))
    await pool.router.resume(1)
    assert (await pool.router.generate(request())).finish_reason == "length"


def test_router_travels_as_the_name_of_its_controller() -> None:
    router = pickle.loads(pickle.dumps(router_to("rollout-controller", 7.0)))
    assert isinstance(router, Router)
    assert (router._controller._names, router._timeout_s) == (["rollout-controller"], 7.0)  # type: ignore[attr-defined]
