"""WeightBroadcaster: brings one version of the weights from the trainer into every rollout worker.

    prepare      trainer.publish(version) -> (manifest, bucket refs) -> controller.stage_weights
                                                                     -> canary of the trainer
    broadcast    controller.load_weights -> acknowledgements
                 canary of the engines: they and the trainer agree on the logprobs of a fixed prompt

Engines generate while a version is prepared, and are paused while it is broadcast.

Owns the order of a sync and its verification, not the weights: the bucket refs pass through unopened.
Invariant: `broadcast(v)` returns only when every live worker acknowledged version v with the digest that
was sent, and their logprobs agree with the trainer's. Versions never go back.
"""

from __future__ import annotations

import asyncio
import time
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
        self._preparing = asyncio.Lock()
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

    async def broadcast(self, version: int) -> SyncReport:
        """Load `version` everywhere, prepared if it is not yet. Repeated for the version all hold: nothing is sent.

        Raises WeightError when what arrived differs, StaleWeightsError when `version` goes back.
        """
        self._check_order(version)
        if self._last is not None and version == self._version:
            if self._offload:
                await self._trainer.offload()
            return self._last
        with self._spans.span("sync"):
            prepared = await self._prepare(version)
            manifest, start = prepared.manifest, time.time()
            if self._offload:
                await self._trainer.offload()
            reports = await self._controller.load_weights(manifest, prepared.buckets)
            loaded = time.time()
            difference = await self._check_canary(version, prepared.expected)
        end = time.time()
        self._version = version
        self._prepared = None
        base = self._base
        self._base = manifest.base
        self._last = SyncReport(
            version=version,
            digest=manifest.digest,
            num_workers=len(reports),
            nbytes=sum(manifest.bucket_sizes[manifest.base_buckets if manifest.base == base else 0 :]),
            seconds=prepared.seconds + end - start,
            publish_s=prepared.publish_s,
            load_s=max(report.load_s for report in reports),
            canary_s=end - loaded,
            canary_difference=difference,
        )
        return self._last

    async def _check_canary(self, version: int, expected: FloatArray | None) -> float:
        tolerance = self._sync.canary_tolerance
        if tolerance is None or expected is None:
            return 0.0
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
