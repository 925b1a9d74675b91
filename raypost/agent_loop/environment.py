"""EnvironmentAgentLoop: the policy and an environment take turns until one of them ends the trajectory.

Owns the order of the turns, the token budget and the continuation of interrupted trajectories. Owns neither routing
(the generator), nor the reward of an action (the environment, hosted by episode.py), nor how turns are recorded
(turns.py).

    reset -> [observation] -> action -> step -> [observation] -> action -> step -> ... -> COMPLETED
                                |         +- raises, hangs, reward not finite -> FAILED
                                +- pause -> ABORTED, tokens and turns kept

An environment does not outlive one run of its group: an interrupted trajectory gets a new one, to which the
recorded actions are replayed. It must answer then as it answered before, or the trajectory is FAILED; one that
cannot promise that needs `enable_partial_rollout: false`, which starts again instead.

Invariants: those of GroupLoop; every token sent to the engine is one that was sampled or observed, never one encoded
again from text; an observation is appended only if an action can follow; an environment is not called after its
trajectory was interrupted or failed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Literal

import numpy as np

from raypost.agent_loop.episode import Environment, Episode, Observation
from raypost.agent_loop.group_loop import GroupLoop, MemberFailedError, complete, fail, stopped
from raypost.agent_loop.turns import (
    TURNS,
    Turn,
    append_observation,
    open_action,
    record_turns,
    recorded_turns,
)
from raypost.config import AgentLoopConfig, RolloutConfig, StrategyConfig
from raypost.errors import AlignmentError, Boundary, blame
from raypost.protocols import Generator
from raypost.types import Group, IntArray, RolloutState, Status

__all__ = ["Environment", "EnvironmentAgentLoop", "Observation"]


class _InterruptedError(Exception):
    """A pause came; the trajectory goes on later."""


class EnvironmentAgentLoop(GroupLoop):
    """Runs every unfinished member of a group at once, each with an environment of its own."""

    def __init__(
        self,
        generator: Generator,
        environment: Callable[[], Environment],
        encode: Callable[[str], IntArray],
        decode: Callable[[IntArray], str],
        options: AgentLoopConfig | None = None,
        *,
        action: Literal["text", "ids"] = "text",
        rollout: RolloutConfig | None = None,
        strategy: StrategyConfig | None = None,
        retryable: tuple[type[BaseException], ...] = (),
    ) -> None:
        """`environment` makes one, in the event loop: what takes long belongs into `reset`.

        `encode` gives an observation's ids, with what a chat template puts around it. Uses `max_turns`,
        `max_turn_tokens` and `step_timeout_s` of `options`, `request_timeout_s` and `pause_timeout_s` of `rollout`,
        and `enable_partial_rollout` of `strategy`. `retryable` errors mean that an environment's host died: they are
        raised.
        """
        super().__init__(generator, decode, rollout, strategy)
        self._environment = environment
        self._encode = encode
        self._options = options or AgentLoopConfig()
        self._action_kind = action
        self._retryable = retryable

    async def run(self, group: Group) -> Group:
        """Run every member that is not COMPLETED to its end; return the same group, statuses set.

        Raises only errors that are no member's: a generator whose process is gone, a retryable error, or a bug.
        """
        await self._each(group, self._run_member)
        return group

    # ---------------------------------------------------------------- one trajectory

    async def _run_member(self, state: RolloutState) -> bool:
        if state.status is Status.EXPIRED or not self._enable_partial_rollout:
            state.reset()
        name = f"{state.task}/{state.group_id}/{state.sample_index}"
        episode = Episode(name, self._options.step_timeout_s)
        try:
            turns = await self._begin(state, episode)
            while not await self._take_turn(state, episode, turns):
                pass
            state.response_text = self._decode(state.response_ids)
            complete(state, math.fsum(turn.reward for turn in turns))
        except _InterruptedError:
            self._abort(state)
        except (MemberFailedError, AlignmentError) as error:
            fail(state, blame(Boundary.AGENT_LOOP, str(error)))
        finally:
            await episode.close()
        return state.status is Status.COMPLETED

    async def _begin(self, state: RolloutState, episode: Episode) -> list[Turn]:
        """Make an environment and bring it to where the trajectory stands; return the turns so far."""
        turns = recorded_turns(state)
        # A copy: siblings share what is in it.
        metadata = copy.deepcopy({name: value for name, value in state.metadata.items() if name != TURNS})
        try:
            episode.environment = self._environment()
        # A supervision boundary: whatever a user's environment raises is the reason of one FAILED trajectory.
        except Exception as error:
            raise _environment_failed(f"the environment could not be made: {error!r:.500}") from error
        seen = await self._ask(episode, "reset", metadata, "reset")
        ids, bound = self._ids_of(seen), state.sample_params.max_tokens
        if seen.done or len(ids) >= bound:
            raise _environment_failed(
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
            raise _environment_failed(
                f"the environment answered differently when {when} was replayed after a pause: {len(before)} "
                f"tokens before, {len(now)} now, done is {seen.done}; make it deterministic, or set "
                "enable_partial_rollout to false"
            )

    async def _take_turn(self, state: RolloutState, episode: Episode, turns: list[Turn]) -> bool:
        """Generate one action and have it answered; return whether it was the last turn."""
        start, number = open_action(state, turns), len(turns) + 1
        await self._act(state, start)
        end = state.num_tokens
        seen = await self._ask(episode, "step", self._action(state.response_ids[start:]), f"turn {number}")
        if not math.isfinite(seen.reward):
            raise _environment_failed(f"the environment gave reward {seen.reward} in turn {number}")
        ids = self._ids_of(seen)
        ended = seen.done or number >= self._options.max_turns or len(ids) >= state.remaining_tokens
        if not ended:
            append_observation(state, ids)
        turns.append(Turn(start, end, state.num_tokens, float(seen.reward), seen.done))
        record_turns(state, turns)
        state.finish_reason = "stop" if seen.done else "length" if ended else None
        return ended

    # ---------------------------------------------------------------- the policy's half of a turn

    async def _act(self, state: RolloutState, start: int) -> None:
        """Generate the rest of the action. Raises _InterruptedError if a pause came before its end."""
        if state.num_tokens > start and self._is_complete(state, start):
            return
        before = state.num_tokens
        status = await self._generate(state, self._tokens_left(state, start))
        if status is Status.ABORTED and not (state.num_tokens > before and self._is_complete(state, start)):
            raise _InterruptedError

    def _tokens_left(self, state: RolloutState, start: int) -> int:
        bound = self._options.max_turn_tokens or state.sample_params.max_tokens
        return min(state.remaining_tokens, bound - (state.num_tokens - start))

    def _is_complete(self, state: RolloutState, start: int) -> bool:
        return stopped(state) or self._tokens_left(state, start) <= 0

    # ---------------------------------------------------------------- the environment's half

    async def _ask(self, episode: Episode, method: str, argument: object, when: str) -> Observation:
        """Call an environment once. Raises _InterruptedError, MemberFailedError and retryable errors."""
        asked = await self._until_interrupted(episode.ask(method, argument), when)
        if asked.cancelled():
            raise _InterruptedError
        error = asked.exception()
        if isinstance(error, self._retryable):
            raise error
        if error is not None:
            raise _environment_failed(f"the environment failed in {when}: {error!r:.500}") from error
        return asked.result()

    def _action(self, ids: IntArray) -> str | IntArray:
        return self._decode(ids) if self._action_kind == "text" else ids

    def _ids_of(self, seen: Observation) -> IntArray:
        if seen.ids is not None:
            return np.asarray(seen.ids, np.int32)
        return np.asarray(self._encode(seen.text) if seen.text else [], np.int32)


def _environment_failed(text: str) -> MemberFailedError:
    return MemberFailedError(Boundary.ENVIRONMENT, text)
