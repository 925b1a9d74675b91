"""BufferJournal: what the replay buffer holds, on disk, so that its process may die at any moment.

    log          one checked record a change, small: which groups came, went, were handed out, leased, trained
    data-N       blocks of groups as raw columns, one a `put`; a record of the log says where its block is
    spare        the last data file that died, to be the next one

Owns the files, what they say (`BufferState`), and their size: a data file without live groups is written over
by the next one, the emptiest one is emptied when more than half of the bytes are garbage, and the log is
rewritten when it has grown to a multiple of what it says. Owns no rule of the buffer (replay_buffer.py).

Every change is handed to the kernel before the buffer acts on it: it survives the death of the process, not
that of the machine, unless `fsync` is set. A record that was cut off by such a death is removed, with a
warning; damage anywhere else is a CheckpointError.

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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from raypost.buffer.encoding import from_buffer, to_buffers
from raypost.buffer.state import Block, BufferState, Change
from raypost.errors import CheckpointError
from raypost.packed import PackedGroups, join_groups, split_groups
from raypost.types import GroupKey

log = logging.getLogger(__name__)

SEGMENT_BYTES = 64 << 20
"""A data file that has reached this size is closed."""
GARBAGE_BYTES = 64 << 20
"""So much garbage is left alone."""
LOG_BYTES = 4 << 20
"""The log is not rewritten before it has grown by this much."""
LOCK_TIMEOUT_S = 10.0
FORMAT = 1

_FRAME = struct.Struct("<IIQ")
"""Length of the body, checksum of that length, checksum of the body."""


@dataclass(slots=True)
class _Segment:
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
        fsync: bool = False,
        segment_bytes: int = SEGMENT_BYTES,
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
        self._fsync = fsync
        self._segment_bytes = segment_bytes
        self._garbage_bytes = garbage_bytes
        self._log_bytes = log_bytes
        self._segments: dict[int, _Segment] = {}
        self._data_fd = -1
        self._current = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._lock_fd = _lock(folder / "lock")
        try:
            recovered = self._recover()
            self.recovered = recovered is not None
            """Whether this attempt's journal was there."""
            self.state = recovered or BufferState()
            if not self.recovered:
                for path in (*folder.glob("data-*"), *folder.glob("spare")):
                    path.unlink()
                self._begin_segment(1)
                self._rewrite_log()
            self._remove_unused()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the files back. What was appended is in them already."""
        for name in ("_data_fd", "_log_fd", "_lock_fd"):
            if getattr(self, name, -1) >= 0:
                os.close(getattr(self, name))
                setattr(self, name, -1)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(path.stat().st_size for path in self.folder.iterdir())

    # ---------------------------------------------------------------- writing

    def append(self, change: Change, payload: PackedGroups | None = None) -> None:
        """Write one change; `payload` are the groups that `change["put"]` names, in that order.

        Raises CheckpointError if the disk refuses; then nothing has changed.
        """
        if payload is not None:
            change["block"] = self._write_block(payload)
        self._write_log(json.dumps(change).encode())
        self._apply(change)

    def tidy(self) -> None:
        """Delete what is garbage, a bounded amount a call."""
        total = sum(segment.size for segment in self._segments.values())
        live = sum(segment.live_bytes for segment in self._segments.values())
        if total - live > max(self._garbage_bytes, total // 2):
            closed = [number for number in self._segments if number != self._current]
            if closed:
                self._empty(
                    min(closed, key=lambda n: self._segments[n].live_bytes / max(1, self._segments[n].size))
                )
        if self._log_size > self._log_limit:
            self._rewrite_log()

    def payloads(self) -> Iterable[tuple[GroupKey, PackedGroups]]:
        """All live groups, each alone, read from disk. Raises CheckpointError naming damaged data."""
        for block, entries in self.state.by_block().items():
            groups = split_groups(self._read_block(block))
            for key, entry in entries:
                if entry.index >= len(groups) or groups[entry.index].keys != (key,):
                    raise CheckpointError(f"{self._data_path(block.segment)} does not hold group {key}")
                yield key, groups[entry.index]

    def replace(self, change: Change, payload: PackedGroups | None) -> None:
        """Forget everything and begin with `change`, at once: a crash leaves the old or the new."""
        self._begin_segment(self._current + 1)
        if payload is not None:
            change["block"] = self._write_block(payload)
        self.state = BufferState()
        for segment in self._segments.values():
            segment.live_bytes = segment.live_groups = 0
        self._apply(change)
        self._rewrite_log()
        self._remove_unused()

    def _apply(self, change: Change) -> None:
        came, went = self.state.apply(change)
        for sign, blocks in ((1, came), (-1, went)):
            for block in blocks:
                segment = self._segments[block.segment]
                segment.live_bytes += sign * block.group_bytes
                segment.live_groups += sign
        for number in {block.segment for block in went}:
            if not self._segments[number].live_groups and number != self._current:
                self._remove(number)

    def _write_block(self, payload: PackedGroups) -> list[int]:
        if self._segments[self._current].size >= self._segment_bytes:
            self._begin_segment(self._current + 1)
        pieces = to_buffers(payload)
        digest = xxhash.xxh3_64()
        for piece in pieces:
            digest.update(piece)
        segment = self._segments[self._current]
        start = segment.size
        length = _write(self._data_fd, pieces, start, self._current_path, self._fsync)
        segment.size += length
        return [self._current, start, length, digest.intdigest(), payload.num_groups]

    def _write_log(self, body: bytes) -> None:
        pieces = [memoryview(_frame(body)), memoryview(body)]
        try:
            self._log_size += _write(self._log_fd, pieces, self._log_size, self._log_path, self._fsync)
        except CheckpointError:
            # Half a record followed by a whole one would be damage.
            os.ftruncate(self._log_fd, self._log_size)
            raise

    def _empty(self, number: int) -> None:
        """Move what lives in a closed data file to the end of the open one."""
        moved, parts = [], []
        for block, entries in self.state.by_block().items():
            if block.segment == number:
                groups = split_groups(self._read_block(block))
                parts += [groups[entry.index] for _, entry in entries]
                moved += [[*key, one.sequence, str(one.status)] for key, one in entries]
        facts = [[task, group_id, index, *rest] for index, (task, group_id, *rest) in enumerate(moved)]
        self.append({"move": facts}, join_groups(parts))

    def _rewrite_log(self) -> None:
        """Put a log in place that says the same with nothing in between."""
        path = self._log_path.with_suffix(".tmp")
        head = {"raypost": "buffer", "format": FORMAT, "attempt": self.attempt}
        changes = [head, *self.state.snapshot()]
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC)
        pieces = []
        for body in (json.dumps(change).encode() for change in changes):
            pieces += [memoryview(_frame(body)), memoryview(body)]
        try:
            size = _write(fd, pieces, 0, path, self._fsync)
            os.replace(path, self._log_path)
        except BaseException:
            os.close(fd)
            raise
        old = getattr(self, "_log_fd", -1)
        if old >= 0:
            os.close(old)
        self._log_fd = fd
        self._log_size = size
        self._log_limit = self._log_bytes + 2 * size

    # ---------------------------------------------------------------- files

    def _data_path(self, number: int) -> Path:
        return self.folder / f"data-{number:08d}"

    def _begin_segment(self, number: int) -> None:
        path = self._data_path(number)
        if self._spare.exists():
            # To write over pages that the kernel has costs half of what new ones cost.
            os.replace(self._spare, path)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC)
        if self._data_fd >= 0:
            os.close(self._data_fd)
        previous = self._current
        self._data_fd = fd
        self._current = number
        self._current_path = path
        self._segments[number] = _Segment()
        if previous in self._segments and not self._segments[previous].live_groups:
            self._remove(previous)

    def _remove(self, number: int) -> None:
        path = self._data_path(number)
        if path.exists():
            os.replace(path, self._spare)
        del self._segments[number]

    def _remove_unused(self) -> None:
        """Delete data files of which the log knows nothing, or nothing live."""
        for number in [n for n, one in self._segments.items() if not one.live_groups and n != self._current]:
            self._remove(number)
        known = {self._data_path(number) for number in self._segments}
        for path in self.folder.glob("data-*"):
            if path not in known:
                path.unlink()

    def _read_block(self, block: Block) -> PackedGroups:
        path = self._data_path(block.segment)
        try:
            with path.open("rb") as file:
                file.seek(block.offset)
                data = file.read(block.length)
            if len(data) < block.length:
                raise ValueError(f"it ends after {len(data)} bytes")
            if xxhash.xxh3_64_intdigest(data) != block.checksum:
                raise ValueError("its checksum differs")
            return from_buffer(data)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"the block of {block.length} bytes at {block.offset} of {path} is damaged: {error}; {_FIX}"
            ) from error

    # ---------------------------------------------------------------- recovery

    def _recover(self) -> BufferState | None:
        """What the log says, if it is this attempt's; None where there is none, or another attempt's."""
        try:
            data = self._log_path.read_bytes()
        except FileNotFoundError:
            return None
        bodies, end = _read_log(data, self._log_path)
        head = bodies[0] if bodies else {}
        if head.get("raypost") != "buffer" or head.get("format") != FORMAT:
            raise CheckpointError(f"{self._log_path} is no buffer journal of format {FORMAT}; {_FIX}")
        if head["attempt"] != self.attempt:
            log.info("the journal in %s is of attempt %s: beginning anew", self.folder, head["attempt"])
            return None
        if end < len(data):
            log.warning("%s: %d bytes of an unfinished record were cut off", self._log_path, len(data) - end)
            os.truncate(self._log_path, end)
        state = BufferState()
        for change in bodies[1:]:
            state.apply(change)
        for entry in state.entries.values():
            segment = self._segments.setdefault(entry.block.segment, _Segment())
            segment.live_groups += 1
            segment.live_bytes += entry.block.group_bytes
        for number, segment in self._segments.items():
            path = self._data_path(number)
            segment.size = path.stat().st_size if path.exists() else 0
        # What a death left behind the last block belongs to no record: the next block starts a new file.
        self._begin_segment(max(self._segments, default=0) + 1)
        self._log_fd = os.open(self._log_path, os.O_WRONLY | os.O_CLOEXEC)
        self._log_size = end
        self._log_limit = self._log_bytes + 2 * end
        return state


_FIX = "remove the folder to begin with an empty buffer, or continue from the last checkpoint"


def _frame(body: bytes) -> bytes:
    length = len(body)
    return _FRAME.pack(length, _check(length), xxhash.xxh3_64_intdigest(body))


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


def _write(fd: int, pieces: Sequence[memoryview], start: int, path: Path, fsync: bool) -> int:
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
        if fsync:
            os.fdatasync(fd)
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
