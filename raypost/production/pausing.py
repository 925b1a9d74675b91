"""Pausing: how production is stopped, and how it goes on.

Owns the gate's opening and closing, the order and the deadlines of a pause, and what becomes of a group that
hangs. Groups are moved by the ProduceContext.

    abort   engines stop, partial groups come back with their tokens, judges end within their grace period
    wait    engines run to the end of what they have; at the deadline as abort
    keep    engines freeze; groups stay pending
    swap    as keep, but the pool loads and resumes by itself
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from raypost.errors import ProductionError, WaitTimeoutError
from raypost.ledger.events import LedgerEvent
from raypost.observe.waits import waiting
from raypost.production.context import ProduceContext
from raypost.types import ProduceBatchStatus, RolloutControl
from raypost.types.pause import PauseDeadlines, PauseMode

log = logging.getLogger(__name__)

CANCEL_GRACE_S = 5.0
"""How long a cancelled group may take to end before it is left behind."""


class Pausing:
    """Stops what is in flight, and lets production go on."""

    def __init__(self, context: ProduceContext, control: RolloutControl, timeout_s: float) -> None:
        """`timeout_s` bounds each of waiting and aborting."""
        self._context = context
        self._control = control
        self._ledger = context.ledger
        self._pending = context.pending
        self._timeout_s = timeout_s
        self._resend_s = PauseDeadlines(timeout_s).resend_s
        self._transition = asyncio.Lock()

    async def pause(self, mode: PauseMode) -> float:
        """Close the gate and stop as `mode` says; returns the seconds it took. See Producer.pause."""
        context = self._context
        started = context.clock()
        async with self._transition:
            # First the gate, then the engines: otherwise a new request would meet a stopped engine.
            await self._pending.close_gate()
            context.status = ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT
            self._ledger.note(LedgerEvent.PAUSING, mode=mode, version=context.version)
            self._ledger.flush()
            await self._stop(mode)
            self._ledger.note(LedgerEvent.PAUSED, mode=mode, version=context.version)
        seconds = context.clock() - started
        context.progress.metrics.pause_s += seconds
        self._ledger.flush()
        return seconds

    async def resume(self, version: int) -> None:
        """Start the engines with `version`, then open the gate. See Producer.resume."""
        async with self._transition:
            self._check_order(version)
            await self._control.resume(version)
            await self._go_on(version)

    async def swap(self, version: int, swap: Callable[[int], Awaitable[None]]) -> float:
        """Go on with `version` once `swap` has brought it into the engines; returns the seconds it took.

        See Producer.swap.
        """
        context = self._context
        started = context.clock()
        async with self._transition:
            self._check_order(version)
            await self._pending.close_gate()
            context.status = ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT
            self._ledger.note(LedgerEvent.PAUSING, mode="keep", version=context.version)
            # Whoever comes after this process must not resume with the version before.
            self._ledger.flush()
            await swap(version)
            await self._go_on(version)
        seconds = context.clock() - started
        context.progress.metrics.pause_s += seconds
        self._ledger.flush()
        return seconds

    def _check_order(self, version: int) -> None:
        served = self._context.version
        if served is not None and version < served:
            raise ProductionError(f"cannot resume with version {version}: version {served} was served")

    async def _go_on(self, version: int) -> None:
        self._context.version = version
        self._context.status = ProduceBatchStatus.NORMAL
        self._ledger.note(LedgerEvent.RESUMED, version=version)
        self._ledger.flush()
        await self._pending.open_gate()

    async def resume_pool(self) -> None:
        """Have the pool serve, if production goes on with a version. Idempotent."""
        async with self._transition:
            if self._pending.gate_open and self._context.version is not None:
                await self._control.resume(self._context.version)

    async def take_over(self) -> None:
        """Go on as the producer did whose process died: resume if it had, else stay paused.

        What that one had at work in the engines and agent loops is ended first: nobody waits for it. What it was asked
        for and had not done is asked for again.
        """
        event, facts = self._ledger.last_note
        at_work = event is LedgerEvent.PAUSING or facts.get("mode") == "keep"
        async with self._transition:
            if event is LedgerEvent.RESUMED or at_work:
                await self._stop("abort")
            if event is LedgerEvent.RESUMED:
                await self._control.resume(facts["version"])
                await self._go_on(facts["version"])

    async def close(self) -> None:
        """Cancel everything in flight, for good."""
        await self._pending.close_gate()
        tasks = [entry.task for entry in self._pending.all()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_GRACE_S)
        for task in tasks:
            if task.done() and not task.cancelled() and task.exception() is not None:
                log.warning("%s ended with %r while production was closed", task.get_name(), task.exception())
        self._ledger.flush()

    async def _stop(self, mode: PauseMode) -> None:
        """Stop what is in flight; the gate is closed. What still hangs at the deadline is cancelled and put back.

        Raises WaitTimeoutError if the pool did not confirm that its engines stopped.
        """
        if mode == "wait":
            if all(await self._ask("wait")):
                return
            log.warning("groups did not end within the pause and are aborted: %s", self._context.describe())
            mode = "abort"
        confirmed, drained = await self._ask(mode)
        if not drained and mode != "keep":
            await self._context.locked(self._cancel_and_put_back)
        if not confirmed:
            raise WaitTimeoutError(
                f"the rollout pool did not confirm its pause within pause_timeout_s={self._timeout_s:.0f}"
            )

    async def _ask(self, mode: PauseMode) -> tuple[bool, bool]:
        """Ask the pool to stop, again and again; returns (confirmed, drained), at the latest at the deadline.

        It ends once the pool confirmed and nothing is pending; with `keep` the confirmation is enough.
        """
        loop, changed = asyncio.get_running_loop(), self._pending.changed
        deadline, resend_at = loop.time() + self._timeout_s, loop.time()
        confirmed = drained = False
        request: asyncio.Task[bool] | None = None
        try:
            while loop.time() < deadline:
                if request is None and loop.time() >= resend_at:
                    # An abort can miss a request that was on its way: it is sent again until all is drained.
                    request = loop.create_task(self._stop_engines(mode), name="pause the rollout pool")
                    request.add_done_callback(lambda _: changed.notify())
                    resend_at = loop.time() + self._resend_s
                seen = changed.count
                if request is not None and request.done():
                    confirmed |= request.result()
                    request = None
                await self._context.locked(self._context.settle)
                drained = not len(self._pending)
                if confirmed and (drained or mode == "keep"):
                    break
                until = deadline if request is not None else min(deadline, resend_at)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(until):
                        with waiting(f"{len(self._pending)} groups to end in a pause", self._timeout_s):
                            await changed.wait(seen)
        finally:
            if request is not None:
                request.cancel()
        return confirmed, drained

    async def _stop_engines(self, mode: PauseMode) -> bool:
        """Ask the pool to stop and, to abort, the agent loops to end judging; returns False to be asked again."""
        loops = {id(task.agent_loop): task.agent_loop for task in self._context.tasks.values()}
        try:
            await self._control.pause(mode)
            for agent_loop in loops.values() if mode == "abort" else ():
                await agent_loop.interrupt()
        except self._context.retryable as error:
            log.warning("a pause request met a dead process (%s); it is sent again", type(error).__name__)
            return False
        except WaitTimeoutError as error:
            log.warning("the rollout pool did not confirm a pause yet, and is asked again: %s", error)
            return False
        return True

    async def _cancel_and_put_back(self) -> None:
        await self._context.settle()
        hanging = self._pending.running()
        for entry in hanging:
            log.error("group %s did not end within the pause; it is cancelled and put back", entry.key)
            entry.put_back = True
            entry.task.cancel()
        if hanging:
            await asyncio.wait([entry.task for entry in hanging], timeout=CANCEL_GRACE_S)
        await self._context.settle()
        stubborn = self._pending.running()
        for entry in stubborn:
            log.error("group %s does not end even when cancelled; it is left behind", entry.key)
        await self._context.put_back(stubborn)
        for entry in stubborn:
            self._pending.forget(entry)
