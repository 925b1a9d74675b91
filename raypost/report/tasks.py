"""What a report says of each task: rewards, lengths, ages, what failed, and how long its groups took."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from raypost.config import Config
from raypost.observe import metrics
from raypost.report.record import RunRecord, Series, finite, mean, weighted_mean

PERCENTILE_NAMES = {name: f"p{rank}" for name, rank in metrics.GROUP_S_PERCENTILES.items()}


def tasks_report(record: RunRecord, config: Config) -> dict[str, dict[str, Any]]:
    """Return the figures of every task by name, over all steps that survived."""
    alone = len(config.tasks) == 1
    return {task.name: _task(record, task.name, alone) for task in config.tasks}


def task_column(record: RunRecord, name: str, task: str, alone: bool) -> Series:
    """Return a metric of a task by step; `alone`: it is the run's only task."""
    return record.column(name if alone else metrics.of_task(name, task))


def group_seconds(record: RunRecord, task: str | None = None) -> dict[str, float]:
    """Return p50, p90 and p99 of the seconds that groups took, of a task or of all; {} without any.

    From all of them: percentiles of single steps have no mean that is a percentile.
    """
    name = metrics.GROUP_S if task is None else metrics.of_task(metrics.GROUP_S, task)
    found = metrics.percentiles_of(
        np.concatenate([np.empty(0), *(one.get(name, ()) for one in record.group_s)])
    )
    return {PERCENTILE_NAMES[name]: value for name, value in found.items()}


def _task(record: RunRecord, task: str, alone: bool) -> dict[str, Any]:
    def column(name: str) -> Series:
        return task_column(record, name, task, alone)

    samples, staleness = column(metrics.NUM_SAMPLES), column(metrics.STALENESS_MEAN)
    raw, trained = column(metrics.RAW_REWARD_MEAN), column(metrics.REWARD_MEAN)
    scored = [one for one in record.evals if one.get(metrics.of_task(metrics.HELD_OUT, task)) is not None]
    before, after = ([one[metrics.of_task(metrics.HELD_OUT, task)] for one in scored if (one["step"] == 0) is first]
                     for first in (True, False))  # fmt: skip
    return {
        "eval_before": before[0] if before else None,
        "eval_after": after[-1] if after else None,
        "samples_trained": _sum(samples),
        **_ends("raw_reward", raw),
        **_ends("reward", trained),
        **_ends("response_tokens", column(metrics.RESPONSE_TOKENS_MEAN)),
        "staleness_mean": weighted_mean(zip(staleness, samples, strict=True)),
        "staleness_max": max(map(int, finite(column(metrics.STALENESS_MAX))), default=None),
        "samples_produced": _sum(column(metrics.PRODUCED_SAMPLES)),
        "samples_filtered": _sum(column(metrics.FILTERED_SAMPLES)),
        "failures": {
            name.rpartition("/")[2]: _sum(record.column(name))
            for name in sorted(metrics.failures_names(record.columns, task))
        },
        "retries": _sum(record.column(metrics.of_task(metrics.RETRIES, task))),
        "group_s": group_seconds(record, None if alone else task),
    }


def _ends(name: str, values: Series) -> dict[str, float | None]:
    """Return the mean of the first and of the last tenth of the steps."""
    tenth = max(1, len(values) // 10)
    return {f"{name}_first": mean(values[:tenth]), f"{name}_last": mean(values[-tenth:])}


def _sum(values: Iterable[float]) -> int:
    return round(sum(finite(values)))
