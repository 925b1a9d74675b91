"""Journal: an append-only file of JSON lines that can be read while it is written, and undone by a restore.

Owns writing lines so that a kill loses at most those not flushed, and reading back the history that survived.
Knows nothing of what the lines say, but for two events:

    started                 nothing before this line counts: production began anew
    restored, "offset": n   production went back to a checkpoint, saved when the file had n bytes; what lies
                            between is void

Invariants: a line is written whole or not at all; lines are never changed; a last line that was cut off is
never read, and removed before the next one is appended.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from raypost.jsonl import LineFile, whole_lines
from raypost.ledger.events import LedgerEvent

FLUSH_LINES = 4096
"""Lines kept in memory at most."""
FLUSH_S = 1.0
"""A new line takes with it those that wait longer than this."""


class Journal:
    """The writing end. One writer a file at a time; a second one continues the file."""

    def __init__(self, path: Path) -> None:
        """Touches nothing before the first flush."""
        self._file = LineFile(path)
        self._lines: list[str] = []
        self._oldest_s = 0.0

    def append(self, line: Mapping[str, Any], now_s: float) -> None:
        """Add one line, written with the next flush: at once if the oldest waits since FLUSH_S before `now_s`."""
        if not self._lines:
            self._oldest_s = now_s
        self._lines.append(_encode(line))
        # A clock that was set back must not hold lines for long.
        if len(self._lines) >= FLUSH_LINES or not 0 <= now_s - self._oldest_s < FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Hand what waits to the system: from here on a kill of this process loses none of it.

        Raises OSError if the disk is full; nothing of it is written then, and all of it still waits.
        """
        self._file.append(self._lines)
        self._lines.clear()

    def sync(self) -> int:
        """Flush to the disk itself; bytes in the file now, which is what a `restored` line names."""
        self.flush()
        if not self._file.path.exists():
            return 0
        with open(self._file.path, "rb+") as file:
            os.fsync(file.fileno())
            return file.seek(0, os.SEEK_END)


def _plain(value: Any) -> Any:
    """Return a JSON value for a fact that is none: it must not end production."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return str(value)


_encode: Callable[[Any], str] = json.JSONEncoder(default=_plain).encode


# ---------------------------------------------------------------- reading


class Line(NamedTuple):
    """One line: its fields, and whether a later restore made it void."""

    fields: dict[str, Any]
    void: bool


class JournalReader:
    """What the file held when this was made. Memory does not grow with the file.

    Reads the file once to find the restores, and once for every `lines`.
    """

    def __init__(self, path: Path) -> None:
        """Read where the history goes. Raises OSError if there is no such file."""
        self._path = path
        self.first_s: float
        """Time of the first line, seconds since the epoch; 0 in an empty file."""
        self.last_s: float
        """Time of the last one."""
        self.num_damaged = 0
        """Lines of the last `lines` that were no JSON objects, and were skipped."""
        self._end, restarts, ends = _scan(path)
        self._starts, self._ends = _surviving(restarts, self._end)
        self.first_s, self.last_s = (_time_of(raw) for raw in ends)

    def lines(self, wanted: Callable[[bytes], bool] | None = None, *, void: bool = False) -> Iterator[Line]:
        """Yield the lines in the order they were written, those that are void only if asked for.

        `wanted` sees the bytes of a line; lines that it refuses are not parsed.
        """
        self.num_damaged = 0
        offset = 0
        for raw in whole_lines(self._path):
            start, offset = offset, offset + len(raw)
            if offset > self._end:
                return
            is_void = self._is_void(start)
            if (is_void and not void) or (wanted is not None and not wanted(raw)):
                continue
            fields = _decode(raw)
            if fields is None:
                self.num_damaged += 1
            else:
                yield Line(fields, is_void)

    def _is_void(self, offset: int) -> bool:
        at = bisect_right(self._starts, offset) - 1
        return at < 0 or offset >= self._ends[at]


def _decode(raw: bytes) -> dict[str, Any] | None:
    """Return the fields of a line, or None for a damaged one."""
    try:
        fields = json.loads(raw)
        return (
            fields if isinstance(fields["event"], str) and isinstance(fields["time"], int | float) else None
        )
    except (ValueError, TypeError, KeyError):
        return None


def _time_of(raw: bytes) -> float:
    """Return seconds since the epoch; 0 where there is no line."""
    return float((_decode(raw) or {}).get("time", 0.0))


def _scan(path: Path) -> tuple[int, list[tuple[int, int]], tuple[bytes, bytes]]:
    """Return (bytes of whole lines, restarts, the first and the last line).

    A restart is (where its line begins, where the history before it ends).
    """
    restarts, offset, first, last = [], 0, b"", b""
    started, restored = f'"{LedgerEvent.STARTED}"'.encode(), f'"{LedgerEvent.RESTORED}"'.encode()
    for raw in whole_lines(path):
        if started in raw or restored in raw:
            fields = _decode(raw) or {}
            if fields.get("event") == LedgerEvent.STARTED:
                restarts.append((offset, 0))
            elif fields.get("event") == LedgerEvent.RESTORED:
                saved = fields.get("offset")
                # A file that lost its end is shorter than a checkpoint remembers.
                restarts.append((offset, min(offset, saved) if isinstance(saved, int) else 0))
        offset, first, last = offset + len(raw), first or raw, raw
    return offset, restarts, (first, last)


def _surviving(restarts: list[tuple[int, int]], end: int) -> tuple[list[int], list[int]]:
    """Return starts and ends of the parts that make the history up to `end`, ascending.

    Goes backwards: what counts before a restart is what counted when its checkpoint was saved.
    """
    starts, ends = [], []
    for line, before in reversed(restarts):
        if line >= end:
            continue
        starts.append(line)
        ends.append(end)
        end = before
    if end > 0:
        starts.append(0)
        ends.append(end)
    return starts[::-1], ends[::-1]
