"""Waits that something else may end early: a request to stop, or the end of production."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import NoReturn, TypeVar

from raypost.errors import ProductionError, StoppedError

T = TypeVar("T")


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


async def production_ended(production: asyncio.Task[None]) -> NoReturn:
    """Raise what ended production, once it has ended; the task itself is left running."""
    await asyncio.wait({production})
    production.result()
    raise ProductionError("production ended without an error although the run goes on")
