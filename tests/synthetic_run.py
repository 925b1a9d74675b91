"""A made-up run whose figures can be computed by hand: what the report's tests and previews read."""

from __future__ import annotations

import math

import numpy as np

from raypost.config import Config
from raypost.observe.spans import Span
from raypost.types import GroupCounts, SyncReport
from tests.factories import make_config

START_S = 1_700_000_000.0
STEPS = 80
CYCLE_S = 0.75
"""One step: 0.5 s training, 0.05 s pause, 0.05 s sync, 0.15 s waiting for a batch."""
TRAIN_S, PAUSE_S, SYNC_S = 0.5, 0.05, 0.05
FIRST_EVAL_S, FIRST_BATCH_S = 2.0, 1.0
PRODUCTION_S = 20.0 + FIRST_EVAL_S
"""When production starts, seconds after the run: start-up, then the first evaluation."""
GROUPS = 16


def config(**overrides: object) -> Config:
    """A small valid configuration."""
    raw = {
        "name": "synthetic",
        "tasks": [{"source": {"kind": "reasoning_gym", "dataset": "basic_arithmetic"}, "group_size": 8}],
        "train": {"num_steps": STEPS, "batch_size": GROUPS},
    }
    return make_config(**raw | overrides)


def sync_report(version: int) -> SyncReport:
    return SyncReport(
        version=version,
        digest="0" * 32,
        num_workers=1,
        nbytes=3_200_000,
        seconds=SYNC_S,
        publish_s=0.02,
        load_s=0.02,
        canary_s=0.005,
        canary_difference=1.5e-6,
    )


def train_start_s(step: int) -> float:
    return START_S + PRODUCTION_S + FIRST_BATCH_S + (step - 1) * CYCLE_S


def step_spans(step: int) -> list[Span]:
    """The spans of one step. Rollout runs all the time but for the pause and the sync."""
    start = train_start_s(step)
    pause = start + TRAIN_S
    sync = pause + PAUSE_S
    resumed = sync + SYNC_S
    produced_since = START_S + PRODUCTION_S if step == 1 else start - (CYCLE_S - TRAIN_S - PAUSE_S - SYNC_S)
    return [
        Span(actor="trainer-0", kind="train", start_s=start, end_s=pause),
        Span(actor="producer", kind="pause", start_s=pause, end_s=sync),
        Span(actor="weight-broadcaster", kind="sync", start_s=sync, end_s=resumed),
        Span(actor="rollout-worker-0", kind="rollout", start_s=produced_since, end_s=pause),
    ]


def first_spans() -> list[Span]:
    """The first sync and the evaluation before training, in which the engine is busy too."""
    sync, evaluate = START_S + 19.5, START_S + 20.0
    return [
        Span(actor="weight-broadcaster", kind="sync", start_s=sync, end_s=sync + SYNC_S),
        Span(actor="evaluator", kind="evaluate", start_s=evaluate, end_s=evaluate + FIRST_EVAL_S),
        Span(actor="rollout-worker-0", kind="rollout", start_s=evaluate, end_s=evaluate + FIRST_EVAL_S),
    ]


def last_spans(step: int = STEPS) -> list[Span]:
    """The evaluation after the last step."""
    start = train_start_s(step + 1)
    return [
        Span(actor="evaluator", kind="evaluate", start_s=start, end_s=start + FIRST_EVAL_S),
        Span(actor="rollout-worker-0", kind="rollout", start_s=start, end_s=start + FIRST_EVAL_S),
    ]


def staleness(step: int) -> list[int]:
    """A quarter of every batch is fresh, the rest one step old; the first step has nothing older."""
    return [0] * GROUPS if step == 1 else [0] * (GROUPS // 4) + [1] * (GROUPS - GROUPS // 4)


def metrics(step: int, steps: int = STEPS) -> dict[str, object]:
    """What a train step of the run reports."""
    noise = np.random.default_rng(step)
    progress = 1 / (1 + math.exp(-6 * (step / steps - 0.35)))
    reward = 0.22 + 0.6 * progress + 0.03 * float(noise.normal())
    lags = staleness(step)
    return {
        "loss": 0.02 * float(noise.normal()),
        "reward_mean": reward,
        "raw_reward_mean": reward,
        "entropy": 1.1 - 0.7 * progress + 0.02 * float(noise.normal()),
        "grad_norm": 0.5 + 0.1 * float(noise.normal()),
        "response_tokens_mean": 9.0 + 2.0 * progress,
        "logprob_mismatch_max": 2e-6 * float(np.exp(0.5 * noise.normal())) if step != 40 else 9e-6,
        "logprob_mismatch_mean": 2e-7,
        "staleness": lags,
        "staleness_max": max(lags),
        "staleness_mean": sum(lags) / len(lags),
        "buffer_groups": int(noise.integers(2, 9)),
        "produced_tokens": 1300,
        "produced_samples": GROUPS * 8,
        "expired_groups": 1 if step % 20 == 0 else 0,
        "expired_tokens_mean": 14.0 if step % 20 == 0 else 0.0,
        "pause_s": PAUSE_S,
        "sync_s": SYNC_S,
        "take_wait_s": 0.15,
    }


def counts(steps: int = STEPS) -> GroupCounts:
    """Adds up: 4 expired, 2 failed, 5 buffered and 3 in flight at the end."""
    trained = steps * GROUPS
    return GroupCounts(sampled=trained + 14, trained=trained, failed=2, expired=4, buffered=5, in_flight=3)
