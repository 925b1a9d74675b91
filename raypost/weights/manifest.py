"""Weights as bytes: a manifest and flat buckets.

Owns the layout in which a version of the weights crosses processes, and the check that what arrived is what
was sent. Knows neither torch nor Ray: a tensor is flat uint8 bytes with the name of its dtype and its shape.

A version is whole weights, or base weights that stay as they are and the factors of what adapters add to them:

    pack            whole    [ bucket | bucket | ... ]  what does not change first, if that is known (delta.py)
    pack_adapters   base     [ bucket | bucket | ... ]  made once by `pack`, the same in every version
                    factors  [ bucket ]                 of this version

Invariants: a tensor lies whole in one bucket, at an offset that is a multiple of 64 bytes; tensors keep the
order in which they were given; a bucket exceeds `bucket_bytes` only when a single tensor does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import TypeAdapter

from raypost.errors import WeightError

ALIGNMENT = 64
"""Bytes. A cache line: every dtype can be viewed in place, and SIMD loads are aligned."""

Bytes = NDArray[np.uint8]

T = TypeVar("T")

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
    """Buckets, the first ones, that are the same in other versions, too: those with the base, or, of whole weights,
    those of tensors that do not change. Who has what is in them need not be sent them: see `spares`."""
    epoch: int = 0
    """How often other weights took the place of those that were sent first as this version."""

    def spares(self, held: Manifest | None) -> int:
        """Return how many buckets, the first ones, one who holds `held` need not be sent."""
        if held is None or not self.base_buckets:
            return 0
        if self.base:
            return self.base_buckets if self.base == held.base else 0
        contents = {entry.name: entry.content for entry in held.tensors}
        return 0 if self.changed_in(self.base_buckets, contents) else self.base_buckets

    def changed_in(self, num_buckets: int, contents: Mapping[str, str]) -> str:
        """Return the first tensor of the first `num_buckets` with another content than in `contents`, "" if none."""
        tensors = (entry for entry in self.tensors if entry.bucket < num_buckets)
        return next((one.name for one in tensors if contents.get(one.name) != one.content), "")

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


def pack(version: int, tensors: Given, bucket_bytes: int) -> tuple[Manifest, list[Bytes]]:
    """Copy (name, flat bytes, dtype, shape) tensors into buckets of at most `bucket_bytes`; see `pack_by`."""
    return pack_by(version, tensors, bucket_bytes, np.copy)


def pack_by(
    version: int, tensors: Given, bucket_bytes: int, give: Callable[[Bytes], T]
) -> tuple[Manifest, list[T]]:
    """Fill one bucket after the other and `give` it away; return the manifest and what `give` returned.

    A tensor's bytes are read before the next tensor is asked for, and a bucket's memory is used again after `give`:
    no more than one bucket is held here at a time. Raises ValueError for a bucket size below 1, WeightError for a
    repeated name or an empty iterable.
    """
    filling = Filling(bucket_bytes, give)
    for tensor in flattened(tensors):
        filling.add(*tensor)
    filling.end()
    return manifest_of(version, filling.entries, filling.sizes), filling.given


def manifest_of(version: int, entries: Sequence[TensorEntry], sizes: Sequence[int]) -> Manifest:
    """Return the manifest of whole weights. Raises WeightError without any."""
    if not entries:
        raise WeightError(f"version {version} has no tensors: nothing to publish")
    return Manifest(version, tuple(entries), tuple(sizes), _digest_entries(entries))


def pack_adapters(
    version: int, base: Manifest, factors: Given, scales: Mapping[str, float], bucket_bytes: int
) -> tuple[Manifest, list[Bytes]]:
    """Return the version that is `base` plus adapters: its manifest, and the buckets that follow those of the base.

    `factors`: two for each matrix in `scales`, named after it with DOWN and UP; packed as by `pack`. Raises
    WeightError for a factor without its matrix in the base, its other half or its scale, or of the wrong shape.
    """
    filling = Filling(bucket_bytes, np.copy, len(base.bucket_sizes))
    for factor in flattened(factors):
        filling.add(*factor)
    filling.end()
    parts = {entry.name: entry for entry in filling.entries}
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
    sizes = (*base.bucket_sizes, *filling.sizes)
    manifest = Manifest(
        version, tuple(tensors), sizes, _digest_entries(tensors), base.digest, len(base.bucket_sizes)
    )
    return manifest, filling.given


def check_factors(version: int, entry: TensorEntry) -> None:
    """Raise WeightError if what is added to a tensor has not its shape."""
    if entry.added is None:
        return
    down, up = entry.added.down.shape, entry.added.up.shape
    if len(down) != 2 or len(up) != 2 or up[1] != down[0] or (up[0], down[1]) != entry.shape:
        raise WeightError(
            f"version {version}: {entry.name!r} {entry.shape} cannot be added to by factors {up} and {down}"
        )


def flattened(tensors: Given) -> Iterator[tuple[str, Bytes, str, tuple[int, ...], str]]:
    """Yield each tensor as contiguous bytes, with its digest. Raises WeightError for a repeated name."""
    names: set[str] = set()
    for name, data, dtype, shape in tensors:
        if name in names:
            raise WeightError(f"tensor {name!r} is published twice: give tied weights once")
        names.add(name)
        flat = np.ascontiguousarray(data).reshape(-1)
        yield name, flat, dtype, tuple(int(size) for size in shape), digest_bytes(flat)


class Filling(Generic[T]):
    """Buckets that are filled one after the other, in one bucket's memory, and given away."""

    def __init__(
        self,
        bucket_bytes: int,
        give: Callable[[Bytes], T],
        first_bucket: int = 0,
        memory: Bytes | None = None,
    ) -> None:
        """`give` copies what it is given. `memory`: of a filling that has ended, which costs less than new memory."""
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be >= 1, got {bucket_bytes}")
        # Zeroed memory is committed page by page: it costs what is written into it.
        self.memory = np.zeros(bucket_bytes, np.uint8) if memory is None else memory
        self.entries: list[TensorEntry] = []
        self.sizes: list[int] = []
        self.given: list[T] = []
        self._give = give
        self._first = first_bucket
        self._used: int | None = None
        """Of the memory; None: no tensor is in it."""

    def add(self, name: str, flat: Bytes, dtype: str, shape: tuple[int, ...], digest: str) -> None:
        """Copy a tensor; one that is larger than a bucket is given away alone, as it is."""
        offset = -(-(self._used or 0) // ALIGNMENT) * ALIGNMENT
        if self._used is not None and offset + flat.nbytes > len(self.memory):
            self.end()
            offset = 0
        place = self._first + len(self.sizes)
        self.entries.append(TensorEntry(name, dtype, shape, place, offset, flat.nbytes, digest))
        if flat.nbytes > len(self.memory):
            self._given(flat)
        else:
            self._used = offset + flat.nbytes
            self.memory[offset : self._used] = flat

    def end(self) -> None:
        """Give away what is in the memory, if anything is."""
        if self._used is not None:
            self._given(self.memory[: self._used])
            self._used = None

    def _given(self, bucket: Bytes) -> None:
        self.given.append(self._give(bucket))
        self.sizes.append(bucket.nbytes)


def bytes_of(entry: TensorEntry, buckets: Sequence[Bytes]) -> Bytes:
    """Return a tensor's bytes, or a factor's, without a copy."""
    return buckets[entry.bucket][entry.offset : entry.offset + entry.nbytes]


def views(
    manifest: Manifest, buckets: Sequence[Bytes], known: int = 0
) -> Iterator[tuple[TensorEntry, Bytes]]:
    """Yield every tensor's entry and its bytes, without a copy and without what is added to them.

    `known`: so many buckets, the first ones, are not looked at, nor are the tensors in them. Raises WeightError if the
    others do not fit.
    """
    sizes = tuple(bucket.nbytes for bucket in buckets)
    if len(sizes) != len(manifest.bucket_sizes) or sizes[known:] != manifest.bucket_sizes[known:]:
        raise WeightError(
            f"version {manifest.version}: buckets have {sizes[known:]} bytes, the manifest says "
            f"{manifest.bucket_sizes[known:]}"
        )
    for entry in manifest.tensors:
        if entry.bucket >= known:
            yield entry, bytes_of(entry, buckets)


def verify(manifest: Manifest, buckets: Sequence[Bytes], known: int = 0) -> None:
    """Raise WeightError naming the first tensor whose bytes are not those the manifest describes.

    `known`: so many buckets, the first ones, are not read, since what is in them was verified before.
    """
    for entry, data in views(manifest, buckets, known):
        _verify_bytes(manifest.version, entry, data)
    factors = (entry.added for entry in manifest.tensors if entry.added is not None)
    for factor in (one for added in factors for one in (added.down, added.up)):
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
