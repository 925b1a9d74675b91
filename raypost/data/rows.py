"""Rows at random access, wherever they lie: JSONL and Parquet files, saved Hugging Face datasets, sequences.

Owns reading. Knows nothing of prompts, and of the split only that it is worth keeping. Invariants: no file is read
into memory whole; rows can be sent to another process, which opens the files for itself and refuses those that changed
meanwhile.
"""

from __future__ import annotations

import bisect
import glob
import importlib
import itertools
import json
import os
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from raypost.config import TaskConfig
from raypost.data.prompt import HELD_OUT_ONE_IN, reserved, reserved_names
from raypost.data.row_index import RowIndex, Stamps, keep_index, load_index
from raypost.errors import ConfigError

CACHE_BYTES = 256 * 2**20
"""Row groups of Parquet files that one process keeps: a smaller source is read once."""

_BATCH = 1024
"""Rows read at once when a whole column is read."""

Row = dict[str, Any]


class Findings(NamedTuple):
    """What is odd about the rows of a source. Numbers of rows are -1 where there is none."""

    twins: int = 0
    """Rows whose question is also that of an earlier one."""
    twin: int = -1
    twin_of: int = -1
    """The first of them, and the row that it repeats."""
    blank_answers: int = 0
    blank_answer: int = -1
    """Rows with an answer of nothing but blanks, and the first of them."""


class Split(NamedTuple):
    """Which rows are trained, found by reading every question."""

    trained: Sequence[int] | NDArray[np.int64]
    """Numbers of the rows that are not held out."""
    content: str
    """Digest of the questions in their order."""
    findings: Findings = Findings()


class Rows(Protocol):
    """Rows by number."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def row(self, number: int) -> Row:
        """Return the row, a dict by field. Raises ConfigError naming its place if it is no such thing."""
        ...

    def scan(self, *fields: str) -> Iterator[tuple[Any, ...]]:
        """Yield the values of these fields in every row, in order; None where a row, or the source, lacks one."""
        for row in map(self.row, range(len(self))):
            yield tuple(map(row.get, fields))

    def place(self, number: int) -> str:
        """Return where the row stands, for messages."""
        ...

    def known_split(self) -> Split | None:
        """Return what an earlier reading of the same rows found; None if there was none."""
        return None

    def keep_split(self, split: Split) -> None:
        """Keep what a reading of all rows found, for the next start, if the rows can tell that they are the same."""
        return None


class JsonlRows(Rows):
    """Lines of JSONL files, blank ones left out. Keeps 8 bytes a line in memory."""

    def __init__(self, task: TaskConfig) -> None:
        """Raise ConfigError if there is no such file, or none can be read, or they hold no line."""
        source = task.source
        self._files = _Files(task)
        self._open: dict[int, IO[bytes]] = {}
        self._index_dir = source.index_dir
        self._read_for = [source.messages_field is not None, source.prompt_field, source.answer_field]
        self._read_for += [task.needs_answers, list(source.ignore_fields), source.size]
        self._read_for += [HELD_OUT_ONE_IN if source.hold_out else 0]
        self._split: Split | None = None
        index = load_index(self._index_dir, self._files.stamps, self._read_for)
        if index is not None:
            self._starts, self._offsets = index.starts.tolist(), index.offsets
            self._split = Split(index.trained, index.content, Findings(*index.findings))
        else:
            self._starts, self._offsets = _line_offsets(self._files.paths)
        if not len(self):
            raise ConfigError(f"{self._files} holds 0 prompts: give it at least one line")

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is open: another process opens its own."""
        return {**self.__dict__, "_open": {}}

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._offsets)

    def row(self, number: int) -> Row:
        """Return the row; see Rows."""
        at = bisect.bisect_right(self._starts, number) - 1
        self._files.unchanged(at)
        file = self._file(at)
        file.seek(int(self._offsets[number]))
        line = file.readline()
        try:
            row = json.loads(line)
        except ValueError as error:
            text = line.decode(errors="replace").strip()
            raise ConfigError(
                f"{self.place(number)} must be a JSON object, got {text!r:.80} ({error})"
            ) from error
        if not isinstance(row, dict):
            raise ConfigError(f"{self.place(number)} must be a JSON object, got {row!r:.80}")
        return row

    def place(self, number: int) -> str:
        """Return where the row stands."""
        path = self._files.paths[bisect.bisect_right(self._starts, number) - 1]
        with open(path, "rb") as file:
            ends = itertools.accumulate(map(len, file))
            line = 1 + sum(1 for _ in itertools.takewhile(int(self._offsets[number]).__ge__, ends))
        return f"{path} line {line}"

    def scan(self, *fields: str) -> Iterator[tuple[Any, ...]]:
        """Yield the fields' values of every row: the files from their beginning to their end."""
        number = 0
        for at in range(len(self._files.paths)):
            with open(self._files.unchanged(at), "rb") as file:
                for line in file:
                    if line.isspace():
                        continue
                    try:
                        row = json.loads(str(line, "utf-8"))
                    except ValueError:
                        row = None
                    yield tuple(map((row if isinstance(row, dict) else self.row(number)).get, fields))
                    number += 1

    def known_split(self) -> Split | None:
        """Return what an earlier start found in the same files."""
        return self._split

    def keep_split(self, split: Split) -> None:
        """Keep it in the folder of the source's index."""
        trained = np.asarray(split.trained, np.int64)
        found = [*map(int, split.findings)]
        index = RowIndex(np.asarray(self._starts), self._offsets, trained, split.content, found)
        keep_index(self._index_dir, self._files.stamps, self._read_for, index)

    def _file(self, number: int) -> IO[bytes]:
        if number not in self._open:
            self._open[number] = open(self._files.unchanged(number), "rb")  # noqa: SIM115
        return self._open[number]


def _line_offsets(paths: Sequence[Path]) -> tuple[list[int], NDArray[np.int64]]:
    """Return (number of the first line of every file, and of all lines; where each line begins in its file)."""
    starts, offsets = [0], array("q")
    for path in paths:
        with open(path, "rb") as file:
            offset = 0
            for line in file:
                if not line.isspace():
                    offsets.append(offset)
                offset += len(line)
        starts.append(len(offsets))
    return starts, np.frombuffer(offsets, np.int64)


class ParquetRows(Rows):
    """Rows of Parquet files, by row groups: fast in random order while all that is read fits CACHE_BYTES."""

    def __init__(self, task: TaskConfig) -> None:
        """Raise ConfigError if there is no such file, one is no Parquet file, or they hold no row."""
        self._files = _Files(task)
        self._parquets: dict[int, Any] = {}
        self._tables: OrderedDict[int, Any] = OrderedDict()
        self._groups: list[tuple[int, int]] = []
        self._starts = [0]
        for number, path in enumerate(self._files.paths):
            parquet = self._parquet(number)
            _require(task, parquet.schema_arrow.names, str(path))
            for group in range(parquet.num_row_groups):
                self._groups.append((number, group))
                self._starts.append(self._starts[-1] + parquet.metadata.row_group(group).num_rows)
        if len(self) < 1:
            raise ConfigError(f"{self._files} holds 0 prompts: give it at least one row")

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is open: another process opens its own."""
        return {**self.__dict__, "_parquets": {}, "_tables": OrderedDict()}

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._starts[-1]

    def row(self, number: int) -> Row:
        """Return the row; see Rows."""
        group = bisect.bisect_right(self._starts, number) - 1
        self._files.unchanged(self._groups[group][0])
        table = self._table(group)
        row: Row = table.slice(number - self._starts[group], 1).to_pylist()[0]
        return row

    def scan(self, *fields: str) -> Iterator[tuple[Any, ...]]:
        """Yield the fields' values of every row."""
        for number in range(len(self._files.paths)):
            parquet = self._parquet(number)
            there = set(fields) & set(parquet.schema_arrow.names)
            for batch in parquet.iter_batches(batch_size=_BATCH, columns=[*there]):
                columns = {name: batch.column(name).to_pylist() for name in there}
                yield from _zipped(fields, columns, len(batch))

    def place(self, number: int) -> str:
        """Return where the row stands."""
        path = self._files.paths[self._groups[bisect.bisect_right(self._starts, number) - 1][0]]
        return f"{path}: row {number} of the source"

    def _table(self, group: int) -> Any:
        if group in self._tables:
            self._tables.move_to_end(group)
            return self._tables[group]
        file, index = self._groups[group]
        self._tables[group] = self._parquet(file).read_row_group(index)
        while len(self._tables) > 1 and sum(table.nbytes for table in self._tables.values()) > CACHE_BYTES:
            self._tables.popitem(last=False)
        return self._tables[group]

    def _parquet(self, number: int) -> Any:
        if number not in self._parquets:
            path = self._files.unchanged(number)
            try:
                self._parquets[number] = importlib.import_module("pyarrow.parquet").ParquetFile(path)
            except ValueError as error:  # what pyarrow's ArrowInvalid is
                raise ConfigError(f"{path} is no Parquet file: {error}") from error
        return self._parquets[number]


class HubRows(Rows):
    """Rows of a Hugging Face dataset that `save_to_disk` wrote, memory-mapped by its library."""

    def __init__(self, task: TaskConfig) -> None:
        """Raise ConfigError if there is none in the folder, it has no row, or lacks a field."""
        self._task = task
        self._data = _load_saved(task)
        self._stamps = {path: _stamp(path) for path in self._paths()}
        _require(task, self._data.column_names, str(task.source.dataset))
        if len(self) < 1:
            raise ConfigError(f"{task.source.dataset} holds 0 prompts: give it at least one row")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a call that opens the dataset again."""
        return HubRows, (self._task,)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._data)

    def row(self, number: int) -> Row:
        """Return the row; see Rows."""
        for path, stamp in self._stamps.items():
            # Reading a mapped file that was cut would end the process.
            if _stamp(path) != stamp:
                raise ConfigError(
                    f"{path} changed while the run reads it: keep it as it is, or start a new run"
                )
        return dict(self._data[number])

    def _paths(self) -> list[Path]:
        return [Path(file["filename"]) for file in self._data.cache_files]

    def scan(self, *fields: str) -> Iterator[tuple[Any, ...]]:
        """Yield the fields' values of every row."""
        there = set(fields) & set(self._data.column_names)
        for columns in self._data.select_columns([*there]).iter(batch_size=_BATCH):
            yield from _zipped(fields, columns, len(next(iter(columns.values()))))

    def place(self, number: int) -> str:
        """Return where the row stands."""
        return f"{self._task.source.dataset} row {number}"


def _load_saved(task: TaskConfig) -> Any:
    datasets, path = importlib.import_module("datasets"), str(Path(str(task.source.dataset)).expanduser())
    try:
        found = datasets.load_from_disk(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"task {task.name!r}: cannot read {path}: {error}") from error
    split = task.source.params.get("split")
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise ConfigError(
                f"task {task.name!r}: {path} has the splits {', '.join(found)}, source.params.split is {split!r}: "
                "choose one of them"
            )
        found = found[split]
    elif split is not None:
        raise ConfigError(
            f"task {task.name!r}: {path} has no splits, source.params.split is {split!r}: leave it out"
        )
    return found.with_format(None)


class _Files:
    """The files of a source, in order."""

    def __init__(self, task: TaskConfig) -> None:
        dataset = task.source.dataset
        self.paths = _expand(task.name, (dataset,) if isinstance(dataset, str) else dataset)
        self.stamps: Stamps = []
        for path in self.paths:
            try:
                with open(path, "rb") as file:
                    status = os.fstat(file.fileno())
                self.stamps.append((str(path.absolute()), status.st_size, status.st_mtime_ns))
            except OSError as error:
                raise ConfigError(
                    f"task {task.name!r}: cannot read {path}: {error.strerror}; source.dataset must name readable "
                    "files"
                ) from error

    def __str__(self) -> str:
        return ", ".join(map(str, self.paths))

    def unchanged(self, number: int) -> Path:
        """Return the file's path. Raises ConfigError if the file is not as it was at first."""
        path = self.paths[number]
        if _stamp(path) != self.stamps[number][1:]:
            raise ConfigError(f"{path} changed while the run reads it: keep it as it is, or start a new run")
        return path


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return size and time of modification; None for a file that is gone."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _expand(task: str, patterns: Sequence[str]) -> list[Path]:
    """Return the files that paths and glob patterns name: in the order given, a pattern's sorted, none twice."""
    names: list[str] = []
    for pattern in (str(Path(pattern).expanduser()) for pattern in patterns):
        if not glob.has_magic(pattern) or Path(pattern).exists():
            names.append(pattern)
            continue
        found = sorted(glob.glob(pattern, recursive=True))
        if not found:
            raise ConfigError(f"task {task!r}: no file matches {pattern}: correct source.dataset")
        names += found
    return [Path(name) for name in dict.fromkeys(names)]


def _zipped(fields: Sequence[str], columns: Mapping[str, Any], size: int) -> Iterator[tuple[Any, ...]]:
    """Return the rows of columns, of which some may be missing."""
    return zip(*(columns.get(name, (None,) * size) for name in fields), strict=True)


def _require(task: TaskConfig, names: Sequence[str], place: str) -> None:
    source = task.source
    wanted = {"question_field" if source.messages_field is None else "messages_field": source.prompt_field}
    if task.needs_answers:
        wanted["answer_field"] = str(source.answer_field)
    for option, name in wanted.items():
        if name not in names:
            raise ConfigError(
                f"{place} has no column {name!r}: it has {', '.join(names)}; set source.{option} to one of them"
            )
    if taken := [name for name in reserved_names(source) if name in names]:
        raise reserved(taken, place)
