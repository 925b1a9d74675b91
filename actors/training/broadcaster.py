"""WeightBroadcaster: brings one version of the weights from the trainer into every rollout worker.

    prepare      trainer.publish(version) -> (manifest, bucket refs) -> by a transport into every engine (transport.py)
                                                                     -> canary of the trainer
    broadcast    controller.load_weights -> acknowledgements
    check        canary of the engines: they and the trainer agree on the logprobs of a fixed prompt

Engines generate while a version is prepared, and are paused while it is broadcast; they may be checked in both states.

A trainer that was started again publishes the version that the engines hold once more (`renew`). If its weights are
bitwise the same, nothing is sent. If not, `broadcast(version, again=True)` brings them to the engines under the same
number and a new epoch.

Owns the order of a sync and its verification, not the weights: the bucket refs pass through unopened.
Invariant: `broadcast(v)` returns only when every live worker acknowledged version v with the digest that
was sent; unless the check is left to a call of its own, only when their logprobs agree with the trainer's too. Versions
never go back, and of one version epochs do not.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from actors.training.transport import Brought, Transport
from raypost.config import SyncConfig
from raypost.errors import StaleWeightsError, WeightError
from raypost.observe.spans import Span, SpanLog
from raypost.types import FloatArray, IntArray, Ref, SyncReport, WeightSink, WeightSource
from raypost.weights.manifest import Bytes, Manifest


class PreparedVersion(NamedTuple):
    """A version that is published and close to the engines, and what they must answer once they hold it."""

    manifest: Manifest
    buckets: list[Ref[Bytes]]
    expected: FloatArray | None
    """Logprobs of the canary; None where it is off."""
    brought: Brought
    publish_s: float
    seconds: float
    left: bool
    """Whether the trainer has left the devices that it shares with the engines."""


class WeightBroadcaster:
    """One version at a time."""

    def __init__(
        self,
        trainer: WeightSource,
        controller: WeightSink,
        sync: SyncConfig,
        canary_ids: IntArray,
        offload: bool = False,
    ) -> None:
        """Broadcast weights from `trainer` to `controller`.

        `offload`: trainer and engines share devices, so the trainer leaves its devices before the engines load.
        """
        self._trainer = trainer
        self._controller = controller
        self._sync = sync
        self._transport = Transport(trainer, controller, sync, shares_devices=offload)
        self._canary_ids = canary_ids
        self._offload = offload
        self._version = -1
        self._prepared: PreparedVersion | None = None
        self._out: tuple[Manifest, list[Ref[Bytes]]] | None = None
        """The version that is out, for a pool that has lost sight of it."""
        self._expected: FloatArray | None = None
        """Of the version that is out, until it is checked."""
        self._preparing, self._checking = asyncio.Lock(), asyncio.Lock()
        self._epochs: dict[int, int] = {}
        """Epoch of a version that was sent more than once, the last one."""
        self._last: SyncReport | None = None
        self._spans = SpanLog("broadcaster")

    def __repr__(self) -> str:
        """Return the name that logs and errors use."""
        return "weight-broadcaster"

    async def prepare(self, version: int, leave: bool = False) -> None:
        """Publish `version` and bring it close to the engines, which may generate meanwhile. Idempotent.

        `leave`: a trainer that shares devices leaves them before, so that engines may load it as soon as it is there.
        Raises WeightError when what arrived differs, StaleWeightsError when `version` goes back.
        """
        self._check_order(version)
        if version > self._version:
            await self._prepare(version, leave and self._offload)

    def _check_order(self, version: int) -> None:
        if version < self._version:
            raise StaleWeightsError(f"cannot broadcast version {version}: {self._version} is already out")

    async def _prepare(self, version: int, leave: bool = False) -> PreparedVersion:
        async with self._preparing:
            if self._prepared is None or self._prepared.manifest.version != version:
                start = time.monotonic()
                (manifest, buckets), members = await asyncio.gather(
                    self._trainer.publish(version), self._transport.members()
                )
                manifest = replace(manifest, epoch=self._epochs.get(version, 0))
                published = time.monotonic()
                canary = self._canary_of_trainer()
                if leave:
                    expected = await canary
                    await self._trainer.offload()
                    brought = await self._transport.bring(manifest, buckets, members)
                else:
                    bringing = self._transport.bring(manifest, buckets, members)
                    expected, brought = await asyncio.gather(canary, bringing)
                seconds = time.monotonic() - start
                self._prepared = PreparedVersion(
                    manifest, buckets, expected, brought, published - start, seconds, leave
                )
            return self._prepared

    async def _canary_of_trainer(self) -> FloatArray | None:
        verified = self._sync.canary_tolerance is not None
        return await self._trainer.canary(self._canary_ids) if verified else None

    async def forget(self) -> None:
        """Forget what is prepared and out: the trainer was started again, and what it had published is gone."""
        async with self._preparing:
            self._prepared = self._out = None
            self._transport.forget()

    async def renew(self, version: int) -> bool:
        """Publish `version` again, in place of what a former trainer published and engines that come back would load.

        Returns whether it is bitwise what the engines hold; if not, nothing changed.
        """
        async with self._preparing:
            manifest, buckets = await self._trainer.publish(version)
            is_same = await self._controller.renew_weights(manifest, buckets)
            if is_same:
                self._out = replace(manifest, epoch=self._epochs.get(version, 0)), buckets
            return is_same

    async def broadcast(self, version: int, check: bool = True, again: bool = False) -> SyncReport:
        """Load `version` everywhere, prepared if it is not yet. Repeated for the version all hold: nothing is sent.

        `check`: compare logprobs too, as the method of that name does. `again`: the trainer's weights of this version
        are others now, and take the place of those that were sent. Raises WeightError when what arrived differs,
        StaleWeightsError when `version` goes back.
        """
        self._check_order(version)
        if again:
            self._epochs = {version: self._epochs.get(version, 0) + 1}
            self._prepared = None
        if self._last is None or version != self._version or again:
            with self._spans.span("sync"):
                self._last = await self._broadcast(version)
        elif self._offload:
            await self._trainer.offload()
        return await self.check(version) if check else self._last

    async def _broadcast(self, version: int) -> SyncReport:
        prepared = await self._prepare(version)
        manifest, start = prepared.manifest, time.monotonic()
        if self._offload and not prepared.left:
            await self._trainer.offload()
        reports = await self._controller.load_weights(manifest, prepared.buckets)
        self._version, self._expected, self._prepared = version, prepared.expected, None
        self._out = manifest, prepared.buckets
        return SyncReport(
            version=version,
            digest=manifest.digest,
            num_workers=len(reports),
            nbytes=prepared.brought.nbytes,
            spared_nbytes=prepared.brought.spared,
            seconds=prepared.seconds + time.monotonic() - start,
            publish_s=prepared.publish_s,
            load_s=max(report.load_s for report in reports),
            transport=prepared.brought.transport,
            transport_s=prepared.brought.seconds,
            transport_failed=prepared.brought.failed,
            pause_s=max(report.pause_s for report in reports),
            resume_s=max(report.resume_s for report in reports),
            verify_s=max(report.verify_s for report in reports),
            read_back=all(report.read_back for report in reports),
            left_out=tuple(sorted({name for report in reports for name in report.left_out})),
        )

    async def restock(self, version: int | None = None) -> None:
        """Give the pool again what it may need and lacks since its controller died; nothing that is not there.

        `version`: that is out, which is published again for a broadcaster that was started again, too; the pool takes
        it unless its engines hold other bits.
        """
        async with self._preparing:
            if self._out is None and self._prepared is None and version is not None:
                manifest, buckets = await self._trainer.publish(version)
                self._out = replace(manifest, epoch=self._epochs.get(version, 0)), buckets
        if self._out is not None:
            await self._controller.restock(*self._out)
        prepared = self._prepared
        if prepared is not None:
            await self._controller.restock(prepared.manifest, prepared.buckets)

    async def check(self, version: int) -> SyncReport:
        """Compare the engines' logprobs on the canary prompt with the trainer's; return the report of the sync.

        The engines may serve meanwhile. Idempotent. Raises WeightError if they differ, StaleWeightsError unless
        `version` is out. Engines that took by a swap what was prepared acknowledge it first; so they do for a
        broadcaster that died since.
        """
        if self._last is None or (self._prepared is not None and self._prepared.manifest.version == version):
            await self.broadcast(version, check=False)
        async with self._checking:
            if self._last is None or version != self._version:
                raise StaleWeightsError(f"cannot check version {version}: {self._version} is out")
            if self._expected is not None:
                start = time.monotonic()
                difference = await self._compare(version, self._expected)
                self._expected = None
                self._last = replace(
                    self._last, canary_difference=difference, canary_s=time.monotonic() - start
                )
            return self._last

    async def _compare(self, version: int, expected: FloatArray) -> float:
        """Return the largest difference of a logprob. Raises WeightError if it exceeds the tolerance."""
        tolerance = self._sync.canary_tolerance
        assert tolerance is not None, "the trainer was asked"
        worst = 0.0
        for worker, got in await self._controller.canary(self._canary_ids):
            difference = _max_difference(got, expected)
            if not difference <= tolerance:
                raise WeightError(
                    f"{worker} says it holds version {version}, but its logprobs on the canary prompt differ from "
                    f"the trainer's by {difference:.2e}, more than sync.canary_tolerance {tolerance:.0e}"
                )
            worst = max(worst, difference)
        return worst

    async def drain_spans(self) -> list[Span]:
        """Return the syncs since the last call."""
        return self._spans.drain()


def _max_difference(a: FloatArray, b: FloatArray) -> float:
    """Largest absolute difference; infinite when the lengths differ, NaN when either holds one."""
    return float(np.max(np.abs(a - b), initial=0.0)) if len(a) == len(b) else float("inf")
