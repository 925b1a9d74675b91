"""PackedGroups: groups as a few flat arrays, the form in which they cross processes, are stored and journaled.

Owns the columnar layout, cutting and joining it, and its bytes on disk. Versions and masks, which rarely change
within a trajectory, are kept as runs. A group's details (texts, metadata, sampling parameters) travel as one
pickled row a group, which nobody on the way opens.

Invariants: `unpack_groups(pack_groups(groups))` equals `groups`; `join_groups(split_groups(packed))` equals
`packed`; what `split_groups` and `join_groups` return shares no memory with what they were given, and its
tokens and details with nothing.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from raypost.types import Group, GroupKey, IntArray, MaskArray, RolloutState, Status

_RESPONSE = ("response_ids", "logprobs", "policy_versions", "response_mask")
_DENSE = ("prompt_ids", *_RESPONSE)
_DENSE_TYPES = (np.int32, np.int32, np.float32, np.int32, np.bool_)
_COLUMN_TYPES = (np.int32, np.int32, np.float32, np.int32, np.bool_, np.int32)
_FACTS = ("task", "group_id", "status", "num_aborts")
_DETAILS = tuple(
    name
    for name in RolloutState.__slots__  # type: ignore[attr-defined]
    if name not in (*_DENSE, *_FACTS)
)
_STATUSES = tuple(Status)
_CODES = {status: code for code, status in enumerate(_STATUSES)}
_RANKED = (Status.COMPLETED, Status.INIT, Status.FILTERED, Status.EXPIRED, Status.ABORTED, Status.FAILED)
_RANKS = np.asarray([_RANKED.index(status) if status in _RANKED else 0 for status in _STATUSES])
_ALIGNMENT = 8


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
        return _from_arrays, (self.tasks, _arrays(self))

    @property
    def num_groups(self) -> int:
        return len(self.group_sizes)

    @property
    def num_samples(self) -> int:
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
    """`types.group_status` of every group."""
    if not packed.num_groups:
        return []
    worst = np.maximum.reduceat(_RANKS[packed.status_codes], group_starts(packed)).tolist()
    return [_RANKED[rank] for rank in worst]


def has_status(packed: PackedGroups, status: Status) -> bool:
    """Whether a trajectory has that status."""
    return bool((packed.status_codes == _CODES[status]).any())


def group_starts(packed: PackedGroups) -> NDArray[np.int64]:
    """[G], first trajectory of every group."""
    starts: NDArray[np.int64] = np.cumsum(packed.group_sizes, dtype=np.int64) - packed.group_sizes
    return starts


# ---------------------------------------------------------------- records <-> columns


def pack_groups(groups: Sequence[Group]) -> PackedGroups:
    """Columnar form of the groups; `unpack_groups` restores equal ones. Raises AlignmentError, and ValueError
    for a group without members, or with one that names another group."""
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
        for name, dtype in zip(_DENSE, _DENSE_TYPES, strict=True)
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
    """The groups of a columnar batch. Token arrays are views of the columns, which may be read-only."""
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
    """Every group alone, with arrays of its own."""
    bounds = np.concatenate([[0], np.cumsum(packed.group_sizes)])
    starts = bounds.tolist()
    prompts, responses, runs = (
        offsets[bounds].tolist()
        for offsets in (packed.prompt_offsets, packed.response_offsets, packed.run_offsets)
    )
    details = packed.detail_offsets.tolist()
    prompt_ids, ids, logprobs, *run_columns = packed.columns
    # Copied once: to cut a few bytes out of a copy costs less than to copy them.
    versions, masks, lengths = (column.copy() for column in run_columns)
    group_ids, sizes = packed.group_ids.copy(), packed.group_sizes.copy()
    codes, aborts = packed.status_codes.copy(), packed.num_aborts.copy()
    alone = []
    for g, task in enumerate(packed.tasks):
        n, end = starts[g], starts[g + 1]
        tokens, of_runs = slice(responses[g], responses[g + 1]), slice(runs[g], runs[g + 1])
        alone.append(
            PackedGroups(
                (task,),
                group_ids[g : g + 1],
                sizes[g : g + 1],
                codes[n:end],
                aborts[n:end],
                (
                    prompt_ids[prompts[g] : prompts[g + 1]].copy(),
                    ids[tokens].copy(),
                    logprobs[tokens].copy(),
                    versions[of_runs],
                    masks[of_runs],
                    lengths[of_runs],
                ),
                packed.prompt_offsets[n : end + 1] - prompts[g],
                packed.response_offsets[n : end + 1] - responses[g],
                packed.run_offsets[n : end + 1] - runs[g],
                packed.details[details[g] : details[g + 1]].copy(),
                packed.detail_offsets[g : g + 2] - details[g],
            )
        )
    return alone


def join_groups(parts: Sequence[PackedGroups]) -> PackedGroups:
    """All groups of all parts, in their order, in new arrays. Raises ValueError without parts."""
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


# ---------------------------------------------------------------- plain data


def to_plain(packed: PackedGroups) -> dict[str, Any]:
    """The groups as plain data and arrays, for a checkpoint: reading it runs no code from the file."""
    return {
        "header": packed.header,
        "columns": [*packed.columns[:3], packed.versions, packed.masks],
        "offsets": [packed.prompt_offsets, packed.response_offsets],
        "group_sizes": packed.group_sizes,
    }


def from_plain(plain: dict[str, Any]) -> PackedGroups:
    """What `to_plain` gave. Raises KeyError, TypeError or ValueError if it is something else."""
    columns, (prompts, responses) = [np.asarray(one) for one in plain["columns"]], plain["offsets"]
    states = []
    for n, row in enumerate(plain["header"]):
        arrays: dict[str, Any] = {
            name: column[offsets[n] : offsets[n + 1]]
            for name, column, offsets in zip(
                _DENSE, columns, (prompts, *(responses,) * len(_RESPONSE)), strict=True
            )
        }
        states.append(RolloutState(**row, **arrays))
    sizes = np.asarray(plain["group_sizes"]).tolist()
    if sum(sizes) != len(states) or min(sizes, default=1) < 1:
        raise ValueError(f"{len(states)} trajectories do not make groups of {sizes}")
    groups, members = [], iter(states)
    for size in sizes:
        one = [next(members) for _ in range(size)]
        groups.append(Group(task=one[0].task, group_id=one[0].group_id, states=one))
    return pack_groups(groups)


# ---------------------------------------------------------------- bytes


def _arrays(packed: PackedGroups) -> tuple[NDArray[Any], ...]:
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


def _from_arrays(tasks: tuple[str, ...], arrays: Sequence[Any]) -> PackedGroups:
    facts, columns, rest = arrays[:4], arrays[4:-5], arrays[-5:]
    return PackedGroups(tasks, *facts, tuple(columns), *rest)  # type: ignore[call-arg]


_ARRAY_TYPES = (
    np.int64, np.int32, np.int8, np.int32, *_COLUMN_TYPES, *(np.int64,) * 3, np.uint8, np.int64
)  # fmt: skip
_PADDING = bytes(_ALIGNMENT)


def to_buffers(packed: PackedGroups) -> list[memoryview]:
    """The bytes of `packed` as pieces to be written one after the other: a header, then every array as it is."""
    arrays = [np.ascontiguousarray(array) for array in _arrays(packed)]
    meta = json.dumps([packed.tasks, [len(array) for array in arrays]]).encode()
    pieces: list[memoryview] = []
    for raw in (len(meta).to_bytes(_ALIGNMENT, "little"), meta, *(array.view(np.uint8) for array in arrays)):
        view = memoryview(raw)  # type: ignore[arg-type]
        if view.nbytes:
            pieces.append(view)
        if view.nbytes % _ALIGNMENT:
            pieces.append(memoryview(_PADDING)[: -view.nbytes % _ALIGNMENT])
    return pieces


def from_buffer(data: bytes) -> PackedGroups:
    """What `to_buffers` wrote; the arrays are views of `data`. Raises ValueError if it is something else."""
    try:
        length = int.from_bytes(data[:_ALIGNMENT], "little")
        tasks, lengths = json.loads(data[_ALIGNMENT : _ALIGNMENT + length])
        at = _padded(_ALIGNMENT + length)
        arrays: list[Any] = []
        for dtype, count in zip(_ARRAY_TYPES, lengths, strict=True):
            arrays.append(np.frombuffer(data, dtype, count, at))
            at = _padded(at + arrays[-1].nbytes)
    except (ValueError, TypeError) as error:
        raise ValueError(f"these bytes are no packed groups: {error}") from error
    return _from_arrays(tuple(tasks), arrays)


def _padded(length: int) -> int:
    return length + -length % _ALIGNMENT
