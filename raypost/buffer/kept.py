"""KeptBatches: the batches that were trained since the last checkpoint, on disk, so that they can be trained again.

    step-00000012    a checksum and its length, then the groups of the batch of step 12 as raw columns (encoding.py)

Owns the files of one folder. A file is written beside its place and renamed, so a batch is there as a whole or not at
all; it is handed to the kernel, not to the disk: it survives the death of the process, not that of the machine, after
which a run continues from its checkpoint and needs none of them.

Disk space: the batches of all steps between two checkpoints.
"""

from __future__ import annotations

import logging
import struct
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import xxhash

from raypost.buffer.encoding import from_buffer, to_buffers
from raypost.errors import CheckpointError
from raypost.types.packed import PackedGroups

log = logging.getLogger(__name__)

_FRAME = struct.Struct("<QQ")
"""Checksum and length of what follows."""
_PREFIX = "step-"


class KeptBatches:
    """Writes on a thread of its own, one batch after the other. One writer a folder at a time."""

    def __init__(self, folder: Path) -> None:
        """Touch nothing before the first batch."""
        self._folder = folder
        self._writer = ThreadPoolExecutor(1, "kept-batches")
        self._writing: dict[int, Future[None]] = {}

    def keep(self, step: int, batch: PackedGroups) -> None:
        """Begin to write the batch of `step`, unless it is there. It must not change until `settle` returned."""
        if step not in self._writing and not self._path(step).exists():
            self._writing[step] = self._writer.submit(self._write, step, batch)

    def settle(self, step: int) -> bool:
        """Wait until the batch of `step` is written; return whether it is there.

        One that cannot be written is logged: the run goes on, and could not train it again.
        """
        writing = self._writing.pop(step, None)
        if writing is not None:
            try:
                writing.result()
            except OSError as error:
                log.error(
                    "the batch of step %d is not kept, so a trainer that dies before the next checkpoint ends the run: "
                    "%s", step, error,
                )  # fmt: skip
        return self._path(step).exists()

    def read(self, step: int) -> PackedGroups:
        """Return the batch of `step`. Raises CheckpointError if it is not there or damaged."""
        self.settle(step)
        path = self._path(step)
        try:
            data = path.read_bytes()
            checksum, length = _FRAME.unpack_from(data)
            body = data[_FRAME.size :]
            if len(body) != length or xxhash.xxh3_64_intdigest(body) != checksum:
                raise ValueError(f"{len(body)} bytes of {length}, or a wrong checksum")
            return from_buffer(body)
        except (OSError, ValueError, struct.error) as error:
            raise CheckpointError(
                f"the batch of step {step} cannot be trained again, {path} is damaged or lost: {error}; continue the "
                "run by the same command from its last checkpoint"
            ) from error

    def forget(self, upto: int) -> None:
        """Delete the batches of the steps up to `upto`: a checkpoint has them."""
        for step in self.steps():
            if step <= upto:
                self._writing.pop(step, None)
                self._path(step).unlink(missing_ok=True)

    def clear(self) -> None:
        """Delete all: another attempt begins."""
        for path in self._folder.glob(f"{_PREFIX}*"):
            path.unlink(missing_ok=True)

    def steps(self) -> list[int]:
        """Return the steps whose batches are there, in order."""
        names = (path.name.removeprefix(_PREFIX) for path in self._folder.glob(f"{_PREFIX}*"))
        return sorted(int(name) for name in names if name.isdecimal())

    def _path(self, step: int) -> Path:
        return self._folder / f"{_PREFIX}{step:08d}"

    def _write(self, step: int, batch: PackedGroups) -> None:
        path = self._path(step)
        temporary = path.with_suffix(".tmp")
        self._folder.mkdir(parents=True, exist_ok=True)
        pieces, hashed = to_buffers(batch), xxhash.xxh3_64()
        for piece in pieces:
            hashed.update(piece)
        try:
            with open(temporary, "wb") as file:
                file.write(_FRAME.pack(hashed.intdigest(), sum(piece.nbytes for piece in pieces)))
                for piece in pieces:
                    file.write(piece)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
