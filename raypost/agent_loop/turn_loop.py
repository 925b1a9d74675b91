"""TurnLoop: base of agent loops in which the policy and a world take turns.

Owns the order of the turns, the token budget, deadlines of a session, and what a pause does to an episode. Owns neither
what the world answers (environment.py, tools.py) nor how tokens are recorded (chat/record.py).

    open -> [context] -> policy -> answer -> [context] -> policy -> answer -> ... -> finished
                           |          +- raises, hangs -> FAILED
                           +- pause -> ABORTED, tokens kept; the episode is parked, with a call that still runs

An interrupted trajectory that comes back to its worker goes on where it was: no call runs twice. Without its episode
(the worker is gone, or nobody came for it in time) one that can be replayed is replayed, any other starts again from
the prompt, which is counted.

Invariants: those of GroupLoop; every token sent to the engine is one that was sampled or observed, never one encoded
again from text; context is appended only if a turn can follow; the world is not called after its trajectory failed.
"""

from __future__ import annotations

import asyncio
import dataclasses
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from raypost.agent_loop.group_loop import CANCEL_GRACE_S, MemberFailedError, fail, stopped
from raypost.agent_loop.parking import Parking, ParkingLoop
from raypost.chat.record import Prepared, RecordedTurn, SessionRecord, write_path
from raypost.config import AgentLoopConfig, RolloutConfig, StrategyConfig
from raypost.errors import AlignmentError, Boundary, blame
from raypost.types import GenerateResult, Generator, IntArray, RolloutState, Status
from raypost.types.turns import Turn, record_turns, recorded_turns


@dataclass(slots=True, kw_only=True, frozen=True)
class Answer:
    """What the world says to a turn: the ids that follow it, its reward, and whether it was the last."""

    ids: IntArray
    reward: float = 0.0
    done: bool = False
    reason: str = "stop"
    """Finish reason of the trajectory, if it was the last."""
    calls: tuple[dict[str, Any], ...] = ()
    """What was called, how it ended and how long it took; kept with the turn."""
    info: str = ""
    """What else the world has to say; kept with the turn, too."""


async def _nothing() -> None:
    return None


@dataclass(slots=True, eq=False)
class Play:
    """One trajectory under way."""

    prompt: int
    """Tokens of the prompt."""
    record: SessionRecord
    open: Prepared
    """The turn that the policy is in."""
    turns: list[Turn]
    """Those that were answered."""
    close_world: Callable[[], Awaitable[None]] = _nothing
    world: Any = None
    """What answers, as the agent loop keeps it."""
    asked: asyncio.Task[Answer] | None = None
    """The answer that is being made."""
    finished: bool = False
    left_s: float | None = None
    """Of the session's time, which does not run while it is parked."""

    @property
    def token_ids(self) -> IntArray:
        """Ids of the prompt and the response so far."""
        return self.open.token_ids

    @property
    def num_tokens(self) -> int:
        """Length of the response so far."""
        turn = self.open.turn
        return turn.num_before + turn.num_ids - self.prompt

    async def close(self) -> None:
        """End what the world is doing, and the world."""
        if self.asked is not None and self.asked.cancel():
            await asyncio.wait([self.asked], timeout=CANCEL_GRACE_S)
        await self.close_world()


class InterruptedTurnError(Exception):
    """A pause came; the trajectory goes on later."""


class TurnLoop(ParkingLoop[Play]):
    """Runs every unfinished member of a group at once, each with a world of its own."""

    def __init__(
        self,
        generator: Generator,
        decode: Callable[[IntArray], str],
        options: AgentLoopConfig | None,
        rollout: RolloutConfig | None,
        strategy: StrategyConfig | None,
        *,
        worker: str = "",
        retryable: tuple[type[BaseException], ...] = (),
    ) -> None:
        """`worker`: the name by which parked episodes are found. `retryable` errors are raised: a host died.

        Uses `max_turns`, `max_turn_tokens`, `session_timeout_s` and `park_timeout_s` of `options`.
        """
        self._options = options or AgentLoopConfig()
        super().__init__(generator, decode, rollout, strategy, self._options.max_concurrent)
        self._parking = Parking[Play](worker, self._options.park_timeout_s)
        self._retryable = retryable

    # ---------------------------------------------------------------- what a loop of turns is

    @abstractmethod
    async def _open(self, state: RolloutState) -> Play:
        """Return a trajectory at its first turn. Raises MemberFailedError and InterruptedTurnError."""

    async def _reopen(self, state: RolloutState) -> Play | None:
        """Return the trajectory where it stands, without its episode; None if that cannot be."""
        return None

    @abstractmethod
    async def _answer(self, state: RolloutState, play: Play) -> Answer:
        """Return what the world says to the turn that the policy has ended."""

    @abstractmethod
    def _failed(self, error: BaseException, number: int) -> MemberFailedError:
        """Return the failure that an error in answering turn `number` is."""

    # ---------------------------------------------------------------- one trajectory

    async def _play(self, state: RolloutState) -> bool:
        """Bring one member to its end; return whether it got there. Else it is ABORTED or FAILED."""
        if state.status is Status.EXPIRED or not self._enable_partial_rollout:
            state.reset()
        play: Play | None = None
        try:
            play = await self._begin(state)
            await self._go_on(state, play)
        except InterruptedTurnError:
            if play is not None:
                self._write(state, play)
            self._abort(state)
            if play is not None and self._enable_partial_rollout:
                self._parking.put(state, play)
                play = None
            return False
        except (MemberFailedError, AlignmentError) as error:
            if play is not None:
                self._write(state, play)
            fail(state, blame(Boundary.AGENT_LOOP, str(error)))
            return False
        finally:
            if play is not None:
                await play.close()
        self._write(state, play)
        return True

    async def _go_on(self, state: RolloutState, play: Play) -> None:
        """Take turns to the end, within what is left of the session's time."""
        began_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(play.left_s) as deadline:
                while not play.finished:
                    await self._take_turn(state, play)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            doing = "the policy" if play.asked is None else f"the answer to turn {len(play.turns) + 1}"
            bound = self._options.session_timeout_s
            reason = f"the session took longer than session_timeout_s={bound:g}, waiting for {doing}"
            raise MemberFailedError(Boundary.AGENT_LOOP, reason) from error
        finally:
            if play.left_s is not None:
                play.left_s = max(0.001, play.left_s - asyncio.get_running_loop().time() + began_s)

    async def _begin(self, state: RolloutState) -> Play:
        play = await self._parking.take(state)
        if play is None and state.num_tokens:
            play = await self._reopen(state)
            if play is None:
                state.reset()
                state.num_restarts += 1
        if play is None:
            play = await self._open(state)
        if play.left_s is None:
            play.left_s = self._options.session_timeout_s
        return play

    def _write(self, state: RolloutState, play: Play) -> None:
        """Make the trajectory what was recorded."""
        reason = state.finish_reason
        write_path(state, play.open.turn)
        state.finish_reason = reason
        if play.turns or recorded_turns(state):
            record_turns(state, play.turns)

    async def _take_turn(self, state: RolloutState, play: Play) -> None:
        """Have the policy end its turn, and the world answer it."""
        number, turn = len(play.turns) + 1, play.open.turn
        if not turn.complete:
            await self._act(state, play)
        if play.asked is None:
            play.asked = asyncio.create_task(self._answer(state, play), name=f"answer turn {number}")
        waited = await self._until_interrupted(_ended(play.asked), f"turn {number}")
        if waited.cancelled() and not play.asked.done():
            raise InterruptedTurnError
        asked, play.asked = play.asked, None
        error = asked.exception()
        if error is not None:
            if isinstance(error, (MemberFailedError, *self._retryable)):
                raise error
            raise self._failed(error, number) from error
        self._answered(state, play, asked.result())

    def _answered(self, state: RolloutState, play: Play, answer: Answer) -> None:
        turn, number, end = play.open.turn, len(play.turns) + 1, play.num_tokens
        left = state.sample_params.max_tokens - end
        ended = answer.done or number >= self._options.max_turns or len(answer.ids) >= left
        turn.reward, turn.done = answer.reward, answer.done
        if not ended:
            play.open = play.record.extend(turn, answer.ids)
        start = end - len(turn.ids)
        told = list(answer.calls), answer.info
        play.turns.append(Turn(start, end, play.num_tokens, answer.reward, answer.done, *told))
        state.finish_reason = answer.reason if answer.done else "length" if ended else None
        play.finished = ended

    # ---------------------------------------------------------------- the policy's half of a turn

    async def _act(self, state: RolloutState, play: Play) -> None:
        """Have the policy end its turn. Raises InterruptedTurnError if a pause came before."""
        turn = play.open.turn
        left = self._tokens_left(state, play)
        result = await self._request(state, play.token_ids, play.num_tokens, left)
        status = self._took(state, result)
        try:
            if status is Status.ABORTED and self._ends(state, turn, result, left):
                # The abort came just after the last token.
                result = dataclasses.replace(result, finish_reason="stop")
            play.record.commit(play.open, result)
        except AlignmentError as error:
            raise MemberFailedError(Boundary.ENGINE, str(error)) from error
        if not turn.complete:
            raise InterruptedTurnError

    def _tokens_left(self, state: RolloutState, play: Play) -> int:
        bound = self._options.max_turn_tokens or state.sample_params.max_tokens
        left = state.sample_params.max_tokens - play.num_tokens
        return min(left, bound - len(play.open.turn.ids))

    def _ends(self, state: RolloutState, turn: RecordedTurn, result: GenerateResult, left: int) -> bool:
        came = len(result.response_ids)
        return came > 0 and (
            came >= left or int(result.response_ids[-1]) in state.sample_params.stop_token_ids
        )


async def _ended(task: asyncio.Task[Any]) -> None:
    # Cancelled, it leaves the task alone.
    await asyncio.wait([task])


def reopened(state: RolloutState) -> Play:
    """Return a trajectory as its tokens and turns say it stands."""
    record, turns = SessionRecord(), recorded_turns(state)
    at, parent, ids = 0, None, state.response_ids
    context = state.prompt_ids
    for turn in turns:
        prepared = record.extend(parent, np.concatenate([context, ids[at : turn.start]]))
        record.commit(prepared, _again(state, turn.start, turn.end))
        parent, at, context = prepared.turn, turn.end, ids[:0]
        parent.reward, parent.done = turn.reward, turn.done
    start = _open_start(state, turns)
    last = record.extend(parent, np.concatenate([context, ids[at:start]]))
    if start < len(ids):
        reason = "stop" if stopped(state) else "abort"
        record.commit(last, dataclasses.replace(_again(state, start, len(ids)), finish_reason=reason))
    return Play(len(state.prompt_ids), record, last, turns)


def _open_start(state: RolloutState, turns: list[Turn]) -> int:
    observed = np.flatnonzero(~state.response_mask)
    return max(turns[-1].next if turns else 0, int(observed[-1]) + 1 if len(observed) else 0)


def _again(state: RolloutState, start: int, end: int) -> GenerateResult:
    return GenerateResult(
        response_ids=state.response_ids[start:end],
        logprobs=state.logprobs[start:end],
        policy_versions=state.policy_versions[start:end],
        finish_reason="stop",
        worker=state.worker,
    )
