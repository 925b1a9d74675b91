"""FrozenPool: the workers of one frozen model as one, for use inside another actor.

Owns which worker is asked, how long an answer is waited for, and the error of one that never comes. A worker that died
is asked again once Ray has restarted it.
"""

from __future__ import annotations

from typing import Any

from actors.remote import ACTOR_ERRORS, RemotePool, within
from raypost.errors import JudgeError


class FrozenPool:
    """Calls to the least loaded of several workers; `many` as for Remote."""

    def __init__(self, workers: list[str], timeout_s: float, many: dict[str, int]) -> None:
        """`workers`: names of FrozenWorker actors.

        `timeout_s`: longest time an answer may take, a worker's restart included.
        """
        self._workers = list(workers)
        self._timeout_s = timeout_s
        self._pool = RemotePool(self._workers, timeout_s, many=many)

    async def _ask(self, method: str, *args: Any) -> Any:
        """Return the least loaded worker's answer. Raises RaypostError if none comes within the deadline."""
        names = ", ".join(self._workers)
        try:
            return await within(getattr(self._pool, method)(*args), self._timeout_s, f"one of {names}")
        except ACTOR_ERRORS as error:
            raise JudgeError(f"none of {names} came back ({type(error).__name__})") from error
