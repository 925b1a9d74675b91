"""PackedGroups: groups as a few flat arrays, the form in which they cross processes, are stored and journaled.

Owns the columnar layout. Invariant: `unpack_groups(pack_groups(groups))` equals `groups`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raypost.types import Group, RolloutState

_COLUMNS = ("prompt_ids", "response_ids", "logprobs", "policy_versions", "response_mask")
_COLUMN_TYPES = (np.int32, np.int32, np.float32, np.int32, np.bool_)


@dataclass(slots=True, frozen=True)
class PackedGroups:
    """Several groups as a few flat arrays and a small header: the form in which they cross processes.

    `columns[c]` concatenates column c of all N trajectories; trajectory n has entries
    `offsets[c][n]:offsets[c][n+1]`. `header` holds what is not per token, a dict a trajectory.
    """

    header: list[dict[str, Any]]
    columns: tuple[NDArray[Any], ...]
    offsets: tuple[NDArray[np.int64], ...]
    group_sizes: NDArray[np.int32]

    @property
    def num_groups(self) -> int:
        return len(self.group_sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of all token arrays."""
        return sum(column.nbytes for column in self.columns)


_HEADER_FIELDS = tuple(name for name in RolloutState.__slots__ if name not in _COLUMNS)  # type: ignore[attr-defined]


def pack_groups(groups: Sequence[Group]) -> PackedGroups:
    """Columnar form of the groups; `unpack_groups` restores equal ones. Raises AlignmentError."""
    states = [state for group in groups for state in group.states]
    for state in states:
        state.check_aligned()
    columns, offsets = [], []
    for name, dtype in zip(_COLUMNS, _COLUMN_TYPES, strict=True):
        arrays = [getattr(state, name) for state in states]
        columns.append(np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype, copy=False))
        offsets.append(np.cumsum([0, *map(len, arrays)], dtype=np.int64))
    header = [{name: getattr(state, name) for name in _HEADER_FIELDS} for state in states]
    sizes = np.asarray([len(group.states) for group in groups], np.int32)
    return PackedGroups(header, tuple(columns), tuple(offsets), sizes)


def unpack_groups(packed: PackedGroups) -> list[Group]:
    """The groups of a columnar batch. Token arrays are views of the columns, which may be read-only."""
    groups, n = [], 0
    for size in packed.group_sizes:
        states = []
        for i in range(n, n + int(size)):
            arrays: dict[str, Any] = {
                name: packed.columns[c][packed.offsets[c][i] : packed.offsets[c][i + 1]]
                for c, name in enumerate(_COLUMNS)
            }
            states.append(RolloutState(**packed.header[i], **arrays))
        groups.append(Group(task=states[0].task, group_id=states[0].group_id, states=states))
        n += int(size)
    return groups
