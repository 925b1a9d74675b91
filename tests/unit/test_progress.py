"""Counters, and the split of a batch (N11 to N13)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypost.errors import CheckpointError, ConfigError
from raypost.progress import ProduceProgress, allocate


@pytest.mark.parametrize(
    ("batch_size", "weights", "shares"),
    [
        (10, [1, 1, 1], [4, 3, 3]),
        (1, [0.6, 0.4], [1, 0]),
        (4, [1, 0], [4, 0]),
        (0, [1, 2], [0, 0]),
        (3, [0.1, 0.1, 0.1], [1, 1, 1]),
    ],
)
def test_batch_is_split_by_largest_remainder(
    batch_size: int, weights: list[float], shares: list[int]
) -> None:
    """N11 and N12: ties by order, a task without weight is present with 0."""
    assert list(allocate(batch_size, {str(i): w for i, w in enumerate(weights)}).values()) == shares


@settings(deadline=None)
@given(
    st.integers(0, 500), st.lists(st.floats(0, 1e3), min_size=1, max_size=8).filter(lambda w: sum(w) > 1e-6)
)
def test_split_adds_up_and_is_off_by_less_than_one(batch_size: int, weights: list[float]) -> None:
    shares = allocate(batch_size, {str(i): w for i, w in enumerate(weights)})
    assert sum(shares.values()) == batch_size
    for share, weight in zip(shares.values(), weights, strict=True):
        assert abs(share - batch_size * weight / sum(weights)) < 1 + 1e-6


@pytest.mark.parametrize("weights", [{}, {"a": 0.0}, {"a": -1.0, "b": 2.0}])
def test_weights_that_cannot_be_split_are_refused(weights: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="task weights"):
        allocate(4, weights)
    with pytest.raises(ConfigError, match="batch_size"):
        allocate(-1, {"a": 1.0})


def test_targets_are_raised_once_a_step() -> None:
    """N13."""
    progress = ProduceProgress(["a"])
    for _ in range(3):
        progress.ensure_target_upto(3, {"a": 4})
        assert (progress.target, progress.target_upto) == ({"a": 12}, 3)
    progress.ensure_target_upto(2, {"a": 4})
    assert progress.target == {"a": 12}


def test_consumed_is_what_was_taken() -> None:
    progress = ProduceProgress(["a", "b"])
    progress.consume(1, {"a": 3})
    assert progress.consumed == {"a": 3, "b": 0}
    assert progress.next_consumer_step == 2
    assert progress.producer_future_step == 1


def test_metrics_are_read_once_and_zeroed() -> None:
    progress = ProduceProgress(["a"])
    progress.metrics.produced_samples += 5
    progress.count_expired(10.0)
    progress.count_expired(20.0)
    first, second = progress.read_metrics(), progress.read_metrics()
    assert (first.produced_samples, first.expired_groups, first.expired_tokens_mean) == (5, 2, 15.0)
    assert (second.produced_samples, second.expired_groups, second.group_s) == (0, 0, [])


def test_restore_changes_the_dicts_that_others_hold() -> None:
    saved, progress = ProduceProgress(["a"]), ProduceProgress(["a"])
    saved.ensure_target_upto(2, {"a": 4})
    saved.consume(1, {"a": 4})
    saved.advance_future_step()
    saved.metrics.failed_samples = 3
    target, consumed = progress.target, progress.consumed
    state = saved.state_dict()
    del state["metrics"]["pause_s"]
    progress.load_state_dict(state)
    assert target is progress.target and target == {"a": 8}
    assert consumed is progress.consumed and consumed == {"a": 4}
    assert (progress.producer_future_step, progress.next_consumer_step, progress.target_upto) == (2, 2, 2)
    assert (progress.metrics.failed_samples, progress.metrics.pause_s) == (3, 0.0)


def test_foreign_or_damaged_state_is_refused() -> None:
    with pytest.raises(CheckpointError, match="this run has"):
        ProduceProgress(["a"]).load_state_dict(ProduceProgress(["b"]).state_dict())
    with pytest.raises(CheckpointError, match="damaged"):
        ProduceProgress(["a"]).load_state_dict({})
