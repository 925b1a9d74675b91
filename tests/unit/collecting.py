"""A world for collectors without Ray: a tokenizer of numbers, scripted generators and environments."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

import raypost
from raypost.agent_loop.environment import Observation
from raypost.collector import Collector
from raypost.data.prompt import Prompt
from raypost.types import GenerateRequest, GenerateResult, IntArray
from tests.unit.prompts import STOP


class Numbers:
    """A tokenizer whose text is its ids."""

    eos_ids = (STOP,)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> IntArray:
        return np.asarray([int(word) for word in text.split()], np.int32)

    def decode(self, ids: IntArray) -> str:
        return " ".join(map(str, ids))


class Engine:
    """A plain generator: two tokens after `seconds`, of the version it holds."""

    def __init__(self, seconds: float = 1.0) -> None:
        self.seconds, self.version, self.running = seconds, 0, 0
        self.most = 0

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.running -= 1
        return GenerateResult(
            response_ids=np.asarray([9, STOP], np.int32),
            logprobs=np.full(2, -0.5, np.float32),
            policy_versions=np.full(2, self.version, np.int32),
            finish_reason="stop",
            worker="w0",
        )


class Pool(Engine):
    """A generator with a pause of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    async def pause(self, mode: str = "abort") -> None:
        self.calls.append(mode)

    async def resume(self, version: int) -> None:
        self.calls.append(version)
        self.version = version


class Steps:
    """Done after as many turns as the prompt's metadata says; reward 1 a turn."""

    broken: Callable[[int], bool] = staticmethod(lambda number: False)

    async def reset(self, metadata: dict[str, Any]) -> Observation:
        self.turns, self.number, self.turn = metadata["turns"], metadata["number"], 0
        return Observation()

    async def step(self, action: str) -> Observation:
        assert action == "9 2"
        if self.broken(self.number):
            raise ValueError(f"no world for {self.number}")
        self.turn += 1
        return Observation(text="60", reward=1.0, done=self.turn >= self.turns)


class PlainSteps:
    """The same, plain."""

    def reset(self, metadata: dict[str, Any]) -> Observation:
        self.turns, self.turn = metadata["turns"], 0
        return Observation()

    def step(self, action: str) -> Observation:
        self.turn += 1
        return Observation(text="60", reward=1.0, done=self.turn >= self.turns)


PROMPTS = [Prompt("5 6", {"turns": 1 + number % 3, "number": number}) for number in range(12)]
"""1, 2 and 3 turns, four times: 24 turns an epoch."""


def collect(engine: Any = None, environment: Any = Steps, **options: Any) -> Collector:
    tokenizer: Any = Numbers()
    return raypost.collect(engine or Engine(), tokenizer, PROMPTS, environment=environment, **options)


def really(main: Coroutine[Any, Any, Any]) -> Any:
    """Under the real clock: threads do not move the virtual one."""

    async def bounded() -> Any:
        async with asyncio.timeout(30):
            return await main

    return asyncio.run(bounded())


def quick() -> Engine:
    return Engine(seconds=0.001)


async def listed(collector: Collector) -> list[Any]:
    return [batch async for batch in collector]


def flat(batches: list[Any]) -> list[Any]:
    return [item for batch in batches for item in batch]


def sizes(batches: list[Any]) -> list[int]:
    return [len(batch) for batch in batches]


async def alone() -> None:
    """No task is left but the caller's."""
    assert asyncio.all_tasks() == {asyncio.current_task()}


def environment(which: str) -> Any:
    """One whose third prompts, or all, are broken."""
    broken = {"some": lambda number: number % 3 == 2, "always": lambda number: True}[which]
    return type("Broken", (Steps,), {"broken": staticmethod(broken)})
