"""The files of a run folder: their names, and writing them so that a reader never sees half of one.

JSON lines are appended and flushed one by one; everything else is replaced as a whole. A line that was cut
off when its writer died is removed before the next one is appended, and ignored by readers.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from raypost.errors import RaypostError, RunFilesError
from raypost.files.jsonl import LineFile, parsed, read_lines, sealed
from raypost.observe.spans import Span

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
"""A line a train step."""
ABANDONED = "abandoned"
"""True in the line of a step that was trained again, from a checkpoint before it."""
EVENTS = "events.jsonl"
"""What is not per step: sessions, evaluations, weight syncs, group counts, memory."""
SPANS = "spans.jsonl"
TICK_S = 1e-4
"""Unit of the numbers in it."""
SAMPLES = "samples"
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

    def __init__(self, path: Path, patience_s: float = 0.0) -> None:
        """Touch nothing before the first object. `patience_s`: how long objects wait for a disk that refuses them."""
        self._file = LineFile(path, patience_s)

    def write(self, *objects: Mapping[str, Any]) -> None:
        """Append the objects, all or none of them."""
        self._file.append([to_line(item) for item in objects])


def abandon_steps(path: Path, first: int) -> None:
    """Mark the lines of the steps from `first` on: what follows is of another history. Raises OSError."""
    lines = [{**line, ABANDONED: True} if line["step"] >= first else line for line in read_lines(path)]
    write_atomically(path, "".join(sealed(json.dumps(line)) for line in lines))


def spans_line(spans: Sequence[Span]) -> dict[str, Any]:
    """Return spans as one object: by actor and kind the start, after `at_s`, and the length of each, in ticks.

    A run has many, and their names are longer than their numbers.
    """
    at_s = round(min(span.start_s for span in spans), 4)
    table: dict[tuple[str, str], list[int]] = {}
    for span in spans:
        start, end = (round((edge - at_s) / TICK_S) for edge in (span.start_s, span.end_s))
        table.setdefault((span.actor, span.kind), []).extend((start, end - start))
    return {"at_s": at_s, "spans": [[*names, *numbers] for names, numbers in table.items()]}


def read_spans(path: Path) -> Iterator[Span]:
    """Yield the spans of a file. Raises RunFilesError for a damaged line."""
    for line in read_lines(path):
        at_s = float(line["at_s"])
        for actor, kind, *numbers in line["spans"]:
            for start, length in zip(numbers[::2], numbers[1::2], strict=True):
                start_s = at_s + start * TICK_S
                yield Span(actor=actor, kind=kind, start_s=start_s, end_s=start_s + length * TICK_S)


def to_line(item: Mapping[str, Any]) -> str:
    """Return an object as a line of JSON, without its end. Numbers as in `plain`."""
    return json.dumps(plain(item), allow_nan=False)


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
                return _last(lines[-1], path) if lines else {}
            size *= 2


def _last(line: bytes, path: Path) -> dict[str, Any]:
    try:
        return parsed(line)
    except (ValueError, RecursionError) as error:
        raise RunFilesError(f"the last line of {path} is damaged: {error}; remove that line") from error


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
