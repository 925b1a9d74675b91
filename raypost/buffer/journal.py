"""BufferJournal: what the replay buffer holds, on disk, so that its process may die at any moment.

    log          a checked record for each change of the buffer's state (state.py), small
    data-N       the groups that changes put, as raw columns; a record of the log says where they are
    spare        the last data file without live groups, to become the next data file

Owns the files and their size: a data file without live groups is written over by the next one, the emptiest one is
emptied when more than half of the bytes are garbage, and the log is rewritten when it has grown to a multiple of
what it says. Owns neither the state nor the rules of the buffer.

Every change is handed to the kernel before the state applies it: it survives the death of the process, not that of
the machine. A record that was cut off by such a death is removed, with a warning; damage
anywhere else is a CheckpointError.

A journal belongs to one attempt to run a job. The same attempt continues it (its buffer was restarted); any
other attempt begins anew, since it starts from a checkpoint or from nothing.

Invariants: the log never names bytes that were not written before it; data that it names is never changed.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from raypost.buffer.encoding import from_buffer, to_buffers
from raypost.buffer.state import BufferState, Change, decode_change, tupled
from raypost.errors import CheckpointError
from raypost.packed import PackedGroups, join_groups, slice_groups
from raypost.types import GroupKey

log = logging.getLogger(__name__)

FILE_BYTES = 64 << 20
"""A data file that has reached this size is closed."""
GARBAGE_BYTES = 64 << 20
"""So much garbage is left alone."""
LOG_BYTES = 4 << 20
"""The log is not rewritten before it has grown by this much."""
LOCK_TIMEOUT_S = 10.0
FORMAT = 3

_FRAME = struct.Struct("<IIQ")
"""Length of the body, checksum of that length, checksum of the body."""


class Extent(NamedTuple):
    """A piece of a data file: the groups of one put."""

    file: int
    offset: int
    length: int
    checksum: int
    num_groups: int

    @property
    def group_bytes(self) -> int:
        """Bytes of one of its groups, on average."""
        return self.length // self.num_groups


@dataclass(slots=True)
class _DataFile:
    size: int = 0
    live_bytes: int = 0
    live_groups: int = 0


class BufferJournal:
    """The journal of one buffer in one folder. One writer at a time."""

    def __init__(
        self,
        folder: Path,
        attempt: str,
        *,
        file_bytes: int = FILE_BYTES,
        garbage_bytes: int = GARBAGE_BYTES,
        log_bytes: int = LOG_BYTES,
    ) -> None:
        """Continue `attempt`'s journal in `folder` if there is one, else begin it, removing any other's.

        Raises CheckpointError if it is damaged, or another process keeps writing it.
        """
        self.folder = folder
        self.attempt = attempt
        self._log_path = folder / "log"
        self._spare = folder / "spare"
        self._file_bytes = file_bytes
        self._garbage_bytes = garbage_bytes
        self._log_bytes = log_bytes
        self._files: dict[int, _DataFile] = {}
        self._places: dict[GroupKey, tuple[Extent, int]] = {}
        """Where every live group is: its extent, and its index in it."""
        self._state = BufferState()
        self._records: list[dict[str, Any]] = []
        self._data_fd = -1
        self._log_fd = -1
        self._current = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._lock_fd = _lock(folder / "lock")
        try:
            self.recovered = self._open_log()
            """Whether this attempt's journal was there."""
            if not self.recovered:
                for path in (*folder.glob("data-*"), *folder.glob("spare")):
                    path.unlink()
                self._begin_file(1)
                self.rewrite_log()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the files. What was appended is in them already."""
        for name in ("_data_fd", "_log_fd", "_lock_fd"):
            if getattr(self, name) >= 0:
                os.close(getattr(self, name))
                setattr(self, name, -1)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(path.stat().st_size for path in self.folder.iterdir())

    @property
    def live_bytes(self) -> int:
        """Bytes of all live groups in the files."""
        return sum(one.live_bytes for one in self._files.values())

    # ---------------------------------------------------------------- writing

    def append(self, change: Change, packed: PackedGroups | None = None) -> list[GroupKey]:
        """Write one change, and then apply it to the state.

        `packed` are the groups of `change["put"]`, in that order. Returns the groups that ended with the change.
        Raises CheckpointError if the disk refuses; then nothing has changed.
        """
        record: dict[str, Any] = {"change": change}
        if packed is not None:
            record["extent"] = self._write_extent(packed)
        self._write_log(record)
        ended = self._apply(record)
        self._free_files()
        return ended

    def tidy(self) -> None:
        """Delete what is garbage, a bounded amount a call."""
        total, live = sum(one.size for one in self._files.values()), self.live_bytes
        if total - live > max(self._garbage_bytes, total // 2):
            closed = [number for number in self._files if number != self._current]
            if closed:
                self._empty(
                    min(closed, key=lambda n: self._files[n].live_bytes / max(1, self._files[n].size))
                )
        if self._log_size > self._log_limit:
            self.rewrite_log()

    def _apply(self, record: dict[str, Any]) -> list[GroupKey]:
        """Make what a record says: a change of the state, or groups that moved to another extent."""
        change: Change = record.get("change", {})
        ended = self._state.apply(change) if change else []
        for key in ended:
            self._forget(key)
        if "extent" in record:
            extent = Extent(*record["extent"])
            keys = record["moved"] if "moved" in record else [group.key for group in change["put"]]
            file = self._files.setdefault(extent.file, _DataFile())
            for index, key in zip(record.get("index", range(len(keys))), keys, strict=True):
                self._forget(key)
                self._places[key] = (extent, index)
                file.live_groups += 1
                file.live_bytes += extent.group_bytes
        return ended

    def _forget(self, key: GroupKey) -> None:
        if key in self._places:
            extent, _ = self._places.pop(key)
            file = self._files[extent.file]
            file.live_groups -= 1
            file.live_bytes -= extent.group_bytes

    def _write_extent(self, packed: PackedGroups) -> Extent:
        if self._files[self._current].size >= self._file_bytes:
            self._begin_file(self._current + 1)
        pieces = to_buffers(packed)
        digest = xxhash.xxh3_64()
        for piece in pieces:
            digest.update(piece)
        file = self._files[self._current]
        start = file.size
        length = _write(self._data_fd, pieces, start, self._data_path(self._current))
        file.size += length
        return Extent(self._current, start, length, digest.intdigest(), packed.num_groups)

    def _write_log(self, record: dict[str, Any]) -> None:
        pieces = _framed(record)
        try:
            self._log_size += _write(self._log_fd, pieces, self._log_size, self._log_path)
        except CheckpointError:
            # Half a record followed by a whole one would be damage.
            os.ftruncate(self._log_fd, self._log_size)
            raise

    def _empty(self, number: int) -> None:
        """Move what lives in a closed data file to the end of the open one."""
        extents = {extent: places for extent, places in self._extents().items() if extent.file == number}
        moved = [key for places in extents.values() for _, key in places]
        packed = join_groups([self._read(extent, places) for extent, places in extents.items()])
        record = {"moved": moved, "extent": self._write_extent(packed)}
        self._write_log(record)
        self._apply(record)
        self._free_files()

    def rewrite_log(self) -> None:
        """Put a log in place that says the same with nothing in between."""
        path = self._log_path.with_suffix(".tmp")
        records: list[dict[str, Any]] = [{"raypost": "buffer", "format": FORMAT, "attempt": self.attempt}]
        for extent, places in self._extents().items():
            put = [self._state.groups[key] for _, key in places]
            index = [at for at, _ in places]
            records.append({"change": {"put": put}, "extent": extent, "index": index})
        records += ({"change": change} for change in self._state.snapshot())
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC)
        pieces = [piece for record in records for piece in _framed(record)]
        try:
            size = _write(fd, pieces, 0, path)
            os.replace(path, self._log_path)
        except BaseException:
            os.close(fd)
            raise
        if self._log_fd >= 0:
            os.close(self._log_fd)
        self._log_fd = fd
        self._log_size = size
        self._log_limit = self._log_bytes + 2 * size

    def _extents(self) -> dict[Extent, list[tuple[int, GroupKey]]]:
        """(index, key) of the live groups of every extent."""
        extents: dict[Extent, list[tuple[int, GroupKey]]] = {}
        for key, (extent, index) in self._places.items():
            extents.setdefault(extent, []).append((index, key))
        return extents

    # ---------------------------------------------------------------- files

    def _data_path(self, number: int) -> Path:
        return self.folder / f"data-{number:08d}"

    def _begin_file(self, number: int) -> None:
        path = self._data_path(number)
        if self._spare.exists():
            # To write over pages that the kernel has costs half of what new ones cost.
            os.replace(self._spare, path)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC)
        if self._data_fd >= 0:
            os.close(self._data_fd)
        self._data_fd = fd
        self._current = number
        self._files[number] = _DataFile()
        self._free_files()

    def _free_files(self) -> None:
        """Set aside the data files that hold nothing live."""
        for number in [n for n, one in self._files.items() if not one.live_groups and n != self._current]:
            path = self._data_path(number)
            if path.exists():
                os.replace(path, self._spare)
            del self._files[number]

    def _read(self, extent: Extent, places: Sequence[tuple[int, GroupKey]]) -> PackedGroups:
        """Copy the groups at these places of an extent."""
        path = self._data_path(extent.file)
        try:
            with path.open("rb") as file:
                file.seek(extent.offset)
                data = file.read(extent.length)
            if len(data) < extent.length:
                raise ValueError(f"it ends after {len(data)} bytes")
            if xxhash.xxh3_64_intdigest(data) != extent.checksum:
                raise ValueError("its checksum differs")
            packed = from_buffer(data)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"the {extent.length} bytes at {extent.offset} of {path} are damaged: {error}; {_FIX}"
            ) from error
        keys = packed.keys
        for index, key in places:
            if index >= len(keys) or keys[index] != key:
                raise CheckpointError(f"{path} does not hold group {key} where the log says; {_FIX}")
        return join_groups([slice_groups(packed, index, index + 1) for index, _ in places])

    # ---------------------------------------------------------------- recovery

    def _open_log(self) -> bool:
        """Read the log. Returns whether there is one of this attempt."""
        try:
            data = self._log_path.read_bytes()
        except FileNotFoundError:
            return False
        records, end = _read_log(data, self._log_path)
        head = records[0] if records else {}
        if head.get("raypost") != "buffer" or head.get("format") != FORMAT:
            raise CheckpointError(f"{self._log_path} is no buffer journal of format {FORMAT}; {_FIX}")
        if head["attempt"] != self.attempt:
            log.info("the journal in %s is of attempt %s: beginning anew", self.folder, head["attempt"])
            return False
        if end < len(data):
            log.warning("%s: %d bytes of an unfinished record were cut off", self._log_path, len(data) - end)
            os.truncate(self._log_path, end)
        self._records = records[1:]
        self._log_fd = os.open(self._log_path, os.O_WRONLY | os.O_CLOEXEC)
        self._log_size = end
        self._log_limit = self._log_bytes + 2 * end
        return True

    def recover(self, state: BufferState) -> Iterator[PackedGroups]:
        """Apply all changes of the log to `state`, which is new; from here on `append` changes it.

        Yields its groups, read from disk. Raises CheckpointError naming damaged data.
        """
        self._state = state
        for record in map(tupled, self._records):
            if "change" in record:
                record["change"] = decode_change(record["change"])
            self._apply(record)
        self._records = []
        for number, file in self._files.items():
            path = self._data_path(number)
            file.size = path.stat().st_size if path.exists() else 0
        if self.recovered:
            # What a death left behind the last extent belongs to no record: the next one starts a new file.
            self._begin_file(max(self._files, default=0) + 1)
        known = {self._data_path(number) for number in self._files}
        for path in self.folder.glob("data-*"):
            if path not in known:
                path.unlink()
        for extent, places in self._extents().items():
            yield self._read(extent, places)


_FIX = "remove the folder to begin with an empty buffer, or continue from the last checkpoint"


def _framed(record: dict[str, Any]) -> list[memoryview]:
    """Return the frame and the body of a record."""
    body = json.dumps(record).encode()
    frame = _FRAME.pack(len(body), _check(len(body)), xxhash.xxh3_64_intdigest(body))
    return [memoryview(frame), memoryview(body)]


def _check(length: int) -> int:
    return xxhash.xxh32_intdigest(length.to_bytes(4, "little"))


def _read_log(data: bytes, path: Path) -> tuple[list[dict[str, Any]], int]:
    """Bodies of all whole records, and where they end. Raises CheckpointError for a damaged one."""
    bodies, at = [], 0
    while at + _FRAME.size <= len(data):
        length, check, checksum = _FRAME.unpack_from(data, at)
        if check != _check(length):
            raise CheckpointError(f"the length at {at} of {path} is damaged; {_FIX}")
        end = at + _FRAME.size + length
        if end > len(data):
            break
        body = data[at + _FRAME.size : end]
        if checksum != xxhash.xxh3_64_intdigest(body):
            raise CheckpointError(f"the record at {at} of {path} is damaged; {_FIX}")
        bodies.append(json.loads(body))
        at = end
    return bodies, at


def _write(fd: int, pieces: Sequence[memoryview], start: int, path: Path) -> int:
    """Write all pieces from byte `start` on; returns how many bytes they were."""
    rest, written = list(pieces), 0
    try:
        while rest:
            done = os.pwritev(fd, rest[:_MAX_PIECES], start + written)
            written += done
            while rest and done >= rest[0].nbytes:
                done -= rest.pop(0).nbytes
            if done:
                rest[0] = rest[0].cast("B")[done:]
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written: {error}; free disk space, or switch buffer.journal off"
        ) from error
    return written


_MAX_PIECES = 512


def _lock(path: Path) -> int:
    """Hold the folder: a dying writer lets go of it when its process is gone."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except OSError as error:
            if time.monotonic() > deadline:
                os.close(fd)
                raise CheckpointError(
                    f"another process has written {path.parent} for {LOCK_TIMEOUT_S:.0f} s: end it first"
                ) from error
            time.sleep(0.05)
