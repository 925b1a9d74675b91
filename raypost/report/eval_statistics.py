"""Scores of held-out problems: means and pass@k with confidence intervals.

    rewards of every response, by prompt, by task -> Estimate of each statistic -> metrics by name

Pure functions over plain data; responses are generated and judged elsewhere.

The sampling unit is the prompt: responses to one prompt resemble each other, so an interval comes from how prompts
differ, never from the number of responses alone. Tasks are chosen, not sampled: the interval over all of them
combines theirs. A response that failed is counted and never scored; a prompt without enough scored responses for a
statistic is left out of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import NormalDist, fmean

import numpy as np

from raypost.config import EvalConfig
from raypost.observe.metrics import EVAL_FAILED, HELD_OUT, bounds_of, pass_at

CONFIDENCE = 0.95
"""Coverage of every interval that is reported."""

Rewards = Sequence[Sequence[float | None]]
"""Per prompt, per response; None (or not finite): the response failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over prompts."""

    value: float
    bounds: tuple[float, float] | None
    """Of its confidence interval; None where the prompts do not tell: a single one, or equal ones."""
    num_prompts: int


def scores(rewards: Mapping[str, Rewards], options: EvalConfig) -> dict[str, float]:
    """Compute the metrics of an evaluation: every statistic over all tasks, and per task as `<statistic>/<task>`.

    `held_out` is mean@n, the mean reward; `pass@k` the chance that one of k responses reaches
    `options.pass_threshold`, for each k of `options.pass_k`. Appended `_low` and `_high` name the
    bounds. `eval_failed` counts responses without a score. A statistic that no prompt has is absent.
    """
    metrics: dict[str, float] = {}
    statistics: dict[str, Callable[[Rewards], Estimate | None]] = {
        HELD_OUT: partial(mean_reward, confidence=CONFIDENCE)
    }
    for k in options.pass_k:
        statistics[pass_at(k)] = partial(
            pass_rate, k=k, threshold=options.pass_threshold, confidence=CONFIDENCE
        )
    for name, statistic in statistics.items():
        known = {task: one for task, prompts in rewards.items() if (one := statistic(prompts)) is not None}
        if known:
            metrics |= _entries(name, over_tasks(list(known.values())))
        for task, estimate in known.items():
            metrics |= _entries(f"{name}/{task}", estimate)
    every = [reward for prompts in rewards.values() for prompt in prompts for reward in prompt]
    metrics[EVAL_FAILED] = float(len(every) - len(_scored(every)))
    return metrics


def _entries(name: str, estimate: Estimate) -> dict[str, float]:
    return {name: estimate.value, **dict(zip(bounds_of(name), estimate.bounds or (), strict=False))}


# ---------------------------------------------------------------- statistics of one task


def mean_reward(rewards: Rewards, confidence: float) -> Estimate | None:
    """Return mean@n: the mean over prompts of the mean reward of their responses; None without a scored response.

    Rewards in [0, 1] have the interval of a rate, which stays in there; others Student's t over the prompts' means.
    """
    prompts = [scored for prompt in rewards if (scored := _scored(prompt))]
    if not prompts:
        return None
    means = [fmean(prompt) for prompt in prompts]
    every = [reward for prompt in prompts for reward in prompt]
    if all(0 <= reward <= 1 for reward in every):
        return _rate(means, len(every) if set(every) <= {0, 1} else math.inf, confidence)
    value, n = fmean(means), len(means)
    deviation = float(np.std(means, ddof=1)) if n > 1 else 0.0
    if deviation == 0:
        return Estimate(value=value, bounds=None, num_prompts=n)
    half = student_t(confidence, n - 1) * deviation / math.sqrt(n)
    return Estimate(value=value, bounds=(value - half, value + half), num_prompts=n)


def pass_rate(rewards: Rewards, k: int, threshold: float, confidence: float) -> Estimate | None:
    """Return pass@k: the mean over prompts with at least k scored responses; None if there is none."""
    prompts = [scored for prompt in rewards if len(scored := _scored(prompt)) >= k]
    if not prompts:
        return None
    chances = [pass_at_k(len(p), sum(reward >= threshold for reward in p), k) for p in prompts]
    return _rate(chances, sum(map(len, prompts)) / k, confidence)


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Return the chance that one of k responses passes, of which num_samples were drawn and num_passed did.

    The unbiased estimator 1 - C(n - c, k) / C(n, k): Chen et al. 2021, arXiv 2107.03374. Raises ValueError unless
    0 <= num_passed <= num_samples and 1 <= k <= num_samples.
    """
    if not (0 <= num_passed <= num_samples and 1 <= k <= num_samples):
        raise ValueError(f"pass@{k} of {num_passed} passed among {num_samples} responses is not defined")
    return 1 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def _scored(prompt: Sequence[float | None]) -> list[float]:
    return [float(reward) for reward in prompt if reward is not None and math.isfinite(reward)]


# ---------------------------------------------------------------- intervals


def over_tasks(estimates: Sequence[Estimate]) -> Estimate:
    """Return the mean over all prompts of all tasks, with the interval that follows from each task's own.

    Bounds by MOVER: each task's distance to its bound, weighted by its share of prompts, adds in squares. Zou and
    Donner 2008, Statistics in Medicine 27, 1693. None if a task has none. Raises ValueError if empty.
    """
    if not estimates:
        raise ValueError("there is no task to combine")
    total = sum(one.num_prompts for one in estimates)
    shares = [one.num_prompts / total for one in estimates]
    value = sum(share * one.value for share, one in zip(shares, estimates, strict=True))
    below, above = 0.0, 0.0
    for share, one in zip(shares, estimates, strict=True):
        if one.bounds is None:
            return Estimate(value=value, bounds=None, num_prompts=total)
        below += (share * (one.value - one.bounds[0])) ** 2
        above += (share * (one.bounds[1] - one.value)) ** 2
    bounds = (value - math.sqrt(below), value + math.sqrt(above))
    return Estimate(value=value, bounds=bounds, num_prompts=total)


def _rate(chances: Sequence[float], num_trials: float, confidence: float) -> Estimate:
    """Return the mean of values in [0, 1], one a prompt, with Wilson's interval.

    Of one response a prompt, every prompt is a trial. Of several, the number of trials is that which would vary as
    the prompts' mean does, made smaller for having been estimated from few prompts (Korn and Graubard 1998, Survey
    Methodology 24, 193). It is at least the number of prompts, as for any value in [0, 1], and at most `num_trials`:
    that of passes and failures, if responses to a prompt had nothing in common.
    """
    n, value = len(chances), fmean(chances)
    spread, trials = fmean((chance - value) ** 2 for chance in chances), float(n)
    # Prompts that do not differ, a single one among them, do not tell how far others would.
    if spread > 0:
        estimated = (_normal(confidence) / student_t(confidence, n - 1)) ** 2
        trials = max(trials, min((n - 1) * value * (1 - value) / spread, num_trials) * estimated)
    return Estimate(value=value, bounds=wilson(value, trials, confidence), num_prompts=n)


def wilson(share: float, trials: float, confidence: float) -> tuple[float, float]:
    """Return Wilson's score interval of a share of `trials`, which need not be whole. Wilson 1927, JASA 22, 209.

    Raises ValueError unless 0 <= share <= 1 and trials > 0.
    """
    if not (0 <= share <= 1 and trials > 0):
        raise ValueError(f"share {share} of {trials} trials: share must lie in [0, 1], trials be above 0")
    z2 = _normal(confidence) ** 2 / trials
    centre = (share + z2 / 2) / (1 + z2)
    half = math.sqrt(z2 * (share * (1 - share) + z2 / 4)) / (1 + z2)
    # At the ends the bound is the share itself, but for rounding.
    return min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half))


def _normal(confidence: float) -> float:
    """Bound of the standard normal's central part with that probability."""
    return NormalDist().inv_cdf((1 + confidence) / 2)


@cache
def student_t(confidence: float, freedom: int) -> float:
    """Return the bound of the central part of Student's t with that probability.

    By bisection of the finite sum for whole degrees of freedom: Abramowitz and Stegun 1964, 26.7.3 and 26.7.4.
    """
    low, high = 0.0, math.pi / 2
    # The angle, not t itself: it has an end for any confidence.
    for _ in range(60):
        middle = (low + high) / 2
        if _central(middle, freedom) < confidence:
            low = middle
        else:
            high = middle
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def _central(angle: float, freedom: int) -> float:
    """P(|T| < sqrt(freedom) * tan(angle))."""
    odd = freedom % 2
    powers = np.arange(1, (freedom - odd) // 2, dtype=np.float64)
    factors = (2 * powers - 1 + odd) / (2 * powers + odd) * math.cos(angle) ** 2
    series = 1 + float(np.sum(np.cumprod(factors)))
    if not odd:
        return math.sin(angle) * series
    first = math.sin(angle) * math.cos(angle) * series if freedom > 1 else 0.0
    return 2 / math.pi * (angle + first)
