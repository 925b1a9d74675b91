"""What a large rollout pool costs its controller: routing, pause and swap by the number of workers.

    python -m bench.pool --workers 4 16 64 --rounds 15 --in-flight 1000
    python -m bench.pool --local        all in one process, without Ray: what is raypost's own

Workers are scripted, without engines, and share a few processes: what is measured is the controller, the routers and
the calls between them; the object store, engines and weights take no part. The last line is one JSON object.

    route_us         a request of 1 token through a router, all asked at once, microseconds each
    pause_ms         pause and resume of the whole pool without a request, median
    swap_ms          stage and swap of a version, median
    *_ms_a_worker    the same by worker: flat if the fan-out is
    loaded_pause_s   pause while 16 workers have `in_flight` requests each, to the last answer
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import ray
from ray.actor import ActorHandle

from actors.engine.life import EngineInfo
from actors.many_calls import CallBatches
from actors.placement import spawn
from actors.remote import remote
from actors.rollout.controller import RolloutController
from actors.rollout.routing import Router, router_to
from raypost.config import RolloutConfig
from raypost.types import (
    GenerateRequest,
    GenerateResult,
    RolloutPool,
    SampleParams,
    SwapControl,
    WeightReport,
)
from raypost.weights.manifest import Manifest, pack

PROCESSES = 4
LOADED_WORKERS = 16
TIMEOUT_S = 120.0


class Scripted(CallBatches):
    """One worker: answers a request of one token at once, and a longer one when it is paused."""

    def __init__(self, name: str) -> None:
        """Serve nothing yet."""
        super().__init__()
        self._name = name
        self._version = -1
        self._serving = asyncio.Event()
        self._stopped = asyncio.Event()
        self._open = 0
        self._idle = asyncio.Event()

    async def start(self) -> EngineInfo:
        """There is no engine."""
        return EngineInfo(os.getpid(), [])

    async def ping(self) -> None:
        """Answer."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Return a token, or nothing after the next pause."""
        if self._stopped.is_set():
            return GenerateResult.nothing("abort", self._name)
        if request.sample_params.max_tokens > 1:
            self._open += 1
            self._idle.clear()
            await self._stopped.wait()
            self._open -= 1
            if not self._open:
                self._idle.set()
            return GenerateResult.nothing("abort", self._name)
        return GenerateResult(
            response_ids=np.ones(1, np.int32),
            logprobs=np.zeros(1, np.float32),
            policy_versions=np.full(1, self._version, np.int32),
            finish_reason="length",
            worker=self._name,
        )

    async def opened(self) -> int:
        """Return how many requests are open."""
        return self._open

    async def pause(self, mode: str) -> str:
        """End what is open."""
        self._stopped.set()
        if self._open:
            await self._idle.wait()
        return mode

    async def resume(self, version: int) -> None:
        """Serve."""
        self._stopped.clear()

    async def stage_weights(self, manifest: Manifest, *buckets: Any) -> None:
        """Nothing has to be brought anywhere."""

    async def load_weights(self, manifest: Manifest, *buckets: Any) -> WeightReport:
        """Take a version."""
        self._version = manifest.version
        return WeightReport(version=manifest.version, digest=manifest.digest, worker=self._name)

    async def swap(self, manifest: Manifest, *buckets: Any) -> WeightReport:
        """Pause, load, resume."""
        await self.pause("keep")
        report = await self.load_weights(manifest)
        await self.resume(manifest.version)
        return report


class Host:
    """A process with some of the workers."""

    def __init__(self, names: list[str]) -> None:
        """Host these."""
        self._workers = {name: Scripted(name) for name in names}

    async def on(self, name: str, method: str, *args: Any) -> Any:
        """Call a worker."""
        return await getattr(self._workers[name], method)(*args)


class Part:
    """A worker of a host as a handle of its own."""

    def __init__(self, host: ActorHandle, name: str) -> None:
        """Stand for `name`."""
        self._host = host
        self._name = name

    def __reduce__(self) -> tuple[type[Part], tuple[ActorHandle, str]]:
        """Travel as the arguments."""
        return Part, (self._host, self._name)

    def __getattr__(self, method: str) -> Any:
        """Return the method as Ray does."""
        if method.startswith("__"):
            raise AttributeError(method)
        return SimpleNamespace(remote=lambda *args: self._host.on.remote(self._name, method, *args))


class Local:
    """A worker of this process as a handle: what its calls cost Ray is left out."""

    def __init__(self, worker: Scripted) -> None:
        """Stand for `worker`."""
        self._worker = worker

    def __getattr__(self, method: str) -> Any:
        """Return the method as Ray does."""
        call = getattr(self._worker, method)
        return SimpleNamespace(remote=lambda *args: asyncio.ensure_future(call(*args)))


class Found:
    """Finds parts by name, also in the controller's process."""

    def __init__(self, parts: Mapping[str, Part | Local]) -> None:
        """Know these."""
        self._parts = parts

    def __call__(self, name: str) -> Any:
        """Return one."""
        return self._parts[name]


class Controlled(RolloutPool, SwapControl):
    """What is asked of the controller."""


def weights(version: int) -> tuple[Manifest, list[Any]]:
    """Return a version of a few bytes."""
    made, buckets = pack(version, [("w", np.full(8, version % 251, np.uint8), "float32", (2,))], 1 << 20)
    return made, [ray.put(bucket) if ray.is_initialized() else bucket for bucket in buckets]


def request(number: int, max_tokens: int) -> GenerateRequest:
    """Return a request of some tokens."""
    params = SampleParams(max_tokens=max_tokens)
    return GenerateRequest(
        request_id=f"r/{number}", token_ids=np.arange(8, dtype=np.int32), sample_params=params
    )


async def seconds(work: Callable[[], Awaitable[object]]) -> float:
    """Return how long it takes."""
    begin = time.perf_counter()
    await work()
    return time.perf_counter() - begin


class Pool:
    """A controller and its workers."""

    def __init__(self, count: int, local: bool) -> None:
        """Start them, in this process alone if `local`."""
        names = [f"rollout-{number}" for number in range(count)]
        members = {name: name for name in names}
        config = RolloutConfig(num_workers=count, liveness_timeout_s=3600)
        self._actors: list[ActorHandle] = []
        self.parts: dict[str, Any]
        self.control: Controlled
        if local:
            self.parts = {name: Local(Scripted(name)) for name in names}
            made = RolloutController(members, config, TIMEOUT_S, None, Found(self.parts), 0)
            self.control, self.router = cast(Controlled, made), Router(made, TIMEOUT_S)
            return
        hosts, controller = min(PROCESSES, count), f"controller-{count}"
        self._actors = [spawn(Host, names[n::hosts], name=f"host-{count}-{n}") for n in range(hosts)]
        self.parts = {name: Part(self._actors[n % hosts], name) for n, name in enumerate(names)}
        found = Found(self.parts)
        self._actors.append(
            spawn(RolloutController, members, config, TIMEOUT_S, None, found, name=controller)
        )
        self.control = remote([controller], Controlled, timeout_s=TIMEOUT_S)
        self.router = router_to(controller, TIMEOUT_S)

    async def serve(self, version: int) -> None:
        """Load a version and serve it."""
        await self.control.load_weights(*weights(version))
        await self.control.resume(version)

    def end(self) -> None:
        """End them."""
        for actor in self._actors:
            ray.kill(actor)


async def measured(count: int, rounds: int, requests: int, local: bool) -> dict[str, float]:
    """Return the figures of a pool of `count` workers."""
    pool = Pool(count, local)
    try:
        await pool.control.start()
        await pool.serve(1)
        await pool.router.generate(request(0, 1))

        async def route() -> None:
            await asyncio.gather(*(pool.router.generate(request(n, 1)) for n in range(requests)))

        async def pause() -> None:
            await pool.control.pause("abort")
            await pool.control.resume(1)

        await route()
        routes = [await seconds(route) for _ in range(max(3, rounds // 3))]
        pauses = [await seconds(pause) for _ in range(rounds)]
        swaps = []
        for version in range(2, 2 + rounds):
            given = weights(version)

            async def swap(version: int = version, given: Any = given) -> None:
                await pool.control.stage_weights(*given)
                await pool.control.swap(version)

            swaps.append(await seconds(swap))
    finally:
        pool.end()
    pause_ms, swap_ms = (1e3 * statistics.median(times) for times in (pauses, swaps))
    return {
        "route_us": 1e6 * statistics.median(routes) / requests,
        "pause_ms": pause_ms,
        "pause_ms_a_worker": pause_ms / count,
        "swap_ms": swap_ms,
        "swap_ms_a_worker": swap_ms / count,
    }


async def loaded(in_flight: int, local: bool) -> float:
    """Return the seconds of a pause with so many requests in flight in each of LOADED_WORKERS workers."""
    pool = Pool(LOADED_WORKERS, local)
    try:
        await pool.control.start()
        await pool.serve(1)
        open_ = [
            asyncio.create_task(pool.router.generate(request(n, 64)))
            for n in range(in_flight * LOADED_WORKERS)
        ]
        end = time.monotonic() + TIMEOUT_S
        while sum(await asyncio.gather(*(p.opened.remote() for p in pool.parts.values()))) < len(open_):
            assert time.monotonic() < end, "not all requests came to their workers"
            await asyncio.sleep(0.5)
        begin = time.perf_counter()
        await pool.control.pause("abort")
        took = time.perf_counter() - begin
        answers = await asyncio.gather(*open_)
        assert {answer.finish_reason for answer in answers} == {"abort"}
        return took
    finally:
        pool.end()


async def main(args: argparse.Namespace) -> None:
    """Measure and print."""
    found: dict[str, Any] = {"local": args.local}
    for count in args.workers:
        found[str(count)] = await measured(count, args.rounds, args.requests, args.local)
        print(f"{count} workers: {found[str(count)]}", flush=True)
    found["loaded_pause_s"] = await loaded(args.in_flight, args.local)
    print(json.dumps(found))


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    made.add_argument("--workers", type=int, nargs="+", default=[4, 16, 64])
    made.add_argument("--rounds", type=int, default=15)
    made.add_argument("--requests", type=int, default=1000)
    made.add_argument("--in-flight", type=int, default=1000)
    made.add_argument("--local", action="store_true", help="all in this process, without Ray")
    return made.parse_args()


if __name__ == "__main__":
    asked = arguments()
    if not asked.local:
        ray.init(
            address="local",
            include_dashboard=False,
            num_cpus=8,
            log_to_driver=False,
            _node_ip_address="127.0.0.1",
        )
    try:
        asyncio.run(main(asked))
    finally:
        ray.shutdown()
