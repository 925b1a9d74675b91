"""Who runs a run: a lock on a file of its folder, held by the driver for as long as it lives.

The system gives the lock up when the driver's process ends, however it ends, so it is never stale. On a folder that
several nodes see, their file system must support locks (NFS does).
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from raypost.errors import ConfigError

OWNER = "owner.json"
TRACEBACK = "traceback.txt"
"""Of the failure that ended the run last."""
REPORTS = "doctor-*.txt"
"""What a run waited for (raypost.doctor)."""
OF_NO_RUN = {OWNER, TRACEBACK, "processes", "buffer", "ledger.jsonl", "ray_logs"}
"""What a start may leave that ended before it had written its configuration: there is no run yet."""
TRIES = 5
"""Of taking the lock: somebody may just look whether it is taken."""


@contextmanager
def owning(run_dir: Path) -> Iterator[None]:
    """Own the run of this folder, which is made if it is not there. Raises ConfigError while another process does."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with open(run_dir / OWNER, "a+") as file:
        for last in (*[False] * (TRIES - 1), True):
            if _locked(file, fcntl.LOCK_EX):
                break
            if last:
                raise ConfigError(
                    f"run folder {run_dir} belongs to {_read(file)}: wait for it, stop it, or choose another --name"
                )
            time.sleep(0.02)
        file.truncate(0)
        json.dump({"host": socket.gethostname(), "pid": os.getpid(), "since_s": time.time()}, file)
        file.flush()
        yield


def owner(run_dir: Path) -> str | None:
    """Return who runs the run of this folder, such as "process 17 on node-1"; None: nobody does."""
    try:
        with open(run_dir / OWNER) as file:
            return None if _locked(file, fcntl.LOCK_SH) else _read(file)
    except OSError:
        return None


def _locked(file: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(file: IO[str]) -> str:
    file.seek(0)
    try:
        found = json.loads(file.read())
        return f"process {found['pid']} on {found['host']}"
    except (ValueError, KeyError, TypeError):
        return "a run that just begins"
