"""What is added to a trajectory's reward before advantages: an overlong penalty, a KL penalty a token.

Pure functions over NumPy arrays. Axes: N trajectories, M trained tokens of all of them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from raypost.config import KlKind

Floats = NDArray[np.float64]


def overlong_penalties(lengths_N: ArrayLike, limits_N: ArrayLike, buffer: int, penalty: float) -> Floats:
    """Soft overlong punishment of DAPO, arXiv 2503.14476: 0 or less, to be added to the reward. -> penalties_N.

    A response may use its limit minus `buffer` tokens freely; with e tokens more it loses e / buffer * penalty, from
    the limit on all of `penalty`. `buffer` 0: nothing is lost. Raises ValueError for a buffer longer than a limit.
    """
    lengths, limits = np.asarray(lengths_N, np.float64), np.asarray(limits_N, np.float64)
    if buffer == 0:
        return np.zeros_like(lengths)
    if buffer < 0 or (limits < buffer).any():
        raise ValueError(
            f"an overlong buffer of {buffer} tokens does not fit a limit of {limits.min():g} tokens"
        )
    exceeded = np.clip(lengths - (limits - buffer), 0, buffer)
    return -exceeded / buffer * penalty


def kl_rewards(kind: KlKind, logprobs_M: ArrayLike, reference_M: ArrayLike, coefficient: float) -> Floats:
    """-coefficient * estimate of KL(policy || reference) of each token, as losses.kl_estimate has it. -> rewards_M.

    `logprobs_M` are the trainer's before the step. Raises ValueError for another kind or lengths that differ.
    """
    logprobs, reference = np.asarray(logprobs_M, np.float64), np.asarray(reference_M, np.float64)
    if logprobs.shape != reference.shape:
        raise ValueError(f"{logprobs.shape} logprobs, but {reference.shape} of the reference")
    gap = logprobs - reference
    if kind == "k1":
        return -coefficient * gap
    if kind == "k2":
        return -coefficient * np.square(gap) / 2
    if kind == "k3":
        return -coefficient * (np.expm1(-gap) + gap)
    raise ValueError(f"unknown KL estimator {kind!r}; there are k1, k2, k3")
