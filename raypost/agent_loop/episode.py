"""Episode: one environment for one trajectory, plain or asynchronous.

Owns the call to an environment with its deadline, the thread of plain methods, and the end. Owns neither turns
nor the consequence of a failure (environment.py). Invariant: a plain method never blocks the event loop, and all plain
methods of one environment run in the same thread, one after the other.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Protocol

from raypost.agent_loop.threads import SideThread
from raypost.types import IntArray

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, frozen=True)
class Observation:
    """An environment's answer: text, or ids instead, the reward of the turn, and whether it was the last."""

    text: str = ""
    ids: IntArray | None = None
    reward: float = 0.0
    done: bool = False


class Environment(Protocol):
    """What the policy interacts with. Methods may be coroutine functions.

    `close()`, if there is one, is called at the end, also after a failure.
    """

    def reset(self, metadata: dict[str, Any]) -> Observation | Awaitable[Observation]:
        """Begin with the prompt that has this metadata. The observation follows the prompt."""
        ...

    def step(self, action: Any) -> Observation | Awaitable[Observation]:
        """Answer an action: its text, or its ids if the agent loop has `action="ids"`."""
        ...


class Episode:
    """Hosts an environment from its making to its end."""

    def __init__(self, name: str, timeout_s: float) -> None:
        """`timeout_s` bounds each call."""
        self.environment: Environment | None = None
        self._thread = SideThread(f"environment {name}")
        self._timeout_s = timeout_s

    async def ask(self, method: str, argument: object) -> Observation:
        """Call a method and return its answer. Raises TimeoutError, TypeError, and what the environment raises."""
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                seen = await self._thread.call(getattr(self.environment, method), argument)
        except TimeoutError as error:
            if deadline.expired():
                raise TimeoutError(f"it took longer than step_timeout_s={self._timeout_s:.0f}") from error
            raise
        if not isinstance(seen, Observation):
            raise TypeError(f"{method} must return an Observation, got {type(seen).__name__}")
        return seen

    async def close(self) -> None:
        """Close the environment, if it has `close`, and end its thread."""
        close = getattr(self.environment, "close", None)
        if inspect.iscoroutinefunction(close):
            try:
                async with asyncio.timeout(self._timeout_s):
                    await close()
            # A supervision boundary: the trajectory is complete, whatever happens to the environment afterwards.
            except Exception as error:
                log.warning("an environment's close failed: %r", error)
        elif close is not None:
            self._thread.post(close)
        self._thread.end()
