"""PackedGroups on disk: as bytes for the journal, as plain data for a checkpoint.

Owns both encodings; the columnar layout itself is packed.py's. Reading either runs no code from the file: the bytes
hold a group's details unopened, the plain data hold them as values.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from raypost.packed import (
    ALIGNMENT,
    ARRAY_TYPES,
    DENSE,
    PADDING,
    PackedGroups,
    arrays_of,
    pack_groups,
    padded,
)
from raypost.types import Group, RolloutState


def to_buffers(packed: PackedGroups) -> list[memoryview]:
    """Return the bytes of `packed` as pieces to write one after the other: a header, then every array as it is."""
    arrays = [np.ascontiguousarray(array) for array in arrays_of(packed)]
    meta = json.dumps([packed.tasks, [len(array) for array in arrays]]).encode()
    pieces: list[memoryview] = []
    for raw in (len(meta).to_bytes(ALIGNMENT, "little"), meta, *(array.view(np.uint8) for array in arrays)):
        view = memoryview(raw)  # type: ignore[arg-type]
        if view.nbytes:
            pieces.append(view)
        if view.nbytes % ALIGNMENT:
            pieces.append(memoryview(PADDING)[: -view.nbytes % ALIGNMENT])
    return pieces


def from_buffer(data: bytes) -> PackedGroups:
    """Return the groups that `to_buffers` encoded, as views of `data`. Raises ValueError for any other data."""
    try:
        length = int.from_bytes(data[:ALIGNMENT], "little")
        tasks, lengths = json.loads(data[ALIGNMENT : ALIGNMENT + length])
        at = padded(ALIGNMENT + length)
        arrays: list[Any] = []
        for dtype, count in zip(ARRAY_TYPES.values(), lengths, strict=True):
            arrays.append(np.frombuffer(data, dtype, count, at))
            at = padded(at + arrays[-1].nbytes)
    except (ValueError, TypeError) as error:
        raise ValueError(f"these bytes are no packed groups: {error}") from error
    return PackedGroups(tuple(tasks), *arrays)


def to_plain(packed: PackedGroups) -> dict[str, Any]:
    """Return the groups as plain data and arrays, for a checkpoint."""
    return {
        "header": packed.header,
        "columns": [*packed.columns[:3], packed.versions, packed.masks],
        "offsets": [packed.prompt_offsets, packed.response_offsets],
        "group_sizes": packed.group_sizes,
    }


def from_plain(plain: dict[str, Any]) -> PackedGroups:
    """Return the groups that `to_plain` encoded. Raises KeyError, TypeError or ValueError for any other data."""
    columns, (prompts, responses) = [np.asarray(one) for one in plain["columns"]], plain["offsets"]
    states = []
    for n, row in enumerate(plain["header"]):
        arrays: dict[str, Any] = {
            name: column[offsets[n] : offsets[n + 1]]
            for name, column, offsets in zip(
                DENSE, columns, (prompts, *(responses,) * (len(DENSE) - 1)), strict=True
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


def equal_plain(left: Any, right: Any) -> bool:
    """Return whether two nested plain values, arrays included, are equal."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(equal_plain(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(equal_plain, left, right))
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return np.array_equal(left, right, equal_nan=np.asarray(left).dtype.kind == "f")
    return bool(left == right)
