"""WeightBroadcaster: brings one version of the weights from the trainer into every rollout worker.

    prepare      trainer.publish(version) -> (manifest, bucket refs) -> controller.stage_weights
                                                                     -> canary of the trainer
    broadcast    controller.load_weights -> acknowledgements
    check        canary of the engines: they and the trainer agree on the logprobs of a fixed prompt

Engines generate while a version is prepared, and are paused while it is broadcast; they may be checked in both states.

Owns the order of a sync and its verification, not the weights: the bucket refs pass through unopened.
Invariant: `broadcast(v)` returns only when every live worker acknowledged version v with the digest that
was sent; unless the check is left to a call of its own, only when their logprobs agree with the trainer's too. Versions
never go back.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from raypost.config import SyncConfig
from raypost.errors import StaleWeightsError, WeightError
from raypost.protocols import WeightSink, WeightSource
from raypost.spans import SpanLog
from raypost.types import FloatArray, IntArray, Ref, Span, SyncReport
from raypost.weights.manifest import Bytes, Manifest


class PreparedVersion(NamedTuple):
    """A version that is published and close to the engines, and what they must answer once they hold it."""

    manifest: Manifest
    buckets: list[Ref[Bytes]]
    expected: FloatArray | None
    """Logprobs of the canary; None where it is off."""
    publish_s: float
    seconds: float


class WeightBroadcaster:
    """One version at a time, through the object store."""

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
        self._canary_ids = canary_ids
        self._offload = offload
        self._version = -1
        self._prepared: PreparedVersion | None = None
        self._expected: FloatArray | None = None
        """Of the version that is out, until it is checked."""
        self._preparing, self._checking = asyncio.Lock(), asyncio.Lock()
        self._base = ""
        self._last: SyncReport | None = None
        self._spans = SpanLog("broadcaster")

    def __repr__(self) -> str:
        """Return the name that logs and errors use."""
        return "weight-broadcaster"

    async def prepare(self, version: int) -> None:
        """Publish `version` and bring it close to the engines, which may generate meanwhile. Idempotent.

        Raises WeightError when what arrived differs, StaleWeightsError when `version` goes back.
        """
        self._check_order(version)
        if version > self._version:
            await self._prepare(version)

    def _check_order(self, version: int) -> None:
        if version < self._version:
            raise StaleWeightsError(f"cannot broadcast version {version}: {self._version} is already out")

    async def _prepare(self, version: int) -> PreparedVersion:
        async with self._preparing:
            if self._prepared is None or self._prepared.manifest.version != version:
                start = time.time()
                manifest, buckets = await self._trainer.publish(version)
                published = time.time()
                expected, _ = await asyncio.gather(
                    self._canary_of_trainer(), self._controller.stage_weights(manifest, buckets)
                )
                self._prepared = PreparedVersion(
                    manifest, buckets, expected, published - start, time.time() - start
                )
            return self._prepared

    async def _canary_of_trainer(self) -> FloatArray | None:
        verified = self._sync.canary_tolerance is not None
        return await self._trainer.canary(self._canary_ids) if verified else None

    async def broadcast(self, version: int, check: bool = True) -> SyncReport:
        """Load `version` everywhere, prepared if it is not yet. Repeated for the version all hold: nothing is sent.

        `check`: compare logprobs too, as the method of that name does. Raises WeightError when what arrived differs,
        StaleWeightsError when `version` goes back.
        """
        self._check_order(version)
        if self._last is None or version != self._version:
            with self._spans.span("sync"):
                self._last = await self._broadcast(version)
        elif self._offload:
            await self._trainer.offload()
        return await self.check(version) if check else self._last

    async def _broadcast(self, version: int) -> SyncReport:
        prepared = await self._prepare(version)
        manifest, start = prepared.manifest, time.time()
        if self._offload:
            await self._trainer.offload()
        reports = await self._controller.load_weights(manifest, prepared.buckets)
        self._version, self._expected, self._prepared = version, prepared.expected, None
        base, self._base = self._base, manifest.base
        return SyncReport(
            version=version,
            digest=manifest.digest,
            num_workers=len(reports),
            nbytes=sum(manifest.bucket_sizes[manifest.base_buckets if manifest.base == base else 0 :]),
            seconds=prepared.seconds + time.time() - start,
            publish_s=prepared.publish_s,
            load_s=max(report.load_s for report in reports),
        )

    async def check(self, version: int) -> SyncReport:
        """Compare the engines' logprobs on the canary prompt with the trainer's; return the report of the sync.

        The engines may serve meanwhile. Idempotent. Raises WeightError if they differ, StaleWeightsError unless
        `version` is out. A broadcaster that died since broadcasts it again first, which changes nothing in the engines.
        """
        if self._last is None:
            await self.broadcast(version, check=False)
        async with self._checking:
            if self._last is None or version != self._version:
                raise StaleWeightsError(f"cannot check version {version}: {self._version} is out")
            if self._expected is not None:
                start = time.time()
                difference = await self._compare(version, self._expected)
                self._expected = None
                self._last = replace(self._last, canary_difference=difference, canary_s=time.time() - start)
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
