"""EngineLife: the engine of one worker from its start to its end, and the end of the process with it.

Owns the environment of an engine, how it is built, the watch over its processes and how it is given up. Owns
neither when it serves nor what it holds: that is the worker's.

Invariants: a process whose engine died ends itself; an engine's process ends itself when its owner died.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, NoReturn, Protocol, TypeVar

from actors.engine.cause import Outputs
from raypost.config.engine import QUIET, EngineConfig
from raypost.errors import RaypostError
from raypost.observe.waits import waiting


class AnyEngine(Protocol):
    """An engine that EngineLife can look after."""

    async def process_ids(self) -> list[int]:
        """Return the ids of the engine's processes."""
        ...

    async def warm_up(self) -> None:
        """Work once: the first time costs seconds."""
        ...

    @property
    def is_dead(self) -> bool:
        """Whether its processes are gone."""
        ...

    def shutdown(self) -> None:
        """End its processes."""
        ...


OWNER = "RAYPOST_ENGINE_OWNER"
"""Variable of the environment that tells an engine's processes the id of the process that they belong to."""

EngineT = TypeVar("EngineT", bound=AnyEngine)
T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Where an engine runs, and what it has room for."""

    pid: int
    """Process of the worker."""
    engine_pids: list[int]
    room: tuple[int, int] | None = None
    """Sequences and tokens of keys and values that a rollout engine holds at once."""


class OwnedProcess:
    """Methods added to vLLM's worker, for `collective_rpc`."""

    def process_ids(self) -> tuple[int, int]:
        """Return the ids of this worker's process and of its parent."""
        return os.getpid(), os.getppid()


def _end_with_owner() -> None:
    """In a process of an engine: end it as soon as the process that owns the engine ends, however it ended.

    Called when this module is imported, which vLLM does before it loads a model: an owner that is killed while its
    engine starts leaves nothing behind.
    """
    pid = int(os.environ.get(OWNER, os.getpid()))
    if pid == os.getpid():
        return
    try:
        owner = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)

    def wait() -> None:
        select.select([owner], [], [])
        os._exit(1)

    threading.Thread(target=wait, name="end-with-owner", daemon=True).start()


_end_with_owner()


class EngineLife(Generic[EngineT]):
    """At most one engine at a time. Every method belongs to one event loop."""

    def __init__(self, name: str, config: EngineConfig, make: Callable[[], EngineT]) -> None:
        """`make` blocks for seconds; it is called on a thread, in the environment that `config` asks for."""
        self._name = name
        self._config = config
        self._make = make
        self._watched: list[int] = []
        self.engine: EngineT | None = None
        self.info: EngineInfo | None = None
        """Of the engine built last."""

    async def build(self) -> EngineInfo:
        """Start an engine and warm it up. Raises RaypostError, and leaves nothing behind, if it does not come up."""
        os.environ.update(QUIET | os.environ | self._config.environment() | {OWNER: str(os.getpid())})
        outputs = Outputs()
        try:
            await asyncio.to_thread(self._hold)
            assert self.engine is not None, "made just now"
            pids = await self.engine.process_ids()
            self._watch(pids)
            await self.engine.warm_up()
        except Exception as error:
            self.discard()
            why = outputs.cause() or f"{error} (its log says more)"
            raise RaypostError(f"the engine of {self._name} did not start: {why}") from error
        self.info = EngineInfo(os.getpid(), pids)
        return self.info

    def _hold(self) -> None:
        # Not returned: the thread would keep its result, and with it a discarded engine.
        self.engine = self._make()

    def discard(self) -> None:
        """End the engine's processes, if there is one."""
        if self.engine is None:
            return
        self._unwatch()
        engine = self.engine
        self.engine = None
        # On this loop: one that ran meanwhile would report a dead engine.
        engine.shutdown()

    async def alive(self, call: Awaitable[T]) -> T:
        """Await a call to the engine; end this process if the engine turns out to be dead."""
        try:
            with waiting("its engine", outside="engine"):
                return await call
        except Exception as error:
            self.check(f": {error}")
            raise

    async def answers(
        self, ask: Callable[[], Awaitable[object]], within_s: float, excused: Callable[[], bool]
    ) -> None:
        """End this process, and the engine's, if the engine does not answer in time, unless that is `excused` then.

        It is asked twice, the second time for a quarter of the time: where all was stopped for a while, the time is
        over before anybody could answer.
        """
        for limit_s in (within_s, within_s / 4):
            try:
                async with asyncio.timeout(limit_s):
                    await self.alive(ask())
                    return
            except TimeoutError:
                if excused():
                    return
        for pid in self.info.engine_pids if self.info is not None else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._die(f"its engine did not answer for {within_s:.0f} s")

    def check(self, why: str = "") -> None:
        """End this process if the engine is dead."""
        if self.engine is not None and self.engine.is_dead:
            self._die(f"its engine is dead{why}")

    def _watch(self, pids: list[int]) -> None:
        """End this process when one of the engine's ends: nothing else would be noticed while idle."""
        loop = asyncio.get_running_loop()
        for pid in pids:
            process = os.pidfd_open(pid)
            loop.add_reader(process, self._die, f"its engine process {pid} ended")
            self._watched.append(process)

    def _unwatch(self) -> None:
        loop = asyncio.get_running_loop()
        for process in self._watched:
            loop.remove_reader(process)
            os.close(process)
        self._watched.clear()

    def _die(self, reason: str) -> NoReturn:
        # An actor without its engine would stay alive and fail every call; only its end makes Ray restart it.
        log.critical("%s ends itself: %s", self._name, reason)
        logging.shutdown()
        os._exit(1)
