"""Estimators of advantage that compare the members of one group. Pure functions over NumPy arrays.

Owns the formulas only. A group has its true size here, never a nominal one: who counts is the caller's decision.

Axes: G members of one group. Rewards are finite, float64, one a member.
"""

from __future__ import annotations

from math import comb

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

STD_EPS = 1e-6
"""Added to the standard deviation, so that nearly equal rewards do not explode."""


def grpo(rewards_G: ArrayLike, eps: float = STD_EPS) -> Floats:
    """Return (r - mean) / (std + eps): GRPO, arXiv 2402.03300. rewards_G -> advantages_G, float64.

    `std` is the unbiased estimate (divides by G - 1), as TRL and verl have it. Equal rewards give exactly 0.
    Raises ValueError for a group of 1 or a reward that is not finite.
    """
    rewards_G = checked(rewards_G)
    return centred(rewards_G) / (float(rewards_G.std(ddof=1)) + eps)


def mc(rewards_G: ArrayLike, eps: float = STD_EPS) -> Floats:
    """Return (r - mean) / max(std, eps), std unbiased: TorchRL's MCAdvantage over returns. Raises as `grpo` does."""
    rewards_G = checked(rewards_G)
    return centred(rewards_G) / max(float(rewards_G.std(ddof=1)), eps)


def dr_grpo(rewards_G: ArrayLike) -> Floats:
    """Return r - mean, without the standard deviation, which favours very easy and very hard prompts.

    Dr. GRPO, arXiv 2503.20783. rewards_G -> advantages_G, float64. Raises ValueError as `grpo` does.
    """
    return centred(checked(rewards_G))


def rloo(rewards_G: ArrayLike) -> Floats:
    """Return r minus the mean of the others' rewards: RLOO, arXiv 2402.14740. Raises ValueError as `grpo` does."""
    rewards_G = checked(rewards_G)
    return centred(rewards_G) * (len(rewards_G) / (len(rewards_G) - 1))


def opo(rewards_G: ArrayLike, lengths_G: ArrayLike) -> Floats:
    """Return r - sum(length * r) / sum(length): OPO's variance-minimal baseline, arXiv 2505.23585.

    `lengths_G`: trained tokens of each member, positive. Raises ValueError as `grpo` does.
    """
    rewards_G, lengths_G = checked(rewards_G), np.asarray(lengths_G, np.float64)
    if lengths_G.shape != rewards_G.shape or not (lengths_G > 0).all():
        raise ValueError(
            f"each of {len(rewards_G)} members needs a positive length, got {lengths_G.tolist()}"
        )
    if (rewards_G == rewards_G[0]).all():
        return np.zeros_like(rewards_G)
    return rewards_G - float(np.average(rewards_G, weights=lengths_G))


def pass_at_k(rewards_G: ArrayLike, k: int, eps: float = STD_EPS) -> Floats:
    """Return what a member adds to the best of k attempts: pass@k training, arXiv 2508.10751, for any rewards.

    Every set of k of the G members is one attempt and worth its largest reward. A member's advantage is the mean
    worth of the sets that contain it, minus that of all sets, over all sets' standard deviation + eps. With
    rewards 0 and 1 this is the paper's closed form; for others the expected maximum is that of arXiv 2505.15201.
    Raises ValueError as `grpo` does, and unless k < G: with k = G there is one set, hence nothing to compare.
    """
    rewards_G = checked(rewards_G)
    size = len(rewards_G)
    if not 1 <= k < size:
        raise ValueError(f"pass@{k} compares sets of {k} among {size} members: use k from 1 to {size - 1}")
    order = np.argsort(rewards_G, kind="stable")
    sorted_G = rewards_G[order]
    # Of a set, the last in sorted order is worth it: comb(j, k - 1) sets end with member j (from 0).
    ends_G = np.asarray([comb(j, k - 1) / comb(size, k) for j in range(size)])
    mean = float(ends_G @ sorted_G)
    std = float(np.sqrt(max(0.0, ends_G @ np.square(sorted_G - mean))))
    if sorted_G[0] == sorted_G[-1]:
        return np.zeros_like(rewards_G)
    with_member = comb(size - 1, k - 1)
    later_G = (
        np.asarray([comb(j - 1, k - 2) / with_member if j and k > 1 else 0.0 for j in range(size)]) * sorted_G
    )
    own_G = np.asarray([comb(j, k - 1) / with_member for j in range(size)]) * sorted_G
    worth_G = own_G + later_G.sum() - np.cumsum(later_G)
    advantages_G = np.empty_like(rewards_G)
    advantages_G[order] = (worth_G - mean) / (std + eps)
    return advantages_G


def checked(rewards_G: ArrayLike) -> Floats:
    """Return them as float64. Raises ValueError for fewer than 2, another shape, or one that is not finite."""
    rewards_G = np.asarray(rewards_G, np.float64)
    if rewards_G.ndim != 1 or len(rewards_G) < 2:
        raise ValueError(
            f"a group-relative advantage needs 2 or more rewards in one axis, got shape {rewards_G.shape}"
        )
    if not np.isfinite(rewards_G).all():
        raise ValueError(f"rewards must be finite, got {rewards_G.tolist()}: a failure is no reward")
    return rewards_G


def centred(values: Floats) -> Floats:
    """Return the values minus their mean: exactly 0 if they are equal, whose mean may differ by rounding."""
    if not len(values) or (values == values[0]).all():
        return np.zeros_like(values)
    return values - float(values.mean())
