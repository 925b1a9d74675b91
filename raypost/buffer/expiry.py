"""Expiry: what the staleness limits of the tasks mean for groups in columnar form.

Owns no group and no arithmetic on versions (staleness.py). Nothing here changes its arguments, but for `mask`,
which works on a batch that belongs to its caller.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from raypost.buffer.status_index import StoredGroup
from raypost.errors import CheckpointError, ConfigError
from raypost.types import Status, TaskLimits
from raypost.types.packed import PackedGroups, group_starts, pack_groups, unpack_groups
from raypost.types.staleness import (
    NEVER,
    expiry_steps,
    fresh_tokens,
    newest_trained_versions,
    oldest_versions,
    staleness_of,
)


class Expiry:
    """The limits of all tasks, applied."""

    def __init__(self, limits: dict[str, TaskLimits]) -> None:
        """Raise ConfigError for a task that would keep groups that are never generated again."""
        for task, one in limits.items():
            if one.max_tries is not None and not one.retry:
                raise ConfigError(
                    f"task {task!r} keeps a group as EXPIRED after {one.max_tries} tries, but never generates "
                    "one again: set retry, or no max_tries"
                )
        self._limits = dict(limits)

    @property
    def tasks(self) -> list[str]:
        """All tasks."""
        return list(self._limits)

    def limits_of(self, task: str) -> TaskLimits:
        """Return the limits of a task. Raises ConfigError for an unknown one."""
        if task not in self._limits:
            raise ConfigError(f"the buffer knows no task {task!r}, only {sorted(self._limits)}")
        return self._limits[task]

    def check_tasks(self, tasks: Collection[str], where: str) -> None:
        """Raise CheckpointError if `where` has others than these."""
        if foreign := set(tasks) - self._limits.keys():
            raise CheckpointError(f"{where} has tasks {sorted(foreign)}, this run has {sorted(self._limits)}")

    def facts(self, packed: PackedGroups) -> Iterator[tuple[int, int, int]]:
        """Yield `oldest`, `expires_at` and `nbytes` of every group, as StoredGroup has them."""
        if not packed.num_groups:
            return iter(())
        starts = group_starts(packed)
        oldest, expires = (np.minimum.reduceat(one, starts).tolist() for one in self._ages(packed))
        return zip(oldest, expires, _group_nbytes(packed).tolist(), strict=True)

    def reset(self, alone: PackedGroups, train_step: int) -> PackedGroups:
        """Return a single group with its expired members as if never generated, and their siblings kept.

        A session is as old as its oldest trajectory, and one trajectory when it is reset.
        """
        (group,) = unpack_groups(alone)
        expired = iter((train_step >= self._ages(alone)[1]).tolist())
        members, group.states = group.members, []
        for member in members:
            if any([next(expired) for _ in member]):
                del member[1:]
                member[0].reset()
                member[0].status = Status.EXPIRED
            group.states += member
        return pack_groups([group])

    def is_tried_out(self, alone: PackedGroups) -> bool:
        """Return whether a member of a single group was interrupted as often as its task allows."""
        limit = self._limits[alone.tasks[0]].max_tries
        return limit is not None and int(alone.num_aborts.max()) >= limit

    def mask(self, batch: PackedGroups, train_step: int) -> None:
        """Mask the tokens of `batch` that have reached their task's token threshold at `train_step`."""
        bounds = self._thresholds(batch.tasks, lambda one: one.token_stale_threshold)
        if (bounds < NEVER).any():
            runs = np.diff(batch.run_offsets[np.append(group_starts(batch), batch.num_samples)])
            batch.run_masks[:] &= fresh_tokens(batch.run_versions, train_step, np.repeat(bounds, runs))

    def _ages(self, packed: PackedGroups) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(oldest version, first train step at which it is expired) of every trajectory."""
        oldest = oldest_versions(packed.run_versions, packed.run_offsets)
        bounds = self._thresholds(packed.tasks, lambda one: one.stale_threshold)
        token_bounds = self._thresholds(packed.tasks, lambda one: one.token_stale_threshold)
        newest = np.full(len(oldest), NEVER)
        if (token_bounds < NEVER).any():
            newest = newest_trained_versions(packed.run_versions, packed.run_masks, packed.run_offsets)
        sizes = packed.group_sizes
        return oldest, expiry_steps(oldest, newest, np.repeat(bounds, sizes), np.repeat(token_bounds, sizes))

    def _thresholds(
        self, tasks: Iterable[str], threshold: Callable[[TaskLimits], int | None]
    ) -> NDArray[np.int64]:
        found = {task: threshold(one) for task, one in self._limits.items()}
        bounds = {task: NEVER if one is None else one for task, one in found.items()}
        return np.asarray([bounds[task] for task in tasks], np.int64)


def staleness_at(group: StoredGroup, train_step: int) -> int:
    """Return the staleness of the group's oldest token; 0 when no policy produced any of its tokens."""
    return 0 if group.oldest == NEVER else staleness_of(group.oldest, train_step)


def _group_nbytes(packed: PackedGroups) -> NDArray[np.int64]:
    """Return the bytes of the token arrays and details of every group, [G]."""
    starts = group_starts(packed)
    nbytes = np.diff(packed.detail_offsets)
    for column, offsets in zip(packed.columns, packed.offsets, strict=True):
        bounds = offsets[np.append(starts, packed.num_samples)]
        nbytes = nbytes + column.itemsize * np.diff(bounds)
    return nbytes
