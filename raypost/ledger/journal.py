"""Journal: an append-only file of JSON lines that can be read while it is written, and undone by a restore.

Owns writing lines so that a kill loses at most those not flushed, putting a snapshot in place of lines that are too
many, and reading back the history that survived. Knows nothing of what the lines say, but for three events:

    snapshot, "base": n     always the first line: what all lines up to offset n came to
    started                 nothing before this line counts: production began anew
    restored, "offset": n   production went back to a checkpoint, saved at offset n; what lies between is void

An offset counts the bytes of all lines that were ever written.

Invariants: a line is written whole or not at all; lines are never changed; a last line that was cut off is
never read, and removed before the next one is appended; a snapshot replaces its lines in one step.
"""

from __future__ import annotations

import json
import os
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from raypost.errors import LedgerError, RunFilesError
from raypost.files.disk import Fsync
from raypost.files.jsonl import LineFile, parsed, whole_lines
from raypost.ledger.events import LedgerEvent

FORMAT = 2
"""Of snapshots."""
REMOVE_LEDGER = (
    "remove it, and the run goes on from its checkpoint, which has counts of its own; what became of single groups "
    "before is lost"
)
"""The way on where a journal cannot be read."""
TAIL_BYTES = 1 << 20
"""So many bytes of lines stand without a snapshot."""
FLUSH_LINES = 4096
"""Lines kept in memory at most."""
FLUSH_S = 1.0
"""A new line takes with it those that wait longer than this."""


class Journal:
    """The writing end. One writer a file at a time; a second one continues the file."""

    def __init__(self, path: Path, patience_s: float = 0.0, fsync: Fsync = "off") -> None:
        """Touches nothing before the first flush. `patience_s`: how long lines wait for a disk that refuses them.

        Raises LedgerError if the file is of another format, RunFilesError if its first line is damaged.
        """
        self._file = LineFile(path, patience_s, fsync)
        self._lines: list[str] = []
        self._oldest_s = 0.0
        first = b""
        if path.exists():
            with open(path, "rb") as file:
                first = next(whole_lines(file), b"")
        snapshot = _snapshot_of(first, path)
        self.base: int = 0 if snapshot is None else snapshot["base"]
        """Offset at which its lines begin."""
        self._first_bytes = 0 if snapshot is None else len(first)
        self._first_s = _first_s(first)

    @property
    def path(self) -> Path:
        """Of the file."""
        return self._file.path

    @property
    def end(self) -> int:
        """Offset behind the last line that was flushed."""
        return self.base + self.tail_bytes

    @property
    def tail_bytes(self) -> int:
        """Bytes of the lines behind the snapshot, by which it is worth another one."""
        size = self._file.path.stat().st_size if self._file.path.exists() else 0
        return size - self._first_bytes

    def is_long(self) -> bool:
        """Return whether another snapshot is due."""
        return self.tail_bytes > max(TAIL_BYTES, 2 * self._first_bytes)

    def put_snapshot(self, now_s: float, fields: Mapping[str, Any], base: int = 0) -> None:
        """Put a line with these fields in place of all lines so far; offsets go on at `base`, if that is beyond them.

        Raises OSError; then nothing has changed.
        """
        self.flush(now=True)
        base = max(base, self.end)
        line = {
            "time": now_s,
            "event": LedgerEvent.SNAPSHOT,
            "format": FORMAT,
            "base": base,
            "first_s": self._first_s,
        }
        self._first_bytes = self._file.replace(_encode({**line, **fields}))
        self.base = base

    def append(self, line: Mapping[str, Any], now_s: float) -> None:
        """Add one line, written with the next flush: at once if the oldest waits since FLUSH_S before `now_s`."""
        if not self._lines:
            self._oldest_s = now_s
        self._first_s = self._first_s or now_s
        self._lines.append(_encode(line))
        # A clock that was set back must not hold lines for long.
        if len(self._lines) >= FLUSH_LINES or not 0 <= now_s - self._oldest_s < FLUSH_S:
            self.flush()

    def flush(self, *, now: bool = False) -> None:
        """Hand what waits to the system: from here on a kill of this process loses none of it.

        Raises OSError if the disk is full and there is no patience left, or if it must be written `now`; nothing of it
        is written then, and all of it still waits.
        """
        self._file.append(self._lines, now=now)
        self._lines.clear()

    def sync(self) -> int:
        """Flush to the disk itself; the offset now, which is what a `restored` line names."""
        self.flush(now=True)
        if self._file.path.exists():
            with open(self._file.path, "rb+") as file:
                os.fsync(file.fileno())
        return self.end


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
        """Read where the history goes.

        Raises OSError if there is no such file, LedgerError for another format, RunFilesError if the first line, which
        says where the others belong, is damaged.
        """
        # A snapshot may take its place meanwhile: what is open is the file as it was.
        self._file = open(path, "rb")  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        self.first_s: float
        """Time of the first line, seconds since the epoch; 0 in an empty file."""
        self.last_s: float
        """Time of the last one."""
        self.num_damaged = 0
        """Lines of the last `lines` that are not as they were written, and were skipped."""
        first = next(whole_lines(self._file), b"")
        self.snapshot = _snapshot_of(first, path)
        """What the lines before this file came to; None for a file that has them all."""
        self._shift = 0 if self.snapshot is None else self.snapshot["base"] - len(first)
        end, restarts, last = self._scan()
        self.end = end
        """Offset behind the last whole line."""
        self._starts, self._ends = _surviving(restarts, end)
        self.first_s, self.last_s = _first_s(first), _time_of(last or first)
        self.is_snapshot_void = self.snapshot is not None and self._is_void(self.snapshot["base"] - 1)
        """Whether what came later made the snapshot void."""

    def lines(self, wanted: Callable[[bytes], bool] | None = None, *, void: bool = False) -> Iterator[Line]:
        """Yield the lines in the order they were written, those that are void only if asked for.

        `wanted` sees the bytes of a line; lines that it refuses are not parsed.
        """
        self.num_damaged = 0
        for start, raw in self._numbered():
            if start + len(raw) > self.end:
                return
            is_void = self._is_void(start)
            if (is_void and not void) or (wanted is not None and not wanted(raw)):
                continue
            fields = _decode(raw)
            if fields is None:
                self.num_damaged += 1
            else:
                yield Line(fields, is_void)

    def _numbered(self) -> Iterator[tuple[int, bytes]]:
        """Yield every line behind the snapshot with its offset."""
        offset = self._shift
        for raw in whole_lines(self._file):
            if self.snapshot is None or offset != self._shift:
                yield offset, raw
            offset += len(raw)

    def _scan(self) -> tuple[int, list[tuple[int, int]], bytes]:
        """Return (the offset behind the last line, restarts, the last line).

        A restart is (where its line begins, where the history before it ends).
        """
        restarts, end, last = [], 0 if self.snapshot is None else self.snapshot["base"], b""
        started, restored = f'"{LedgerEvent.STARTED}"'.encode(), f'"{LedgerEvent.RESTORED}"'.encode()
        for offset, raw in self._numbered():
            if started in raw or restored in raw:
                fields = _decode(raw) or {}
                if fields.get("event") == LedgerEvent.STARTED:
                    restarts.append((offset, 0))
                elif fields.get("event") == LedgerEvent.RESTORED:
                    saved = fields.get("offset")
                    # A file that lost its end is shorter than a checkpoint remembers.
                    restarts.append((offset, min(offset, saved) if isinstance(saved, int) else 0))
            end, last = offset + len(raw), raw
        return end, restarts, last

    def _is_void(self, offset: int) -> bool:
        at = bisect_right(self._starts, offset) - 1
        return at < 0 or offset >= self._ends[at]


def _decode(raw: bytes) -> dict[str, Any] | None:
    """Return the fields of a line, or None for a damaged one."""
    try:
        fields = parsed(raw)
        return (
            fields if isinstance(fields["event"], str) and isinstance(fields["time"], int | float) else None
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _time_of(raw: bytes) -> float:
    """Return seconds since the epoch; 0 where there is no line."""
    return float((_decode(raw) or {}).get("time", 0.0))


def _first_s(first: bytes) -> float:
    """Return the time of the first line that was ever written, given the first one that is there."""
    fields = _decode(first) or {}
    return float(fields.get("first_s", fields.get("time", 0.0)))


def _snapshot_of(first: bytes, path: Path) -> dict[str, Any] | None:
    """Return the fields of a first line that is a snapshot.

    Raises LedgerError if it is of another format, RunFilesError if it is damaged.
    """
    fields = _decode(first)
    if first and fields is None:
        raise RunFilesError(f"{path} is damaged in its first line: {REMOVE_LEDGER}")
    if fields is None or fields["event"] != LedgerEvent.SNAPSHOT:
        return None
    if fields.get("format") != FORMAT:
        raise LedgerError(
            f"{path} begins with a snapshot of format {fields.get('format')}, this version reads format {FORMAT}: "
            "use the version that wrote it"
        )
    return fields


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
