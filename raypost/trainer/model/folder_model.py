"""A Hugging Face folder as a source of weights: what a trainer would publish that started from it and never trained.

Owns reading the folder; the names, types and order of the weights are those of PolicyRank.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from raypost.trainer.model.policy import Policy, canary_logprobs, load_model
from raypost.types import FloatArray, IntArray
from raypost.weights.names import CheckpointNames, named_weights


class FolderModel:
    """The model of one folder, on the CPU."""

    def __init__(self, folder: Path | str, dtype: str) -> None:
        """Load the folder. `dtype`: of the weights, as in ModelConfig. Raises ConfigError if it cannot be published."""
        self._policy = Policy(load_model(str(folder), dtype).eval())
        self._names = CheckpointNames(self._policy.model)
        self._dtype = getattr(torch, dtype)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight under its checkpoint name, tied ones once."""
        for name, weight in named_weights(self._policy.model):
            for stored, part in self._names.stored(name, weight.detach()):
                yield stored, part.to(self._dtype) if part.is_floating_point() else part

    def canary_logprobs(self, token_ids: IntArray) -> FloatArray:
        """Return the logprob of every token but the first, given those before it, at temperature 1."""
        return canary_logprobs(self._policy, token_ids, torch.device("cpu"))
