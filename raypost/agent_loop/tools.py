"""ToolAgentLoop: the policy calls tools until it answers; the answer is judged.

Owns the calls of a turn: how many, how long, what the policy is told, and who is to blame. Owns neither the order of
the turns (turn_loop.py) nor how calls are written (chat/renderer.py) nor what they may be (data/functions.py).

    prompt -> policy -> calls  -> [results] -> policy -> ... -> no call: the answer -> judge -> COMPLETED
                         +- no JSON, unknown, bad arguments, ToolError -> the policy is told
                         +- raises, hangs, returns what is no text -> FAILED, and played again

Invariants: those of TurnLoop; a call is made once; nothing is called if no turn can follow.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from raypost.agent_loop.group_loop import MemberFailedError
from raypost.agent_loop.judging import Judging
from raypost.agent_loop.threads import SideThread
from raypost.agent_loop.turn_loop import Answer, Play, TurnLoop
from raypost.chat.messages import Parsed, ToolCall
from raypost.chat.record import NO_IDS, SessionRecord
from raypost.chat.renderer import Renderer
from raypost.config import AgentLoopConfig, RolloutConfig, StrategyConfig
from raypost.data.functions import Tool, observed
from raypost.data.mcp_tools import BadArgumentsError
from raypost.data.tokenizer import Tokenizer
from raypost.errors import Boundary, ToolError
from raypost.observe.spans import TOOL
from raypost.observe.waits import waiting
from raypost.types import Generator, Group, IntArray, Judge, RolloutState, Status
from raypost.types.turns import recorded_turns

CUT = "[...]"
"""Stands where an observation was cut."""
MAX_TOKEN_CHARACTERS = 64
"""Of what is longer than so many characters a token, the rest is not even encoded."""


class ToolAgentLoop(TurnLoop):
    """Runs every unfinished member of a group at once, and has the group judged."""

    def __init__(
        self,
        generator: Generator,
        judge: Judge,
        tokenizer: Tokenizer,
        renderer: Renderer,
        tools: Sequence[Tool],
        options: AgentLoopConfig,
        *,
        rollout: RolloutConfig | None = None,
        strategy: StrategyConfig | None = None,
        worker: str = "",
    ) -> None:
        """Take bounds and deadlines from `options`; `step_timeout_s` is that of one call."""
        super().__init__(generator, tokenizer.decode, options, rollout, strategy, worker=worker)
        self._judging = Judging(judge, self._until_interrupted, self._words)
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._tools = {tool.name: tool for tool in tools}
        self._schemas = [tool.schema for tool in tools]

    async def close(self) -> None:
        """End the parked episodes, and what the tools have running."""
        await super().close()
        for tool in self._tools.values():
            await tool.close()

    async def run(self, group: Group) -> Group:
        """Run every member that is not COMPLETED to its end and judge; return the same group, statuses set.

        Raises only errors that are no member's: a generator or judge whose process is gone, or a bug.
        """
        # Not COMPLETED before it is judged: cancelled here, a member must not look finished.
        await self._judging.end(group, await self._each(group, self._member))
        return group

    async def _member(self, state: RolloutState) -> bool:
        turns = recorded_turns(state)
        if state.status is not Status.EXPIRED and state.num_tokens and turns and turns[-1].done:
            return True  # it waits for its judge alone
        return await self._play(state)

    def _words(self, state: RolloutState) -> str:
        """Return the answer, which is judged: what was said last, without reasoning."""
        last = recorded_turns(state)[-1]
        before = np.concatenate([state.prompt_ids, state.response_ids[: last.start]])
        return self._parse(state.response_ids[last.start : last.end], before).content

    # ---------------------------------------------------------------- a turn

    async def _open(self, state: RolloutState) -> Play:
        record = SessionRecord(self._renderer)
        return Play(len(state.prompt_ids), record, record.extend(None, state.prompt_ids), [])

    async def _answer(self, state: RolloutState, play: Play) -> Answer:
        turn = play.open.turn
        calls = self._parse(turn.ids, turn.context).tool_calls
        left = state.sample_params.max_tokens - play.num_tokens
        if not calls:
            return Answer(ids=NO_IDS, done=True, reason=turn.finish_reason or "stop")
        if len(play.turns) + 1 >= self._options.max_turns or left <= 0:
            return Answer(ids=NO_IDS, done=True, reason="length")
        names = [f"{turn.number:05x}{place:04x}" for place in range(len(calls))]
        made = await asyncio.gather(*(self._call(call, place) for place, call in enumerate(calls)))
        messages = [
            {"role": "tool", "tool_call_id": name, "name": call.name or "unknown", "content": self._cut(text)}
            for name, call, (text, _) in zip(names, calls, made, strict=True)
        ]
        bridge = self._renderer.bridge(play.token_ids, messages, tools=self._schemas)
        if bridge is None:
            raise MemberFailedError(
                Boundary.AGENT_LOOP,
                "the chat template gives no ids that may follow this turn: see `raypost plan`, or set "
                "agent_loop.thinking_retention to all",
            )
        facts = [fact for _, fact in made]
        return Answer(ids=bridge, done=len(bridge) >= left, reason="length", calls=tuple(facts))

    def _failed(self, error: BaseException, number: int) -> MemberFailedError:
        return MemberFailedError(Boundary.ENVIRONMENT, f"turn {number}: {error!r:.500}")

    def _parse(self, ids: IntArray, before: IntArray) -> Parsed:
        return self._renderer.parse(ids, prompt_ids=before, tools=self._schemas)

    # ---------------------------------------------------------------- a call

    async def _call(self, call: ToolCall, place: int) -> tuple[str, dict[str, Any]]:
        """Return what the policy is told, and what is kept of the call. Raises MemberFailedError: the world's fault."""
        began = time.monotonic()
        text, end = await self._told(call, place)
        return text, {"name": call.name, "end": end, "seconds": round(time.monotonic() - began, 4)}

    async def _told(self, call: ToolCall, place: int) -> tuple[str, str]:
        tool = self._tools.get(call.name)
        if place >= self._options.max_parallel_calls:
            return f"error: not called: at most {self._options.max_parallel_calls} calls at once", "too many"
        if call.error is not None:
            return f"error: no call: {call.error}", "no call"
        if tool is None:
            return f"error: no tool {call.name!r:.80}: there are {', '.join(self._tools)}", "unknown"
        try:
            arguments = tool.arguments(call.arguments)
        except BadArgumentsError as error:
            return f"error: {error}", "bad arguments"
        try:
            value = await self._within(lambda: tool.function(**arguments), call.name)
            return observed(value), "returned"
        except ToolError as error:
            return f"error: {error!s:.2000}", "error"
        # A supervision boundary: what a tool raises is the reason of one FAILED trajectory.
        except Exception as error:
            raise MemberFailedError(
                Boundary.ENVIRONMENT, f"tool {call.name} failed: {error!r:.500}"
            ) from error

    async def _within(self, function: Callable[[], Any], name: str) -> Any:
        bound = self._options.step_timeout_s
        # A thread of its own, never waited for: a call that hangs holds up nothing but itself.
        thread = SideThread(f"tool {name}")
        deadline = asyncio.timeout(bound)
        try:
            async with deadline:
                with self.spans.span(TOOL), waiting(f"tool {name}", bound, outside="environment"):
                    value = await thread.call(function)
                    return await value if inspect.isawaitable(value) else value
        except TimeoutError as error:
            if deadline.expired():
                raise TimeoutError(f"it took longer than step_timeout_s={bound:g}") from error
            raise
        finally:
            thread.end()

    def _cut(self, text: str) -> str:
        """Return an observation within its bound, with a mark where it was cut."""
        bound, side = self._options.max_observation_tokens, self._options.observation_cut
        if bound is None or len(text) <= bound:
            return text
        longest = bound * MAX_TOKEN_CHARACTERS
        if len(text) > 2 * longest:
            text = text[:longest] + text[-longest:]
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        if len(ids) <= bound:
            return text
        head = {"end": bound, "start": 0, "middle": bound // 2}[side]
        tail = bound - head
        first = self._decode(ids[:head]) if head else ""
        last = self._decode(ids[len(ids) - tail :]) if tail else ""
        return f"{first}{CUT}{last}"
