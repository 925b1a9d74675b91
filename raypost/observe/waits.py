"""The waits of this process that are open now: for what, since when, until when, and for which group.

    async with asyncio.timeout(limit_s):
        with waiting("judge-0.judge", limit_s):
            ...

Owns the record alone; `raypost.doctor` writes it down and finds out whom a run waits for. To open and close a wait
takes about a microsecond, on whatever thread.
"""

from __future__ import annotations

import contextvars
import time
from types import TracebackType
from typing import Literal, NamedTuple

Outside = Literal["judge", "environment", "engine", "node", "file system"]
"""What a wait may be for that is no role of the run."""

working_for: contextvars.ContextVar[str | None] = contextvars.ContextVar("working_for", default=None)
"""The group that this task works for, such as `sums/7`; tasks that it starts inherit it."""


class Wait(NamedTuple):
    """One wait."""

    what: str
    """Such as `judge-0.judge`: the name of the role that it waits for stands in it."""
    since_s: float
    """`time.monotonic()` of its begin."""
    limit_s: float | None
    """Seconds after which it is given up; None: it has no deadline of its own."""
    outside: Outside | None
    group: str | None


_Opened = tuple[str, float, float | None, Outside | None, str | None]
_open: dict[int, _Opened] = {}
_now = time.monotonic


class waiting:
    """Registers a wait for as long as its block runs."""

    __slots__ = ("_limit_s", "_outside", "_what")

    def __init__(self, what: str, limit_s: float | None = None, outside: Outside | None = None) -> None:
        """`outside`: what kind of thing is waited for, if it is no role."""
        self._what = what
        self._limit_s = limit_s
        self._outside = outside

    def __enter__(self) -> None:
        """Open the wait."""
        _open[id(self)] = (self._what, _now(), self._limit_s, self._outside, working_for.get())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        _open.pop(id(self), None)


def open_waits() -> list[Wait]:
    """Return the open waits, the oldest first. It may be called on any thread."""
    while True:
        try:
            return [Wait(*opened) for opened in list(_open.values())]
        except RuntimeError:  # another thread opened one meanwhile
            continue
