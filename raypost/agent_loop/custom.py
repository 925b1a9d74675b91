"""Agent loops of the user's: how they are made, and what stands between them and production.

Owns what such a loop is given. What it returns is checked by production (production/verdict.py).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raypost.config import RolloutConfig, TaskConfig
from raypost.config.imports import load_function
from raypost.data.tokenizer import Tokenizer
from raypost.errors import ConfigError
from raypost.types import AgentLoop, Generator, Group, GroupKey, Judge


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopContext:
    """What an agent loop is made with."""

    task: TaskConfig
    rollout: RolloutConfig
    generator: Generator
    """The way to the engines."""
    judge: Judge
    """The task's judge."""
    tokenizer: Tokenizer


class CustomAgentLoop:
    """The user's agent loop. Each member that it is given has metadata of its own."""

    def __init__(self, context: LoopContext) -> None:
        """Make the loop that the task names. Raises ConfigError if that is none."""
        options = context.task.agent_loop
        where = f"task {context.task.name!r}: agent_loop.loop"
        assert options.loop is not None, "the configuration requires it"
        make = load_function(options.loop, where, options.file_source)
        try:
            loop: Any = make(context, **options.params)
        # It is the user's code, which may raise anything.
        except Exception as error:
            raise ConfigError(
                f"{where} {options.loop!r} cannot be made with a LoopContext and params {options.params!r:.200}: "
                f"{type(error).__name__}: {error}"
            ) from error
        for method in ("run", "interrupt"):
            if not inspect.iscoroutinefunction(getattr(loop, method, None)):
                raise ConfigError(
                    f"{where} {options.loop!r} makes a {type(loop).__name__} without `async def {method}`: it must be "
                    "an AgentLoop; derive it from raypost.SingleTurnAgentLoop, or write both methods"
                )
        self._loop: AgentLoop = loop

    async def run(self, group: Group) -> Group:
        """Return the group as the user's loop returns it."""
        for state in group.states:
            # What is read from a message shares values among siblings.
            state.metadata = copy.deepcopy(state.metadata)
        return await self._loop.run(group)

    async def interrupt(self) -> None:
        """Pass it on."""
        await self._loop.interrupt()

    async def forget(self, keys: Sequence[GroupKey]) -> None:
        """Pass it on, if the loop has it."""
        forget = getattr(self._loop, "forget", None)
        if forget is not None:
            await forget(keys)
