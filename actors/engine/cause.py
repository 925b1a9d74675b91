"""Why an engine did not start: what its processes wrote, since what vLLM raises for them says only that they failed."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

NAMED = re.compile(r"(?:^|[\s\]])((?:\w+\.)*[A-Z]\w*(?:Error|Exception)): (\S.*)")
"""The last line of a traceback, behind whatever a logger puts before it."""
CONSEQUENCES = ("Engine core initialization failed", "EngineCore encountered an issue")
"""What vLLM raises in the process that waits, after the true cause was raised in another."""
MOST_BYTES = 1 << 20
"""What is read of each output, from its end."""


class Outputs:
    """What this process and its children write to standard output and error from now on, where these are files."""

    def __init__(self) -> None:
        """Remember where they end."""
        self._ends: dict[Path, int] = {}
        for number in (1, 2):
            status = os.fstat(number)
            if stat.S_ISREG(status.st_mode):
                self._ends[Path(os.readlink(f"/proc/self/fd/{number}"))] = status.st_size

    def cause(self) -> str | None:
        """Return the error that was written last and is no consequence of another, as "ValueError: ..."."""
        found = None
        for path, end in self._ends.items():
            with open(path, "rb") as file:
                file.seek(max(end, file.seek(0, os.SEEK_END) - MOST_BYTES))
                found = last_error(file.read().decode(errors="replace").splitlines()) or found
        return found


def last_error(lines: Iterable[str]) -> str | None:
    """Return the last error that lines of logs and tracebacks name, without vLLM's general one."""
    found = None
    for line in lines:
        match = NAMED.search(line)
        if match is not None and not any(one in line for one in CONSEQUENCES):
            found = f"{match[1].rpartition('.')[2]}: {match[2].strip()}"
    return found
