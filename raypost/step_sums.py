"""Statistics of a train step, summed over micro-batches and ranks.

Owns how a step's figures add up, so that they do not depend on how the batch was split. Computes nothing
that enters the gradient.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from raypost.corrections import MismatchSums, mismatch, mismatch_metrics
from raypost.losses import LossSums
from raypost.metrics import LOSS
from raypost.packing import MicroBatch

_LOSS, _TOKENS, _CLIPPED, _RATIO, _ENTROPY = range(5)


class StepSums:
    """Sums and extremes over the tokens that this rank computed; `reduced`: over those of all ranks."""

    def __init__(self) -> None:
        self._sums = np.zeros(5)
        self._maxima = np.full(2, -np.inf)
        """Of the ratio, and of minus the ratio."""
        self._mismatch = MismatchSums.zero()

    def add(
        self,
        loss: LossSums,
        entropy_T: Tensor,
        before_T: Tensor,
        weights_T: Tensor,
        micro: MicroBatch,
        step: int,
    ) -> None:
        """Add one micro-batch. `before_T`: the trainer's logprobs before the step's first update."""
        self._sums += (loss.loss, loss.num_tokens, loss.clipped, loss.ratio, entropy_T.sum().item())
        self._maxima = np.maximum(self._maxima, (loss.ratio_max, -loss.ratio_min))
        lags_T = step - 1 - micro.policy_versions_T
        trainer_T, weights_T = before_T.cpu().numpy(), weights_T.cpu().numpy()
        self._mismatch += mismatch(trainer_T, micro.rollout_logprobs_T, lags_T, weights_T)

    def reduced(self, device: torch.device) -> StepSums:
        """The same over all ranks. A collective."""
        total, shape = StepSums(), self._mismatch.sums.shape
        sums = np.concatenate([self._sums, self._mismatch.sums.ravel()])
        maxima = np.concatenate([self._maxima, self._mismatch.maxima])
        sums = _all_reduce(sums, dist.ReduceOp.SUM, device)
        maxima = _all_reduce(maxima, dist.ReduceOp.MAX, device)
        total._sums, rest = sums[:5], sums[5:]
        total._maxima, total._mismatch = maxima[:2], MismatchSums(rest.reshape(shape), maxima[2:])
        return total

    def metrics(self, num_minibatches: int) -> dict[str, float]:
        """The figures that exist: the loss is the mean over minibatches, the rest are over tokens."""
        metrics = {LOSS: self._sums[_LOSS] / num_minibatches}
        tokens = self._sums[_TOKENS]
        if tokens:
            metrics |= {
                "entropy": self._sums[_ENTROPY] / tokens,
                "clip_fraction": self._sums[_CLIPPED] / tokens,
                "ratio_mean": self._sums[_RATIO] / tokens,
                "ratio_max": self._maxima[0],
                "ratio_min": -self._maxima[1],
            }
        metrics |= mismatch_metrics(self._mismatch)
        return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}


def _all_reduce(values: np.ndarray, op: dist.ReduceOp, device: torch.device) -> np.ndarray:
    tensor = torch.from_numpy(values).to(device)
    dist.all_reduce(tensor, op=op)
    return tensor.cpu().numpy()
