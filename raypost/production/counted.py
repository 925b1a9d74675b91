"""counted: the replay buffer as production sees it, whose counts come with the answer to whatever may change them.

Production asks for them at every turn, and is the only one that moves groups: what it did not change is as it was. A
call to the buffer is a round trip to another process. All calls are made under production's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

from raypost.types import Buffer, BufferCounts

BatchT = TypeVar("BatchT")
MOVES = ("put", "refresh", "pop", "drop", "lease", "acknowledge")
"""Calls that production makes again and again."""


def counted(buffer: Buffer[BatchT]) -> Buffer[BatchT]:
    """Return `buffer`, which tells its counts from memory while nothing has changed them."""
    return cast(Buffer[BatchT], _Counted(buffer))


async def measured(buffer: Buffer[Any]) -> BufferCounts:
    """Return what the buffer says now, whatever is known of it: it may have lost groups."""
    if isinstance(buffer, _Counted):
        buffer.forget()
    return await buffer.counts()


class _Counted:
    def __init__(self, buffer: Buffer[Any]) -> None:
        self._buffer = buffer
        self._counts: BufferCounts | None = None

    def forget(self) -> None:
        self._counts = None

    async def counts(self) -> BufferCounts:
        if self._counts is None:
            self._counts = await self._buffer.counts()
        return self._counts

    def __getattr__(self, method: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        async def called(*args: Any) -> Any:
            # Forgotten before the call: one that raises may have run.
            self._counts = None
            if method not in MOVES:
                return await getattr(self._buffer, method)(*args)
            answer, self._counts = await self._buffer.then_counts(method, *args)
            return answer

        return called
