"""Counters of production (N13)."""

from __future__ import annotations

import pytest

from raypost.errors import CheckpointError
from raypost.production.progress import ProduceProgress


def progress_of(*tasks: str, share: int = 4) -> ProduceProgress:
    return ProduceProgress(tasks, lambda step: dict.fromkeys(tasks, share))


def test_targets_are_raised_once_a_step() -> None:
    """N13."""
    progress = progress_of("a")
    for _ in range(3):
        progress.ensure_target_upto("a", 3)
        assert (progress.target, progress.target_upto) == ({"a": 12}, {"a": 3})
    progress.ensure_target_upto("a", 2)
    assert progress.target == {"a": 12}


def test_tasks_have_steps_of_their_own() -> None:
    progress = progress_of("a", "b")
    progress.ensure_target_upto("a", 5)
    progress.ensure_target_upto("b", 2)
    assert progress.target == {"a": 20, "b": 8}
    assert (progress.target_at("a", 2), progress.target_at("b", 2)) == (8, 8)
    progress.producer_future_step["a"] += 1
    assert progress.producer_future_step == {"a": 2, "b": 1}


def test_what_a_step_is_allotted_is_fixed_when_it_is_first_asked_for() -> None:
    shares = iter(range(1, 100))
    progress = ProduceProgress(["a"], lambda step: {"a": next(shares)})
    assert [progress.allocation(step)["a"] for step in (3, 1, 3, 2)] == [1, 2, 1, 3]
    restored = ProduceProgress(["a"], lambda step: {"a": 1000})
    restored.load_state_dict(progress.state_dict())
    assert [restored.allocation(step)["a"] for step in (1, 2, 3, 4)] == [2, 3, 1, 1000]
    restored.forget(2)
    assert [restored.allocation(step)["a"] for step in (3, 4)] == [1, 1000]
    assert restored.allocation(1) == {"a": 1000}


def test_a_step_that_is_not_in_the_saved_model_is_not_taken_in_the_state() -> None:
    progress = progress_of("a")
    progress.ensure_target_upto("a", 3)
    progress.consume(1, {"a": 4})
    progress.consume(2, {"a": 3})
    assert (progress.consumed, progress.waived, progress.available("a", 2)) == ({"a": 7}, {"a": 1}, 10)
    restored = progress_of("a")
    restored.load_state_dict(progress.state_dict(undone={2: {"a": 3}}))
    assert (restored.consumed, restored.waived, restored.next_consumer_step) == ({"a": 4}, {"a": 0}, 2)


def test_consumed_is_what_was_taken() -> None:
    progress = progress_of("a", "b")
    progress.consume(1, {"a": 3})
    assert progress.consumed == {"a": 3, "b": 0}
    assert progress.next_consumer_step == 2
    assert progress.producer_future_step == {"a": 1, "b": 1}


def test_metrics_are_read_once_and_zeroed() -> None:
    progress = progress_of("a")
    progress.metrics.of_task("a").count([1.0] * 5, False, 2.0)
    progress.count_expired(10.0)
    progress.count_expired(20.0)
    first, second = progress.read_metrics(), progress.read_metrics()
    assert (first.produced_samples, first.expired_groups, first.expired_tokens_mean) == (5, 2, 15.0)
    assert (second.produced_samples, second.expired_groups, second.group_s) == (0, 0, [])


def test_restore_changes_the_dicts_that_others_hold() -> None:
    saved, progress = progress_of("a"), progress_of("a")
    saved.ensure_target_upto("a", 2)
    saved.consume(1, {"a": 4})
    saved.producer_future_step["a"] += 1
    saved.metrics.failed_samples = 3
    target, consumed = progress.target, progress.consumed
    state = saved.state_dict()
    del state["metrics"]["pause_s"]
    progress.load_state_dict(state)
    assert target is progress.target and target == {"a": 8}
    assert consumed is progress.consumed and consumed == {"a": 4}
    assert (progress.producer_future_step, progress.next_consumer_step, progress.target_upto) == (
        {"a": 2},
        2,
        {"a": 2},
    )
    assert (progress.metrics.failed_samples, progress.metrics.pause_s) == (3, 0.0)


def test_foreign_or_damaged_state_is_refused() -> None:
    with pytest.raises(CheckpointError, match="this run has"):
        progress_of("a").load_state_dict(progress_of("b").state_dict())
    with pytest.raises(CheckpointError, match="damaged"):
        progress_of("a").load_state_dict({})
