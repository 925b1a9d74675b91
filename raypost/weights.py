"""Weights as bytes: a manifest and flat buckets.

Owns the layout in which a version of the weights crosses processes, and the check that what arrived is what
was sent. Knows neither torch nor Ray: a tensor is flat uint8 bytes with the name of its dtype and its shape.

Invariants: a tensor lies whole in one bucket, at an offset that is a multiple of 64 bytes; tensors keep the
order in which they were given; a bucket exceeds `bucket_bytes` only when a single tensor does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from raypost.errors import WeightError

ALIGNMENT = 64
"""Bytes. A cache line: every dtype can be viewed in place, and SIMD loads are aligned."""

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies, and the xxh3_128 hex digest of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bucket: int
    offset: int
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one version of the weights consists of.

    `digest` covers names, dtypes, shapes and tensor digests, not the version and not the layout: equal
    weights have equal digests whatever their version and bucket size.
    """

    version: int
    tensors: tuple[TensorEntry, ...]
    bucket_sizes: tuple[int, ...]
    digest: str


def digest_bytes(data: Bytes) -> str:
    """xxh3_128 of contiguous bytes, as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data.data)


def _digest_entries(entries: Iterable[TensorEntry]) -> str:
    digest = xxhash.xxh3_128()
    for entry in entries:
        digest.update(repr((entry.name, entry.dtype, entry.shape, entry.digest)).encode())
    return digest.hexdigest()


def pack(
    version: int, tensors: Iterable[tuple[str, Bytes, str, tuple[int, ...]]], bucket_bytes: int
) -> tuple[Manifest, list[Bytes]]:
    """Copy (name, flat bytes, dtype, shape) tensors into buckets of at most `bucket_bytes`.

    A tensor's bytes are copied before the next tensor is asked for, so the iterable may reuse or free them.
    Raises ValueError for a bucket size below 1, WeightError for a repeated name or an empty iterable.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be >= 1, got {bucket_bytes}")
    entries: list[TensorEntry] = []
    buckets: list[Bytes] = []
    names: set[str] = set()
    # Zeroed memory is committed page by page: a bucket costs what is written into it.
    bucket, used = np.zeros(bucket_bytes, np.uint8), 0
    for name, data, dtype, shape in tensors:
        if name in names:
            raise WeightError(f"tensor {name!r} is published twice: give tied weights once")
        names.add(name)
        flat = np.ascontiguousarray(data).reshape(-1)
        offset = -(-used // ALIGNMENT) * ALIGNMENT
        if offset + flat.nbytes > len(bucket):
            if used:
                buckets.append(bucket[:used])
            bucket, offset = np.zeros(max(bucket_bytes, flat.nbytes), np.uint8), 0
        used = offset + flat.nbytes
        bucket[offset:used] = flat
        sizes = tuple(int(size) for size in shape)
        entries.append(TensorEntry(name, dtype, sizes, len(buckets), offset, flat.nbytes, digest_bytes(flat)))
    if not entries:
        raise WeightError(f"version {version} has no tensors: nothing to publish")
    buckets.append(bucket[:used])
    bucket_sizes = tuple(bucket.nbytes for bucket in buckets)
    return Manifest(version, tuple(entries), bucket_sizes, _digest_entries(entries)), buckets


def views(manifest: Manifest, buckets: Sequence[Bytes]) -> Iterator[tuple[TensorEntry, Bytes]]:
    """Every tensor's entry and its bytes, without a copy. Raises WeightError if buckets do not fit."""
    sizes = tuple(bucket.nbytes for bucket in buckets)
    if sizes != manifest.bucket_sizes:
        raise WeightError(
            f"version {manifest.version}: buckets have {sizes} bytes, the manifest says "
            f"{manifest.bucket_sizes}"
        )
    for entry in manifest.tensors:
        yield entry, buckets[entry.bucket][entry.offset : entry.offset + entry.nbytes]


def verify(manifest: Manifest, buckets: Sequence[Bytes]) -> None:
    """Raise WeightError naming the first tensor whose bytes are not those the manifest describes."""
    for entry, data in views(manifest, buckets):
        found = digest_bytes(data) if data.nbytes == entry.nbytes else f"{data.nbytes} bytes"
        if found != entry.digest:
            raise WeightError(
                f"version {manifest.version}: tensor {entry.name!r} ({entry.dtype} {entry.shape}) arrived as "
                f"{found}, sent as {entry.digest}: publish it again"
            )
    if _digest_entries(manifest.tensors) != manifest.digest:
        raise WeightError(f"version {manifest.version}: the manifest's own digest {manifest.digest} is wrong")
