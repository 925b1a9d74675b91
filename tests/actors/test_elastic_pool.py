"""Workers that join and leave a pool that serves, without Ray and vLLM: the world of test_routing.py."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from actors.rollout.pool import Drain
from actors.rollout.routing import joined, rest_of
from jobs.elastic import PoolKeeper
from jobs.pool_load import PoolLoad
from raypost.errors import NoWorkersError
from raypost.report.files import write_json
from raypost.report.pool import SCALE
from raypost.types import FloatArray, GenerateResult, IntArray
from tests.actors.test_controller_rebuild import Run
from tests.actors.test_routing import TOKEN_S, Handle, Pool, Worker, pool_at, refused, request, start
from tests.factories import make_config


class Late(Handle):
    """A worker without a process until it `comes`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.came = asyncio.Event()

    async def call(self, method: str, *args: Any) -> Any:
        await self.came.wait()
        return await super().call(method, *args)


def new_worker(pool: Pool, kind: type[Handle] = Handle) -> Handle:
    pool.handles.append(kind(f"rollout-{len(pool.handles)}", pool.world))
    return pool.handles[-1]


async def until(pool: Pool, name: str, state: str | None) -> None:
    async with asyncio.timeout(60):
        while (await pool.controller.states()).get(name) != state:
            await asyncio.sleep(TOKEN_S)


def find_all(pool: Pool) -> None:
    """Let the controller find workers that are made later."""
    pool.controller._find = lambda name: {one.name: one for one in pool.handles}[name]


async def elastic_pool(version: int, count: int = 2) -> Pool:
    pool = await pool_at(version, count)
    find_all(pool)
    return pool


async def test_worker_joins_a_pool_that_serves_through_every_state_and_serves_only_what_the_pool_holds() -> (
    None
):
    pool = await elastic_pool(3, count=1)
    running = start(pool.router, 4, 100)
    late = new_worker(pool, Late)
    assert isinstance(late, Late)
    await pool.controller.join("rollout-1")
    await pool.controller.join("rollout-1")
    assert await pool.controller.states() == {"rollout-0": "up", "rollout-1": "requested"}
    assert (await pool.router.generate(request())).worker == "rollout-0"
    late.came.set()
    await until(pool, "rollout-1", "up")
    assert not any(one.done() for one in running), "production did not wait for it"
    results = await asyncio.gather(*start(pool.router, 8, 4))
    assert {one.worker for one in results} == {"rollout-0", "rollout-1"}
    assert {int(v) for one in results for v in one.policy_versions} == {3}
    await asyncio.gather(*running)
    assert pool.world.wrong == []


@pytest.mark.parametrize("how", ["pause", "swap"])
async def test_join_that_straddles_a_sync_ends_on_the_new_version(how: str) -> None:
    for ticks in range(6):
        pool = await elastic_pool(1)
        new_worker(pool)
        await pool.controller.join("rollout-2")
        await asyncio.sleep(ticks * TOKEN_S)
        if how == "swap":
            await pool.swap(2)
        else:
            await pool.pause()
            await pool.serve(2)
        await pool.until_up()
        results = await asyncio.gather(*start(pool.router, 9, 4))
        assert {one.worker for one in results} == {"rollout-0", "rollout-1", "rollout-2"}
        assert {int(v) for one in results for v in one.policy_versions} == {2}
        assert pool.world.wrong == []


async def test_join_into_a_paused_pool_serves_nothing_before_it_resumes() -> None:
    pool = await elastic_pool(1)
    await pool.pause()
    new_worker(pool)
    await pool.controller.join("rollout-2")
    await until(pool, "rollout-2", "up")
    assert all(map(refused, await asyncio.gather(*start(pool.deaf, 6, 4))))
    await pool.serve(2)
    assert {one.worker for one in await asyncio.gather(*start(pool.router, 9, 4))} >= {"rollout-2"}


class Canary(Worker):
    """Answers the canary prompt with its own number."""

    answer = 0.0

    async def canary(self, prompt_ids: IntArray) -> FloatArray:
        return np.full(len(prompt_ids) - 1, self.answer, np.float32)


@pytest.mark.parametrize(("answer", "expected"), [(0.005, "up"), (0.5, "down")])
async def test_worker_whose_logprobs_differ_from_the_others_never_serves(
    answer: float, expected: str
) -> None:
    pool = await elastic_pool(1, count=1)
    pool.controller._canary_tolerance = 0.01
    pool.handles[0].worker.canary = Canary("c", pool.world).canary  # type: ignore[method-assign]
    await pool.controller.canary(np.arange(4, dtype=np.int32))
    made = Canary("rollout-1", pool.world)
    made.answer = answer
    new_worker(pool).worker = made
    await pool.controller.join("rollout-1")
    await until(pool, "rollout-1", expected)
    served = {one.worker for one in await asyncio.gather(*start(pool.router, 6, 4))}
    assert served == ({"rollout-0", "rollout-1"} if expected == "up" else {"rollout-0"})


async def test_requests_of_a_worker_that_leaves_go_on_elsewhere_at_once_from_the_tokens_they_have() -> None:
    pool = await elastic_pool(1)
    running = start(pool.router, 6, 200)
    await asyncio.sleep(20 * TOKEN_S)
    assert [one.open for one in pool.handles] == [3, 3]
    await pool.controller.leave("rollout-1", "abort", 0.0)
    assert await pool.controller.states() == {"rollout-0": "up"}
    assert pool.handles[1].worker._life.engine is None
    results = await asyncio.gather(*running)
    assert {one.finish_reason for one in results} == {"length"}
    assert [len(one.response_ids) for one in results] == [200] * 6
    assert all(len(one.logprobs) == len(one.policy_versions) == 200 for one in results)
    rest = [len(asked.token_ids) - 3 for asked in pool.handles[0].worker.asked if len(asked.token_ids) > 3]
    assert len(rest) == 3, "they went on from what they had"
    await pool.controller.leave("rollout-1", "abort", 0.0)


async def test_requests_of_a_worker_that_leaves_run_out_where_that_is_asked_for() -> None:
    pool = await elastic_pool(1)
    running = start(pool.router, 4, 100)
    await asyncio.sleep(10 * TOKEN_S)
    leaving = asyncio.create_task(pool.controller.leave("rollout-1", "wait", 20.0))
    await until(pool, "rollout-1", "draining")
    assert {one.worker for one in await asyncio.gather(*start(pool.router, 4, 4))} == {"rollout-0"}
    results = await asyncio.gather(*running)
    await leaving
    assert {one.worker for one in results} == {"rollout-0", "rollout-1"}
    assert {len(one.response_ids) for one in results} == {100}
    assert await pool.controller.states() == {"rollout-0": "up"}


@pytest.mark.parametrize("how", ["deadline", "pause", "swap"])
async def test_the_wait_of_a_worker_that_leaves_ends_with_its_deadline_or_the_next_sync(how: str) -> None:
    pool = await elastic_pool(1)
    running = start(pool.router, 4, 4000)
    await asyncio.sleep(10 * TOKEN_S)
    leaving = asyncio.create_task(
        pool.controller.leave("rollout-1", "wait", 0.1 if how == "deadline" else 100.0)
    )
    if how != "deadline":
        await until(pool, "rollout-1", "draining")
    if how == "pause":
        await pool.pause()
    elif how == "swap":
        await pool.swap(2)
    if how != "deadline":
        assert pool.handles[1].open == 0
    await leaving
    assert await pool.controller.states() == {"rollout-0": "up"}
    await pool.pause()
    assert {one.finish_reason for one in await asyncio.gather(*running)} == {"abort"}
    assert pool.world.wrong == []


async def test_worker_that_leaves_while_its_engine_starts_is_not_waited_for_by_anybody() -> None:
    pool = await elastic_pool(1)
    first = pool.handles[0]
    first.die()
    first.restart()
    built, build = asyncio.Event(), first.worker._build

    async def slowly() -> None:
        await built.wait()
        await build()

    first.worker._build = slowly  # type: ignore[method-assign]
    await pool.controller.report("rollout-0", 0, "RayActorError")
    await until(pool, "rollout-0", "starting")
    while not first.worker._control.locked():
        await asyncio.sleep(TOKEN_S)
    async with asyncio.timeout(30):
        await pool.controller.leave("rollout-0", "wait", 60.0)
        await pool.pause()
    assert await pool.controller.states() == {"rollout-1": "up"}
    built.set()
    await pool.serve(2)
    assert (await pool.router.generate(request())).policy_versions.tolist() == [2] * 4
    assert pool.world.wrong == []


async def test_answer_of_a_worker_that_was_given_up_is_counted_and_never_used() -> None:
    pool = await elastic_pool(1)
    running = start(pool.router, 2, 50)
    await asyncio.sleep(5 * TOKEN_S)
    pool.handles[0].delay_s = 1.0  # it is out of the controller's reach, and generates on
    await pool.controller.report("rollout-0", 0, "RayActorError")
    results = await asyncio.gather(*running)
    assert {one.worker for one in results} == {"rollout-1"}
    async with asyncio.timeout(60):
        while not pool.controller.late_results:
            await asyncio.sleep(TOKEN_S)
    assert pool.controller.late_results == 1


async def test_pool_that_was_left_by_all_waits_for_the_next_to_join() -> None:
    pool = await elastic_pool(1, count=1)
    await pool.controller.leave("rollout-0", "abort", 0.0)
    with pytest.raises(NoWorkersError, match="waited 0 s for a rollout worker"):
        await pool.new_router(timeout_s=0.05).generate(request())
    waiting = start(pool.router, 2, 4)
    new_worker(pool)
    await pool.controller.join("rollout-1")
    assert {one.worker for one in await asyncio.gather(*waiting)} == {"rollout-1"}


async def test_controller_that_dies_finds_those_that_joined_and_not_those_that_left() -> None:
    run = Run()
    pool = run.pool
    asking = await run.begin()
    find_all(pool)
    new_worker(pool)
    await pool.controller.join("rollout-2")
    await until(pool, "rollout-2", "up")
    await pool.controller.leave("rollout-0", "abort", 0.0)
    gone = pool.handles.pop(0)

    def successor(deaths: int) -> Any:
        made = type(pool).new_controller(pool, deaths)
        made._kin = lambda _: {"rollout-1": True, "rollout-2": True}
        made._find = {one.name: one for one in pool.handles}.__getitem__
        return made

    pool.new_controller = successor  # type: ignore[method-assign,assignment]
    gone.die()
    await run.kill()
    assert await run.controller.states() == {"rollout-1": "up", "rollout-2": "up"}
    await run.pause("abort")
    assert [handle.open for handle in pool.handles] == [0, 0]
    await run.load(2)
    await run.resume(2)
    await run.until_served(2)
    run.ended = True
    await asyncio.gather(*asking)
    assert pool.world.wrong == []


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_joins_leaves_and_dies_every_token_is_of_the_version_that_the_pool_serves(
    seed: int,
) -> None:
    rng = random.Random(seed)
    pool = await elastic_pool(1)
    results: list[GenerateResult] = []
    ended = False

    async def ask() -> None:
        router = rng.choice([pool.router, pool.deaf])
        while not ended:
            results.append(await router.generate(request("r", rng.randrange(1, 40))))
            await asyncio.sleep(0)

    asking = [asyncio.create_task(ask()) for _ in range(8)]
    for version in range(2, 12):
        await asyncio.sleep(rng.random() * 0.05)
        states = await pool.controller.states()
        event = rng.choice(["join", "leave", "death"])
        leaving = None
        if event == "join" or len(states) < 2:
            await pool.controller.join(new_worker(pool).name)
        elif event == "leave":
            drain: Drain = rng.choice(("abort", "wait"))
            leaving = asyncio.create_task(pool.controller.leave(rng.choice([*states]), drain, 0.05))
        else:
            name = rng.choice([*states])
            victim = next(one for one in pool.handles if one.name == name)
            victim.die()
            asyncio.get_running_loop().call_later(rng.random() * 0.05, victim.restart)
        await asyncio.sleep(rng.random() * 0.02)
        if rng.random() < 0.5:
            await pool.swap(version)
        else:
            await pool.pause(rng.choice(("abort", "keep", "wait")))
            await pool.serve(version)
        if leaving is not None:
            await leaving
    ended = True
    await asyncio.gather(*asking)
    await pool.until_up()
    assert pool.world.wrong == []
    assert len(results) > 20 and {one.finish_reason for one in results} <= {"length", "abort"}


def test_a_request_that_moved_asks_for_the_rest_and_gives_all_of_it() -> None:
    asked = request("r", 10)
    first = GenerateResult(
        response_ids=np.array([7, 8], np.int32), logprobs=np.array([-1, -2], np.float32),
        policy_versions=np.array([1, 1], np.int32), finish_reason="abort", worker="a",
    )  # fmt: skip
    rest = rest_of(asked, first)
    assert rest.token_ids.tolist() == [0, 1, 2, 7, 8] and rest.sample_params.max_tokens == 8
    assert asked.token_ids.tolist() == [0, 1, 2]
    whole = joined(first, first)
    assert whole.response_ids.tolist() == [7, 8, 7, 8] and whole.policy_versions.tolist() == [1] * 4
    assert whole.response_ids.dtype == np.int32 and whole.logprobs.dtype == np.float32


async def test_turns_of_a_trajectory_go_to_the_worker_that_has_its_prefix_unless_it_has_too_much_to_do() -> (
    None
):
    pool = await elastic_pool(1)
    homes = {
        sample: {(await pool.router.generate(request(f"t/7/{sample}/{turn}"))).worker for turn in range(5)}
        for sample in range(4)
    }
    assert {len(workers) for workers in homes.values()} == {1}
    assert {worker for workers in homes.values() for worker in workers} == {"rollout-0", "rollout-1"}
    own = start(pool.router, 12, 200)
    others = [asyncio.create_task(pool.router.generate(request(f"t/7/0/x{n}", 200))) for n in range(20)]
    answers = await asyncio.gather(*own, *others)
    numbers = Counter(answer.worker for answer in answers)
    assert min(numbers.values()) >= len(answers) / 4, "its home alone was not given all of them"


class Owner:
    """Makes workers as the launcher does, and takes note of what the keeper tells."""

    def __init__(self, pool: Pool) -> None:
        self.pool, self.ended, self.slots = pool, list[str](), list[int]()
        self.told: list[tuple[str, dict[str, Any]]] = []

    def add_worker(self, number: int, pool: str) -> str:
        assert number == len(self.pool.handles)
        return new_worker(self.pool).name

    async def start_worker(self, name: str, timeout_s: float) -> None:
        await next(one for one in self.pool.handles if one.name == name).start.remote()

    def end_worker(self, name: str) -> None:
        assert name not in {worker.name for worker in self.pool.controller._workers}
        self.ended.append(name)
        next(one for one in self.pool.handles if one.name == name).die()

    async def resize(self, num_slots: int) -> None:
        self.slots.append(num_slots)

    async def tell(self, incident: str, **fields: Any) -> None:
        self.told.append((incident, fields))

    def draining(self) -> set[str]:
        return set()

    def shortage(self, names: Any, pool: str) -> str:
        return ""


async def test_what_is_asked_for_while_a_run_goes_on_is_what_serves_and_no_request_is_lost(
    tmp_path: Path,
) -> None:
    pool = await elastic_pool(1, count=1)
    owner = Owner(pool)
    cfg = make_config(name="mine", runs_dir=str(tmp_path), rollout__num_workers=1)
    keeper = PoolKeeper(cfg, owner, pool.controller, owner, PoolLoad(), owner.tell, cast(Any, owner))
    ended, results = False, list[GenerateResult]()

    async def ask() -> None:
        while not ended:
            results.append(await pool.router.generate(request("r", 40)))

    def leaving(keeper: PoolKeeper) -> bool:
        return any(one.leaving for one in keeper._pools.values())

    async def until_there(names: set[str]) -> None:
        async with asyncio.timeout(60):
            while await pool.controller.states() != dict.fromkeys(names, "up") or leaving(keeper):
                await keeper.look()
                await asyncio.sleep(TOKEN_S)

    asking = [asyncio.create_task(ask()) for _ in range(6)]
    for version, size in enumerate([3, 1, 2], start=2):
        write_json(cfg.run_dir / SCALE, {"workers": {"": size}})
        names = {
            "rollout-0",
            *(["rollout-1", "rollout-2"] if size == 3 else ["rollout-3"] if size == 2 else []),
        }
        await until_there(names)
        await pool.swap(version)
        served = {one.worker for one in await asyncio.gather(*start(pool.router, 9, 4))}
        assert served <= names and served >= names - {"rollout-0"}
    await keeper.look()
    ended = True
    await asyncio.gather(*asking)
    assert {one.finish_reason for one in results} == {"length"}
    assert {len(one.response_ids) for one in results} == {40}
    assert pool.world.wrong == [] and sorted(owner.ended) == ["rollout-1", "rollout-2"]
    assert owner.slots[-1] == 2 * 64
    joined_ = [fields["actor"] for incident, fields in owner.told if incident == "worker_joined"]
    assert sorted(joined_) == ["rollout-1", "rollout-2", "rollout-3"]
