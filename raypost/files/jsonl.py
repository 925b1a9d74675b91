"""Files of JSON lines: each line is appended whole or not at all, and a cut-off last line is never read.

    {"time": 1.5, "event": "note", "crc": "5bd0e0c6"}

Owns the lines of a file, not what they say. Each ends with a checksum of all that stands before it, so that a bit that
flips is found, and a file that is no such file is never continued.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from raypost.errors import RunFilesError
from raypost.files.disk import Fsync, Patience, Syncing, named, refusal
from raypost.observe.waits import waiting

_CHUNK = 1 << 16
CRC = "crc"
"""Name of the checksum: CRC-32 of the bytes of the line before it, as 8 hexadecimal digits."""
_SEAL = '"crc": "%08x"}'
_SEAL_BYTES = len(_SEAL % 0)


class LineFile:
    """Appends lines to a file that others read meanwhile. One writer a file at a time; a later one continues it."""

    def __init__(self, path: Path, patience_s: float = 0.0, fsync: Fsync = "off") -> None:
        """Touches nothing before the first line. `patience_s`: how long lines wait for a disk that refuses them."""
        self._syncing = Syncing(fsync)
        self.path = path
        self._opened = False
        self._waiting: list[str] = []
        """Lines that a disk refused."""
        self._patience = Patience(patience_s)

    def append(self, lines: Sequence[str], *, now: bool = False) -> None:
        """Hand the lines, JSON objects, to the system: a kill of this process loses none of them.

        Where a disk is full they wait for the next call, as long as there is patience; `now`: they do not. Raises
        OSError, naming the file, what is free and what to do; nothing of these lines is written then.
        """
        try:
            self._write([*self._waiting, *lines])
        except OSError as error:
            if now or not self._patience.is_left(error, self.path):
                raise (named(error, self.path) if refusal(error) else error) from error
            self._waiting += lines
        else:
            self._waiting.clear()
            self._patience.restored(self.path)

    def _write(self, lines: Sequence[str]) -> None:
        if not lines:
            return
        if not self._opened:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _remove_torn_line(self.path)
            self._opened = True
        data = memoryview("".join(map(sealed, lines)).encode())
        taken = waiting(f"{self.path} to take what is written", outside="file system")
        with taken, open(self.path, "ab", buffering=0) as file:
            start = file.seek(0, os.SEEK_END)
            try:
                while data:
                    data = data[file.write(data) :]
                self._syncing.wrote(file.fileno())
            except OSError:
                with suppress(OSError):  # what refuses may refuse that too; the first error is the cause
                    file.truncate(start)
                raise

    def replace(self, line: str) -> int:
        """Put this line in place of all that the file has, durably and as a whole or not at all; returns its bytes."""
        data, temporary = sealed(line).encode(), self.path.with_name(f"{self.path.name}.tmp")
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


def sealed(text: str) -> str:
    """Return a JSON object as a line of a file: its checksum as the last field, and a newline."""
    start = text[:-1] + (", " if len(text) > 2 else "")
    return start + _SEAL % zlib.crc32(start.encode()) + "\n"


def parsed(line: bytes) -> dict[str, Any]:
    """Return the fields of a line without its checksum. Raises ValueError for what `sealed` did not make."""
    line = line.removesuffix(b"\n")
    start, seal = line[:-_SEAL_BYTES], line[-_SEAL_BYTES:]
    if not (seal.startswith(b'"crc": "') and seal.endswith(b'"}')):
        raise ValueError("it has no checksum, so no run of this version wrote it")
    if seal != (_SEAL % zlib.crc32(start)).encode():
        raise ValueError("its checksum differs")
    fields: dict[str, Any] = json.loads(line)
    del fields[CRC]
    return fields


def read_lines(path: Path, fix: str = "remove that line, or the file") -> Iterator[dict[str, Any]]:
    """Yield the objects of a file, but a last one that was cut off; nothing if there is no such file.

    Raises RunFilesError, naming the line and the way on (`fix`), for a damaged one.
    """
    if not path.exists():
        return
    with open(path, "rb") as file:
        at = 0
        for number, line in enumerate(file, start=1):
            place = f"{path} is damaged: line {number}, at byte {at}"
            at += len(line)
            if not line.endswith(b"\n"):
                if not _may_be_torn(line):
                    raise RunFilesError(f"{place}, is no text: {fix}")
                return
            try:
                yield parsed(line)
            except (ValueError, RecursionError) as error:
                raise RunFilesError(f"{place}: {error}; {fix}") from error


def whole_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield each line from the beginning with its newline, but not a last one that was cut off."""
    file.seek(0)
    for line in file:
        if line.endswith(b"\n"):
            yield line


def _may_be_torn(rest: bytes) -> bool:
    """Return whether a line could begin so: lost power may leave zeros at the end of a file."""
    text = rest.rstrip(b"\0")
    return text[:1] in (b"", b"{") and all(32 <= one < 127 for one in text)


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
