"""Transport: by which way a published version comes to the engines, and what is done where that way fails.

Owns the choice, the group under way, and the fall back to the object store, where every version is in any case: for
workers that come later. Engines generate meanwhile, so a group is made anew, for each change of the pool, without
holding anything up.

Invariant: a version that was brought is staged in every engine that could be reached, and verified there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import NamedTuple

from raypost.config import SyncConfig
from raypost.errors import WeightError
from raypost.types import Ref, WeightSink, WeightSource
from raypost.weights.manifest import Bytes, Manifest
from raypost.weights.seats import Backend, Member, Seats

log = logging.getLogger(__name__)

MOST_SKIPPED = 32
"""Versions that go by the object store at once, after a group failed again and again, before another is tried."""


class Brought(NamedTuple):
    """How a version came to the engines."""

    transport: str
    seconds: float
    nbytes: int
    """That each engine was sent."""
    spared: int
    """Bytes that each engine had."""
    failed: str = ""
    """Why it did not come by a group, if that was tried."""


class Transport:
    """Brings one version after the other."""

    def __init__(
        self, trainer: WeightSource, pool: WeightSink, sync: SyncConfig, shares_devices: bool = False
    ) -> None:
        """Bring what `trainer` published to `pool`; `shares_devices`: they take turns on the same ones."""
        self._trainer = trainer
        self._pool = pool
        self._wanted = "object_store" if shares_devices and sync.transport == "auto" else sync.transport
        self._shares_devices = shares_devices
        self._timeout_s = sync.transport_timeout_s
        self._members: list[Member] = []
        self._seats: Seats | None = None
        """Of the group under way."""
        self._node = ""
        """Of the trainer's rank 0, once it was asked."""
        self._out: Manifest | None = None
        """The last version that came to all of the pool."""
        self._failures = self._skip = 0

    def forget(self) -> None:
        """Forget the group: its rank 0 was started again."""
        self._seats, self._out, self._node = None, None, ""

    async def members(self) -> list[Member]:
        """Return the engines that the next version goes to by a group, if it goes by one; to be asked for meanwhile."""
        return [] if self._wanted == "object_store" else await self._pool.members()

    async def bring(self, manifest: Manifest, buckets: list[Ref[Bytes]], members: list[Member]) -> Brought:
        """Have every live engine stage a version; `members`: what the method of that name returned.

        Raises WeightError if it does not come by the object store either.
        """
        begin, failed, seats = time.monotonic(), "", None
        if self._skip > 0:
            self._skip -= 1
            failed = f"not tried, since it failed {self._failures} times in a row"
        else:
            seats = await self._group(manifest, members)
        if seats is not None:
            failed = await self._broadcast(manifest, buckets, seats)
            if not failed:
                return _brought(manifest, seats.backend, begin, seats.first_bucket)
            log.warning("version %d goes by the object store: %s", manifest.version, failed)
        known = self._spared(manifest)
        await self._pool.stage_weights(manifest, buckets)
        self._out = manifest
        return _brought(manifest, "object_store", begin, known, failed)

    async def _group(self, manifest: Manifest, members: list[Member]) -> Seats | None:
        """Return the group by which the version goes, opened if the pool is another one; None: by the object store."""
        wanted = self._wanted
        if not members:
            return None
        if wanted == "auto":
            self._node = self._node or await self._trainer.node()
            if all(member.node == self._node for member in members):
                return None
        if self._seats is None or members != self._members:
            backend: Backend = "nccl" if wanted == "nccl" else "gloo"
            self._members, self._out = members, None
            self._seats = await self._trainer.open_group(members, backend, self._timeout_s)
        return replace(self._seats, first_bucket=self._spared(manifest))

    def _spared(self, manifest: Manifest) -> int:
        """Return how many buckets need not be sent again; engines that share devices may have given them up."""
        return 0 if self._shares_devices and not manifest.base else manifest.spares(self._out)

    async def _broadcast(self, manifest: Manifest, buckets: list[Ref[Bytes]], seats: Seats) -> str:
        """Send and receive at once; return what failed, or nothing."""
        sent, received = await asyncio.gather(
            self._trainer.send(manifest.version, seats),
            self._pool.receive_weights(manifest, buckets, seats),
            return_exceptions=True,
        )
        for outcome in (sent, received):
            if isinstance(outcome, BaseException) and not isinstance(outcome, WeightError):
                raise outcome
        failed = "; ".join(str(outcome) for outcome in (sent, received) if outcome)
        if failed:
            self.forget()
            self._failures += 1
            self._skip = min(2**self._failures - 2, MOST_SKIPPED)
        else:
            self._failures, self._out = 0, manifest
        return failed


def _brought(
    manifest: Manifest, transport: str, begin_s: float, first_bucket: int, failed: str = ""
) -> Brought:
    spared, sent = sum(manifest.bucket_sizes[:first_bucket]), sum(manifest.bucket_sizes[first_bucket:])
    return Brought(transport, time.monotonic() - begin_s, sent, spared, failed)
