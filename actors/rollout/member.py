"""A worker of a pool, as its controller knows it: its life, and what is done about it just now.

REQUESTED  asked for, and without a process: it waits for a node that has its resources
STARTING   its process is there, its engine starts
CATCHING_UP  it loads the version that the pool holds, is verified, and does not serve yet
UP         it serves
DRAINING   it is given nothing more; what it runs goes on elsewhere, or runs to its end
DOWN       it died, or hangs, and is brought back: DOWN -> STARTING -> CATCHING_UP -> UP
GONE       the pool has forgotten it
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError

from actors.engine.life import EngineInfo
from actors.remote import asked, is_still, repeated, within
from actors.rollout.loads import Room
from actors.rollout.routing import GONE as LOST
from actors.rollout.routing import ONE_ROOM
from actors.rollout.status import WorkerStatus
from raypost.errors import RaypostError, WaitTimeoutError, WeightError
from raypost.observe.spans import WAIT, Span
from raypost.observe.waits import waiting
from raypost.types import FloatArray, IntArray
from raypost.types.pause import PauseMode

log = logging.getLogger(__name__)

RECOVERY_TRIES = 5
CALL_S = 10.0
"""Deadline of small calls to a worker."""
RUN_OUT_POLL_S = PROCESS_POLL_S = 0.1


class WorkerState(StrEnum):
    """The state of a worker in the pool."""

    REQUESTED = "requested"
    STARTING = "starting"
    CATCHING_UP = "catching up"
    UP = "up"
    DRAINING = "draining"
    DOWN = "down"
    GONE = "gone"


@dataclass(slots=True)
class PoolWorker:
    """A worker and its state, as the pool knows them."""

    name: str
    handle: ActorHandle
    state: WorkerState = WorkerState.STARTING
    incarnation: int = 0
    """How often it was brought back."""
    room: Room = ONE_ROOM
    """What its engine says it holds at once."""
    pid: int | None = None
    """Process that answered when it was brought in; None: none is known."""
    recovering: asyncio.Task[None] | None = None
    """Brings it into the pool, for the first time or again."""
    served: bool = False
    """Whether it did when it began to leave."""
    closing: asyncio.Task[None] | None = None
    """Closes its gate: it leaves, or may only be out of reach of whoever reported it dead."""
    slow_restarts: int = 0
    """How often it was restarted because it was slow."""
    starting: bool = False
    """Whether it may have an engine although it is not UP: it is on its way back."""
    since_s: float = field(default_factory=time.time)
    """When it was asked for, died, or began to leave, the last of these."""

    _asking: asyncio.Task[bool] | None = None

    def waited(self) -> Span:
        """Return the time since then, in which it served nobody who came."""
        return Span(actor=self.name, kind=WAIT, start_s=self.since_s, end_s=time.time())

    def described(self, share: float | None) -> str:
        """Return its state in words; `share`: of its siblings' rate, where it is slow."""
        slow = "" if share is None else f", slow: {share:.2g} of its siblings' rate"
        return f"{self.state}{slow}"

    async def call(self, method: str, timeout_s: float, what: str, *args: Any) -> Any:
        """Call a method that may be called twice, again if the call or its answer was lost on its way.

        Raises what LOST names if the worker's process ended or does not answer, and WaitTimeoutError.
        """
        deadline = time.monotonic() + timeout_s

        async def once() -> Any:
            left_s = max(0.0, deadline - time.monotonic())
            return await within(getattr(self.handle, method).remote(*args), left_s, f"{self.name} {what}")

        return await repeated(once, self.is_well)

    async def survived(self, error: str) -> bool:
        """Return whether it is well: then what a caller met was the loss of a call, or of its answer."""
        return error == ActorUnavailableError.__name__ and await self.is_well()

    async def is_well(self) -> bool:
        """Return whether the process that was brought in answers; all who ask meanwhile share one question."""
        if self.pid is None:
            return False
        if self._asking is None or self._asking.done():
            who = functools.partial(self._process, CALL_S)
            self._asking = asyncio.create_task(is_still(self.pid, who), name=f"is {self.name} well")
        return await asyncio.shield(self._asking)

    async def _process(self, timeout_s: float) -> int:
        pid: int = await within(self.handle.ping.remote(), timeout_s, f"{self.name} to say that it is alive")
        return pid

    async def answer(self, timeout_s: float) -> None:
        """Ask for its process, asked again while the question is lost; one that restarts just now gives none."""
        self.pid = await asked(functools.partial(self._process, timeout_s))

    async def until_it_has_a_process(self, timeout_s: float) -> None:
        """Wait for it, also while it restarts. Raises WaitTimeoutError or what LOST names if none comes."""
        deadline = time.monotonic() + timeout_s
        with waiting(f"a process of {self.name}", timeout_s):
            while True:
                try:
                    return await self.answer(max(0.0, deadline - time.monotonic()))
                except ActorUnavailableError:
                    if time.monotonic() > deadline:
                        raise
                    await asyncio.sleep(PROCESS_POLL_S)

    def found(self, status: WorkerStatus | None) -> None:
        """Take a worker for one that serves, by what it says of itself."""
        self.state = WorkerState.UP
        if status is not None and status.room is not None:
            self.room = status.room

    async def start(self, timeout_s: float) -> EngineInfo:
        """Start its engine, once it has a process."""
        await self.until_it_has_a_process(timeout_s)
        self.state = WorkerState.STARTING
        info: EngineInfo = await self.call("start", timeout_s, "to start its engine")
        self.room = ONE_ROOM if info.room is None else Room(*info.room)
        return info

    async def start_first(self, timeout_s: float) -> EngineInfo:
        """Start its engine, again if it dies meanwhile; one that serves only says what it has.

        Raises RaypostError after RECOVERY_TRIES.
        """
        if self.state is WorkerState.UP:
            info: EngineInfo = await self.call("start", timeout_s, "to say what its engine is")
            return info
        for attempt in range(1, RECOVERY_TRIES + 1):
            try:
                return await self.start(timeout_s)
            except LOST as error:
                died = error
                log.warning(
                    "%s died while its engine started (try %d of %d): %s",
                    self.name, attempt, RECOVERY_TRIES, type(error).__name__,
                )  # fmt: skip
                await asyncio.sleep(min(30.0, 0.5 * 2**attempt))
        raise RaypostError(
            f"{self.name} died {RECOVERY_TRIES} times while its engine started ({type(died).__name__}): its log says "
            "more, and the system's log whether memory ran out"
        ) from died

    async def compare(
        self, prompt_ids: IntArray, expected: FloatArray, tolerance: float, timeout_s: float
    ) -> None:
        """Compare its logprobs with what the others gave the same prompt. Raises WeightError if they differ."""
        got = await self.call("canary", timeout_s, "to answer the canary prompt", prompt_ids)
        difference = float(np.max(np.abs(got - expected), initial=0.0))
        if not difference <= tolerance:
            raise WeightError(
                f"{self.name} says it holds the pool's version, but its logprobs on the canary prompt differ from the "
                f"other workers' by {difference:.2e}, more than sync.canary_tolerance {tolerance:.0e}"
            )

    async def close(self, mode: PauseMode, timeout_s: float) -> None:
        """Close its gate, if it is alive, and end what it runs as `mode` says."""
        try:
            await self.call("pause", timeout_s, "to pause", mode)
        except LOST:
            return
        except WaitTimeoutError as error:
            log.warning("%s is not known to have stopped: %s", self.name, error)

    async def run_out(self, wait_s: float, until: Callable[[], bool]) -> None:
        """Wait until it runs nothing, for at most `wait_s` and not longer than `until` something else."""
        end = time.monotonic() + wait_s
        try:
            while time.monotonic() < end and not until():
                if not (await within(self.handle.stats.remote(), CALL_S, f"{self.name}.stats")).running:
                    return
                await asyncio.sleep(RUN_OUT_POLL_S)
        except (*LOST, WaitTimeoutError) as error:
            log.warning("%s is not waited for: %s", self.name, error)

    async def end(self) -> list[Span]:
        """Have its engine end; return what it did that nobody asked for yet."""
        spans: list[Span] = []
        try:
            spans = await within(self.handle.drain_spans.remote(), CALL_S, f"{self.name}.drain_spans")
            await within(self.handle.shutdown.remote(), CALL_S, f"{self.name} to shut down")
        except (*LOST, WaitTimeoutError) as error:
            log.warning("%s did not end by itself, and is killed: %s", self.name, error)
        return spans
