"""JudgeWorker: hosts the judges of all tasks. Owns no state, so a call may be dispatched again anywhere."""

from __future__ import annotations

from actors.remote import CallBatches
from raypost.judges import build_judge
from raypost.task_config import TaskConfig
from raypost.types import RolloutState


class JudgeWorker(CallBatches):
    """Scores responses of any task."""

    def __init__(self, name: str, tasks: tuple[TaskConfig, ...]) -> None:
        super().__init__()
        self._name = name
        self._judges = {task.name: build_judge(task) for task in tasks}

    def __repr__(self) -> str:
        return self._name

    async def judge(self, states: list[RolloutState]) -> list[float]:
        """One reward a state, all of one task. Raises JudgeError."""
        if not states:
            return []
        return await self._judges[states[0].task].judge(states)
