"""RolloutWorker: one vLLM engine that serves only the weights it was told to serve.

Owns the order of pause, sleep, load and resume; how an engine starts and ends is EngineLife's, how it is stopped
is EngineGate's, and what it holds EngineWeights'. Owns no routing and no retries: those are the pool's.

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
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import ray

from actors.engine.life import EngineInfo, EngineLife
from actors.many_calls import CallBatches
from actors.rollout.gate import EngineGate
from actors.rollout.loads import Room
from actors.rollout.routing import most_tokens
from actors.rollout.status import Held, WorkerStatus
from actors.rollout.weights import EngineWeights
from raypost.config.engine import EngineConfig
from raypost.errors import RaypostError, WaitTimeoutError, WeightError
from raypost.observe.spans import Span
from raypost.types import (
    NO_VERSION,
    FloatArray,
    GenerateRequest,
    GenerateResult,
    IntArray,
    WeightReport,
    WorkerStats,
)
from raypost.types.pause import PauseDeadlines, PauseMode
from raypost.weights.manifest import Bytes, Manifest
from raypost.weights.seats import Seats

if TYPE_CHECKING:
    from actors.rollout.vllm_engine import RolloutEngine

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
        self._weights = EngineWeights(name, self._life)
        self._control = asyncio.Lock()
        self._staging = asyncio.Lock()
        """Taken after the other one. Staging takes only this one, so that no pause waits for it."""
        self._gate = EngineGate(name, PauseDeadlines(engine.rollout.pause_timeout_s), self._life)
        self._received: tuple[int, int, tuple[str, int]] | None = None
        """Version, epoch and group of what a group brought last."""
        self._generated_tokens = 0
        self._answered = 0

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
            return replace(self._life.info, room=self._room)

    @property
    def _room(self) -> Room | None:
        engine = self._life.engine
        return None if engine is None else Room(self._config.rollout.max_num_seqs, engine.cache_tokens)

    def _make_engine(self) -> RolloutEngine:
        # vLLM reads the environment when it is imported.
        from actors.rollout.vllm_engine import RolloutEngine

        return RolloutEngine(self._model_path, self._config)

    async def _build(self) -> None:
        await self._life.build()
        self._weights.broken = None
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
        self._weights.forget()
        self._life.discard()

    # ---------------------------------------------------------------- generation

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Continue `request.token_ids`. Ended by a pause: "abort" with the tokens so far; none if it came then.

        A request that cannot be run is an "error" result without tokens. Cancelling the call aborts it. Raises
        EngineLostError before `start`.
        """
        engine = self._weights.engine
        if not self._gate.is_open:
            return GenerateResult.nothing("abort", self._name)
        problem = self._problem(request, engine.vocab_size)
        if problem is not None:
            return GenerateResult.nothing("error", self._name, problem)
        ticket = self._gate.requests.enter(request.request_id, most_tokens(request))
        try:
            result = await self._life.alive(engine.generate(request))
        finally:
            self._gate.requests.leave(ticket)
        self._generated_tokens += len(result.response_ids)
        self._answered += len(result.response_ids) > 0
        return replace(result, worker=self._name, left=self._gate.requests.work)

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
            begin = time.monotonic()
            await self._gate.stop(engine)
            self._weights.pause_s = time.monotonic() - begin

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
                    f"{self._name} is serving version {self._weights.version}: pause it before it sleeps"
                )
            if len(self._gate.requests):
                raise RaypostError(
                    f"{self._name} has {self._gate.requests}, frozen by a pause: pause it with 'abort' before it sleeps"
                )
            if self._weights.broken is not None:
                return await self._end()
            await self._weights.sleep(keep_weights)

    async def resume(self, version: int) -> None:
        """Serve `version`: engine first, gate last. Frozen requests go on, and an engine that sleeps wakes.

        Raises StaleWeightsError if the engine itself says it holds another, or none since it gave up its weights when
        it fell asleep, and WeightError if it is half loaded.
        """
        async with self._control:
            begin = time.monotonic()
            await self._weights.check_holds(version)
            await self._serve(begin)

    async def _serve(self, begin: float) -> None:
        """Go on with what the engine said it holds."""
        await self._weights.wake()
        self._gate.stopped = False
        await self._life.alive(self._weights.usable.resume())
        self._gate.open()
        self._weights.resume_s = time.monotonic() - begin

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
            await self._serve(time.monotonic())
            return replace(report, resume_s=self._weights.resume_s)

    async def stage_weights(self, manifest: Manifest, *buckets: Bytes) -> None:
        """Bring a version into the engine's processes and verify it there, so that loading it takes less time.

        The engine may serve meanwhile. Nothing to do without a whole engine, or for a version that is held. Raises
        WeightError naming the tensor for bytes that differ from what was published.
        """
        async with self._staging:
            await self._weights.stage(manifest, buckets)

    async def receive_weights(self, manifest: Manifest, seats: Seats) -> None:
        """As `stage_weights`, by a group of this pool's engines and the trainer's rank 0, which sends meanwhile.

        A worker without a seat, since it came later, does nothing. What it received it does not wait for again: it is
        sent once. Raises WeightError for whatever fails.
        """
        if self._name in dict(seats.workers):
            async with self._staging:
                what = (manifest.version, manifest.epoch, seats.meeting)
                if what != self._received:
                    await self._weights.receive(manifest, seats)
                self._received = what

    async def seat(self) -> tuple[str, int]:
        """Return the address of this node, and how many processes have a part of the model."""
        return ray.util.get_node_ip_address(), self._config.rollout.tensor_parallel_size

    async def load_weights(self, manifest: Manifest, *buckets: Bytes) -> WeightReport:
        """Load a version into the paused engine; return what the engine then says it holds.

        Frozen requests stay, and after `resume` their whole prefix runs through the new weights first. Of an engine
        that sleeps, the memory of the weights wakes. What `stage_weights` did not do is done first; without buckets
        that is a NotStagedError, which changes nothing. The version already held is acknowledged without loading, also
        by an engine that serves. An engine left half loaded is replaced first, and what was frozen in it comes back as
        from an abort. Raises StaleWeightsError for an older
        version, WeightError naming the tensor for bytes that differ from what was published; then the old version
        stays, unless the engine broke, which `resume` refuses.
        """
        async with self._control, self._staging:
            serving = self._life.engine is not None and not self._gate.stopped
            now = self._weights
            if serving and (manifest.version != now.version or manifest.epoch > now.epoch):
                raise WeightError(f"{self._name} is serving version {now.version}: pause it before loading")
            return await self._hold(manifest, buckets)

    async def _hold(self, manifest: Manifest, buckets: Sequence[Bytes]) -> WeightReport:
        """Load a version, unless it is held already."""
        if self._life.engine is None or self._weights.broken is not None:
            log.warning("%s builds its engine anew: %s", self._name, self._weights.broken or "it has none")
            await self._end()
            await self._build()
        return await self._weights.hold(manifest, buckets)

    async def held(self) -> WeightReport:
        """Return what the engine says it holds; version -1 for nothing."""
        async with self._control:
            return await self._weights.report()

    async def canary(self, prompt_ids: IntArray) -> FloatArray:
        """Return the logprob of every prompt token but the first under the weights held now, also while paused.

        A paused engine runs for it, before all other requests; those that "keep" froze take part in these steps.
        """
        async with self._control:
            engine = self._weights.usable
            self._weights.check_awake()
            if not self._gate.stopped:
                return await self._life.alive(engine.prompt_logprobs(prompt_ids))
            frozen = len(self._gate.requests) > 0
            await self._weights.wake()
            self._gate.stopped = False
            try:
                return await self._life.alive(engine.prompt_logprobs(prompt_ids, resume=True))
            finally:
                # Keys and values made just now are of the weights held now: they may stay.
                await self._life.alive(engine.pause("keep" if frozen else "abort", clear_cache=not frozen))
                self._gate.stopped = True

    # ---------------------------------------------------------------- what can be seen

    async def ping(self) -> int:
        """Return this process's number once the engine has answered; it ends if that takes `liveness_timeout_s`.

        What pauses, loads or starts it has a deadline of its own, and an engine that sleeps is not asked.
        """
        engine = self._life.engine
        if engine is not None and not engine.asleep and not self._control.locked():
            limit_s = self._config.rollout.liveness_timeout_s
            await self._life.answers(engine.held, limit_s, excused=self._control.locked)
        return os.getpid()

    async def status(self) -> WorkerStatus:
        """Return what this worker is, once what it was told before is done."""
        if self._life.engine is None:
            return WorkerStatus(has_engine=False)
        async with self._control:
            engine = self._life.engine
            held = None
            if self._weights.version != NO_VERSION and self._weights.broken is None:
                report = await self._weights.report()
                held = Held(report.version, report.digest, self._weights.epoch)
            return WorkerStatus(
                has_engine=engine is not None,
                is_whole=self._weights.broken is None,
                serving=self._gate.is_open,
                mode=None if self._gate.is_open else self._gate.mode,
                held=held,
                asleep=bool(engine.asleep),
                room=self._room,
            )

    async def stats(self) -> WorkerStats:
        """Return the counters since this worker was made."""
        return WorkerStats(
            worker=self._name,
            version=self._weights.version,
            running=self._gate.requests.running,
            generated_tokens=self._generated_tokens,
            answered=self._answered,
            request_s=self._gate.requests.request_s,
        )

    async def drain_spans(self) -> list[Span]:
        """Return the intervals in which the engine worked on requests, since the last call."""
        return self._gate.requests.drain_spans()
