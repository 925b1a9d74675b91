"""Episode: one environment for one trajectory, plain or asynchronous.

Owns the call to an environment with its deadline, the thread of plain methods, and the end. Owns neither turns
nor the consequence of a failure (environment.py). Invariant: a plain method never blocks the event loop, and all plain
methods of one environment run in the same thread, one after the other.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from raypost.agent_loop.threads import SideThread
from raypost.observe.waits import waiting
from raypost.types import IntArray

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, frozen=True)
class Observation:
    """An environment's answer: text, ids or messages, the reward of the turn, and whether it was the last."""

    text: str = ""
    ids: IntArray | None = None
    messages: Sequence[Mapping[str, Any]] = ()
    """Rendered by the task's chat template instead: {"role": "user", "content": ...}. What `reset` observes so stands
    in the prompt, behind the task's own messages."""
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    """What else it has to say: `raypost explain` shows the beginning of it with the turn. Nothing else uses it."""


def saying(text: str, *, messages: bool, **more: Any) -> Observation:
    """Return an observation of words: a message of the user, or a text on lines of its own."""
    if messages:
        return Observation(messages=[{"role": "user", "content": text}], **more)
    return Observation(text=f"\n{text}\n", **more)


class Environment(Protocol):
    """What the policy interacts with. Methods may be coroutine functions.

    `close()`, if there is one, is called at the end, also after a failure. With an attribute `deterministic` that is
    true it may be replayed: the same actions are answered in the same way by another one, after the same reset.
    """

    def reset(self, metadata: dict[str, Any]) -> Observation | Awaitable[Observation]:
        """Begin with the prompt that has this metadata. The observation follows the prompt.

        With a parameter `seed` it is given a number that all siblings of a group share.
        """
        ...

    def step(self, action: Any) -> Observation | Awaitable[Observation]:
        """Answer an action: its text, or its ids if the agent loop has `action="ids"`."""
        ...


def takes_seed(environment: Any) -> bool:
    """Return whether an environment's reset has a parameter `seed`."""
    try:
        parameters = inspect.signature(environment.reset).parameters
    except (TypeError, ValueError):
        return False
    return "seed" in parameters


class Episode:
    """Hosts an environment from its making to its end."""

    def __init__(self, name: str, timeout_s: float) -> None:
        """`timeout_s` bounds each call."""
        self.environment: Environment | None = None
        self._thread = SideThread(f"environment {name}")
        self._timeout_s = timeout_s

    async def ask(self, method: str, argument: object, **more: object) -> Observation:
        """Call a method and return its answer. Raises TimeoutError, TypeError, and what the environment raises."""
        deadline = asyncio.timeout(self._timeout_s)
        try:
            what = f"{type(self.environment).__name__}.{method}"
            async with deadline:
                called = getattr(self.environment, method)
                asked = functools.partial(called, **more) if more else called
                with waiting(what, self._timeout_s, outside="environment"):
                    seen = await self._thread.call(asked, argument)
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
