"""External sessions: a program of the user's own opens, rewards and ends them, and its key completes nothing."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from raypost.agent_loop.session_loop import SessionAgentLoop
from raypost.chat.renderer import TemplateRenderer
from raypost.errors import ConfigError
from raypost.plan.loops import loop_problems
from raypost.types import Group, Status
from tests.factories import make_config
from tests.unit.chat_templates import TEMPLATES, bpe
from tests.unit.scripted_environments import AnswersInTurn
from tests.unit.scripted_generator import Scorer
from tests.unit.test_session_loop import init, task_of
from tests.unit.test_tool_loop import said

EXTERNAL: dict[str, Any] = {"external": True, "session_timeout_s": 100, "agent": None}


class HastyLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock is ahead by as much as a test says."""

    ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_s


class Program:
    """The user's side: what it finds in the file, and HTTP."""

    def __init__(self, http: aiohttp.ClientSession, file: Path) -> None:
        found = json.loads(file.read_text())
        self.base_url, self.key = found["base_url"], found["admin_key"]
        self._http = http

    def let_time_pass(self, seconds: float) -> None:
        """Have whatever is timed for the next `seconds` be due now."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, HastyLoop)
        loop.ahead_s += seconds

    async def post(self, path: str, body: Any = None, key: str | None = None) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {key or self.key}"}
        data = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        async with self._http.post(f"{self.base_url}/{path}", data=data, headers=headers) as response:
            return response.status, await response.json() if response.status != 204 else None

    async def open(self) -> dict[str, Any]:
        status, session = await self.post("sessions", {"wait_s": 30})
        assert status == 200
        return dict(session)

    async def complete(self, session: dict[str, Any]) -> str:
        async with openai.AsyncOpenAI(base_url=session["base_url"], api_key=session["api_key"]) as client:
            reply = await client.chat.completions.create(model="policy", messages=session["messages"])
        return reply.id


def played(
    tmp_path: Path, program: Callable[[Program], Awaitable[None]], count: int = 1, **options: Any
) -> Group:
    """Run a group while the program plays its sessions."""

    async def main() -> Group:
        renderer, file = TemplateRenderer(bpe(), template=TEMPLATES["chatml with tools"]), tmp_path / "s.json"
        loop = SessionAgentLoop(
            AnswersInTurn(*said("7")),
            Scorer(),
            bpe(),
            renderer,
            task_of(**EXTERNAL | options),
            None,
            worker="w1",
            address_file=file,
        )
        running = asyncio.create_task(loop.run(init(count)))
        while not file.exists():
            await asyncio.sleep(0.01)
        async with aiohttp.ClientSession() as http:
            await program(Program(http, file))
        group = await running
        await loop.close()
        return group

    with asyncio.Runner(loop_factory=HastyLoop) as runner:
        return runner.run(main())


def test_a_program_of_ones_own_opens_rewards_and_ends_sessions(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = []

    async def program(my: Program) -> None:
        keys.append(my.key)
        for _ in range(2):
            session = await my.open()
            keys.append(session["api_key"])
            assert session["metadata"]["answer"] == "7" and session["messages"][0]["role"] == "user"
            completion = await my.complete(session)
            assert await my.post(f"sessions/{session['id']}/reward", {"reward": 0.5}) == (200, {})
            status, again = await my.post(
                f"sessions/{session['id']}/reward", {"reward": 1, "completion_id": completion}
            )
            assert status == 400 and "reward" in again["error"]["message"]
            assert (await my.post(f"sessions/{session['id']}/end"))[0] == 200
            assert (await my.post(f"sessions/{session['id']}/end"))[0] == 404
        assert await my.post("sessions", {"wait_s": 0.05}) == (204, None)

    with caplog.at_level(logging.DEBUG):
        group = played(tmp_path, program, 2)
    assert [(one.status, one.reward) for one in group.states] == [(Status.COMPLETED, 0.5)] * 2
    assert len(set(keys)) == 3 and not [key for key in keys if key in caplog.text]
    assert (tmp_path / "s.json").stat().st_mode & 0o777 == 0o600


def test_what_goes_wrong_in_the_program_is_the_environments_failure_and_a_reward_of_the_whole_counts(
    tmp_path: Path,
) -> None:
    async def program(my: Program) -> None:
        first, second = await my.open(), await my.open()
        await my.complete(second)
        await my.post(f"sessions/{first['id']}/end", {"error": "the browser crashed"})
        await my.post(f"sessions/{second['id']}/end", {"reward": 0.25})

    failed, done = sorted(played(tmp_path, program, 2).states, key=lambda one: one.status is Status.COMPLETED)
    assert failed.status is Status.FAILED and str(failed.error).startswith("environment: ")
    assert "the browser crashed" in str(failed.error)
    assert (done.status, done.reward) == (Status.COMPLETED, 0.25)


def test_a_session_that_nobody_opens_says_so_and_one_that_is_forgotten_too(tmp_path: Path) -> None:
    async def program(my: Program) -> None:
        await my.open()
        my.let_time_pass(100)

    group = played(tmp_path, program, 2)
    assert sorted(str(one.error) for one in group.states) == [
        "environment: no program opened the session within session_timeout_s=100",
        "environment: the agent took longer than session_timeout_s=100",
    ]


def test_keys_do_what_they_are_for_and_no_more(tmp_path: Path) -> None:
    async def program(my: Program) -> None:
        session = await my.open()
        chat = {"messages": session["messages"]}
        assert (await my.post("chat/completions", chat))[0] == 401, "the admin key completes nothing"
        for key in (session["api_key"], "wrong", "admin-", "\xe4"):
            assert (await my.post("sessions", key=key))[0] == 401
            assert (await my.post(f"sessions/{session['id']}/end", {"reward": 9}, key))[0] == 401
        await my.complete(session)
        await my.post(f"sessions/{session['id']}/end", {"reward": 1})
        await asyncio.sleep(0.05)
        assert (await my.post("chat/completions", chat, session["api_key"]))[0] == 401, "it has ended"

    (one,) = played(tmp_path, program).states
    assert (one.status, one.reward) == (Status.COMPLETED, 1.0)


@pytest.mark.parametrize(
    ("path", "body", "status", "why"),
    [
        ("reward", {"reward": 1}, 404, "no completion was made"),
        ("reward", {}, 400, "reward is missing"),
        ("reward", {"reward": "1"}, 400, "must be a finite number"),
        ("reward", b'{"reward": NaN}', 400, "must be a finite number"),
        ("reward", {"reward": True}, 400, "must be a finite number"),
        ("reward", {"reward": 1, "completion_id": "no-such"}, 404, "no-such"),
        ("reward", b"\xff", 400, "no JSON"),
        ("reward", b"[1]", 400, "must be a JSON object"),
        ("end", b'{"reward": Infinity}', 400, "must be a finite number"),
        ("end", b"x" * (17 << 20), 413, "too large"),
    ],
)
def test_bad_requests_are_refused_and_the_session_goes_on(
    path: str, body: Any, status: int, why: str, tmp_path: Path
) -> None:
    async def program(my: Program) -> None:
        session = await my.open()
        found, words = await my.post(f"sessions/{session['id']}/{path}", body)
        assert found == status and why in words["error"]["message"], words
        assert (await my.post(f"sessions/other/{path}", {"reward": 1}))[0] == 404
        await my.complete(session)
        await my.post(f"sessions/{session['id']}/end", {"reward": 1})

    assert played(tmp_path, program).status is Status.COMPLETED


@pytest.mark.parametrize(
    ("loop", "why"),
    [
        ({"external": True}, "external sessions need session_timeout_s"),
        ({"external": True, "agent": "a:b", "session_timeout_s": 100}, "either `agent`, a function"),
        ({"kind": "single_turn", "port": 80}, "port 80 is not used by kind 'single_turn': use 'session'"),
        ({"kind": "single_turn", "host": "0.0.0.0"}, "host '0.0.0.0' is not used by kind"),
    ],
)
def test_what_contradicts_itself_is_refused(loop: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match="configuration") as caught:
        make_config(tasks__0__agent_loop={"kind": "session", **loop})
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("loop", "workers", "why"),
    [
        ({"port": 8100}, 2, "port is 8100, at which 2 endpoints would listen"),
        ({"host": "no such host"}, 1, "host is 'no such host', which is no address"),
        ({"port": 8100, "host": "0.0.0.0"}, 1, None),
    ],
)
def test_an_address_that_cannot_be_had_is_refused_by_the_plan(
    loop: dict[str, Any], workers: int, why: str | None
) -> None:
    settings = {"kind": "session", "external": True, "session_timeout_s": 100, **loop}
    config = make_config(tasks__0__agent_loop=settings, tasks__0__chat=True, rollout__agent_workers=workers)
    found = list(loop_problems(config.tasks[0], config, None))
    assert not found if why is None else len(found) == 1 and why in found[0], found
