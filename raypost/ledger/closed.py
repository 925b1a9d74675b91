"""ClosedGroups: the records of the groups that ended, one after the other in a file that only grows.

Owns the file. What counts of it is said by who refers to it, as so many records with such a digest: the journal's
snapshot, a checkpoint. What stands behind them is of a history that a kill or a restore cut off, and is written over.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from raypost.ledger.facts import RECORD

CLOSED_FILE = "ledger.closed"
"""Name of the file in the run folder."""
_CHUNK = 1 << 20
_ROW = np.dtype({"names": ["group"], "formats": ["<i8"], "itemsize": RECORD.size})


class Closed(NamedTuple):
    """So many records at the beginning of the file, and their digest."""

    records: int = 0
    digest: str = xxhash.xxh3_64_hexdigest(b"")


class ClosedGroups:
    """The writing end. One writer a file at a time."""

    def __init__(self, path: Path) -> None:
        """Begin anew; touches nothing before the first `write`."""
        self._path = path
        self._records = 0
        self._hash = xxhash.xxh3_64()
        self._waiting = bytearray()

    def add(self, record: bytes) -> None:
        """Add a record, written with the next `write`."""
        self._waiting += record

    def write(self) -> Closed:
        """Write what waits, to the disk itself; returns what the file holds then. Raises OSError."""
        if self._waiting:
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.ftruncate(fd, self._records * RECORD.size)
                os.lseek(fd, 0, os.SEEK_END)
                rest = memoryview(bytes(self._waiting))
                while rest:
                    rest = rest[os.write(fd, rest) :]
                os.fsync(fd)
            finally:
                os.close(fd)
            self._hash.update(self._waiting)
            self._records += len(self._waiting) // RECORD.size
            self._waiting.clear()
        return Closed(self._records, self._hash.hexdigest())

    def go_back(self, to: Closed) -> bool:
        """Continue after these records. Returns False, and begins anew, if the file does not begin with them."""
        self._waiting.clear()
        self._hash = _digest(self._path, to.records)
        found = self._hash.hexdigest() == to.digest
        if not found:
            self._hash = xxhash.xxh3_64()
        self._records = to.records if found else 0
        return found


def find_records(path: Path, closed: Closed, group_id: int) -> list[bytes]:
    """Return the records of that number, of any task. Raises ValueError if the file is not what `closed` says."""
    if _digest(path, closed.records).hexdigest() != closed.digest:
        raise ValueError(
            f"{path} does not begin with the {closed.records} records that {path.stem}.jsonl refers to"
        )
    if not closed.records:
        return []
    rows = np.memmap(path, _ROW, "r", shape=(closed.records,))
    places = np.flatnonzero(rows["group"] == group_id).tolist()
    return [rows[at].tobytes() for at in places]


def _digest(path: Path, records: int) -> xxhash.xxh3_64:
    """Return the digest of so many records, or of as many as there are."""
    digest, rest = xxhash.xxh3_64(), records * RECORD.size
    if rest and path.exists():
        with open(path, "rb") as file:
            while chunk := file.read(min(_CHUNK, rest)):
                digest.update(chunk)
                rest -= len(chunk)
    return digest
