"""The most memory that the processes of a Ray node had together."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable

import psutil

GROWTH = 1.02
"""Of the memory roughly, from which it is measured again."""


class MemoryWatch:
    """The most memory that this Ray node's processes had together, and what they started.

    To measure it costs milliseconds a process, because the system looks at every page. So a rough figure, which costs
    microseconds, says whether there may be a new peak: nothing is measured until it has grown by GROWTH.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self.peak_bytes = 0
        """0 if it cannot be read."""
        self._rough_bytes = 0
        self._looking = threading.Lock()
        """A thread whose caller was cancelled goes on: the next one waits for what it finds."""

    def look(self) -> None:
        """Measure the memory if it is likely to be more than ever before."""
        with self._looking:
            processes = node_processes()
            rough = rough_bytes(processes)
            if rough > GROWTH * self._rough_bytes:
                self._rough_bytes = rough
                self.peak_bytes = max(self.peak_bytes, sum(map(memory_of, processes)))


def node_processes() -> list[psutil.Process]:
    """Return the processes of this Ray node and what they started; none if they cannot be listed."""
    try:
        raylet = psutil.Process(os.getppid())
        above = raylet.parent()
        # A head that stays in front, or a driver that started Ray itself, is the root of everything; a
        # raylet on its own hangs below the system's first process, which also owns what is not ours.
        root = above if above is not None and above.pid > 1 and _is_python(above) else raylet
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def _is_python(process: psutil.Process) -> bool:
    command = process.cmdline()
    return bool(command) and "python" in os.path.basename(command[0])


def rough_bytes(processes: Iterable[psutil.Process]) -> int:
    """Return what is resident and each process's own, and the most that one shares: the object store, libraries."""
    own = most_shared = 0
    for process in processes:
        with contextlib.suppress(psutil.Error, AttributeError):
            info = process.memory_info()
            own += info.rss - info.shared
            most_shared = max(most_shared, info.shared)
    return own + most_shared


def memory_of(process: psutil.Process) -> int:
    """Return a process's proportional set size, in which pages that several share are counted once among them.

    Its resident size where the system has no such, 0 if it is gone.
    """
    try:
        return int(process.memory_full_info().pss)
    except psutil.AccessDenied:
        return int(process.memory_info().rss)
    except (psutil.Error, AttributeError):
        return 0
