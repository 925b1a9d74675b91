"""What `raypost status` shows of a run: the figures of its last step, and of its report."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

from raypost.config import load_config
from raypost.faults import Incident
from raypost.files.jsonl import read_lines
from raypost.files.owner import owner
from raypost.observe import metrics
from raypost.report import files
from raypost.report.formatting import length_bias, seconds, steps_of
from raypost.report.pool import pool_record
from raypost.report.terminal import task_text

STEP_FIGURES = (
    metrics.REWARD_MEAN,
    metrics.LOSS,
    metrics.HELD_OUT,
    metrics.STALENESS_MAX,
    metrics.BUFFER_GROUPS,
    metrics.EXPIRED_GROUPS,
    metrics.SYNC_S,
)
REPORT_FIGURES = (
    "status",
    "error",
    "wall_s",
    "eval_before",
    "eval_after",
    "staleness_max",
    "sync_s_median",
    "trainer_idle_fraction",
    "rollout_idle_fraction",
    "logprob_mismatch_max",
    "problems",
)


RUNNING, ENDED, DEAD = "RUNNING", "ENDED", "DEAD"


def run_state(run_dir: Path) -> str:
    """Return whether a run is RUNNING, has ENDED, or is DEAD: its driver is gone and closed no record.

    Raises RunFilesError if the record is damaged.
    """
    living, last, end = owner(run_dir), 0.0, None
    path = run_dir / files.EVENTS
    with files.reading(path):
        for line in read_lines(path):
            last = max(last, float(line["time_s"]))
            if line["event"] in ("start", "end"):
                end = line.get("status")
    since = (
        f"last sign of life {seconds(max(0.0, time.time() - last))} ago" if last else "it wrote nothing yet"
    )
    if living is not None:
        return f"{RUNNING}: {living}; {since}"
    if end is not None:
        return f"{ENDED}: {end}"
    return (
        f"{DEAD}: its driver is gone and closed no record; {since}. The command that started it continues it"
    )


def _incidents(run_dir: Path) -> Counter[str]:
    """Return how often what happened to a run that did not end it, by name."""
    found: Counter[str] = Counter()
    with files.reading(run_dir / files.EVENTS):
        for line in read_lines(run_dir / files.EVENTS):
            if line["event"] in Incident.__members__.values():
                found[line["event"]] += line.get("count", 1)
    return found


def run_figures(run_dir: Path) -> dict[str, Any]:
    """Return the figures of a run by name: whether it lives, its last step, and its report once it has ended.

    Raises ConfigError if the configuration in the folder is not one of this version, and RunFilesError for damage.
    """
    config = load_config(run_dir / files.CONFIG)
    state = run_state(run_dir)
    last = files.read_last_line(run_dir / files.METRICS)
    with files.reading(run_dir / files.METRICS):
        figures: dict[str, Any] = {
            "run": state,
            "steps": steps_of(int(last.get("step", 0)), config.train.num_steps),
        }
        figures |= {name: last[name] for name in STEP_FIGURES if last.get(name) is not None}
        if len(config.tasks) > 1:
            figures |= {f"task {task.name}": task_text(last, task.name) for task in config.tasks}
    made = run_dir / files.REPORT_JSON
    if state.startswith(RUNNING) or not made.exists():
        if (pool := pool_record(run_dir)) is not None:
            figures |= pool.figures()
        return figures | {f"incident {name}": count for name, count in _incidents(run_dir).items()}
    with files.reading(made):
        written = json.loads(made.read_text())
        figures |= {name: written[name] for name in REPORT_FIGURES if written.get(name) is not None}
        if written.get("length_bias"):
            figures["length bias"] = length_bias(written["length_bias"])
        figures |= {f"incident {name}": count for name, count in written.get("incidents", {}).items()}
        figures |= {f"groups {name}": count for name, count in written.get("groups", {}).items()}
    return {"report": run_dir / files.REPORT_HTML, **figures}
