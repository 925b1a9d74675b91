"""IsolatedEnvironment: an environment in a process of its own, forked from one that has imported its code.

Owns the processes from the parent's side: their start, the calls, and their end. What runs in them is fork_server.py's.

    call -> message -> the environment's process -> its answer
              +- cancelled, past its deadline -> close: the process group is killed and reaped
              +- the process ends -> EnvironmentDiedError, with how it ended

Invariants: no call blocks the event loop; after `close` nothing of the process group is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from raypost.agent_loop.episode import Environment, Observation
from raypost.agent_loop.fork_server import FORK, HEADER, KILL, READY, EnvironmentSpec
from raypost.config import TaskConfig
from raypost.config.imports import load_function
from raypost.observe.waits import waiting

log = logging.getLogger(__name__)

START_S = 60.0
"""Longest time for the server to start and to import the environment's code."""
ANSWER_S = 30.0
"""Longest time in which it forks, or has killed a process group."""
CLOSE_S = 5.0
"""Longest time of an environment's own `close`."""
MAX_ANSWER_BYTES = 64 << 20


class EnvironmentDiedError(Exception):
    """The process of an environment ended, or could not be had."""


class RaisedThereError(Exception):
    """What an environment raised in its process, as text."""

    def __repr__(self) -> str:
        """Return what it raised there."""
        return str(self)


@dataclass(slots=True)
class _Server:
    process: subprocess.Popen[bytes]
    control: socket.socket
    gone: bool = False


class EnvironmentProcesses:
    """Makes isolated environments of one kind. Use it from one event loop."""

    def __init__(self, spec: EnvironmentSpec, timeout_s: float) -> None:
        """Start nothing yet. `timeout_s` bounds the making of an environment."""
        self.spec = spec
        self.timeout_s = timeout_s
        self._server: _Server | None = None
        self._turn = asyncio.Lock()

    def __call__(self) -> IsolatedEnvironment:
        """Return one that has no process yet."""
        return IsolatedEnvironment(self)

    async def order(self, order: bytes, fd: int | None = None) -> int:
        """Have the server do something and return its answer; -1 for a process of a server that is gone.

        Raises EnvironmentDiedError.
        """
        # Not cancelled in the middle: the next answer would be this one's.
        return await asyncio.shield(asyncio.create_task(self._ordered(order, fd)))

    async def _ordered(self, order: bytes, fd: int | None) -> int:
        try:
            async with self._turn:
                server = self._server
                if server is None or server.gone:
                    if order != FORK:
                        return -1
                    server = self._server = await self._start()
                try:
                    socket.send_fds(server.control, [order], [] if fd is None else [fd])
                    async with asyncio.timeout(ANSWER_S):
                        answer = await asyncio.get_running_loop().sock_recv(server.control, 64)
                    return int(answer)
                except (OSError, ValueError, TimeoutError) as error:
                    self._end(server)
                    if order != FORK:
                        return -1
                    raise EnvironmentDiedError(
                        f"{self.spec.path}: the process that environments are forked from ended"
                    ) from error
        finally:
            if fd is not None:
                os.close(fd)

    async def _start(self) -> _Server:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there, open(os.memfd_create("spec"), "w+b") as spec:
            pickle.dump(self.spec, spec)
            spec.seek(0)
            # What can be imported here can be imported there.
            path = os.pathsep.join(dict.fromkeys([*filter(None, sys.path), os.getcwd()]))
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "raypost.agent_loop.fork_server", str(there.fileno())],
                pass_fds=(there.fileno(),),
                stdin=spec,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,
            )
        here.setblocking(False)
        server = _Server(process, here)
        try:
            with waiting(f"the import of {self.spec.path}", START_S, outside="environment"):
                async with asyncio.timeout(START_S):
                    said = await asyncio.get_running_loop().sock_recv(here, 4096)
        except (TimeoutError, OSError):
            self._end(server)
            raise EnvironmentDiedError(f"{self.spec.path} was not imported within {START_S:g} s") from None
        if said != READY:
            self._end(server)
            words = said.decode(errors="replace") or "its process ended"
            raise EnvironmentDiedError(f"{self.spec.path} cannot be imported: {words}")
        return server

    def _end(self, server: _Server) -> None:
        # It kills what it forked when it notices that this side is closed.
        server.gone = True
        server.control.close()

    async def close(self) -> None:
        """End the server and all environments."""
        async with self._turn:
            if self._server is None:
                return
            self._end(self._server)
            try:
                await asyncio.to_thread(self._server.process.wait, ANSWER_S)
            except subprocess.TimeoutExpired:
                self._server.process.kill()
                await asyncio.to_thread(self._server.process.wait)
            self._server = None


def environment_maker(
    task: TaskConfig, speakers: Mapping[str, object] | None = None
) -> Callable[[], Environment]:
    """Return what makes the task's environments, where its `isolation` says. Raises ConfigError.

    `speakers`: frozen models by name; that which the task names is given to its environments.
    """
    options, what = task.agent_loop, f"task {task.name!r}: agent_loop.environment"
    assert options.environment is not None, "the configuration requires it"
    isolation = options.isolation
    if options.reward_model is not None:
        make = load_function(options.environment, what, options.file_source)
        return functools.partial(make, **options.params, model=(speakers or {})[options.reward_model])
    if isolation != "process":
        make = load_function(options.environment, what, options.file_source)
        isolation = isolation or getattr(make, "isolation", "thread")
        if isolation == "thread":
            return functools.partial(make, **options.params)
    spec = EnvironmentSpec(
        path=options.environment, what=what, source=options.file_source, params=dict(options.params)
    )
    return EnvironmentProcesses(spec, options.step_timeout_s)


class IsolatedEnvironment:
    """One environment, in its process."""

    def __init__(self, processes: EnvironmentProcesses) -> None:
        """Take `processes`, where it will be forked."""
        self.deterministic = False
        """As the environment says, once it has started."""
        self._processes = processes
        self._forked: asyncio.Task[int] | None = None
        self._link: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._calling = False

    async def start(self) -> None:
        """Fork its process and make it. Raises TimeoutError, EnvironmentDiedError, and what its making raises."""
        here, there = socket.socketpair()
        with here:
            order = self._processes.order(FORK, there.detach())
            self._forked = asyncio.create_task(order, name="fork an environment")
            await asyncio.shield(self._forked)
            self._link = await asyncio.open_connection(sock=here.dup())
        timeout_s = self._processes.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                with waiting(f"the making of {self._processes.spec.path}", timeout_s, outside="environment"):
                    self.deterministic = bool(await self._call("make"))
        except TimeoutError as error:
            raise TimeoutError(f"its making took longer than step_timeout_s={timeout_s:.0f}") from error

    async def reset(self, metadata: dict[str, Any], *, seed: int = 0) -> Observation:
        """Pass it on; the seed to one that takes it."""
        found: Observation = await self._call("reset", metadata, seed)
        return found

    async def step(self, action: Any) -> Observation:
        """Pass it on."""
        found: Observation = await self._call("step", action)
        return found

    async def close(self) -> None:
        """Close it, if it is not busy, and kill its process group."""
        try:
            if self._link is not None and not self._calling:
                async with asyncio.timeout(CLOSE_S):
                    await self._call("close")
        # A supervision boundary: the trajectory is complete, whatever happens to the environment afterwards.
        except Exception as error:
            log.warning("an environment's close failed: %r", error)
        finally:
            await self._ended()

    async def _ended(self) -> int | None:
        """Kill the process group; return how its first process ended."""
        if self._link is not None:
            self._link[1].close()
            self._link = None
        forked, self._forked = self._forked, None
        if forked is None:
            return None
        with contextlib.suppress(EnvironmentDiedError):
            return await self._processes.order(KILL + str(await asyncio.shield(forked)).encode())
        return None

    async def _call(self, method: str, *args: object) -> Any:
        if self._link is None:
            raise EnvironmentDiedError("its process has ended")
        reader, writer = self._link
        data = pickle.dumps((method, args), 5)
        self._calling = True
        try:
            writer.write(HEADER.pack(len(data)) + data)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
            if size > MAX_ANSWER_BYTES:
                raise EnvironmentDiedError(f"{method} answered {size} bytes, more than {MAX_ANSWER_BYTES}")
            fine, value = pickle.loads(await reader.readexactly(size))
        except (EOFError, OSError):
            code = await self._ended()
            how = "" if code is None else f" with {f'signal {-code}' if code < 0 else f'exit code {code}'}"
            raise EnvironmentDiedError(f"its process ended{how} in {method}") from None
        # Cut in the middle, it stays busy: the next answer would be this one's.
        self._calling = False
        if not fine:
            raise RaisedThereError(value)
        return value
