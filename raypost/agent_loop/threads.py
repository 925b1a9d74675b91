"""Threads beside an event loop: SideThread for calls that block it, LoopThread for callers that have none.

Both own one daemon thread. A call that hangs in a SideThread holds up the calls behind it, never the event loop
and never the end of the process; the caller has the deadline.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

log = logging.getLogger(__name__)

STOP_S = 30.0
"""How long a loop may take to end what it is doing."""
T = TypeVar("T")


class SideThread:
    """Runs functions that block. Calls that belong together see the same thread."""

    def __init__(self, name: str) -> None:
        """`name`: of the thread, which starts with the first call."""
        self._name = name
        self._calls: SimpleQueue[tuple[Future[object], Callable[[], object]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    async def call(self, function: Callable[..., object], *args: object) -> Any:
        """Return `function(*args)`: a coroutine function is awaited here, any other runs in the thread.

        If this is cancelled, a function that runs already goes on to its end, and its result is dropped.
        """
        if inspect.iscoroutinefunction(function):
            return await function(*args)
        result = await asyncio.wrap_future(self._submit(functools.partial(function, *args)))
        return await result if inspect.isawaitable(result) else result

    def post(self, function: Callable[[], object]) -> None:
        """Run `function` after the calls before it, without waiting. Its errors are logged."""
        self._submit(function).add_done_callback(self._log_failure)

    def end(self) -> None:
        """End the thread after the calls before this one. Idempotent."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread = None

    def _submit(self, function: Callable[[], object]) -> Future[object]:
        future: Future[object] = Future()
        self._calls.put((future, function))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        return future

    def _work(self) -> None:
        while (entry := self._calls.get()) is not None:
            future, function = entry
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            # A supervision boundary: any error goes to the caller that waits for the future.
            except BaseException as error:
                # StopIteration, SystemExit and the like would end the coroutine that awaits them.
                ordinary = isinstance(error, Exception) and not isinstance(error, StopIteration)
                future.set_exception(error if ordinary else RuntimeError(f"it raised {error!r}"))
            del entry, future, function

    def _log_failure(self, future: Future[object]) -> None:
        error = future.exception()
        if error is not None:
            log.warning("%s: %s", self._name, repr(error)[:500])


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self, name: str) -> None:
        """Start the thread `name`."""
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def stop(self) -> None:
        """Cancel the tasks in the loop, and end it. A task that does not end in time is left behind."""
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            log.warning("%s did not end within %g s and is left behind", self._thread.name, STOP_S)

    def _work(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._ended.wait())
