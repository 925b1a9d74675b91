"""What `raypost status` shows of a run: the figures of its last step, and of its report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from raypost import metrics
from raypost.config import load_config
from raypost.report import files
from raypost.report.formatting import length_bias

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


def run_figures(run_dir: Path) -> dict[str, Any]:
    """Return the figures of a run by name: of its last step, and of its report once there is one.

    Raises ConfigError if the configuration in the folder is not one of this version.
    """
    num_steps = load_config(run_dir / files.CONFIG).train.num_steps
    last = files.read_last_line(run_dir / files.METRICS)
    figures: dict[str, Any] = {"step": f"{last.get('step', 0)} of {num_steps}"}
    figures |= {name: last[name] for name in STEP_FIGURES if last.get(name) is not None}
    made = run_dir / files.REPORT_JSON
    if not made.exists():
        return {"status": "running, or ended without a report", **figures}
    written = json.loads(made.read_text())
    figures |= {name: written[name] for name in REPORT_FIGURES if written.get(name) is not None}
    if written.get("length_bias"):
        figures["length bias"] = length_bias(written["length_bias"])
    figures |= {f"groups {name}": count for name, count in written.get("groups", {}).items()}
    return {"report": run_dir / files.REPORT_HTML, **figures}
