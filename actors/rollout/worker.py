"""RolloutWorker: one vLLM engine that serves only the weights it was told to serve.

Owns the order of pause, sleep, load and resume; how an engine starts and ends is EngineLife's, how it is stopped is
EngineGate's. Owns no routing and no retries: those are the pool's.

    start -> load_weights -> resume -> generate ... -> pause -> load_weights -> resume -> generate ...
                                                    -> swap (the same three, with "keep") -> generate ...
                                                    -> pause -> sleep -> load_weights -> resume -> ...

    pause      requests in the engine                       requests that come while paused
    abort      end now, with the tokens they have           "abort" without tokens, in every mode: the pool
    keep       freeze in it; go on after `resume`           has paused too, and the agent loop sends them
    wait       run to their end, else are aborted           again after `resume`

An engine that sleeps has given its device to others. There is no call that only wakes it: `load_weights` wakes the
memory of the weights, `resume` and `canary` all of it. On CPU the same rules hold, but no memory is freed.

Invariants: no request reaches the engine while the gate is closed; the gate opens only when the engine itself
says that it holds the version; after `pause` the engine generates nothing, and unless it was "keep" no request
is in it; a pause is never softened before `resume`; only a paused engine without requests sleeps, and one that
gave up its weights holds no version; an engine left half loaded never serves and is built anew by the next load.

Every method runs on the actor's one event loop: an actor with concurrency groups would have one loop a
group, and an engine belongs to one loop. placement.MAX_CONCURRENCY keeps control calls from queueing behind
generations.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from actors.engine.life import EngineInfo, EngineLife
from actors.remote import CallBatches
from actors.rollout.gate import EngineGate
from raypost.config.engine import EngineConfig
from raypost.errors import EngineLostError, RaypostError, StaleWeightsError, WaitTimeoutError, WeightError
from raypost.pause import PauseDeadlines, PauseMode
from raypost.types import (
    NO_VERSION,
    FloatArray,
    GenerateRequest,
    GenerateResult,
    IntArray,
    Span,
    WeightReport,
    WorkerStats,
)
from raypost.weights.manifest import Bytes, Manifest

if TYPE_CHECKING:
    from actors.rollout.vllm_engine import Memory, RolloutEngine

log = logging.getLogger(__name__)


class RolloutWorker(CallBatches):
    """One engine behind a gate. Every method is idempotent."""

    def __init__(self, name: str, model_path: str, engine: EngineConfig, worker_index: int) -> None:
        """`model_path` is a folder with a config.json; weights in it are not read. Workers differ in seed."""
        super().__init__()
        self._name = name
        self._model_path = model_path
        self._config = replace(engine, seed=engine.seed + worker_index)
        self._life = EngineLife(name, engine, self._make_engine)
        self._broken: str | None = None
        self._control = asyncio.Lock()
        self._staging = asyncio.Lock()
        """Taken after the other one. Staging takes only this one, so that no pause waits for it."""
        self._gate = EngineGate(name, PauseDeadlines(engine.rollout.pause_timeout_s), self._life)
        self._version = NO_VERSION
        self._load_s = 0.0
        """How long the last load took."""
        self._generated_tokens = 0

    def __repr__(self) -> str:
        """Return the actor's name."""
        return self._name

    # ---------------------------------------------------------------- life

    async def start(self) -> EngineInfo:
        """Start the engine and warm it up; it serves nothing yet. Raises RaypostError if it does not come up."""
        async with self._control:
            if self._life.engine is None:
                await self._build()
            assert self._life.info is not None, "an engine was built"
            return self._life.info

    def _make_engine(self) -> RolloutEngine:
        # vLLM reads the environment when it is imported.
        from actors.rollout.vllm_engine import RolloutEngine

        return RolloutEngine(self._model_path, self._config)

    async def _build(self) -> None:
        await self._life.build()
        self._broken = None
        self._gate.stopped = True

    async def shutdown(self) -> None:
        """End the engine's processes. The actor itself is ended by its owner."""
        self._gate.close("abort")
        async with self._control:
            await self._end()

    async def _end(self) -> None:
        """Give the engine up, if there is one, and end the requests in it; they are lost if it does not answer."""
        if self._life.engine is not None and len(self._gate.requests):
            with contextlib.suppress(WaitTimeoutError):
                self._gate.close("abort")
                await self._gate.stop(self._life.engine)
        self._gate.is_open = False
        self._version = NO_VERSION
        self._life.discard()

    # ---------------------------------------------------------------- generation

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Continue `request.token_ids`. Ended by a pause: "abort" with the tokens so far; none if it came then.

        A request that cannot be run is an "error" result without tokens. Cancelling the call aborts it. Raises
        EngineLostError before `start`.
        """
        engine = self._engine()
        if not self._gate.is_open:
            return GenerateResult.nothing("abort", self._name)
        problem = self._problem(request, engine.vocab_size)
        if problem is not None:
            return GenerateResult.nothing("error", self._name, problem)
        ticket = self._gate.requests.enter(request.request_id)
        try:
            result = await self._life.alive(engine.generate(request))
        finally:
            self._gate.requests.leave(ticket)
        self._generated_tokens += len(result.response_ids)
        return replace(result, worker=self._name)

    def _problem(self, request: GenerateRequest, vocab_size: int) -> str | None:
        """Return why the request would end the engine, or cut its response short without an error."""
        ids, wanted, bound = request.token_ids, request.sample_params.max_tokens, self._config.max_model_len
        asked = f"{request.request_id}: {len(ids)} tokens given and {wanted} wanted"
        if len(ids) < 1 or wanted < 1:
            return f"{asked}; both must be at least 1"
        if len(ids) + wanted > bound:
            return f"{asked} exceed max_model_len {bound}"
        if ids.min() < 0 or ids.max() >= vocab_size:
            return f"{asked}, but ids {ids.min()} to {ids.max()} exceed the vocabulary of {vocab_size}"
        return None

    # ---------------------------------------------------------------- pause, weights, resume

    async def pause(self, mode: PauseMode = "abort") -> PauseMode:
        """Close the gate, then stop the engine as `mode` says (see the module). Return the mode that is in force.

        abort and wait return when no request is left, keep when the engine has stopped and every token it made
        carries its version. A stricter mode (wait < keep < abort) overrules the pause in force, one under way
        included; a gentler one changes nothing. "wait" logs what still runs after half of `pause_timeout_s`,
        and aborts it. Raises WaitTimeoutError if that does not end it either; the gate stays closed.
        """
        self._gate.close(mode)
        async with self._control:
            # A resume that was under way when the gate closed has opened it again.
            self._gate.close(mode)
            await self._stop()
            return self._gate.mode

    async def _stop(self) -> None:
        engine = self._life.engine
        if engine is not None and not engine.asleep:
            await self._gate.stop(engine)

    async def sleep(self, keep_weights: bool) -> None:
        """Give the engine's device to others until a later call wakes it. Idempotent; nothing to do without an engine.

        Keys and values are dropped; the weights are kept in main memory, or dropped and their version forgotten. An
        engine that is half loaded ends instead: the next load builds a new one. Raises RaypostError unless the engine
        is paused without a request in it.
        """
        async with self._control:
            engine = self._life.engine
            if engine is None:
                return
            if self._gate.is_open or not self._gate.stopped:
                raise RaypostError(
                    f"{self._name} is serving version {self._version}: pause it before it sleeps"
                )
            if len(self._gate.requests):
                raise RaypostError(
                    f"{self._name} has {self._gate.requests}, frozen by a pause: pause it with 'abort' before it sleeps"
                )
            if self._broken is not None:
                return await self._end()
            if not keep_weights:
                self._version = NO_VERSION
            with self._whole("falling asleep"):
                await self._life.alive(engine.sleep(keep_weights))

    @contextlib.contextmanager
    def _whole(self, doing: str) -> Iterator[None]:
        """Mark the engine as broken until the block has ended well; a cancellation leaves it broken too."""
        self._broken = f"{doing} was interrupted"
        try:
            yield
        except Exception as error:
            self._broken = f"{doing} failed: {error}"
            raise WeightError(
                f"{self._name}: {self._broken}; the next load builds its engine anew"
            ) from error
        self._broken = None

    async def resume(self, version: int) -> None:
        """Serve `version`: engine first, gate last. Frozen requests go on, and an engine that sleeps wakes.

        Raises StaleWeightsError if the engine itself says it holds another, or none since it gave up its weights when
        it fell asleep, and WeightError if it is half loaded.
        """
        async with self._control:
            await self._serve(version)

    async def _serve(self, version: int) -> None:
        engine = self._usable()
        held, _, _ = await self._life.alive(engine.held())
        if held != version:
            raise StaleWeightsError(
                f"{self._name} holds version {held} and was asked to serve {version}: load it"
            )
        await self._wake(engine)
        self._gate.stopped = False
        await self._life.alive(engine.resume())
        self._gate.open()

    async def swap(self, manifest: Manifest, *buckets: Bytes) -> WeightReport:
        """Pause with "keep", load a version and serve it, all in one call; return what the engine says it holds.

        A pause that comes meanwhile holds afterwards. Raises what `pause`, `load_weights` and `resume` raise, and
        WeightError if the engine holds something else than was sent; then the gate stays closed.
        """
        self._gate.close("keep")
        async with self._control, self._staging:
            self._gate.close("keep")
            await self._stop()
            report = await self._hold(manifest, buckets)
            if (report.version, report.digest) != (manifest.version, manifest.digest):
                raise WeightError(
                    f"{self._name} holds version {report.version} with digest {report.digest} instead of version "
                    f"{manifest.version} with digest {manifest.digest}"
                )
            await self._serve(manifest.version)
            return report

    async def _wake(self, engine: RolloutEngine, *memory: Memory) -> None:
        """Take memory back, all of it unless named, if any sleeps."""
        if engine.asleep:
            with self._whole("waking"):
                await self._life.alive(engine.wake(*memory))

    async def stage_weights(self, manifest: Manifest, *buckets: Bytes) -> None:
        """Bring a version into the engine's processes and verify it there, so that loading it takes less time.

        The engine may serve meanwhile. Nothing to do without a whole engine, or for a version that is held. Raises
        WeightError naming the tensor for bytes that differ from what was published.
        """
        async with self._staging:
            engine = self._life.engine
            if engine is None or self._broken is not None or manifest.version <= self._version:
                return
            try:
                await self._life.alive(engine.stage(manifest, buckets))
            except Exception as error:
                raise WeightError(
                    f"{self._name} did not stage version {manifest.version}: {error}"
                ) from error

    async def load_weights(self, manifest: Manifest, *buckets: Bytes) -> WeightReport:
        """Load a version into the paused engine; return what the engine then says it holds.

        Frozen requests stay, and after `resume` their whole prefix runs through the new weights first. Of an engine
        that sleeps, the memory of the weights wakes. What `stage_weights` did not do is done first. The version
        already held is acknowledged without loading, also by an engine that serves. An engine left half loaded
        is replaced first, and what was frozen in it comes back as from an abort. Raises StaleWeightsError for an older
        version, WeightError naming the tensor for bytes that differ from what was published; then the old version
        stays, unless the engine broke, which `resume` refuses.
        """
        async with self._control, self._staging:
            serving = self._life.engine is not None and not self._gate.stopped
            if serving and manifest.version != self._version:
                raise WeightError(f"{self._name} is serving version {self._version}: pause it before loading")
            return await self._hold(manifest, buckets)

    async def _hold(self, manifest: Manifest, buckets: Sequence[Bytes]) -> WeightReport:
        """Load a version, unless it is held already."""
        if self._life.engine is None or self._broken is not None:
            log.warning("%s builds its engine anew: %s", self._name, self._broken or "it has none")
            await self._end()
            await self._build()
        engine = self._usable()
        if manifest.version < self._version:
            raise StaleWeightsError(
                f"{self._name} holds version {self._version}: version {manifest.version} is older"
            )
        is_new = manifest.version > self._version
        if is_new:
            begin = time.monotonic()
            await self._load(engine, manifest, buckets)
            self._load_s = time.monotonic() - begin
        report = await self._report(engine)
        if not is_new and report.digest != manifest.digest:
            raise WeightError(
                f"{self._name} holds version {report.version} with digest {report.digest}, and was sent the same "
                f"version with digest {manifest.digest}: publish changed weights as a new version"
            )
        return report

    async def _load(self, engine: RolloutEngine, manifest: Manifest, buckets: Sequence[Bytes]) -> None:
        await self._wake(engine, "weights")
        try:
            await self._life.alive(engine.stage(manifest, buckets))
            # As in _whole; but an error that leaves the old weights untouched leaves the engine whole.
            self._broken = f"loading version {manifest.version} was interrupted"
            self._version = NO_VERSION
            await self._life.alive(engine.load(manifest))
        except Exception as error:
            self._version, _, touched = await self._life.alive(engine.held())
            kept = "its old weights are untouched" if self._version >= 0 else "it holds no version"
            if touched:
                kept = "its engine is half loaded and must be built anew"
            self._broken = f"loading version {manifest.version} failed: {error}" if touched else None
            raise WeightError(
                f"{self._name} did not load version {manifest.version}: {error}; {kept}"
            ) from error
        self._broken = None
        self._version = manifest.version

    async def held(self) -> WeightReport:
        """Return what the engine says it holds; version -1 for nothing."""
        async with self._control:
            return await self._report(self._usable())

    async def _report(self, engine: RolloutEngine) -> WeightReport:
        version, digest, _ = await self._life.alive(engine.held())
        return WeightReport(version=version, digest=digest, worker=self._name, load_s=self._load_s)

    async def canary(self, prompt_ids: IntArray) -> FloatArray:
        """Return the logprob of every prompt token but the first under the weights held now, also while paused.

        A paused engine runs for it, before all other requests; those that "keep" froze take part in these steps.
        """
        async with self._control:
            engine = self._usable()
            if engine.asleep and self._version == NO_VERSION:
                raise StaleWeightsError(
                    f"{self._name} gave up its weights when it fell asleep: load a version"
                )
            if not self._gate.stopped:
                return await self._life.alive(engine.prompt_logprobs(prompt_ids))
            frozen = len(self._gate.requests) > 0
            await self._wake(engine)
            self._gate.stopped = False
            try:
                return await self._life.alive(engine.prompt_logprobs(prompt_ids, resume=True))
            finally:
                # Keys and values made just now are of the weights held now: they may stay.
                await self._life.alive(engine.pause("keep" if frozen else "abort", clear_cache=not frozen))
                self._gate.stopped = True

    def _engine(self) -> RolloutEngine:
        if self._life.engine is None:
            raise EngineLostError(f"{self._name} has no engine: start it first")
        return self._life.engine

    def _usable(self) -> RolloutEngine:
        engine = self._engine()
        if self._broken is not None:
            raise WeightError(f"{self._name} is half loaded: {self._broken}; load a version again")
        return engine

    # ---------------------------------------------------------------- what can be seen

    async def ping(self) -> None:
        """Return once the engine has answered; this process ends if it does not within `liveness_timeout_s`.

        What pauses, loads or starts it has a deadline of its own, and an engine that sleeps is not asked.
        """
        engine = self._life.engine
        if engine is not None and not engine.asleep and not self._control.locked():
            limit_s = self._config.rollout.liveness_timeout_s
            await self._life.answers(engine.held, limit_s, excused=self._control.locked)

    async def stats(self) -> WorkerStats:
        """Return the counters since this worker was made."""
        return WorkerStats(
            worker=self._name,
            version=self._version,
            running=self._gate.requests.running,
            generated_tokens=self._generated_tokens,
        )

    async def drain_spans(self) -> list[Span]:
        """Return the intervals in which the engine worked on requests, since the last call."""
        return self._gate.requests.drain_spans()
