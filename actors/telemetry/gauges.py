"""What Prometheus sees of a run, as ray_raypost_...: gauges that hold, and counters.

Ray's agent drops a gauge that was not set for two report intervals (`metrics_report_interval_ms`, 10 s each by default:
ray/_private/telemetry/open_telemetry_metric_recorder.py), however long its value holds. So they are set again.
"""

from __future__ import annotations

import time
from collections import Counter as Counts
from collections.abc import Mapping, Sequence
from typing import Any

from ray.util.metrics import Counter, Gauge

from raypost.faults import Incident
from raypost.observe import metrics
from raypost.types import GroupCounts

GAUGES = {
    "step": "Last train step",
    "reward_mean": "Mean reward of the last step, before any filter",
    "held_out_score": "Mean held-out score of the last evaluation",
    "buffer_groups": "Completed groups in the replay buffer",
    "staleness_max": "Largest staleness of the last batch, train steps",
    "sync_seconds": "Duration of the last weight sync",
    "tokens_rate": "Tokens the engines generate a second",
    "requests_running": "Requests the engines decode now",
    "peak_memory_bytes": "Most memory of the run's processes on this node so far",
}
OF_TASKS = {
    "task_reward_mean": (metrics.RAW_REWARD_MEAN, "Mean reward since the step before, before any filter"),
    "task_trained_reward_mean": (metrics.REWARD_MEAN, "Mean reward of the last batch"),
    "task_response_tokens": (metrics.RESPONSE_TOKENS_MEAN, "Mean response length of the last batch"),
    "task_staleness_mean": (metrics.STALENESS_MEAN, "Mean staleness of the last batch, train steps"),
    "task_group_seconds_p50": (metrics.GROUP_S_P50, "Median of the seconds that a group takes"),
    "task_group_seconds_p90": (metrics.GROUP_S_P90, "90th percentile of the seconds that a group takes"),
    "task_group_seconds_p99": (metrics.GROUP_S_P99, "99th percentile of the seconds that a group takes"),
}
"""Gauges by task: the metric that each shows, and what it is."""
OTHER_GAUGES = {
    "groups": ("Groups by where they are", ("state",)),
    "reward_part": ("Mean of a part of the reward", ("task", "part")),
    "judge_seconds": ("Mean duration of a judge's call", ("task",)),
    "pool_target": ("Workers that a rollout pool is to have", ("pool",)),
    "workers": ("Rollout workers of a pool by their state", ("pool", "state")),
}
COUNTERS = {
    "tokens_total": ("Tokens the engines generated", ()),
    "task_filtered_total": ("Samples that a filter took", ("task",)),
    "task_failures_total": ("Trajectories that the world failed", ("task", "boundary")),
    "task_retries_total": ("Trajectories that are played again", ("task",)),
    "judge_failed_total": ("Responses without a score", ("task",)),
    "judge_retries_total": ("Repeated calls of a judge", ("task",)),
}


class RunGauges:
    """The gauges and counters of one run; all have the label `run`."""

    def __init__(self, run: str, tasks: Sequence[str]) -> None:
        """Register them; each is shown once it has a value."""
        self._run = {"run": run}
        self._tasks = list(tasks)
        labels: dict[str, tuple[str, tuple[str, ...]]] = {name: (text, ()) for name, text in GAUGES.items()}
        labels |= {name: (text, ("task",)) for name, (_, text) in OF_TASKS.items()}
        self._gauges = {
            name: Gauge(f"raypost_{name}", text, ("run", *tags))
            for name, (text, tags) in (labels | OTHER_GAUGES).items()
        }
        self._counters = {
            name: Counter(f"raypost_{name}", text, ("run", *tags)) for name, (text, tags) in COUNTERS.items()
        }
        self._held: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        """Value of each gauge and labels that was set."""
        self._last_s: float | None = None

    def set(self, name: str, value: float | None, **labels: str) -> None:
        """Set a gauge; None is not known, and leaves what was."""
        if value is not None:
            self._held[name, frozenset(labels.items())] = value
            self._gauges[name].set(value, tags=self._run | labels)

    def hold(self) -> None:
        """Set every gauge to its last value again."""
        for (name, labels), value in self._held.items():
            self._gauges[name].set(value, tags=self._run | dict(labels))

    def count(self, name: str, number: float, **labels: str) -> None:
        """Add to a counter."""
        if number > 0:
            self._counters[name].inc(number, tags=self._run | labels)

    def step(self, step: int, values: Mapping[str, Any]) -> None:
        """Show a train step's record."""
        known = metrics.finite_floats(values)
        self.set("step", step)
        self.set("reward_mean", known.get(metrics.RAW_REWARD_MEAN, known.get(metrics.REWARD_MEAN)))
        self.set("buffer_groups", known.get(metrics.BUFFER_GROUPS))
        self.set("staleness_max", known.get(metrics.STALENESS_MAX))
        alone = len(self._tasks) == 1
        for task in self._tasks:
            for name, (metric, _) in OF_TASKS.items():
                self.set(name, metrics.value_of(known, metric, task, alone), task=task)
            filtered = metrics.value_of(known, metrics.FILTERED_SAMPLES, task, alone)
            self.count("task_filtered_total", filtered or 0, task=task)
            self.count("task_retries_total", known.get(metrics.of_task(metrics.RETRIES, task), 0), task=task)
            for boundary, number in metrics.failures_of(known, task).items():
                self.count("task_failures_total", number, task=task, boundary=boundary)

    def groups(self, counts: GroupCounts) -> None:
        """Show where the groups are."""
        for state, count in counts.as_dict().items():
            self.set("groups", count, state=state)

    def workers(self, pool: str, states: Mapping[str, str]) -> None:
        """Show how many workers a pool has in each state, by the name of its controller."""
        numbers = Counts(state.partition(",")[0] for state in states.values())
        known = {dict(labels)["state"] for name, labels in self._held if name == "workers"}
        for state in known | numbers.keys():
            self.set("workers", numbers[state], pool=pool, state=state)

    def incident(self, incident: Incident, fields: Mapping[str, Any]) -> None:
        """Show what an incident changed."""
        if incident is Incident.POOL_RESIZED:
            self.set("pool_target", fields["target"], pool=fields["pool"])

    def judge(self, task: str, figures: metrics.JudgeFigures) -> None:
        """Show what the judges of a task did since the last call."""
        self.set("judge_seconds", figures.seconds / max(1, figures.calls), task=task)
        for part, mean in figures.part_means().items():
            self.set("reward_part", mean, task=task, part=part)
        self.count("judge_failed_total", figures.failed, task=task)
        self.count("judge_retries_total", figures.retries, task=task)

    def tokens(self, new: int, running: int) -> None:
        """Show what the engines generated since the last call, and how many requests they decode."""
        now = time.monotonic()
        self.count("tokens_total", new)
        if self._last_s is not None:
            self.set("tokens_rate", new / max(1e-3, now - self._last_s))
        self._last_s = now
        self.set("requests_running", running)
