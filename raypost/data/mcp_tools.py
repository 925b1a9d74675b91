"""Tools of an MCP server: what it says of them, and their calls.

Owns the server's process, or the way to one over HTTP. Its tools look like those of functions.py to whoever calls them.

    schemas: start, list, end: once in each process that renders prompts
    calls:   one server for a process, started with the first call; it lists again, and must say the same
               +- the server reports an error, refuses the arguments -> ToolError: the policy is told
               +- ends, hangs, speaks no MCP, gives what is no text -> McpError; it is started again for the next call
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from raypost.config.agent_loops import McpServer
from raypost.errors import ConfigError, RaypostError, ToolError
from raypost.observe.waits import waiting
from raypost.sandbox.reaper import reaped

START_S = 60.0
"""Longest time for a server to start and to list its tools; its program may have to be fetched first."""
PING_S = 2.0
"""How long a server may take to answer a ping after a call to it was given up."""
CLOSE_S = 10.0
"""Longest time of its end; the client kills it long before."""
INVALID_PARAMS = -32602
"""JSON-RPC's code of an error in what was asked."""


class McpError(RaypostError):
    """An MCP server did not do what it must."""


class BadArgumentsError(Exception):
    """The policy's arguments do not fit; the text tells it why."""


class McpTool:
    """One tool of a server."""

    def __init__(self, connection: McpConnection, schema: dict[str, Any]) -> None:
        """Take a schema as chat templates and OpenAI's API want it."""
        self.name: str = schema["function"]["name"]
        self.schema = schema
        self._connection = connection

    def arguments(self, text: str) -> dict[str, Any]:
        """Return the arguments in a JSON object; the server says whether they fit. Raises BadArgumentsError."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BadArgumentsError(f"bad arguments for {self.name}: no JSON: {error}"[:500]) from None
        if not isinstance(found, dict):
            raise BadArgumentsError(f"bad arguments for {self.name}: {text!r:.80} is no JSON object")
        return found

    async def function(self, /, **arguments: Any) -> str:
        """Call it. Raises ToolError and McpError."""
        return await self._connection.call(self.name, arguments)

    async def close(self) -> None:
        """End the server."""
        await self._connection.close()


@dataclass(slots=True, eq=False)
class _Running:
    session: Any
    task: asyncio.Task[None]
    ended: asyncio.Event


class McpConnection:
    """One server, running while it is used. It may be used by one event loop after another."""

    def __init__(self, server: McpServer, what: str) -> None:
        """Start nothing yet. `what`: where it is named, for errors."""
        self._server, self._what = server, what
        self._running: _Running | None = None
        self._starting: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self.schemas: list[dict[str, Any]] = []

    def load(self) -> list[McpTool]:
        """Ask the server for its tools, in a process that ends afterwards. Raises ConfigError."""

        async def ask() -> list[dict[str, Any]]:
            async with asyncio.timeout(START_S), self._connected() as (_, schemas):
                return schemas

        # A thread, because the caller may have a running event loop of its own.
        with ThreadPoolExecutor(1, "list MCP tools") as thread:
            try:
                self.schemas = thread.submit(asyncio.run, ask()).result()
            except ConfigError:
                raise
            # Whatever a program that is no MCP server does to the client.
            except (Exception, ExceptionGroup) as error:
                raise ConfigError(f"{self._what} cannot be started: {_why(error)}") from error
        if not self.schemas:
            raise ConfigError(f"{self._what} has no tools")
        return [McpTool(self, schema) for schema in self.schemas]

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Return what a tool says. Raises ToolError and McpError."""
        running = await self._ready()
        try:
            result = await running.session.call_tool(name, arguments)
        except asyncio.CancelledError:
            # Past its deadline: the server may answer other calls, or hang altogether.
            self._later(self._probe(running))
            raise
        except Exception as error:
            if getattr(getattr(error, "error", None), "code", None) == INVALID_PARAMS:
                raise ToolError(str(error)) from None
            self._drop(running)
            raise McpError(f"{self._what}: {_why(error)}") from error
        return self._text(result)

    async def close(self) -> None:
        """End the server."""
        if self._running is not None and self._is_here(self._running):
            self._drop(self._running)
        if self._ending:
            await asyncio.wait(self._ending, timeout=CLOSE_S)

    # ---------------------------------------------------------------- the server

    async def _ready(self) -> _Running:
        loop = asyncio.get_running_loop()
        if self._starting is None or self._starting[0] is not loop:
            self._starting, self._running = (loop, asyncio.Lock()), None
        async with self._starting[1]:
            if self._running is None or self._running.task.done():
                self._running = await self._start()
            return self._running

    async def _start(self) -> _Running:
        begun: asyncio.Future[tuple[Any, list[dict[str, Any]]]] = asyncio.get_running_loop().create_future()
        ended = asyncio.Event()
        # The client must be entered and left in one task.
        task = asyncio.create_task(self._serve(begun, ended), name=self._what)
        try:
            with waiting(self._what, START_S, outside="environment"):
                async with asyncio.timeout(START_S):
                    session, schemas = await begun
        except BaseException as error:
            self._end(task, ended)
            if isinstance(error, Exception):
                raise McpError(f"{self._what} cannot be started: {_why(error)}") from error
            raise
        running = _Running(session, task, ended)
        if schemas != self.schemas:
            self._end(task, ended)
            raise McpError(f"{self._what} lists other tools than it did when the prompts were rendered")
        return running

    async def _serve(self, begun: asyncio.Future[Any], ended: asyncio.Event) -> None:
        try:
            async with self._connected() as connected:
                begun.set_result(connected)
                await ended.wait()
        # The client raises groups of whatever its tasks met; calls are told by their own errors.
        except (Exception, ExceptionGroup) as error:
            if not begun.done():
                begun.set_exception(McpError(_why(error)))

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[tuple[Any, list[dict[str, Any]]]]:
        try:
            # Imported here: it takes a second, which tasks without such tools need not pay.
            import mcp
            from mcp.client.streamable_http import streamable_http_client
        except ImportError as error:
            raise ConfigError(
                f"{self._what}: the package mcp is not installed: install it: pip install mcp"
            ) from error
        command = self._server.mcp
        if isinstance(command, str):
            transport = streamable_http_client(command)
        else:
            if shutil.which(command[0]) is None:
                raise ConfigError(f"{self._what}: there is no program {command[0]!r} on this machine")
            # It has an environment of its own.
            first, *arguments = reaped(command)
            given = mcp.StdioServerParameters(command=first, args=arguments)
            transport = mcp.stdio_client(given, errlog=sys.__stderr__ or sys.stderr)
        async with transport as (read, write), mcp.ClientSession(read, write) as session:
            await session.initialize()
            yield session, await self._listed(session)

    async def _listed(self, session: Any) -> list[dict[str, Any]]:
        found, cursor, more = list[dict[str, Any]](), None, True
        while more:
            # Its own type, which is known only where the package is.
            from mcp.types import PaginatedRequestParams

            page = await session.list_tools(params=PaginatedRequestParams(cursor=cursor) if cursor else None)
            for tool in page.tools:
                function = {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": tool.input_schema,
                }
                found.append({"type": "function", "function": function})
            cursor = page.next_cursor
            more = bool(cursor)
        return found

    async def _probe(self, running: _Running) -> None:
        try:
            async with asyncio.timeout(PING_S):
                await running.session.send_ping()
        # Whatever it is, a server that does not answer a ping is of no use.
        except Exception:
            self._drop(running)

    def _is_here(self, running: _Running) -> bool:
        return running.task.get_loop() is asyncio.get_running_loop()

    def _drop(self, running: _Running) -> None:
        if self._running is running:
            self._running = None
        self._end(running.task, running.ended)

    def _end(self, task: asyncio.Task[None], ended: asyncio.Event) -> None:
        ended.set()
        if not task.done():
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    def _later(self, work: Any) -> None:
        task = asyncio.create_task(work, name=f"ping {self._what}")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _text(self, result: Any) -> str:
        texts = []
        for part in getattr(result, "content", None) or ():
            if part.type != "text":
                raise McpError(f"{self._what}: it returned a part of type {part.type!r}, and no text")
            texts.append(part.text)
        structured = getattr(result, "structured_content", None)
        text = "\n".join(texts) if texts or structured is None else json.dumps(structured, ensure_ascii=False)
        if getattr(result, "is_error", False):
            raise ToolError(text or "it failed")
        return text


def _why(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return f"it did not answer within {START_S:g} s"
    return f"{type(error).__name__}: {error}"[:500]
