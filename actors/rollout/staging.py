"""Staging: versions of the weights that are in an engine's process, and not in its model yet.

Owns how their bytes come there, by shared memory of the same machine or by a broadcast group from the trainer, and
their verification, on a thread of its own while requests run. Knows nothing of vLLM or of the model.

    map       paths of memory that the rollout worker filled     -> verify -> prepare
    receive   a seat in a group whose rank 0 sends               -> receive -> verify -> prepare

`prepare` is the engine's: what it can make of a version before the model waits for it. What goes wrong is written into
a pipe, `answers`, whose end is the sign that all is done: a call would be answered by a busy engine between two steps
only. The base that adapters are added to stays here: it is sent, verified and kept
once, outside the model.

Invariant: `take` gives only what was verified, byte for byte, on every transport.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from raypost.errors import WeightError
from raypost.weights.group import BroadcastGroup
from raypost.weights.manifest import Bytes, Manifest, verify
from raypost.weights.seats import Seats


@dataclass(frozen=True, slots=True)
class StagedVersion:
    """A version that is here and not loaded."""

    manifest: Manifest
    buckets: list[Bytes]
    absent: int
    """Buckets, the first ones, that are empty here: the model must hold what is in them."""
    verified: Future[None]
    """Ends once it is prepared, with a WeightError if the bytes are not those of the manifest."""


@dataclass(frozen=True, slots=True)
class Base:
    """Verified weights that adapters are added to."""

    digest: str
    buckets: list[Bytes]


class Staging:
    """The version that is loaded next, one at a time."""

    def __init__(self, thread: Executor, prepare: Callable[[Manifest, list[Bytes]], None]) -> None:
        """`thread`: one, on which versions come, are verified, prepared and given up, in this order."""
        self._thread = thread
        self._prepare = prepare
        self._staged: StagedVersion | None = None
        self._base: Base | None = None
        self._group: BroadcastGroup | None = None
        self._spare: list[Bytes] = []
        """Memory of versions that came by a group and are loaded."""

    def map(self, manifest: Manifest, answers: BinaryIO, paths: Sequence[str]) -> None:
        """Map a version and begin to verify its bytes.

        `paths` may lack the first buckets: those of a base that is here, or what the model holds (the caller knows).
        """
        self._staged = None
        first = self._first(manifest, manifest.base_buckets if len(paths) < len(manifest.bucket_sizes) else 0)
        buckets = first + [_map(path) for path in paths]
        verified = self._thread.submit(self._verify, answers, manifest, buckets, len(first))
        self._stage(manifest, buckets, len(first), verified)

    def _first(self, manifest: Manifest, number: int) -> list[Bytes]:
        """Return buckets in place of those that are not sent; [] if there are none."""
        if number != manifest.base_buckets:
            return []
        if not manifest.base:
            return [np.zeros(0, np.uint8)] * number
        base = self._base
        return list(base.buckets) if base is not None and base.digest == manifest.base else []

    def receive(self, manifest: Manifest, answers: BinaryIO, seats: Seats, rank: int) -> None:
        """Begin to receive a version from rank 0 of a group, and to verify it.

        Raises WeightError if it is sent without a base that is not here.
        """
        self._staged = None
        buckets = self._first(manifest, seats.first_bucket)
        if len(buckets) != seats.first_bucket:
            answers.close()
            raise WeightError(
                f"version {manifest.version} is sent without its first {seats.first_bucket} buckets, which are not here"
            )
        received = self._thread.submit(self._receive, answers, manifest, buckets, seats, rank)
        self._stage(manifest, buckets, seats.first_bucket, received)

    def _stage(self, manifest: Manifest, buckets: list[Bytes], first: int, verified: Future[None]) -> None:
        self._staged = StagedVersion(manifest, buckets, 0 if manifest.base else first, verified)

    def _receive(
        self, answers: BinaryIO, manifest: Manifest, buckets: list[Bytes], seats: Seats, rank: int
    ) -> None:
        with _answering(answers):
            group, self._group = self._group, None
            if group is None or group.seats.meeting != seats.meeting:
                group = BroadcastGroup(seats, rank)
            for size in manifest.bucket_sizes[seats.first_bucket :]:
                buckets.append(self._memory(size))
                group.broadcast(buckets[-1])
            # Kept only when all went well: a group of which one broadcast failed is of no use.
            self._group = group
            verify(manifest, buckets, seats.first_bucket)
            self._prepare(manifest, buckets)

    def _verify(self, answers: BinaryIO, manifest: Manifest, buckets: list[Bytes], known: int) -> None:
        with _answering(answers):
            verify(manifest, buckets, known)
            self._prepare(manifest, buckets)

    def _memory(self, nbytes: int) -> Bytes:
        """Return memory that was written before, if there is any: it costs a fraction of other."""
        for place, spare in enumerate(self._spare):
            if spare.nbytes == nbytes:
                return self._spare.pop(place)
        return np.empty(nbytes, np.uint8)

    def take(self, version: int, digest: str) -> StagedVersion:
        """Return what is staged, once it is verified. Raises WeightError if it is another version, or wrong."""
        staged = self._staged
        if staged is None:
            raise WeightError("no version is staged: stage one first")
        manifest = staged.manifest
        if (manifest.version, manifest.digest) != (version, digest):
            raise WeightError(f"version {manifest.version} is staged, not version {version}")
        staged.verified.result()
        self._staged = None
        self._base = Base(manifest.base, staged.buckets[: manifest.base_buckets]) if manifest.base else None
        return staged

    def give_up(self, staged: StagedVersion) -> None:
        """Release the memory of a version that is loaded; not while requests wait, since unmapping takes time."""
        self._thread.submit(self._release, staged)

    def _release(self, staged: StagedVersion) -> None:
        kept = staged.manifest.base_buckets
        # What is mapped belongs to the sender's file.
        self._spare = [one for one in staged.buckets[kept:] if one.base is None]
        staged.buckets.clear()


@contextmanager
def _answering(answers: BinaryIO) -> Iterator[None]:
    """Write into `answers` what goes wrong in the block, and close it."""
    with answers:
        try:
            yield
        except WeightError as error:
            answers.write(str(error).encode())
            raise


def _map(path: str) -> Bytes:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        # Private and writable: PyTorch refuses read-only memory, and no write reaches the sender's bytes.
        memory = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return np.frombuffer(memory, np.uint8)
