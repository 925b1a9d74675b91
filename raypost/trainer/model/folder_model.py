"""A Hugging Face folder as a source of weights: what a trainer would publish that started from it and never trained.

Owns reading the folder; the names, types and order of the weights are those of PolicyRank.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from raypost.trainer.model.head import Sampling
from raypost.trainer.model.policy import DTYPES, Policy, load_model
from raypost.types import FloatArray, IntArray
from raypost.weights.manifest import Bytes
from raypost.weights.names import CheckpointNames, named_weights


class FolderModel:
    """The model of one folder, on the CPU."""

    def __init__(self, folder: Path | str, dtype: str) -> None:
        """Load the folder. `dtype`: of the weights, as in ModelConfig. Raises ConfigError if it cannot be published."""
        self._policy = Policy(load_model(str(folder), dtype).eval())
        self._names = CheckpointNames(self._policy.model)
        self._dtype = DTYPES[dtype]

    def weights(self) -> Iterator[tuple[str, Bytes, str, tuple[int, ...]]]:
        """Yield (checkpoint name, flat bytes, dtype, shape) of every weight, tied ones once."""
        for name, weight in named_weights(self._policy.model):
            for stored, part in self._names.stored(name, weight.detach()):
                tensor = part.to(self._dtype) if part.is_floating_point() else part
                flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
                yield stored, flat, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)

    @torch.no_grad()
    def canary_logprobs(self, token_ids: IntArray) -> FloatArray:
        """Return the logprob of every token but the first, given those before it, at temperature 1."""
        ids = torch.from_numpy(np.asarray(token_ids, np.int64))
        ones = Sampling(torch.ones(len(ids) - 1))
        logprobs_T, _ = self._policy(ids[None, :-1], torch.arange(len(ids) - 1), ids[1:], ones)
        result: FloatArray = logprobs_T.float().numpy()
        return result
