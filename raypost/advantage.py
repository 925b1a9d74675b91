"""Advantages: how much better a trajectory was than its siblings. Pure functions over NumPy arrays.

Owns the formulas only. Which trajectories count (FAILED ones never do) is decided by the caller, so a group
has its true size here, never a nominal one.

Axes: G members of one group, N trajectories of all groups, in the groups' order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

Rewards = NDArray[np.float64]

STD_EPS = 1e-6
"""Added to the standard deviation, so that nearly equal rewards do not explode."""


def grpo(rewards_G: ArrayLike, eps: float = STD_EPS, unbiased: bool = True) -> Rewards:
    """(r - mean) / (std + eps): GRPO, arXiv 2402.03300. rewards_G -> advantages_G, float64.

    `std` is the unbiased estimate (divides by G - 1), as TRL and verl have it; `unbiased=False` divides by
    G. Equal rewards give exactly 0. Raises ValueError for a group of 1 or a reward that is not finite.
    """
    rewards_G = _checked(rewards_G)
    centred_G = _centred(rewards_G)
    return centred_G / (rewards_G.std(ddof=1 if unbiased else 0) + eps)


def dr_grpo(rewards_G: ArrayLike) -> Rewards:
    """r - mean, without the standard deviation, which favours very easy and very hard prompts.

    Dr. GRPO, arXiv 2503.20783. rewards_G -> advantages_G, float64. Raises ValueError as `grpo` does.
    """
    return _centred(_checked(rewards_G))


ESTIMATORS: dict[str, Callable[[ArrayLike], Rewards]] = {"grpo": grpo, "dr_grpo": dr_grpo}
"""By the names of `train.advantage`."""


def group_advantages(kind: str, rewards_N: ArrayLike, group_sizes: Sequence[int]) -> Rewards:
    """Advantages of consecutive groups of the given true sizes. rewards_N -> advantages_N, float64.

    Raises ValueError for an unknown estimator, sizes that do not add up to N, and as the estimator does.
    """
    if kind not in ESTIMATORS:
        raise ValueError(f"unknown advantage {kind!r}; there are {', '.join(ESTIMATORS)}")
    rewards_N = np.asarray(rewards_N, np.float64)
    if sum(group_sizes) != len(rewards_N):
        raise ValueError(f"groups of {sum(group_sizes)} trajectories, but {len(rewards_N)} rewards")
    bounds = np.cumsum([0, *group_sizes])
    parts = [ESTIMATORS[kind](rewards_N[a:b]) for a, b in pairwise(bounds)]
    return np.concatenate([np.empty(0), *parts])


def _checked(rewards_G: ArrayLike) -> Rewards:
    rewards_G = np.asarray(rewards_G, np.float64)
    if rewards_G.ndim != 1 or len(rewards_G) < 2:
        raise ValueError(
            f"a group-relative advantage needs 2 or more rewards in one axis, got shape {rewards_G.shape}"
        )
    if not np.isfinite(rewards_G).all():
        raise ValueError(f"rewards must be finite, got {rewards_G.tolist()}: a failure is no reward")
    return rewards_G


def _centred(rewards_G: Rewards) -> Rewards:
    # The mean of equal numbers may differ from them by rounding: equal must mean exactly 0.
    if (rewards_G == rewards_G[0]).all():
        return np.zeros_like(rewards_G)
    return rewards_G - rewards_G.mean()
