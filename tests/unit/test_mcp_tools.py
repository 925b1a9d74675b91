"""Tools of an MCP server, with the real package: calls, and servers that are killed, hang and lie."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from raypost.agent_loop.tools import ToolAgentLoop
from raypost.chat.renderer import TemplateRenderer
from raypost.config import AgentLoopConfig
from raypost.config.agent_loops import McpServer
from raypost.data.functions import function_tools
from raypost.data.mcp_tools import McpConnection, McpTool
from raypost.errors import ConfigError
from raypost.types import RolloutState, Status
from raypost.types.turns import turns_of
from tests.factories import make_config
from tests.unit.chat_templates import TEMPLATES, bpe
from tests.unit.scripted_environments import AnswersInTurn
from tests.unit.scripted_generator import Scorer
from tests.unit.test_tool_loop import call, context, init, said


@pytest.fixture(autouse=True, scope="module")
def package() -> None:
    """Looked for where a test needs it: importing it takes a second."""
    pytest.importorskip("mcp")


SERVER = '''
import os, pathlib, sys
from mcp.server.mcpserver import MCPServer

with pathlib.Path(__file__).with_name("starts").open("a") as file:
    file.write(f"{os.getpid()}\\n")
server = MCPServer("calculator", log_level="CRITICAL")

@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b

@server.tool()
def secrets() -> str:
    """Says what environment it has."""
    return ",".join(sorted(os.environ))

arguments = sys.argv[1:]
server.run(transport="streamable-http", port=int(arguments[0])) if arguments else server.run()
'''

CHEAP = """
import json, os, pathlib, sys, time

here = pathlib.Path(__file__)
with here.with_name("starts").open("a") as file:
    file.write(f"{os.getpid()}\\n")
names = ["add", "quit", "hang", "draw"]
if len(here.with_name("starts").read_text().split()) > 1 and here.with_name("lies").exists():
    names.append("more")

def answer(method, params):
    if method == "initialize":
        server = {"name": "calculator", "version": "1"}
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": server}
    if method == "tools/list":
        return {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in names]}
    if method == "ping":
        return {}
    if params["name"] == "quit":
        os._exit(3)
    if params["name"] == "hang":
        time.sleep(1e9)
    if params["name"] == "draw":
        return {"content": [{"type": "image", "data": "aGVsbG8=", "mimeType": "image/png"}]}
    return {"content": [{"type": "text", "text": str(sum(params["arguments"].values()))}]}

for line in sys.stdin:
    asked = json.loads(line)
    if "id" in asked:
        told = answer(asked["method"], asked.get("params"))
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": told}), flush=True)
"""
"""A server that starts in no time, for what a client sees of servers that end, hang and lie."""


@pytest.fixture(scope="module")
def tools(package: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[McpTool, ...]:
    """Of a server that was listed once; each test starts its own."""
    return listed(tmp_path_factory.mktemp("mcp"))


def listed(folder: Path, source: str = SERVER) -> tuple[McpTool, ...]:
    (folder / "server.py").write_text(source)
    server = McpServer(mcp=(sys.executable, str(folder / "server.py")))
    return tuple(McpConnection(server, f"the server in {folder}").load())


def pids(tools: tuple[McpTool, ...]) -> list[int]:
    command = tools[0]._connection._server.mcp
    return [int(pid) for pid in Path(command[-1]).with_name("starts").read_text().split()]


def play(tools: Any, *texts: str, **options: Any) -> RolloutState:
    async def main() -> RolloutState:
        renderer = TemplateRenderer(bpe(), template=TEMPLATES["chatml with tools"])
        config = AgentLoopConfig(kind="tools", tools=("a:b",), **options)
        loop = ToolAgentLoop(AnswersInTurn(*said(*texts)), Scorer(), bpe(), renderer, tools, config)
        try:
            return (await loop.run(init())).states[0]
        finally:
            await loop.close()

    return asyncio.run(main())


def test_the_policy_calls_a_servers_tools_in_one_process_that_ends_with_the_loop(
    tools: tuple[McpTool, ...],
) -> None:
    began = len(pids(tools))
    assert tools[0].schema["function"]["description"] == "Adds two numbers."
    assert tools[0].schema["function"]["parameters"]["required"] == ["a", "b"]
    several = "\n".join([call(a=3, b=4), call(a="x"), call("add", a=1, b=1), call("secrets")])
    one = play(tools, several, "done")
    assert (one.status, one.reward) == (Status.COMPLETED, 1.0), one.error
    ends = [made["end"] for made in turns_of(one)[0].calls]
    assert ends == ["returned", "error", "returned", "returned"]
    told = context(one)
    assert "tool\n7<" in told and "error: Error executing tool add" in told and "tool\n2<" in told
    assert "PATH" in told and "PYTEST" not in told and "VIRTUAL_ENV" not in told
    assert len(pids(tools)) == began + 1 and not any(map(psutil.pid_exists, pids(tools)))


def test_a_server_that_dies_hangs_or_gives_no_text_is_the_worlds_failure_and_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = listed(tmp_path, CHEAP)
    monkeypatch.setattr("raypost.data.mcp_tools.PING_S", 0.1)  # it hangs for ever

    async def main() -> None:
        renderer = TemplateRenderer(bpe(), template=TEMPLATES["chatml with tools"])
        patient = AgentLoopConfig(kind="tools", tools=("a:b",), step_timeout_s=60)
        brief = AgentLoopConfig(kind="tools", tools=("a:b",), step_timeout_s=0.2)
        connection = tools[0]._connection
        for name, why in [
            ("quit", "closed"),
            ("draw", "a part of type 'image', and no text"),
            ("hang", "longer than step_timeout_s"),
        ]:
            engine = AnswersInTurn(*said(call(name), call(a=3, b=4), "done"))
            config = brief if name == "hang" else patient  # the server is up by then
            loop = ToolAgentLoop(engine, Scorer(), bpe(), renderer, tools, config)
            (one,) = (await loop.run(init())).states
            assert one.status is Status.FAILED and f"tool {name} failed" in str(one.error), one.error
            assert why in str(one.error).lower() and str(one.error).startswith("environment: ")
            async with asyncio.timeout(60):
                while name == "hang" and connection._running is not None:
                    await asyncio.sleep(0.05)  # it does not answer a ping, and is dropped
            loop = ToolAgentLoop(engine, Scorer(), bpe(), renderer, tools, patient)
            (again,) = (await loop.run(init())).states
            assert again.status is Status.COMPLETED, again.error
            assert "tool\n7<" in context(again)
        await loop.close()

    asyncio.run(main())
    assert not any(map(psutil.pid_exists, pids(tools)))


def test_a_server_that_lists_other_tools_than_the_prompt_showed_is_found_out(tmp_path: Path) -> None:
    (tmp_path / "lies").touch()
    one = play(listed(tmp_path, CHEAP), call(a=3, b=4), "done")
    assert one.status is Status.FAILED and "lists other tools than it did" in str(one.error)


def test_a_server_over_http(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, str(tmp_path / "server.py"), str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(3000):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.05)
        url = f"http://127.0.0.1:{port}/mcp"
        task = make_config(
            tasks__0__agent_loop={"kind": "tools", "tools": [{"mcp": url}]}, tasks__0__chat=True
        ).tasks[0]
        one = play(function_tools(task), call(a=3, b=4), "done")
        assert one.status is Status.COMPLETED and "tool\n7<" in context(one)
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize(
    ("mcp", "why"),
    [
        (("no-such-program",), "there is no program 'no-such-program'"),
        ((sys.executable, "-c", "raise SystemExit(3)"), "cannot be started"),
        ("http://127.0.0.1:9/mcp", "cannot be started"),
    ],
)
def test_what_does_not_start_is_refused(mcp: Any, why: str) -> None:
    settings = {"kind": "tools", "tools": [{"mcp": mcp}]}
    task = make_config(tasks__0__agent_loop=settings, tasks__0__chat=True).tasks[0]
    with pytest.raises(ConfigError, match=why) as caught:
        function_tools(task)
    assert "task 'default': agent_loop.tools" in str(caught.value)


def test_what_names_no_server_is_refused() -> None:
    cases: list[Any] = [[], "server.py"]
    for mcp in cases:
        settings = {"kind": "tools", "tools": [{"mcp": mcp}]}
        with pytest.raises(ConfigError, match="neither a program"):
            make_config(tasks__0__agent_loop=settings)
