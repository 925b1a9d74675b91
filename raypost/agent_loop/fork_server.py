"""The process that environments are forked from: it imports their code once, and each fork is one environment.

Started by isolated.py with an open socket. It runs no method of an environment itself, so that it answers at once,
whatever they do; it kills and reaps their process groups, all of them when its parent is gone.

    parent --spec, pickled, as the standard input--> [import] --ready, or what is wrong--> parent
    parent --fork, with an open socket--> pid               child --(ok, value)--> parent
    parent --kill PID--> exit status, once it is gone       parent --(method, arguments)--> child
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import os
import pickle
import random
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from raypost.agent_loop.episode import takes_seed
from raypost.config.imports import load_function
from raypost.errors import ConfigError
from raypost.sandbox.reaper import REAP_S, adopt_orphans, end_children

HEADER = struct.Struct(">Q")
"""Length of the message that follows, in bytes."""
FORK, KILL, READY = b"fork", b"kill", b"ready"
SWEEP_S = 5.0
"""How often it looks for what environments that have ended left in process groups of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSpec:
    """Which environment, and how it is made."""

    path: str
    """`module:function`, or `game.py:Game`."""
    what: str
    """What errors call it."""
    source: str | None = None
    """Text of the file; None: it is in a module."""
    params: dict[str, Any] = field(default_factory=dict)


class Hosted:
    """One environment in its own process."""

    def __init__(self, make: Callable[..., Any], params: dict[str, Any]) -> None:
        """Make nothing yet."""
        self._make, self._params = make, params
        self._environment: Any = None
        self._runner = asyncio.Runner()

    def make(self) -> bool:
        """Make the environment; return whether it is deterministic."""
        self._environment = self._make(**self._params)
        return bool(getattr(self._environment, "deterministic", False))

    def reset(self, metadata: dict[str, Any], seed: int) -> Any:
        """Begin, with the seed if it takes one; the process's own random numbers begin with it too."""
        # Forks have one state: without this, all groups would draw the same.
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)
        more = {"seed": seed} if takes_seed(self._environment) else {}
        return self._called(self._environment.reset, metadata, **more)

    def step(self, action: Any) -> Any:
        """Answer an action."""
        return self._called(self._environment.step, action)

    def close(self) -> None:
        """Close it, if it has `close`."""
        if callable(close := getattr(self._environment, "close", None)):
            self._called(close)

    def _called(self, method: Callable[..., Any], *args: Any, **more: Any) -> Any:
        found = method(*args, **more)

        async def wait() -> Any:
            return await found

        return self._runner.run(wait()) if inspect.isawaitable(found) else found


def serve_environment(link: socket.socket, hosted: Hosted) -> None:
    """Answer calls until the other side is gone."""
    me = os.getpid()
    while (call := receive(link)) is not None:
        method, args = call
        answer: bytes
        try:
            answer = pickle.dumps((True, getattr(hosted, method)(*args)), 5)
        # A supervision boundary: whatever the user's code raises is the answer.
        except BaseException as error:
            answer = pickle.dumps((False, f"{type(error).__name__}: {error!s:.1000}"), 5)
        if os.getpid() != me:
            os._exit(0)  # a copy that the environment forked
        link.sendall(HEADER.pack(len(answer)) + answer)


def receive(link: socket.socket) -> Any:
    """Return the next message; None when the other side is gone."""
    header = _read(link, HEADER.size)
    data = None if header is None else _read(link, HEADER.unpack(header)[0])
    return None if data is None else pickle.loads(data)


def _read(link: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        part = link.recv(min(size - len(data), 1 << 20))
        if not part:
            return None
        data += part
    return bytes(data)


# ---------------------------------------------------------------- the server


class Server:
    """Forks, kills and reaps."""

    def __init__(self, control: socket.socket, make: Callable[..., Any], params: dict[str, Any]) -> None:
        """`control`: the way to the parent."""
        self._control, self._make, self._params = control, make, params
        self._pids: set[int] = set()
        self._swept_s = time.monotonic()

    def run(self) -> None:
        """Serve until the parent is gone; nothing that was forked is left."""
        try:
            while True:
                order, fds, _, _ = socket.recv_fds(self._control, 64, 1)
                if not order:
                    return
                answer = self._fork(fds[0]) if order == FORK else self._end(int(order[len(KILL) :]))
                self._control.send(str(answer).encode())
        except ConnectionError:
            return
        finally:
            end_children()

    def _fork(self, fd: int) -> int:
        if time.monotonic() - self._swept_s > SWEEP_S:
            # What a living environment leaves behind is its own child.
            end_children(self._pids)
            self._swept_s = time.monotonic()
        pid = os.fork()
        if pid == 0:
            self._become(fd)
        os.close(fd)
        self._pids.add(pid)
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)  # here too: its group must be there when it is killed
        return pid

    def _become(self, fd: int) -> NoReturn:
        code = 1
        try:
            os.setpgid(0, 0)
            adopt_orphans()
            self._control.close()
            with socket.socket(fileno=fd) as link:
                os.register_at_fork(after_in_child=link.close)
                serve_environment(link, Hosted(self._make, self._params))
            code = 0
        finally:
            os._exit(code)

    def _end(self, pid: int) -> int:
        """Kill a process group and wait until it is gone; return its first process's exit status.

        -1 if it is none of this server, or not gone in time.
        """
        if pid not in self._pids:
            return -1
        code, until = -1, time.monotonic() + REAP_S
        # Not reaped yet, so that the number still names this group.
        os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # none of the group is left
            while time.monotonic() < until:
                found, status = os.waitpid(-pid, os.WNOHANG)
                if found == pid:
                    self._pids.discard(pid)
                    code = os.waitstatus_to_exitcode(status)
                elif not found:
                    time.sleep(0.001)
        return code


def main(fd: int) -> None:
    """Serve on the socket `fd`."""
    os.set_inheritable(fd, False)
    adopt_orphans()
    os.dup2(2, 1)  # what environments print goes into the log
    control = socket.socket(fileno=fd)
    spec: EnvironmentSpec = pickle.load(sys.stdin.buffer)
    try:
        make = load_function(spec.path, spec.what, spec.source)
        for name in getattr(make, "preload", ()):
            importlib.import_module(name)
    except (ConfigError, ImportError) as error:
        control.send(str(error).encode()[:4000])
        return
    control.send(READY)
    Server(control, make, spec.params).run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
