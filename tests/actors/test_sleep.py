"""When engines may sleep, what wakes them, and what they hold then, without Ray and vLLM: the real rollout worker over
a scripted engine, and the real pool over scripted workers in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
from ray.exceptions import RayActorError

from actors.rollout.controller import RolloutController
from actors.rollout.routing import Router
from actors.rollout.weights import Says
from actors.rollout.worker import RolloutWorker
from raypost.config import RolloutConfig
from raypost.config.engine import EngineConfig
from raypost.errors import EngineLostError, RaypostError, StaleWeightsError, WaitTimeoutError, WeightError
from raypost.types import GenerateRequest, GenerateResult, SampleParams
from raypost.weights.manifest import Bytes, Manifest, pack
from tests.actors.scripted import ScriptedWorker
from tests.factories import make_config

CONFIG = EngineConfig(
    device="cpu",
    dtype="float32",
    max_model_len=64,
    seed=0,
    sleep_mode=False,
    rollout=RolloutConfig(pause_timeout_s=4.0),
)
BOTH = {"weights", "kv_cache"}


class ScriptedEngine:
    """Stands for vLLM's, and fails where a GPU would: whatever uses memory must find it awake."""

    vocab_size = 50
    cache_tokens = 0
    is_dead = False

    def __init__(self) -> None:
        self.sleeping: set[str] = set()
        self.woken: list[str] = []
        self.fails: str | None = None
        self.ended = False
        self.loaded: tuple[int, str, bool] = (-1, "", False)
        self.goes_on = asyncio.Event()
        self.aborted = False

    @property
    def asleep(self) -> bool:
        return bool(self.sleeping)

    async def process_ids(self) -> list[int]:
        return []

    async def warm_up(self) -> None:
        pass

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """One token at the end of time, unless it is aborted."""
        self.aborted = False
        await self.goes_on.wait()
        assert not self.sleeping, "the engine generates with memory that it gave away"
        if self.aborted:
            return GenerateResult.nothing("abort")
        return GenerateResult(
            response_ids=np.ones(1, np.int32),
            logprobs=np.zeros(1, np.float32),
            policy_versions=np.full(1, self.loaded[0], np.int32),
            finish_reason="length",
            worker="",
        )

    async def prompt_logprobs(self, prompt_ids: np.ndarray, resume: bool = False) -> np.ndarray:
        assert not self.sleeping, "the canary runs in memory that was given away"
        return np.full(len(prompt_ids) - 1, self.loaded[0], np.float32)

    async def pause(self, mode: str, clear_cache: bool = True) -> None:
        assert not self.sleeping, "what sleeps was stopped before"
        if mode == "abort":
            self.aborted = True
            self.goes_on.set()
            await asyncio.sleep(0)
        self.goes_on.clear()

    async def resume(self) -> None:
        assert not self.sleeping, "the engine resumes with memory that it gave away"
        self.goes_on.set()

    async def sleep(self, keep_weights: bool) -> None:
        if self.fails == "sleep":
            raise RuntimeError("no main memory is left")
        if not keep_weights:
            self.loaded = (-1, "", False)
        self.sleeping = set(BOTH)

    async def wake(self, *memory: str) -> None:
        if self.fails == "wake":
            raise RuntimeError("the device is full")
        woken = self.sleeping & set(memory or BOTH)
        self.woken += sorted(woken, reverse=True)
        self.sleeping -= woken

    async def stage(self, manifest: Manifest, buckets: Sequence[Bytes]) -> None:
        """Nothing has to be brought anywhere."""

    async def load(self, manifest: Manifest) -> tuple[None, Says]:
        assert "weights" not in self.sleeping, "weights are loaded into memory that was given away"
        if self.fails == "load":
            raise RuntimeError("these bytes are not what was sent")
        self.loaded = (manifest.version, manifest.digest, False)
        return None, self.loaded

    async def held(self) -> Says:
        return self.loaded

    def shutdown(self) -> None:
        self.ended = True


class Worker(RolloutWorker):
    """The rollout worker with such an engine."""

    def _make_engine(self) -> Any:
        return ScriptedEngine()

    @property
    def engine(self) -> Any:
        return self._life.engine


def published(version: int) -> tuple[Manifest, list[Bytes]]:
    return pack(version, [("w", np.full(8, version, np.uint8), "float32", (2,))], 1 << 20)


def request(name: str = "r") -> GenerateRequest:
    ids = np.arange(3, dtype=np.int32)
    return GenerateRequest(request_id=name, token_ids=ids, sample_params=SampleParams(max_tokens=1))


async def paused_at(version: int) -> Worker:
    """A worker that served the version and is paused."""
    worker = Worker("rollout-0", "", CONFIG, 0)
    await worker.start()
    await load(worker, version)
    await worker.resume(version)
    assert (await worker.generate(request())).policy_versions.tolist() == [version]
    await worker.pause()
    return worker


async def load(worker: Worker, version: int) -> None:
    manifest, buckets = published(version)
    report = await worker.load_weights(manifest, *buckets)
    assert (report.version, report.digest) == (version, manifest.digest)


async def test_a_load_wakes_the_weights_and_resume_the_rest() -> None:
    worker = await paused_at(1)
    await worker.sleep(keep_weights=False)
    assert worker.engine.sleeping == BOTH
    await load(worker, 2)
    assert worker.engine.sleeping == {"kv_cache"}
    await worker.resume(2)
    assert worker.engine.woken == ["weights", "kv_cache"]
    assert (await worker.generate(request())).policy_versions.tolist() == [2]


async def test_the_canary_wakes_what_a_load_left_asleep_and_the_gate_stays_closed() -> None:
    worker = await paused_at(1)
    await worker.sleep(keep_weights=False)
    await load(worker, 2)
    assert (await worker.canary(np.arange(3))).tolist() == [2, 2]
    assert not worker.engine.sleeping
    assert (await worker.generate(request())).finish_reason == "abort"
    await worker.resume(2)
    assert (await worker.generate(request())).policy_versions.tolist() == [2]


async def test_weights_that_were_kept_serve_again_without_a_load() -> None:
    worker = await paused_at(1)
    await worker.sleep(keep_weights=True)
    assert (await worker.held()).version == 1
    await load(worker, 1)
    assert worker.engine.sleeping == BOTH, "the version held is acknowledged, not loaded"
    await worker.resume(1)
    assert (await worker.generate(request())).policy_versions.tolist() == [1]


async def test_a_newer_version_replaces_weights_that_were_kept() -> None:
    worker = await paused_at(1)
    await worker.sleep(keep_weights=True)
    await load(worker, 2)
    with pytest.raises(StaleWeightsError, match="holds version 2 and was asked to serve 1"):
        await worker.resume(1)
    await worker.resume(2)
    assert (await worker.generate(request())).policy_versions.tolist() == [2]


async def test_weights_that_were_given_up_are_no_version_until_one_is_loaded() -> None:
    worker = await paused_at(5)
    await worker.sleep(keep_weights=False)
    assert (await worker.held()).version == (await worker.stats()).version == -1
    with pytest.raises(StaleWeightsError, match="holds version -1 and was asked to serve 5"):
        await worker.resume(5)
    with pytest.raises(StaleWeightsError, match="gave up its weights when it fell asleep"):
        await worker.canary(np.arange(3))
    assert worker.engine.sleeping == BOTH, "nothing that is refused wakes it"
    await load(worker, 5)
    await worker.resume(5)
    assert (await worker.generate(request())).policy_versions.tolist() == [5]


async def test_asleep_it_serves_nothing_and_a_pause_finds_nothing_to_stop() -> None:
    worker = await paused_at(1)
    await worker.sleep(keep_weights=True)
    result = await worker.generate(request())
    assert (result.finish_reason, len(result.response_ids)) == ("abort", 0)
    await asyncio.wait_for(worker.pause("abort"), 60)
    assert worker.engine.sleeping == BOTH


async def test_sleep_may_be_repeated_and_the_weights_given_up_later() -> None:
    worker = await paused_at(1)
    await worker.sleep(keep_weights=True)
    await worker.sleep(keep_weights=True)
    assert (await worker.held()).version == 1
    await worker.sleep(keep_weights=False)
    await worker.sleep(keep_weights=True)
    assert (await worker.held()).version == -1
    await load(worker, 2)
    await worker.sleep(keep_weights=False)
    assert (worker.engine.sleeping, (await worker.held()).version) == (BOTH, -1)
    await load(worker, 3)
    await worker.resume(3)
    await worker.resume(3)
    assert (await worker.generate(request())).policy_versions.tolist() == [3]


async def test_an_engine_that_serves_or_holds_frozen_requests_does_not_sleep() -> None:
    worker = await paused_at(1)
    await worker.resume(1)
    with pytest.raises(RaypostError, match="is serving version 1: pause it before it sleeps"):
        await worker.sleep(keep_weights=True)
    await worker.pause()
    await worker.resume(1)
    worker.engine.goes_on.clear()
    frozen = asyncio.create_task(worker.generate(request("long")))
    await asyncio.sleep(0)
    await worker.pause("keep")
    with pytest.raises(RaypostError, match="1 requests: long, frozen by a pause"):
        await worker.sleep(keep_weights=True)
    assert not worker.engine.sleeping
    await worker.pause("abort")
    assert (await frozen).finish_reason == "abort"
    await worker.sleep(keep_weights=True)
    assert worker.engine.sleeping == BOTH


async def test_a_worker_without_an_engine_has_nothing_to_give_away_and_comes_up_awake() -> None:
    worker = Worker("rollout-0", "", CONFIG, 0)
    await worker.sleep(keep_weights=False)
    with pytest.raises(EngineLostError):
        await worker.resume(1)
    await load(worker, 1)
    assert not worker.engine.sleeping
    await worker.resume(1)


@pytest.mark.parametrize("fails", ["sleep", "wake"])
async def test_an_engine_that_cannot_sleep_or_wake_is_built_anew_by_the_next_load(fails: str) -> None:
    worker = await paused_at(1)
    first = worker.engine
    if fails == "sleep":
        first.fails = fails
        with pytest.raises(WeightError, match="falling asleep failed: no main memory"):
            await worker.sleep(keep_weights=True)
    else:
        await worker.sleep(keep_weights=True)
        first.fails = fails
        with pytest.raises(WeightError, match="waking failed: the device is full; the next load builds"):
            await worker.resume(1)
    with pytest.raises(WeightError, match="half loaded"):
        await worker.resume(1)
    await load(worker, 2)
    assert first.ended and worker.engine is not first
    await worker.resume(2)
    assert (await worker.generate(request())).policy_versions.tolist() == [2]


async def test_a_broken_engine_that_is_to_sleep_ends_and_gives_everything_back() -> None:
    worker = await paused_at(1)
    first = worker.engine
    first.fails = "sleep"
    with pytest.raises(WeightError):
        await worker.sleep(keep_weights=True)
    await worker.sleep(keep_weights=True)
    assert first.ended and worker.engine is None


async def test_a_load_that_fails_after_the_weights_were_given_up_leaves_no_version() -> None:
    worker = await paused_at(1)
    await worker.sleep(keep_weights=False)
    worker.engine.fails = "load"
    with pytest.raises(WeightError, match="not what was sent; it holds no version"):
        await load(worker, 2)
    worker.engine.fails = None
    await load(worker, 2)
    await worker.resume(2)


@pytest.mark.parametrize(
    ("placement", "device", "frees"),
    [
        ("colocate", "cuda", True),
        ("colocate", "cpu", False),
        ("separate", "cuda", False),
        ("separate", "cpu", False),
    ],
)
def test_memory_is_freed_by_sleep_where_engines_and_ranks_share_gpus(
    placement: str, device: str, frees: bool
) -> None:
    config = make_config(placement=placement, device=device)
    assert EngineConfig.of(config).sleep_mode is frees


# ---------------------------------------------------------------- the pool


class Handle:
    """A scripted worker in this process, called as an actor is."""

    def __init__(self, name: str) -> None:
        self.name, self.start_s, self.is_dead = name, 0.0, False
        self.worker = ScriptedWorker(name)

    def __getattr__(self, method: str) -> Any:
        async def call(*args: Any) -> Any:
            if self.is_dead:
                raise RayActorError
            return await getattr(self.worker, method)(*args)

        class Method:
            remote = staticmethod(lambda *args: asyncio.ensure_future(call(*args)))

        return Method

    def restart(self, start_s: float = 0.0) -> None:
        """As Ray does: a worker that knows nothing takes the place of the dead one."""
        self.is_dead, self.worker = False, ScriptedWorker(self.name, start_s=start_s)


class Pool:
    """A started controller over two of them."""

    def __init__(self, start_timeout_s: float = 20.0) -> None:
        self.workers = {name: Handle(name) for name in ("rollout-0", "rollout-1")}
        rollout = RolloutConfig(num_workers=2, start_timeout_s=start_timeout_s)
        names = {name: name for name in self.workers}
        self.controller = RolloutController(names, rollout, 20.0, None, cast(Any, self.workers.__getitem__))
        self.router = Router(self.controller, 20.0)

    async def serve(self, version: int) -> None:
        await self.controller.load_weights(*published(version))  # type: ignore[arg-type]  # values are their own refs
        await self.controller.resume(version)

    @property
    def sleeping(self) -> list[str | None]:
        return [handle.worker.sleeping for handle in self.workers.values()]

    @property
    def versions(self) -> list[int | None]:
        return [handle.worker.version for handle in self.workers.values()]

    async def assert_serves(self, version: int) -> None:
        served = await asyncio.gather(*(self.router.generate(request(f"r{n}")) for n in range(4)))
        assert {one.worker for one in served} == set(self.workers)
        assert {int(token) for one in served for token in one.policy_versions} == {version}

    async def until_up(self) -> None:
        async with asyncio.timeout(60):
            while set((await self.controller.states()).values()) != {"up"}:
                await asyncio.sleep(0.01)


async def pool_paused_at(version: int) -> Pool:
    pool = Pool()
    await pool.controller.start()
    await pool.serve(version)
    await pool.controller.pause()
    return pool


async def test_the_pool_wakes_with_a_load_and_a_resume() -> None:
    pool = await pool_paused_at(1)
    await pool.controller.sleep(keep_weights=False)
    await pool.controller.sleep(keep_weights=False)
    assert (pool.sleeping, pool.versions) == (["all"] * 2, [None] * 2)
    assert (await pool.router.generate(request())).finish_reason == "abort"
    with pytest.raises(RaypostError, match="the pool sleeps and others use its devices"):
        await pool.controller.canary(np.arange(3, dtype=np.int32))
    with pytest.raises(StaleWeightsError, match="cannot serve version 2: the pool holds 1"):
        await pool.controller.resume(2)
    assert pool.sleeping == ["all"] * 2
    await pool.controller.load_weights(*published(2))  # type: ignore[arg-type]  # values are their own refs
    assert pool.sleeping == ["kv_cache"] * 2
    assert len(await pool.controller.canary(np.arange(3, dtype=np.int32))) == 2
    await pool.controller.resume(2)
    assert pool.sleeping == [None] * 2
    await pool.assert_serves(2)


@pytest.mark.parametrize("keep_weights", [True, False])
async def test_the_pool_serves_its_version_again_without_a_new_one(keep_weights: bool) -> None:
    pool = await pool_paused_at(1)
    await pool.controller.sleep(keep_weights)
    assert pool.versions == ([1] * 2 if keep_weights else [None] * 2)
    await pool.controller.resume(1)
    await pool.assert_serves(1)


async def test_a_pool_sleeps_before_its_first_version_and_only_when_nothing_is_in_its_engines() -> None:
    pool = Pool()
    await pool.controller.start()
    await pool.controller.sleep(keep_weights=False)
    assert pool.sleeping == ["all"] * 2
    await pool.serve(0)
    with pytest.raises(RaypostError, match="the pool is serving version 0: pause it"):
        await pool.controller.sleep(keep_weights=True)
    await pool.controller.pause("keep")
    with pytest.raises(RaypostError, match="paused with 'keep': pause it with 'abort'"):
        await pool.controller.sleep(keep_weights=True)
    assert pool.sleeping == [None] * 2
    await pool.controller.resume(0)
    await pool.assert_serves(0)


@pytest.mark.parametrize("keep_weights", [True, False])
async def test_no_engine_starts_on_a_device_that_others_use(keep_weights: bool) -> None:
    pool = await pool_paused_at(1)
    victim = pool.workers["rollout-0"]
    victim.is_dead = True
    await pool.controller.sleep(keep_weights)
    victim.restart()
    await asyncio.sleep(0.1)
    assert not victim.worker.started
    await pool.controller.resume(1)
    await pool.until_up()
    assert (victim.worker.sleeping, victim.worker.version) == (None, 1)
    await pool.assert_serves(1)


@pytest.mark.parametrize("keep_weights", [True, False])
async def test_sleep_waits_for_a_worker_on_its_way_back_and_that_sleeps_too(keep_weights: bool) -> None:
    pool = await pool_paused_at(1)
    victim = pool.workers["rollout-0"]
    victim.restart(start_s=0.3)
    await pool.controller.report(victim.name, 0, "EngineLostError")
    await asyncio.sleep(0.05)
    asleep = asyncio.create_task(pool.controller.sleep(keep_weights))
    await asyncio.sleep(0.1)
    assert not asleep.done() and not victim.worker.started
    await asyncio.wait_for(asleep, 60)
    assert (pool.sleeping, victim.worker.version) == (["all"] * 2, 1 if keep_weights else None)
    await pool.controller.resume(1)
    await pool.assert_serves(1)


async def test_a_worker_that_lost_its_engine_unnoticed_wakes_with_the_pool() -> None:
    pool = await pool_paused_at(1)
    pool.workers["rollout-0"].restart()
    await pool.controller.sleep(keep_weights=True)
    assert pool.sleeping == [None, "all"]
    await pool.controller.resume(1)
    await pool.assert_serves(1)


async def test_a_worker_that_does_not_come_back_in_time_is_named() -> None:
    pool = Pool(start_timeout_s=0.2)
    await pool.controller.start()
    pool.controller._workers[0].starting = True
    with pytest.raises(WaitTimeoutError, match="for rollout-0 to come back before the pool sleeps"):
        await pool.controller.sleep(keep_weights=True)
