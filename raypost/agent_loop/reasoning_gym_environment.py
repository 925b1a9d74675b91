"""ReasoningGymEnvironment: a problem of reasoning-gym's in several turns: a wrong answer may be corrected.

Owns what the policy is told of a wrong answer, and what a right one is worth by then. Scores are reasoning-gym's.
"""

from __future__ import annotations

import re
from typing import Any

from raypost.agent_loop.episode import Observation, saying
from raypost.data.gym import gym_factory
from raypost.errors import ConfigError


class ReasoningGymEnvironment:
    """Tells the policy that its answer is wrong, until it is right or was the last that it may give."""

    deterministic = True

    def __init__(
        self,
        *,
        max_tries: int = 3,
        discount: float = 0.5,
        answer_pattern: str | None = None,
        hint: str = "That is wrong. Try again.",
        messages: bool = False,
    ) -> None:
        r"""`discount`: a right answer is worth its score times so much for each wrong one before it.

        `answer_pattern`: a regular expression whose last match's first group is the answer, such as
        `<answer>(.*?)</answer>`; None: all that was said. `messages`: observe messages of the user, not text.
        """
        if max_tries < 1 or not 0 <= discount <= 1:
            raise ConfigError(
                f"max_tries {max_tries} must be at least 1, and discount {discount} from 0 to 1"
            )
        self._max_tries, self._discount = max_tries, discount
        self._pattern = None if answer_pattern is None else re.compile(answer_pattern, re.DOTALL)
        self._hint, self._messages = hint, messages

    def reset(self, metadata: dict[str, Any]) -> Observation:
        """Begin with a problem of a source of kind reasoning_gym."""
        try:
            self._entry = metadata["entry"]
            name = self._entry["metadata"]["source_dataset"]
        except (KeyError, TypeError):
            raise ConfigError("the prompt is no problem of reasoning-gym: set source.kind to it") from None
        self._score = gym_factory().get_score_answer_fn(name)
        self._tries = 0
        return Observation()

    def step(self, action: str) -> Observation:
        """Score an answer; only a full score is right."""
        self._tries += 1
        score = float(self._score(self._answer(action), self._entry))
        done = score >= 1 or self._tries >= self._max_tries
        reward = score * self._discount ** (self._tries - 1) if done else 0.0
        return Observation(reward=reward, done=True) if done else saying(self._hint, messages=self._messages)

    def _answer(self, text: str) -> str:
        if self._pattern is None:
            return text.strip()
        found = self._pattern.findall(text)
        last = found[-1] if found else ""
        return (last if isinstance(last, str) else last[0]).strip()
