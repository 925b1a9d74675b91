"""What a run left on disk, read back in columns: the only source of a report.

A resumed run appends to the same files. Steps that a later session trained again replace the earlier ones,
so that what is read is the history of the model that survived.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from raypost.ledger.ledger import LEDGER_FILE
from raypost.ledger.summary import LedgerSummary, ledger_summary
from raypost.metrics import HELD_OUT, STALENESS, bounds, finite_floats
from raypost.report import files
from raypost.report.busy_time import SpanTable, span_table
from raypost.types import Span

Column = NDArray[np.float64]


@dataclass(slots=True, kw_only=True)
class RunRecord:
    """One run. S steps survive; `columns` have S entries, NaN where a step lacks the metric."""

    config: dict[str, Any]
    sessions: list[tuple[float, float]]
    """(start, end) of each time the run was started, seconds since the epoch."""
    steps: NDArray[np.int64]
    columns: dict[str, Column] = field(default_factory=dict)
    staleness: list[list[int]] = field(default_factory=list)
    """Per step, per group of its batch."""
    evals: list[dict[str, Any]] = field(default_factory=list)
    """With `step`, in the order of steps."""
    syncs: list[dict[str, Any]] = field(default_factory=list)
    usage: list[dict[str, Any]] = field(default_factory=list)
    """The last of each session."""
    counts: dict[str, int] = field(default_factory=dict)
    """The last that were written; {} if none ever were."""
    versions: dict[str, str] = field(default_factory=dict)
    end: dict[str, Any] | None = None
    """How the last session ended; None while it runs, or when it was killed."""
    not_finite: list[str] = field(default_factory=list)
    """Metrics that were NaN or infinite in some step."""
    spans: SpanTable = field(default_factory=dict)
    ledger: LedgerSummary | None = None
    """Where the groups of the history that survived went; None without a ledger."""

    def column(self, name: str) -> Column:
        """Values of a metric by step, NaN where missing, also when no step has it."""
        return self.columns.get(name, np.full(len(self.steps), np.nan))

    @property
    def started_s(self) -> float:
        return self.sessions[0][0]


def load_record(run_dir: Path) -> RunRecord:
    """Read a run folder, also while the run is going on. Raises FileNotFoundError if it holds no run."""
    config_file = run_dir / files.CONFIG
    if not config_file.exists():
        raise FileNotFoundError(f"{run_dir} holds no run: it has no {files.CONFIG}")
    table = _read_steps(run_dir)
    record = RunRecord(
        config=yaml.safe_load(config_file.read_text()),
        sessions=[],
        steps=table.steps(),
        columns=table.columns(),
        staleness=table.staleness(),
        not_finite=sorted(table.not_finite),
        spans=span_table(Span(**line) for line in files.read_lines(run_dir / files.SPANS)),
        ledger=ledger_summary(run_dir) if (run_dir / LEDGER_FILE).exists() else None,
    )
    starts, last_seen = _read_events(run_dir, record)
    times = [*starts, *last_seen, *(end for spans in record.spans.values() for end in spans[-1:, 1])]
    times += list(table.times)
    edges = [*starts[1:], float("inf")]
    for start, before in zip(starts, edges, strict=True):
        record.sessions.append((start, max((t for t in times if start <= t < before), default=start)))
    last_step = int(record.steps[-1]) if len(record.steps) else 0
    record.evals = [scores for scores in record.evals if scores["step"] <= last_step]
    return record


class _StepTable:
    """Rows of metrics.jsonl as columns, with those that were trained again struck out."""

    def __init__(self) -> None:
        self._columns: dict[str, array[float]] = {}
        self._staleness: list[list[int]] = []
        self._steps: list[int] = []
        self._kept: list[int] = []
        self.times: array[float] = array("d")
        self.not_finite: set[str] = set()

    def add(self, line: Mapping[str, Any]) -> None:
        row, step = len(self._steps), int(line["step"])
        while self._kept and self._steps[self._kept[-1]] >= step:
            self._kept.pop()
        self._kept.append(row)
        self._steps.append(step)
        self.times.append(float(line["time_s"]))
        self._staleness.append([int(value) for value in line.get(STALENESS) or []])
        self.not_finite.update(line.get("not_finite", ()))
        for name, value in finite_floats(line).items():
            column = self._columns.setdefault(name, array("d"))
            column.extend([np.nan] * (row - len(column)))
            column.append(value)

    def steps(self) -> NDArray[np.int64]:
        return np.asarray(self._steps, np.int64)[self._kept]

    def columns(self) -> dict[str, Column]:
        rows = len(self._steps)
        return {
            name: np.concatenate([column, np.full(rows - len(column), np.nan)])[self._kept]
            for name, column in self._columns.items()
        }

    def staleness(self) -> list[list[int]]:
        return [self._staleness[row] for row in self._kept]


def _read_steps(run_dir: Path) -> _StepTable:
    table = _StepTable()
    for line in files.read_lines(run_dir / files.METRICS):
        table.add(line)
    return table


def _read_events(run_dir: Path, record: RunRecord) -> tuple[list[float], list[float]]:
    """Fill the record's events; returns when each session started, and when anything happened."""
    starts: list[float] = []
    times: list[float] = []
    for line in files.read_lines(run_dir / files.EVENTS):
        kind, time_s = line.pop("event"), float(line.pop("time_s"))
        times.append(time_s)
        if kind == "start":
            starts.append(time_s)
            record.versions = line["versions"]
            record.end = None
            record.usage.append({})
        elif kind == "eval":
            record.evals = [scores for scores in record.evals if scores["step"] < line["step"]]
            record.evals.append(line)
        elif kind == "sync":
            record.syncs.append(line)
        elif kind == "usage":
            record.usage[-1] = line
        elif kind == "counts":
            record.counts = line
        elif kind == "end":
            record.end = line
    return starts, times


def held_out_scores(record: RunRecord) -> list[tuple[int, float]]:
    """(step, mean held-out score) of every evaluation that has one."""
    return [(e["step"], e[HELD_OUT]) for e in record.evals if e.get(HELD_OUT) is not None]


def held_out_intervals(record: RunRecord) -> NDArray[np.float64]:
    """(low, high) beside each of `held_out_scores`, shape [E, 2]; NaN where there is none."""
    scored = (e for e in record.evals if e.get(HELD_OUT) is not None)
    return np.asarray([bounds(e, HELD_OUT) or (np.nan, np.nan) for e in scored]).reshape(-1, 2)
