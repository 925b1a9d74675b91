"""SentTensors: what a version must bring for a model, and its tensors one by one.

Owns the names and shapes of the checkpoint that the model is loaded from. Knows nothing of vLLM's modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from raypost.errors import WeightError
from raypost.weights.low_rank import merged
from raypost.weights.manifest import Bytes, Manifest, TensorEntry, bytes_of, check_factors
from raypost.weights.names import CheckpointNames


class SentTensors:
    """The tensors of any version of one model."""

    def __init__(self, hf_config: Any, device: torch.device) -> None:
        """`device`: where adapters are added to what they adapt."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(hf_config)
        self._shapes = CheckpointNames(model).shapes
        self._device = device

    def check(self, manifest: Manifest) -> None:
        """Raise WeightError unless names, shapes and sizes are those of the model."""
        sent = {entry.name: entry for entry in manifest.tensors}
        for name, shape in self._shapes.items():
            if name not in sent:
                raise WeightError(
                    f"version {manifest.version} lacks tensor {name!r} {shape}: publish all of them"
                )
            if sent[name].shape != shape:
                raise WeightError(
                    f"version {manifest.version}: tensor {name!r} has shape {sent[name].shape}, the engine's "
                    f"model has {shape}: use one model configuration for both"
                )
        for name, entry in sent.items():
            if name not in self._shapes:
                raise WeightError(
                    f"version {manifest.version} has tensor {name!r}, which the engine's model lacks"
                )
            factors = () if entry.added is None else (entry.added.down, entry.added.up)
            for part in (entry, *factors):
                if part.nbytes != prod(part.shape) * _dtype(part).itemsize:
                    raise WeightError(
                        f"version {manifest.version}: tensor {part.name!r} has {part.nbytes} bytes, not those of "
                        f"{part.dtype} {part.shape}"
                    )
            check_factors(manifest.version, entry)

    def contents(
        self, entries: Iterable[TensorEntry], buckets: Sequence[Bytes]
    ) -> Iterator[tuple[TensorEntry, Tensor]]:
        """Yield tensors to load, one at a time: a merged matrix exists only while it is loaded."""
        for entry in entries:
            tensor = _tensor(entry, buckets)
            if entry.added is not None:
                parts = (_tensor(part, buckets) for part in (entry.added.down, entry.added.up))
                down, up = (part.to(self._device) for part in parts)
                tensor = merged(tensor.to(self._device), down, up, entry.added.scale)
            yield entry, tensor


def _dtype(entry: TensorEntry) -> torch.dtype:
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightError(f"tensor {entry.name!r} has dtype {entry.dtype!r}, which PyTorch does not know")
    return dtype


def _tensor(entry: TensorEntry, buckets: Sequence[Bytes]) -> Tensor:
    return torch.from_numpy(bytes_of(entry, buckets)).view(_dtype(entry)).reshape(entry.shape)
