"""Agents over OpenAI's API: what they get, what is trained, pauses, and whose fault it is."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import psutil
import pytest

from raypost.agent_loop.parking import worker_of
from raypost.agent_loop.session import Session
from raypost.agent_loop.session_loop import SessionAgentLoop
from raypost.chat.openai import IGNORED_HEADER
from raypost.chat.renderer import TemplateRenderer
from raypost.config import AgentLoopConfig, TaskConfig
from raypost.config.agent_loops import McpServer
from raypost.types import GenerateRequest, GenerateResult, Group, RolloutState, SampleParams, Status
from raypost.types.turns import turns_of
from tests.unit.chat_templates import TEMPLATES, bpe
from tests.unit.scripted_environments import AnswersInTurn, carried
from tests.unit.scripted_generator import Scorer, ScriptedGenerator, result
from tests.unit.test_tool_loop import STOP, call, said

TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}


def client_of(session: Session, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, **options)


async def asks_twice(session: Session) -> None:
    async with client_of(session) as client:
        messages: list[Any] = [*session.messages]
        first = await client.chat.completions.create(model="policy", messages=messages, temperature=0.3)
        messages += [first.choices[0].message, {"role": "user", "content": "Sure?"}]
        await client.chat.completions.create(model="policy", messages=messages)


def task_of(max_prompt_tokens: int = 200, **options: Any) -> TaskConfig:
    loop = {"kind": "session", **({} if "command" in options else {"agent": "a:b"}), **options}
    source = {"kind": "jsonl", "dataset": "x"}
    task = {
        "source": source,
        "agent_loop": loop,
        "max_prompt_tokens": max_prompt_tokens,
        "judge": {"kind": "exact"},
    }
    return TaskConfig.model_validate(task)


def loop_of(
    engine: Any, agent: Any, judge: Any = None, template: str = "chatml with tools", **options: Any
) -> Any:
    renderer = TemplateRenderer(bpe(), template=TEMPLATES[template])
    task = task_of(**options)
    return SessionAgentLoop(engine, judge or Scorer(), bpe(), renderer, task, agent, worker="w1")


def init(count: int = 1, max_tokens: int = 500) -> Group:
    states = [
        RolloutState(
            task="default",
            group_id=0,
            sample_index=index,
            prompt_ids=np.asarray([5], np.int32),
            sample_params=SampleParams(max_tokens=max_tokens, stop_token_ids=(STOP,)),
            metadata={"question": "3 plus 4?", "answer": "7"},
        )
        for index in range(count)
    ]
    return Group(task="default", group_id=0, states=states)


def play(
    engine: Any, agent: Any, max_tokens: int = 500, count: int = 1, **options: Any
) -> list[RolloutState]:
    async def main() -> list[RolloutState]:
        loop = loop_of(engine, agent, **options)
        states = (await loop.run(init(count, max_tokens))).states
        await loop.close()
        return list(states)

    return asyncio.run(main())


# ---------------------------------------------------------------- what is trained


def test_an_agent_on_openais_client_is_one_trajectory_of_what_was_sampled() -> None:
    engine = AnswersInTurn(*said("It is 8.", "No, 7."))
    (one,) = play(engine, asks_twice)
    assert (one.status, one.reward, one.response_text) == (Status.COMPLETED, 1.0, "No, 7.")
    text = bpe().decode(one.response_ids[one.response_mask], skip_special_tokens=False)
    assert text == "It is 8.<|im_end|>No, 7.<|im_end|>"
    sent = engine.requests[1].token_ids.tolist()
    assert sent == [*one.prompt_ids, *one.response_ids][: len(sent)]
    assert {request.sample_params.temperature for request in engine.requests} == {1.0}
    assert [turn.done for turn in turns_of(one)] == [False, True]
    assert "3 plus 4?" in bpe().decode(one.prompt_ids)


def test_tools_streams_and_rewards_of_the_agents_own() -> None:
    async def agent(session: Session) -> float:
        asked: Any = session.messages
        async with client_of(session) as client:
            stream = await client.chat.completions.create(
                model="policy",
                messages=asked,
                tools=[TOOL],
                stream=True,
                stream_options={"include_usage": True},
            )
            calls, usage = [], None
            async for chunk in stream:
                usage = chunk.usage or usage
                calls += [c for choice in chunk.choices for c in choice.delta.tool_calls or []]
        assert usage is not None and usage.completion_tokens > 3
        (one,) = calls
        assert one.function is not None and one.id is not None
        made = {
            "id": one.id,
            "type": "function",
            "function": {"name": "add", "arguments": one.function.arguments},
        }
        messages: list[Any] = [
            *session.messages,
            {"role": "assistant", "content": None, "tool_calls": [made]},
            {"role": "tool", "tool_call_id": one.id, "content": [{"type": "text", "text": "7"}]},
        ]
        reply = await session.complete(messages, tools=[TOOL], return_token_ids=True)
        assert reply["choices"][0]["token_ids"][-1] == STOP
        return 0.25

    (one,) = play(AnswersInTurn(*said(call(a=3, b=4), "7")), agent)
    assert (one.status, one.reward, one.error) == (Status.COMPLETED, 0.25, None)
    assert "<|im_start|>tool\n7<|im_end|>" in bpe().decode(one.response_ids, skip_special_tokens=False)


def test_a_plain_function_and_rewards_by_completion() -> None:
    def agent(session: Session) -> None:
        with openai.OpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            assert [model.id for model in client.models.list()] == ["policy"]
            messages: Any = session.messages
            reply = client.chat.completions.create(model="policy", messages=messages, max_tokens=5)
            session.set_reward(reply.id, 0.5)

    engine = AnswersInTurn(*said("7"))
    (one,) = play(engine, agent)
    assert (one.status, one.reward, one.error) == (Status.COMPLETED, 0.5, None)
    assert engine.requests[0].sample_params.max_tokens == 5


def test_a_stop_text_cuts_at_its_first_match_and_its_tokens_are_trained() -> None:
    async def agent(session: Session) -> None:
        reply = await session.complete(stop=["Obs"])
        assert reply["choices"][0]["message"]["content"] == "Act: "
        messages = [*session.messages, reply["choices"][0]["message"], *session.messages]
        await session.complete(messages)

    (one,) = play(AnswersInTurn(*said("Act: Observation: lies", "7")), agent)
    assert one.status is Status.COMPLETED, one.error
    text = bpe().decode(one.response_ids[one.response_mask])
    assert "Act: Obs" in text and "lies" not in text


# ---------------------------------------------------------------- pauses


def test_a_request_that_a_pause_cuts_stays_open_and_goes_on() -> None:
    async def main() -> None:
        engine = AnswersInTurn(*said("8"), result([65, 66], "abort", 1), result([67, STOP], "stop", 2))
        started = []

        async def agent(session: Session) -> None:
            started.append(1)
            await asks_twice(session)

        loop = loop_of(engine, agent)
        paused = carried(await loop.run(init()))
        assert (paused.status, loop.num_parked, worker_of(paused.states)) == (Status.ABORTED, 1, "w1")
        assert paused.states[0].response_ids.tolist()[-2:] == [65, 66]
        (one,) = (await loop.run(paused)).states
        assert (one.status, one.num_restarts, len(started)) == (Status.COMPLETED, 0, 1), one.error
        assert one.response_ids.tolist()[-4:] == [65, 66, 67, STOP]
        assert one.policy_versions.tolist()[-4:] == [1, 1, 2, 2]
        assert engine.requests[2].token_ids.tolist()[-2:] == [65, 66]
        await loop.close()

    asyncio.run(main())


def test_an_agent_that_is_busy_elsewhere_is_parked_and_not_disturbed_and_its_key_goes_with_it() -> None:
    async def main() -> None:
        released, busy = asyncio.Event(), asyncio.Event()
        sessions = list[Session]()

        async def agent(session: Session) -> float:
            sessions.append(session)
            await session.complete()
            busy.set()
            await released.wait()
            return 1.0

        async def status() -> int:
            headers = {"Authorization": f"Bearer {sessions[0].api_key}"}
            async with (
                aiohttp.ClientSession(headers=headers) as http,
                http.get(f"{sessions[0].base_url}/models") as response,
            ):
                return response.status

        loop = loop_of(AnswersInTurn(*said("7")), agent)
        loop._grace_s = 0.01
        running = asyncio.create_task(loop.run(init()))
        await busy.wait()
        await loop.interrupt()
        paused = carried(await running)
        assert (paused.status, loop.num_parked, await status()) == (Status.ABORTED, 1, 200)
        released.set()
        for _ in range(5):  # turns of the loop, until the agent has ended
            await asyncio.sleep(0)
        assert (loop.num_parked, await status()) == (1, 401)
        (one,) = (await loop.run(paused)).states
        assert (one.status, one.reward, loop.num_parked) == (Status.COMPLETED, 1.0, 0)
        await loop.close()

    asyncio.run(main())


def test_without_its_agent_a_trajectory_starts_again() -> None:
    async def main() -> None:
        engine = AnswersInTurn(*said("8"), result([65], "abort"), *said("8", "7"))
        first = loop_of(engine, asks_twice)
        paused = carried(await first.run(init()))
        await first.close()
        again = loop_of(engine, asks_twice)
        (one,) = (await again.run(paused)).states
        assert (one.status, one.num_restarts) == (Status.COMPLETED, 1)
        await again.close()

    asyncio.run(main())


# ---------------------------------------------------------------- requests that repeat, or are given up


@pytest.mark.parametrize(
    ("first", "again", "words"),
    [
        ({}, {"x-stainless-retry-count": "1"}, "3 plus 4?"),
        ({"Idempotency-Key": "a"}, {"Idempotency-Key": "a"}, "something else"),
    ],
)
def test_a_repeated_request_gets_the_first_answer(
    first: dict[str, str], again: dict[str, str], words: str
) -> None:
    async def agent(session: Session) -> float:
        headers = {"Authorization": f"Bearer {session.api_key}"}
        body: dict[str, Any] = {"temperature": 0.1}
        async with aiohttp.ClientSession(headers=headers) as http:
            url = f"{session.base_url}/chat/completions"
            replies = []
            for more, asked in ((first, "3 plus 4?"), (again, words)):
                body["messages"] = [{"role": "user", "content": asked}]
                async with http.post(url, json=body, headers=more) as response:
                    assert response.headers[IGNORED_HEADER] == "temperature"
                    replies.append(await response.json())
        assert replies[0] == replies[1]
        return 1.0

    engine = AnswersInTurn(*said("7"))
    (one,) = play(engine, agent)
    assert (one.status, len(engine.requests)) == (Status.COMPLETED, 1), one.error


class Abandoned(ScriptedGenerator):
    """Counts the requests that were cancelled while it worked on them."""

    left = 0

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        try:
            return await super().generate(request)
        except asyncio.CancelledError:
            self.left += 1
            raise


async def asks_and_hangs_up(session: Session, engine: Abandoned, requests: int) -> float:
    """Hang up while the engine works on the last of so many requests, and ask once more."""
    messages: Any = session.messages
    async with client_of(session) as client:
        asking = asyncio.create_task(client.chat.completions.create(model="policy", messages=messages))
        while len(engine.requests) < requests:
            await asyncio.sleep(0.001)
        asking.cancel()
        await asyncio.wait([asking])
    while not engine.left:
        await asyncio.sleep(0.001)
    await session.complete()
    return 1.0


def test_what_a_client_did_not_wait_for_is_not_trained() -> None:
    answers = [None, *said("7")]
    engine = Abandoned(lambda _: answers.pop(0))
    (one,) = play(engine, lambda session: asks_and_hangs_up(session, engine, 1))
    assert (one.status, bpe().decode(one.response_ids)) == (Status.COMPLETED, "7"), one.error


def test_what_a_client_gave_up_after_a_pause_is_not_trained_and_stands_in_nobodys_way() -> None:
    async def main() -> None:
        answers = [result([65, 66], "abort"), None, *said("7")]
        engine = Abandoned(lambda _: answers.pop(0))
        loop = loop_of(engine, lambda session: asks_and_hangs_up(session, engine, 2))
        paused = carried(await loop.run(init()))
        (one,) = (await loop.run(paused)).states
        assert (one.status, bpe().decode(one.response_ids)) == (Status.COMPLETED, "7"), one.error
        lost = [(call["name"], call["end"]) for call in turns_of(one)[-1].calls]
        assert lost == [("2 tokens", "nobody received them: not trained")]
        await loop.close()

    asyncio.run(main())


# ---------------------------------------------------------------- whose fault


async def _ends(session: Session) -> None: ...


async def _raises(session: Session) -> None:
    await session.complete()
    raise OSError("no route")


async def _not_a_number(session: Session) -> float:
    await session.complete()
    return float("nan")


async def _hangs(session: Session) -> None:
    await session.complete()
    await asyncio.sleep(1e6)


@pytest.mark.parametrize(
    ("agent", "why"),
    [
        (_ends, "environment: the agent ended without a completion"),
        (_raises, "environment: the agent failed: OSError('no route')"),
        (_not_a_number, "environment: the agent returned nan"),
        (_hangs, "environment: the agent took longer than session_timeout_s=1"),
    ],
)
def test_an_agents_failure_is_failed_by_name(agent: Any, why: str) -> None:
    limits: dict[str, Any] = {"session_timeout_s": 1, "step_timeout_s": 0.5} if agent is _hangs else {}
    (one,) = play(AnswersInTurn(*said("7", "8")), agent, **limits)
    assert one.status is Status.FAILED and why in str(one.error), one.error


def test_an_engines_failure_is_the_engines_also_if_the_agent_does_not_mind() -> None:
    async def agent(session: Session) -> float:
        with pytest.raises(openai.InternalServerError):
            await asks_twice(session)
        return 1.0

    engine = AnswersInTurn(result([], "error"))
    (one,) = play(engine, agent)
    assert one.status is Status.FAILED and str(one.error).startswith("engine:")
    assert len(engine.requests) == 1, "the client is told not to repeat it"


def test_a_full_context_is_told_in_openais_words_and_what_was_said_is_judged() -> None:
    async def agent(session: Session) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            await asks_twice(session)
        assert caught.value.code == "context_length_exceeded"

    for does in (agent, asks_twice):  # the second lets the error end it
        (one,) = play(AnswersInTurn(*said("a long answer")), does, max_tokens=20)
        assert (one.status, one.reward, one.finish_reason) == (Status.COMPLETED, 1.0, "length"), one.error
    (one,) = play(AnswersInTurn(*said("7")), asks_twice, max_turns=1)
    assert (one.status, one.finish_reason) == (Status.COMPLETED, "length"), one.error
    (one,) = play(AnswersInTurn(*said("7")), asks_twice, max_prompt_tokens=3)
    assert one.status is Status.FAILED and "ended without a completion" in str(one.error)


# ---------------------------------------------------------------- bad requests


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        (b"\xff\xfe", 400, "no JSON"),
        (b"[]", 400, "must be a JSON object"),
        (b'{"messages": "hi"}', 400, "must be a list"),
        ({"messages": [{"role": "user", "content": "x"}], "n": 2}, 400, "open more sessions"),
        (
            {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_schema"}},
            400,
            "response_format",
        ),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "9"}]}, 400, "no call before it"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [3]}, 400, "tools has 3"),
        ({"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}, 400, "max_tokens is 0"),
        (b"x" * (17 << 20), 413, "bytes"),
        ({"messages": [{"role": "user", "content": "x " * 3000}]}, 400, "max_prompt_tokens=200"),
    ],
)
def test_bad_requests_are_refused_in_openais_shape(body: Any, status: int, why: str) -> None:
    async def agent(session: Session) -> float:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {session.api_key}"}
        url = f"{session.base_url}/chat/completions"
        async with aiohttp.ClientSession(headers=headers) as http, http.post(url, data=data) as response:
            found = await response.json()
        assert response.status == status and why in found["error"]["message"], found
        await session.complete()
        return 1.0

    (one,) = play(AnswersInTurn(*said("7")), agent)
    assert one.status is Status.COMPLETED, one.error


def test_sampling_belongs_to_the_run() -> None:
    theirs = {
        "temperature": 0.1, "top_p": 0.2, "top_k": 3, "min_p": 0.3, "seed": 4, "presence_penalty": 1.0,
        "frequency_penalty": 1.0, "repetition_penalty": 2.0, "logit_bias": {"5": 1},
    }  # fmt: skip

    async def agent(session: Session) -> float:
        headers = {"Authorization": f"Bearer {session.api_key}"}
        body = {"messages": session.messages, "tools": [TOOL], "tool_choice": "required", "max_tokens": 9999}
        async with aiohttp.ClientSession(headers=headers) as http:
            url = f"{session.base_url}/chat/completions"
            async with http.post(url, json={**body, **theirs}) as response:
                assert response.status == 200 and response.headers[IGNORED_HEADER].split(",") == list(theirs)
                reply = await response.json()
        assert reply["choices"][0]["message"]["content"] == "7", "no call is forced"
        return 1.0

    engine = AnswersInTurn(*said("7"))
    (one,) = play(engine, agent, max_tokens=50)
    (request,) = engine.requests
    assert one.status is Status.COMPLETED, one.error
    assert request.sample_params == init(max_tokens=50).states[0].sample_params


def test_other_apis_are_refused_in_their_own_shapes() -> None:
    async def agent(session: Session) -> float:
        base, headers = session.base_url, {"Authorization": f"Bearer {session.api_key}"}
        async with aiohttp.ClientSession(headers=headers) as http:
            async with http.post(f"{base}/responses", json={"input": "3 + 4?"}) as response:
                found = await response.json()
                assert response.status == 501 and "chat completions" in found["error"]["message"]
            async with http.post(f"{base}/messages", json={"messages": []}) as response:
                found = await response.json()
                assert response.status == 501 and found["type"] == "error"
                assert set(found["error"]) == {"type", "message"}
        await session.complete()
        return 1.0

    (one,) = play(AnswersInTurn(*said("7")), agent)
    assert one.status is Status.COMPLETED, one.error


def test_keys_open_their_own_session_while_it_lasts() -> None:
    async def main() -> None:
        sessions: list[Session] = []

        async def agent(session: Session) -> float:
            sessions.append(session)
            await session.complete()
            return 1.0

        loop = loop_of(AnswersInTurn(*said("7")), agent)
        await loop.run(init(2))
        assert sessions[0].api_key != sessions[1].api_key
        for key in (sessions[0].api_key, "wrong", ""):
            with pytest.raises(
                (openai.AuthenticationError, openai.OpenAIError), match=r"opens no session|Missing"
            ):
                async with openai.AsyncOpenAI(base_url=sessions[0].base_url, api_key=key) as client:
                    await client.models.list()
        async with aiohttp.ClientSession() as http:
            for path in ("responses", "messages"):
                async with http.post(f"{sessions[0].base_url}/{path}", json={}) as response:
                    assert response.status == 501 and "error" in await response.json()
        await loop.close()

    asyncio.run(main())


# ---------------------------------------------------------------- programs

PROGRAM = """
import os, openai
assert "HOME" not in os.environ, "a cleared environment"
client = openai.OpenAI()
messages = [{"role": "user", "content": os.environ["RAYPOST_QUESTION"]}]
print(client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages).choices[0].message.content)
"""


def test_a_program_plays_with_nothing_but_its_own_environment(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(PROGRAM)
    command = (sys.executable, str(tmp_path / "agent.py"))
    (one,) = play(AnswersInTurn(*said("7")), None, command=command)
    assert (one.status, one.reward, one.response_text) == (Status.COMPLETED, 1.0, "7"), one.error


def test_a_program_is_told_its_task_and_may_say_its_reward(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(
        "import json, os, urllib.request\n"
        "task = json.load(open(os.environ['RAYPOST_SESSION']))\n"
        "assert task['messages'][-1]['content'] == task['metadata']['question'] == '3 plus 4?'\n"
        "url, body = os.environ['OPENAI_BASE_URL'], json.dumps({'messages': task['messages']}).encode()\n"
        "key = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
        "urllib.request.urlopen(urllib.request.Request(url + '/chat/completions', body, key)).read()\n"
        "open(os.environ['RAYPOST_REWARD'], 'w').write(os.environ.get('SAID') or task['metadata']['answer'])\n"
    )
    program, engine = (sys.executable, str(tmp_path / "agent.py")), AnswersInTurn(*said("8"))
    (one,) = play(engine, None, command=program)
    assert (one.status, one.reward) == (Status.COMPLETED, 7.0), one.error
    for text, why in (("nan", "must be a number"), ("much", "wrote 'much' as its reward")):
        (one,) = play(engine, None, command=("env", f"SAID={text}", *program))
        assert one.status is Status.FAILED and why in str(one.error)


def test_files_of_a_command_and_of_an_mcp_server_lie_beside_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("")

    def of(loop: dict[str, Any]) -> AgentLoopConfig:
        return AgentLoopConfig.model_validate(loop, context={"folder": tmp_path})

    here = str(tmp_path / "agent.py")
    for given, whole in (
        (["python3", "agent.py", "sums"], ("python3", here, "sums")),
        (["env/bin/python", "agent.py"], (f"{tmp_path}/env/bin/python", here)),
        (["/bin/sh", "-c", "agent.py; other.py"], ("/bin/sh", "-c", "agent.py; other.py")),
        (["agent.py"], ("agent.py",)),  # is looked for in PATH
    ):
        assert of({"kind": "session", "command": given}).command == whole
        (server,) = of({"kind": "tools", "tools": [{"mcp": given}]}).tools
        assert isinstance(server, McpServer) and server.mcp == whole


def test_a_program_that_fails_floods_and_forks_is_named_ended_and_its_key_is_not_shown(
    tmp_path: Path,
) -> None:
    (tmp_path / "agent.py").write_text(
        "import os, sys, time\n"
        "if os.fork() == 0:\n    sys.stdout.close(); os.close(1); os.close(2); time.sleep(1000)\n"
        "print('x' * 10_000_000); print(os.environ['OPENAI_API_KEY']); sys.exit(3)\n"
    )
    command = (sys.executable, str(tmp_path / "agent.py"))
    (one,) = play(AnswersInTurn(*said("7")), None, command=command)
    assert one.status is Status.FAILED and "exit code 3" in str(one.error)
    assert "session-" not in str(one.error) and "***" in str(one.error)
    # A process that was killed is gone a moment later.
    every, agent = psutil.process_iter(["cmdline"]), str(tmp_path / "agent.py")
    ended = [one for one in every if agent in (one.info["cmdline"] or ())]
    assert psutil.wait_procs(ended, timeout=120)[1] == []


def test_siblings_play_at_once_each_in_a_session_of_its_own() -> None:
    waiting: list[GenerateRequest] = []

    def answer(request: GenerateRequest) -> Any:
        waiting.append(request)
        return said("7")[0]

    states = play(ScriptedGenerator(answer), asks_twice, count=8)
    assert {one.status for one in states} == {Status.COMPLETED} and len(waiting) == 16
