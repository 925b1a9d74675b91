"""FunctionProcess: a reward function in a process of its own, which can be ended whatever the function does.

Owns the process, the deadline of a call, and what is done again when the process dies. Does not own how the function
is called (function_child.py) nor what a failure means (the judge).

    call -> the process, started if there is none -> scores
              +- past its deadline: the process and what it started are killed; JudgeError
              +- the process died: started again, the call made once more; JudgeError the second time

Invariants: a call ends within its deadlines with scores or JudgeError; a function that is no coroutine has one call at
a time, whose deadline begins when its turn comes; what else was under way in a process that is ended is called once
more.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from raypost.errors import JudgeError
from raypost.judges.function_child import HEADER, FunctionSpec
from raypost.observe.waits import waiting
from raypost.types import Sample, Score

T = TypeVar("T")

CHILD = Path(__file__).with_name("function_child.py")
LOAD_S = 60.0
"""Longest time for the process to start and to import the function."""
GRACE_S = 2.0
"""On top of the deadline of a coroutine, which its own process ends first and says so."""
REAP_S = 10.0
MAX_ANSWER_BYTES = 64 << 20


class _DiedError(Exception):
    """The process ended before it answered."""


@dataclass(slots=True)
class _Child:
    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    is_coroutine: bool = False
    waiting: dict[int, asyncio.Future[dict[str, Any]]] = field(default_factory=dict)
    reading: asyncio.Task[None] | None = None
    gone: str | None = None
    """How it ended."""


class FunctionProcess:
    """Calls one function. Use it from one event loop, and `close` it there."""

    def __init__(
        self, spec: FunctionSpec, on_retry: Callable[[], None] | None = None, load_s: float = LOAD_S
    ) -> None:
        """Start nothing yet. `on_retry` is told of each call that is made once more."""
        self._spec = spec
        self._on_retry = on_retry or (lambda: None)
        self._load_s = load_s
        self._child: _Child | None = None
        self._starting = asyncio.Lock()
        self._turn = asyncio.Lock()
        self._numbers = itertools.count()
        self._calls: set[asyncio.Task[Any]] = set()

    async def call(self, samples: Sequence[Sample]) -> list[Score]:
        """Return one score for each sample. Raises JudgeError."""
        try:
            return await self._once(samples)
        except _DiedError:
            self._on_retry()
        try:
            return await self._once(samples)
        except _DiedError as died:
            raise JudgeError(
                f"{self._spec.function}: its process died in two calls with it: {died}"
            ) from None

    async def start(self) -> None:
        """Start the process and load the function. Raises JudgeError."""
        await self._ready()

    async def close(self) -> None:
        """End the process and what it started."""
        for task in list(self._calls):
            task.cancel()
        if self._child is not None:
            await self._end(self._child)

    # ---------------------------------------------------------------- calls

    async def _once(self, samples: Sequence[Sample]) -> list[Score]:
        if (await self._ready()).is_coroutine:
            return await self._uncancelled(self._exchange(samples))
        await self._turn.acquire()
        # Whoever waits may leave; the function does not, and keeps its turn until it has returned.
        return await self._uncancelled(self._exchange(samples), self._turn.release)

    async def _uncancelled(self, work: Coroutine[Any, Any, T], after: Callable[[], None] | None = None) -> T:
        task = asyncio.create_task(work, name=f"call of {self._spec.function}")
        self._calls.add(task)

        def ended(task: asyncio.Task[T]) -> None:
            self._calls.discard(task)
            if after is not None:
                after()
            if not task.cancelled():
                task.exception()  # nobody may be waiting any more

        task.add_done_callback(ended)
        return await asyncio.shield(task)

    async def _exchange(self, samples: Sequence[Sample]) -> list[Score]:
        child, spec = await self._ready(), self._spec
        number = next(self._numbers)
        answer = child.waiting[number] = asyncio.get_running_loop().create_future()
        late = f"{spec.function} took longer than judge.timeout_s {spec.timeout_s:g} s"
        try:
            async with asyncio.timeout(spec.timeout_s + GRACE_S * child.is_coroutine):
                what = f"{spec.function} in process {child.process.pid}"
                with waiting(what, spec.timeout_s, outside="judge"):
                    await self._send(child, (number, list(samples)))
                    found = await answer
        except TimeoutError:
            child.waiting.pop(number, None)
            await self._end(child, "another call hung")
            raise JudgeError(f"{late}; its process was ended") from None
        if "scores" in found:
            return [Score(*score) for score in found["scores"]]
        raise JudgeError(found["error"] or late)

    async def _send(self, child: _Child, message: object) -> None:
        data = pickle.dumps(message, 5)
        try:
            child.writer.write(HEADER.pack(len(data)) + data)
            await child.writer.drain()
        except ConnectionError:
            return  # the reader sees the same, and says how the process ended

    # ---------------------------------------------------------------- the process

    async def _ready(self) -> _Child:
        """Return a process that has loaded the function. Raises JudgeError."""
        async with self._starting:
            if self._child is None or self._child.gone is not None:
                self._child = None
                self._child = await self._start()
            return self._child

    async def _start(self) -> _Child:
        here, there = socket.socketpair()
        with there:
            # What can be imported here can be imported there.
            path = os.pathsep.join(dict.fromkeys([*filter(None, sys.path), os.getcwd()]))
            process = subprocess.Popen(
                [sys.executable, "-P", str(CHILD), str(there.fileno()), str(os.getpid())],
                pass_fds=(there.fileno(),),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )
        here.setblocking(False)
        child = _Child(process, *await asyncio.open_connection(sock=here))
        try:
            async with asyncio.timeout(self._load_s):
                await self._send(child, asdict(self._spec))
                loaded = await _read(child)
        except TimeoutError:
            await self._end(child)
            raise JudgeError(
                f"{self._spec.function} was not imported within {self._load_s:g} s; its process was ended"
            ) from None
        except (OSError, EOFError, ValueError):
            code = await self._end(child)
            raise JudgeError(
                f"{self._spec.function}: its process ended with {code} while it was imported"
            ) from None
        except asyncio.CancelledError:
            await self._end(child)
            raise
        if "error" in loaded:
            await self._end(child)
            raise JudgeError(loaded["error"])
        child.is_coroutine = loaded["is_coroutine"]
        child.reading = asyncio.create_task(
            self._read_answers(child), name=f"answers of {self._spec.function}"
        )
        return child

    async def _read_answers(self, child: _Child) -> None:
        with contextlib.suppress(OSError, EOFError, ValueError):
            while True:
                found = await _read(child)
                answer = child.waiting.pop(found["number"], None)
                if answer is not None and not answer.done():
                    answer.set_result(found)
        await self._end(child)

    async def _end(self, child: _Child, why: str | None = None) -> str:
        """Kill the process and its group, and return how it ended; calls that wait for it hear `why`, or the same."""
        if child.process.returncode is None:  # not reaped: its number still names this group
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.process.pid, signal.SIGKILL)
        child.writer.close()
        code = await asyncio.to_thread(child.process.wait, REAP_S)
        ended = f"exit code {code}" if code >= 0 else f"signal {-code}"
        child.gone = child.gone or why or ended
        for answer in child.waiting.values():
            if not answer.done():
                answer.set_exception(_DiedError(child.gone))
        child.waiting.clear()
        return ended


async def _read(child: _Child) -> dict[str, Any]:
    """Return the next answer. Raises EOFError, OSError or ValueError when there is none."""
    (size,) = HEADER.unpack(await child.reader.readexactly(HEADER.size))
    if size > MAX_ANSWER_BYTES:
        raise ValueError(f"an answer of {size} bytes")
    found: dict[str, Any] = json.loads(await child.reader.readexactly(size))
    return found
