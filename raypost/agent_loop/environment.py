"""EnvironmentAgentLoop: the policy and an environment take turns until one of them ends it.

Owns the play, the token budget and the continuation of interrupted trajectories. Owns neither routing (the
generator), nor what an action is worth (the environment, hosted by episode.py), nor how turns are recorded
(turns.py).

    reset -> [observation] -> action -> step -> [observation] -> action -> step -> ... -> COMPLETED
                                |         +- raises, hangs, reward not finite -> FAILED
                                +- pause -> ABORTED, tokens and turns kept

An environment does not outlive one run of its group: an interrupted trajectory gets a new one, to which the
recorded actions are replayed. It must answer then as it answered before, or the trajectory is FAILED; one that
cannot promise that needs `enable_partial_rollout: false`, which starts again instead.

Invariants: every token sent to the engine is one that was sampled or observed, never one encoded anew from
text; an observation is appended only if an action can follow; nothing is asked of an environment after its
trajectory was interrupted or failed; one member's failure does not stop its siblings.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from raypost.agent_loop.episode import Environment, Episode, Observation
from raypost.agent_loop.turns import (
    TURNS,
    Turn,
    append_observation,
    open_action,
    record_turns,
    recorded_turns,
)
from raypost.errors import AlignmentError
from raypost.protocols import Generator
from raypost.types import GenerateRequest, Group, IntArray, RolloutState, Status, status_of_finish

__all__ = ["Environment", "EnvironmentAgentLoop", "Observation"]

CANCEL_GRACE_S = 1.0
"""How long an environment that was cancelled may take to notice before it is closed."""


class _Interrupted(Exception):
    """A pause came; the trajectory goes on later."""


class _MemberFailedError(Exception):
    """This trajectory cannot go on; its siblings can."""


class EnvironmentAgentLoop:
    """Plays every unfinished member of a group at once, each with an environment of its own."""

    def __init__(
        self,
        generator: Generator,
        environment: Callable[[], Environment],
        encode: Callable[[str], IntArray],
        decode: Callable[[IntArray], str],
        *,
        max_turns: int = 16,
        max_turn_tokens: int | None = None,
        action: Literal["text", "ids"] = "text",
        enable_partial_rollout: bool = True,
        request_timeout_s: float = 600.0,
        step_timeout_s: float = 60.0,
        step_grace_s: float = 10.0,
        retryable: tuple[type[BaseException], ...] = (),
    ) -> None:
        """`environment` makes one, in the event loop: what takes long belongs into `reset`. `encode` gives an
        observation's ids, with what a chat template puts around it. `max_turn_tokens` bounds one action.
        `step_grace_s` is how long an environment may go on after `interrupt`; it must be shorter than the
        producer's pause_timeout_s. `retryable` errors mean that an environment's host died: they are raised.
        """
        self._generator = generator
        self._environment = environment
        self._encode = encode
        self._decode = decode
        self._max_turns = max_turns
        self._max_turn_tokens = max_turn_tokens
        self._action_kind = action
        self._enable_partial_rollout = enable_partial_rollout
        self._retryable = retryable
        self._request_timeout_s = request_timeout_s
        self._step_timeout_s = step_timeout_s
        self._step_grace_s = step_grace_s
        self._asked: set[asyncio.Task[Any]] = set()

    async def run(self, group: Group) -> Group:
        """Play every member that is not COMPLETED; the same group, statuses set.

        Raises only what is no member's fault: a generator whose process is gone, a retryable error, or a bug.
        """
        todo = [state for state in group.states if state.status is not Status.COMPLETED]
        outcomes = await asyncio.gather(*map(self._play, todo), return_exceptions=True)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome
        return group

    async def interrupt(self) -> None:
        """End what environments are doing within the grace period; their members come back ABORTED."""
        loop = asyncio.get_running_loop()
        for asked in list(self._asked):
            loop.call_later(self._step_grace_s, asked.cancel)

    # ---------------------------------------------------------------- one trajectory

    async def _play(self, state: RolloutState) -> None:
        if state.status is Status.EXPIRED or not self._enable_partial_rollout:
            state.reset()
        episode = Episode(f"{state.task}/{state.group_id}/{state.sample_index}", self._step_timeout_s)
        try:
            turns = await self._begin(state, episode)
            while not await self._take_turn(state, episode, turns):
                pass
            state.response_text = self._decode(state.response_ids)
            state.reward = math.fsum(turn.reward for turn in turns)
            state.status = Status.COMPLETED
            state.error = None
        except _Interrupted:
            if not self._enable_partial_rollout:
                # Tokens that will be thrown away must not age the group meanwhile.
                state.reset()
            state.status = Status.ABORTED
            state.num_aborts += 1
        except (_MemberFailedError, AlignmentError) as error:
            state.status = Status.FAILED
            state.error = str(error)
            state.reward = None
        finally:
            await episode.close()

    async def _begin(self, state: RolloutState, episode: Episode) -> list[Turn]:
        """A new environment, brought to where the trajectory stands; the turns so far."""
        turns = recorded_turns(state)
        metadata = {name: value for name, value in state.metadata.items() if name != TURNS}
        try:
            episode.environment = self._environment()
        # A supervision boundary: whatever a user's environment raises is the reason of one FAILED trajectory.
        except Exception as error:
            raise _MemberFailedError(f"the environment could not be made: {error!r:.500}") from error
        seen = await self._ask(episode, "reset", metadata, "reset")
        ids, bound = self._ids_of(seen), state.sample_params.max_tokens
        if seen.done or len(ids) >= bound:
            raise _MemberFailedError(
                f"the environment's reset leaves no turn: done is {seen.done}, and it was observed with "
                f"{len(ids)} of max_tokens={bound} tokens"
            )
        if state.num_tokens == 0:
            append_observation(state, ids)
            return []
        first = turns[0].start if turns else open_action(state, turns)
        self._check_replayed(state.response_ids[:first], seen, "reset")
        for number, turn in enumerate(turns, 1):
            action = self._action(state.response_ids[turn.start : turn.end])
            seen = await self._ask(episode, "step", action, f"turn {number}, replayed")
            self._check_replayed(state.response_ids[turn.end : turn.next], seen, f"turn {number}")
        return turns

    def _check_replayed(self, before: IntArray, seen: Observation, when: str) -> None:
        now = self._ids_of(seen)
        if seen.done or not np.array_equal(before, now):
            raise _MemberFailedError(
                f"the environment answered differently when {when} was replayed after a pause: {len(before)} "
                f"tokens before, {len(now)} now, done is {seen.done}; make it deterministic, or set "
                "enable_partial_rollout to false"
            )

    async def _take_turn(self, state: RolloutState, episode: Episode, turns: list[Turn]) -> bool:
        """One action and its answer; whether it was the last turn."""
        start, number = open_action(state, turns), len(turns) + 1
        await self._act(state, start)
        end = state.num_tokens
        seen = await self._ask(episode, "step", self._action(state.response_ids[start:]), f"turn {number}")
        if not math.isfinite(seen.reward):
            raise _MemberFailedError(f"the environment gave reward {seen.reward} in turn {number}")
        ids = self._ids_of(seen)
        ended = seen.done or number >= self._max_turns or len(ids) >= state.remaining_tokens
        if not ended:
            append_observation(state, ids)
        turns.append(Turn(start, end, state.num_tokens, float(seen.reward), seen.done))
        record_turns(state, turns)
        state.finish_reason = "stop" if seen.done else "length" if ended else None
        return ended

    # ---------------------------------------------------------------- the policy's half of a turn

    async def _act(self, state: RolloutState, start: int) -> None:
        """Generate what the action lacks. Raises _Interrupted if a pause came before its end."""
        if state.num_tokens > start and self._is_complete(state, start):
            return
        left = self._tokens_left(state, start)
        request = GenerateRequest(
            request_id=f"{state.task}/{state.group_id}/{state.sample_index}/{uuid.uuid4().hex[:8]}",
            token_ids=np.concatenate([state.prompt_ids, state.response_ids]),
            priority=state.priority,
            sample_params=replace(state.sample_params, max_tokens=left),
        )
        try:
            async with asyncio.timeout(self._request_timeout_s):
                result = await self._generator.generate(request)
        except TimeoutError as error:
            reason = str(error) or f"generation took longer than {self._request_timeout_s:.0f} s"
            raise _MemberFailedError(reason) from error
        came = len(result.response_ids)
        if came > left:
            raise _MemberFailedError(f"{came} tokens came, {left} were left of the turn")
        state.append_segment(result.response_ids, result.logprobs, result.policy_versions)
        state.worker = result.worker if came else state.worker
        state.finish_reason = result.finish_reason
        status = status_of_finish(result.finish_reason)
        if status is Status.FAILED:
            raise _MemberFailedError(result.error or f"finish reason {result.finish_reason!r}")
        if status is Status.ABORTED and not (came and self._is_complete(state, start)):
            raise _Interrupted

    def _tokens_left(self, state: RolloutState, start: int) -> int:
        bound = state.sample_params.max_tokens if self._max_turn_tokens is None else self._max_turn_tokens
        return min(state.remaining_tokens, bound - (state.num_tokens - start))

    def _is_complete(self, state: RolloutState, start: int) -> bool:
        """Whether the last token ended the action: a pause may have come just after it."""
        stopped = int(state.response_ids[-1]) in state.sample_params.stop_token_ids
        ended = status_of_finish(state.finish_reason) is Status.COMPLETED
        return stopped or ended or self._tokens_left(state, start) <= 0

    # ---------------------------------------------------------------- the environment's half

    async def _ask(self, episode: Episode, method: str, argument: object, when: str) -> Observation:
        """One call to an environment. Raises _Interrupted, _MemberFailedError and retryable errors."""
        asked = asyncio.create_task(episode.ask(method, argument), name=when)
        self._asked.add(asked)
        try:
            await asyncio.wait([asked])
        finally:
            self._asked.discard(asked)
            if asked.cancel():
                await asyncio.wait([asked], timeout=CANCEL_GRACE_S)
        if asked.cancelled():
            raise _Interrupted
        error = asked.exception()
        if isinstance(error, self._retryable):
            raise error
        if error is not None:
            raise _MemberFailedError(f"the environment failed in {when}: {error!r:.500}") from error
        return asked.result()

    def _action(self, ids: IntArray) -> str | IntArray:
        return self._decode(ids) if self._action_kind == "text" else ids

    def _ids_of(self, seen: Observation) -> IntArray:
        if seen.ids is not None:
            return np.asarray(seen.ids, np.int32)
        return np.asarray(self._encode(seen.text) if seen.text else [], np.int32)
