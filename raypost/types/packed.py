"""PackedGroups: groups as a few flat arrays, the form in which they cross processes, are stored and journaled.

Owns the columnar layout, cutting and joining it, and how it crosses to another process. Versions and masks, which
rarely change within a trajectory, are kept as runs. A group's details (texts, metadata, sampling parameters) are
encoded once, when it is packed (plain.py): they travel, and are journaled and saved, as bytes that nobody on the way
opens.

Invariants: `unpack_groups(pack_groups(groups))` equals `groups`; joining all slices gives the whole; what `join_groups`
returns shares no memory with anything; unpacking bytes of any origin makes plain data and runs no code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raypost.types.arrays import FloatArray, IntArray, MaskArray
from raypost.types.plain import from_bytes, to_bytes
from raypost.types.rollout import TOKEN_ARRAYS, Group, GroupKey, RolloutState, SampleParams, Status

_RESPONSE = tuple(TOKEN_ARRAYS)[1:]
_FACTS = ("task", "group_id", "sample_index", "status", "num_aborts")
_LEAD = ("metadata", "sample_params")
_DETAILS = (
    *_LEAD,
    *(name for name in RolloutState.__slots__ if name not in (*TOKEN_ARRAYS, *_FACTS, *_LEAD)),
)
_details_of = attrgetter(*_DETAILS)
_PARAMS = SampleParams.__slots__
_params_of = attrgetter(*_PARAMS)
_STATUSES = tuple(Status)
_CODES = {status: code for code, status in enumerate(_STATUSES)}
_RANKED = (Status.COMPLETED, Status.INIT, Status.FILTERED, Status.EXPIRED, Status.ABORTED, Status.FAILED)
_RANKS = np.asarray([_RANKED.index(status) if status in _RANKED else 0 for status in _STATUSES])
ALIGNMENT = 8
_SMALL_BYTES = 16_384


@dataclass(slots=True, frozen=True)
class PackedGroups:
    """G groups of N trajectories in all. Trajectories of a group stand together, groups in their order.

    A column concatenates the values of all N trajectories; trajectory n has its values
    `offsets[n]:offsets[n + 1]`. A run is a stretch of the response whose tokens have one version and one mask.
    """

    tasks: tuple[str, ...]
    """[G]"""
    group_ids: NDArray[np.int64]
    """[G]"""
    group_sizes: NDArray[np.int32]
    """[G]"""
    sample_indices: NDArray[np.int32]
    """[N], equal for the trajectories of one session, which are one member."""
    status_codes: NDArray[np.int8]
    """[N], places in `tuple(Status)`."""
    num_aborts: NDArray[np.int32]
    """[N]"""
    prompt_ids: IntArray
    response_ids: IntArray
    logprobs: FloatArray
    run_versions: IntArray
    """Version of every run."""
    run_masks: MaskArray
    """Whether the tokens of every run are trained."""
    run_lengths: IntArray
    """Tokens of every run."""
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
    def num_members(self) -> int:
        """Members of all groups: trajectories, those of one session counted once."""
        begins = np.diff(self.sample_indices, prepend=-1) != 0
        begins[group_starts(self)] = True
        return int(np.count_nonzero(begins))

    @property
    def nbytes(self) -> int:
        """Bytes of all token arrays and details."""
        return sum(column.nbytes for column in self.columns) + self.details.nbytes

    @property
    def keys(self) -> tuple[GroupKey, ...]:
        """(task, group_id) of every group."""
        return tuple(zip(self.tasks, self.group_ids.tolist(), strict=True))

    @property
    def columns(self) -> tuple[NDArray[Any], ...]:
        """Every column, with one value a token or a run."""
        of_runs = (self.run_versions, self.run_masks, self.run_lengths)
        return (self.prompt_ids, self.response_ids, self.logprobs, *of_runs)

    @property
    def offsets(self) -> tuple[NDArray[np.int64], ...]:
        """Offsets of every column."""
        tokens, runs = self.response_offsets, self.run_offsets
        return (self.prompt_offsets, tokens, tokens, runs, runs, runs)

    @property
    def versions(self) -> IntArray:
        """Version of every response token of all trajectories; a new array."""
        return np.repeat(self.run_versions, self.run_lengths)

    @property
    def masks(self) -> MaskArray:
        """Whether each response token of all trajectories is trained; a new array."""
        return np.repeat(self.run_masks, self.run_lengths)

    def _rows(self, group: int) -> list[list[Any]]:
        start, end = self.detail_offsets[group], self.detail_offsets[group + 1]
        return _decode_details(self.details.data[start:end], int(self.group_sizes[group]))


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

    Raises AlignmentError, and ValueError for a group without members, or with one that names another group, or with
    details that are no plain data.
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
    details = [_encode_details(group) for group in groups]
    columns = {
        name: np.concatenate([np.empty(0, dtype), *(getattr(state, name) for state in states)]).astype(
            dtype, copy=False
        )
        for name, dtype in TOKEN_ARRAYS.items()
    }
    offsets = _offsets([len(state.response_ids) for state in states])
    runs = _runs(columns.pop("policy_versions"), columns.pop("response_mask"), offsets)
    return PackedGroups(
        tasks=tuple(group.task for group in groups),
        group_ids=np.asarray([group.group_id for group in groups], np.int64),
        group_sizes=np.asarray([len(group.states) for group in groups], np.int32),
        sample_indices=np.asarray([state.sample_index for state in states], np.int32),
        status_codes=np.asarray([_CODES[state.status] for state in states], np.int8),
        num_aborts=np.asarray([state.num_aborts for state in states], np.int32),
        **columns,
        **runs,
        prompt_offsets=_offsets([len(state.prompt_ids) for state in states]),
        response_offsets=offsets,
        details=np.frombuffer(b"".join(details), np.uint8),
        detail_offsets=_offsets([len(one) for one in details]),
    )


def _runs(versions: NDArray[Any], mask: NDArray[Any], offsets: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """Return the columns of the runs, and where the runs of each trajectory begin."""
    begins = np.ones(len(versions), np.bool_)
    begins[1:] = (versions[1:] != versions[:-1]) | (mask[1:] != mask[:-1])
    begins[offsets[:-1][np.diff(offsets) > 0]] = True
    starts = np.flatnonzero(begins)
    return {
        "run_versions": versions[starts],
        "run_masks": mask[starts],
        "run_lengths": np.diff(starts, append=len(versions)).astype(np.int32),
        "run_offsets": np.searchsorted(starts, offsets).astype(np.int64),
    }


def unpack_groups(packed: PackedGroups) -> list[Group]:
    """Return the groups of a columnar batch. Token arrays are views of the columns, which may be read-only."""
    groups, n = [], 0
    prompts, responses = packed.prompt_offsets.tolist(), packed.response_offsets.tolist()
    codes, aborts = packed.status_codes.tolist(), packed.num_aborts.tolist()
    indices = packed.sample_indices.tolist()
    response = (packed.response_ids, packed.logprobs, packed.versions, packed.masks)
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
                    sample_index=indices[n],
                    status=_STATUSES[codes[n]],
                    num_aborts=aborts[n],
                    prompt_ids=packed.prompt_ids[prompts[n] : prompts[n + 1]],
                    **arrays,
                    **dict(zip(_DETAILS, row, strict=True)),
                )
            )
            n += 1
        groups.append(Group(task=task, group_id=group_id, states=states))
    return groups


# ---------------------------------------------------------------- details


def _encode_details(group: Group) -> bytes:
    """Return what the group's members have beside their arrays, field by field: once where all of them share it."""
    metadata, *rest = zip(*map(_details_of, group.states), strict=True)
    params, *known = (one[:1] if one.count(one[0]) == len(one) else one for one in rest)
    own = metadata[:1] if len(set(map(id, metadata))) == 1 else metadata
    try:
        return to_bytes(
            list(own), [dict(zip(_PARAMS, _params_of(one), strict=True)) for one in params], *known
        )
    except TypeError as error:
        raise ValueError(f"group {group.key}: {error}") from error


def _decode_details(data: memoryview, members: int) -> list[list[Any]]:
    """Return the rows of a group's members. Raises ValueError for bytes that are no details of so many."""
    metadata, params, *rest = from_bytes(data)
    try:
        made = [SampleParams(**{**one, "stop_token_ids": tuple(one["stop_token_ids"])}) for one in params]
        fields = [values * members if len(values) == 1 else values for values in (metadata, made, *rest)]
        return [row for _, *row in zip(range(members), *fields, strict=True)]
    except (TypeError, ValueError, LookupError) as error:
        raise ValueError(f"these bytes are no details of {members} trajectories: {error!r:.200}") from error


# ---------------------------------------------------------------- cutting and joining


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
    return PackedGroups(
        packed.tasks[start:end],
        packed.group_ids[start:end],
        packed.group_sizes[start:end],
        packed.sample_indices[first:last],
        packed.status_codes[first:last],
        packed.num_aborts[first:last],
        packed.prompt_ids[of_prompts],
        packed.response_ids[of_tokens],
        packed.logprobs[of_tokens],
        packed.run_versions[of_runs],
        packed.run_masks[of_runs],
        packed.run_lengths[of_runs],
        prompts - prompts[0],
        tokens - tokens[0],
        runs - runs[0],
        packed.details[details[0] : details[-1]],
        details - details[0],
    )


def join_groups(parts: Sequence[PackedGroups]) -> PackedGroups:
    """Return all groups of all parts, in their order, in new arrays. Raises ValueError without parts."""
    if not parts:
        raise ValueError("there is nothing to join")
    arrays = {name: [getattr(part, name) for part in parts] for name in ARRAY_TYPES}
    joined: list[NDArray[Any]] = [
        _joined(one) if name.endswith("offsets") else np.concatenate(one) for name, one in arrays.items()
    ]
    return PackedGroups(tuple(task for part in parts for task in part.tasks), *joined)


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
    return tuple(getattr(packed, name) for name in ARRAY_TYPES)


def _padded_bytes(array: NDArray[Any]) -> bytes:
    return array.tobytes() + PADDING[: -array.nbytes % ALIGNMENT]


def _from_parts(
    tasks: tuple[str, ...], counts: Sequence[int], small: bytes, *large: NDArray[Any]
) -> PackedGroups:
    at, arrays, rest = 0, [], iter(large)
    for dtype, count in zip(ARRAY_TYPES.values(), counts, strict=True):
        if count < 0:
            arrays.append(next(rest))
        else:
            arrays.append(np.frombuffer(small, dtype, count, at))
            at = padded(at + arrays[-1].nbytes)
    return PackedGroups(tasks, *arrays)


ARRAY_TYPES = {
    "group_ids": np.int64,
    "group_sizes": np.int32,
    "sample_indices": np.int32,
    "status_codes": np.int8,
    "num_aborts": np.int32,
    "prompt_ids": np.int32,
    "response_ids": np.int32,
    "logprobs": np.float32,
    "run_versions": np.int32,
    "run_masks": np.bool_,
    "run_lengths": np.int32,
    "prompt_offsets": np.int64,
    "response_offsets": np.int64,
    "run_offsets": np.int64,
    "details": np.uint8,
    "detail_offsets": np.int64,
}
"""All arrays of PackedGroups in the order of its fields, and their types."""
PADDING = bytes(ALIGNMENT)


def padded(length: int) -> int:
    """Return where the next array begins after one that ends at `length`."""
    return length + -length % ALIGNMENT
