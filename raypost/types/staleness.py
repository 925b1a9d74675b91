"""Staleness, thresholds and expiry: all arithmetic on policy versions.

Owns no state. A version is the train step whose weights produced a token (0 = initial). The step that
trains on tokens of the newest possible weights has staleness 0, hence the `- 1` below. A threshold is in train steps;
None means that nothing ever expires.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from raypost.types.arrays import NO_VERSION, IntArray, MaskArray
from raypost.types.rollout import RolloutState

Version = TypeVar("Version", int, IntArray)

NEVER = 1 << 60
"""A train step that does not come; two of them still fit into 64 bits."""


def stale_threshold(max_staleness: int, sync_weights_interval: int) -> int:
    """Return the staleness in train steps from which data is expired; `max_staleness` counts sync periods."""
    return (max_staleness + 1) * sync_weights_interval


def staleness_of(policy_version: Version, train_step: int) -> Version:
    """Return how many train steps older than necessary data of a version is when `train_step` trains on it."""
    return train_step - 1 - policy_version


def oldest_so_far(versions_T: IntArray, trajectory_T: NDArray[np.int64]) -> IntArray:
    """Return for every token the oldest version of its trajectory's tokens up to it.

    `trajectory_T`: which trajectory each token is of; those of one are in a row, in order.
    """
    starts = np.flatnonzero(np.diff(trajectory_T, prepend=-1))
    parts = np.split(versions_T, starts[1:])
    return np.concatenate([np.minimum.accumulate(part) for part in parts])


def oldest_version(state: RolloutState) -> int | None:
    """Return the version of the trajectory's oldest token that a policy produced; None if there is none."""
    versions = state.policy_versions[state.policy_versions != NO_VERSION]
    return int(versions.min()) if len(versions) else None


def trajectory_staleness(state: RolloutState, train_step: int) -> int:
    """Return the staleness of the trajectory's oldest token; 0 if no policy produced any of its tokens."""
    version = oldest_version(state)
    return 0 if version is None else staleness_of(version, train_step)


def is_expired(staleness: int, threshold: int | None) -> bool:
    """Return whether data of that staleness must not be trained any more."""
    return threshold is not None and staleness >= threshold


def production_expired(future_step: int, version: int, threshold: int | None) -> bool:
    """Return whether data made by `version` would be expired when `future_step` trains on it."""
    return is_expired(staleness_of(version, future_step), threshold)


# ---------------------------------------------------------------- many trajectories at once


def oldest_versions(versions: IntArray, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the oldest version of each trajectory's tokens; NEVER where no policy produced any of them.

    Trajectory n has the tokens `versions[offsets[n]:offsets[n + 1]]`.
    """
    return _version_or_never(_reduced(np.minimum, _unsigned(versions), offsets, _UNSIGNED_NONE))


def newest_trained_versions(
    versions: IntArray, mask: MaskArray, offsets: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the newest version of each trajectory's trained tokens, those in `mask`.

    NEVER where it trains none, or one that no policy produced: such a trajectory cannot lose all of them by age.
    """
    newest = _reduced(np.maximum, np.where(mask, _unsigned(versions), 0), offsets, _UNSIGNED_NONE)
    trained = _reduced(np.logical_or, mask, offsets, False)
    return _version_or_never(np.where(trained, newest, _UNSIGNED_NONE))


def expiry_steps(
    oldest: NDArray[np.int64],
    newest_trained: NDArray[np.int64],
    threshold: NDArray[np.int64],
    token_threshold: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return the first train step at which each trajectory is expired; NEVER as version or threshold gives it.

    Then its oldest token has reached `threshold`, or all tokens that it trains have reached `token_threshold`.
    """
    by_age, by_tokens = oldest + 1 + threshold, newest_trained + 1 + token_threshold
    expired: NDArray[np.int64] = np.minimum(np.minimum(by_age, by_tokens), NEVER)
    return expired


def fresh_tokens(versions: IntArray, train_step: int, token_threshold: NDArray[np.int64]) -> MaskArray:
    """Return whether each token is younger than its token threshold; those that no policy produced have no age."""
    fresh: MaskArray = (staleness_of(versions, train_step) < token_threshold) | (versions == NO_VERSION)
    return fresh


# Read as unsigned, NO_VERSION is the greatest version there is: it never is the oldest, and no token is newer.
_UNSIGNED_NONE = np.uint32(NO_VERSION & 0xFFFFFFFF)


def _unsigned(versions: IntArray) -> NDArray[np.uint32]:
    return np.ascontiguousarray(versions, np.int32).view(np.uint32)


def _version_or_never(versions: NDArray[np.uint32]) -> NDArray[np.int64]:
    return np.where(versions == _UNSIGNED_NONE, NEVER, versions.astype(np.int64))


def _reduced(reduce: np.ufunc, values: NDArray[Any], offsets: NDArray[np.int64], empty: Any) -> NDArray[Any]:
    # reduceat gives an empty slice its neighbour's value.
    reduced = np.full(len(offsets) - 1, empty, values.dtype)
    filled = np.flatnonzero(np.diff(offsets))
    if len(filled):
        reduced[filled] = reduce.reduceat(values, offsets[filled])
    return reduced
