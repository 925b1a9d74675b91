"""An environment and an agent for the end-to-end tests, which score the last number that was said."""

from __future__ import annotations

import re
from typing import Any

from raypost.agent_loop.environment import Observation
from raypost.agent_loop.session import Session


class AskTwice:
    """Two turns about one sum; plain methods, as most environments have."""

    def __init__(self, reward: float) -> None:
        self.reward, self.answer, self.turns = reward, "", 0

    def reset(self, metadata: dict[str, Any]) -> Observation:
        self.answer = str(metadata["answer"])
        return Observation()

    def step(self, action: str) -> Observation:
        self.turns += 1
        if self.turns == 1:
            return Observation(text="\n")
        numbers = re.findall(r"-?\d+", action)
        right = bool(numbers) and numbers[-1] == self.answer
        return Observation(reward=self.reward * right, done=True)


async def asks_anew(session: Session) -> float:
    """Asks, then asks again as if nothing had been said: two trajectories; the last number of each counts a half."""
    replies = [await session.complete(), await session.complete()]
    words = [reply["choices"][0]["message"]["content"] for reply in replies]
    right = [re.findall(r"-?\d+", text)[-1:] == [str(session.metadata["answer"])] for text in words]
    return sum(right) / 2
