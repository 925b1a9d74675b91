"""Files of JSON lines: each line is appended whole or not at all, and a cut-off last line is never read.

Owns the lines of a file, not what they say.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

_CHUNK = 1 << 16


class LineFile:
    """Appends lines to a file that others read meanwhile. One writer a file at a time; a later one continues it."""

    def __init__(self, path: Path) -> None:
        """Touches nothing before the first line."""
        self.path = path
        self._opened = False

    def append(self, lines: Sequence[str]) -> None:
        """Hand the lines to the system: a kill of this process loses none of them.

        Raises OSError, for instance if the disk is full; nothing of them is written then.
        """
        if not lines:
            return
        if not self._opened:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _remove_torn_line(self.path)
            self._opened = True
        data = memoryview(("\n".join(lines) + "\n").encode())
        with open(self.path, "ab", buffering=0) as file:
            start = file.seek(0, os.SEEK_END)
            try:
                while data:
                    data = data[file.write(data) :]
            except OSError:
                file.truncate(start)
                raise

    def replace(self, line: str) -> int:
        """Put this line in place of all that the file has, durably and as a whole or not at all; returns its bytes."""
        data, temporary = (line + "\n").encode(), self.path.with_name(f"{self.path.name}.tmp")
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return len(data)


def whole_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield each line from the beginning with its newline, but not a last one that was cut off."""
    file.seek(0)
    for line in file:
        if line.endswith(b"\n"):
            yield line


def _remove_torn_line(path: Path) -> None:
    if not path.exists():
        return
    with open(path, "r+b") as file:
        end = position = file.seek(0, os.SEEK_END)
        while position > 0:
            start = max(0, position - _CHUNK)
            file.seek(start)
            newline = file.read(position - start).rfind(b"\n")
            if newline >= 0:
                position = start + newline + 1
                break
            position = start
        if position < end:
            file.truncate(position)
