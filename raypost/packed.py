"""PackedGroups: groups as a few flat arrays, the form in which they cross processes, are stored and journaled.

Owns the columnar layout, cutting and joining it, and how it is pickled. Versions and masks, which rarely change
within a trajectory, are kept as runs. A group's details (texts, metadata, sampling parameters) travel as one
pickled row a group, which nobody on the way opens.

Invariants: `unpack_groups(pack_groups(groups))` equals `groups`; `join_groups(split_groups(packed))` equals
`packed`; what `split_groups` and `join_groups` return shares no memory with anything.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from raypost.types import Group, GroupKey, IntArray, MaskArray, RolloutState, Status

_RESPONSE = ("response_ids", "logprobs", "policy_versions", "response_mask")
DENSE = ("prompt_ids", *_RESPONSE)
_DENSE_TYPES = (np.int32, np.int32, np.float32, np.int32, np.bool_)
_COLUMN_TYPES = (np.int32, np.int32, np.float32, np.int32, np.bool_, np.int32)
_FACTS = ("task", "group_id", "status", "num_aborts")
_DETAILS = tuple(name for name in RolloutState.__slots__ if name not in (*DENSE, *_FACTS))
_STATUSES = tuple(Status)
_CODES = {status: code for code, status in enumerate(_STATUSES)}
_RANKED = (Status.COMPLETED, Status.INIT, Status.FILTERED, Status.EXPIRED, Status.ABORTED, Status.FAILED)
_RANKS = np.asarray([_RANKED.index(status) if status in _RANKED else 0 for status in _STATUSES])
ALIGNMENT = 8
_SMALL_BYTES = 16_384


@dataclass(slots=True, frozen=True)
class PackedGroups:
    """G groups of N trajectories in all. Trajectories of a group stand together, groups in their order.

    `columns[c]` concatenates column c of all N trajectories; trajectory n has entries
    `offsets[c][n]:offsets[c][n+1]`. The columns are prompt ids; ids and logprobs of the response; and version,
    mask and length of every run, a stretch of the response whose tokens have one version and one mask.
    """

    tasks: tuple[str, ...]
    """[G]"""
    group_ids: NDArray[np.int64]
    """[G]"""
    group_sizes: NDArray[np.int32]
    """[G]"""
    status_codes: NDArray[np.int8]
    """[N], places in `tuple(Status)`."""
    num_aborts: NDArray[np.int32]
    """[N]"""
    columns: tuple[NDArray[Any], ...]
    prompt_offsets: NDArray[np.int64]
    """[N + 1]"""
    response_offsets: NDArray[np.int64]
    """[N + 1]"""
    run_offsets: NDArray[np.int64]
    """[N + 1]"""
    details: NDArray[np.uint8]
    """Bytes of group g: `details[detail_offsets[g]:detail_offsets[g + 1]]`."""
    detail_offsets: NDArray[np.int64]
    """[G + 1]"""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle large arrays out of band, small ones together."""
        # Every array that travels by itself costs both sides microseconds: small ones go together.
        arrays = arrays_of(self)
        large = [array for array in arrays if array.nbytes > _SMALL_BYTES]
        counts = [-1 if array.nbytes > _SMALL_BYTES else len(array) for array in arrays]
        small = b"".join(_padded_bytes(array) for array in arrays if array.nbytes <= _SMALL_BYTES)
        return _from_parts, (self.tasks, counts, small, *large)

    @property
    def num_groups(self) -> int:
        """G."""
        return len(self.group_sizes)

    @property
    def num_samples(self) -> int:
        """N."""
        return len(self.status_codes)

    @property
    def nbytes(self) -> int:
        """Bytes of all token arrays and details."""
        return sum(column.nbytes for column in self.columns) + self.details.nbytes

    @property
    def keys(self) -> tuple[GroupKey, ...]:
        """(task, group_id) of every group."""
        return tuple(zip(self.tasks, self.group_ids.tolist(), strict=True))

    @property
    def offsets(self) -> tuple[NDArray[np.int64], ...]:
        """Offsets of every column."""
        tokens, runs = self.response_offsets, self.run_offsets
        return (self.prompt_offsets, tokens, tokens, runs, runs, runs)

    @property
    def header(self) -> list[dict[str, Any]]:
        """What is not per token, a dict a trajectory; made anew by every call."""
        keys = np.repeat(np.arange(self.num_groups), self.group_sizes).tolist()
        facts = zip(keys, self.status_codes.tolist(), self.num_aborts.tolist(), strict=True)
        rows = (row for group in range(self.num_groups) for row in self._rows(group))
        return [
            {
                "task": self.tasks[group],
                "group_id": int(self.group_ids[group]),
                "status": _STATUSES[code],
                "num_aborts": aborts,
                **dict(zip(_DETAILS, row, strict=True)),
            }
            for (group, code, aborts), row in zip(facts, rows, strict=True)
        ]

    @property
    def run_versions(self) -> IntArray:
        """Version of every run."""
        return cast(IntArray, self.columns[3])

    @property
    def run_masks(self) -> MaskArray:
        """Whether the tokens of every run are trained."""
        return cast(MaskArray, self.columns[4])

    @property
    def versions(self) -> IntArray:
        """Version of every response token of all trajectories; a new array."""
        return cast(IntArray, np.repeat(self.columns[3], self.columns[5]))

    @property
    def masks(self) -> MaskArray:
        """Whether each response token of all trajectories is trained; a new array."""
        return cast(MaskArray, np.repeat(self.columns[4], self.columns[5]))

    def _rows(self, group: int) -> list[tuple[Any, ...]]:
        start, end = self.detail_offsets[group], self.detail_offsets[group + 1]
        rows: list[tuple[Any, ...]] = pickle.loads(self.details.data[start:end])
        return rows


def group_statuses(packed: PackedGroups) -> list[Status]:
    """Return `types.group_status` of every group."""
    if not packed.num_groups:
        return []
    worst = np.maximum.reduceat(_RANKS[packed.status_codes], group_starts(packed)).tolist()
    return [_RANKED[rank] for rank in worst]


def has_status(packed: PackedGroups, status: Status) -> bool:
    """Return whether a trajectory has that status."""
    return bool((packed.status_codes == _CODES[status]).any())


def group_starts(packed: PackedGroups) -> NDArray[np.int64]:
    """Return the first trajectory of every group, [G]."""
    starts = np.zeros(packed.num_groups, np.int64)
    np.cumsum(packed.group_sizes[:-1], out=starts[1:])
    return starts


# ---------------------------------------------------------------- records <-> columns


def pack_groups(groups: Sequence[Group]) -> PackedGroups:
    """Return the columnar form of the groups; `unpack_groups` restores equal ones.

    Raises AlignmentError, and ValueError for a group without members, or with one that names another group.
    """
    states = [state for group in groups for state in group.states]
    for state in states:
        state.check_aligned()
    for group in groups:
        if not group.states:
            raise ValueError(f"group {group.key} has no trajectory")
        for state in group.states:
            if (state.task, state.group_id) != group.key:
                raise ValueError(f"group {group.key} has a member of group {(state.task, state.group_id)}")
    details = [
        pickle.dumps([tuple(getattr(state, name) for name in _DETAILS) for state in group.states], 5)
        for group in groups
    ]
    columns = {
        name: np.concatenate([np.empty(0, dtype), *(getattr(state, name) for state in states)]).astype(
            dtype, copy=False
        )
        for name, dtype in zip(DENSE, _DENSE_TYPES, strict=True)
    }
    offsets = _offsets([len(state.response_ids) for state in states])
    runs, run_offsets = _runs(columns.pop("policy_versions"), columns.pop("response_mask"), offsets)
    return PackedGroups(
        tasks=tuple(group.task for group in groups),
        group_ids=np.asarray([group.group_id for group in groups], np.int64),
        group_sizes=np.asarray([len(group.states) for group in groups], np.int32),
        status_codes=np.asarray([_CODES[state.status] for state in states], np.int8),
        num_aborts=np.asarray([state.num_aborts for state in states], np.int32),
        columns=(*columns.values(), *runs),
        prompt_offsets=_offsets([len(state.prompt_ids) for state in states]),
        response_offsets=offsets,
        run_offsets=run_offsets,
        details=np.frombuffer(b"".join(details), np.uint8),
        detail_offsets=_offsets([len(one) for one in details]),
    )


def _runs(
    versions: NDArray[Any], mask: NDArray[Any], offsets: NDArray[np.int64]
) -> tuple[tuple[NDArray[Any], ...], NDArray[np.int64]]:
    """(version, mask, length) of every run, and where the runs of each trajectory begin."""
    begins = np.ones(len(versions), np.bool_)
    begins[1:] = (versions[1:] != versions[:-1]) | (mask[1:] != mask[:-1])
    begins[offsets[:-1][np.diff(offsets) > 0]] = True
    starts = np.flatnonzero(begins)
    lengths = np.diff(starts, append=len(versions)).astype(np.int32)
    return (versions[starts], mask[starts], lengths), np.searchsorted(starts, offsets).astype(np.int64)


def unpack_groups(packed: PackedGroups) -> list[Group]:
    """Return the groups of a columnar batch. Token arrays are views of the columns, which may be read-only."""
    groups, n = [], 0
    prompts, responses = packed.prompt_offsets.tolist(), packed.response_offsets.tolist()
    codes, aborts = packed.status_codes.tolist(), packed.num_aborts.tolist()
    prompt_ids, *tokens = packed.columns[:3]
    response = (*tokens, packed.versions, packed.masks)
    for g, (task, group_id) in enumerate(packed.keys):
        states = []
        for row in packed._rows(g):
            start, end = responses[n], responses[n + 1]
            arrays: dict[str, Any] = {
                name: column[start:end] for name, column in zip(_RESPONSE, response, strict=True)
            }
            states.append(
                RolloutState(
                    task=task,
                    group_id=group_id,
                    status=_STATUSES[codes[n]],
                    num_aborts=aborts[n],
                    prompt_ids=prompt_ids[prompts[n] : prompts[n + 1]],
                    **arrays,
                    **dict(zip(_DETAILS, row, strict=True)),
                )
            )
            n += 1
        groups.append(Group(task=task, group_id=group_id, states=states))
    return groups


# ---------------------------------------------------------------- cutting and joining


def split_groups(packed: PackedGroups) -> list[PackedGroups]:
    """Return every group alone, with arrays of its own."""
    return [join_groups([slice_groups(packed, g, g + 1)]) for g in range(packed.num_groups)]


def slice_groups(packed: PackedGroups, start: int, end: int) -> PackedGroups:
    """Return groups `start` to `end - 1`, at least one; token arrays and details are views."""
    if start == 0 and end == packed.num_groups:
        return packed
    first = int(packed.group_sizes[:start].sum())
    last = first + int(packed.group_sizes[start:end].sum())
    prompts, tokens, runs = (
        offsets[first : last + 1]
        for offsets in (packed.prompt_offsets, packed.response_offsets, packed.run_offsets)
    )
    details = packed.detail_offsets[start : end + 1]
    of_prompts, of_tokens, of_runs = (slice(one[0], one[-1]) for one in (prompts, tokens, runs))
    cuts = (of_prompts, of_tokens, of_tokens, of_runs, of_runs, of_runs)
    return PackedGroups(
        packed.tasks[start:end],
        packed.group_ids[start:end],
        packed.group_sizes[start:end],
        packed.status_codes[first:last],
        packed.num_aborts[first:last],
        tuple(column[cut] for column, cut in zip(packed.columns, cuts, strict=True)),
        prompts - prompts[0],
        tokens - tokens[0],
        runs - runs[0],
        packed.details[details[0] : details[-1]],
        details - details[0],
    )


def group_nbytes(packed: PackedGroups) -> NDArray[np.int64]:
    """Return the bytes of the token arrays and details of every group, [G]."""
    starts = group_starts(packed)
    nbytes = np.diff(packed.detail_offsets)
    for column, offsets in zip(packed.columns, packed.offsets, strict=True):
        bounds = offsets[np.append(starts, packed.num_samples)]
        nbytes = nbytes + column.itemsize * np.diff(bounds)
    return nbytes


def join_groups(parts: Sequence[PackedGroups]) -> PackedGroups:
    """Return all groups of all parts, in their order, in new arrays. Raises ValueError without parts."""
    if not parts:
        raise ValueError("there is nothing to join")
    columns = zip(*(part.columns for part in parts), strict=True)
    return PackedGroups(
        tasks=tuple(task for part in parts for task in part.tasks),
        group_ids=np.concatenate([part.group_ids for part in parts]),
        group_sizes=np.concatenate([part.group_sizes for part in parts]),
        status_codes=np.concatenate([part.status_codes for part in parts]),
        num_aborts=np.concatenate([part.num_aborts for part in parts]),
        columns=tuple(np.concatenate(column) for column in columns),
        prompt_offsets=_joined([part.prompt_offsets for part in parts]),
        response_offsets=_joined([part.response_offsets for part in parts]),
        run_offsets=_joined([part.run_offsets for part in parts]),
        details=np.concatenate([part.details for part in parts]),
        detail_offsets=_joined([part.detail_offsets for part in parts]),
    )


def _offsets(lengths: Sequence[int]) -> NDArray[np.int64]:
    return np.cumsum([0, *lengths], dtype=np.int64)


def _joined(offsets: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    ends, starts = (np.concatenate([one[part] for one in offsets]) for part in (_ENDS, _STARTS))
    joined = np.zeros(len(ends) + 1, np.int64)
    np.cumsum(ends - starts, out=joined[1:])
    return joined


_STARTS, _ENDS = slice(None, -1), slice(1, None)


# ---------------------------------------------------------------- arrays


def arrays_of(packed: PackedGroups) -> tuple[NDArray[Any], ...]:
    """Return all its arrays, of ARRAY_TYPES."""
    return (
        packed.group_ids,
        packed.group_sizes,
        packed.status_codes,
        packed.num_aborts,
        *packed.columns,
        packed.prompt_offsets,
        packed.response_offsets,
        packed.run_offsets,
        packed.details,
        packed.detail_offsets,
    )


def _padded_bytes(array: NDArray[Any]) -> bytes:
    return array.tobytes() + PADDING[: -array.nbytes % ALIGNMENT]


def _from_parts(
    tasks: tuple[str, ...], counts: Sequence[int], small: bytes, *large: NDArray[Any]
) -> PackedGroups:
    at, arrays, rest = 0, [], iter(large)
    for dtype, count in zip(ARRAY_TYPES, counts, strict=True):
        if count < 0:
            arrays.append(next(rest))
        else:
            arrays.append(np.frombuffer(small, dtype, count, at))
            at = padded(at + arrays[-1].nbytes)
    return from_arrays(tasks, arrays)


def from_arrays(tasks: tuple[str, ...], arrays: Sequence[Any]) -> PackedGroups:
    """Return the groups whose arrays `arrays_of` returned."""
    facts, columns, rest = arrays[:4], arrays[4:-5], arrays[-5:]
    return PackedGroups(tasks, *facts, tuple(columns), *rest)  # type: ignore[call-arg]


ARRAY_TYPES = (
    np.int64, np.int32, np.int8, np.int32, *_COLUMN_TYPES, *(np.int64,) * 3, np.uint8, np.int64
)  # fmt: skip
PADDING = bytes(ALIGNMENT)


def padded(length: int) -> int:
    """Return where the next array begins after one that ends at `length`."""
    return length + -length % ALIGNMENT
