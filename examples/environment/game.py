"""An environment: the policy has two tries at a sum, and the second is worth half."""

import re
from typing import Any

from raypost import Observation


class TwoTries:
    """One is made for each trajectory. Its methods may be coroutine functions."""

    def __init__(self, second: float = 0.5) -> None:
        """`second`: reward of an answer that is right at the second try; `params` of the configuration gives it."""
        self.second = second
        self.answer, self.tries = "", 0

    def reset(self, metadata: dict[str, Any]) -> Observation:
        """Begin with a row of the data; what is observed here follows the prompt."""
        self.answer = str(metadata["answer"])
        return Observation()

    def step(self, action: str) -> Observation:
        """Answer what the policy said, with a reward, and end or go on."""
        self.tries += 1
        numbers = re.findall(r"-?\d+", action)
        right = bool(numbers) and numbers[-1] == self.answer
        if not right and self.tries == 1:
            return Observation(text="\n")
        return Observation(reward=right * (1.0 if self.tries == 1 else self.second), done=True)
