"""What agents, tools and environments may do wrong, each with its end: told to the client, or a failure by name."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from raypost.agent_loop.episode import Observation
from raypost.agent_loop.session import Session
from raypost.types import Status
from tests.unit.scripted_environments import AnswersInTurn, AsyncEcho, environment, run
from tests.unit.scripted_environments import init as one_member
from tests.unit.scripted_generator import result
from tests.unit.test_isolation import is_alive
from tests.unit.test_session_loop import play
from tests.unit.test_tool_loop import STOP, call, context, gives, said
from tests.unit.test_tool_loop import play as play_tools

USER = {"role": "user", "content": "x"}


async def posted(session: Session, body: Any, key: str | None = None) -> tuple[int, dict[str, Any]]:
    """Status and body of an answer of the endpoint's."""
    headers = {"Authorization": f"Bearer {key or session.api_key}"}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(f"{session.base_url}/chat/completions", data=data) as response,
    ):
        return response.status, await response.json()


# ---------------------------------------------------------------- requests


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        (None, "messages must be a list"),
        ({}, "messages must be a list"),
        ([], "at least one message"),
        (["hi"], "must be an object with role and content"),
        ([{"role": "robot", "content": "x"}], "role is 'robot': it must be one of system"),
        ([{"role": None, "content": "x"}], "role is None"),
        ([{"role": "user", "content": 7}], "content is 7"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "which is no text",
        ),
        ([USER, {"role": "tool", "content": "x"}], "no call before it has this id"),
        ([USER, {"role": "assistant", "content": None, "tool_calls": 3}], "tool_calls has 3"),
        ([USER, {"role": "assistant", "tool_calls": [{"id": 1}]}], "tool_calls has"),
    ],
)
def test_messages_that_are_no_conversation_are_refused_and_the_session_goes_on(
    messages: Any, why: str
) -> None:
    async def agent(session: Session) -> float:
        status, found = await posted(session, {"messages": messages})
        assert status == 400 and why in found["error"]["message"], found
        await session.complete()
        return 1.0

    (one,) = play(AnswersInTurn(*said("7")), agent)
    assert one.status is Status.COMPLETED, one.error


def test_null_and_list_content_is_text() -> None:
    async def agent(session: Session) -> float:
        parts = [{"type": "text", "text": "three "}, {"type": "text", "text": "plus four"}]
        body = {"messages": [{"role": "system", "content": None}, {"role": "user", "content": parts}]}
        assert (await posted(session, body))[0] == 200
        return 1.0

    (one,) = play(AnswersInTurn(*said("7")), agent)
    assert one.status is Status.COMPLETED, one.error


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"\xff\xfe\x00", 400), (b" " * (20 << 20), 413), (b"null", 400), (b"", 400)],
)
def test_bodies_that_are_nothing_are_refused(body: bytes, status: int) -> None:
    async def agent(session: Session) -> float:
        found, error = await posted(session, body)
        assert found == status and error["error"]["message"]
        await session.complete()
        return 1.0

    (one,) = play(AnswersInTurn(*said("7")), agent)
    assert one.status is Status.COMPLETED, one.error


def test_an_agent_that_answers_after_its_session_ended_is_told_so_and_changes_nothing() -> None:
    kept: list[Session] = []

    async def agent(session: Session) -> float:
        kept.append(session)
        if len(kept) == 2:
            status, found = await posted(session, {"messages": [USER]}, kept[0].api_key)
            assert status == 401 and kept[0].api_key not in json.dumps(found), "an ended session's key"
        await session.complete()
        if len(kept) == 2:
            with pytest.raises(Exception, match="this session has ended"):
                await kept[0].complete([USER])
        return 1.0

    (first,) = play(AnswersInTurn(*said("7")), agent)
    (second,) = play(AnswersInTurn(*said("7")), agent)
    assert first.num_tokens == second.num_tokens and second.status is Status.COMPLETED, second.error


# ---------------------------------------------------------------- rewards


@pytest.mark.parametrize(
    ("rewards", "why"),
    [
        ([("last", float("nan"))], "nan"),
        ([("last", float("inf"))], "inf"),
        ([("no-such", 1.0)], "no-such"),
        ([("last", 1.0), ("last", 1.0)], "reward"),
        ([("early", 1.0)], "no completion"),
    ],
)
def test_a_reward_that_is_none_is_the_agents_failure(rewards: list[tuple[str, float]], why: str) -> None:
    async def agent(session: Session) -> None:
        if rewards[0][0] == "early":
            session.set_last_reward(1.0)
        reply = await session.complete()
        for name, reward in rewards:
            session.set_reward(reply["id"] if name == "last" else name, reward)

    (one,) = play(AnswersInTurn(*said("7")), agent)
    assert one.status is Status.FAILED and str(one.error).startswith("environment: the agent failed"), (
        one.error
    )
    assert why in str(one.error)


# ---------------------------------------------------------------- programs

PROGRAM = """
import json, os, subprocess, sys, urllib.request
def ask():
    body = json.dumps({"messages": [{"role": "user", "content": "3 + 4?"}]}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    urllib.request.urlopen(urllib.request.Request(url, body, headers)).read()
"""


@pytest.mark.parametrize(
    ("end", "why"),
    [
        ("ask(); os.close(1); os.close(2)", None),  # closes its pipe
        ("ask(); os.write(1, b'x' * (8 << 20))", None),  # floods
        ("print('no answer')", "the agent ended without a completion"),
        ("ask(); sys.exit(7)", "exit code 7"),
        ("os.kill(os.getpid(), 9)", "exit code -9"),
        (
            "ask(); left(subprocess.Popen([sys.executable, '-c', WAIT], stdout=subprocess.DEVNULL, stderr=2))",
            None,
        ),
    ],
)
def test_a_programs_end_whatever_it_did_is_its_trajectorys_and_nothing_of_it_is_left(
    end: str, why: str | None, tmp_path: Path
) -> None:
    left = f"def left(child): open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))"
    (tmp_path / "agent.py").write_text(f"{PROGRAM}\nWAIT = 'import time; time.sleep(600)'\n{left}\n{end}\n")
    (one,) = play(
        AnswersInTurn(*said("7")),
        None,
        command=(sys.executable, str(tmp_path / "agent.py")),
        session_timeout_s=200,
        step_timeout_s=100,
    )
    if why is None:
        assert one.status is Status.COMPLETED, one.error
    else:
        assert one.status is Status.FAILED and why in str(one.error), one.error
        assert str(one.error).startswith("environment: ")
    if (tmp_path / "pid").exists():
        until = time.monotonic() + 120
        while is_alive(int((tmp_path / "pid").read_text())):
            assert time.monotonic() < until, "it is killed, and goes on"
            time.sleep(0.01)


# ---------------------------------------------------------------- tools and environments


def test_fifty_megabytes_of_a_tool_are_cut_before_they_are_encoded() -> None:
    one = play_tools(call("f"), "done", functions=(gives("x" * (50 << 20)),), max_observation_tokens=20)
    assert one.status is Status.COMPLETED, one.error
    assert "x" in context(one) and "[...]" in context(one) and len(context(one)) < 2000


@pytest.mark.parametrize("reward", ["1", None, [1.0], float("-inf")])
def test_an_environments_reward_that_is_no_number_is_its_failure(reward: Any) -> None:
    async def step(self: Any, action: Any) -> Observation:
        return Observation(reward=reward, done=True)

    (one,) = run(AnswersInTurn(result([STOP])), environment(AsyncEcho, step=step), one_member(1)).states
    assert one.status is Status.FAILED and one.reward is None
    assert str(one.error).startswith("environment: ") and "in turn 1" in str(one.error), one.error
