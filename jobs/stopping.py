"""What ends a run early: signals, and waits that a request to stop or the end of production may end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable
from typing import NoReturn, TypeVar

from raypost.errors import ProductionError, StoppedError

T = TypeVar("T")
log = logging.getLogger(__name__)

LAST_CALL_S = 15.0
"""How long each role is waited for at the end of a run: it may be the one that hangs."""

_TERMINAL = [stream for stream in (1, 2) if os.isatty(stream)]
"""Of standard output and error, those that are a terminal: of one that is gone nobody can tell."""


def stop_signals() -> list[int]:
    """Return the signals that ask a run to stop: Ctrl-C, SIGTERM, and the end of its terminal unless that is ignored.

    `nohup` has the last one ignored.
    """
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if ignored else [signal.SIGHUP])]


def outlive_terminal(number: int) -> None:
    """After signal `number`: if it says that the terminal is gone, write to nowhere instead, so that no print fails."""
    if number != signal.SIGHUP:
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in _TERMINAL:
        os.dup2(nowhere, stream)
    os.close(nowhere)


async def unless(work: Awaitable[T], *ends: Awaitable[NoReturn]) -> T:
    """Return the result of `work`; if one of `ends` raises first, cancel `work` and raise that error.

    Whatever did not end is cancelled and awaited before this returns.
    """
    task = asyncio.ensure_future(work)
    others = [asyncio.ensure_future(end) for end in ends]
    try:
        await asyncio.wait({task, *others}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            for other in others:
                if other.done():
                    other.result()
        return await task
    finally:
        for one in (task, *others):
            one.cancel()
        await asyncio.gather(task, *others, return_exceptions=True)


async def stopped(stop: asyncio.Event, message: str) -> NoReturn:
    """Raise StoppedError once `stop` is set."""
    await stop.wait()
    raise StoppedError(message)


async def watching(task: asyncio.Task[NoReturn]) -> NoReturn:
    """Raise what ends a task that never returns, once it has ended; the task itself is left running."""
    await asyncio.wait({task})
    task.result()


async def production_ended(production: asyncio.Task[None]) -> NoReturn:
    """Raise what ended production, once it has ended; the task itself is left running."""
    await asyncio.wait({production})
    production.result()
    raise ProductionError("production ended without an error although the run goes on")


async def last_call(failed: str, work: Awaitable[T]) -> T | None:
    """Return the result of what is tried once more at the end, for LAST_CALL_S; None, with a warning, if it fails."""
    try:
        async with asyncio.timeout(LAST_CALL_S):
            return await work
    # A supervision boundary: what fails at the end must not hide why the run ends.
    except Exception as error:
        log.warning("%s: %s: %s", failed, type(error).__name__, error)
        return None
