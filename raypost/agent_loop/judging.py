"""Judging: the end of trajectories that a judge scores, those of a group in one call.

Owns what becomes of finished members when a sibling, or their judging, was interrupted. Does not own the judge.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

from raypost.agent_loop.group_loop import complete, fail
from raypost.errors import Boundary, JudgeError, WaitTimeoutError, blame
from raypost.types import Group, Judge, RolloutState, Status

Interruptible = Callable[
    [Coroutine[Any, Any, list[float]], str], Coroutine[Any, Any, asyncio.Task[list[float]]]
]


class Judging:
    """Has finished members judged."""

    def __init__(
        self, judge: Judge, until_interrupted: Interruptible, text: Callable[[RolloutState], str]
    ) -> None:
        """`text`: of a finished trajectory, which is judged. `until_interrupted`: GroupLoop's."""
        self._judge = judge
        self._until_interrupted = until_interrupted
        self._text = text

    async def end(self, group: Group, finished: list[RolloutState]) -> None:
        """Set the statuses of members that came to their end: COMPLETED, ABORTED by a pause, or FAILED by the judge."""
        done = {state.sample_index for state in finished}
        if any(s.status is Status.ABORTED and s.sample_index not in done for s in group.states):
            # They are judged with the others, when those are done: a judge may compare them.
            for state in finished:
                state.status = Status.ABORTED
        elif finished:
            for state in finished:
                state.response_text = self._text(state)
            await self._score(finished)

    async def _score(self, states: list[RolloutState]) -> None:
        judging = await self._until_interrupted(self._judged(states), f"judge group {states[0].group_id}")
        if judging.cancelled():
            for state in states:
                state.status = Status.ABORTED
                state.num_aborts += 1
            return
        try:
            rewards = judging.result()
        except (JudgeError, WaitTimeoutError) as error:
            for state in states:
                fail(state, blame(Boundary.JUDGE, str(error)))
            return
        for state, reward in zip(states, rewards, strict=True):
            if math.isfinite(reward):
                complete(state, reward)
            else:
                fail(state, blame(Boundary.JUDGE, f"the judge gave reward {reward}"))

    async def _judged(self, states: list[RolloutState]) -> list[float]:
        rewards = await self._judge.judge(states)
        if len(rewards) != len(states):
            raise JudgeError(f"the judge gave {len(rewards)} rewards for {len(states)} responses")
        return rewards
