"""The files of a run folder: their names, and writing them so that a reader never sees half of one.

JSON lines are appended and flushed one by one; everything else is replaced as a whole. A line that was cut
off when its writer died is removed before the next one is appended, and ignored by readers.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from raypost.errors import RaypostError, RunFilesError
from raypost.jsonl import LineFile, whole_lines

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
"""A line a train step."""
EVENTS = "events.jsonl"
"""What is not per step: sessions, evaluations, weight syncs, group counts, memory."""
SPANS = "spans.jsonl"
TENSORBOARD = "tensorboard"
TRACKERS = "trackers.json"
"""What each tracker knows the run as."""
REPORT_JSON = "report.json"
REPORT_HTML = "report.html"
TIMELINE_PNG = "timeline.png"
CURVES_PNG = "curves.png"


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace the file as a whole, or leave it as it was."""
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, item: Mapping[str, Any]) -> None:
    """Replace the file as a whole by one JSON object. Numbers as in `plain`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(plain(item), indent=2) + "\n")


class LineWriter:
    """Appends JSON objects to a file, each on a line of its own, handed to the system when written."""

    def __init__(self, path: Path) -> None:
        """Touch nothing before the first object."""
        self._file = LineFile(path)

    def write(self, *objects: Mapping[str, Any]) -> None:
        """Append the objects, all or none of them."""
        self._file.append([to_line(item) for item in objects])


def to_line(item: Mapping[str, Any]) -> str:
    """Return an object as a line of JSON, without its end. Numbers as in `plain`."""
    return json.dumps(plain(item), allow_nan=False)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON lines file; nothing if there is no such file.

    Raises RunFilesError for a damaged line, except the last one if it was cut off.
    """
    if not path.exists():
        return
    with open(path, "rb") as file:
        for number, line in enumerate(whole_lines(file), start=1):
            yield _parsed(line, f"{path} line {number}")


def _parsed(line: bytes, where: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RunFilesError(f"{where} is no JSON: {error}; mend or remove that line") from error
    if not isinstance(found, dict):
        raise RunFilesError(f"{where} is no JSON object but {line!r:.80}; mend or remove that line")
    return found


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what a reader of the file's content raises, because it is not what a run writes, into RunFilesError."""
    try:
        yield
    except RaypostError:
        raise
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        IndexError,
        OverflowError,
        yaml.YAMLError,
    ) as error:
        text = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise RunFilesError(f"{path} is damaged, it is not what a run writes: {text}") from error


def read_last_line(path: Path) -> dict[str, Any]:
    """Return the last whole object of a JSON lines file, without reading those before it; {} if there is none.

    Raises RunFilesError if it is damaged.
    """
    if not path.exists():
        return {}
    with open(path, "rb") as file:
        end, size = file.seek(0, os.SEEK_END), _CHUNK
        while True:
            start = max(0, end - size)
            file.seek(start)
            *lines, _ = file.read(end - start).split(b"\n")
            if len(lines) > 1 or start == 0:
                return _parsed(lines[-1], f"the last line of {path}") if lines else {}
            size *= 2


_CHUNK = 1 << 16


def plain(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mapping as plain data that JSON can hold.

    Numbers that are not finite become null, and their names are listed under `not_finite`: a loss that became NaN
    must be seen.
    """
    result, not_finite = {}, []
    for name, value in item.items():
        if isinstance(value, np.generic | np.ndarray):
            value = value.tolist()
        elif isinstance(value, Mapping):
            value = plain(value)
        if isinstance(value, float) and not math.isfinite(value):
            not_finite.append(name)
            value = None
        result[name] = value
    if not_finite:
        result["not_finite"] = not_finite
    return result
