"""Advantages against loops that spell the formulas out."""

import math

import numpy as np
import pytest

from raypost.advantage import STD_EPS, dr_grpo, group_advantages, grpo


def naive_grpo(rewards, eps, unbiased):
    mean = sum(rewards) / len(rewards)
    squares = sum((r - mean) ** 2 for r in rewards)
    std = math.sqrt(squares / (len(rewards) - (1 if unbiased else 0)))
    return [(r - mean) / (std + eps) for r in rewards]


@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("size", [2, 3, 8, 17])
def test_grpo_is_the_formula(size, unbiased):
    rewards = np.random.default_rng(size).normal(size=size)
    expected = naive_grpo(rewards.tolist(), 1e-4, unbiased)
    assert np.allclose(grpo(rewards, eps=1e-4, unbiased=unbiased), expected, rtol=0, atol=1e-12)


def test_grpo_divides_by_the_unbiased_deviation_unless_told():
    assert grpo([0.0, 1.0])[1] == pytest.approx(0.5 / (math.sqrt(0.5) + STD_EPS))
    assert grpo([0.0, 1.0], unbiased=False)[1] == pytest.approx(0.5 / (0.5 + STD_EPS))


def test_dr_grpo_only_subtracts_the_mean():
    assert dr_grpo([0.0, 0.0, 0.0, 1.0]).tolist() == [-0.25, -0.25, -0.25, 0.75]


@pytest.mark.parametrize("estimator", [grpo, dr_grpo])
def test_equal_rewards_give_exactly_zero(estimator):
    # In floating point the mean of three times 0.1 is not 0.1.
    assert np.mean([0.1] * 3) != 0.1 and estimator([0.1] * 3).tolist() == [0.0] * 3


@pytest.mark.parametrize("estimator", [grpo, dr_grpo])
@pytest.mark.parametrize("rewards", [[], [1.0], [[0.0, 1.0]], [0.0, float("nan")], [0.0, float("inf")]])
def test_group_of_one_and_rewards_that_are_no_numbers_are_refused(estimator, rewards):
    with pytest.raises(ValueError, match=r"2 or more rewards|must be finite"):
        estimator(rewards)


def test_groups_keep_their_true_sizes():
    rewards = np.random.default_rng(0).normal(size=9)
    parts = [grpo(rewards[:4]), grpo(rewards[4:6]), grpo(rewards[6:])]
    assert np.array_equal(group_advantages("grpo", rewards, [4, 2, 3]), np.concatenate(parts))


def test_unknown_estimator_and_sizes_that_do_not_add_up_are_refused():
    with pytest.raises(ValueError, match="unknown advantage 'gae'"):
        group_advantages("gae", [0.0, 1.0], [2])
    with pytest.raises(ValueError, match="groups of 3 trajectories, but 2 rewards"):
        group_advantages("grpo", [0.0, 1.0], [3])
    with pytest.raises(ValueError, match="2 or more"):
        group_advantages("grpo", [0.0, 1.0, 2.0], [2, 1])
