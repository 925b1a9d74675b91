"""The only arithmetic on policy versions: staleness, thresholds, expiry.

Owns no state. A version is the train step whose weights produced a token (0 = initial). The step that
trains on tokens of the newest possible weights has staleness 0, hence the `- 1` below; it stands nowhere
else.
"""

from __future__ import annotations

from raypost.types import NO_VERSION, Group, RolloutState


def stale_threshold(max_staleness: int, sync_weights_interval: int) -> int:
    """Staleness in train steps from which data is expired; `max_staleness` counts sync periods."""
    return (max_staleness + 1) * sync_weights_interval


def staleness_of(policy_version: int, train_step: int) -> int:
    """How many steps older than necessary data of `policy_version` is when `train_step` trains on it."""
    return train_step - 1 - policy_version


def oldest_version(state: RolloutState) -> int | None:
    """Version of the trajectory's oldest token that a policy produced, or None if it has no such token."""
    versions = state.policy_versions[state.policy_versions != NO_VERSION]
    return int(versions.min()) if len(versions) else None


def trajectory_staleness(state: RolloutState, train_step: int) -> int:
    """Staleness of the trajectory's oldest token; 0 when no policy produced any of its tokens."""
    version = oldest_version(state)
    return 0 if version is None else staleness_of(version, train_step)


def group_staleness(group: Group, train_step: int) -> int:
    """Staleness of the group's stalest member."""
    return max(trajectory_staleness(state, train_step) for state in group.states)


def is_expired(staleness: int, threshold: int) -> bool:
    """Whether data of that staleness must not be trained any more."""
    return staleness >= threshold


def production_expired(future_step: int, version: int, threshold: int) -> bool:
    """Whether data made by `version` would be expired already when `future_step` trains on it."""
    return is_expired(staleness_of(version, future_step), threshold)
