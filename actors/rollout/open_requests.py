"""OpenRequests: what an engine was given and has not answered yet.

Owns the account of one engine's time: busy is when it works on a request, not when requests lie frozen in it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class OpenRequests:
    """The open requests of one engine."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._names: dict[int, str] = {}
        self._count = 0
        self._frozen = False
        self._busy_s = 0.0
        self._busy_since: float | None = None
        self.idle = asyncio.Event()
        """Set while no request is open, frozen or not."""
        self.idle.set()

    def __len__(self) -> int:
        return len(self._names)

    def __str__(self) -> str:
        """Their number and the first names."""
        return f"{len(self)} requests: {', '.join(list(self._names.values())[:5])}"

    @property
    def running(self) -> int:
        """How many the engine works on; 0 while frozen."""
        return 0 if self._frozen else len(self)

    @property
    def busy_s(self) -> float:
        """Seconds during which any was running."""
        since = 0.0 if self._busy_since is None else self._clock() - self._busy_since
        return self._busy_s + since

    def enter(self, name: str) -> int:
        """A request goes into the engine; the ticket with which it leaves. Names may repeat."""
        self._count += 1
        self._names[self._count] = name
        self._changed()
        return self._count

    def leave(self, ticket: int) -> None:
        """A request is answered, or given up."""
        del self._names[ticket]
        self._changed()

    def freeze(self) -> None:
        """The engine stops with its requests in it."""
        self._frozen = True
        self._changed()

    def thaw(self) -> None:
        """The engine goes on."""
        self._frozen = False
        self._changed()

    def _changed(self) -> None:
        if self.running and self._busy_since is None:
            self._busy_since = self._clock()
        elif not self.running and self._busy_since is not None:
            self._busy_s = self.busy_s
            self._busy_since = None
        if self._names:
            self.idle.clear()
        else:
            self.idle.set()
