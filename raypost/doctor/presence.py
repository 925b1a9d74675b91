"""Presence: every process of a run says, in the run folder, that it is there and what it waits for.

    RUN/processes/NAME.json     a record, written anew every BEAT_S by a thread of the process
    RUN/processes/NAME.stack    its stacks, when it was asked for them: by a newer RUN/processes/ask, or by SIGUSR2

A thread, so that a process whose event loop hangs still answers; files, so that neither the driver nor Ray has to. A
process that is restarted writes over the record of the one before. Owns no judgement of what it writes.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import psutil

from raypost.observe import waits

PROCESSES = "processes"
"""Folder of the records, in the run folder."""
ASK = "ask"
BEAT_S = 2.0
SHOWN_WAITS = 50
"""The oldest waits of a process stand in its record."""
SHOWN_FRAMES = 12
BLOCKED_S = 3.0
"""An event loop that has not turned for so long is blocked."""
SIGNAL = signal.SIGUSR2


def forget_all(run_dir: Path) -> None:
    """Remove the records of a former session of the run."""
    shutil.rmtree(run_dir / PROCESSES, ignore_errors=True)


def announce(run_dir: Path, name: str, resources: Mapping[str, float]) -> None:
    """Record that the role `name` was asked for, with the resources that it needs before its process can begin."""
    _write(run_dir / PROCESSES, name, {"name": name, "resources": dict(resources), "at_s": time.time()})


def withdraw(run_dir: Path, name: str) -> None:
    """Remove the record of a role that was ended and is not missed."""
    (run_dir / PROCESSES / f"{name}.json").unlink(missing_ok=True)


class Presence:
    """The record of this process, for as long as the context lasts or the process lives."""

    def __init__(
        self,
        name: str,
        run_dir: Path,
        loop: asyncio.AbstractEventLoop | None = None,
        at_beat: Callable[[], None] = lambda: None,
        beat_s: float = BEAT_S,
    ) -> None:
        """`loop`: the event loop whose blocking is recorded. `at_beat` is called on the thread after each record."""
        self._name = name
        self._folder = run_dir / PROCESSES
        self._loop = loop
        self._loop_thread = 0
        self._at_beat = at_beat
        self._beat_s = beat_s
        self._posted_s: float | None = None
        """When the loop was last asked to turn, until it does."""
        self._asked_ns = _changed_ns(self._folder / ASK)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat_for_ever, name="presence", daemon=True)
        process = psutil.Process()
        self._constant = {
            "name": name,
            "host": socket.gethostname(),
            "pid": process.pid,
            "started_s": started_s(process.pid),
            "beat_s": beat_s,
            "logs": _logs(),
        }

    def start(self) -> Self:
        """Begin; the thread ends with its process."""
        self._thread.start()
        return self

    def __enter__(self) -> Self:
        """Begin."""
        return self.start()

    def __exit__(self, *_: object) -> None:
        """End the thread, and leave the record as it is."""
        self._over.set()
        self._thread.join(self._beat_s)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Record the blocking of this event loop from now on."""
        self._posted_s, self._loop = None, loop

    def _beat_for_ever(self) -> None:
        stack = _stack_file(self._folder / f"{self._name}.stack")
        while not self._over.is_set():
            try:
                _write(self._folder, self._name, self.record())
                self._answer(stack)
                self._at_beat()
            # A supervision boundary: a full disk, or a folder that is gone, must not end what is watched.
            except Exception:
                traceback.print_exc(limit=1)
                self._over.wait(10 * self._beat_s)
            self._over.wait(self._beat_s)

    def record(self) -> dict[str, Any]:
        """Return what is written down."""
        now, blocked_s = time.monotonic(), self._blocked_s()
        shown = waits.open_waits()[:SHOWN_WAITS]
        return {
            **self._constant,
            "at_s": time.time(),
            "blocked_s": round(blocked_s, 1),
            "blocked_in": self._frames() if blocked_s > BLOCKED_S else [],
            "waits": [
                {
                    "what": one.what,
                    "age_s": round(now - one.since_s, 2),
                    "limit_s": one.limit_s,
                    "outside": one.outside,
                    "group": one.group,
                }
                for one in shown
            ],
        }

    def _blocked_s(self) -> float:
        """Return how long the event loop has not turned."""
        loop, posted_s = self._loop, self._posted_s
        if loop is None or loop.is_closed():
            return 0.0
        if posted_s is None:
            self._posted_s = time.monotonic()
            loop.call_soon_threadsafe(self._turned)
            return 0.0
        return time.monotonic() - posted_s

    def _turned(self) -> None:
        self._posted_s, self._loop_thread = None, threading.get_ident()

    def _frames(self) -> list[str]:
        """Return where the event loop's thread is, the innermost call first."""
        frame = sys._current_frames().get(self._loop_thread)
        if frame is None:
            return []
        found = traceback.extract_stack(frame)[: -SHOWN_FRAMES - 1 : -1]
        return [f'  File "{one.filename}", line {one.lineno} in {one.name}' for one in found]

    def _answer(self, stack: int) -> None:
        """Write the stacks if somebody asked since the last time."""
        asked_ns = _changed_ns(self._folder / ASK)
        if asked_ns != self._asked_ns:
            self._asked_ns = asked_ns
            os.ftruncate(stack, 0)
            faulthandler.dump_traceback(stack)


def started_s(pid: int) -> float:
    """Return when a process of this machine began, seconds since the machine did: no clock that is set changes it.

    Raises psutil.NoSuchProcess without one.
    """
    try:
        facts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError) as error:
        raise psutil.NoSuchProcess(pid) from error
    return int(facts[19]) / os.sysconf("SC_CLK_TCK")


def _changed_ns(path: Path) -> int:
    """Return when a file was last written; 0 without one."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _logs() -> list[str]:
    """Return the files that standard output and error go to."""
    found = [os.path.realpath(f"/proc/self/fd/{number}") for number in (1, 2)]
    return [path for path in dict.fromkeys(found) if os.path.isfile(path)]


def _stack_file(path: Path) -> int:
    """Open the file for stacks, and have SIGUSR2 write them there where the signal is free; returns its descriptor."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stack = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    if signal.getsignal(SIGNAL) == signal.SIG_DFL:
        faulthandler.register(SIGNAL, stack)
    return stack


def _write(folder: Path, name: str, record: Mapping[str, Any]) -> None:
    """Replace a record as a whole."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{name}.{os.getpid()}.tmp"
    temporary.write_text(json.dumps(record))
    temporary.replace(folder / f"{name}.json")
