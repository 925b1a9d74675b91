"""Records: what the driver records of steps, syncs and evaluations, and shows, while its loop goes on.

Owns the order of the records, one after the other, and the figures that are shown with the steps that follow. What is
recorded is the loop's (roles.py); where it goes is telemetry's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Mapping
from dataclasses import dataclass, field

import psutil

from raypost.config import Config
from raypost.faults import Incident
from raypost.observe import metrics
from raypost.report.step_record import production_record
from raypost.report.terminal import RunDisplay
from raypost.types import Ref, SyncReport, TakeStatus, TelemetryRole
from raypost.types.packed import PackedGroups


@dataclass
class Records:
    """The records of one run."""

    cfg: Config
    display: RunDisplay
    telemetry: TelemetryRole
    last: dict[str, float] = field(default_factory=dict)
    """Held-out score and sync time, shown with the steps that follow."""
    _recording: asyncio.Task[None] | None = None
    """What is being recorded while the loop goes on."""

    async def step(
        self,
        step: int,
        status: TakeStatus,
        trained: Mapping[str, float],
        batch_ref: Ref[PackedGroups] | None,
        after: asyncio.Task[None] | None,
    ) -> None:
        """Record one train step, and samples of its batch, once `after` has ended; show it now."""
        memory = {metrics.DRIVER_RSS_BYTES: psutil.Process().memory_info().rss}
        record = {**trained, **production_record(status, len(self.cfg.tasks)), **self.last, **memory}
        self.display.step(step, record)
        await self._meanwhile(self._step(step, record, batch_ref if self.cfg.keep_samples else None, after))

    async def _step(
        self,
        step: int,
        record: Mapping[str, object],
        batch_ref: Ref[PackedGroups] | None,
        after: asyncio.Task[None] | None,
    ) -> None:
        if after is not None:
            await asyncio.wait({after})
        await self.telemetry.log(step, record)
        if batch_ref is not None:
            await self.telemetry.log_samples(step, [batch_ref])

    async def served(self, report: SyncReport | None, states: Awaitable[Mapping[str, str]]) -> None:
        """Record a sync, if there was one, and show the workers' states, which are asked for then."""
        await self._meanwhile(self._served(report, states))

    async def _served(self, report: SyncReport | None, states: Awaitable[Mapping[str, str]]) -> None:
        self.display.workers(await states)
        await self.sync(report)

    async def sync(self, report: SyncReport | None) -> None:
        """Record a sync, if there was one."""
        if report is None:
            return
        await self.telemetry.log_sync(report)
        self.last[metrics.SYNC_BYTES] = report.nbytes
        self.last[metrics.SYNC_SPARED_BYTES] = report.spared_nbytes
        if report.transport_failed:
            self.last[metrics.TRANSPORT_FAILED] = self.last.get(metrics.TRANSPORT_FAILED, 0) + 1
            facts = {"version": report.version, "cause": report.transport_failed}
            await self.telemetry.log_incident(Incident.TRANSPORT_FAILED, facts)

    async def evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        """Record and show the scores of a step's weights."""
        if metrics.HELD_OUT in scores:
            self.last[metrics.HELD_OUT] = scores[metrics.HELD_OUT]
        self.display.evaluated(step, scores)
        await self.telemetry.log_eval(step, scores)

    async def _meanwhile(self, work: Coroutine[object, object, None]) -> None:
        """Let `work` record something while the loop goes on, after what is recorded already; raises what that did."""
        before, self._recording = self._recording, asyncio.create_task(work, name="record")
        if before is not None:
            await before

    async def settle(self, timeout_s: float) -> None:
        """Give what is being recorded so long to end."""
        if self._recording is not None:
            await asyncio.wait({self._recording}, timeout=timeout_s)
