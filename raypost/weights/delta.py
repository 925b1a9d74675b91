"""DeltaPacker: versions of which only that travels which changed.

Owns what is known of the tensors of one trainer: which of them have never changed since it began. Those lie in buckets
of their own, which are made once and are the first ones of every version; whoever holds them is sent the others only,
and whoever does not is sent all. What changed is found by digest, so it does not matter why a tensor stays as it is.

    first version    [ all ]
    second version   [ all ]              what differs from the first is known now
    third version    [ resting | moving ]
    later ones       [   "     | moving ]

Engines join tensors of a layer when they load them, so the tensors of a block rest together or not at all.

Invariants: a version is whole, the buckets of what rests included; a tensor that moved once is not taken for one that
rests again; where one of a block moved after others of it were taken to rest, no bucket may be left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Generic, TypeVar

import numpy as np

from raypost.weights.manifest import (
    Bytes,
    Filling,
    Given,
    Manifest,
    TensorEntry,
    flattened,
    manifest_of,
)

T = TypeVar("T")


def block_of(name: str) -> str:
    """Return the block of a tensor, such as the attention of one layer: an engine joins tensors within one."""
    path = name.split(".")
    number = next((i for i, part in enumerate(path) if part.isdigit()), None)
    return name if number is None else ".".join(path[: number + 2])


class DeltaPacker(Generic[T]):
    """Packs one version after the other."""

    def __init__(self, bucket_bytes: int, give: Callable[[Bytes], T]) -> None:
        """`give` copies a bucket to where it is kept; see `pack_by`."""
        self._bucket_bytes = bucket_bytes
        self._give = give
        self._before: Manifest | None = None
        self._is_known = False
        """Whether two versions were compared."""
        self._moved: set[str] = set()
        """Blocks of which a tensor changed."""
        self._resting: Filling[T] | None = None
        """What has not changed since it was packed."""
        self._memory: Bytes | None = None

    def pack(self, version: int, tensors: Given) -> tuple[Manifest, list[T]]:
        """Return a version and what `give` returned for each of its buckets. Raises as `pack_by` does."""
        before = {} if self._before is None else {entry.name: entry for entry in self._before.tensors}
        resting, is_new = self._resting or Filling(self._bucket_bytes, self._give), self._resting is None
        moving = Filling(self._bucket_bytes, self._give, memory=self._memory)
        rested = {} if is_new else {entry.name: entry for entry in resting.entries}
        found: list[tuple[TensorEntry, bool]] = []
        for name, flat, dtype, shape, digest in flattened(tensors):
            last = before.get(name)
            if last is not None and (last.digest, last.dtype, last.shape) != (digest, dtype, shape):
                self._moved.add(block_of(name))
            elif name in rested and block_of(name) not in self._moved:
                found.append((rested[name], True))
                continue
            rests = is_new and self._is_known and block_of(name) not in self._moved
            into = resting if rests else moving
            into.add(name, flat, dtype, shape, digest)
            found.append((into.entries[-1], rests))
        for filling in (resting, moving):
            filling.end()
        self._memory, resting.memory = moving.memory, _NOTHING
        first = len(resting.sizes)
        entries = [one if rests else replace(one, bucket=first + one.bucket) for one, rests in found]
        manifest = manifest_of(version, entries, resting.sizes + moving.sizes)
        stayed = not any(rests and block_of(one.name) in self._moved for one, rests in found)
        self._is_known, self._before = self._before is not None, manifest
        # Packed anew without what moved, whose bytes would stay in it.
        unchanged = sum(rests for _, rests in found) == len(resting.entries) > 0
        self._resting = resting if stayed and unchanged else None
        return replace(manifest, base_buckets=first if stayed else 0), resting.given + moving.given


_NOTHING: Bytes = np.zeros(0, np.uint8)
