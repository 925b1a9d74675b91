"""Files that a configuration names and holds the text of, so that other nodes and later readers have it."""

from __future__ import annotations

from pathlib import Path

MAX_BYTES = 1_000_000
"""Longest file: it travels with the configuration."""


def read_text(path: Path, what: str, instead: str) -> str:
    """Return the text of a file, which the configuration calls `what`.

    Raises ValueError if it cannot be read, or is longer than MAX_BYTES; `instead` says what to do about that.
    """
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ValueError(f"{what}: {path} has {size} bytes, more than {MAX_BYTES}: {instead}")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{what}: {path} cannot be read ({getattr(error, 'strerror', None) or error}); a file's path is relative "
            "to the configuration's folder"
        ) from None
