"""EngineGate: which requests are in the engine of one rollout worker, and how a pause stops them.

Owns the gate in front of the engine, the mode of the pause in force and the wait for the requests that it ends. The
way of a pause to this place is drawn in raypost/types/pause.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from actors.engine.life import EngineLife
from raypost.errors import WaitTimeoutError
from raypost.observe.spans import ROLLOUT, Span, SpanLog
from raypost.types import Work
from raypost.types.pause import PauseDeadlines, PauseMode, stricter

if TYPE_CHECKING:
    from actors.rollout.vllm_engine import RolloutEngine

log = logging.getLogger(__name__)

ABORT_AGAIN_S = 0.2


class OpenRequests:
    """The requests that one engine was given and has not answered yet, and when it worked on some."""

    def __init__(self, worker: str) -> None:
        """Begin without a request."""
        self._open: dict[int, tuple[str, int]] = {}
        self._count = self._tokens = 0
        self._frozen = False
        self._spans = SpanLog(worker)
        self._busy_since: float | None = None
        self._request_s, self._counted_s = 0.0, time.monotonic()
        self.idle = asyncio.Event()
        """Set while no request is open, frozen or not."""
        self.idle.set()

    def __len__(self) -> int:
        """Return how many requests are open."""
        return len(self._open)

    def __str__(self) -> str:
        """Return their number and the first names."""
        return f"{len(self)} requests: {', '.join([name for name, _ in self._open.values()][:5])}"

    @property
    def work(self) -> Work:
        """How many are open, and the tokens that they may come to."""
        return Work(len(self), self._tokens)

    @property
    def frozen(self) -> bool:
        """Whether the engine stopped with its requests in it."""
        return self._frozen

    @frozen.setter
    def frozen(self, frozen: bool) -> None:
        self._count_time()
        self._frozen = frozen
        self._account()

    @property
    def running(self) -> int:
        """How many the engine works on; 0 while frozen."""
        return 0 if self.frozen else len(self)

    def enter(self, name: str, tokens: int = 0) -> int:
        """Count a request of at most so many tokens in; return the ticket with which it leaves. Names may repeat."""
        self._count_time()
        self._count += 1
        self._open[self._count] = name, tokens
        self._tokens += tokens
        self.idle.clear()
        if self._busy_since is None:
            self._account()
        return self._count

    def leave(self, ticket: int) -> None:
        """Count a request out: it is answered or given up."""
        self._count_time()
        self._tokens -= self._open.pop(ticket)[1]
        if not self._open:
            self.idle.set()
            self._account()

    @property
    def request_s(self) -> float:
        """Seconds that the engine worked on each request, summed over all so far."""
        self._count_time()
        return self._request_s

    def _count_time(self) -> None:
        now = time.monotonic()
        self._request_s += self.running * (now - self._counted_s)
        self._counted_s = now

    def drain_spans(self) -> list[Span]:
        """Return the intervals in which the engine worked on requests, since the last call."""
        self._account()
        return self._spans.drain()

    def _account(self) -> None:
        """Close the interval in which the engine works, and open the next one if it still does."""
        now = time.time()
        if self._busy_since is not None:
            self._spans.add(ROLLOUT, self._busy_since, now)
        self._busy_since = now if self.running else None


class EngineGate:
    """The gate and the pause of one engine. Every method belongs to the engine's event loop."""

    def __init__(self, name: str, deadlines: PauseDeadlines, life: EngineLife[RolloutEngine]) -> None:
        """`name`: of the worker, for messages and spans."""
        self._name = name
        self.deadlines = deadlines
        self._life = life
        self._mode: PauseMode | None = None
        """Of the pause in force or under way."""
        self._running_out: asyncio.Task[bool] | None = None
        self.requests = OpenRequests(name)
        self.is_open = False
        self.stopped = False
        """Whether the engine confirmed that it has stopped."""

    def close(self, mode: PauseMode) -> None:
        """Refuse further requests and let `mode` hold, unless the mode in force is stricter."""
        self.is_open = False
        before = self._mode
        self._mode = stricter(self._mode, mode)
        if self._mode != before and self._running_out is not None:
            self._running_out.cancel()

    async def stop(self, engine: RolloutEngine) -> None:
        """Stop the engine as the mode in force says. Raises WaitTimeoutError naming what did not end."""
        try:
            async with asyncio.timeout(self.deadlines.worker_s):
                if self._mode == "wait":
                    await self._run_out()
                if self._mode == "keep":
                    await self._life.alive(engine.pause("keep"))
                    self.requests.frozen = True
                else:
                    await self._abort(engine)
        except TimeoutError as error:
            waited = f"{self._name} waited {self.deadlines.worker_s:.0f} s to end {self.requests}"
            raise WaitTimeoutError(waited) from error
        self.stopped = True

    @property
    def mode(self) -> PauseMode:
        """The mode in force; "abort" for an engine that has not served yet."""
        return self._mode or "abort"

    def open(self) -> None:
        """Let requests in: the engine runs again, and so do the frozen ones."""
        self._mode = None
        self.requests.frozen = False
        self.is_open = True

    async def _run_out(self) -> None:
        """Let requests end until none is left, a stricter pause overrules this one, or time is up.

        The engine itself is not told to wait: requests that still queue in it would stay there.
        """
        self._running_out = asyncio.create_task(self.requests.idle.wait(), name=f"{self._name} runs out")
        try:
            await asyncio.wait([self._running_out], timeout=self.deadlines.run_out_s)
        finally:
            self._running_out.cancel()
            self._running_out = None
        if self._mode == "wait" and len(self.requests):
            waited_s = self.deadlines.run_out_s
            log.warning(
                "%s waited %.0f s and aborts what still runs, %s", self._name, waited_s, self.requests
            )
            self._mode = "abort"

    async def _abort(self, engine: RolloutEngine) -> None:
        while True:
            await self._life.alive(engine.pause("abort"))
            self.requests.frozen = False
            try:
                # A request that passed the gate just before it closed may reach the engine behind the abort,
                # where it queues until the engine resumes: abort again.
                await asyncio.wait_for(self.requests.idle.wait(), ABORT_AGAIN_S)
                return
            except TimeoutError:
                log.warning("%s aborts again: a paused engine still has %s", self._name, self.requests)
