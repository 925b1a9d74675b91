"""Looks at the processes of a run from outside: their records, the system's view of them, their stacks and logs.

It asks neither Ray nor the driver. On other machines it sees what the records say; on this one also whether a process
is stopped or gone, its children, and its stack by py-spy where that is permitted, else by the signal that each has
registered.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from raypost.doctor import text
from raypost.doctor.diagnosis import DRIVER, RANKS, Child, Diagnosis, Seen, SeenWait, State, diagnose
from raypost.doctor.presence import ASK, BEAT_S, PROCESSES, SIGNAL, started_s
from raypost.doctor.stacks import threads
from raypost.errors import ConfigError, RunFilesError

PY_SPY_S = 10.0
SIGNAL_S = 1.0
LOG_LINES = 6
STACKS = 10
"""Most processes whose stacks are shown."""
ABSENT_S = 20.0
"""A process that was asked for may take so long to begin: it imports what it runs."""
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
_GONE = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


class Examination(NamedTuple):
    """What was found, and all of it as text."""

    diagnosis: Diagnosis
    report: str


def present_run(run: str, runs_dir: Path = Path("runs")) -> Path:
    """Return the folder of a run whose processes left records, by its path or its name below `runs_dir`.

    Raises ConfigError.
    """
    for folder in (Path(run).expanduser(), runs_dir / run):
        if (folder / PROCESSES).is_dir():
            return folder
    raise ConfigError(
        f"{run!r} is no folder of a run that has begun (no {PROCESSES}/ in it, nor in {runs_dir / run}): give the "
        "folder that the run writes"
    )


def examine(run_dir: Path, wait_s: float = 1.5 * BEAT_S, gave_up: str | None = None) -> Examination:
    """Return what the run of this folder waits for.

    `wait_s`: time that processes have to write their stacks. `gave_up`: what the driver waited for until just now.

    Raises RunFilesError if no process of it has left a record.
    """
    folder = run_dir / PROCESSES
    with suppress(OSError):  # a folder that cannot be written to can be read
        (folder / ASK).touch()
    records = _records(folder)
    if not records:
        raise RunFilesError(f"{folder} has no record of a process: the run has not begun")
    seen, ray = [_seen(one) for one in records], _ray_processes(records)
    if gave_up is not None:
        before = SeenWait(gave_up, 0.0, 0.0)
        seen = [replace(one, waits=(before, *one.waits)) if one.name == DRIVER else one for one in seen]
    first = diagnose(seen, ray)
    there = [one for one in seen if one.state not in ("gone", "absent")]
    ranks = [one.name for one in there if one.name.startswith(RANKS)]
    wanted = list(dict.fromkeys([*first.concerned, *ranks]))[:STACKS]
    logs = {record["name"]: record.get("logs", []) for record in records}
    until = time.monotonic() + wait_s
    stacks = {one.name: _stack(folder, one, until) for one in seen if one.name in wanted}
    seen = [replace(one, stack=stacks.get(one.name, "")) for one in seen]
    found = diagnose(seen, ray)
    world = {one.name: one for one in seen}
    evidence = {
        name: text.Evidence(world[name].where, world[name].stack, _log_tail(logs[name]))
        for name in dict.fromkeys([*found.concerned, *wanted])
    }
    return Examination(found, text.report(found, seen, evidence))


def write_report(run_dir: Path, found: Examination) -> Path:
    """Keep a report in the run folder; returns its file."""
    file = run_dir / f"doctor-{datetime.now():%Y%m%d-%H%M%S}.txt"
    file.write_text(found.report)
    return file


# ---------------------------------------------------------------- records and the system's view


def _records(folder: Path) -> list[dict[str, Any]]:
    found = []
    for file in sorted(folder.glob("[!.]*.json")):
        with suppress(OSError, ValueError):  # one is damaged, or replaced just now
            found.append(json.loads(file.read_text()))
    return [one for one in found if isinstance(one, dict) and "name" in one]


def _seen(record: dict[str, Any]) -> Seen:
    """Return what a record says, and what the system says of its process if that is on this machine."""
    silent_s = max(0.0, time.time() - record.get("at_s", 0.0))
    if "pid" not in record:
        state: State = "absent" if silent_s > ABSENT_S else "runs"
        return Seen(record["name"], state=state, silent_s=silent_s, resources=record.get("resources", {}))
    state, children = "far", list[Child]()
    if record["host"] == socket.gethostname():
        state, children = _process(record["pid"], record["started_s"])
    blocked_in = threads("\n".join(record.get("blocked_in", [])))
    return Seen(
        name=record["name"],
        pid=record["pid"],
        host=record["host"],
        state=state,
        silent_s=silent_s,
        beat_s=record["beat_s"],
        blocked_s=record["blocked_s"],
        blocked_in=tuple(blocked_in[0]) if blocked_in else (),
        # What was waited for when it last wrote has been waited for since.
        waits=tuple(SeenWait(**{**one, "age_s": one["age_s"] + silent_s}) for one in record["waits"]),
        children=tuple(children),
    )


def _process(pid: int, began_s: float) -> tuple[State, list[Child]]:
    try:
        process = psutil.Process(pid)
        if abs(started_s(pid) - began_s) > 1:
            return "gone", []
        children = [Child(one.pid, one.name(), _state(one)) for one in process.children(recursive=True)]
        return _state(process), children
    except psutil.Error:
        return "gone", []


def _state(process: psutil.Process) -> State:
    status = process.status()
    if status in _STOPPED:
        return "stopped"
    if status in _GONE:
        return "gone"
    return "disk" if status == psutil.STATUS_DISK_SLEEP else "runs"


def _ray_processes(records: Sequence[dict[str, Any]]) -> list[str]:
    """Return what is wrong with the processes of the Ray session on this machine that the run's roles belong to."""
    sessions = {part for one in records for log in one.get("logs", ()) for part in Path(log).parts}
    sessions = {part for part in sessions if part.startswith("session_")}
    found = []
    for process in psutil.process_iter(["name", "cmdline"]):
        name = process.info["name"] or ""
        if name not in ("gcs_server", "raylet"):
            continue
        line = " ".join(process.info["cmdline"] or ())
        with suppress(psutil.Error):
            if any(session in line for session in sessions) and _state(process) == "stopped":
                what = "Ray's GCS" if name == "gcs_server" else "Ray's raylet"
                found.append(
                    f"{what} is stopped by a signal (process {process.pid} on {socket.gethostname()})"
                )
    return found


# ---------------------------------------------------------------- stacks and logs


def _stack(folder: Path, one: Seen, until: float) -> str:
    """Return the stacks of a process: by py-spy, by its signal, or as it writes them when asked."""
    if one.state in ("gone", "absent"):
        return ""
    if one.state != "far":
        found = _py_spy(one.pid, stopped=one.state == "stopped")
        if found or one.state == "stopped":
            return found
    file = folder / f"{one.name}.stack"
    if one.state != "far" and one.pid != os.getpid() and _catches(one.pid):
        before = file.stat().st_size if file.exists() else 0
        os.kill(one.pid, SIGNAL)
        until = time.monotonic() + SIGNAL_S
        return _until(until, lambda: file.read_text(errors="replace")[before:])
    asked_ns = (folder / ASK).stat().st_mtime_ns
    return _until(
        until, lambda: file.read_text(errors="replace") if file.stat().st_mtime_ns >= asked_ns else ""
    )


def _until(until: float, read: Callable[[], str]) -> str:
    """Return what comes before a deadline, else nothing."""
    while time.monotonic() < until:
        with suppress(OSError):
            if read():
                time.sleep(0.05)  # its end
                return read()
        time.sleep(0.05)
    return ""


def _py_spy(pid: int, *, stopped: bool) -> str:
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None:
        return ""
    # What is stopped cannot be stopped once more. Oneself is not waited for.
    gently = ["--nonblocking"] if stopped or pid == os.getpid() else []
    command = [program, "dump", "--full-filenames", *gently, "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PY_SPY_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 and threads(done.stdout) else ""


def _catches(pid: int) -> bool:
    """Whether the process has a handler for the signal: without one it would end."""
    try:
        line = next(
            one for one in Path(f"/proc/{pid}/status").read_text().splitlines() if one.startswith("SigCgt:")
        )
    except (OSError, StopIteration):
        return False
    return bool(int(line.split()[1], 16) >> (signal.Signals(SIGNAL) - 1) & 1)


def _log_tail(logs: Iterable[str]) -> tuple[str, ...]:
    """Return the last lines of the files that a process writes to."""
    lines: list[str] = []
    for log in logs:
        with suppress(OSError), open(log, "rb") as file:
            file.seek(max(0, os.path.getsize(log) - 8192))
            found = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
            lines += [line for line in found if not line.startswith(":")][-LOG_LINES:]
    return tuple(lines)
