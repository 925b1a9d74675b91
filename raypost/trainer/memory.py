"""What a rank says when a micro-batch does not fit its memory, and how log lines name groups.

Owns the words only. A rank tries nothing again, since the others are inside a collective that it has left: the driver
brings all ranks back with smaller micro-batches (jobs/recovery.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from raypost.errors import BatchMemoryError
from raypost.trainer.batch.packing import MicroBatch
from raypost.trainer.batch.train_batch import Sample

_NAMED = 16
"""Groups that a line names at most."""
_CPU_ALLOCATOR = "DefaultCPUAllocator"
"""In the message of the RuntimeError that PyTorch raises on the CPU."""


@contextmanager
def memory_named(micro: MicroBatch, where: str) -> Iterator[None]:
    """Within, turn running out of memory into BatchMemoryError, which names the micro-batch and how to shrink it."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        known = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not known and _CPU_ALLOCATOR not in str(error):
            raise
        raise BatchMemoryError(
            f"{where}: out of memory in a micro-batch of {micro.num_inputs} tokens, {micro.num_trained} trained, of "
            f"{len(micro.samples)} trajectories; groups: {first_of(group_names(micro.samples)) or 'none'}. Lower "
            "train.micro_batch_tokens or train.logits_mb, set train.gradient_checkpointing or "
            f"train.offload_optimizer, or raise train.zero_stage or train.num_workers ({error!s:.200})"
        ) from error


def group_names(samples: Sequence[Sample]) -> list[str]:
    """Return every group of the samples once, as log lines and errors call them."""
    return sorted({str(sample.key) for sample in samples})


def first_of(items: Sequence[str]) -> str:
    """Return the first few, and how many more there are."""
    more = len(items) - _NAMED
    return ", ".join(items[:_NAMED]) + (f" and {more} more" if more > 0 else "")
