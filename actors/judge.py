"""JudgeWorker: hosts the judges of all tasks.

It holds figures and processes of functions, but no results, so a call may be repeated on any worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from actors.many_calls import CallBatches
from raypost.config import TaskConfig
from raypost.judges import LanguageModel, RewardModel, TaskJudge
from raypost.observe.spans import JUDGE, Span, SpanLog
from raypost.observe.waits import working_for
from raypost.types import RolloutState


class JudgeWorker(CallBatches):
    """Scores responses of any task."""

    def __init__(
        self,
        name: str,
        tasks: tuple[TaskConfig, ...],
        reward_models: Mapping[str, RewardModel] | None = None,
        language_models: Mapping[str, LanguageModel] | None = None,
    ) -> None:
        """`reward_models`, `language_models`: those that the tasks' judges name."""
        super().__init__()
        self._name = name
        self._spans = SpanLog(name)
        self._judges = {task.name: TaskJudge(task, reward_models, language_models) for task in tasks}

    def __repr__(self) -> str:
        """Return the actor's name."""
        return self._name

    async def judge(self, states: list[RolloutState]) -> list[float]:
        """Return one reward for each state; all are of one task. Raises JudgeError."""
        if not states:
            return []
        working_for.set(f"{states[0].task}/{states[0].group_id}")
        with self._spans.span(JUDGE):
            return await self._judges[states[0].task].judge(states)

    async def drain_spans(self) -> list[Span]:
        """Return when it judged since the last call."""
        return self._spans.drain()

    async def drain_figures(self) -> dict[str, Any]:
        """Return the JudgeFigures of each task since the last call."""
        drained = {task: judge.drain_figures() for task, judge in self._judges.items()}
        return {task: figures for task, figures in drained.items() if figures is not None}

    async def shutdown(self) -> None:
        """End the processes of functions."""
        await asyncio.gather(*(judge.close() for judge in self._judges.values()))
