"""Version arithmetic, row by row (N1 to N4, N23)."""

from __future__ import annotations

import numpy as np
import pytest

from raypost.staleness import (
    group_staleness,
    is_expired,
    production_expired,
    stale_threshold,
    staleness_of,
    trajectory_staleness,
)
from raypost.types import NO_VERSION
from tests.unit.production import group, state


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


def test_group_is_as_stale_as_its_stalest_member() -> None:
    assert group_staleness(group(0, [4, 4], [2, 4], []), 5) == 2


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
