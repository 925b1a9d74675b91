"""PoolWorker: what the pool knows of one rollout worker. Part of the rollout controller; decides nothing."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from enum import StrEnum

from ray.actor import ActorHandle

from actors.remote import ManyCalls
from raypost.spans import SpanLog


class WorkerState(StrEnum):
    """Where a worker of the pool stands."""

    STARTING = "starting"
    UP = "up"
    DOWN = "down"


@dataclass(slots=True)
class PoolWorker:
    """A worker, its state, and its requests."""

    name: str
    handle: ActorHandle
    spans: SpanLog
    generate: ManyCalls
    state: WorkerState = WorkerState.STARTING
    outstanding: int = 0
    busy_since: float | None = None
    """Since when it works on requests without a pause; None while it does not."""
    restarts: int = 0
    recovering: asyncio.Task[None] | None = None
    starting: bool = False
    """Whether it may have an engine although it is not UP: it is on its way back."""

    def account(self, working: bool) -> None:
        """Close the interval in which it had requests, and open the next one if it still works on some."""
        now = time.time()
        if self.busy_since is not None:
            self.spans.add("rollout", self.busy_since, now)
        self.busy_since = now if working and self.outstanding else None
