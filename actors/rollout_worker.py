"""RolloutWorker: one vLLM engine that serves only the weights it was told to serve.

Owns the gate in front of the engine, the order of pause, load and resume, and the end of this process when
the engine dies. Owns no routing and no retries: those are the pool's.

    start -> load_weights -> resume -> generate ... -> pause -> load_weights -> resume -> generate ...

    pause      requests in the engine                       requests that come while paused
    abort      end now, with the tokens they have           "abort" without tokens, in every mode: the pool
    keep       freeze in it; go on after `resume`           has paused too, and whoever sent them sends them
    wait       run to their end, else are aborted           again after `resume`

Invariants: no request reaches the engine while the gate is closed; the gate opens only when the engine itself
says that it holds the version; after `pause` the engine generates nothing, and unless it was "keep" no request
is in it; a pause is never softened before `resume`; an engine left half loaded never serves and is built anew
by the next load.

Every method runs on the actor's one event loop: an actor with concurrency groups would have one loop a
group, and an engine belongs to one loop. placement.MAX_CONCURRENCY keeps control calls from queueing behind
generations.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from actors.remote import CallBatches
from raypost.config import PauseMode
from raypost.engine_config import QUIET, EngineConfig
from raypost.errors import EngineLostError, RaypostError, StaleWeightsError, WaitTimeoutError, WeightError
from raypost.open_requests import OpenRequests
from raypost.pause import PauseDeadlines, stricter
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

__all__ = ["EngineConfig", "RolloutWorker"]

T = TypeVar("T")
log = logging.getLogger(__name__)

ABORT_AGAIN_S = 0.2


class RolloutWorker(CallBatches):
    """One engine behind a gate. Every method is idempotent."""

    def __init__(self, name: str, model_path: str, engine: EngineConfig, worker_index: int) -> None:
        """`model_path` is a folder with a config.json; weights in it are not read. Workers differ in seed."""
        super().__init__()
        self._name, self._model_path, self._config = name, model_path, engine
        self._seed = engine.seed + worker_index
        self._engine: Engine | None = None
        self._info: dict[str, Any] = {}
        self._broken: str | None = None
        self._open = False
        self._control = asyncio.Lock()
        self._deadlines = PauseDeadlines(engine.pause_timeout_s)
        self._mode: PauseMode | None = None
        """Of the pause in force or under way."""
        self._stopped = False
        """Whether the engine confirmed that it is paused."""
        self._running_out: asyncio.Task[bool] | None = None
        self._requests = OpenRequests()
        self._watched: list[int] = []
        self._version = NO_VERSION
        self._generated_tokens = 0
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
        os.environ.update(QUIET | os.environ | self._config.environment())
        begin = time.monotonic()
        try:
            await asyncio.to_thread(self._make_engine)
            assert self._engine is not None, "made just now"
            pids = await self._engine.prepare()
            self._watch(pids)
            await self._engine.warm_up()
            await self._engine.pause("abort")
            self._stopped = True
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
            await self._give_back()
            await self._discard()

    async def _give_back(self) -> None:
        """End what is open in an engine that is given up; one that does not answer takes it along."""
        if self._engine is not None and len(self._requests):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._deadlines.worker_s):
                    await self._abort(self._engine)

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
        """Continue `request.token_ids`. Ended by a pause: "abort" with the tokens so far; none if it came then.

        A request that cannot be run is an "error" result without tokens. Cancelling the call aborts it. Raises
        EngineLostError before `start`.
        """
        engine = self._usable()
        if not self._open:
            return GenerateResult.nothing("abort", self._name)
        problem = self._problem(request, engine.vocab_size)
        if problem is not None:
            return GenerateResult.nothing("error", self._name, problem)
        ticket = self._requests.enter(request.request_id)
        try:
            result = await self._alive(engine.generate(request))
        finally:
            self._requests.leave(ticket)
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

    async def _alive(self, call: Awaitable[T]) -> T:
        """Await a call to the engine; end this process if the engine turns out to be dead."""
        from actors.vllm_engine import EngineDeadError

        try:
            return await call
        except EngineDeadError as error:
            self._die(f"its engine is dead: {error}")

    # ---------------------------------------------------------------- pause, weights, resume

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Close the gate, then stop the engine as `mode` says; the module tells what becomes of requests.

        abort and wait return when no request is left, keep when the engine has stopped and every token it made
        carries its version. A stricter mode (wait < keep < abort) overrules the pause in force, one under way
        included; a gentler one changes nothing. "wait" says what still runs after half of `pause_timeout_s`,
        and aborts it. Raises WaitTimeoutError if that does not end it either; the gate stays closed.
        """
        self._open = False
        self._overrule(mode)
        async with self._control:
            # A resume that was under way when the gate closed has opened it again.
            self._open = False
            self._overrule(mode)
            if self._engine is None:
                return
            try:
                async with asyncio.timeout(self._deadlines.worker_s):
                    await self._stop(self._engine)
            except TimeoutError as error:
                waited = f"{self._name} waited {self._deadlines.worker_s:.0f} s to end {self._requests}"
                raise WaitTimeoutError(waited) from error

    def _overrule(self, mode: PauseMode) -> None:
        """Let `mode` decide, unless what is in force is stricter."""
        before, self._mode = self._mode, stricter(self._mode, mode)
        if self._mode != before and self._running_out is not None:
            self._running_out.cancel()

    async def _stop(self, engine: Engine) -> None:
        if self._mode == "wait":
            await self._run_out()
        if self._mode == "keep":
            await self._alive(engine.pause("keep"))
            self._requests.freeze()
        else:
            await self._abort(engine)
        self._stopped = True

    async def _run_out(self) -> None:
        """Let requests end until none is left, a stricter pause overrules this one, or time is up.

        The engine itself is not told to wait: that would leave those which still queue in it where they are.
        """
        self._running_out = asyncio.create_task(self._requests.idle.wait(), name=f"{self._name} runs out")
        try:
            await asyncio.wait([self._running_out], timeout=self._deadlines.run_out_s)
        finally:
            self._running_out.cancel()
            self._running_out = None
        if self._mode == "wait" and len(self._requests):
            waited_s = self._deadlines.run_out_s
            log.warning(
                "%s waited %.0f s and aborts what still runs, %s", self._name, waited_s, self._requests
            )
            self._mode = "abort"

    async def _abort(self, engine: Engine) -> None:
        while True:
            await self._alive(engine.pause("abort"))
            self._requests.thaw()
            try:
                # A request that passed the gate just before it closed may reach the engine behind the abort,
                # where it queues until the engine resumes: abort again.
                await asyncio.wait_for(self._requests.idle.wait(), ABORT_AGAIN_S)
                return
            except TimeoutError:
                log.warning("%s aborts again: a paused engine still has %s", self._name, self._requests)

    async def resume(self, version: int) -> None:
        """Serve `version`: engine first, gate last. Frozen requests go on.

        Raises StaleWeightsError if the engine itself says it holds another, WeightError if it is half loaded.
        """
        async with self._control:
            engine = self._usable()
            held, _, _ = await self._alive(engine.held())
            if held != version:
                raise StaleWeightsError(
                    f"{self._name} holds version {held} and was asked to serve {version}: load it"
                )
            self._stopped = False
            await self._alive(engine.resume())
            self._mode = None
            self._requests.thaw()
            self._open = True

    async def load_weights(self, manifest: Manifest, *buckets: Bytes) -> WeightReport:
        """Bring a version into the paused engine; what the engine then says it holds.

        Frozen requests stay, and after `resume` their whole prefix runs through the new weights first. The
        version already held is acknowledged without loading. An engine left half loaded is built anew first,
        and what was frozen in it comes back as from an abort. Raises StaleWeightsError for an older version,
        WeightError naming the tensor for bytes that are not what was published; the old weights then stay,
        unless the engine broke, which `resume` refuses.
        """
        async with self._control:
            if self._engine is not None and not self._stopped:
                raise WeightError(f"{self._name} is serving version {self._version}: pause it before loading")
            if self._engine is None or self._broken is not None:
                log.warning("%s builds its engine anew: %s", self._name, self._broken or "it was shut down")
                await self._give_back()
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
        """Logprob of every prompt token but the first under the weights held now, also while paused.

        A paused engine runs for it, ahead of all others; what "keep" froze in it takes these steps too.
        """
        async with self._control:
            engine = self._usable()
            if not self._stopped:
                return await self._alive(engine.prompt_logprobs(prompt_ids))
            frozen = len(self._requests) > 0
            self._stopped = False
            try:
                return await self._alive(engine.prompt_logprobs(prompt_ids, resume=True))
            finally:
                # Keys and values made just now are of the weights held now: they may stay.
                await self._alive(engine.pause("keep" if frozen else "abort", clear_cache=not frozen))
                self._stopped = True

    def _usable(self) -> Engine:
        if self._engine is None:
            raise EngineLostError(f"{self._name} has no engine: start it first")
        if self._broken is not None:
            raise WeightError(f"{self._name} is half loaded: {self._broken}; load a version again")
        return self._engine

    # ---------------------------------------------------------------- what can be seen

    async def stats(self) -> WorkerStats:
        """Counters since this worker was made."""
        return WorkerStats(
            worker=self._name,
            version=self._version,
            running=self._requests.running,
            generated_tokens=self._generated_tokens,
            busy_s=self._requests.busy_s,
            uptime_s=time.monotonic() - self._started_at,
        )

    async def ping(self) -> str:
        """The worker's name. Ends this process if the engine is dead."""
        if self._engine is not None and self._engine.is_dead:
            self._die("its engine is dead")
        return self._name
