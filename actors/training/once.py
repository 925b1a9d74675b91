"""Calls that run once, however often they are delivered: what makes a call of ranks repeatable when it was lost.

    caller   once(caller, 7, "publish", 3) --lost--> ...      asked again with the same number
    rank     number 7 is new: run it, keep its outcome        number 7 again: the outcome that was kept

Most calls of ranks are collectives: run twice by one rank alone, such a call waits for the others for ever.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from raypost.errors import RankLostError

KEPT_S = 300.0
"""How long an outcome is kept for a caller that makes no other call: it may hold a version of the weights alive."""


@dataclass(slots=True)
class _Outcome:
    """Of the last call of one caller."""

    number: int
    value: Any = None
    error: Exception | None = None
    is_kept: bool = True
    at_s: float = 0.0


class Once:
    """Base of an actor class that runs one call at a time, and each once."""

    def __init__(self) -> None:
        """Nobody has called yet."""
        self._outcomes: dict[str, _Outcome] = {}

    def once(self, caller: str, number: int, method: str, *args: Any) -> Any:
        """Return what `method` returns, or raise what it raises; run it only if `number` is new.

        A caller makes one call at a time, and counts them. Raises RankLostError for one that came late, when its caller
        had made another, and for one whose outcome is kept no more.
        """
        last = self._outcomes.get(caller)
        if last is None or number > last.number:
            last = self._outcomes[caller] = _Outcome(number, is_kept=False)
            self._forget_idle()
            try:
                last.value = getattr(self, method)(*args)
            except Exception as error:
                last.error = error
            last.is_kept, last.at_s = True, time.monotonic()
        if number < last.number or not last.is_kept:
            raise RankLostError(f"{self!r} was asked for {method} too late: make the call again")
        if last.error is not None:
            raise last.error
        return last.value

    def _forget_idle(self) -> None:
        for outcome in self._outcomes.values():
            if time.monotonic() - outcome.at_s > KEPT_S:
                outcome.value, outcome.error, outcome.is_kept = None, None, False
