"""RolloutController: the pool of rollout workers as one.

Owns the pause gate of the pool and what it holds; its workers, and those that die, are WorkerPool's (pool.py). Owns no
weights but the refs of the current version, kept so that a worker that comes back, or wakes without weights, can catch
up. Requests do not pass here: routers (routing.py) send them to the workers of the table, and report those found dead.

A controller that died is started again, by Ray, and asks its workers what they are before it answers its first call
(rebuild.py); their engines run on meanwhile, and so do their requests. Its refs of the weights died with it: `restock`
gives them back, and whatever needs them waits for it. Every call is idempotent and made again by whoever made it.

Invariants: an UP worker holds the pool's version, unless a swap is under way, or the pool sleeps, and then it sleeps
too; between `pause` and `resume` no worker generates, whatever the mode, not even one that was reported dead and is
alive; a request that comes is an "abort" without tokens, however old the table is by which it came, because every
worker's gate is closed; none generates with the old version once a swap has returned. Pause, sleep, resume, swap,
weight loads and a worker's return take one lock, so a worker that comes back in the middle of a sync cannot serve old
weights; it comes back paused, or serving, as the others do. A request that was frozen in a dead worker is an "abort"
without tokens too. Which pause overrules which is decided by the workers alone; the pool knows the mode in force from
their answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import ray
from ray.actor import ActorHandle

from actors.remote import Watched, deaths, within
from actors.rollout.member import PoolWorker, WorkerState
from actors.rollout.pool import WorkerPool
from actors.rollout.rebuild import ask_all, living_kin, once_known, pool_of
from actors.rollout.routing import LIFE
from actors.rollout.status import Held, SentWeights, Swapped
from raypost.config import RolloutConfig
from raypost.errors import NotStagedError, RaypostError, StaleWeightsError
from raypost.types import FloatArray, IntArray, PoolHolds, Ref, WeightReport
from raypost.types.pause import PauseMode
from raypost.weights.manifest import Bytes, Manifest
from raypost.weights.seats import Member, Seats

log = logging.getLogger(__name__)


class RolloutController(WorkerPool, Watched):
    """Says which workers serve, and keeps the pool on one version."""

    def __init__(
        self,
        workers: Mapping[str, str],
        rollout: RolloutConfig,
        sync_timeout_s: float,
        canary_tolerance: float | None = None,
        find: Callable[[str], ActorHandle] = ray.get_actor,
        incarnation: int | None = None,
        kin: Callable[[Collection[str]], Mapping[str, bool]] = living_kin,
    ) -> None:
        """`sync_timeout_s`: longest time all workers may take to load one version. The rest: see WorkerPool.

        `kin`: see living_kin, for a controller that was started again. `canary_tolerance`: of logprobs of a worker that
        comes in, beside those of the others.
        """
        super().__init__(workers, rollout, find, deaths() if incarnation is None else incarnation)
        self._kin = kin
        self._actors = tuple(workers.values())
        self._canary_tolerance = canary_tolerance
        self._canary: tuple[int | None, IntArray, FloatArray] | None = None
        """A version, a prompt, and the logprobs that the workers gave it."""
        self._sync_timeout_s = sync_timeout_s
        self._weights: SentWeights | None = None
        self._staged: SentWeights | None = None
        self._awaited: int | None = None
        """The version that a swap waits for; it is staged by the swap itself."""
        self._swapped = Swapped()
        self._held: Held | None = None
        """What the workers hold, while the controller that was started again lacks the weights."""
        self._pausing = False
        """Whether the lock is held by a pause."""

    def __repr__(self) -> str:
        """Return the role's name."""
        return "rollout-controller"

    @property
    def _version(self) -> int | None:
        held = self._holding
        return None if held is None else held.version

    @property
    def _staged_version(self) -> int | None:
        return None if self._staged is None else self._staged.manifest.version

    @property
    def _holding(self) -> Held | None:
        if self._weights is None:
            return self._held
        manifest = self._weights.manifest
        return Held(manifest.version, manifest.digest, manifest.epoch)

    # ---------------------------------------------------------------- started again

    async def _rebuild(self) -> None:
        known = {worker.name for worker in self._workers}
        waiting: list[PoolWorker] = []
        for name, has_process in self._kin(self._actors).items():
            if name not in known and (handle := self._found(name)) is not None:
                joined = PoolWorker(name, handle, incarnation=self._incarnation * LIFE)
                (self._workers if has_process else waiting).append(joined)
        statuses = await ask_all(self._workers, self._rollout.liveness_timeout_s)
        found = pool_of(statuses)
        self._paused, self._mode, self._asleep = found.paused, found.mode, found.asleep
        self._held = found.held
        for worker in self._workers:
            if worker.name in found.up:
                worker.found(statuses[worker.name])
            else:
                self._take_out(worker)
        for worker in waiting:
            await self._request(worker)
        log.warning("the controller is back and found its pool: %s", found)
        await self._notify()
        self._watch_workers()

    @once_known
    async def restock(self, manifest: Manifest, buckets: list[Ref[Bytes]]) -> None:
        """Take the weights of a version that is out, or prepared, in case this controller was started again.

        A pool that holds another one keeps it. Not behind the lock: what holds it may wait for them. Idempotent.
        """
        held = Held(manifest.version, manifest.digest, manifest.epoch)
        if self._weights is None and self._held in (None, held):
            self._weights = SentWeights(manifest, buckets)
            if self._held is None and not self._asleep:
                # All engines died with the controller, and those that are back already came back without weights.
                for worker in self._workers:
                    await self._lost(worker, "it holds no weights")
        elif self._version is not None and manifest.version > self._version:
            await self.stage_weights(manifest, buckets)
        await self._notify()

    async def _until_supplied(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._held is None or self._weights is not None)

    async def _until_staged(self, version: int, wait_s: float = 0.0) -> None:
        """Wait for a version that is on its way for `wait_s`, or, in a controller that was started again, `restock`."""
        limit_s = wait_s or (self._sync_timeout_s if self._incarnation else 0.0)
        if not limit_s:
            return
        async with self._changed:
            staged = self._changed.wait_for(lambda: version in (self._version, self._staged_version))
            self._awaited = version
            try:
                await within(staged, limit_s, f"version {version} to be staged")
            finally:
                self._awaited = None

    async def _stage(self, staged: SentWeights) -> None:
        async with self._changed:
            self._staged = staged
            self._changed.notify_all()

    # ---------------------------------------------------------------- pause, weights, resume

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Close the gate, then stop the engines as `mode` says. Returns when no engine is generating. Idempotent.

        abort: open requests come back with their tokens. keep: they freeze in the engines until `resume`. wait:
        they run to their end, or are aborted after half of `pause_timeout_s`. A stricter mode (wait < keep <
        abort) overrules the pause in force, one under way included; a gentler one changes nothing.
        """
        await self.know()
        self._paused = True
        await self._notify()
        if self._pausing:
            # Not behind the lock: if this mode is stricter, the workers end the pause that holds it.
            await self._stop_workers(mode)
        async with self._control:
            self._paused = True
            self._pausing = True
            try:
                await self._stop_workers(mode)
            finally:
                self._pausing = False

    async def _stop_workers(self, mode: PauseMode) -> None:
        self._mode = self._mode or mode
        in_force = await self._on_every_up("pause", self._deadlines.pool_s, mode)
        # A worker that was reported dead may have been stopped more strictly than the others.
        self._mode = "keep" if "keep" in in_force else next(iter(in_force), self._mode)
        await self._until_closed()

    async def _until_closed(self) -> None:
        """Wait for the gates of workers that were reported dead and may be alive."""
        await asyncio.gather(*(worker.closing for worker in self._workers if worker.closing is not None))

    @once_known
    async def sleep(self, keep_weights: bool) -> None:
        """Give the engines' devices to others until the next `load_weights` or `resume`, which wake what they need.

        Keys and values are dropped. `keep_weights`: weights stay in main memory; else they are dropped too, and
        `resume` loads the pool's version again unless another was loaded. On CPU the same rules hold, but no memory is
        freed. Returns when no engine is on a device, and none is being started. Idempotent. Raises RaypostError unless
        the pool is paused without frozen requests.
        """
        async with self._control:
            if not self._paused or self._mode == "keep":
                now = "paused with 'keep'" if self._paused else f"serving version {self._version}"
                raise RaypostError(f"the pool is {now}: pause it with 'abort' or 'wait' before it sleeps")
            self._asleep = True
        await self._until_none_starts()
        async with self._control:
            if not self._asleep:
                raise RaypostError("the pool was woken while it fell asleep: do one after the other")
            await self._on_every_up("sleep", self._rollout.pause_timeout_s, keep_weights)

    async def _until_none_starts(self) -> None:
        """Wait for workers that are on their way back: an engine takes its device when it starts."""
        names = ", ".join(worker.name for worker in self._workers if worker.starting)
        async with self._changed:
            none_starts = self._changed.wait_for(lambda: not any(w.starting for w in self._workers))
            await within(
                none_starts, self._rollout.start_timeout_s, f"{names} to come back before the pool sleeps"
            )

    @once_known
    async def resume(self, version: int) -> None:
        """Engines first, gate last. A pool that sleeps wakes, with the weights it has or last loaded.

        A controller that was started again may find engines with the version before only, those with `version` having
        died, too: these load it first. Raises StaleWeightsError unless the pool holds `version`. Idempotent.
        """
        if self._asleep:
            await within(self._until_supplied(), self._sync_timeout_s, f"the weights of version {version}")
        if self._version is not None and self._version < version:
            await self._until_staged(version)
        async with self._control:
            is_behind = version != self._version
            if is_behind:
                if not self._incarnation or self._staged_version != version:
                    raise StaleWeightsError(f"cannot serve version {version}: the pool holds {self._version}")
                self._weights, self._staged, self._held = self._staged, None, None
            if self._asleep or is_behind:
                await self._load_every_up()
            await self._on_every_up("resume", self._rollout.pause_timeout_s, version)
            self._paused, self._mode, self._asleep = False, None, False
        await self._notify()

    @once_known
    async def stage_weights(self, manifest: Manifest, buckets: list[Ref[Bytes]]) -> None:
        """Bring a version close to every live engine while requests run, so that `load_weights` takes less time.

        A worker that dies meanwhile, or is not there yet, needs nothing but `load_weights`. No worker is called where a
        swap waits for the version, which stages it. Raises WeightError if what arrived differs.
        """
        staged = SentWeights(manifest, buckets)
        if self._awaited != manifest.version:
            await self._with_weights("stage_weights", staged)
        await self._stage(staged)

    @once_known
    async def members(self) -> list[Member]:
        """Return the workers that are UP, as parts of a broadcast group."""
        seats = dict(await self._on_every_up("seat", self._deadlines.pool_s, named=True))
        return [
            Member(one.name, one.incarnation, *seats[one.name])
            for one in self._workers
            if one.name in seats and one.state is WorkerState.UP
        ]

    @once_known
    async def receive_weights(self, manifest: Manifest, buckets: list[Ref[Bytes]], seats: Seats) -> None:
        """As `stage_weights`, by a broadcast group; `buckets` are for workers that come later, or start again.

        Raises WeightError if a worker could not take part, or what arrived differs.
        """
        await self._on_every_up("receive_weights", self._sync_timeout_s, manifest, seats)
        await self._stage(SentWeights(manifest, buckets, received=True))

    @once_known
    async def swap(self, version: int, wait_s: float = 0.0) -> None:
        """Change the pool to a version that `stage_weights` brought: one call to each worker, which goes on by itself.

        Open requests freeze and go on with the new version; a pool that is paused, or sleeps, serves afterwards. A
        worker that dies meanwhile catches up when it is back. `wait_s`: how long the version may take to come; one that
        comes meanwhile is staged and loaded in the one call. Idempotent. Raises StaleWeightsError unless `version` is
        staged, WaitTimeoutError if it does not come, and WeightError if a worker holds something else than was sent;
        its gate stays closed then.
        """
        await self._until_staged(version, wait_s)
        async with self._control:
            if version == self._version and not self._paused:
                return
            if version != self._version:
                if self._staged_version != version:
                    raise StaleWeightsError(f"cannot swap to version {version}: stage it first")
                self._weights, self._staged, self._held = self._staged, None, None
            self._asleep = False
            if self._weights is None:
                await self._on_every_up("resume", self._rollout.pause_timeout_s, version)
            else:
                self._swapped = Swapped(self._weights.manifest, await self._load_every_up("swap"))
            await self._until_closed()
            was_paused, self._paused, self._mode = self._paused, False, None
        if was_paused:
            await self._notify()

    @once_known
    async def load_weights(self, manifest: Manifest, buckets: list[Ref[Bytes]]) -> list[WeightReport]:
        """Load a version into every live worker; return what each says it holds afterwards. A pool that sleeps wakes.

        A worker that dies meanwhile catches up when it is back. A version that a pool serves since a swap is not loaded
        again: what the workers said then is returned. Raises WeightError if one holds something else than was sent, and
        NoWorkersError if none comes back in time to hold it.
        """
        deadline = time.monotonic() + self._sync_timeout_s
        async with self._control:
            if self._weights is not None and self._weights.manifest == manifest and not self._paused:
                up = [worker.name for worker in self._workers if worker.state is WorkerState.UP]
                if reports := self._swapped.of(manifest, up):
                    self._weights = replace(self._weights, buckets=buckets)
                    return reports
            staged = self._staged
            received = staged is not None and staged.manifest == manifest and staged.received
            self._weights, self._staged, self._held = SentWeights(manifest, buckets, received), None, None
            self._asleep = False
        await self._notify()
        while True:
            async with self._control:
                reports = await self._load_every_up()
            if reports:
                return reports
            await self._until_one_is_up(deadline)

    @once_known
    async def holds(self) -> PoolHolds | None:
        """Return what the engines hold and whether they serve it; None before the first version."""
        held = self._holding
        if held is None:
            return None
        return PoolHolds(held.version, held.digest, serving=not self._paused, asleep=self._asleep)

    @once_known
    async def renew_weights(self, manifest: Manifest, buckets: list[Ref[Bytes]]) -> bool:
        """Take these buckets for those of the version that is held, which are gone with their trainer.

        Returns whether they are that version, bitwise; if not, nothing changed. Engines that hold it are not asked.
        """
        async with self._control:
            held = self._holding
            if held is None or (manifest.version, manifest.digest) != (held.version, held.digest):
                return False
            self._weights = SentWeights(replace(manifest, epoch=held.epoch), buckets)
        await self._notify()
        return True

    async def _load_every_up(self, method: str = "load_weights") -> list[WeightReport]:
        """Load the pool's version into the workers that hold another or none."""
        assert self._weights is not None, "the pool has a version"
        sent = self._weights
        reports = await self._with_weights(method, sent)
        for report in reports:
            sent.verify(report)
        return reports

    async def _with_weights(self, method: str, sent: SentWeights) -> list[WeightReport]:
        """Call every live worker with a version: with all of its buckets only if one lacks some of those left out."""
        try:
            return await self._on_every_up(method, self._sync_timeout_s, sent.manifest, *sent.least)
        except NotStagedError:
            return await self._on_every_up(method, self._sync_timeout_s, sent.manifest, *sent.buckets)

    @once_known
    async def canary(self, prompt_ids: IntArray) -> list[tuple[str, FloatArray]]:
        """Return (worker, logprobs of the prompt's tokens) for every live worker, also while paused.

        Raises RaypostError while the pool sleeps.
        """
        async with self._control:
            if self._asleep:
                raise RaypostError("the pool sleeps and others use its devices: load a version, or resume it")
            answers = await self._on_every_up("canary", self._sync_timeout_s, prompt_ids, named=True)
            if answers:
                self._canary = self._version, prompt_ids, answers[0][1]
            return answers

    async def _catch_up(self, worker: PoolWorker) -> None:
        # Also while the pool serves: a worker that was only out of reach may still serve another version.
        await worker.call("pause", self._deadlines.pool_s, "to pause", self._mode or "abort")
        if self._weights is None:
            return
        weights = self._weights.manifest, *self._weights.buckets
        self._weights.verify(await worker.call("load_weights", self._sync_timeout_s, "to catch up", *weights))
        if self._canary is not None and self._canary[0] == self._version and self._canary_tolerance:
            await worker.compare(*self._canary[1:], self._canary_tolerance, self._sync_timeout_s)
        if not self._paused:
            await worker.call("resume", self._rollout.pause_timeout_s, "to resume", self._version)
