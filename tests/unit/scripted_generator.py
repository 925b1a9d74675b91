"""A generator and a judge that answer by script, for tests of agent loops without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from raypost.config import RolloutConfig, StrategyConfig
from raypost.types import GenerateRequest, GenerateResult, Group, IntArray, RolloutState, Status
from tests.unit.production import state

TEN_SECONDS_OF_GRACE = RolloutConfig(pause_timeout_s=240)
"""Under it, what `interrupt` finds may go on for ten seconds."""
NOT_PARTIAL = StrategyConfig(enable_partial_rollout=False)
"""Interrupted trajectories start again."""


def result(
    ids: list[int], reason: str = "stop", version: int = 0, logprobs: int | None = None
) -> GenerateResult:
    return GenerateResult(
        response_ids=np.asarray(ids, np.int32),
        logprobs=np.full(len(ids) if logprobs is None else logprobs, -0.5, np.float32),
        policy_versions=np.full(len(ids), version, np.int32),
        finish_reason=reason,
        worker="w0",
    )


class ScriptedGenerator:
    """Answers what `script` says; records what was asked."""

    def __init__(self, script: Callable[[GenerateRequest], Any]) -> None:
        self.script = script
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.requests.append(request)
        answer = self.script(request)
        if isinstance(answer, BaseException):
            raise answer
        if answer is None:
            await asyncio.sleep(1e9)
        assert isinstance(answer, GenerateResult)
        return answer


class Scorer:
    """Reward 1 for everybody, after `seconds`, or raises."""

    def __init__(self, seconds: float = 0.0, rewards: list[float] | BaseException | None = None) -> None:
        self.seconds = seconds
        self.rewards = rewards
        self.calls: list[list[int]] = []

    async def judge(self, states: list[RolloutState]) -> list[float]:
        self.calls.append([one.sample_index for one in states])
        await asyncio.sleep(self.seconds)
        if isinstance(self.rewards, BaseException):
            raise self.rewards
        return [1.0] * len(states) if self.rewards is None else self.rewards


def decode(ids: IntArray) -> str:
    return " ".join(map(str, ids))


def init(count: int = 1, max_tokens: int = 16) -> Group:
    states = [state([], sample_index=i, status=Status.INIT, max_tokens=max_tokens) for i in range(count)]
    return Group(task="default", group_id=0, states=states)


def of(*states: RolloutState) -> Group:
    return Group(task="default", group_id=0, states=list(states))
