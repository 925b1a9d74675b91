"""Session: the policy as one agent sees it, through OpenAI's chat completions.

Owns what a request does: the turn that it extends, the tokens it may have, the answer that a repeated request gets, and
that nothing is generated while its trajectory is paused. Owns neither HTTP (session_server.py) nor the agent
(session_loop.py).

Invariants: those of the record (chat/record.py), so that a request which continues no recorded turn begins a branch;
a request that a pause interrupts stays open and goes on behind its tokens.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import secrets
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from raypost.agent_loop.group_loop import MemberFailedError
from raypost.chat.openai import ApiError, ChatRequest, completion, read_request
from raypost.chat.record import NO_IDS, Prepared, RecordedTurn, SessionRecord
from raypost.chat.renderer import Renderer
from raypost.errors import ConfigError
from raypost.types import GenerateResult, IntArray, SampleParams

Generate = Callable[[IntArray, int, int], Awaitable[GenerateResult]]
"""From the ids to send, how many of them are the response's, and how many may follow, to what was sampled."""


class Session:
    """One session. Agents use `messages`, `metadata`, `base_url`, `api_key`, `complete` and `set_reward`."""

    def __init__(
        self,
        renderer: Renderer,
        decode: Callable[[IntArray], str],
        params: SampleParams,
        *,
        messages: list[dict[str, Any]],
        metadata: dict[str, Any],
        base_url: str,
        max_prompt_tokens: int,
        max_turns: int,
    ) -> None:
        """Begin without a turn, paused."""
        self.messages = messages
        """The task's prompt as a conversation."""
        self.metadata = metadata
        """The prompt's metadata, such as `question` and `answer`."""
        self.base_url = base_url
        """For OpenAI's clients."""
        self.api_key = f"session-{secrets.token_urlsafe(24)}"
        """Opens this session alone."""
        self.record = SessionRecord(renderer)
        self.fault: MemberFailedError | None = None
        """What made the session useless."""
        self.is_full = False
        """Whether the last request was refused because a bound of the run was reached."""
        self.interrupted = asyncio.Event()
        """Set once a pause cut a request."""
        self._decode = decode
        self._params = params
        self._max_prompt_tokens = max_prompt_tokens
        self._max_turns = max_turns
        self._generate: Generate | None = None
        self._running = asyncio.Event()
        self._generating = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._answers: dict[str, asyncio.Task[dict[str, Any]]] = {}
        self._open: set[asyncio.Task[dict[str, Any]]] = set()
        """Requests that are not answered yet; several may have one body."""
        self._lost: dict[str, asyncio.Task[dict[str, Any]]] = {}
        """Requests whose answer came too late: it is there if they are repeated."""
        self._busy = self._answered = 0
        self._ended = False

    # ---------------------------------------------------------------- for agents

    async def complete(
        self, messages: Sequence[Mapping[str, Any]] | None = None, **body: Any
    ) -> dict[str, Any]:
        """Return a reply as OpenAI's API gives it, without HTTP. `messages` None: the task's. Raises ApiError."""
        given = self.messages if messages is None else list(messages)
        return await self.answer(read_request({"messages": given, **body}))

    def set_reward(self, completion_id: str, reward: float) -> None:
        """Give a completion its reward, once; the trajectory's is the sum. Raises KeyError and ValueError."""
        self.record.set_reward(completion_id, reward)

    def set_last_reward(self, reward: float) -> None:
        """Give the last completion its reward, once. Raises KeyError and ValueError."""
        self.record.set_last_reward(reward)

    # ---------------------------------------------------------------- requests

    async def answer(
        self, request: ChatRequest, body: bytes | None = None, retried: str | None = None
    ) -> dict[str, Any]:
        """Return the reply to a request. `retried`: it is repeated, and gets the first answer. Raises ApiError.

        It is known again by `retried`, or by its body where that is empty.
        """
        name = retried or (hashlib.sha256(body).hexdigest() if body is not None else uuid.uuid4().hex)
        first = self._lost.get(name, self._answers.get(name) if retried is not None else None)
        if first is not None and not first.cancelled():
            reply = await asyncio.shield(first)
            self._lost.pop(name, None)
            return reply
        task = asyncio.create_task(self._reply(request), name="a session's request")
        self._answers[name] = task
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            # The client hung up: what nobody received is never trained.
            if not task.cancel():
                self._lost[name] = task
            raise

    async def _reply(self, request: ChatRequest) -> dict[str, Any]:
        if self._ended:
            raise ApiError(401, "this session has ended", "session_ended")
        prepared = self._prepare(request)
        sent = prepared.token_ids if request.return_token_ids else None
        self._busy += 1
        try:
            await self._sample(prepared, request)
        except BaseException:
            self.record.drop(prepared.turn)
            raise
        finally:
            self._busy -= 1
        self._answered += 1
        self.is_full = False
        return completion(prepared.turn, sent=None if sent is None else sent.tolist())

    def _prepare(self, request: ChatRequest) -> Prepared:
        try:
            prepared = self.record.prepare_read(request.messages, request.tools)
        except ConfigError as error:
            raise ApiError(400, f"the chat template refuses the conversation: {error}") from None
        turn, full = prepared.turn, "context_length_exceeded"
        if self._answered + self._busy >= self._max_turns:
            self._refuse(f"max_turns={self._max_turns} replies were given in this session", "max_turns")
        if turn.num_prompt > self._max_prompt_tokens:
            bound = f"max_prompt_tokens={self._max_prompt_tokens}"
            self._refuse(f"the conversation begins with {turn.num_prompt} tokens, more than {bound}", full)
        if self._left(turn) <= 0:
            bound = f"max_tokens={self._params.max_tokens}"
            self._refuse(
                f"{_num_response(turn)} tokens follow its beginning, and {bound} leaves none for a reply",
                full,
            )
        return prepared

    def _refuse(self, text: str, code: str) -> None:
        self.is_full = True
        raise ApiError(400, text, code)

    def _left(self, turn: RecordedTurn) -> int:
        return self._params.max_tokens - _num_response(turn)

    async def _sample(self, prepared: Prepared, request: ChatRequest) -> None:
        turn = prepared.turn
        while not turn.complete:
            await self._running.wait()
            assert self._generate is not None
            bound = self._left(turn)
            if request.max_tokens is not None:
                bound = min(bound, request.max_tokens - turn.num_ids)
            self._generating += 1
            self._idle.clear()
            try:
                result = await self._generate(prepared.token_ids, _num_response(turn), bound)
            except MemberFailedError as error:
                self.fault = self.fault or error
                raise ApiError(503, f"the engine failed: {error}", "engine_failed") from error
            finally:
                self._generating -= 1
                if not self._generating:
                    self._idle.set()
            if result.finish_reason == "abort" and self._is_over(result, bound):
                result = dataclasses.replace(result, finish_reason="stop")
            if request.stop:
                result = self._cut(turn, result, request.stop)
            self.record.commit(prepared, result, stop=request.stop)
            if not turn.complete:
                self._running.clear()
                self.interrupted.set()

    def _is_over(self, result: GenerateResult, bound: int) -> bool:
        ids = result.response_ids
        return len(ids) > 0 and (len(ids) >= bound or int(ids[-1]) in self._params.stop_token_ids)

    def _cut(self, turn: RecordedTurn, result: GenerateResult, stop: tuple[str, ...]) -> GenerateResult:
        """Return the result up to the first token with which one of `stop` is in the reply."""
        before, ids = len(turn.ids), np.concatenate([turn.ids, result.response_ids])
        text = self._decode(ids)
        if not any(one in text for one in stop):
            return result
        low, high = before, len(ids)
        while low + 1 < high:
            middle = (low + high) // 2
            if any(one in self._decode(ids[:middle]) for one in stop):
                high = middle
            else:
                low = middle
        size = high - before
        return dataclasses.replace(
            result,
            response_ids=result.response_ids[:size],
            logprobs=result.logprobs[:size],
            policy_versions=result.policy_versions[:size],
            finish_reason="stop",
        )

    # ---------------------------------------------------------------- pauses and the end

    def run(self, generate: Generate) -> None:
        """Let requests go on."""
        self._generate = generate
        self.interrupted.clear()
        self._running.set()

    async def pause(self) -> None:
        """Let no request begin to generate, and wait for those that do: the engines are stopped."""
        self._running.clear()
        await self._idle.wait()

    @property
    def token_ids(self) -> IntArray:
        """Ids of the trajectory so far."""
        return NO_IDS if self.record.last is None else self.record.last.all_ids()

    async def end(self) -> None:
        """Answer nothing more."""
        self._ended = True
        for done in self._lost.values():
            if done.exception() is None:
                self.record.drop(self.record.find(done.result()["id"]))
        self._lost.clear()
        tasks = list(self._open)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _num_response(turn: RecordedTurn) -> int:
    return turn.num_before + turn.num_ids - turn.num_prompt


def parse_body(data: bytes) -> Any:
    """Return the JSON in a body. Raises ApiError."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {error}"[:200]) from None
