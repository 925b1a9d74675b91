"""Version arithmetic, row by row (N1 to N7, N23)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypost.types import NO_VERSION
from raypost.types.staleness import (
    NEVER,
    expiry_steps,
    fresh_tokens,
    is_expired,
    newest_trained_versions,
    oldest_so_far,
    oldest_version,
    oldest_versions,
    production_expired,
    stale_threshold,
    staleness_of,
    trajectory_staleness,
)
from tests.unit.production import state


@pytest.mark.parametrize(
    ("max_staleness", "interval", "threshold"), [(0, 1, 1), (0, 4, 4), (1, 1, 2), (1, 4, 8), (2, 3, 9)]
)
def test_threshold_counts_sync_periods(max_staleness: int, interval: int, threshold: int) -> None:
    """N1."""
    assert stale_threshold(max_staleness, interval) == threshold


@pytest.mark.parametrize(
    ("versions", "train_step", "staleness"),
    [
        ([3, 3], 5, 1),
        ([1, 3, 3], 5, 3),
        ([], 9, 0),
        ([4], 5, 0),
        ([3, NO_VERSION, 4], 5, 1),
        ([NO_VERSION], 5, 0),
    ],
)
def test_staleness_is_that_of_the_oldest_policy_token(
    versions: list[int], train_step: int, staleness: int
) -> None:
    """N2; tokens that no policy produced do not count."""
    assert trajectory_staleness(state(versions), train_step) == staleness


def test_expiry_includes_the_threshold() -> None:
    """N3."""
    assert not is_expired(staleness_of(3, train_step=4), 1)
    assert is_expired(staleness_of(3, train_step=5), 1)


@pytest.mark.parametrize(
    ("future_step", "version", "threshold", "expired"),
    [(1, 0, 1, False), (2, 0, 1, True), (4, 0, 4, False), (5, 0, 4, True)],
)
def test_production_may_run_threshold_steps_ahead(
    future_step: int, version: int, threshold: int, expired: bool
) -> None:
    """N4."""
    assert production_expired(future_step, version, threshold) is expired


def test_versions_of_two_continuations_stay_with_their_tokens() -> None:
    """N23."""
    one = state([])
    for version, length in ((5, 3), (7, 2), (8, 4)):
        ids = np.ones(length, np.int32)
        one.append_segment(ids, ids.astype(np.float32), np.full(length, version, np.int32))
    assert one.policy_versions.tolist() == [5, 5, 5, 7, 7, 8, 8, 8, 8]
    assert len(one.logprobs) == len(one.response_mask) == 9
    assert trajectory_staleness(one, 9) == 3


def test_without_a_threshold_nothing_expires() -> None:
    assert not is_expired(10**9, None)
    assert not production_expired(10**9, 0, None)


def test_stale_tokens_are_those_at_the_threshold() -> None:
    """N5: versions 1, 1, 3, 3 at step 5 under a token threshold of 2, before the semantic mask."""
    versions = np.asarray([1, 1, 3, 3, NO_VERSION], np.int32)
    assert fresh_tokens(versions, 5, np.full(5, 2)).tolist() == [False, False, True, True, True]
    assert fresh_tokens(versions, 5, np.full(5, NEVER)).all()


@pytest.mark.parametrize(
    ("versions", "mask", "threshold", "tokens", "step"),
    [
        ([3, 3], [1, 1], 1, None, 5),
        ([1, 3, 3], [1, 1, 1], 4, None, 6),
        ([1, 3], [1, 1], 9, 2, 6),
        ([1, 3], [1, 0], 9, 2, 4),
        ([1, 1], [0, 0], None, 1, NEVER),
        ([1, NO_VERSION], [0, 1], None, 1, NEVER),
        ([NO_VERSION], [0], 1, 1, NEVER),
        ([], [], 1, 1, NEVER),
        ([0], [1], None, None, NEVER),
    ],
)
def test_step_at_which_a_trajectory_is_expired(
    versions: list[int], mask: list[int], threshold: int | None, tokens: int | None, step: int
) -> None:
    """N3, N6, N7: from that step on and not before it."""
    array, offsets = np.asarray(versions, np.int32), np.asarray([0, len(versions)])
    bounds = [np.asarray([NEVER if one is None else one]) for one in (threshold, tokens)]
    newest = newest_trained_versions(array, np.asarray(mask, np.bool_), offsets)
    assert expiry_steps(oldest_versions(array, offsets), newest, *bounds).tolist() == [step]


@given(st.lists(st.lists(st.tuples(st.integers(-1, 5), st.booleans()), max_size=4), max_size=6))
def test_many_trajectories_at_once_are_as_each_alone(shapes: list[list[tuple[int, bool]]]) -> None:
    versions = np.asarray([version for one in shapes for version, _ in one], np.int32)
    mask = np.asarray([trained for one in shapes for _, trained in one], np.bool_)
    offsets = np.cumsum([0, *map(len, shapes)])
    oldest = [oldest_version(state([version for version, _ in one])) for one in shapes]
    assert oldest_versions(versions, offsets).tolist() == [NEVER if one is None else one for one in oldest]
    for one, newest in zip(shapes, newest_trained_versions(versions, mask, offsets).tolist(), strict=True):
        trained = [version for version, is_trained in one if is_trained]
        assert newest == (NEVER if NO_VERSION in trained or not trained else max(trained))


def test_oldest_so_far_begins_anew_with_each_trajectory() -> None:
    versions = np.asarray([3, 4, 4, 2, 5, 4, 6], np.int32)
    trajectories = np.asarray([0, 0, 0, 1, 1, 3, 3], np.int64)
    assert oldest_so_far(versions, trajectories).tolist() == [3, 3, 3, 2, 2, 4, 4]
    assert oldest_so_far(versions[:0], trajectories[:0]).tolist() == []
