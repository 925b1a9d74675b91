"""TaskJudge: the judge of a task with its figures, and the boundary that failures of judges are named by."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextvars import ContextVar

from raypost.config import TaskConfig
from raypost.errors import Boundary, JudgeError, blame
from raypost.judges.build import Closed, build_judge
from raypost.judges.generative import LanguageModel
from raypost.judges.reward_model import RewardModel
from raypost.observe.metrics import JudgeFigures
from raypost.types import EVALUATION_PRIORITY, RolloutState, Score

_RETRIES: ContextVar[list[None]] = ContextVar("retries")
"""An entry for each retry of the call that is being made."""


class TaskJudge:
    """Scores responses of one task, and counts what that took."""

    def __init__(
        self,
        task: TaskConfig,
        reward_models: Mapping[str, RewardModel] | None = None,
        language_models: Mapping[str, LanguageModel] | None = None,
    ) -> None:
        """Raise ConfigError as `build_judge` does. Processes of functions are started when they are needed."""
        self._figures = JudgeFigures()
        self._to_close: list[Closed] = []
        self._judge = build_judge(task, reward_models, language_models, self._count_retry, self._to_close)

    async def judge(self, states: list[RolloutState]) -> list[float]:
        """Return one reward for each state. Raises JudgeError, whose text begins with "judge:" or "sandbox:"."""
        start, retries = time.monotonic(), list[None]()
        _RETRIES.set(retries)
        try:
            scores = await self._judge.judge(states)
        except JudgeError as error:
            self._figures.count(time.monotonic() - start, num_failed=len(states))
            raise JudgeError(blame(Boundary.JUDGE, str(error))) from error
        seconds = time.monotonic() - start
        self._figures.count(seconds)
        judged = [one if isinstance(one, Score) else Score(one) for one in scores]
        for state, score in zip(states, judged, strict=True):
            score.seconds, score.retries = seconds, len(retries)
            if state.priority != EVALUATION_PRIORITY:
                self._figures.count_parts(score.parts)
        return [*judged]

    def _count_retry(self) -> None:
        self._figures.count_retry()
        _RETRIES.get().append(None)

    def drain_figures(self) -> JudgeFigures | None:
        """Return what was done since the last call; None for nothing."""
        return self._figures.drain() if self._figures.calls else None

    async def close(self) -> None:
        """End the processes of functions and the connections to services."""
        await asyncio.gather(*(judge.close() for judge in self._to_close))
