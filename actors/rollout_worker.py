"""RolloutWorker: one vLLM engine that serves only the weights it was told to serve.

Owns the gate in front of the engine, the order of pause, load and resume, and the end of this process when
the engine dies. Owns no routing and no retries: those are the pool's.

    start -> load_weights -> resume -> generate ... -> pause -> load_weights -> resume -> generate ...

Invariants: no request reaches the engine while the gate is closed; the gate opens only when the engine itself
says that it holds the version; after `pause` no request is in the engine; an engine left half loaded never
serves and is built anew by the next load.

Every method runs on the actor's one event loop: an actor with concurrency groups would have one loop a
group, and an engine belongs to one loop. MAX_CONCURRENCY keeps control calls from queueing behind
generations.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

from raypost.config import Config
from raypost.errors import RaypostError, StaleWeightsError, WaitTimeoutError, WeightError
from raypost.types import (
    NO_VERSION,
    FloatArray,
    GenerateRequest,
    GenerateResult,
    IntArray,
    WeightReport,
    WorkerStats,
)
from raypost.weights import Bytes, Manifest

if TYPE_CHECKING:
    from actors.vllm_engine import Engine

T = TypeVar("T")
log = logging.getLogger(__name__)

MAX_CONCURRENCY = 100_000
"""`max_concurrency` of the actor: far above the requests a pool ever has open, so that no call waits."""

ABORT_AGAIN_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What one engine needs to know."""

    device: Literal["cpu", "cuda"]
    dtype: str
    max_model_len: int
    max_num_seqs: int = 64
    tensor_parallel_size: int = 1
    threads: int = 1
    kv_cache_gb: float = 1.0
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = True
    seed: int = 0
    pause_timeout_s: float = 60.0

    @classmethod
    def of(cls, config: Config) -> EngineConfig:
        """The engines' part of a run's configuration."""
        rollout = config.rollout
        return cls(
            device=config.device,
            dtype=config.model.dtype,
            max_model_len=config.max_model_len,
            max_num_seqs=rollout.max_num_seqs,
            tensor_parallel_size=rollout.tensor_parallel_size,
            threads=rollout.threads,
            kv_cache_gb=rollout.kv_cache_gb,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            enforce_eager=rollout.enforce_eager,
            seed=config.seed,
            pause_timeout_s=rollout.pause_timeout_s,
        )


class RolloutWorker:
    """One engine behind a gate. Every method is idempotent."""

    def __init__(self, name: str, model_path: str, engine: EngineConfig, worker_index: int) -> None:
        """`model_path` is a folder with a config.json; weights in it are not read. Workers differ in seed."""
        self._name, self._model_path, self._config = name, model_path, engine
        self._seed = engine.seed + worker_index
        self._engine: Engine | None = None
        self._info: dict[str, Any] = {}
        self._broken: str | None = None
        self._open = False
        self._control = asyncio.Lock()
        self._requests: dict[int, str] = {}
        self._num_requests = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._watched: list[int] = []
        self._version = NO_VERSION
        self._generated_tokens = 0
        self._busy_s = 0.0
        self._busy_since = 0.0
        self._started_at = time.monotonic()

    def __repr__(self) -> str:
        return self._name

    # ---------------------------------------------------------------- life

    async def start(self) -> dict[str, Any]:
        """Start the engine and warm it up; it serves nothing yet. {pid, engine_pids, init_s}.

        Raises RaypostError if the engine does not come up.
        """
        async with self._control:
            if self._engine is None:
                await self._build()
            return self._info

    async def _build(self) -> None:
        _set_environment(self._config)
        begin = time.monotonic()
        try:
            await asyncio.to_thread(self._make_engine)
            assert self._engine is not None, "made just now"
            pids = await self._engine.prepare()
            self._watch(pids)
            await self._engine.warm_up()
            await self._engine.pause("abort")
        except Exception as error:
            await self._discard()
            raise RaypostError(
                f"the engine of {self._name} did not start: {error} (its log says more)"
            ) from error
        self._broken = None
        self._info = {"pid": os.getpid(), "engine_pids": pids, "init_s": time.monotonic() - begin}

    def _make_engine(self) -> None:
        # vLLM reads the environment when it is imported.
        from actors.vllm_engine import Engine

        # Not returned: the thread would keep its result, and with it a discarded engine.
        self._engine = Engine(self._model_path, self._config, self._seed)

    def _watch(self, pids: list[int]) -> None:
        """End this process when one of the engine's ends: nothing else would be noticed while idle."""
        loop = asyncio.get_running_loop()
        for pid in pids:
            process = os.pidfd_open(pid)
            loop.add_reader(process, self._die, f"its engine process {pid} ended")
            self._watched.append(process)

    def _unwatch(self) -> None:
        loop = asyncio.get_running_loop()
        for process in self._watched:
            loop.remove_reader(process)
            os.close(process)
        self._watched.clear()

    def _die(self, reason: str) -> NoReturn:
        # An actor without its engine would stay alive and fail every call; only its end makes Ray restart it.
        log.critical("%s ends itself: %s", self._name, reason)
        logging.shutdown()
        os._exit(1)

    async def shutdown(self) -> None:
        """End the engine's processes. The actor itself is the caller's to end."""
        self._open = False
        async with self._control:
            await self._discard()

    async def _discard(self) -> None:
        self._open = False
        if self._engine is None:
            return
        self._unwatch()
        engine, self._engine, self._version = self._engine, None, NO_VERSION
        # On this loop: one that ran meanwhile would report a dead engine.
        engine.shutdown()

    # ---------------------------------------------------------------- generation

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Continue `request.token_ids`. Gate closed, now or before the end: "abort" with the tokens so far.

        A request that cannot be run is an "error" result without tokens. Cancelling the call aborts it.
        """
        engine = self._engine
        if not self._open or engine is None:
            return GenerateResult.nothing("abort", self._name)
        problem = self._problem(request, engine.vocab_size)
        if problem is not None:
            return GenerateResult.nothing("error", self._name, problem)
        ticket = self._enter(request.request_id)
        try:
            result = await self._alive(engine.generate(request))
        finally:
            self._leave(ticket)
        self._generated_tokens += len(result.response_ids)
        return replace(result, worker=self._name)

    def _problem(self, request: GenerateRequest, vocab_size: int) -> str | None:
        """What would end the engine, or cut the response short in silence."""
        ids, wanted, bound = request.token_ids, request.sample_params.max_tokens, self._config.max_model_len
        asked = f"{request.request_id}: {len(ids)} tokens given and {wanted} wanted"
        if len(ids) < 1 or wanted < 1:
            return f"{asked}; both must be at least 1"
        if len(ids) + wanted > bound:
            return f"{asked} exceed max_model_len {bound}"
        if ids.min() < 0 or ids.max() >= vocab_size:
            return f"{asked}, but ids {ids.min()} to {ids.max()} exceed the vocabulary of {vocab_size}"
        return None

    def _enter(self, request_id: str) -> int:
        if not self._requests:
            self._busy_since = time.monotonic()
            self._idle.clear()
        self._num_requests += 1
        self._requests[self._num_requests] = request_id
        return self._num_requests

    def _leave(self, ticket: int) -> None:
        del self._requests[ticket]
        if not self._requests:
            self._busy_s += time.monotonic() - self._busy_since
            self._idle.set()

    async def _alive(self, call: Awaitable[T]) -> T:
        """Await a call to the engine; end this process if the engine turns out to be dead."""
        from actors.vllm_engine import EngineDeadError

        try:
            return await call
        except EngineDeadError as error:
            self._die(f"its engine is dead: {error}")

    # ---------------------------------------------------------------- pause, weights, resume

    async def pause(self, mode: Literal["abort", "wait"] = "abort") -> None:
        """Close the gate, then abort what runs ("wait": let it end). Returns when no request is left.

        Raises WaitTimeoutError past `pause_timeout_s`; the gate stays closed.
        """
        self._open = False
        async with self._control:
            # A resume that was under way when the gate closed has opened it again.
            self._open = False
            if self._engine is None:
                return
            try:
                await asyncio.wait_for(self._drain(self._engine, mode), self._config.pause_timeout_s)
            except TimeoutError as error:
                waiting = (
                    f"{len(self._requests)} requests to end: {', '.join(list(self._requests.values())[:5])}"
                )
                raise WaitTimeoutError(
                    f"{self._name} waited {self._config.pause_timeout_s:.0f} s for {waiting}"
                ) from error

    async def _drain(self, engine: Engine, mode: Literal["abort", "wait"]) -> None:
        while True:
            await self._alive(engine.pause(mode))
            try:
                # A request that passed the gate just before it closed may reach the engine behind the abort,
                # where it queues until the engine resumes: abort again.
                await asyncio.wait_for(self._idle.wait(), ABORT_AGAIN_S)
                return
            except TimeoutError:
                log.warning(
                    "%s aborts again: %d requests reached a paused engine", self._name, len(self._requests)
                )

    async def resume(self, version: int) -> None:
        """Serve `version`: engine first, gate last.

        Raises StaleWeightsError if the engine itself says it holds another, WeightError if it is half loaded.
        """
        async with self._control:
            engine = self._usable()
            held, _, _ = await self._alive(engine.held())
            if held != version:
                raise StaleWeightsError(
                    f"{self._name} holds version {held} and was asked to serve {version}: load it"
                )
            await self._alive(engine.resume())
            self._open = True

    async def load_weights(self, manifest: Manifest, *buckets: Bytes) -> WeightReport:
        """Bring a version into the paused engine; what the engine then says it holds.

        The version already held is acknowledged without loading. An engine left half loaded is built anew
        first. Raises StaleWeightsError for an older version, WeightError naming the tensor for bytes that are
        not what was published; the old weights then stay, unless the engine broke, which `resume` refuses.
        """
        async with self._control:
            if self._open:
                raise WeightError(f"{self._name} is serving version {self._version}: pause it before loading")
            if self._engine is None or self._broken is not None:
                log.warning("%s builds its engine anew: %s", self._name, self._broken or "it was shut down")
                await self._discard()
                await self._build()
            engine = self._usable()
            begin = time.monotonic()
            held, digest, _ = await self._alive(engine.held())
            if manifest.version < held:
                raise StaleWeightsError(
                    f"{self._name} holds version {held}: version {manifest.version} is older"
                )
            if manifest.version > held:
                await self._load(engine, manifest, buckets)
            elif digest != manifest.digest:
                raise WeightError(
                    f"{self._name} holds version {held} with digest {digest}, and was sent the same version "
                    f"with digest {manifest.digest}: publish changed weights as a new version"
                )
            return await self._report(engine, time.monotonic() - begin)

    async def _load(self, engine: Engine, manifest: Manifest, buckets: Sequence[Bytes]) -> None:
        # Holds for whatever ends this coroutine, a cancellation included.
        self._broken, self._version = f"loading version {manifest.version} was interrupted", NO_VERSION
        try:
            await self._alive(engine.load(manifest, buckets))
        except Exception as error:
            self._version, _, touched = await self._alive(engine.held())
            kept = (
                "its engine is half loaded and must be built anew"
                if touched
                else "its old weights are untouched"
            )
            self._broken = f"loading version {manifest.version} failed: {error}" if touched else None
            raise WeightError(
                f"{self._name} did not load version {manifest.version}: {error}; {kept}"
            ) from error
        self._broken, self._version = None, manifest.version

    async def held(self) -> WeightReport:
        """What the engine says it holds; version -1 for nothing."""
        async with self._control:
            return await self._report(self._usable(), 0.0)

    async def _report(self, engine: Engine, load_s: float) -> WeightReport:
        version, digest, _ = await self._alive(engine.held())
        return WeightReport(version=version, digest=digest, worker=self._name, load_s=load_s)

    async def canary(self, prompt_ids: IntArray) -> FloatArray:
        """Logprob of every prompt token but the first under the weights held now, also while paused."""
        async with self._control:
            engine = self._usable()
            if self._open:
                return await self._alive(engine.prompt_logprobs(prompt_ids))
            await self._alive(engine.resume())
            try:
                return await self._alive(engine.prompt_logprobs(prompt_ids))
            finally:
                await self._alive(engine.pause("abort"))

    def _usable(self) -> Engine:
        if self._engine is None:
            raise WeightError(f"{self._name} has no engine: start it first")
        if self._broken is not None:
            raise WeightError(f"{self._name} is half loaded: {self._broken}; load a version again")
        return self._engine

    # ---------------------------------------------------------------- what can be seen

    async def stats(self) -> WorkerStats:
        """Counters since this worker was made."""
        now = time.monotonic()
        return WorkerStats(
            worker=self._name,
            version=self._version,
            running=len(self._requests),
            generated_tokens=self._generated_tokens,
            busy_s=self._busy_s + (now - self._busy_since if self._requests else 0.0),
            uptime_s=now - self._started_at,
        )

    async def ping(self) -> str:
        """The worker's name. Ends this process if the engine is dead."""
        if self._engine is not None and self._engine.is_dead:
            self._die("its engine is dead")
        return self._name


def _set_environment(config: EngineConfig) -> None:
    """What vLLM takes from the environment alone, for this process and the engine's, which inherit it."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.update(VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
    if config.device == "cpu":
        # Unbound threads: bound ones of several workers, or of two runs on one machine, would share a core.
        os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS=str(config.threads))
        # With this alone a single rank runs inside the engine's process: half the start, one process less.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if config.tensor_parallel_size == 1 else "1"
