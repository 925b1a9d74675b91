"""EnvironmentAgentLoop: the policy and an environment take turns until one of them ends the trajectory.

Owns how an environment is made, asked and replayed. Owns neither the order of the turns (turn_loop.py), nor the reward
of an action (the environment, hosted by episode.py).

    reset -> [observation] -> action -> step -> [observation] -> action -> step -> ... -> COMPLETED
                                |         +- raises, hangs, reward not finite -> FAILED
                                +- pause -> ABORTED; the environment is parked, with a step that still runs

A trajectory whose environment is gone when the pause is over gets a new one. If that is `deterministic`, the recorded
actions are replayed to it; any other trajectory, and one that was answered differently, starts again.

Invariants: those of TurnLoop; all plain methods of an environment run in one thread, or in a process of its own
(isolated.py).
"""

from __future__ import annotations

import copy
import functools
import hashlib
import logging
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal, TypeVar

import numpy as np

from raypost.agent_loop.episode import Environment, Episode, Observation, takes_seed
from raypost.agent_loop.group_loop import MemberFailedError, complete
from raypost.agent_loop.isolated import EnvironmentProcesses, IsolatedEnvironment
from raypost.agent_loop.parking import PARKED
from raypost.agent_loop.turn_loop import Answer, InterruptedTurnError, Play, TurnLoop, reopened
from raypost.chat.record import SessionRecord
from raypost.chat.renderer import Renderer
from raypost.config import AgentLoopConfig, RolloutConfig, StrategyConfig
from raypost.errors import Boundary
from raypost.observe.spans import ENVIRONMENT
from raypost.types import Generator, Group, IntArray, RolloutState
from raypost.types.turns import TURNS, recorded_turns

__all__ = ["Environment", "EnvironmentAgentLoop", "Observation"]
log = logging.getLogger(__name__)
Messages = Sequence[Mapping[str, Any]]
T = TypeVar("T")
MAX_INFO = 400
"""Characters that are kept of what an environment says besides."""


class EnvironmentAgentLoop(TurnLoop):
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
        worker: str = "",
        seed: int = 0,
        renderer: Renderer | None = None,
        opening: Callable[[Mapping[str, Any], Messages], IntArray] | None = None,
    ) -> None:
        """`environment` makes one, in the event loop: what takes long belongs into `reset`.

        `encode` gives an observation's ids, with what a chat template puts around it; observations that are messages
        need `renderer`, and at the beginning `opening`, which renders the prompt with these metadata and them.
        Uses `max_turns`, `max_turn_tokens` and the deadlines of `options`, `request_timeout_s` and `pause_timeout_s` of
        `rollout`, and `enable_partial_rollout` of `strategy`. `retryable` errors mean that an environment's host died:
        they are raised. `worker` and `seed`: see TurnLoop, and Environment.reset.
        """
        super().__init__(generator, decode, options, rollout, strategy, worker=worker, retryable=retryable)
        self._environment = environment
        self._encode = encode
        self._action_kind = action
        self._seed = seed
        self._renderer = renderer
        self._opening = opening

    async def close(self) -> None:
        """End the parked episodes, and the processes of environments."""
        await super().close()
        if isinstance(self._environment, EnvironmentProcesses):
            await self._environment.close()

    async def run(self, group: Group) -> Group:
        """Run every member that is not COMPLETED to its end; return the same group, statuses set.

        Raises only errors that are no member's: a generator whose process is gone, a retryable error, or a bug.
        """
        for state in await self._each(group, self._play):
            state.response_text = self._decode(state.response_ids)
            complete(state, math.fsum(turn.reward for turn in recorded_turns(state)))
        return group

    # ---------------------------------------------------------------- one trajectory

    async def _open(self, state: RolloutState) -> Play:
        episode = self._episode(state)
        try:
            return await self._first(state, episode)
        except BaseException:
            await episode.close()
            raise

    async def _first(self, state: RolloutState, episode: Episode) -> Play:
        await self._make(episode)
        seen = await self._reset(state, episode)
        if seen.messages:
            if self._opening is None:
                raise _failed("reset observed messages, but the task has no chat template: observe text")
            prompt = self._opening(_own(state), seen.messages)
            if len(prompt) > len(state.prompt_ids) + state.sample_params.max_tokens // 2:
                raise _failed(
                    f"reset observed messages with which the prompt has {len(prompt)} tokens, and without them "
                    f"{len(state.prompt_ids)}: it may grow by half of max_tokens={state.sample_params.max_tokens}"
                )
            state.prompt_ids = prompt
            ids = prompt[:0]
        else:
            ids = self._ids_of(seen)
        bound = state.sample_params.max_tokens
        if seen.done or len(ids) >= bound:
            raise _failed(
                f"the environment's reset leaves no turn: done is {seen.done}, and it was observed with "
                f"{len(ids)} of max_tokens={bound} tokens"
            )
        record = SessionRecord()
        first = record.extend(None, np.concatenate([state.prompt_ids, ids]))
        return Play(len(state.prompt_ids), record, first, [], episode.close, world=episode)

    async def _reopen(self, state: RolloutState) -> Play | None:
        """Replay the recorded actions to a new environment that is deterministic."""
        episode = self._episode(state)
        play: Play | None = None
        try:
            await self._make(episode)
            if getattr(episode.environment, "deterministic", False) and await self._replays(state, episode):
                play = reopened(state)
                play.close_world, play.world = episode.close, episode
        finally:
            if play is None:
                await episode.close()
        return play

    async def _replays(self, state: RolloutState, episode: Episode) -> bool:
        """Bring an environment to where the trajectory stands; return whether it answered as it did before."""
        turns = recorded_turns(state)
        play = reopened(state)
        first = play.open.turn.path()[0].context[len(state.prompt_ids) :]
        seen = await self._reset(state, episode)
        same = not seen.done and (bool(seen.messages) or np.array_equal(first, self._ids_of(seen)))
        for turn in turns:
            if not same:
                break
            action = state.response_ids[turn.start : turn.end]
            seen = await self._settled(self._step(episode, action), "a replayed turn")
            same = not seen.done and (
                bool(seen.messages)
                or np.array_equal(state.response_ids[turn.end : turn.next], self._ids_of(seen))
            )
        if not same:
            log.warning(
                "an environment of task %s says that it is deterministic, and answered differently when it was "
                "replayed: the trajectory starts again",
                state.task,
            )
        return same

    async def _answer(self, state: RolloutState, play: Play) -> Answer:
        with self.spans.span(ENVIRONMENT):
            seen = await self._step(play.world, play.open.turn.ids)
        reward: object = seen.reward
        if isinstance(reward, str) or not math.isfinite(seen.reward):
            raise _failed(f"the environment gave reward {reward!r:.40} in turn {len(play.turns) + 1}")
        ids, reward_of_turn = self._following(play, seen), float(seen.reward)
        return Answer(ids=ids, reward=reward_of_turn, done=bool(seen.done), info=_told(seen.info))

    def _following(self, play: Play, seen: Observation) -> IntArray:
        if not seen.messages or seen.done:
            return self._ids_of(seen)
        bridge = None
        if self._renderer is not None:
            bridge = self._renderer.bridge(play.token_ids, seen.messages)
        if bridge is None:
            raise _failed(
                "its observation is messages, which cannot follow the turn: the task needs a chat template that "
                "leaves what was said as it was; observe text instead"
            )
        return bridge

    def _failed(self, error: BaseException, number: int) -> MemberFailedError:
        return _failed(f"the environment failed in turn {number}: {error!r:.500}")

    # ---------------------------------------------------------------- the environment

    def _episode(self, state: RolloutState) -> Episode:
        name = f"{state.task}/{state.group_id}/{state.sample_index}"
        return Episode(name, self._options.step_timeout_s)

    async def _make(self, episode: Episode) -> None:
        """Make an environment. Raises InterruptedTurnError and MemberFailedError."""
        try:
            episode.environment = made = self._environment()
        # A supervision boundary: whatever a user's environment raises is the reason of one FAILED trajectory.
        except Exception as error:
            raise _failed(f"the environment could not be made: {error!r:.500}") from error
        if isinstance(made, IsolatedEnvironment):
            await self._settled(made.start(), "its making")

    async def _reset(self, state: RolloutState, episode: Episode) -> Observation:
        """Reset an environment. Raises InterruptedTurnError, MemberFailedError and retryable errors."""
        seed = group_seed(self._seed, state)
        ask = functools.partial(episode.ask, "reset", _own(state))
        work = ask(seed=seed) if takes_seed(episode.environment) else ask()
        return await self._settled(work, "reset")

    async def _settled(self, work: Coroutine[Any, Any, T], when: str) -> T:
        asked = await self._until_interrupted(work, when)
        if asked.cancelled():
            raise InterruptedTurnError
        error = asked.exception()
        if isinstance(error, self._retryable):
            raise error
        if error is not None:
            raise _failed(f"the environment failed in {when}: {error!r:.500}") from error
        return asked.result()

    async def _step(self, episode: Episode, ids: IntArray) -> Observation:
        return await episode.ask("step", self._decode(ids) if self._action_kind == "text" else ids)

    def _ids_of(self, seen: Observation) -> IntArray:
        if seen.ids is not None:
            return np.asarray(seen.ids, np.int32)
        return np.asarray(self._encode(seen.text) if seen.text else [], np.int32)


def group_seed(seed: int, state: RolloutState) -> int:
    """Return a seed that all siblings of a group share, and no other group has."""
    name = f"{seed}/{state.task}/{state.group_id}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=4).digest(), "big") >> 1


def _told(info: Mapping[str, Any]) -> str:
    """Return what an environment has to say besides as a short text."""
    return ", ".join(f"{name} {value!s:.100}" for name, value in info.items())[:MAX_INFO]


def _own(state: RolloutState) -> dict[str, Any]:
    """Return a copy of the prompt's metadata: siblings share what is in it."""
    return copy.deepcopy(
        {name: value for name, value in state.metadata.items() if name not in (TURNS, PARKED)}
    )


def _failed(text: str) -> MemberFailedError:
    return MemberFailedError(Boundary.ENVIRONMENT, text)
