"""Reaper: the process between raypost and a program that is not raypost's. Nothing of the program outlives either.

    this process --> reaper --> program --> whatever it starts, in sessions of its own, too
      killed, or SIGTERM +         + ends -> all that it left is killed and reaped, then the reaper ends with its code

Run as a script, which imports nothing of raypost. Invariant: what the program leaves behind becomes the reaper's
child, so that the reaper ends only when there is none left, or not even SIGKILL ends it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection, Sequence
from typing import NoReturn

REAP_S = 10.0
"""Longest time that killed processes may take to be gone."""
SET_PDEATHSIG, SET_DUMPABLE, SET_CHILD_SUBREAPER = 1, 4, 36
"""Of Linux's prctl."""
NOT_STARTED = 127
"""Exit code of a program that cannot be started, as shells have it."""
ENDS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def reaped(command: Sequence[str]) -> list[str]:
    """Return the command that runs this one below a reaper, which this process must start; SIGTERM ends all of it."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), *command]


def adopt_orphans() -> None:
    """Have this process be the parent of what its children leave behind, so that it can be ended and reaped."""
    _prctl(SET_CHILD_SUBREAPER, 1)


def end_children(spared: Collection[int] = ()) -> None:
    """Kill and reap all children but these, and what they leave behind."""
    until = time.monotonic() + REAP_S
    while (found := [pid for pid in _children() if pid not in spared]) and time.monotonic() < until:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in found:
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() < until:
                    time.sleep(0.001)


def _children() -> list[int]:
    found, me = [], os.getpid()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            # Its own name, in brackets, may have any character.
            if int(file.read().rpartition(b")")[2].split()[1]) == me:
                found.append(int(name))
    return found


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def _become(command: Sequence[str]) -> NoReturn:
    try:
        os.setsid()
        _prctl(SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execvp(command[0], list(command))
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(NOT_STARTED)


def main(parent: int, command: Sequence[str]) -> int:
    """Run a program to its end, or that of `parent`; return its exit code, that of a signal below zero."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, *ENDS})
    adopt_orphans()
    _prctl(SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return NOT_STARTED
    program = os.fork()
    if program == 0:
        _become(command)
    code: int | None = None
    while code is None and signal.sigwait({signal.SIGCHLD, *ENDS}) not in ENDS:
        code = _reap(program)
    end_children()
    return -signal.SIGKILL if code is None else code


def _reap(program: int) -> int | None:
    """Reap what has ended; return the program's exit code if it is among them."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(ended[1]) if ended[0] == program else code
    return code


def end_as(code: int) -> NoReturn:
    """End with an exit code, or by a signal without a core of this process."""
    if code < 0:
        _prctl(SET_DUMPABLE, 0)
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.kill(os.getpid(), -code)
    sys.exit(abs(code))


if __name__ == "__main__":
    end_as(main(int(sys.argv[1]), sys.argv[2:]))
