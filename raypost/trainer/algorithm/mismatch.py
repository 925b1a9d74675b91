"""What a train step's tokens looked like, by the staleness of the policy that sampled them.

Owns the diagnostics. They compare three logprobs of the same token: the rollout engine's, the trainer's before the
step and the policy's that is being trained. The gap between the first two has two causes, told apart by the lag (a
token's staleness): at lag 0 both hold the same weights and differ only in arithmetic; at a larger lag the weights
moved. Computes nothing that enters the gradient.

A rejected token is counted: in every figure of the gap, and in the denominator of the fractions.

Axes: T trained tokens; K = MAX_LAG + 1 lags, the last of which also holds every larger lag.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raypost.observe import metrics

Floats = NDArray[np.float64]

MAX_LAG = 8
"""Lags above are counted with this one; it bounds the number of metrics."""

_LOG_LIMIT = 30.0
"""exp of more is of no use as a statistic, and its square would leave the range of float32."""


@dataclass(frozen=True, slots=True)
class LagSums:
    """Statistics that add up over micro-batches and ranks: `sums` by addition, `maxima` by maximum.

    sums: (K, 10) per lag, of all tokens: tokens, |gap|, k1, k3, ratio, ratio^2; of the kept ones: weight, tokens,
    clipped, step ratio. maxima: (K, 5) per lag: |gap|, ratio, -ratio, step ratio, -step ratio; -inf where there is
    none. The ratio is exp(gap), trainer over rollout; the step ratio is the loss's, policy over proximal.
    """

    sums: Floats
    maxima: Floats

    @classmethod
    def zero(cls) -> LagSums:
        """Return the statistics of no tokens."""
        return cls(np.zeros((MAX_LAG + 1, 10)), np.full((MAX_LAG + 1, 5), -np.inf))

    @classmethod
    def of(
        cls,
        trainer_T: Floats,
        rollout_T: Floats,
        lags_T: NDArray[np.int64],
        weights_T: Floats,
        keep_T: NDArray[np.bool_],
        step_ratio_T: Floats,
        clipped_T: NDArray[np.bool_],
    ) -> LagSums:
        """Return a micro-batch's statistics. gap = trainer - rollout logprob; lag = train_step - 1 - policy_version.

        `step_ratio_T` and `clipped_T` of tokens that are not kept are not read.
        """
        total = cls.zero()
        gap_T = trainer_T - rollout_T
        limited_T = np.clip(gap_T, -_LOG_LIMIT, _LOG_LIMIT)
        ratio_T, size_T = np.exp(limited_T), np.abs(gap_T)
        k3_T = np.expm1(limited_T) - limited_T
        of_all = np.stack([np.ones_like(gap_T), size_T, -gap_T, k3_T, ratio_T, ratio_T**2])
        of_kept = np.stack([weights_T, of_all[0], clipped_T, step_ratio_T])
        lags_T = np.clip(lags_T, 0, MAX_LAG)
        for lag in np.flatnonzero(np.bincount(lags_T, minlength=MAX_LAG + 1)):
            here = lags_T == lag
            kept = here & keep_T
            total.sums[lag] = [*of_all[:, here].sum(1), *of_kept[:, kept].sum(1)]
            ratios, steps = ratio_T[here], of_kept[-1, kept]
            extremes = size_T[here], ratios, -ratios, steps, -steps
            total.maxima[lag] = [values.max(initial=-np.inf) for values in extremes]
        return total

    def __add__(self, other: LagSums) -> LagSums:
        """Return the statistics of both."""
        return LagSums(self.sums + other.sums, np.maximum(self.maxima, other.maxima))

    def metrics(self) -> dict[str, float]:
        """Return the figures of a step, from the sums over all its tokens; {} when there are none.

        Each is there for all tokens under its name and for every lag K that occurs under name_lagK, but for
        `logprob_mismatch_max` and `logprob_mismatch_mean`: without a lag they are of lag 0, where engine and
        trainer should agree, and absent when no token has lag 0.

        importance_weight_mean: of kept tokens. rollout_kl (k1) and rollout_kl_k3 estimate KL(rollout || trainer) in
        nats a token: Schulman's estimators. rollout_ratio_mean, _max, _min: trainer over rollout.
        effective_sample_size: (sum w)^2 / (n sum w^2) of these ratios, uncut; 1 for equal policies. ratio_mean,
        ratio_max, ratio_min, clip_fraction: the loss's ratio and what its clip decided, over kept tokens.
        rejected_fraction and token_fraction: over all tokens.
        """
        tokens_K = self.sums[:, 0]
        everything = tokens_K.sum()
        figures: dict[str, float] = {}
        if not everything:
            return figures
        figures |= _figures(self.sums.sum(0), self.maxima.max(0), "")
        for lag in np.flatnonzero(tokens_K).tolist():
            suffix = f"_lag{lag}"
            figures |= _figures(self.sums[lag], self.maxima[lag], suffix)
            figures[metrics.TOKEN_FRACTION + suffix] = tokens_K[lag] / everything
            name = "" if lag == 0 else suffix
            figures[metrics.LOGPROB_MISMATCH_MAX + name] = self.maxima[lag, 0]
            figures[metrics.LOGPROB_MISMATCH_MEAN + name] = self.sums[lag, 1] / tokens_K[lag]
        return {name: float(value) for name, value in figures.items()}


def _figures(sums: Floats, maxima: Floats, suffix: str) -> dict[str, float]:
    tokens, _, k1, k3, ratio, square, weight, kept, clipped, step_ratio = sums
    _, max_ratio, min_ratio, max_step_ratio, min_step_ratio = maxima
    figures = {
        metrics.ROLLOUT_KL: k1 / tokens,
        metrics.ROLLOUT_KL_K3: k3 / tokens,
        metrics.ROLLOUT_RATIO_MEAN: ratio / tokens,
        metrics.ROLLOUT_RATIO_MAX: max_ratio,
        metrics.ROLLOUT_RATIO_MIN: -min_ratio,
        metrics.EFFECTIVE_SAMPLE_SIZE: ratio**2 / (tokens * square),
        metrics.REJECTED_FRACTION: 1 - kept / tokens,
    }
    if kept:
        figures |= {
            metrics.IMPORTANCE_WEIGHT_MEAN: weight / kept,
            metrics.CLIP_FRACTION: clipped / kept,
            metrics.RATIO_MEAN: step_ratio / kept,
            metrics.RATIO_MAX: max_step_ratio,
            metrics.RATIO_MIN: -min_step_ratio,
        }
    return {name + suffix: value for name, value in figures.items()}
