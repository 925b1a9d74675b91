"""ClosedGroups: the records of the groups that ended, in compressed blocks, in a file that only grows.

    records in it | bytes of its data | CRC-32 | data: the first bytes of all its records, their second bytes, ...

Owns the file. What counts of it is said by who refers to it, as so many bytes with such a digest: the journal's
snapshot, a checkpoint. What stands behind them is of a history that a kill or a restore cut off, and is written over.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from raypost.ledger.facts import RECORD, RECORD_TYPE

CLOSED_FILE = "ledger.closed"
"""Name of the file in the run folder."""
BLOCK_RECORDS = 1024
"""Of a block, at most."""
_CHUNK = 1 << 20
_HEAD = struct.Struct("<III")


class Closed(NamedTuple):
    """So many records in so many bytes at the beginning of the file, and the digest of these bytes."""

    records: int = 0
    nbytes: int = 0
    digest: str = xxhash.xxh3_64_hexdigest(b"")


class ClosedGroups:
    """The writing end. One writer a file at a time."""

    def __init__(self, path: Path) -> None:
        """Begin anew; touches nothing before the first `write`."""
        self._path = path
        self._records = self._nbytes = 0
        self._hash = xxhash.xxh3_64()
        self._waiting = bytearray()

    def add(self, record: bytes) -> None:
        """Add a record, written with the next `write`."""
        self._waiting += record

    def write(self) -> Closed:
        """Write what waits, to the disk itself; returns what the file holds then. Raises OSError."""
        if self._waiting:
            step = BLOCK_RECORDS * RECORD.size
            blocks = b"".join(
                _block(bytes(self._waiting[at : at + step])) for at in range(0, len(self._waiting), step)
            )
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.ftruncate(fd, self._nbytes)
                os.lseek(fd, 0, os.SEEK_END)
                rest = memoryview(blocks)
                while rest:
                    rest = rest[os.write(fd, rest) :]
                os.fsync(fd)
            finally:
                os.close(fd)
            self._hash.update(blocks)
            self._nbytes += len(blocks)
            self._records += len(self._waiting) // RECORD.size
            self._waiting.clear()
        return Closed(self._records, self._nbytes, self._hash.hexdigest())

    def go_back(self, to: Closed) -> bool:
        """Continue after these records. Returns False, and begins anew, if the file does not begin with them."""
        self._waiting.clear()
        self._hash = _digest(self._path, to.nbytes)
        found = self._hash.hexdigest() == to.digest
        if not found:
            self._hash = xxhash.xxh3_64()
        self._records, self._nbytes = (to.records, to.nbytes) if found else (0, 0)
        return found


def check_records(path: Path, closed: Closed) -> None:
    """Raise ValueError, with the place, if the file is not what `closed` says."""
    if _digest(path, closed.nbytes).hexdigest() == closed.digest:
        return
    places = (at for block, at in _blocks(path, closed.nbytes) if block is None)
    raise ValueError(
        f"{path} is damaged at byte {next(places, 0)}: it does not begin with the {closed.records} records that "
        f"{path.stem}.jsonl refers to"
    )


def read_records(path: Path, closed: Closed) -> Iterator[np.ndarray]:
    """Yield the records, of RECORD_TYPE, block by block. Raises ValueError if the file is not what `closed` says."""
    check_records(path, closed)
    if closed.records:
        for block, _ in _blocks(path, closed.nbytes):
            if block is not None:
                yield block


def find_records(path: Path, closed: Closed, group_id: int) -> list[bytes]:
    """Return the records of that number, of any task. Raises ValueError if the file is not what `closed` says."""
    found = (block[block["group"] == group_id] for block in read_records(path, closed))
    return [record.tobytes() for block in found for record in block]


def _block(records: bytes) -> bytes:
    count = len(records) // RECORD.size
    # Bytes of one kind beside each other: the times and counts of neighbours have most of them in common.
    data = zlib.compress(np.frombuffer(records, np.uint8).reshape(count, RECORD.size).T.tobytes())
    return _HEAD.pack(count, len(data), _crc(count, data)) + data


def _crc(count: int, data: bytes) -> int:
    return zlib.crc32(data, count)


def _blocks(path: Path, nbytes: int) -> Iterator[tuple[np.ndarray | None, int]]:
    """Yield the blocks in the first `nbytes` with the place of each; a damaged one is None, and the last."""
    at = 0
    with open(path, "rb") as file:
        while at < nbytes:
            head = file.read(_HEAD.size)
            count, length, crc = _HEAD.unpack(head) if len(head) == _HEAD.size else (0, 0, -1)
            data = file.read(length if at + length <= nbytes else 0)
            if len(data) != length or _crc(count, data) != crc:
                yield None, at
                return
            columns = np.frombuffer(zlib.decompress(data), np.uint8).reshape(RECORD.size, count)
            yield np.frombuffer(columns.T.tobytes(), RECORD_TYPE), at
            at += _HEAD.size + length


def _digest(path: Path, nbytes: int) -> xxhash.xxh3_64:
    """Return the digest of so many bytes, or of as many as there are."""
    digest, rest = xxhash.xxh3_64(), nbytes
    if rest and path.exists():
        with open(path, "rb") as file:
            while chunk := file.read(min(_CHUNK, rest)):
                digest.update(chunk)
                rest -= len(chunk)
    return digest
