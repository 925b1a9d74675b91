"""Functions as users write them, good and bad, for configurations to name."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import numpy as np

from raypost.agent_loop.environment import Observation


def half(tokens: Any, config: Any) -> Any:
    loss = -(tokens.logprobs_T * tokens.advantages_T)
    return loss, loss > 1e9


def detached(tokens: Any, config: Any) -> Any:
    loss, clipped = half(tokens, config)
    return loss.detach(), clipped


def summed(tokens: Any, config: Any) -> Any:
    return half(tokens, config)[0].sum()


def unclipped(tokens: Any, config: Any) -> Any:
    loss, _ = half(tokens, config)
    return loss, loss


def centred(scored: Any, config: Any) -> Any:
    return scored.rewards_N - np.mean(scored.rewards_N)


def too_few(scored: Any, config: Any) -> Any:
    return scored.rewards_N[1:]


def no_arguments() -> float:
    return 0.0


def everything(group: Any) -> bool:
    return True


def nothing(group: Any) -> bool:
    return False


def reads_more(group: Any) -> bool:
    return bool(group.states[0].metadata["difficulty"] > 3)


async def slowly(group: Any) -> bool:
    return True


def says(completed: int, wanted: int) -> str:
    return "yes"


def other_tasks(step: int, weights: dict[str, float]) -> dict[str, float]:
    return {"another": 1.0}


def ends(*args: Any) -> None:
    os._exit(3)


def exits(*args: Any) -> None:
    sys.exit("not today")


def hangs(*args: Any) -> None:
    time.sleep(1000)


class Good:
    def __init__(self, size: int = 3) -> None:
        self.size = size

    def reset(self, metadata: dict[str, Any]) -> Observation:
        assert metadata["question"]
        return Observation(text="go")

    async def step(self, action: str) -> Observation:
        return Observation(done=True)


class WithoutStep:
    def reset(self, metadata: dict[str, Any]) -> Observation:
        return Observation()


class WithoutMetadata(Good):
    def reset(self) -> Observation:  # type: ignore[override]
        return Observation()


class SaysText(Good):
    def reset(self, metadata: dict[str, Any]) -> str:  # type: ignore[override]
        return "go"
