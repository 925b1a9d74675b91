"""GroupLoop: what the agent loops have in common, whatever a trajectory is made of.

Owns that all members of a group are at work at once, one request to the generator, and what an interruption and a
failure do to a trajectory. Owns neither routing (the generator) nor rewards.

Invariants: a continuation sends exactly the ids that were sampled; `max_tokens` and `min_tokens` of a trajectory never
change, only those of its request; a failure is never a reward; one member's failure does not stop its siblings.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from raypost.config import RolloutConfig, StrategyConfig
from raypost.errors import AlignmentError, Boundary, blame
from raypost.observe.spans import SpanLog
from raypost.observe.waits import waiting
from raypost.types import (
    GenerateRequest,
    GenerateResult,
    Generator,
    Group,
    GroupKey,
    IntArray,
    RolloutState,
    Status,
    status_of_finish,
)
from raypost.types.pause import PauseDeadlines

T = TypeVar("T")

CANCEL_GRACE_S = 1.0
"""How long cancelled work may take to notice before it is left alone."""


FIRST_RETRY_S, LONGEST_RETRY_S = 0.5, 8.0
"""How long a trajectory that failed waits before it is played again: the first time, and at most."""


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
        max_concurrent: int | None = None,
    ) -> None:
        """`decode` turns response ids into text. Without `rollout` or `strategy` their defaults hold.

        `max_concurrent`: most trajectories at work at once, over all groups; None: no bound.
        """
        rollout = rollout or RolloutConfig()
        self._generator = generator
        self._decode = decode
        self._enable_partial_rollout = (strategy or StrategyConfig()).enable_partial_rollout
        self._request_timeout_s = rollout.request_timeout_s
        self._grace_s = PauseDeadlines(rollout.pause_timeout_s).judge_grace_s
        self._interruptible: set[asyncio.Task[Any]] = set()
        self.spans = SpanLog(type(self).__name__)
        """When the world was at work; a host may give it the log of its own."""
        self.turns = None if max_concurrent is None else asyncio.Semaphore(max_concurrent)
        """One for each trajectory that may be at work; a host may have several loops share theirs."""
        self._queued: set[asyncio.Task[Any]] = set()

    async def interrupt(self) -> None:
        """End judging, or what environments are doing, within its grace period; members come back ABORTED.

        Repeatable: work that was interrupted before keeps its deadline.
        """
        loop = asyncio.get_running_loop()
        for task in list(self._interruptible):
            loop.call_later(self._grace_s, task.cancel)
        for task in list(self._queued):
            task.cancel()

    async def forget(self, keys: Sequence[GroupKey]) -> None:
        """Close what is kept for these groups: nothing is, unless a loop parks episodes."""

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

        Where one of them failed before, they wait first: what failed it may need the time. Raises the first error,
        after all members ended.
        """
        todo = [state for state in group.states if state.status is not Status.COMPLETED]
        delay_s = max(map(retry_delay_s, todo), default=0.0)
        if delay_s:
            name = f"wait before group {group.group_id} is played again"
            if (await self._until_interrupted(asyncio.sleep(delay_s), name)).cancelled():
                for state in todo:
                    state.status = Status.ABORTED
                return []
        members = (self._in_turn(state, run) for state in todo)
        outcomes = await asyncio.gather(*members, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return [state for state, outcome in zip(todo, outcomes, strict=True) if outcome is True]

    async def _in_turn(self, state: RolloutState, run: Callable[[RolloutState], Awaitable[bool]]) -> bool:
        """Run a member when its turn comes; one that a pause finds waiting is ABORTED at once, as it stands."""
        turns = self.turns
        if turns is None:
            return await run(state)
        queued = asyncio.create_task(turns.acquire(), name="wait for one of max_concurrent")
        self._queued.add(queued)
        try:
            with waiting("one of agent_loop.max_concurrent", None):
                await asyncio.wait([queued])
        except asyncio.CancelledError:
            if not queued.cancel():
                turns.release()
            raise
        finally:
            self._queued.discard(queued)
        if queued.cancelled():
            state.status = Status.ABORTED
            return False
        try:
            return await run(state)
        finally:
            turns.release()

    async def _generate(self, state: RolloutState, max_tokens: int, group: str | None = None) -> Status:
        """Append at most `max_tokens` sampled tokens; return the status that their finish reason stands for.

        `group`: see GenerateRequest.

        Raises MemberFailedError.
        """
        ids = np.concatenate([state.prompt_ids, state.response_ids])
        result = await self._request(state, ids, state.num_tokens, max_tokens, group)
        try:
            state.append_segment(result.response_ids, result.logprobs, result.policy_versions)
        except AlignmentError as error:
            raise MemberFailedError(Boundary.ENGINE, str(error)) from error
        return self._took(state, result)

    async def _request(
        self,
        state: RolloutState,
        token_ids: IntArray,
        num_tokens: int,
        max_tokens: int,
        group: str | None = None,
    ) -> GenerateResult:
        """Return what continues `token_ids`, in which the response has `num_tokens`. Raises MemberFailedError."""
        params = state.sample_params
        min_tokens = min(max_tokens, max(0, params.min_tokens - num_tokens))
        if (max_tokens, min_tokens) != (params.max_tokens, params.min_tokens):
            params = replace(params, max_tokens=max_tokens, min_tokens=min_tokens)
        request = GenerateRequest(
            request_id=f"{state.task}/{state.group_id}/{state.sample_index}/{uuid.uuid4().hex[:8]}",
            token_ids=token_ids,
            sample_params=params,
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
        return result

    def _took(self, state: RolloutState, result: GenerateResult) -> Status:
        """Note where a result came from; return the status that it stands for. Raises MemberFailedError."""
        state.worker = result.worker if len(result.response_ids) else state.worker
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


def retry_delay_s(state: RolloutState) -> float:
    """Return how long a trajectory waits before it runs: twice as long each time that it failed."""
    # A continuation has waited already, when it was begun.
    begun = state.num_tokens > 0 and not stopped(state) and state.remaining_tokens > 0
    if begun or not state.num_retries:
        return 0.0
    return min(LONGEST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(state.num_retries - 1, 8))


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
