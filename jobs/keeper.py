"""Keeper: the parent of a private Ray head. It outlives a launcher that was killed, while the jobs save.

    launcher --pipe--> keeper --> head --> jobs and actors

Owns the end of a cluster when nobody else can end it. The system closes the pipe however the launcher ends. Then the
jobs are asked to stop, with SIGTERM, as Ctrl-C does; after them the head ends, and the cluster's folder goes. Until
then it passes on SIGTERM to the head, and its exit code is the head's.

Run as a file, before anything of raypost can be imported: it needs the standard library and psutil.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

MARKER = "RAYPOST_PRIVATE_CLUSTER"
"""Environment variable that all processes of a private cluster carry, with the cluster's id."""
JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Environment variable that Ray gives to the driver of a job, and which actors do not have."""
HEAD_STOP_S = 6.0
KILL_TIMEOUT_S = 5.0
TICK_S = 0.2
SET_PARENT_DEATH_SIGNAL = 1


def main() -> int:
    """Keep the head; arguments: the pipe's end, seconds that jobs have to save, the folder, and the head's command."""
    pipe, save_timeout_s, folder = int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
    head = subprocess.Popen(sys.argv[4:], preexec_fn=_die_with_keeper)
    signal.signal(signal.SIGTERM, lambda *_: head.terminate())
    while head.poll() is None:
        if select.select([pipe], [], [], TICK_S)[0]:
            _end(head, os.environ[MARKER], save_timeout_s)
            shutil.rmtree(folder, ignore_errors=True)
    code = head.returncode
    return code if code >= 0 else 128 - code


def _end(head: subprocess.Popen[bytes], cluster: str, save_timeout_s: float) -> None:
    """Have the jobs stop in their own way, then end everything of the cluster."""
    jobs = drivers_of(processes_with(MARKER, cluster))
    for job in jobs:
        with contextlib.suppress(psutil.NoSuchProcess):
            job.terminate()
    deadline = time.monotonic() + save_timeout_s
    while head.poll() is None and any(map(_runs, jobs)) and time.monotonic() < deadline:
        time.sleep(TICK_S)
    head.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        head.wait(HEAD_STOP_S)
    left = processes_with(MARKER, cluster)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=KILL_TIMEOUT_S)
    head.wait(KILL_TIMEOUT_S)


def processes_with(variable: str, value: str) -> list[psutil.Process]:
    """Return the living processes, other than this one, that carry the variable in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(variable) == value:
                found.append(process)
    return found


def drivers_of(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return those that are a job's own process, not what a job started."""
    of_jobs = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if JOB in process.environ():
                of_jobs[process.pid] = process, process.ppid()
    return [process for process, parent in of_jobs.values() if parent not in of_jobs]


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _die_with_keeper() -> None:
    """On Linux, have the head get SIGTERM when even the keeper is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
