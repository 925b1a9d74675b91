"""SessionAgentLoop: an agent of the user's plays each trajectory, and meets the policy as OpenAI's chat completions.

Owns when an agent is started, waited for, parked and ended, and whose fault its end is. Owns neither requests
(session.py) nor HTTP (session_server.py).

    start the agent -> requests ... -> it returns -> its reward, or the judge's -> COMPLETED
         |                +- pause -> ABORTED; agent and session are parked, its request stays open
         +- raises, makes no request, takes too long -> FAILED

Without its parked agent a trajectory starts again from the prompt, which is counted.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypost.agent_loop.external import ExternalSessions
from raypost.agent_loop.group_loop import CANCEL_GRACE_S, MemberFailedError, complete, fail
from raypost.agent_loop.judging import Judging
from raypost.agent_loop.parking import PARKED, Parking, ParkingLoop
from raypost.agent_loop.program import play_program
from raypost.agent_loop.session import Session
from raypost.agent_loop.session_server import SessionServer
from raypost.agent_loop.threads import SideThread
from raypost.chat.record import RecordedTurn, SessionRecord, write_path
from raypost.chat.renderer import Renderer
from raypost.config import RolloutConfig, TaskConfig
from raypost.data.prompt import conversation, prompt_text
from raypost.data.tokenizer import Tokenizer
from raypost.errors import AlignmentError, Boundary, blame
from raypost.observe import waits
from raypost.types import SESSION, GenerateResult, Generator, Group, IntArray, Judge, RolloutState, Status
from raypost.types.rollout import TOKEN_ARRAYS
from raypost.types.turns import TURNS, Turn, record_turns

ANSWER = "raypost.answer"
"""Key of `metadata` under which the last reply of a session is that waits for its judge."""
_OWN = (TURNS, PARKED, ANSWER, SESSION)


@dataclass(slots=True, eq=False)
class Play:
    """One trajectory under way."""

    session: Session
    agent: asyncio.Task[float | None]
    end: Callable[[], None]
    left_s: float | None

    @property
    def token_ids(self) -> IntArray:
        """Ids of the trajectory so far."""
        return self.session.token_ids

    async def close(self) -> None:
        """End the agent and its session."""
        self.end()
        if self.agent.cancel():
            await asyncio.wait([self.agent], timeout=CANCEL_GRACE_S)
        await self.session.end()


class SessionAgentLoop(ParkingLoop[Play]):
    """Runs an agent for every unfinished member of a group, all at once."""

    def __init__(
        self,
        generator: Generator,
        judge: Judge,
        tokenizer: Tokenizer,
        renderer: Renderer,
        task: TaskConfig,
        agent: Callable[..., Any] | None,
        *,
        rollout: RolloutConfig | None = None,
        worker: str = "",
        address_file: Path | None = None,
    ) -> None:
        """`agent`: a function of the user's that is given a Session and `params`; None: the task's `command`.

        `address_file`: where a program of the user's own finds its sessions, if the task has `external` ones.
        """
        self._options = task.agent_loop
        bound = self._options.max_concurrent
        super().__init__(generator, tokenizer.decode, rollout, task.strategy, bound)
        self._task = task
        self._agent = agent
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._judging = Judging(
            judge, self._until_interrupted, lambda state: str(state.metadata.get(ANSWER, ""))
        )
        self._parking = Parking[Play](worker, self._options.park_timeout_s)
        self._external = ExternalSessions() if self._options.external else None
        routes = self._external.routes() if self._external else ()
        self._server = SessionServer(self._options.host, self._options.port, routes)
        self._address_file = address_file
        self._starting = asyncio.Lock()

    async def close(self) -> None:
        """End the parked sessions, and the server."""
        await super().close()
        await self._server.close()

    async def run(self, group: Group) -> Group:
        """Run every member that is not COMPLETED to its end and judge; return the same group, statuses set.

        Raises only errors that are no member's: a generator or judge whose process is gone, or a bug.
        """
        await self._start()
        # A member is played as one trajectory, its last; others there are only once it has ended.
        played = Group(task=group.task, group_id=group.group_id, states=[one[-1] for one in group.members])
        branches = {one[-1].sample_index: one[:-1] for one in group.members}
        ended = await self._each(played, functools.partial(self._member, branches))
        await self._judging.end(played, [state for state in ended if state.status is not Status.COMPLETED])
        for state in played.states:
            for branch in branches[state.sample_index]:
                _score_as(branch, state)
        group.states = [one for state in played.states for one in (*branches[state.sample_index], state)]
        return group

    async def _start(self) -> None:
        """Begin to serve, and say where. Idempotent."""
        async with self._starting:
            if self._server.base_url:
                return
            await self._server.start()
            if self._external is not None and self._address_file is not None:
                await asyncio.to_thread(self._external.write, self._address_file, self._server.base_url)

    # ---------------------------------------------------------------- one trajectory

    async def _member(self, branches: dict[int, list[RolloutState]], state: RolloutState) -> bool:
        if state.status is Status.EXPIRED or not self._enable_partial_rollout:
            state.reset()
        if state.num_tokens and ANSWER in state.metadata:
            return True  # it waits for its judge alone
        branches[state.sample_index] = []
        play = await self._parking.take(state)
        if play is None:
            state.num_restarts += bool(state.num_tokens)
            state.reset()
            play = self._begin(state)
        try:
            if await self._go_on(state, play):
                branches[state.sample_index] = self._end(state, play)
                return True
            self._abort(state)
            if self._enable_partial_rollout:
                self._parking.put(state, play)
                play = None
            return False
        except (MemberFailedError, AlignmentError) as error:
            fail(state, blame(Boundary.AGENT_LOOP, str(error)))
            return False
        finally:
            if play is not None:
                await play.close()

    def _begin(self, state: RolloutState) -> Play:
        own = {name: value for name, value in state.metadata.items() if name not in _OWN}
        state.metadata = own
        session = Session(
            self._renderer,
            functools.partial(self._tokenizer.decode, skip_special_tokens=False),
            state.sample_params,
            messages=conversation(self._task, prompt_text(self._task, own), own),
            metadata=copy.deepcopy(own),
            base_url=self._server.base_url,
            max_prompt_tokens=self._task.max_prompt_tokens,
            max_turns=self._options.max_turns,
        )
        self._server.add(session)
        thread = SideThread(f"agent {state.task}/{state.group_id}/{state.sample_index}")
        if self._external is not None:
            agent = self._external.play(session)
        else:
            agent = (
                play_program(self._options.command, session)
                if self._agent is None
                else self._function(session, thread)
            )
        name = f"agent of {state.task}/{state.group_id}/{state.sample_index}"
        playing = asyncio.create_task(agent, name=name)
        # Also while it is parked: what the agent left behind is let in no more.
        playing.add_done_callback(lambda _: self._server.remove(session))
        return Play(session, playing, thread.end, self._options.session_timeout_s)

    async def _go_on(self, state: RolloutState, play: Play) -> bool:
        """Let the agent play until it has ended; False: until a pause came. Raises MemberFailedError."""
        session = play.session

        async def generate(ids: IntArray, num_tokens: int, bound: int) -> GenerateResult:
            result = await self._request(state, ids, num_tokens, bound)
            self._took(state, result)
            return result

        session.run(generate)
        began_s = asyncio.get_running_loop().time()
        cut = asyncio.create_task(session.interrupted.wait())
        try:
            with waits.waiting("an agent's next request, or its end", play.left_s, outside="environment"):
                waiting = await self._until_interrupted(_first([play.agent, cut], play.left_s), "an agent")
        finally:
            cut.cancel()
        if play.left_s is not None:
            play.left_s -= asyncio.get_running_loop().time() - began_s
        paused = waiting.cancelled() or session.interrupted.is_set()
        if play.agent.done():
            await session.end()
        elif paused:
            await session.pause()
        if session.fault is not None:
            raise session.fault
        if play.agent.done():
            return True
        _write(state, session.record)
        if not paused:
            came = self._external is None or self._external.is_open(session)
            text = "the agent took longer than" if came else "no program opened the session within"
            bound = self._options.session_timeout_s
            raise MemberFailedError(Boundary.ENVIRONMENT, f"{text} session_timeout_s={bound:g}")
        return False

    def _end(self, state: RolloutState, play: Play) -> list[RolloutState]:
        """Take the agent's result; return the session's other trajectories. Raises MemberFailedError."""
        session = play.session
        error = play.agent.exception() if not play.agent.cancelled() else RuntimeError("it was cancelled")
        # An agent that gives up because a bound was reached is judged by what it said until then.
        last, why = session.record.last, ""
        if error is not None and not session.is_full:
            why = f"the agent failed: {error!r:.500}"
        elif last is None or not last.complete or last.parsed is None:
            why = "the agent ended without a completion"
        if why:
            _write(state, session.record)
            raise MemberFailedError(Boundary.ENVIRONMENT, why)
        assert last is not None and last.parsed is not None
        reward = play.agent.result() if error is None else None
        state.metadata = {**state.metadata, ANSWER: last.parsed.content}
        branches = _branches(state, session.record)
        if session.is_full:
            state.finish_reason = "length"
        rewards = [turn.reward for turn in session.record.turns if turn.reward is not None]
        if reward is None and rewards:
            reward = math.fsum(rewards)
        if reward is None:
            return branches
        if isinstance(reward, bool | str) or not math.isfinite(reward):
            raise MemberFailedError(
                Boundary.ENVIRONMENT, f"the agent returned {reward!r:.40}: it must be a number"
            )
        state.response_text = last.parsed.content
        complete(state, float(reward))
        return branches

    # ---------------------------------------------------------------- agents

    async def _function(self, session: Session, thread: SideThread) -> float | None:
        assert self._agent is not None
        result = await thread.call(functools.partial(self._agent, **self._options.params), session)
        found: float | None = await result if inspect.isawaitable(result) else result
        return found


def _write(state: RolloutState, record: SessionRecord) -> None:
    """Make the trajectory what was recorded up to the last turn, if there is one."""
    leaf = record.last
    if leaf is None:
        return
    path, reason = leaf.path(), state.finish_reason
    state.prompt_ids = path[0].context
    write_path(state, leaf)
    state.finish_reason = reason
    _record_turns(state, path)


def _record_turns(state: RolloutState, path: list[RecordedTurn], lost: int = 0) -> None:
    """Record the turns of a path. `lost`: tokens of the session that nobody received, which its last turn tells."""
    turns, at = list[Turn](), 0
    told = (
        [{"name": f"{lost} tokens", "end": "nobody received them: not trained", "seconds": 0.0}]
        if lost
        else []
    )
    for number, turn in enumerate(path):
        start = at + (len(turn.context) if number else 0)
        at = start + len(turn.ids)
        after = len(path[number + 1].context) if number + 1 < len(path) else 0
        last = number + 1 == len(path)
        turns.append(Turn(start, at, at + after, turn.reward or 0.0, last, told if last else []))
    record_turns(state, turns)


def _branches(state: RolloutState, record: SessionRecord) -> list[RolloutState]:
    """Make `state` the session's last trajectory, and return the others."""
    leaves = record.leaves
    if len(leaves) > 1:
        state.metadata = {**state.metadata, SESSION: f"{state.group_id}/{state.sample_index}"}
    *branches, last = record.trajectories(state)
    for name in TOKEN_ARRAYS:
        setattr(state, name, getattr(last, name))
    for one, leaf in zip((*branches, state), leaves, strict=True):
        _record_turns(one, leaf.path(), record.num_dropped_tokens if one is state else 0)
    return branches


def _score_as(branch: RolloutState, state: RolloutState) -> None:
    """Give a trajectory of a session what became of the one that was judged."""
    for name in ("status", "reward", "reward_parts", "error", "num_aborts", "num_retries", "num_restarts"):
        setattr(branch, name, getattr(state, name))


async def _first(tasks: list[asyncio.Task[Any]], timeout_s: float | None) -> None:
    # Cancelled, it leaves the tasks alone.
    await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
