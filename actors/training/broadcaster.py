"""WeightBroadcaster: brings one version of the weights from the trainer into every rollout worker.

    trainer.publish(version) -> (manifest, bucket refs) -> controller.load_weights -> acknowledgements
                             -> canary: engine and trainer agree on the logprobs of a fixed prompt

Owns the order of a sync and its verification, not the weights: the bucket refs pass through unopened.
Invariant: `broadcast(v)` returns only when every live worker acknowledged version v with the digest that
was sent, and their logprobs agree with the trainer's. Versions never go back.
"""

from __future__ import annotations

import time

import numpy as np

from raypost.config import SyncConfig
from raypost.errors import StaleWeightsError, WeightError
from raypost.protocols import WeightSink, WeightSource
from raypost.spans import SpanLog
from raypost.types import FloatArray, IntArray, Span, SyncReport


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
        self._base = ""
        self._last: SyncReport | None = None
        self._spans = SpanLog("broadcaster")

    def __repr__(self) -> str:
        """Return the name that logs and errors use."""
        return "weight-broadcaster"

    async def broadcast(self, version: int) -> SyncReport:
        """Publish and load `version` everywhere. Repeated for the version all hold: nothing is sent.

        Raises WeightError when what arrived differs, StaleWeightsError when `version` goes back.
        """
        if version < self._version:
            raise StaleWeightsError(f"cannot broadcast version {version}: {self._version} is already out")
        if self._last is not None and version == self._version:
            if self._offload:
                await self._trainer.offload()
            return self._last
        start = time.time()
        with self._spans.span("sync"):
            manifest, buckets = await self._trainer.publish(version)
            published = time.time()
            verified = self._sync.canary_tolerance is not None
            expected = await self._trainer.canary(self._canary_ids) if verified else None
            if self._offload:
                await self._trainer.offload()
            reports = await self._controller.load_weights(manifest, buckets)
            difference = await self._check_canary(version, expected)
        self._version = version
        base = self._base
        self._base = manifest.base
        self._last = SyncReport(
            version=version,
            digest=manifest.digest,
            num_workers=len(reports),
            nbytes=sum(manifest.bucket_sizes[manifest.base_buckets if manifest.base == base else 0 :]),
            seconds=time.time() - start,
            publish_s=published - start,
            load_s=max(report.load_s for report in reports),
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
