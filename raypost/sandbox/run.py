"""Run one program in the sandbox, and end all of it.

Invariant: when `run` returns or is cancelled, no process of the program is left, whatever it started. All of a sandbox
ends with the first process in it, and that with bubblewrap, which ends with the thread that called `run`.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal

import psutil

from raypost.errors import SandboxError
from raypost.observe.spans import SANDBOX, inner_span
from raypost.sandbox.command import INSTALL, find_bwrap, limited, sandboxed
from raypost.sandbox.limits import MOST, Limits, Outcome
from raypost.sandbox.seccomp import refused_calls

End = Literal["exit", "time", "full"]
"""What ended a program first: itself, the clock, or its output."""
END_S = 10.0
"""Longest time that killed processes may take to be gone."""
LEAST_S = 0.01
"""What is left to a program whose time is over."""
CHUNK = 1 << 16
SHELL_SIGNAL = 128
"""A shell adds to it the number of the signal that ended a program; so does bubblewrap."""
NO_MEMORY = (b"MemoryError", b"bad_alloc", b"Cannot allocate memory", b"out of memory")


async def run(
    argv: Sequence[str],
    *,
    files: Mapping[str, bytes] | None = None,
    stdin: bytes = b"",
    limits: Limits | None = None,
    see: Sequence[str] = (),
    fds: Sequence[int] = (),
    unsafe: bool = False,
) -> Outcome:
    """Run a program in a sandbox of its own, in /tmp, and return how it ended.

    `argv`: an absolute path, and arguments; a program that is not there ends with exit code 127. `files`: contents by
    name, in /tmp. `see`: folders that are seen read-only besides /usr. `fds`: open files that the program has too,
    under their numbers; they are closed here once it is started. `unsafe`: with the limits alone, in a folder that is
    removed. Raises SandboxError when the program was not run.
    """
    limits = limits or Limits()
    for name in files or {}:
        if not name or "/" in name or name in (".", "..") or "\0" in name:
            raise SandboxError(f"file {name!r:.80} is no name: files lie in /tmp, in no folder of it")
    with contextlib.ExitStack() as stack:
        stack.enter_context(inner_span(SANDBOX))
        own = stack.enter_context(_Files())
        given = [own.keep(fd) for fd in fds]
        if unsafe:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="raypost-unsafe-"))
            for name, data in (files or {}).items():
                Path(folder, name).write_bytes(data)
            return await _Program(own, limits).run(limited(argv, limits), stdin, given, folder)
        bwrap = find_bwrap()
        if bwrap is None:
            raise SandboxError(f"bubblewrap (bwrap) is not installed: {INSTALL}")
        copies = {name: own.memory(data) for name, data in (files or {}).items()}
        status, status_there = own.pipe()
        calls = refused_calls()
        filter_fd = None if calls is None else own.memory(calls)
        command = sandboxed(
            argv, limits, bwrap=bwrap, status_fd=status_there, files=copies, see=see, filter_fd=filter_fd
        )
        there = [*given, *copies.values(), status_there, *([] if filter_fd is None else [filter_fd])]
        return await _Program(own, limits, status).run(command, stdin, there, "/")


class _Files:
    """Open files, each closed once."""

    def __init__(self) -> None:
        self._open: set[int] = set()

    def __enter__(self) -> _Files:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for fd in [*self._open]:
            self.close(fd)

    def keep(self, fd: int) -> int:
        self._open.add(fd)
        return fd

    def close(self, fd: int) -> None:
        if fd in self._open:
            self._open.remove(fd)
            os.close(fd)

    def pipe(self) -> tuple[int, int]:
        read, write = os.pipe()
        os.set_blocking(read, False)
        return self.keep(read), self.keep(write)

    def memory(self, data: bytes) -> int:
        """Return a file of memory with this content, which nobody can change."""
        fd = self.keep(os.memfd_create("file", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.lseek(fd, 0, os.SEEK_SET)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        return fd


class _Output:
    """What a program writes into one pipe, up to a bound."""

    def __init__(self, fd: int, bound: int, on_full: Callable[[], None]) -> None:
        self.data = bytearray()
        self.closed = asyncio.get_running_loop().create_future()
        self._fd, self._bound, self._on_full = fd, bound, on_full
        asyncio.get_running_loop().add_reader(fd, self._read)

    def _read(self) -> None:
        chunk = os.read(self._fd, CHUNK)
        self.data += chunk[: self._bound - len(self.data) + 1]
        if not chunk:
            self.stop()
        elif len(self.data) > self._bound:
            self._on_full()
            self.stop()

    def stop(self) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        if not self.closed.done():
            self.closed.set_result(None)


class _Program:
    """One program, from its start until nothing is left of it."""

    def __init__(self, own: _Files, limits: Limits, status: int | None = None) -> None:
        """`status`: where bubblewrap says how it went; None: there is none."""
        self._own, self._limits, self._status = own, limits, status
        self._said = b""
        self._over: asyncio.Future[End] = asyncio.get_running_loop().create_future()

    async def run(self, command: Sequence[str], stdin: bytes, there: Sequence[int], cwd: str) -> Outcome:
        """Run the command, which has the open files `there`. Raises SandboxError."""
        start = time.monotonic()
        (out, out_there), (err, err_there) = self._own.pipe(), self._own.pipe()
        given = self._own.memory(stdin)
        try:
            self._process = subprocess.Popen(
                command, stdin=given, stdout=out_there, stderr=err_there, pass_fds=there, cwd=cwd, env={},
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise SandboxError(f"{command[0]} cannot be started: {error.strerror}") from error
        for fd in (given, out_there, err_there, *there):
            self._own.close(fd)
        loop, pid = asyncio.get_running_loop(), self._own.keep(os.pidfd_open(self._process.pid))
        loop.add_reader(pid, self._end, "exit")
        outputs = [_Output(fd, self._limits.output_kb * 1024, lambda: self._end("full")) for fd in (out, err)]
        try:
            end = await self._until_over(start)
            await self._end_all(pid)
            # What its processes held open is closed when the last of them is gone.
            await asyncio.wait([output.closed for output in outputs], timeout=END_S)
        finally:
            self._kill()
            loop.remove_reader(pid)
            for output in outputs:
                output.stop()
        stdout, stderr = (bytes(output.data[: self._limits.output_kb * 1024]) for output in outputs)
        return self._outcome(end, stdout, stderr, time.monotonic() - start)

    async def _until_over(self, start: float) -> End:
        """Wait until it ends, or has had its time: what it waited for a processor that others had is added to that."""
        wall_s = self._limits.wall_s
        left_s = wall_s
        while left_s > LEAST_S:
            await asyncio.wait([self._over], timeout=left_s)
            if self._over.done():
                return self._over.result()
            left_s = start + min(MOST * wall_s, wall_s + waited_s(self._process.pid)) - time.monotonic()
        return "time"

    def _end(self, end: End) -> None:
        if not self._over.done():
            self._over.set_result(end)

    async def _end_all(self, pid: int) -> None:
        """Kill what is left and wait until it is gone. Raises SandboxError."""
        gone, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_reader(pid, gone.set)
        self._kill()
        try:
            async with asyncio.timeout(END_S):
                await gone.wait()
        except TimeoutError:
            raise SandboxError(
                f"process {self._process.pid} was killed and is still there after {END_S:g} s"
            ) from None
        self._process.wait()

    def _kill(self) -> None:
        if self._process.poll() is not None and self._status is not None:
            return  # bubblewrap is gone, and its sandbox with it
        first = self._told("child-pid")
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if first is not None:
                os.kill(first, signal.SIGKILL)
            else:
                os.killpg(self._process.pid, signal.SIGKILL)

    def _told(self, key: str) -> int | None:
        """Return a number of those that bubblewrap has told."""
        if self._status is None:
            return None
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._status, CHUNK):
                self._said += chunk
        told: dict[str, int] = {}
        for line in self._said.splitlines():
            with contextlib.suppress(ValueError):
                told |= json.loads(line)
        return told.get(key)

    def _outcome(self, end: End, stdout: bytes, stderr: bytes, wall_s: float) -> Outcome:
        code = self._process.returncode if self._status is None else self._told("exit-code")
        if code is None and end == "exit":
            raise SandboxError(
                f"bubblewrap made no sandbox: {stderr.decode(errors='replace').strip()[-300:]}"
            )
        code = -signal.SIGKILL if code is None else code
        killed = (
            -code if code < 0 else code - SHELL_SIGNAL if SHELL_SIGNAL < code <= SHELL_SIGNAL + 64 else None
        )
        return Outcome(
            exit_code=code if killed is None else None,
            signal=killed,
            timed_out=end == "time" or killed == signal.SIGXCPU,
            out_of_memory=code != 0 and any(words in stderr[-4096:] for words in NO_MEMORY),
            stdout=stdout,
            stderr=stderr,
            truncated=end == "full",
            wall_s=wall_s,
        )


def waited_s(pid: int) -> float:
    """Return how long a process, or one below it, waited for a processor, in seconds; 0.0 where Linux does not say."""
    waits = [0]
    with contextlib.suppress(psutil.Error):
        first = psutil.Process(pid)
        for process in [first, *first.children(recursive=True)]:
            for thread in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
                with contextlib.suppress(OSError, IndexError, ValueError):
                    waits.append(int(thread.read_text().split()[1]))
    return max(waits) / 1e9
