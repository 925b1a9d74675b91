"""SingleTurnAgentLoop: one prompt, one response, one reward.

Owns the continuation of interrupted trajectories, the token budget and what a failure becomes. Owns neither
routing (the generator) nor scoring (the judge).

    INIT, ABORTED, EXPIRED -> generate -> finished -> judged -> COMPLETED
                                  |          +- judging interrupted -> ABORTED, tokens kept
                                  +- pause -> ABORTED          +- JudgeError -> FAILED

Of a pause, "keep" and "wait" are the generator's alone: judging goes on through the one and is waited for by
the other. "abort" also calls `interrupt`, again and again, because judging may begin between two calls.

Invariants: a continuation sends exactly the ids that were sampled; `max_tokens` of a trajectory never
changes, only that of its request; a failure is never a reward; a COMPLETED member is neither generated nor
judged again; one member's failure does not stop its siblings.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from raypost.errors import AlignmentError, JudgeError, WaitTimeoutError
from raypost.protocols import Generator, Judge
from raypost.types import (
    GenerateRequest,
    GenerateResult,
    Group,
    IntArray,
    RolloutState,
    Status,
    status_of_finish,
)


class SingleTurnAgentLoop:
    """Generates every unfinished member of a group at once, then judges what is new."""

    def __init__(
        self,
        generator: Generator,
        judge: Judge,
        decode: Callable[[IntArray], str],
        *,
        enable_partial_rollout: bool = True,
        request_timeout_s: float = 600.0,
        judge_grace_s: float = 10.0,
    ) -> None:
        """`decode` turns response ids into the text that is judged. `judge_grace_s` is how long judging may go
        on after `interrupt`; it must be shorter than the time between two of these (pause.PauseDeadlines)."""
        self._generator = generator
        self._judge = judge
        self._decode = decode
        self._enable_partial_rollout = enable_partial_rollout
        self._request_timeout_s = request_timeout_s
        self._judge_grace_s = judge_grace_s
        self._judging: set[asyncio.Task[list[float]]] = set()

    async def run(self, group: Group) -> Group:
        """Generate and judge every member that is not COMPLETED; the same group, statuses set.

        Raises only what is no member's fault: a generator or judge whose process is gone, or a bug.
        """
        todo = [state for state in group.states if state.status is not Status.COMPLETED]
        outcomes = await asyncio.gather(*map(self._generate, todo), return_exceptions=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if errors:
            raise errors[0]
        # Not COMPLETED before it is judged: cancelled here, a member must not look finished.
        finished = [state for state, done in zip(todo, outcomes, strict=True) if done is True]
        if finished:
            await self._score(finished)
        return group

    async def interrupt(self) -> None:
        """End the judging that is going on within its grace period; its members come back ABORTED. Repeatable:
        what was interrupted before keeps its deadline."""
        loop = asyncio.get_running_loop()
        for judging in list(self._judging):
            loop.call_later(self._judge_grace_s, judging.cancel)

    # ---------------------------------------------------------------- generation

    async def _generate(self, state: RolloutState) -> bool:
        """Bring one member to its end; whether it got there and awaits its judge."""
        if state.status is Status.EXPIRED:
            state.reset()
        if self._is_finished(state):
            return True
        if not self._enable_partial_rollout:
            state.reset()
        request = GenerateRequest(
            request_id=f"{state.task}/{state.group_id}/{state.sample_index}/{uuid.uuid4().hex[:8]}",
            token_ids=np.concatenate([state.prompt_ids, state.response_ids]),
            sample_params=replace(state.sample_params, max_tokens=state.remaining_tokens),
            priority=state.priority,
        )
        try:
            async with asyncio.timeout(self._request_timeout_s):
                result = await self._generator.generate(request)
            self._append(state, result)
        except TimeoutError as error:
            return _failed(
                state, str(error) or f"generation took longer than {self._request_timeout_s:.0f} s"
            )
        except AlignmentError as error:
            return _failed(state, str(error))
        state.finish_reason = result.finish_reason
        status = status_of_finish(result.finish_reason)
        if status is Status.FAILED:
            return _failed(state, result.error or f"finish reason {result.finish_reason!r}")
        if status is Status.COMPLETED or self._is_finished(state):
            return True
        if not self._enable_partial_rollout:
            # Tokens that will be thrown away must not age the group meanwhile.
            state.reset()
        state.status = Status.ABORTED
        state.num_aborts += 1
        return False

    def _is_finished(self, state: RolloutState) -> bool:
        """Whether nothing is left to generate: an abort may have come just after the last token."""
        if state.num_tokens == 0:
            return False
        stopped = int(state.response_ids[-1]) in state.sample_params.stop_token_ids
        ended = state.finish_reason is not None and status_of_finish(state.finish_reason) is Status.COMPLETED
        return stopped or ended or state.remaining_tokens <= 0

    def _append(self, state: RolloutState, result: GenerateResult) -> None:
        if len(result.response_ids) > state.remaining_tokens:
            raise AlignmentError(
                f"group {state.group_id} sample {state.sample_index}: {len(result.response_ids)} tokens came, "
                f"{state.remaining_tokens} were left of max_tokens={state.sample_params.max_tokens}"
            )
        state.append_segment(result.response_ids, result.logprobs, result.policy_versions)
        if len(result.response_ids):
            state.worker = result.worker

    # ---------------------------------------------------------------- judging

    async def _score(self, states: list[RolloutState]) -> None:
        for state in states:
            state.response_text = self._decode(state.response_ids)
        judging = asyncio.create_task(self._judged(states), name=f"judge group {states[0].group_id}")
        self._judging.add(judging)
        try:
            await asyncio.wait([judging])
        finally:
            judging.cancel()
            self._judging.discard(judging)
        if judging.cancelled():
            for state in states:
                state.status = Status.ABORTED
                state.num_aborts += 1
            return
        try:
            rewards = judging.result()
        except (JudgeError, WaitTimeoutError) as error:
            for state in states:
                _failed(state, str(error))
            return
        for state, reward in zip(states, rewards, strict=True):
            if math.isfinite(reward):
                state.reward = float(reward)
                state.status = Status.COMPLETED
                state.error = None
            else:
                _failed(state, f"the judge gave reward {reward}")

    async def _judged(self, states: list[RolloutState]) -> list[float]:
        rewards = await self._judge.judge(states)
        if len(rewards) != len(states):
            raise JudgeError(f"the judge gave {len(rewards)} rewards for {len(states)} responses")
        return rewards


def _failed(state: RolloutState, error: str) -> bool:
    state.status = Status.FAILED
    state.error = error
    state.reward = None
    return False
