"""GroupLoop: what the agent loops have in common, whatever a trajectory is made of.

Owns that all members of a group are at work at once, one request to the generator, and what an interruption and a
failure do to a trajectory. Owns neither routing (the generator) nor rewards.

Invariants: a continuation sends exactly the ids that were sampled; `max_tokens` and `min_tokens` of a trajectory never
change, only those of its request; a failure is never a reward; one member's failure does not stop its siblings.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from raypost.config import RolloutConfig, StrategyConfig
from raypost.errors import AlignmentError, Boundary, blame
from raypost.pause import PauseDeadlines
from raypost.protocols import Generator
from raypost.types import GenerateRequest, Group, IntArray, RolloutState, Status, status_of_finish

T = TypeVar("T")

CANCEL_GRACE_S = 1.0
"""How long cancelled work may take to notice before it is left alone."""


class MemberFailedError(Exception):
    """This trajectory cannot go on; its siblings can."""

    def __init__(self, boundary: Boundary, text: str) -> None:
        """`boundary` failed it."""
        super().__init__(blame(boundary, text))


class GroupLoop:
    """Base of agent loops."""

    def __init__(
        self,
        generator: Generator,
        decode: Callable[[IntArray], str],
        rollout: RolloutConfig | None,
        strategy: StrategyConfig | None,
    ) -> None:
        """`decode` turns response ids into text. Without `rollout` or `strategy` their defaults hold."""
        rollout = rollout or RolloutConfig()
        self._generator = generator
        self._decode = decode
        self._enable_partial_rollout = (strategy or StrategyConfig()).enable_partial_rollout
        self._request_timeout_s = rollout.request_timeout_s
        self._grace_s = PauseDeadlines(rollout.pause_timeout_s).judge_grace_s
        self._interruptible: set[asyncio.Task[Any]] = set()

    async def interrupt(self) -> None:
        """End judging, or what environments are doing, within its grace period; members come back ABORTED.

        Repeatable: work that was interrupted before keeps its deadline.
        """
        loop = asyncio.get_running_loop()
        for task in list(self._interruptible):
            loop.call_later(self._grace_s, task.cancel)

    async def _until_interrupted(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Return the task of `work`, done, or cancelled by `interrupt`."""
        task = asyncio.create_task(work, name=name)
        self._interruptible.add(task)
        try:
            await asyncio.wait([task])
        finally:
            self._interruptible.discard(task)
            if task.cancel():
                await asyncio.wait([task], timeout=CANCEL_GRACE_S)
        return task

    async def _each(self, group: Group, run: Callable[[RolloutState], Awaitable[bool]]) -> list[RolloutState]:
        """Run every member that is not COMPLETED, all at once; return those for which `run` gave True.

        Raises the first error, after all members ended.
        """
        todo = [state for state in group.states if state.status is not Status.COMPLETED]
        outcomes = await asyncio.gather(*map(run, todo), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return [state for state, outcome in zip(todo, outcomes, strict=True) if outcome is True]

    async def _generate(self, state: RolloutState, max_tokens: int, group: str | None = None) -> Status:
        """Append at most `max_tokens` sampled tokens; return the status that their finish reason stands for.

        `group`: see GenerateRequest.

        Raises MemberFailedError.
        """
        params = state.sample_params
        min_tokens = min(max_tokens, max(0, params.min_tokens - state.num_tokens))
        request = GenerateRequest(
            request_id=f"{state.task}/{state.group_id}/{state.sample_index}/{uuid.uuid4().hex[:8]}",
            token_ids=np.concatenate([state.prompt_ids, state.response_ids]),
            sample_params=replace(params, max_tokens=max_tokens, min_tokens=min_tokens),
            priority=state.priority,
            group=group,
        )
        try:
            async with asyncio.timeout(self._request_timeout_s):
                result = await self._generator.generate(request)
        except TimeoutError as error:
            reason = str(error) or f"generation took longer than {self._request_timeout_s:.0f} s"
            raise MemberFailedError(Boundary.ENGINE, reason) from error
        except AlignmentError as error:
            raise MemberFailedError(Boundary.ENGINE, str(error)) from error
        came = len(result.response_ids)
        if came > max_tokens:
            raise MemberFailedError(
                Boundary.ENGINE,
                f"group {state.group_id} sample {state.sample_index}: {came} tokens came, {max_tokens} were left",
            )
        try:
            state.append_segment(result.response_ids, result.logprobs, result.policy_versions)
        except AlignmentError as error:
            raise MemberFailedError(Boundary.ENGINE, str(error)) from error
        state.worker = result.worker if came else state.worker
        state.finish_reason = result.finish_reason
        status = status_of_finish(result.finish_reason)
        if status is Status.FAILED:
            reason = result.error or f"finish reason {result.finish_reason!r}"
            raise MemberFailedError(Boundary.ENGINE, reason)
        return status

    def _abort(self, state: RolloutState) -> None:
        """Mark a trajectory as interrupted by a pause; without partial rollout it starts again."""
        if not self._enable_partial_rollout:
            # Tokens that will be thrown away must not age the group meanwhile.
            state.reset()
        state.status = Status.ABORTED
        state.num_aborts += 1


def stopped(state: RolloutState) -> bool:
    """Return whether the last token or the finish reason ended what was generated: an abort may come just after."""
    ended = state.finish_reason is not None and status_of_finish(state.finish_reason) is Status.COMPLETED
    return ended or int(state.response_ids[-1]) in state.sample_params.stop_token_ids


def complete(state: RolloutState, reward: float) -> None:
    """Mark a trajectory as finished and scored."""
    state.set_reward(reward)
    state.status = Status.COMPLETED
    state.error = None


def fail(state: RolloutState, error: str) -> None:
    """Mark a trajectory as failed, without a reward. `error` begins with the name of a Boundary."""
    state.status = Status.FAILED
    state.error = error
    state.set_reward(None)
