"""A world for environment loops without Ray: a scripted engine and scripted environments."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from raypost.agent_loop.environment import EnvironmentAgentLoop, Observation
from raypost.packed import pack_groups, unpack_groups
from raypost.types import (
    GenerateRequest,
    GenerateResult,
    Group,
    IntArray,
    RolloutState,
    SampleParams,
)
from tests.unit.production import STOP, virtual


def result(ids: list[int], reason: str = "stop", version: int = 0) -> GenerateResult:
    return GenerateResult(
        response_ids=np.asarray(ids, np.int32),
        logprobs=np.full(len(ids), -0.5, np.float32),
        policy_versions=np.full(len(ids), version, np.int32),
        finish_reason=reason,
        worker="w0",
    )


class Engine:
    """Answers what `script` says; records what was asked."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.requests = list(answers), []

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, BaseException):
            raise answer
        if answer is None:
            await asyncio.sleep(1e9)
        return answer


class Echo:
    """Observes 60 and the number of the turn; done after `turns`; reward 1 a turn. A plain environment."""

    turns = 3
    reset_text = ""
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
    """The same, asynchronous."""

    seconds = 0.0

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


def decode(ids: IntArray) -> str:
    return " ".join(map(str, ids))


def init(count: int = 1, max_tokens: int = 32) -> Group:
    # As the sampler does it: one metadata for all members.
    metadata = {"answer": "4"}
    states = [
        RolloutState(
            task="default",
            group_id=0,
            sample_index=index,
            prompt_ids=np.asarray([5, 6], np.int32),
            sample_params=SampleParams(max_tokens=max_tokens, stop_token_ids=(STOP,)),
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
