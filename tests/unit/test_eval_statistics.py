"""Scores against numbers worked out by hand or taken from tables, and intervals against repeated evaluations."""

from __future__ import annotations

import itertools
import math
from statistics import fmean, stdev

import numpy as np
import pytest

from raypost.config import EvalConfig
from raypost.errors import ConfigError
from raypost.observe.metrics import bounds, bounds_of
from raypost.report.eval_statistics import (
    Estimate,
    Rewards,
    mean_reward,
    over_tasks,
    pass_at_k,
    pass_rate,
    scores,
    student_t,
    wilson,
)
from tests.factories import make_config

NAN = float("nan")


def mean_of(rewards: Rewards, confidence: float = 0.95) -> Estimate:
    estimate = mean_reward(rewards, confidence)
    assert estimate is not None
    return estimate


def rate_of(rewards: Rewards, k: int = 1, confidence: float = 0.95) -> Estimate:
    estimate = pass_rate(rewards, k, 1.0, confidence)
    assert estimate is not None
    return estimate


def interval(estimate: Estimate) -> tuple[float, float]:
    assert estimate.bounds is not None
    return estimate.bounds


def test_pass_at_k_is_the_share_of_all_choices_of_k_responses_in_which_one_passes() -> None:
    for n in range(1, 7):
        for passed, k in itertools.product(range(n + 1), range(1, n + 1)):
            responses = [True] * passed + [False] * (n - passed)
            choices = [any(chosen) for chosen in itertools.combinations(responses, k)]
            assert pass_at_k(n, passed, k) == pytest.approx(fmean(choices), abs=1e-15)
    assert pass_at_k(1000, 1, 999) == pytest.approx(0.999)


@pytest.mark.parametrize(("n", "passed", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0), (0, 0, 1)])
def test_pass_at_k_of_too_few_responses_is_refused(n: int, passed: int, k: int) -> None:
    with pytest.raises(ValueError, match="not defined"):
        pass_at_k(n, passed, k)


@pytest.mark.parametrize(("confidence", "freedom", "bound"), [
    (0.95, 1, 12.7062), (0.95, 2, 4.30265), (0.95, 3, 3.18245), (0.95, 4, 2.77645), (0.95, 29, 2.04523),
    (0.99, 5, 4.03214), (0.99, 10, 3.16927), (0.9, 30, 1.69726), (0.95, 1000, 1.96234), (0.5, 1, 1.0),
])  # fmt: skip
def test_student_t_is_that_of_the_tables(confidence: float, freedom: int, bound: float) -> None:
    assert student_t(confidence, freedom) == pytest.approx(bound, abs=6e-5)


def test_wilson_is_that_of_the_tables_and_lies_inside_the_unit_interval() -> None:
    # Newcombe 1998, Statistics in Medicine 17, 857, table I.
    for passed, n, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611),
                                 (1, 29, 0.0061, 0.1718)):  # fmt: skip
        assert wilson(passed / n, n, 0.95) == pytest.approx((low, high), abs=5e-5)
    assert wilson(1.0, 20, 0.95) == pytest.approx((1 - 0.1611, 1.0), abs=5e-5)
    assert wilson(0.0, 7, 0.95)[0] == 0 and wilson(1.0, 7, 0.95)[1] == 1
    for share, trials in ((1.1, 5), (-0.1, 5), (NAN, 5), (0.5, 0)):
        with pytest.raises(ValueError, match="share"):
            wilson(share, trials, 0.95)


def test_one_response_a_prompt_has_wilsons_interval_over_the_prompts() -> None:
    rewards = [[1.0]] * 81 + [[0.0]] * 182
    for estimate in (rate_of(rewards), mean_of(rewards)):
        assert estimate.value == pytest.approx(81 / 263) and estimate.num_prompts == 263
        assert estimate.bounds == pytest.approx((0.2553, 0.3662), abs=5e-5)


def test_rewards_between_0_and_1_have_an_interval_that_stays_in_there() -> None:
    few = mean_of([[0.0, 0.0]] * 30 + [[0.5, 0.1], [0.0, 1.0]])
    assert few.value == pytest.approx(0.025)
    low, high = interval(few)
    assert 0 < low < 0.025 < high < 0.2
    # Far from the ends it is Student's.
    means = [0.4 + 0.01 * n for n in range(21)]
    middle = mean_of([[mean] for mean in means])
    half = 2.0859634 * stdev(means) / math.sqrt(21)
    assert middle.bounds == pytest.approx((0.5 - half, 0.5 + half), rel=0.003)


def test_rewards_that_are_no_rate_have_students_interval_over_the_prompts_means() -> None:
    rewards = [[0.1, 0.5], [0.9], [0.4, 0.6], [-2.0, 3.0]]
    means = [0.3, 0.9, 0.5, 0.5]
    half = 3.182446 * stdev(means) / 2
    estimate = mean_of(rewards)
    assert estimate.value == pytest.approx(fmean(means))
    assert estimate.bounds == pytest.approx((fmean(means) - half, fmean(means) + half), abs=1e-6)


def test_responses_that_repeat_each_other_are_worth_one() -> None:
    once = mean_of([[1.0]] * 12 + [[0.0]] * 8)
    assert mean_of([[1.0] * 16] * 12 + [[0.0] * 16] * 8) == once


def test_prompts_that_answer_alike_make_the_interval_narrower_but_never_than_independent_responses() -> None:
    sure = interval(mean_of([[1.0, 0.0]] * 18 + [[1.0, 1.0], [0.0, 0.0]]))
    alone = wilson(0.5, 40, 0.95)
    mixed = interval(mean_of([[1.0, 1.0]] * 10 + [[0.0, 0.0]] * 10))
    assert alone[0] - sure[0] == pytest.approx(sure[1] - alone[1], abs=1e-12)
    assert 0 <= alone[0] - sure[0] < 0.02, "wider only for having been estimated"
    assert mixed[0] < sure[0] and sure[1] < mixed[1]


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_all_right_or_all_wrong_is_not_certain(reward: float, samples: int) -> None:
    estimate = rate_of([[reward] * samples] * 20)
    assert estimate.value == reward
    assert estimate.bounds == pytest.approx((0, 0.1611) if reward == 0 else (0.8389, 1), abs=5e-5)
    assert mean_of([[reward] * samples] * 20) == estimate


def test_a_single_prompt_says_little_of_a_rate_and_nothing_of_another_mean() -> None:
    for samples in (1, 8):
        assert interval(rate_of([[1.0] * samples])) == pytest.approx((0.2065, 1), abs=5e-5)
    assert interval(mean_of([[0.3, 0.6]]))[0] < 0.05
    assert mean_of([[3.0, 6.0]]) == Estimate(value=4.5, bounds=None, num_prompts=1)
    assert mean_of([[3.0], [3.0]]).bounds is None, "what never varied does not tell how it varies"


def test_a_failed_response_is_counted_and_never_scored() -> None:
    options = EvalConfig(samples=2, temperature=1.0)
    got = scores({"sums": [[1.0, None], [0.0, 1.0], [None, None], [NAN, 0.0]]}, options)
    assert got["eval_failed"] == 4
    assert got["held_out"] == got["held_out/sums"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert got["pass@1"] == got["held_out"]
    assert got["pass@2"] == 1.0, "only one prompt has two scored responses"
    nothing = scores({"sums": [[None, None]]}, options)
    assert nothing == {"eval_failed": 2.0}
    assert scores({}, options) == {"eval_failed": 0.0}


def test_metrics_are_named_by_statistic_bound_and_task() -> None:
    options = EvalConfig(samples=4, temperature=1.0, pass_threshold=0.5)
    rewards = {"sums": [[1.0, 0.0, 0.0, 0.0]] * 3 + [[0.0] * 4], "words": [[0.5, -0.4, 0.7, 0.1]] * 4}
    got = scores(rewards, options)
    names = [f"{s}{b}{t}" for s in ("held_out", "pass@1", "pass@2", "pass@4") for b in ("", "_low", "_high")
             for t in ("", "/sums", "/words")]  # fmt: skip
    # The words' mean never varies, so that there is no interval over it, nor over both.
    absent = {"held_out_low", "held_out_high", "held_out_low/words", "held_out_high/words"}
    assert set(got) == {*names, "eval_failed"} - absent
    assert got["pass@4/sums"] == 0.75 and got["pass@4/words"] == 1.0 and got["pass@4"] == 0.875
    assert got["pass@1/words"] == 0.5 and got["held_out/words"] == pytest.approx(0.225)
    assert bounds_of("pass@4/sums") == ("pass@4_low/sums", "pass@4_high/sums")
    assert bounds(got, "pass@4") == (got["pass@4_low"], got["pass@4_high"])
    assert bounds(got, "held_out") is None


def test_tasks_count_by_their_prompts_and_their_uncertainty_adds_in_squares() -> None:
    one = Estimate(value=0.9, bounds=(0.8, 0.94), num_prompts=30)
    two = Estimate(value=0.1, bounds=(0.0, 0.3), num_prompts=10)
    both = over_tasks([one, two])
    assert both.value == pytest.approx(0.7) and both.num_prompts == 40
    below, above = math.hypot(0.75 * 0.1, 0.25 * 0.1), math.hypot(0.75 * 0.04, 0.25 * 0.2)
    assert both.bounds == pytest.approx((0.7 - below, 0.7 + above))
    alone = over_tasks([one])
    assert (alone.value, alone.num_prompts) == (0.9, 30)
    assert alone.bounds == pytest.approx((0.8, 0.94))
    assert over_tasks([one, Estimate(value=1.0, bounds=None, num_prompts=1)]).bounds is None
    with pytest.raises(ValueError, match="no task"):
        over_tasks([])


@pytest.mark.parametrize(("prompts", "samples", "k", "shape"), [
    (20, 1, 1, (2.0, 2.0)), (20, 8, 1, (0.5, 0.5)), (20, 8, 1, (30.0, 30.0)), (20, 8, 4, (1.0, 4.0)),
    (60, 4, 2, (0.3, 1.0)), (8, 4, 1, (1.0, 1.0)), (3, 64, 1, (2.0, 2.0)),
])  # fmt: skip
def test_intervals_cover_the_truth_as_often_as_they_say(
    prompts: int, samples: int, k: int, shape: tuple[float, float]
) -> None:
    """Prompts of a Beta distribution of difficulty: the chance that k responses all fail is B(a, b + k) / B(a, b)."""
    a, b = shape
    truth = 1 - math.prod((b + i) / (a + b + i) for i in range(k))
    rng, covered, repeats = np.random.default_rng(0), 0, 300
    for _ in range(repeats):
        passed = rng.random((prompts, samples)) < rng.beta(a, b, (prompts, 1))
        low, high = interval(rate_of(passed.astype(float).tolist(), k, 0.9))
        covered += low <= truth <= high
    # Two standard errors of a share of 300 are 0.035.
    assert covered / repeats > 0.865


def test_intervals_of_other_rewards_and_of_several_tasks_cover_the_truth_too() -> None:
    rng, repeats, covered = np.random.default_rng(1), 300, [0, 0]
    for _ in range(repeats):
        level = rng.normal([[0.2], [0.8]], 0.3, (2, 12))[..., None]
        rewards = rng.normal(level, 0.5, (2, 12, 3))
        one, two = (mean_of(task.tolist(), 0.9) for task in rewards)
        low, high = interval(one)
        covered[0] += low <= 0.2 <= high
        both = over_tasks([one, two])
        low, high = interval(both)
        covered[1] += low <= 0.5 <= high
    assert all(0.865 < count / repeats < 0.95 for count in covered), covered


def test_an_interval_that_took_responses_for_prompts_would_miss_the_truth() -> None:
    """What the tests above would catch: the same data, every response a trial of its own."""
    rng, repeats, covered = np.random.default_rng(0), 300, 0
    for _ in range(repeats):
        passed = rng.random((20, 8)) < rng.beta(0.5, 0.5, (20, 1))
        low, high = wilson(float(passed.mean()), passed.size, 0.9)
        covered += low <= 0.5 <= high
    assert covered / repeats < 0.7


def test_an_evaluation_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match="eval: samples is 4, but temperature is 0"):
        make_config(eval={"samples": 4})


@pytest.mark.parametrize(("samples", "k"), [(1, (1,)), (2, (1, 2)), (4, (1, 2, 4)), (6, (1, 2, 4, 6))])
def test_pass_at_k_is_reported_for_the_powers_of_two_and_for_all_samples(
    samples: int, k: tuple[int, ...]
) -> None:
    assert EvalConfig(samples=samples, temperature=1.0).pass_k == k
