"""PackedGroups on disk: as bytes for the journal, as arrays for a checkpoint.

Owns both encodings; the columnar layout itself is packed.py's. Both hold a group's details unopened.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from raypost.types.packed import ALIGNMENT, ARRAY_TYPES, PADDING, PackedGroups, arrays_of, padded


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
    """Return the groups as a few arrays, for a checkpoint."""
    names = sorted(set(packed.tasks))
    codes = {name: code for code, name in enumerate(names)}
    return {
        "tasks": names,
        "task_codes": np.asarray([codes[task] for task in packed.tasks], np.int32),
        **dict(zip(ARRAY_TYPES, arrays_of(packed), strict=True)),
    }


def from_plain(plain: dict[str, Any]) -> PackedGroups:
    """Return the groups that `to_plain` encoded, as views of its arrays.

    Raises KeyError, TypeError, IndexError or ValueError for any other data.
    """
    arrays: dict[str, Any] = {name: plain[name] for name in ARRAY_TYPES}
    for name, dtype in ARRAY_TYPES.items():
        if arrays[name].dtype != dtype or arrays[name].ndim != 1:
            raise ValueError(
                f"{name} is {arrays[name].dtype} of {arrays[name].ndim} dimensions, not a row of {dtype}"
            )
    names = [str(name) for name in plain["tasks"]]
    packed = PackedGroups(tuple(names[code] for code in plain["task_codes"].tolist()), **arrays)
    _check_lengths(packed)
    return packed


def _check_lengths(packed: PackedGroups) -> None:
    """Raise ValueError unless all arrays belong together."""
    num_groups, num_samples = packed.num_groups, packed.num_samples
    of_groups = {len(packed.tasks), len(packed.group_ids), len(packed.detail_offsets) - 1}
    sizes = packed.group_sizes
    if of_groups != {num_groups} or sizes.min(initial=1) < 1 or sizes.sum() != num_samples:
        raise ValueError(f"{num_samples} trajectories do not make groups of {sizes[:8].tolist()}...")
    columns = (*zip(packed.columns, packed.offsets, strict=True), (packed.details, packed.detail_offsets))
    for column, offsets in columns:
        if offsets[0] != 0 or offsets[-1] != len(column) or (np.diff(offsets) < 0).any():
            raise ValueError(f"a column of {len(column)} values is cut at {offsets[:8].tolist()}...")
    ends = np.append(0, np.cumsum(packed.run_lengths, dtype=np.int64))
    per_trajectory = {len(one) for one in packed.offsets}
    per_trajectory |= {len(packed.num_aborts) + 1, len(packed.sample_indices) + 1}
    if per_trajectory != {num_samples + 1} or (ends[packed.run_offsets] != packed.response_offsets).any():
        raise ValueError("its runs are not as long as its responses")


def equal_plain(left: Any, right: Any) -> bool:
    """Return whether two nested plain values, arrays included, are equal."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(equal_plain(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(equal_plain, left, right))
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return np.array_equal(left, right, equal_nan=np.asarray(left).dtype.kind == "f")
    return bool(left == right)
