"""A disk that refuses: which errors may pass by themselves, what is said of them, and how long a writer waits.

Owns the judgement, and nothing that is written. Space may be freed, a quota raised, a folder made writable again while
a run goes on: its writers wait for that, which holds production back, and only then give up.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

T = TypeVar("T")
log = logging.getLogger(__name__)

MAY_PASS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})
"""A full disk, a quota, a file system that became read-only, a limit on the size of a file."""
Fsync = Literal["every", "interval", "off"]
SYNC_S = 1.0
RETRY_S = 0.5
"""Between two tries to write."""


def refusal(error: BaseException | None) -> OSError | None:
    """Return the refusal of a disk that may pass, in an error or in what caused it; None if it is another error."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno in MAY_PASS:
            return error
        error = getattr(error, "cause", None) or error.__cause__
    return None


def named(error: OSError, path: Path) -> OSError:
    """Return the error with the file, what is free there, and what to do."""
    folder = next(one for one in (path, *path.parents) if one.is_dir())
    try:
        free = f"{shutil.disk_usage(folder).free / 1e6:,.1f} MB free there"
    except OSError as unknown:
        free = f"free space unknown: {unknown.strerror}"
    fix = "free some, raise the quota or the limit, or make it writable, and give the same command again"
    return OSError(error.errno, f"{error.strerror} ({free}); {fix}", str(path))


class Patience:
    """How long a writer goes on although a disk refuses: `limit_s` from the first refusal on."""

    def __init__(self, limit_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        """0: not at all."""
        self._limit_s = limit_s
        self._clock = clock
        self._since_s: float | None = None

    def is_left(self, error: BaseException, path: Path) -> bool:
        """Return whether the writer of `path` tries again after this error."""
        if (refused := refusal(error)) is None or self._limit_s <= 0:
            return False
        if self._since_s is None:
            self._since_s = self._clock()
            log.warning("waiting up to %.0f s: %s", self._limit_s, named(refused, path))
        return self._clock() - self._since_s < self._limit_s

    def restored(self, path: Path) -> None:
        """Take note that it was written."""
        if self._since_s is not None:
            log.warning("%s is written again after %.1f s", path, self._clock() - self._since_s)
            self._since_s = None


class Syncing:
    """Decides when what was written goes to the disk itself: then it survives the machine, not only the process."""

    def __init__(self, mode: Fsync = "off", clock: Callable[[], float] = time.monotonic) -> None:
        """off: the system decides. interval: with the first write after SYNC_S. every: with each write."""
        self._mode = mode
        self._clock = clock
        self._last_s = clock()

    def wrote(self, fd: int) -> None:
        """Take note of a write to an open file. Raises OSError."""
        if self._mode == "every" or (self._mode == "interval" and self._clock() - self._last_s >= SYNC_S):
            os.fsync(fd)
            self._last_s = self._clock()


def patiently(
    write: Callable[[], T], path: Path, patience: Patience, sleep: Callable[[float], None] = time.sleep
) -> T:
    """Return what `write` does, which is tried again while there is patience. Raises its error otherwise, named."""
    while True:
        try:
            done = write()
        except OSError as error:
            if not patience.is_left(error, path):
                raise (named(error, path) if refusal(error) else error) from error
            sleep(RETRY_S)
        else:
            patience.restored(path)
            return done


def probe(folder: Path) -> OSError | None:
    """Return why nothing can be written to a folder; None if something can."""
    path = folder / ".space"
    try:
        with open(path, "wb") as file:
            file.write(bytes(1 << 16))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return named(error, folder)
    finally:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.debug("%s stays: %s", path, error)
    return None
