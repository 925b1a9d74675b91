"""PyTorch's tensors as the bytes that a manifest describes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from raypost.weights.manifest import Given


def as_bytes(weights: Iterable[tuple[str, Tensor]]) -> Given:
    """Yield (name, flat bytes, dtype, shape) of named tensors in main memory, without a copy of contiguous ones."""
    for name, tensor in weights:
        flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        yield name, flat, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
