"""Weights as bytes: a manifest and flat buckets.

Owns the layout in which a version of the weights crosses processes, and the check that what arrived is what
was sent. Knows neither torch nor Ray: a tensor is flat uint8 bytes with the name of its dtype and its shape.

A version is whole weights, or base weights that stay as they are and the factors of what adapters add to them:

    pack            whole    [ bucket | bucket | ... ]
    pack_adapters   base     [ bucket | bucket | ... ]  made once by `pack`, the same in every version
                    factors  [ bucket ]                 of this version

Invariants: a tensor lies whole in one bucket, at an offset that is a multiple of 64 bytes; tensors keep the
order in which they were given; a bucket exceeds `bucket_bytes` only when a single tensor does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import TypeAdapter

from raypost.errors import WeightError

ALIGNMENT = 64
"""Bytes. A cache line: every dtype can be viewed in place, and SIMD loads are aligned."""

Bytes = NDArray[np.uint8]


Given = Iterable[tuple[str, Bytes, str, tuple[int, ...]]]
"""Tensors as they are packed: name, flat bytes, dtype, shape."""

DOWN, UP = ".lora_down", ".lora_up"
"""What the name of a matrix is followed by in those of its two factors."""


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
    added: LowRank | None = None
    """What the tensor is, beyond these bytes."""

    @property
    def content(self) -> str:
        """Equal for equal contents: of the bytes, and of what is added to them."""
        if self.added is None:
            return self.digest
        up, down = self.added.up, self.added.down
        return f"{self.digest} + {self.added.scale!r} * {_describe(up)} @ {_describe(down)}"


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to a matrix [a, b]: scale * up @ down, of shapes [a, rank] and [rank, b].

    The sum is computed in float32 and cast to the matrix's dtype.
    """

    down: TensorEntry
    up: TensorEntry
    scale: float


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one version of the weights consists of.

    `digest` covers names, dtypes, shapes and contents, not the version and not the layout: equal weights have
    equal digests whatever their version and bucket size. Adapters count as their base, their factors and their
    scale.
    """

    version: int
    tensors: tuple[TensorEntry, ...]
    bucket_sizes: tuple[int, ...]
    digest: str
    base: str = ""
    """Digest of the base weights, without what is added to them; empty: whole weights."""
    base_buckets: int = 0
    """Buckets that hold the base, the first ones: the same in every version with this base."""

    def encoded(self) -> str:
        """Return it as text, for a process that is reached by text only."""
        return TypeAdapter(Manifest).dump_json(self).decode()

    @classmethod
    def decoded(cls, text: str) -> Manifest:
        """Return the manifest that `encoded` wrote."""
        return TypeAdapter(cls).validate_json(text)


def digest_bytes(data: Bytes) -> str:
    """Return xxh3_128 of contiguous bytes, as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data.data)


def _describe(entry: TensorEntry) -> str:
    return f"{entry.dtype} {entry.shape} {entry.digest}"


def _digest_entries(entries: Iterable[TensorEntry], base: bool = False) -> str:
    """Return the digest of all entries; `base`: without what is added."""
    digest = xxhash.xxh3_128()
    for entry in entries:
        content = entry.digest if base else entry.content
        digest.update(repr((entry.name, entry.dtype, entry.shape, content)).encode())
    return digest.hexdigest()


def pack(
    version: int, tensors: Given, bucket_bytes: int, reuse: Sequence[Bytes] = ()
) -> tuple[Manifest, list[Bytes]]:
    """Copy (name, flat bytes, dtype, shape) tensors into buckets of at most `bucket_bytes`.

    A tensor's bytes are copied before the next tensor is asked for, so the iterable may reuse or free them. `reuse`:
    buckets of an earlier version that nobody reads any more; memory that was written before costs a fraction of what
    new memory costs. Raises ValueError for a bucket size below 1, WeightError for a repeated name or an empty iterable.
    """
    entries, buckets = _fill(tensors, bucket_bytes, 0, reuse)
    if not entries:
        raise WeightError(f"version {version} has no tensors: nothing to publish")
    sizes = tuple(bucket.nbytes for bucket in buckets)
    return Manifest(version, tuple(entries), sizes, _digest_entries(entries)), buckets


def pack_adapters(
    version: int, base: Manifest, factors: Given, scales: Mapping[str, float], bucket_bytes: int
) -> tuple[Manifest, list[Bytes]]:
    """Return the version that is `base` plus adapters: its manifest, and the buckets that follow those of the base.

    `factors`: two for each matrix in `scales`, named after it with DOWN and UP; they are copied as by `pack`. Raises
    WeightError for a factor without its matrix in the base, its other half or its scale, or of the wrong shape.
    """
    entries, buckets = _fill(factors, bucket_bytes, len(base.bucket_sizes))
    parts = {entry.name: entry for entry in entries}
    tensors = []
    for entry in base.tensors:
        if entry.name in scales:
            down, up = parts.pop(entry.name + DOWN, None), parts.pop(entry.name + UP, None)
            if down is None or up is None:
                raise WeightError(f"version {version}: {entry.name!r} lacks a factor of its adapter")
            entry = replace(entry, added=LowRank(down, up, scales[entry.name]))
        tensors.append(entry)
        check_factors(version, entry)
    if parts:
        raise WeightError(f"version {version}: {next(iter(parts))!r} adapts no tensor of the base")
    sizes = (*base.bucket_sizes, *(bucket.nbytes for bucket in buckets))
    manifest = Manifest(
        version, tuple(tensors), sizes, _digest_entries(tensors), base.digest, len(base.bucket_sizes)
    )
    return manifest, buckets


def check_factors(version: int, entry: TensorEntry) -> None:
    """Raise WeightError if what is added to a tensor has not its shape."""
    if entry.added is None:
        return
    down, up = entry.added.down.shape, entry.added.up.shape
    if len(down) != 2 or len(up) != 2 or up[1] != down[0] or (up[0], down[1]) != entry.shape:
        raise WeightError(
            f"version {version}: {entry.name!r} {entry.shape} cannot be added to by factors {up} and {down}"
        )


def _fill(
    tensors: Given, bucket_bytes: int, first_bucket: int, reuse: Sequence[Bytes] = ()
) -> tuple[list[TensorEntry], list[Bytes]]:
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be >= 1, got {bucket_bytes}")
    entries: list[TensorEntry] = []
    buckets: list[Bytes] = []
    names: set[str] = set()

    def memory(nbytes: int) -> Bytes:
        # What `_fill` gave away is cut to what was used; its base is all of it.
        old = reuse[len(buckets)].base if len(buckets) < len(reuse) else None
        if isinstance(old, np.ndarray) and old.nbytes == nbytes:
            return old
        # Zeroed memory is committed page by page: a bucket costs what is written into it.
        return np.zeros(nbytes, np.uint8)

    bucket, used = memory(bucket_bytes), 0
    for name, data, dtype, shape in tensors:
        if name in names:
            raise WeightError(f"tensor {name!r} is published twice: give tied weights once")
        names.add(name)
        flat = np.ascontiguousarray(data).reshape(-1)
        offset = -(-used // ALIGNMENT) * ALIGNMENT
        if offset + flat.nbytes > len(bucket):
            if used:
                buckets.append(bucket[:used])
            bucket, offset = memory(max(bucket_bytes, flat.nbytes)), 0
        used = offset + flat.nbytes
        bucket[offset:used] = flat
        sizes, place = tuple(int(size) for size in shape), first_bucket + len(buckets)
        entries.append(TensorEntry(name, dtype, sizes, place, offset, flat.nbytes, digest_bytes(flat)))
    buckets.append(bucket[:used])
    return entries, buckets


def bytes_of(entry: TensorEntry, buckets: Sequence[Bytes]) -> Bytes:
    """Return a tensor's bytes, or a factor's, without a copy."""
    return buckets[entry.bucket][entry.offset : entry.offset + entry.nbytes]


def views(manifest: Manifest, buckets: Sequence[Bytes]) -> Iterator[tuple[TensorEntry, Bytes]]:
    """Yield every tensor's entry and its bytes, without a copy and without what is added to them.

    Raises WeightError if the buckets do not fit.
    """
    sizes = tuple(bucket.nbytes for bucket in buckets)
    if sizes != manifest.bucket_sizes:
        raise WeightError(
            f"version {manifest.version}: buckets have {sizes} bytes, the manifest says "
            f"{manifest.bucket_sizes}"
        )
    for entry in manifest.tensors:
        yield entry, bytes_of(entry, buckets)


def verify(manifest: Manifest, buckets: Sequence[Bytes], known_base: str = "") -> None:
    """Raise WeightError naming the first tensor whose bytes are not those the manifest describes.

    `known_base`: digest of a base whose bytes were verified before and are the same memory; they are not read again.
    """
    known = bool(manifest.base) and known_base == manifest.base
    for entry, data in views(manifest, buckets):
        if not known:
            _verify_bytes(manifest.version, entry, data)
        if entry.added is not None:
            for factor in (entry.added.down, entry.added.up):
                _verify_bytes(manifest.version, factor, bytes_of(factor, buckets))
    if manifest.base and _digest_entries(manifest.tensors, base=True) != manifest.base:
        raise WeightError(f"version {manifest.version}: its base is not the one with digest {manifest.base}")
    if _digest_entries(manifest.tensors) != manifest.digest:
        raise WeightError(f"version {manifest.version}: the manifest's own digest {manifest.digest} is wrong")


def _verify_bytes(version: int, entry: TensorEntry, data: Bytes) -> None:
    found = digest_bytes(data) if data.nbytes == entry.nbytes else f"{data.nbytes} bytes"
    if found != entry.digest:
        raise WeightError(
            f"version {version}: tensor {entry.name!r} ({entry.dtype} {entry.shape}) arrived as {found}, sent as "
            f"{entry.digest}: publish it again"
        )
