"""Which members of an over-sampled group are trained: dynamic sampling over returns (`train.advantage.select`).

Pure functions over NumPy arrays. Axis: C candidates of one group.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import ArrayLike, NDArray

from raypost.config.algorithm import Selector, SessionReward


def member_reward(rewards: ArrayLike, how: SessionReward) -> float:
    """Return what a member of a group is worth, from the rewards of its trajectories."""
    values = np.asarray(rewards, np.float64)
    return float(values[-1] if how == "last" else getattr(np, how)(values))


def within_bounds(returns_C: ArrayLike, bounds: tuple[float, float]) -> bool:
    """Return whether the mean return lies strictly between the bounds: DAPO's dynamic sampling, arXiv 2503.14476.

    With (0, 1) and rewards 0 and 1, groups that are all right or all wrong are refused.
    """
    returns = _checked(returns_C)
    return bool(bounds[0] < returns.mean() < bounds[1])


def select_members(
    returns_C: ArrayLike,
    size: int,
    selector: Selector,
    bounds: tuple[float, float],
    *,
    max_exact: int = 100_000,
) -> NDArray[np.int64] | None:
    """Return indices of `size` candidates whose mean return lies within the bounds, ascending; None if there are none.

    first: the first `size` candidates. uniform: evenly spread over the candidates' order of return. balanced: those
    with the mean closest to the middle of the bounds, of equal ones those that spread most, of these the first;
    beyond `max_exact` combinations, candidates are exchanged one at a time while that helps. Raises ValueError for a
    size that is not from 1 to C.
    """
    returns = _checked(returns_C)
    if not 1 <= size <= len(returns):
        raise ValueError(f"size is {size}, but there are {len(returns)} candidates: use 1 to {len(returns)}")
    if selector == "first":
        chosen = list(range(size))
    elif selector == "uniform":
        places = np.round(np.linspace(0, len(returns) - 1, size)).astype(int)
        chosen = sorted(np.argsort(returns, kind="stable")[places].tolist())
    elif selector == "balanced":
        chosen = _balanced(returns, size, (bounds[0] + bounds[1]) / 2, max_exact)
    else:
        raise ValueError(f"unknown selector {selector!r}; there are first, uniform, balanced")
    return np.asarray(chosen, np.int64) if within_bounds(returns[chosen], bounds) else None


def _balanced(returns: NDArray[np.float64], size: int, middle: float, max_exact: int) -> list[int]:
    def badness(chosen: Iterable[int]) -> tuple[float, float]:
        picked = returns[list(chosen)]
        # Rounded, so that equal means of different sums tie.
        return (round(abs(picked.mean() - middle), 12), -round(float(picked.std()), 12))

    count = len(returns)
    if comb(count, size) <= max_exact:
        return list(min(combinations(range(count), size), key=badness))
    chosen = list(range(size))
    best = badness(chosen)
    while True:
        others = [i for i in range(count) if i not in chosen]
        swaps = [sorted({*chosen, new} - {old}) for old in chosen for new in others]
        candidate = min(swaps, key=badness, default=chosen)
        if badness(candidate) >= best:
            return chosen
        chosen, best = candidate, badness(candidate)


def _checked(returns_C: ArrayLike) -> NDArray[np.float64]:
    returns = np.asarray(returns_C, np.float64)
    if returns.ndim != 1 or not len(returns) or not np.isfinite(returns).all():
        raise ValueError(f"returns must be one or more finite numbers, got {returns.tolist()}")
    return returns
