"""BufferJournal: what the replay buffer holds, on disk, so that its process may die at any moment.

    log          a checked record for each change of the buffer's state (state.py), small
    data-N       the groups that changes put, as raw columns; a record of the log says where they are
    spare        the last data file without live groups, to become the next data file

Owns the files and their size: a data file without live groups is written over by the next one, the emptiest one is
emptied when more than half of the bytes are garbage, and the log is rewritten when it has grown to a multiple of
what it says. Owns neither the state nor the rules of the buffer.

Every change is handed to the kernel before the state applies it: it survives the death of the process, and with `fsync`
that of the machine. A record that was cut off by such a death is removed, with a warning. At damage anywhere else the
journal is cut: what stands before it, and can be read, is the state, which says that it was cut (BufferState.cut).

A journal belongs to one attempt to run a job. The same attempt continues it (its buffer was restarted); any
other attempt begins anew, since it starts from a checkpoint or from nothing, whatever the folder holds.

Invariants: the log never names bytes that were not written before it; data that it names is never changed.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from raypost.buffer.encoding import from_buffer, to_buffers
from raypost.buffer.journal_files import LOCK, framed, head_of, hold, read_log, write_at
from raypost.buffer.state import BufferState, Change, decode_change, tupled
from raypost.errors import CheckpointError
from raypost.files.disk import Fsync, Patience, Syncing
from raypost.types import GroupKey
from raypost.types.packed import PackedGroups, join_groups, slice_groups

log = logging.getLogger(__name__)

FILE_BYTES = 64 << 20
"""A data file that has reached this size is closed."""
GARBAGE_BYTES = 64 << 20
"""So much garbage is left alone."""
LOG_BYTES = 4 << 20
"""The log is not rewritten before it has grown by this much."""
FORMAT = 4


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
        patience_s: float = 0.0,
        fsync: Fsync = "off",
    ) -> None:
        """Continue `attempt`'s journal in `folder` if there is one, else begin it, removing any other's.

        `patience_s`: how long a write waits for a disk that refuses it; whoever puts groups waits with it.

        Raises CheckpointError if it is of another format, or another process keeps writing it.
        """
        self.folder = folder
        self.attempt = attempt
        self._log_path = folder / "log"
        self._spare = folder / "spare"
        self._file_bytes = file_bytes
        self._garbage_bytes = garbage_bytes
        self._log_bytes = log_bytes
        self._patience = Patience(patience_s)
        self._data_syncing, self._log_syncing = Syncing(fsync), Syncing(fsync)
        self._files: dict[int, _DataFile] = {}
        self._places: dict[GroupKey, tuple[Extent, int]] = {}
        """Where every live group is: its extent, and its index in it."""
        self._state = BufferState()
        self._records: list[dict[str, Any]] = []
        self._damage = ""
        self._data_fd = -1
        self._log_fd = -1
        self._current = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._lock_fd = hold(folder / LOCK)
        try:
            self.recovered = self._open_log()
            """Whether this attempt's journal was there."""
            if not self.recovered:
                for path in folder.iterdir():
                    if path.is_dir():
                        shutil.rmtree(path)
                    elif path.name != LOCK:
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
        length = write_at(self._data_fd, pieces, start, self._data_path(self._current), self._patience)
        self._data_syncing.wrote(self._data_fd)
        file.size += length
        return Extent(self._current, start, length, digest.intdigest(), packed.num_groups)

    def _write_log(self, record: dict[str, Any]) -> None:
        pieces = framed(record)
        try:
            self._log_size += write_at(self._log_fd, pieces, self._log_size, self._log_path, self._patience)
            self._log_syncing.wrote(self._log_fd)
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
        pieces = [piece for record in records for piece in framed(record)]
        try:
            size = write_at(fd, pieces, 0, path, self._patience)
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
                f"the {extent.length} bytes at {extent.offset} of {path} are damaged: {error}"
            ) from error
        keys = packed.keys
        for index, key in places:
            if index >= len(keys) or keys[index] != key:
                raise CheckpointError(f"{path} does not hold group {key} where the log says")
        return join_groups([slice_groups(packed, index, index + 1) for index, _ in places])

    # ---------------------------------------------------------------- recovery

    def _open_log(self) -> bool:
        """Read the log. Returns whether there is one of this attempt."""
        try:
            data = self._log_path.read_bytes()
        except (FileNotFoundError, IsADirectoryError):
            return False
        head = head_of(data)
        if head.get("attempt") != self.attempt:
            whose = f"is of attempt {head['attempt']}" if "attempt" in head else "cannot be read"
            log.info("the journal in %s %s: beginning anew", self.folder, whose)
            return False
        if head.get("format") != FORMAT:
            raise CheckpointError(
                f"{self._log_path} is no buffer journal of format {FORMAT}: remove the folder to begin with an empty "
                "buffer, or continue from the last checkpoint"
            )
        records, end, damage = read_log(data)
        if damage:
            self._damage = f"{damage} in {self._log_path}, and {len(data) - end} bytes from there on are lost"
            os.truncate(self._log_path, end)
        elif end < len(data):
            log.warning("%s: %d bytes of an unfinished record were cut off", self._log_path, len(data) - end)
            os.truncate(self._log_path, end)
        self._records = records[1:]
        self._log_fd = os.open(self._log_path, os.O_WRONLY | os.O_CLOEXEC)
        self._log_size = end
        self._log_limit = self._log_bytes + 2 * end
        return True

    def recover(self, state: BufferState) -> Iterator[PackedGroups]:
        """Apply all changes of the log to `state`, which is new; from here on `append` changes it.

        Yields its groups, read from disk. Where log or data are damaged, what cannot be read is gone, and the state is
        cut.
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
        lost: list[GroupKey] = []
        for extent, places in self._extents().items():
            try:
                packed = self._read(extent, places)
            except CheckpointError as error:
                self._damage = self._damage or str(error)
                lost += [key for _, key in places]
                continue
            yield packed
        if self._damage:
            log.error("the replay buffer's journal is cut: %s", self._damage)
            self.append({"cut": self._damage, "gone": lost})
