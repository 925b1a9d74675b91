"""Files of the buffer's journal: the frames of its log, writes that outlast a full disk, the lock of its folder.

frame    length of the body, checksum of that length, checksum of the body; then the body, JSON
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from raypost.errors import CheckpointError
from raypost.files.disk import Patience, patiently

LOCK = "lock"
LOCK_TIMEOUT_S = 10.0

_FRAME = struct.Struct("<IIQ")
"""Length of the body, checksum of that length, checksum of the body."""


def framed(record: dict[str, Any]) -> list[memoryview]:
    """Return the frame and the body of a record."""
    body = json.dumps(record).encode()
    frame = _FRAME.pack(len(body), _check(len(body)), xxhash.xxh3_64_intdigest(body))
    return [memoryview(frame), memoryview(body)]


def _check(length: int) -> int:
    return xxhash.xxh32_intdigest(length.to_bytes(4, "little"))


def head_of(data: bytes) -> dict[str, Any]:
    """Return the first record of a log, which says whose it is; an empty one if it cannot be read."""
    length = _FRAME.unpack_from(data)[0] if len(data) >= _FRAME.size else 0
    try:
        bodies, _, _ = read_log(data[: _FRAME.size + length])
    except ValueError:
        return {}
    return bodies[0] if bodies and isinstance(bodies[0], dict) else {}


def read_log(data: bytes) -> tuple[list[dict[str, Any]], int, str]:
    """Return the bodies of all records before the first damage, where they end, and what is damaged there, if it is.

    A last record that was cut off is none, and no damage.
    """
    bodies: list[dict[str, Any]] = []
    at = 0
    while at + _FRAME.size <= len(data):
        length, check, checksum = _FRAME.unpack_from(data, at)
        if check != _check(length):
            return bodies, at, f"the length at {at} is damaged"
        end = at + _FRAME.size + length
        if end > len(data):
            break
        body = data[at + _FRAME.size : end]
        if checksum != xxhash.xxh3_64_intdigest(body):
            return bodies, at, f"the record at {at} is damaged"
        bodies.append(json.loads(body))
        at = end
    return bodies, at, ""


def write_at(fd: int, pieces: Sequence[memoryview], start: int, path: Path, patience: Patience) -> int:
    """Write all pieces from byte `start` on; returns how many bytes they were."""
    rest, written = list(pieces), 0
    try:
        while rest:
            done = patiently(partial(os.pwritev, fd, rest[:_MAX_PIECES], start + written), path, patience)
            written += done
            while rest and done >= rest[0].nbytes:
                done -= rest.pop(0).nbytes
            if done:
                rest[0] = rest[0].cast("B")[done:]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error}; or switch buffer.journal off") from error
    return written


_MAX_PIECES = 512


def hold(path: Path) -> int:
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
