"""A rollout controller that dies and finds its pool again, without Ray and vLLM: the world of test_routing.py, with a
controller whose calls fail when it dies and are made again, as those of an actor that Ray starts again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from ray.exceptions import RayActorError

from actors.rollout.controller import RolloutController
from actors.rollout.rebuild import pool_of
from actors.rollout.routing import LIFE, Router
from actors.rollout.status import Held, WorkerStatus
from raypost.types import GenerateResult
from raypost.types.pause import PauseMode
from tests.actors.test_routing import TOKEN_S, Pool, refused, request, start, weights


class MortalController:
    """The controller behind a handle that makes a call again when it met a death."""

    def __init__(self, pool: Pool) -> None:
        self.pool, self.deaths = pool, 0
        self.died = asyncio.Event()
        self.calls: set[asyncio.Task[Any]] = set()

    @property
    def alive(self) -> RolloutController:
        return self.pool.controller

    def kill(self) -> None:
        """What it does ends half way, and its successor knows nothing."""
        dead = self.alive
        own = [one for worker in dead._workers for one in (worker.recovering, worker.closing)]
        for task in (*self.calls, *own, dead._watching):
            if task is not None:
                task.cancel()
        self.deaths += 1
        self.pool.controller = self.pool.new_controller(self.deaths)
        died, self.died = self.died, asyncio.Event()
        died.set()

    def __getattr__(self, method: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        async def call(*args: Any) -> Any:
            while True:
                try:
                    return await self.once(method, *args)
                except RayActorError:
                    await asyncio.sleep(TOKEN_S)

        return call

    async def once(self, method: str, *args: Any) -> Any:
        died = asyncio.create_task(self.died.wait())
        work = asyncio.create_task(getattr(self.alive, method)(*args))
        self.calls.add(work)
        work.add_done_callback(self.calls.discard)
        await asyncio.wait({died, work}, return_when=asyncio.FIRST_COMPLETED)
        if died.done():
            raise RayActorError
        died.cancel()
        return work.result()


class Run:
    """A pool whose controller dies, a broadcaster that gives it its weights again, and requests all the time."""

    def __init__(self) -> None:
        self.pool = Pool()
        self.controller = MortalController(self.pool)
        self.router = Router(self.controller, 20.0)
        self.out: int | None = None
        self.prepared: int | None = None
        self.results: list[GenerateResult] = []
        self.ended = False

    async def begin(self) -> list[asyncio.Task[None]]:
        await self.controller.start()
        self.engines = [handle.worker._life.engine for handle in self.pool.handles]
        await self.load(1)
        await self.resume(1)
        return [asyncio.create_task(self.ask()) for _ in range(4)]

    async def ask(self) -> None:
        while not self.ended:
            self.results.append(await self.router.generate(request("r", 20)))
            await asyncio.sleep(0)

    async def until_served(self, version: int) -> None:
        """Wait until somebody was answered by that version."""
        async with asyncio.timeout(60):
            while not any(version in result.policy_versions for result in self.results):
                await asyncio.sleep(TOKEN_S)
        self.results.clear()

    async def kill(self) -> None:
        self.controller.kill()
        for version in (self.out, self.prepared):
            if version is not None:
                await self.controller.restock(*weights(version))

    async def pause(self, mode: PauseMode) -> None:
        await self.controller.pause(mode)
        self.pool.world.versions = set()

    async def load(self, version: int) -> None:
        await self.controller.load_weights(*weights(version))
        self.out = version

    async def resume(self, version: int) -> None:
        self.pool.world.versions = {version}
        await self.controller.resume(version)

    async def prepare(self, version: int) -> None:
        self.prepared = version
        await self.controller.stage_weights(*weights(version))

    async def swap(self, version: int, wait_s: float = 0.0) -> None:
        self.pool.world.versions.add(version)
        await self.controller.swap(version, wait_s)
        self.pool.world.versions = {version}
        self.out = version

    async def swap_when_prepared(self, version: int) -> None:
        async def prepare() -> None:
            await asyncio.sleep(2 * TOKEN_S)
            await self.prepare(version)

        await asyncio.gather(self.swap(version, 20.0), prepare())


@pytest.mark.parametrize("ticks", [0, 1, 3, 6])
@pytest.mark.parametrize(
    "phase", ["serving", "abort", "keep", "wait", "paused", "load", "resume", "prepare", "swap", "waiting"]
)
async def test_controller_that_dies_in_any_phase_finds_its_workers_again_and_starts_no_engine(
    phase: str, ticks: int
) -> None:
    run = Run()
    asking = await run.begin()

    async def dies() -> None:
        await asyncio.sleep(ticks * TOKEN_S)
        await run.kill()

    async def meets_a_death(now: bool, call: Coroutine[Any, Any, None]) -> None:
        await asyncio.gather(call, *([dies()] if now else []))

    for version in range(2, 5):
        await run.until_served(version - 1)
        await meets_a_death(phase == "serving", asyncio.sleep(0))
        if phase == "waiting":
            await meets_a_death(True, run.swap_when_prepared(version))
            continue
        await meets_a_death(phase == "prepare", run.prepare(version))
        if phase == "swap":
            await meets_a_death(True, run.swap(version))
            continue
        mode: PauseMode = "keep" if phase == "keep" else "wait" if phase == "wait" else "abort"
        await meets_a_death(phase == mode, run.pause(mode))
        assert [handle.open for handle in run.pool.handles] == [0, 0] or mode == "keep"
        await meets_a_death(phase == "paused", asyncio.sleep(0))
        await meets_a_death(phase == "load", run.load(version))
        await meets_a_death(phase == "resume", run.resume(version))
    await run.until_served(4)
    run.ended = True
    await asyncio.gather(*asking)
    assert run.pool.world.wrong == []
    assert run.controller.deaths == 3
    assert [handle.worker._life.engine for handle in run.pool.handles] == run.engines
    fresh = await asyncio.gather(*start(run.router, 8, 4))
    assert {one.worker for one in fresh} == {"rollout-0", "rollout-1"}
    assert {int(v) for one in fresh for v in one.policy_versions} == {4}


@pytest.mark.parametrize("seed", range(6))
async def test_engines_and_controller_that_die_in_any_order_serve_again_with_what_is_out(seed: int) -> None:
    rng = random.Random(seed)
    run = Run()
    asking = await run.begin()
    for version in range(2, 9):
        await asyncio.sleep(rng.random() * 0.05)
        if rng.random() < 0.5:
            victim = rng.choice(run.pool.handles)
            victim.die()
            asyncio.get_running_loop().call_later(rng.random() * 0.05, victim.restart)
        killing = asyncio.create_task(run.kill()) if rng.random() < 0.7 else None
        await asyncio.sleep(rng.random() * 0.02)
        await run.pause(rng.choice(("abort", "keep")))
        await run.load(version)
        await run.resume(version)
        if killing is not None:
            await killing
    run.ended = True
    await asyncio.gather(*asking)
    await run.pool.until_up()
    fresh = await asyncio.gather(*start(run.router, 8, 4))
    assert {one.worker for one in fresh} == {"rollout-0", "rollout-1"}
    assert {int(v) for one in fresh for v in one.policy_versions} == {8}
    assert run.pool.world.wrong == []


async def test_pool_whose_engines_with_the_new_version_died_with_the_controller_loads_it_again() -> None:
    """One engine had loaded it and the other was on its way back, when the first and the controller died."""
    run = Run()
    asking = await run.begin()
    await run.pause("abort")
    late, loaded = run.pool.handles
    loaded_worker = await loaded.worker.load_weights(*weights(2))
    assert loaded_worker.version == 2
    run.out = 2
    loaded.die()
    run.controller.kill()
    assert await run.controller.states() == {"rollout-0": "up", "rollout-1": "down"}
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(run.controller.alive.resume(2), 0.05)
    resuming = asyncio.create_task(run.resume(2))
    await run.controller.restock(*weights(2))
    await asyncio.wait_for(resuming, 60)
    await run.until_served(2)
    loaded.restart()
    await run.pool.until_up()
    assert (await late.worker.held()).version == 2
    run.ended = True
    await asyncio.gather(*asking)
    assert run.pool.world.wrong == []


async def test_pool_that_lost_its_weights_with_all_who_had_them_serves_once_they_are_sent_again() -> None:
    run = Run()
    asking = await run.begin()
    for handle in run.pool.handles:
        handle.die()
    run.controller.kill()
    for handle in run.pool.handles:
        handle.restart()
    run.results.clear()
    assert await run.controller.holds() is None
    await run.controller.restock(*weights(1))
    await run.resume(1)
    await run.until_served(1)
    await run.pool.until_up()
    run.ended = True
    await asyncio.gather(*asking)
    assert run.pool.world.wrong == []


async def test_worker_that_comes_back_after_the_controller_did_waits_for_the_weights_that_it_lacks() -> None:
    run = Run()
    asking = await run.begin()
    run.controller.kill()
    run.pool.handles[0].die()
    run.pool.handles[0].restart()
    await asyncio.sleep(0.1)
    states = await run.controller.states()
    assert states == {"rollout-0": "catching up", "rollout-1": "up"}
    await run.controller.restock(*weights(1))
    await run.pool.until_up()
    run.ended = True
    await asyncio.gather(*asking)
    assert run.pool.world.wrong == []


async def test_epochs_and_incarnations_go_on_growing_so_that_news_of_the_dead_changes_nothing() -> None:
    run = Run()
    asking = await run.begin()
    before = await run.controller.routes(-1)
    await run.kill()
    after = await run.controller.routes(before.epoch)
    assert after.epoch > LIFE > before.epoch
    assert all(route.incarnation == LIFE for route in after.up) and len(after.up) == 2
    await run.controller.report("rollout-0", before.up[0].incarnation, "RayActorError")
    assert set((await run.controller.states()).values()) == {"up"}
    run.ended = True
    await asyncio.gather(*asking)


async def test_pool_that_was_asleep_stays_so_and_wakes_with_the_weights_that_it_is_given() -> None:
    run = Run()
    await run.controller.start()
    await run.load(1)
    engines: list[Any] = [handle.worker._life.engine for handle in run.pool.handles]
    for engine in engines:
        engine.asleep = True
    await run.kill()
    await run.controller.states()
    assert run.controller.alive._asleep
    for engine in engines:
        engine.asleep = False
    await run.resume(1)
    assert not refused(await run.router.generate(request()))


# ---------------------------------------------------------------- what the answers come to


def status(**fields: Any) -> WorkerStatus:
    version = fields.pop("version", 3)
    held = None if version is None else Held(version, f"digest {version}", 0)
    return WorkerStatus(**{"has_engine": True, "mode": "abort", "held": held, **fields})


SERVES = {"serving": True, "mode": None}


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([status(**SERVES), status(**SERVES)], ("ab", 3, False, None, False)),
        ([status(), status(mode="keep")], ("ab", 3, True, "keep", False)),
        ([status(), status(version=4)], ("ab", 3, True, "abort", False)),
        ([status(**SERVES), status(version=4, **SERVES)], ("ab", 3, False, None, False)),
        ([status(**SERVES), status()], ("a", 3, False, None, False)),
        ([status(**SERVES), None], ("a", 3, False, None, False)),
        ([status(), status(is_whole=False, version=None)], ("a", 3, True, "abort", False)),
        ([status(), status(version=None)], ("a", 3, True, "abort", False)),
        ([status(version=None), status(version=None)], ("ab", None, True, "abort", False)),
        ([status(version=None, asleep=True), status(version=None, asleep=True)], ("ab", None, True, "abort", True)),
        ([status(asleep=True), status()], ("ab", 3, True, "abort", True)),
        ([status(has_engine=False, version=None), None], ("", None, True, "abort", False)),
    ],
)  # fmt: skip
def test_what_a_pool_is_follows_from_what_its_workers_say(
    answers: list[WorkerStatus | None], expected: tuple[str, int | None, bool, PauseMode | None, bool]
) -> None:
    found = pool_of(dict(zip("ab", answers, strict=True)))
    version = None if found.held is None else found.held.version
    assert ("".join(sorted(found.up)), version, found.paused, found.mode, found.asleep) == expected
