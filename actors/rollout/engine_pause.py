"""EnginePause: how the engine of one rollout worker is stopped, and which pause is in force.

Owns the mode of the pause and the wait for the requests that it ends. Owns no gate: the worker closes that first, so
that no request comes meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from actors.engine_life import EngineLife
from actors.rollout.open_requests import OpenRequests
from raypost.errors import WaitTimeoutError
from raypost.pause import PauseDeadlines, PauseMode, stricter

if TYPE_CHECKING:
    from actors.rollout.vllm_engine import Engine

log = logging.getLogger(__name__)

ABORT_AGAIN_S = 0.2


class EnginePause:
    """The pause of one engine. Every method belongs to the engine's event loop."""

    def __init__(
        self, name: str, deadlines: PauseDeadlines, requests: OpenRequests, life: EngineLife[Engine]
    ) -> None:
        """`requests`: those that are in the engine."""
        self._name = name
        self._deadlines = deadlines
        self._requests = requests
        self._life = life
        self._mode: PauseMode | None = None
        """Of the pause in force or under way."""
        self._running_out: asyncio.Task[bool] | None = None
        self.confirmed = False
        """Whether the engine said that it is stopped."""

    def overrule(self, mode: PauseMode) -> None:
        """Let `mode` decide, unless what is in force is stricter."""
        before = self._mode
        self._mode = stricter(self._mode, mode)
        if self._mode != before and self._running_out is not None:
            self._running_out.cancel()

    async def stop(self, engine: Engine) -> None:
        """Stop the engine as the mode in force says. Raises WaitTimeoutError naming what did not end."""
        try:
            async with asyncio.timeout(self._deadlines.worker_s):
                await self._stop(engine)
        except TimeoutError as error:
            waited = f"{self._name} waited {self._deadlines.worker_s:.0f} s to end {self._requests}"
            raise WaitTimeoutError(waited) from error

    def over(self) -> None:
        """The engine goes on."""
        self._mode = None
        self._requests.thaw()

    async def _stop(self, engine: Engine) -> None:
        if self._mode == "wait":
            await self._run_out()
        if self._mode == "keep":
            await self._life.alive(engine.pause("keep"))
            self._requests.freeze()
        else:
            await self._abort(engine)
        self.confirmed = True

    async def _run_out(self) -> None:
        """Let requests end until none is left, a stricter pause overrules this one, or time is up.

        The engine itself is not told to wait: that would leave those which still queue in it where they are.
        """
        self._running_out = asyncio.create_task(self._requests.idle.wait(), name=f"{self._name} runs out")
        try:
            await asyncio.wait([self._running_out], timeout=self._deadlines.run_out_s)
        finally:
            self._running_out.cancel()
            self._running_out = None
        if self._mode == "wait" and len(self._requests):
            waited_s = self._deadlines.run_out_s
            log.warning(
                "%s waited %.0f s and aborts what still runs, %s", self._name, waited_s, self._requests
            )
            self._mode = "abort"

    async def _abort(self, engine: Engine) -> None:
        while True:
            await self._life.alive(engine.pause("abort"))
            self._requests.thaw()
            try:
                # A request that passed the gate just before it closed may reach the engine behind the abort,
                # where it queues until the engine resumes: abort again.
                await asyncio.wait_for(self._requests.idle.wait(), ABORT_AGAIN_S)
                return
            except TimeoutError:
                log.warning("%s aborts again: a paused engine still has %s", self._name, self._requests)
