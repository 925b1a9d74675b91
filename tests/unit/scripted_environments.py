"""Environments that answer by script, and agent loops over them, for tests without Ray."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from raypost.agent_loop.environment import EnvironmentAgentLoop, Observation
from raypost.types import Group, IntArray, RolloutState, SampleParams
from raypost.types.packed import pack_groups, unpack_groups
from tests.unit.production import virtual
from tests.unit.prompts import STOP
from tests.unit.scripted_generator import ScriptedGenerator, decode


class AnswersInTurn(ScriptedGenerator):
    """Gives one answer a request, the last one again and again: a result, an error, or None to hang."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)
        super().__init__(lambda _: self._answers.pop(0) if len(self._answers) > 1 else self._answers[0])


class Echo:
    """Observes 60 and the number of the turn; done after `turns`; reward 1 a turn. A plain environment."""

    deterministic = True
    turns = 3
    reset_text = ""
    seconds = 0.0
    made: list[Echo]

    def __init__(self) -> None:
        self.actions: list[Any] = []
        self.closed = 0
        self.threads: set[int] = set()
        type(self).made.append(self)

    def reset(self, metadata: dict[str, Any]) -> Observation:
        self.metadata = metadata
        self.threads.add(threading.get_ident())
        return Observation(text=self.reset_text)

    def step(self, action: Any) -> Observation:
        self.actions.append(action)
        self.threads.add(threading.get_ident())
        return self.answer(len(self.actions))

    def answer(self, turn: int) -> Observation:
        return Observation(text=f"60 {turn}", reward=1.0, done=turn >= self.turns)

    def close(self) -> None:
        self.closed += 1


class AsyncEcho(Echo):
    """The same, asynchronous; each call takes `seconds`."""

    async def reset(self, metadata: dict[str, Any]) -> Observation:  # type: ignore[override]
        await asyncio.sleep(self.seconds)
        return Echo.reset(self, metadata)

    async def step(self, action: Any) -> Observation:  # type: ignore[override]
        await asyncio.sleep(self.seconds)
        return Echo.step(self, action)

    async def close(self) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        self.closed += 1


def environment(base: type[Echo] = AsyncEcho, **attributes: Any) -> type[Echo]:
    """A fresh class, so that each test sees its own environments."""
    return type("Scripted", (base,), {"made": [], **attributes})


def encode(text: str) -> IntArray:
    return np.asarray([int(word) for word in text.split()], np.int32)


def init(count: int = 1, max_tokens: int = 32, min_tokens: int = 0) -> Group:
    # As the sampler does it: one metadata for all members.
    metadata = {"answer": "4"}
    states = [
        RolloutState(
            task="default",
            group_id=0,
            sample_index=index,
            prompt_ids=np.asarray([5, 6], np.int32),
            sample_params=SampleParams(max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=(STOP,)),
            metadata=metadata,
        )
        for index in range(count)
    ]
    return Group(task="default", group_id=0, states=states)


def loop_of(engine: Any, kind: Callable[[], Any], **options: Any) -> EnvironmentAgentLoop:
    return EnvironmentAgentLoop(engine, kind, encode, decode, **options)


def run(engine: Any, kind: Callable[[], Any], group: Group, **options: Any) -> Group:
    return virtual(loop_of(engine, kind, **options).run(group))


def really(engine: Any, kind: Callable[[], Any], group: Group, **options: Any) -> Group:
    """Under the real clock: threads do not move the virtual one."""
    return asyncio.run(loop_of(engine, kind, **options).run(group))


def carried(group: Group) -> Group:
    """As it is after the buffer: packed, unpacked, somebody else's arrays."""
    (one,) = unpack_groups(pack_groups([group]))
    return one
