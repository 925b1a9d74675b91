"""RunWriter: what a run writes into its folder while it goes on, and the report at its end.

    config.yaml     as resolved              tensorboard/   scalars of steps and evaluations, as other trackers
    metrics.jsonl   a line a step            report.json    figures
    events.jsonl    sessions, evaluations,   report.html    the same with plots, self-contained
                    syncs, counts, memory    timeline.png, curves.png
    spans.jsonl     who did what when        samples/       trajectories of each step

Invariants: nothing is kept in memory but what the system buffers; everything the report says can be
computed again from these files (`rebuild`), also after a kill and after a resume, which appends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from raypost.checkpoint import CHECKPOINTS, DAMAGED
from raypost.config import Config, load_config, parse_config
from raypost.config.identity import changed_settings
from raypost.errors import ConfigError
from raypost.faults import Incident
from raypost.files.jsonl import read_lines
from raypost.observe.metrics import finite_floats
from raypost.observe.spans import Span
from raypost.report import files
from raypost.report.record import RunRecord, load_record
from raypost.report.report_json import build_report, package_versions
from raypost.report.trackers import Trackers
from raypost.types import GroupCounts, RunStatus, SyncReport

MAX_PROBLEMS = 20
"""Of a session: more would say nothing new."""

log = logging.getLogger(__name__)


class RunWriter:
    """The files of one run. A second writer on the same folder continues it as a new session."""

    def __init__(self, run_dir: Path, config: Config, started_s: float | None = None) -> None:
        """Begin a session, at `started_s` (seconds since the epoch) or now.

        A session that began then already goes on as another one now: its writer died, and the report says so.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        self._run_dir = run_dir
        before = _config_in(run_dir)
        dumped = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
        files.write_atomically(run_dir / files.CONFIG, dumped)
        self._metrics = files.LineWriter(run_dir / files.METRICS, config.checkpoint.retry_s)
        self._events = files.LineWriter(run_dir / files.EVENTS, config.checkpoint.retry_s)
        self._spans = files.LineWriter(run_dir / files.SPANS, config.checkpoint.retry_s)
        self._trackers = Trackers(config, run_dir)
        self._last_step = int(files.read_last_line(run_dir / files.METRICS).get("step", 0))
        self._problems: set[str] = set()
        changed = changed_settings(before, config) if before is not None else []
        died = started_s is not None and _began(run_dir, started_s)
        self._event(
            "start", {"versions": package_versions(), "changed": changed}, None if died else started_s
        )
        if changed:
            self.write_incident(Incident.SETTINGS_CHANGED, {"count": len(changed), "changes": changed})
        for damaged in sorted(run_dir.glob(f"{CHECKPOINTS}/*{DAMAGED}")):
            self.write_problem(f"checkpoint {damaged.stem} is damaged: it was put aside as {damaged.name}")
        if died:
            self.write_problem(
                "telemetry died and was started again: figures of the time between are missing"
            )

    def write_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record train step `step` (1-based). Numbers also go to the trackers, lists only to the file.

        Steps from this one on that were recorded before are marked: they are of a history that was left.
        """
        if step <= self._last_step:
            files.abandon_steps(self._run_dir / files.METRICS, step)
        self._last_step = step
        line = {name: value for name, value in metrics.items() if name not in ("step", "time_s")}
        self._metrics.write({"step": step, "time_s": time.time(), **line})
        self._scalars("train", step, finite_floats(line))

    def write_eval(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record an evaluation of the weights of `step` (0 = initial)."""
        self._event("eval", {**metrics, "step": step})
        self._scalars("eval", step, finite_floats(metrics))

    def write_sync(self, report: SyncReport) -> None:
        """Record one weight sync."""
        self._event("sync", asdict(report))

    def write_spans(self, spans: list[Span]) -> None:
        """Append spans, in any order."""
        if spans:
            self._spans.write(files.spans_line(spans))

    def write_counts(self, groups: GroupCounts) -> None:
        """Record where every group is now; the last one written counts."""
        self._event("counts", groups.as_dict())

    def write_incident(self, incident: Incident, fields: Mapping[str, Any]) -> None:
        """Record what happened to the run and did not end it; a field `count` says how often at once, else once."""
        self._event(incident, fields)

    def write_problem(self, text: str) -> None:
        """Record what a reader of the report must know; once for each text."""
        if text not in self._problems and len(self._problems) < MAX_PROBLEMS:
            self._problems.add(text)
            self._event("problem", {"text": text})

    def write_usage(
        self,
        peak_memory_bytes: int | None,
        tokens_generated: int | None,
        unreachable: Mapping[str, int],
        judges: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Record this session's totals so far.

        `unreachable`: how often an actor did not answer, by name. `judges`: JudgeFigures of each task as plain data.
        """
        usage = {"peak_memory_bytes": peak_memory_bytes, "tokens_generated": tokens_generated}
        self._event("usage", {**usage, "unreachable": dict(unreachable), "judges": dict(judges or {})})

    def finish(self, status: RunStatus, error: str | None, groups: GroupCounts | None) -> dict[str, Any]:
        """Close the record and write the report; returns what report.json holds.

        `groups` None: the last counts written stand.
        """
        if groups is not None:
            self.write_counts(groups)
        self._event("end", {"status": status, "error": error})
        report = rebuild(self._run_dir)
        attached = [self._run_dir / name for name in (files.REPORT_HTML, files.REPORT_JSON, files.CONFIG)]
        self._trackers.finish(status, attached)
        return rebuild(self._run_dir) if self._write_problems() else report

    def close(self) -> None:
        """End the trackers without writing a report. Idempotent."""
        self._trackers.finish(None, [])
        self._write_problems()

    def _event(self, event: str, fields: Mapping[str, Any], time_s: float | None = None) -> None:
        self._events.write({"event": event, "time_s": time.time() if time_s is None else time_s, **fields})

    def _scalars(self, prefix: str, step: int, values: Mapping[str, float]) -> None:
        self._trackers.log(step, {f"{prefix}/{name}": value for name, value in values.items()})
        self._write_problems()

    def _write_problems(self) -> bool:
        """Record what the trackers could not do; returns whether there was something."""
        found = self._trackers.problems()
        for text in found:
            self.write_problem(text)
        return bool(found)


def rebuild(run_dir: Path) -> dict[str, Any]:
    """Write the report of a run folder again from its other files, also of a run that was killed or still goes on.

    Returns what report.json holds. Raises FileNotFoundError if the folder holds no run.
    """
    record = load_record(run_dir)
    config = parse_config(record.config, origin=str(run_dir / files.CONFIG))
    report = build_report(record, config)
    files.write_json(run_dir / files.REPORT_JSON, report)
    try:
        _draw(run_dir, report, record)
    except Exception as error:  # supervision boundary: a plot must not turn a finished run into a failed one
        log.exception("the figures of %s could not be drawn; %s is complete", run_dir, files.REPORT_JSON)
        report["problems"].append(f"report.html could not be drawn: {type(error).__name__}: {error}")
        files.write_json(run_dir / files.REPORT_JSON, report)
    return report


def _draw(run_dir: Path, report: dict[str, Any], record: RunRecord) -> None:
    # Plotting costs 40 MB that only the end of a run needs.
    from raypost.report import page, plots

    drawn = plots.draw(record, report)
    for name, content in (
        (files.REPORT_HTML, page.render(report, record.config, drawn.svgs)),
        (files.TIMELINE_PNG, drawn.timeline_png),
        (files.CURVES_PNG, drawn.curves_png),
    ):
        files.write_atomically(run_dir / name, content)


def _config_in(run_dir: Path) -> Config | None:
    """Return the configuration that the run had before, if it can be read."""
    try:
        return load_config(run_dir / files.CONFIG)
    except ConfigError:
        return None


def _began(run_dir: Path, started_s: float) -> bool:
    """Whether a session began at this very time."""
    with files.reading(run_dir / files.EVENTS):
        lines = read_lines(run_dir / files.EVENTS)
        return any(line.get("event") == "start" and line.get("time_s") == started_s for line in lines)
