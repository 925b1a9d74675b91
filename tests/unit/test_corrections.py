"""Importance weights and mismatch figures against loops in float64."""

import math

import numpy as np
import pytest
import torch

from raypost.corrections import MAX_LAG, MismatchSums, mismatch, mismatch_metrics, truncated_weights


def random_tokens(num_tokens=300, seed=0, noise=0.3):
    rng = np.random.default_rng(seed)
    rollout = -rng.random(num_tokens).astype(np.float32) * 5
    trainer = rollout + noise * rng.normal(size=num_tokens).astype(np.float32)
    lags = rng.integers(0, 3, num_tokens).astype(np.int32)
    weights = np.minimum(np.exp(trainer - rollout), 2).astype(np.float32)
    return trainer, rollout, lags, weights


def test_weights_are_ratios_cut_at_the_cap():
    trainer, rollout = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -2.0, 0.0])
    weights = truncated_weights(trainer, rollout, 2.0)
    assert weights.tolist() == pytest.approx([1.0, 2.0, math.exp(-1)])
    assert truncated_weights(trainer, rollout, 100.0)[1].item() == pytest.approx(math.e)
    assert truncated_weights(trainer, rollout, None).tolist() == [1.0, 1.0, 1.0]


def test_weights_have_no_gradient_and_never_exceed_the_cap():
    trainer = torch.tensor([-1.0, 0.0], requires_grad=True)
    weights = truncated_weights(trainer, torch.tensor([-1.0, -3e38]), 2.0)
    assert not weights.requires_grad and weights.tolist() == [1.0, 2.0]


def test_figures_are_the_formulas():
    trainer, rollout, lags, weights = random_tokens()
    got = mismatch_metrics(mismatch(trainer, rollout, lags, weights))
    gaps = [float(t) - float(r) for t, r in zip(trainer, rollout, strict=True)]
    ratios = [math.exp(gap) for gap in gaps]
    n = len(gaps)
    for lag, name in ((0, ""), (1, "_lag1"), (2, "_lag2")):
        of_lag = [abs(gap) for gap, other in zip(gaps, lags, strict=True) if other == lag]
        assert got[f"logprob_mismatch_max{name}"] == pytest.approx(max(of_lag), abs=1e-9)
        assert got[f"logprob_mismatch_mean{name}"] == pytest.approx(sum(of_lag) / len(of_lag), abs=1e-9)
    assert got["rollout_kl"] == pytest.approx(-sum(gaps) / n, abs=1e-9)
    assert got["rollout_kl_k3"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / n, abs=1e-9)
    expected = sum(ratios) ** 2 / (n * sum(r * r for r in ratios))
    assert got["effective_sample_size"] == pytest.approx(expected, abs=1e-9)
    assert got["importance_weight_mean"] == pytest.approx(weights.mean(), abs=1e-6)


def test_equal_policies_have_no_mismatch_and_full_sample_size():
    trainer, _, lags, _ = random_tokens()
    got = mismatch_metrics(mismatch(trainer, trainer, lags, np.ones_like(trainer)))
    assert got["logprob_mismatch_max"] == got["rollout_kl"] == got["rollout_kl_k3"] == 0.0
    assert got["effective_sample_size"] == pytest.approx(1.0)


def test_sums_of_parts_are_the_sum_of_the_whole():
    tokens = random_tokens()
    whole = mismatch(*tokens)
    parts = MismatchSums.zero()
    for a, b in [(0, 10), (10, 10), (10, 300)]:
        parts += mismatch(*(t[a:b] for t in tokens))
    assert np.allclose(parts.sums, whole.sums) and np.array_equal(parts.maxima, whole.maxima)


def test_on_policy_figures_are_absent_without_on_policy_tokens():
    trainer, rollout, lags, weights = random_tokens()
    got = mismatch_metrics(mismatch(trainer, rollout, lags + 1, weights))
    assert "logprob_mismatch_max" not in got and "logprob_mismatch_max_lag1" in got
    assert mismatch_metrics(MismatchSums.zero()) == {}


def test_large_lags_share_the_last_figure_and_huge_gaps_stay_finite():
    rollout = np.asarray([-1.0, -2000.0], np.float32)
    total = mismatch(np.full(2, -1.5, np.float32), rollout, np.asarray([MAX_LAG, 99]), np.ones(2, np.float32))
    got = mismatch_metrics(total)
    assert got[f"logprob_mismatch_max_lag{MAX_LAG}"] == pytest.approx(1998.5)
    assert all(math.isfinite(value) for value in got.values())
