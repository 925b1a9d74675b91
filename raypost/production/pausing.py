"""How production is stopped: the pool's engines, what is pending, and what does not end.

Owns the order of a pause and what becomes of a group that hangs; groups are moved by the ProduceContext. The
gate is closed before and opened after by the producer.

    abort   engines stop, partial groups come back with their tokens, judges end within their grace period
    wait    engines run to the end of what they have; at the deadline as abort
    keep    engines freeze; groups stay pending
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from raypost.errors import WaitTimeoutError
from raypost.pause import PauseDeadlines, PauseMode
from raypost.production.context import ProduceContext
from raypost.protocols import RolloutControl

log = logging.getLogger(__name__)

CANCEL_GRACE_S = 5.0
"""How long a cancelled group may take to end before it is left behind."""


class Pausing:
    """Stops what the context has in flight."""

    def __init__(self, context: ProduceContext, control: RolloutControl, timeout_s: float) -> None:
        """`timeout_s` bounds each of waiting and aborting."""
        self._context = context
        self._control = control
        self._timeout_s = timeout_s
        self._resend_s = PauseDeadlines(timeout_s).resend_s

    async def stop(self, mode: PauseMode) -> None:
        """Stop as `mode` says; the gate is closed. What still hangs at the deadline is cancelled and put back as
        it was when it started. Raises WaitTimeoutError if the pool did not confirm that its engines stopped."""
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
        """Ask the pool to stop, again and again, until it confirmed it and nothing is pending; with `keep` its
        word is enough. (confirmed, drained) at the latest at the deadline."""
        context, loop = self._context, asyncio.get_running_loop()
        changed = context.pending.changed
        deadline, resend_at = loop.time() + self._timeout_s, loop.time()
        confirmed = drained = False
        request: asyncio.Task[bool] | None = None
        try:
            while not (confirmed and (drained or mode == "keep")) and loop.time() < deadline:
                if request is None and loop.time() >= resend_at:
                    # An abort can miss a request that was on its way: it is sent again until all is drained.
                    request = loop.create_task(self._stop_engines(mode), name="pause the rollout pool")
                    request.add_done_callback(lambda _: changed.notify())
                    resend_at = loop.time() + self._resend_s
                seen = changed.count
                if request is not None and request.done():
                    confirmed |= request.result()
                    request = None
                await context.locked(context.settle)
                drained = not len(context.pending)
                if confirmed and (drained or mode == "keep"):
                    break
                until = deadline if request is not None else min(deadline, resend_at)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(until):
                        await changed.wait(seen)
        finally:
            if request is not None:
                request.cancel()
        return confirmed, drained

    async def _stop_engines(self, mode: PauseMode) -> bool:
        """Ask the pool to stop and, to abort, the agent loops to end judging; False if it has to be asked again."""
        loops = {id(task.agent_loop): task.agent_loop for task in self._context.tasks.values()}
        try:
            await self._control.pause(mode)
            for agent_loop in loops.values() if mode == "abort" else ():
                interrupt = getattr(agent_loop, "interrupt", None)
                if interrupt is not None:
                    await interrupt()
        except self._context.retryable as error:
            log.warning("a pause request met a dead process (%s); it is sent again", type(error).__name__)
            return False
        except WaitTimeoutError as error:
            log.warning("the rollout pool did not confirm a pause yet, and is asked again: %s", error)
            return False
        return True

    async def _cancel_and_put_back(self) -> None:
        context = self._context
        await context.settle()
        hanging = context.pending.running()
        for entry in hanging:
            log.error("group %s did not end within the pause; it is cancelled and put back", entry.key)
            entry.put_back = True
            entry.task.cancel()
        if hanging:
            await asyncio.wait([entry.task for entry in hanging], timeout=CANCEL_GRACE_S)
        await context.settle()
        stubborn = context.pending.running()
        for entry in stubborn:
            log.error("group %s does not end even when cancelled; it is left behind", entry.key)
        await context.put_back(stubborn)
        for entry in stubborn:
            context.pending.forget(entry)
