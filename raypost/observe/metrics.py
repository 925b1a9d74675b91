"""Names of metrics, reading one from a record, and the figures of judges, which several judges add to.

A train step's record, in metrics.jsonl and TensorBoard, is what the trainer returns, what production reports with the
batch, and what the driver adds; an evaluation's scores are records of their own. Every name is defined here, once.
The trainer's figures also come as `<name>_lagK`, over the tokens whose policy is K steps old. In a run of several tasks
those of BY_TASK also come as `<name>/<task>`. docs/metrics.md says what each is, and its unit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

# The batch that was trained.
NUM_SAMPLES = "num_samples"
RESPONSE_TOKENS = "response_tokens"
"""Trained tokens."""
RESPONSE_TOKENS_MEAN = "response_tokens_mean"
"""Of the trained samples."""
REWARD_MEAN = "reward_mean"
"""Of the trained samples."""
LEFT_OUT = "left_out"
"""Samples of the batch that could not be trained; the log says why."""

# The optimizer.
LEARNING_RATE = "lr"
GRAD_NORM = "grad_norm"
SKIPPED_STEPS = "skipped_steps"
"""Optimizer steps skipped since the run began."""
STEP_S = "step_s"
TOKENS_PER_S = "tokens_per_s"
"""Trained tokens a second."""

# Losses: means over the minibatches of a step.
LOSS = "loss"
POLICY_LOSS = "policy_loss"
KL_LOSS = "kl_loss"
REFERENCE_KL = "reference_kl"
"""Nats a token."""
ENTROPY = "entropy"
"""Nats a token."""
SFT_LOSS = "sft_loss"
SFT_TOKENS = "sft_tokens"
VALUE_LOSS = "value_loss"
VALUE_MEAN = "value_mean"
VALUE_CLIP_FRACTION = "value_clip_fraction"
RETURN_MEAN = "return_mean"
EXPLAINED_VARIANCE = "explained_variance"

# Rollout against trainer, and the clip of the loss.
LOGPROB_MISMATCH_MAX = "logprob_mismatch_max"
"""Largest absolute difference between a rollout's logprob and the trainer's, over the on-policy tokens."""
LOGPROB_MISMATCH_MEAN = "logprob_mismatch_mean"
ROLLOUT_KL = "rollout_kl"
ROLLOUT_KL_K3 = "rollout_kl_k3"
ROLLOUT_RATIO_MEAN = "rollout_ratio_mean"
ROLLOUT_RATIO_MAX = "rollout_ratio_max"
ROLLOUT_RATIO_MIN = "rollout_ratio_min"
EFFECTIVE_SAMPLE_SIZE = "effective_sample_size"
REJECTED_FRACTION = "rejected_fraction"
TOKEN_FRACTION = "token_fraction"
IMPORTANCE_WEIGHT_MEAN = "importance_weight_mean"
CLIP_FRACTION = "clip_fraction"
RATIO_MEAN = "ratio_mean"
RATIO_MAX = "ratio_max"
RATIO_MIN = "ratio_min"

# Production, since the batch before.
STALENESS = "staleness"
"""A list: staleness of each group of the batch."""
STALENESS_MAX = "staleness_max"
STALENESS_MEAN = "staleness_mean"
BUFFER_GROUPS = "buffer_groups"
TAKE_WAIT_S = "take_wait_s"
PAUSE_S = "pause_s"
PRODUCED_SAMPLES = "produced_samples"
PRODUCED_TOKENS = "produced_tokens"
FAILED_SAMPLES = "failed_samples"
FILTERED_SAMPLES = "filtered_samples"
EXPIRED_GROUPS = "expired_groups"
EXPIRED_TOKENS_MEAN = "expired_tokens_mean"
EXPIRED_BATCH = "expired_batch"
"""Whether production stood still until newer weights came."""
RAW_REWARD_MEAN = "raw_reward_mean"
"""Of all judged samples, before any filter."""
GROUP_S = "group_s"
"""A list: seconds that each group took that finished, judging included."""
GROUP_S_P50, GROUP_S_P90, GROUP_S_P99 = "group_s_p50", "group_s_p90", "group_s_p99"
"""Its percentiles."""
GROUP_S_PERCENTILES = {GROUP_S_P50: 50, GROUP_S_P90: 90, GROUP_S_P99: 99}

BY_TASK = (
    NUM_SAMPLES, REWARD_MEAN, RESPONSE_TOKENS_MEAN, STALENESS_MEAN, STALENESS_MAX,
    PRODUCED_SAMPLES, FILTERED_SAMPLES, RAW_REWARD_MEAN, GROUP_S, *GROUP_S_PERCENTILES,
)  # fmt: skip

FAILURES = "failures"
"""As `failures/<task>/<boundary>`: trajectories that the world failed there, those played again included."""
RETRIES = "retries"
"""As `retries/<task>`: trajectories that are played again."""

# Judges, as `<name>/<task>`: what they did since the step before, as far as telemetry has heard of it.
JUDGE_S = "judge_s"
"""Mean seconds of a call, which scores a group."""
JUDGE_S_MAX = "judge_s_max"
JUDGE_FAILED = "judge_failed"
"""Responses that got no score."""
JUDGE_RETRIES = "judge_retries"
REWARD_PART = "reward_part"
"""As `reward_part/<task>/<part>`: mean of a part of the reward, of all judged samples before any filter."""

# The driver.
SYNC_S = "sync_s"
SYNC_BYTES = "sync_bytes"
SYNC_SPARED_BYTES = "sync_spared_bytes"
"""Of the last weight sync, per worker: what was sent, and what was not since it did not change."""
TRANSPORT_FAILED = "transport_failed"
"""Versions so far that did not come by the way that was asked for."""
DRIVER_RSS_BYTES = "driver_rss_bytes"

# An evaluation.
HELD_OUT = "held_out"
"""Mean held-out score, in an evaluation's scores and in the steps after it."""
EVAL_FAILED = "eval_failed"
"""Responses of an evaluation that have no score."""
EVAL_TOKENS_MEAN = "eval_tokens_mean"
"""Of an evaluation's responses, failed ones included."""


def of_task(name: str, task: str) -> str:
    """Return the name of a metric of one task."""
    return f"{name}/{task}"


def value_of(record: Mapping[str, Any], name: str, task: str, alone: bool) -> Any:
    """Return a task's value of a metric of BY_TASK; `alone`: it is the run's only task. None if it has none."""
    return record.get(name if alone else of_task(name, task))


def failure(task: str, boundary: str) -> str:
    """Return the name of the count of what the world failed of a task at a boundary."""
    return f"{FAILURES}/{task}/{boundary}"


def failures_names(names: Iterable[str], task: str) -> list[str]:
    """Return those of the names that count what the world failed of a task."""
    return [name for name in names if name.startswith(failure(task, ""))]


def failures_of(record: Mapping[str, Any], task: str) -> dict[str, float]:
    """Return the trajectories of a task that the world failed, by boundary."""
    return {name.rpartition("/")[2]: record[name] for name in failures_names(record, task)}


def percentiles_of(seconds: Sequence[float] | NDArray[np.float64]) -> dict[str, float]:
    """Return the percentiles of the seconds that groups took, by name; {} without any."""
    if not len(seconds):
        return {}
    found = np.percentile(seconds, list(GROUP_S_PERCENTILES.values()))
    return dict(zip(GROUP_S_PERCENTILES, map(float, found), strict=True))


def reward_part(task: str, part: str) -> str:
    """Return the name of the mean of a part of a task's rewards."""
    return f"{REWARD_PART}/{task}/{part}"


@dataclass(slots=True, kw_only=True)
class JudgeFigures:
    """What judges did for one task over some time: sums."""

    calls: int = 0
    """Of groups, or what was left of them."""
    seconds: float = 0.0
    """Of all calls; waiting for the judge's turn is part of it."""
    seconds_max: float = 0.0
    failed: int = 0
    """Responses that got no score."""
    retries: int = 0
    """Calls that were made once more because a function's process died."""
    parts: dict[str, tuple[float, int]] = field(default_factory=dict)
    """(sum, number of responses) of every part of the rewards by name; evaluation's are left out."""

    def count(self, seconds: float, num_failed: int = 0) -> None:
        """Count one call."""
        self.calls += 1
        self.seconds += seconds
        self.seconds_max = max(self.seconds_max, seconds)
        self.failed += num_failed

    def count_retry(self) -> None:
        """Count a call that is made once more."""
        self.retries += 1

    def count_parts(self, parts: Mapping[str, float]) -> None:
        """Count the parts of one reward."""
        self._add_parts({name: (value, 1) for name, value in parts.items()})

    def _add_parts(self, parts: Mapping[str, tuple[float, int]]) -> None:
        for name, (value, number) in parts.items():
            before = self.parts.get(name, (0.0, 0))
            self.parts[name] = (before[0] + value, before[1] + number)

    def add(self, other: JudgeFigures) -> None:
        """Add those of another time or another judge."""
        self.calls += other.calls
        self.seconds += other.seconds
        self.seconds_max = max(self.seconds_max, other.seconds_max)
        self.failed += other.failed
        self.retries += other.retries
        self._add_parts(other.parts)

    def drain(self) -> JudgeFigures:
        """Return a copy, and begin again at zero."""
        copy = replace(self)
        self.calls = self.failed = self.retries = 0
        self.seconds = self.seconds_max = 0.0
        self.parts = {}
        return copy

    def part_means(self) -> dict[str, float]:
        """Return the mean of every part."""
        return {name: value / number for name, (value, number) in self.parts.items()}

    def as_dict(self) -> dict[str, Any]:
        """Return the sums as plain data."""
        return asdict(self)

    def metrics(self, task: str) -> dict[str, float]:
        """Return the figures under their names in a step's record."""
        named = {
            JUDGE_S: self.seconds / max(1, self.calls),
            JUDGE_S_MAX: self.seconds_max,
            JUDGE_FAILED: self.failed,
            JUDGE_RETRIES: self.retries,
        }
        parts = {reward_part(task, name): value for name, value in self.part_means().items()}
        return {of_task(name, task): value for name, value in named.items()} | parts


def pass_at(k: int) -> str:
    """Return the name of pass@k."""
    return f"pass@{k}"


def bounds_of(name: str) -> tuple[str, str]:
    """Return the names of the bounds of an evaluation's statistic; `x_low/task` and so on for `x/task`."""
    statistic, slash, task = name.partition("/")
    return f"{statistic}_low{slash}{task}", f"{statistic}_high{slash}{task}"


def bounds(scores: Mapping[str, Any], name: str) -> tuple[float, float] | None:
    """Return the interval of a statistic among an evaluation's scores; None if it has none."""
    low, high = (scores.get(bound) for bound in bounds_of(name))
    return None if low is None or high is None else (low, high)


def finite_floats(values: Mapping[str, object]) -> dict[str, float]:
    """Return the entries that are single finite numbers, as floats."""
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, (Real, np.bool_)) and math.isfinite(value)
    }
