"""What a run left on disk, read back in columns: the only source of a report.

A resumed run appends to the same files. Steps that a later session trained again replace the earlier ones, so that
what is read is the history of the model that survived.
"""

from __future__ import annotations

import math
import statistics
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from raypost.errors import RunFilesError
from raypost.faults import Incident
from raypost.files.jsonl import read_lines
from raypost.ledger.ledger import LEDGER_FILE
from raypost.ledger.summary import LedgerSummary, ledger_summary
from raypost.observe.metrics import GROUP_S, HELD_OUT, STALENESS, JudgeFigures, finite_floats
from raypost.report import files
from raypost.report.busy_time import SpanTable, span_table
from raypost.types import RunStatus

KILLED = "the run ended without closing its record: it was killed, or its machine went away"

Series = NDArray[np.float64]
"""One value a step, NaN where the step has none."""


@dataclass(slots=True, kw_only=True)
class RunRecord:
    """One run, of which S steps survive."""

    config: dict[str, Any]
    sessions: list[tuple[float, float]] = field(default_factory=list)
    """(start, end) of each time the run was started, seconds since the epoch."""
    steps: list[int] = field(default_factory=list)
    columns: dict[str, array[float]] = field(default_factory=dict)
    """Values by metric, NaN where a step lacks it; steps after the last that has it are left out."""
    staleness: list[list[int]] = field(default_factory=list)
    """Per step, per group of its batch."""
    group_s: list[dict[str, array[float]]] = field(default_factory=list)
    """Per step, by metric: seconds of each group that finished."""
    evals: list[dict[str, Any]] = field(default_factory=list)
    """With `step`, in the order of steps."""
    syncs: list[dict[str, Any]] = field(default_factory=list)
    usage: list[dict[str, Any]] = field(default_factory=list)
    """The last of each session."""
    counts: dict[str, int] = field(default_factory=dict)
    """The last that were written; {} if none ever were."""
    versions: dict[str, str] = field(default_factory=dict)
    status: RunStatus = "failed"
    """How the last session ended."""
    error: str | None = KILLED
    changed: list[str] = field(default_factory=list)
    """Settings that a later session had otherwise than the one before."""
    problems: list[str] = field(default_factory=list)
    """What went wrong beside training, in all sessions."""
    incidents: Counter[str] = field(default_factory=Counter)
    """What happened to the run and did not end it, in all sessions: how often, by `faults.Incident`."""
    moves: list[tuple[float, str, bool]] = field(default_factory=list)
    """When a rollout worker joined the pool (True), or had left it, and its name."""
    targets: list[tuple[float, str]] = field(default_factory=list)
    """When a pool was to have another number of workers, and which."""
    not_finite: set[str] = field(default_factory=set)
    """Metrics that were NaN or infinite in some step."""
    spans: SpanTable = field(default_factory=dict)
    ledger: LedgerSummary | None = None
    """Where the groups of the history that survived went; None without a ledger."""

    def column(self, name: str) -> Series:
        """Return the values of a metric by step, NaN where missing, also when no step has it."""
        values, known = np.full(len(self.steps), np.nan), self.columns.get(name, ())
        values[: len(known)] = known
        return values

    @property
    def last_step(self) -> int:
        """The last step that was trained, 0 if none was."""
        return self.steps[-1] if self.steps else 0

    def held_out(self) -> list[dict[str, Any]]:
        """Return the evaluations that have a held-out score."""
        return [scores for scores in self.evals if scores.get(HELD_OUT) is not None]


def load_record(run_dir: Path) -> RunRecord:
    """Read a run folder, also while the run is going on.

    Raises FileNotFoundError if it holds no run, and RunFilesError if a file of it is damaged.
    """
    config_file = run_dir / files.CONFIG
    if not config_file.exists():
        raise FileNotFoundError(f"{run_dir} holds no run: it has no {files.CONFIG}")
    with files.reading(config_file):
        record = RunRecord(config=dict(yaml.safe_load(config_file.read_text())))
    with files.reading(run_dir / files.METRICS):
        times = _read_steps(run_dir, record)
    with files.reading(run_dir / files.SPANS):
        record.spans = span_table(files.read_spans(run_dir / files.SPANS))
    times.extend(end for spans in record.spans.values() for end in spans[-1:, 1])
    if (run_dir / LEDGER_FILE).exists():
        record.ledger = ledger_summary(run_dir)
    with files.reading(run_dir / files.EVENTS):
        starts = _read_events(run_dir, record, times)
        record.evals = [scores for scores in record.evals if scores["step"] <= record.last_step]
    if not starts:
        raise RunFilesError(
            f"{run_dir / files.EVENTS} does not say when the run started: it is damaged or lost"
        )
    for start, before in zip(starts, [*starts[1:], float("inf")], strict=True):
        record.sessions.append((start, max((t for t in times if start <= t < before), default=start)))
    return record


def _read_steps(run_dir: Path, record: RunRecord) -> array[float]:
    """Fill the record's steps; returns when each was written, replaced ones included."""
    times = array("d")
    for line in read_lines(run_dir / files.METRICS):
        times.append(line["time_s"])
        if line.get(files.ABANDONED):
            continue
        row = bisect_left(record.steps, line["step"])
        del record.steps[row:], record.staleness[row:], record.group_s[row:]
        for column in record.columns.values():
            del column[row:]
        record.steps.append(line["step"])
        record.staleness.append(line.get(STALENESS) or [])
        lists = ((name, seconds) for name, seconds in line.items() if name.partition("/")[0] == GROUP_S)
        record.group_s.append({name: array("f", seconds) for name, seconds in lists})
        record.not_finite.update(line.get("not_finite", ()))
        for name, value in finite_floats(line).items():
            values = record.columns.setdefault(name, array("d"))
            values.extend([np.nan] * (row - len(values)))
            values.append(value)
    return times


def _read_events(run_dir: Path, record: RunRecord, times: array[float]) -> list[float]:
    """Fill the record's events and add to `times` when each was; returns when each session started."""
    starts: list[float] = []
    for line in read_lines(run_dir / files.EVENTS):
        kind, time_s = line.pop("event"), float(line.pop("time_s"))
        times.append(time_s)
        if kind == "start":
            starts.append(time_s)
            record.versions = line["versions"]
            record.changed += line.get("changed", [])
            record.status = "failed"
            record.error = KILLED
            record.usage.append({})
        elif kind == "eval":
            record.evals = [scores for scores in record.evals if scores["step"] < line["step"]]
            record.evals.append(line)
        elif kind == "sync":
            record.syncs.append(line)
        elif kind == "usage":
            judges = {task: JudgeFigures(**figures) for task, figures in line.get("judges", {}).items()}
            record.usage[-1] = {**line, "judges": judges}
        elif kind == "problem":
            record.problems.append(line["text"])
        elif kind == "counts":
            record.counts = line
        elif kind in Incident.__members__.values():
            record.incidents[kind] += line.get("count", 1)
            if kind in (Incident.WORKER_JOINED, Incident.WORKER_LEFT):
                record.moves.append((time_s, line["actor"], kind == Incident.WORKER_JOINED))
            elif kind == Incident.POOL_RESIZED:
                pool = "" if line["pool"] == "rollout" else f"{line['pool']} "
                record.targets.append((time_s, f"{pool}{line['before']} to {line['target']}"))
        elif kind == "end":
            record.status = line["status"]
            record.error = line["error"]
    return starts


# ---------------------------------------------------------------- arithmetic of series


def finite(values: Iterable[float]) -> list[float]:
    """Return the finite values."""
    return [float(value) for value in values if math.isfinite(value)]


def mean(values: Series) -> float | None:
    """Return the mean of the finite values; None without any."""
    known = finite(values)
    return statistics.fmean(known) if known else None


def weighted_mean(values_and_weights: Iterable[tuple[float, float]]) -> float | None:
    """Return the mean by weight over the pairs in which both are finite; None if the weights sum to 0."""
    pairs = [(v, w) for v, w in values_and_weights if math.isfinite(v) and math.isfinite(w)]
    total = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / total if total else None
