"""The gap between the policy that sampled a token and the policy that trains on it.

Owns the importance weight of that gap and its diagnostics. Both compare two logprobs of the same token: the
trainer's before the update, and the one the rollout engine reported. The gap has two causes, told apart by
the lag: at lag 0 both hold the same weights and differ only in arithmetic; at a larger lag the weights moved.

Axes: T trained tokens; K = MAX_LAG + 1 lags, the last of which also holds every larger lag.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MAX_LAG = 8
"""Lags above are counted with this one; it bounds the number of metrics."""

_LOG_LIMIT = 30.0
"""exp of more is of no use as a statistic, and its square would leave the range of float32."""


def truncated_weights(trainer_T: Tensor, rollout_T: Tensor, cap: float | None) -> Tensor:
    """min(exp(trainer - rollout), cap) per token, without gradient; all 1 when `cap` is None.

    Importance sampling truncated from above, which bounds its variance: rho of V-trace, arXiv 1802.01561.
    """
    with torch.no_grad():
        if cap is None:
            return torch.ones_like(trainer_T)
        return torch.exp(trainer_T - rollout_T).clamp(max=cap)


@dataclass(frozen=True, slots=True)
class MismatchSums:
    """Statistics that add up over micro-batches and ranks: `sums` by addition, `maxima` by maximum.

    sums: (K, 5) per lag: tokens, |gap|, k1, k3, capped weight; then one row (0, 0, 0, ratio, ratio squared).
    maxima: (K,) largest |gap| per lag; -1 where there is no token.
    """

    sums: NDArray[np.float64]
    maxima: NDArray[np.float64]

    @classmethod
    def zero(cls) -> MismatchSums:
        """Of no tokens."""
        return cls(np.zeros((MAX_LAG + 2, 5)), np.full(MAX_LAG + 1, -1.0))

    def __add__(self, other: MismatchSums) -> MismatchSums:
        return MismatchSums(self.sums + other.sums, np.maximum(self.maxima, other.maxima))


def mismatch(
    trainer_T: NDArray[np.float32],
    rollout_T: NDArray[np.float32],
    lags_T: NDArray[np.int32],
    weights_T: NDArray[np.float32],
) -> MismatchSums:
    """Statistics of `gap = trainer - rollout` logprob. `lags_T` is train_step - 1 - policy_version."""
    total = MismatchSums.zero()
    gap_T = trainer_T.astype(np.float64) - rollout_T.astype(np.float64)
    lags_T = np.clip(lags_T, 0, MAX_LAG)
    ratio_T = np.exp(np.clip(gap_T, -_LOG_LIMIT, _LOG_LIMIT))
    columns = (np.ones_like(gap_T), np.abs(gap_T), -gap_T, ratio_T - 1 - gap_T, weights_T)
    for column, values_T in enumerate(columns):
        total.sums[:-1, column] = np.bincount(lags_T, weights=values_T, minlength=MAX_LAG + 1)
    total.sums[-1, 3:] = ratio_T.sum(), np.square(ratio_T).sum()
    np.maximum.at(total.maxima, lags_T, np.abs(gap_T))
    return total


def mismatch_metrics(total: MismatchSums) -> dict[str, float]:
    """The figures of a step, from the sums over all its tokens; {} when there are none.

    `logprob_mismatch_max` and `logprob_mismatch_mean` are of lag 0, where engine and trainer should agree;
    they are absent when no token has lag 0. `..._lagK` are those of every lag K that occurs. `rollout_kl`
    (k1) and `rollout_kl_k3` estimate KL(rollout || trainer) in nats a token: Schulman's estimators k1 and
    k3. `effective_sample_size` is (sum w)^2 / (n sum w^2) of the uncapped ratios, 1 for equal policies.
    """
    tokens_K = total.sums[:-1, 0]
    num_tokens = tokens_K.sum()
    if not num_tokens:
        return {}
    metrics: dict[str, float] = {}
    for lag in np.flatnonzero(tokens_K):
        name = "" if lag == 0 else f"_lag{lag}"
        metrics[f"logprob_mismatch_max{name}"] = float(total.maxima[lag])
        metrics[f"logprob_mismatch_mean{name}"] = float(total.sums[lag, 1] / tokens_K[lag])
    ratio, squares = total.sums[-1, 3:]
    metrics |= {
        "importance_weight_mean": float(total.sums[:-1, 4].sum() / num_tokens),
        "rollout_kl": float(total.sums[:-1, 2].sum() / num_tokens),
        "rollout_kl_k3": float(total.sums[:-1, 3].sum() / num_tokens),
        "effective_sample_size": float(ratio * ratio / (num_tokens * squares)),
    }
    return metrics
