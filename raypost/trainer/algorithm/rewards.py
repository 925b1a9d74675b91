"""What is added to a trajectory's reward before advantages: an overlong penalty, a KL penalty a token.

Owns the estimators of the KL divergence, which the loss uses too. Pure functions over NumPy arrays, without torch.
Axes: N trajectories, M trained tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from raypost.config import KlKind

if TYPE_CHECKING:
    from torch import Tensor

Floats = NDArray[np.float64]


def overlong_penalties(lengths_N: ArrayLike, limits_N: ArrayLike, buffer: int, penalty: float) -> Floats:
    """Return DAPO's soft overlong punishment, arXiv 2503.14476: penalties_N, 0 or less, to be added to the reward.

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
    """Return -coefficient * `kl_estimate` of each token: rewards_M.

    `logprobs_M` are the trainer's before the step. Raises ValueError for another kind or lengths that differ.
    """
    logprobs, reference = np.asarray(logprobs_M, np.float64), np.asarray(reference_M, np.float64)
    if logprobs.shape != reference.shape:
        raise ValueError(f"{logprobs.shape} logprobs, but {reference.shape} of the reference")
    return -coefficient * kl_estimate(kind, logprobs - reference, np.expm1)


Array = TypeVar("Array", "NDArray[np.float64]", "Tensor")


def kl_estimate(kind: KlKind, gap: Array, expm1: Callable[[Array], Array]) -> Array:
    """Return estimates of KL(policy || reference) at tokens the policy sampled, nats, of NumPy arrays or tensors.

    With d = `gap` = logprob - reference: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d (Schulman, "Approximating KL
    Divergence", 2020). k1 and k3 are unbiased. Raises ValueError for another kind.
    """
    if kind == "k1":
        return gap
    if kind == "k2":
        return gap**2 / 2
    if kind == "k3":
        # Not exp(-d) - 1 + d: small gaps would drown in the rounding of the 1.
        return expm1(-gap) + gap
    raise ValueError(f"unknown KL estimator {kind!r}; there are k1, k2, k3")
