"""What one reading of a source found out, kept: where rows are, which are trained, how many tokens prompts have.

Owns the files `index_dir`/DIGEST.index, named by what was read. Files of rows are known by their paths, sizes and times
of modification, lengths by digests of the questions and of all that renders them. None is written beside the data. What
is damaged, of another format or of other data counts as absent, and a folder that cannot be written costs nothing but
the next reading.

Invariant: an index is believed only for exactly what it was made of.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

log = logging.getLogger(__name__)

FORMAT = 2
MIN_ROWS = 10_000
"""Fewer rows are read again: that takes no time."""
SETTLED_S = 2.0
"""A file that was written later than this before it is indexed may change once more without a newer time."""
MAX_FILES = 128
"""Indexes in a folder; the oldest go."""

Stamps = list[tuple[str, int, int]]
"""Of every file: its path, its bytes, and when it was written, in nanoseconds."""


class RowIndex(NamedTuple):
    """R rows in F files, of which some are trained."""

    starts: NDArray[np.int64]
    """Number of the first row of every file, and R; [F + 1]."""
    offsets: NDArray[np.int64]
    """Where each row begins in its file, [R]."""
    trained: NDArray[np.int64]
    """Rows that are not held out."""
    content: str
    """Digest of the questions in their order."""
    findings: list[int]
    """What else the reading found; see sources.Findings."""


def load_index(folder: Path | None, stamps: Stamps, fields: list[Any]) -> RowIndex | None:
    """Return what was found out about these files and `fields`; None if nothing is known."""
    known = load_arrays(folder, [list(map(list, stamps)), fields])
    if known is None:
        return None
    (starts, offsets, trained), facts = known
    return RowIndex(starts, offsets, trained, *facts)


def keep_index(folder: Path | None, stamps: Stamps, fields: list[Any], index: RowIndex) -> None:
    """Keep what was found out, where it is worth it and safe."""
    newest = max((written for _, _, written in stamps), default=0) / 1e9
    if len(index.offsets) >= MIN_ROWS and time.time() - newest >= SETTLED_S:
        keep_arrays(folder, [list(map(list, stamps)), fields], index[:3], index[3:])


def load_arrays(folder: Path | None, made_of: list[Any]) -> tuple[list[NDArray[np.int64]], list[Any]] | None:
    """Return the arrays and facts that were kept for `made_of`, plain data; None if there are none."""
    if folder is None:
        return None
    key = [FORMAT, *made_of]
    try:
        data = _path(folder, key).read_bytes()
    except OSError:
        return None
    head, _, body = data.partition(b"\n")
    try:
        known = json.loads(head)
        if known["key"] != key or known["digest"] != xxhash.xxh3_64_hexdigest(body):
            return None
        return np.split(np.frombuffer(body, np.int64), np.cumsum(known["lengths"])[:-1]), known["facts"]
    except (ValueError, KeyError, TypeError):
        return None


def keep_arrays(
    folder: Path | None, made_of: list[Any], arrays: Sequence[NDArray[np.int64]], facts: Sequence[Any] = ()
) -> None:
    """Keep arrays and facts for `made_of`, plain data. A folder that cannot be written keeps nothing."""
    if folder is None:
        return
    key = [FORMAT, *made_of]
    body = b"".join(array.astype(np.int64).tobytes() for array in arrays)
    head = {
        "key": key,
        "digest": xxhash.xxh3_64_hexdigest(body),
        "lengths": [len(array) for array in arrays],
        "facts": list(facts),
    }
    path = _path(folder, key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
            file.write(json.dumps(head).encode() + b"\n" + body)
        os.replace(file.name, path)
        for old in sorted(path.parent.glob("*.index"), key=lambda one: one.stat().st_mtime)[:-MAX_FILES]:
            old.unlink(missing_ok=True)
    except OSError as error:
        log.info("what was read of a source is not kept in %s: %s", path.parent, error)


def _path(folder: Path, key: list[Any]) -> Path:
    return (
        folder.expanduser() / f"{hashlib.blake2b(json.dumps(key).encode(), digest_size=16).hexdigest()}.index"
    )
