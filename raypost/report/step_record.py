"""The record of a train step: what the driver writes of it beside what the trainer returns."""

from __future__ import annotations

from typing import Any

from raypost.observe import metrics
from raypost.types import BatchMetrics, ProduceBatchStatus, ProductionMetrics, TakeStatus, TaskMetrics


def production_record(status: TakeStatus, num_tasks: int) -> dict[str, Any]:
    """Return production's metrics of a step by name; those of metrics.BY_TASK also by task, if there are several."""
    produced, staleness = status.metrics, status.staleness
    record: dict[str, Any] = {
        metrics.STALENESS: list(staleness),
        **_staleness(staleness),
        metrics.BUFFER_GROUPS: status.buffered,
        metrics.TAKE_WAIT_S: status.wait_s,
        metrics.PRODUCED_TOKENS: produced.produced_tokens,
        metrics.FAILED_SAMPLES: produced.failed_samples,
        metrics.EXPIRED_GROUPS: produced.expired_groups,
        metrics.EXPIRED_TOKENS_MEAN: produced.expired_tokens_mean,
        metrics.PAUSE_S: produced.pause_s,
        metrics.EXPIRED_BATCH: status.status == ProduceBatchStatus.EXPIRED_BATCH,
        **_produced(produced),
        **_failures(produced),
    }
    if num_tasks > 1:
        for task, finished in produced.tasks.items():
            record |= {metrics.of_task(name, task): value for name, value in _produced(finished).items()}
        for task, batch in status.tasks.items():
            record |= {metrics.of_task(name, task): value for name, value in _batch(batch).items()}
    return record


def _staleness(staleness: tuple[int, ...] | list[int]) -> dict[str, float]:
    mean = sum(staleness) / max(1, len(staleness))
    return {metrics.STALENESS_MAX: max(staleness, default=0), metrics.STALENESS_MEAN: mean}


def _produced(produced: ProductionMetrics | TaskMetrics) -> dict[str, Any]:
    """Return what became of the groups that ended, of one task or of all."""
    record: dict[str, Any] = {
        metrics.PRODUCED_SAMPLES: produced.produced_samples,
        metrics.FILTERED_SAMPLES: produced.filtered_samples,
    }
    if produced.group_s:
        record[metrics.GROUP_S] = [round(seconds, 3) for seconds in produced.group_s]
        record |= metrics.percentiles_of(produced.group_s)
    if produced.raw_rewards_count:
        record[metrics.RAW_REWARD_MEAN] = produced.raw_rewards_sum / produced.raw_rewards_count
    return record


def _batch(batch: BatchMetrics) -> dict[str, float]:
    record = {metrics.NUM_SAMPLES: batch.num_samples, **_staleness(batch.staleness)}
    if batch.num_samples:
        record[metrics.RESPONSE_TOKENS_MEAN] = batch.response_tokens / batch.num_samples
    if batch.rewards_count:
        record[metrics.REWARD_MEAN] = batch.rewards_sum / batch.rewards_count
    return record


def _failures(produced: ProductionMetrics) -> dict[str, int]:
    """Return what the world failed, and what is played again: only what happened."""
    record = {metrics.of_task(metrics.RETRIES, task): number for task, number in produced.retries.items()}
    for task, failures in produced.failures.items():
        record |= {metrics.failure(task, boundary): number for boundary, number in failures.items()}
    return record
