"""Judges that compute a score by rule: reasoning-gym's own scorers, or equality with the answer.

Owns extracting the answer from a response. Imports no torch.

Invariants: a response without an answer is wrong and scores 0; a scorer that fails raises JudgeError and
never becomes a score.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from raypost.errors import JudgeError
from raypost.types import RolloutState

Scorer = Callable[[str, dict[str, Any]], float]
"""(answer, the prompt's metadata) -> score, 1 for a right answer."""


class RuleJudge:
    """Extracts the answer from each response and scores it."""

    def __init__(self, scorer: Scorer, answer_pattern: str | None = None) -> None:
        """`answer_pattern`: as in JudgeConfig."""
        self._scorer = scorer
        self._pattern = None if answer_pattern is None else re.compile(answer_pattern)

    async def judge(self, states: list[RolloutState]) -> list[float]:
        """Return one score for each state. Raises JudgeError naming the group whose scoring failed."""
        return [self._score(state) for state in states]

    def _score(self, state: RolloutState) -> float:
        answer = extract_answer(state.response_text, self._pattern)
        if not answer:
            return 0.0
        who = f"task {state.task!r}, group {state.group_id}, sample {state.sample_index}"
        try:
            score = float(self._scorer(answer, state.metadata))
        except Exception as error:  # a scorer is foreign code: after any error this group has no reward
            raise JudgeError(
                f"{who}: the scorer failed on answer {answer!r:.80}: {type(error).__name__}: {error}"
            ) from error
        if not math.isfinite(score):
            raise JudgeError(
                f"{who}: the scorer gave {score} for answer {answer!r:.80}; a score must be finite"
            )
        return score


def extract_answer(response: str, pattern: re.Pattern[str] | None) -> str | None:
    """Return the first group of the pattern's last match, None without one; the whole response without a pattern."""
    if pattern is None:
        return response.strip()
    matches = list(pattern.finditer(response))
    return (matches[-1].group(1) or "").strip() if matches else None


def exact(answer: str, metadata: dict[str, Any]) -> float:
    """Return 1 if the answer equals that of the metadata, else 0."""
    return float(answer == str(metadata["answer"]).strip())
