"""Diagnostics by lag against loops, and how a step's figures add up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from raypost.config import KlConfig, LossConfig
from raypost.trainer.algorithm.corrections import Correction
from raypost.trainer.algorithm.losses import LossTokens, policy_objective, value_loss
from raypost.trainer.algorithm.mismatch import MAX_LAG, LagSums
from raypost.trainer.algorithm.statistics import PolicyStatistics, ValueStatistics


def random_tokens(num_tokens: int = 300, seed: int = 0, noise: float = 0.3) -> Any:
    rng = np.random.default_rng(seed)
    rollout = -rng.random(num_tokens) * 5
    trainer = rollout + noise * rng.normal(size=num_tokens)
    lags = rng.integers(0, 3, num_tokens)
    weights = np.minimum(np.exp(trainer - rollout), 2)
    keep, clipped = rng.random(num_tokens) < 0.7, rng.random(num_tokens) < 0.3
    return trainer, rollout, lags, weights, keep, rng.random(num_tokens) + 0.5, clipped


def of(rows: Any, *columns: Any) -> list[list[Any]]:
    return [[column[i] for i in rows] for column in columns]


def test_figures_of_all_tokens_and_of_every_lag_are_the_formulas() -> None:
    tokens = random_tokens()
    got = LagSums.of(*tokens).metrics()
    everywhere = list(range(300))
    by_lag = {f"_lag{k}": [i for i in everywhere if tokens[2][i] == k] for k in range(3)}
    for suffix, rows in {"": everywhere, **by_lag}.items():
        trainer, rollout, _, weights, keep, step, clipped = of(rows, *tokens)
        gaps = [a - b for a, b in zip(trainer, rollout, strict=True)]
        ratios, n = [math.exp(gap) for gap in gaps], len(gaps)
        kept = [i for i in range(n) if keep[i]]
        expected = {
            "rollout_kl": -sum(gaps) / n,
            "rollout_kl_k3": sum(r - 1 - math.log(r) for r in ratios) / n,
            "rollout_ratio_mean": sum(ratios) / n,
            "rollout_ratio_max": max(ratios),
            "rollout_ratio_min": min(ratios),
            "effective_sample_size": sum(ratios) ** 2 / (n * sum(r * r for r in ratios)),
            "rejected_fraction": 1 - len(kept) / n,
            "importance_weight_mean": sum(weights[i] for i in kept) / len(kept),
            "clip_fraction": sum(clipped[i] for i in kept) / len(kept),
            "ratio_mean": sum(step[i] for i in kept) / len(kept),
            "ratio_max": max(step[i] for i in kept),
            "ratio_min": min(step[i] for i in kept),
        }
        for name, value in expected.items():
            assert got[name + suffix] == pytest.approx(value, abs=1e-9), name + suffix
        if suffix:
            assert got[f"token_fraction{suffix}"] == pytest.approx(n / 300)
            name = suffix.replace("_lag0", "")
            assert got[f"logprob_mismatch_max{name}"] == pytest.approx(max(map(abs, gaps)))
            assert got[f"logprob_mismatch_mean{name}"] == pytest.approx(sum(map(abs, gaps)) / n)


def test_equal_policies_have_no_mismatch_and_full_sample_size() -> None:
    trainer, _, lags, *rest = random_tokens()
    got = LagSums.of(trainer, trainer, lags, *rest).metrics()
    assert got["logprob_mismatch_max"] == got["rollout_kl"] == got["rollout_kl_k3"] == 0.0
    assert got["effective_sample_size"] == pytest.approx(1.0)


def test_sums_of_parts_are_the_sum_of_the_whole() -> None:
    tokens = random_tokens()
    whole, parts = LagSums.of(*tokens), LagSums.zero()
    for a, b in [(0, 10), (10, 10), (10, 300)]:
        parts += LagSums.of(*(t[a:b] for t in tokens))
    assert np.allclose(parts.sums, whole.sums) and np.array_equal(parts.maxima, whole.maxima)


def test_on_policy_figures_are_absent_without_on_policy_tokens() -> None:
    trainer, rollout, lags, *rest = random_tokens()
    got = LagSums.of(trainer, rollout, lags + 1, *rest).metrics()
    assert "logprob_mismatch_max" not in got and "logprob_mismatch_max_lag1" in got
    assert not any(name.endswith("_lag0") for name in got) and LagSums.zero().metrics() == {}


def test_large_lags_share_the_last_figure_and_huge_gaps_stay_finite() -> None:
    total = LagSums.of(np.full(2, -1.5), np.asarray([-1.0, -2000.0]), np.asarray([MAX_LAG, 99]), np.ones(2),
                       np.zeros(2, bool), np.full(2, np.nan), np.zeros(2, bool))  # fmt: skip
    got = total.metrics()
    assert got[f"logprob_mismatch_max_lag{MAX_LAG}"] == pytest.approx(1998.5)
    assert got["rejected_fraction"] == 1.0 and "clip_fraction" not in got
    assert all(math.isfinite(value) for value in got.values())


def loss_tokens(seed: int, lengths: Sequence[int] = (3, 4, 2), reference: bool = True) -> LossTokens:
    g = torch.Generator().manual_seed(seed)
    m = sum(lengths)
    columns = [-torch.rand(m, generator=g) for _ in range(6)]
    logprobs, proximal, rollout, reference_T, entropy, advantages = columns
    rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return LossTokens(logprobs, -entropy, proximal, rollout, advantages, rows, len(lengths),
                      reference_T if reference else None)  # fmt: skip


def stepped(batches: Any, reference: bool = True) -> tuple[dict[str, float], LossTokens, Tensor]:
    """Metrics of the same nine tokens, in one micro-batch or cut into its sequences."""
    cfg = LossConfig(kl=KlConfig(coefficient=0.1 if reference else 0.0))
    whole, sums = loss_tokens(1, reference=reference), PolicyStatistics()
    keep, lags = torch.tensor([1, 1, 0, 1, 1, 1, 1, 0, 1]).bool(), torch.tensor([0, 0, 1, 1, 0, 2, 0, 0, 0])
    weights = torch.linspace(0.5, 1.5, 9)
    for rows in batches:
        here = torch.isin(whole.rows_T, torch.tensor(rows, dtype=torch.long))
        tokens = whole.kept(here)
        correction = Correction(weights[here], keep[here])
        terms = policy_objective(tokens, correction, torch.full((int(here.sum()),), 1 / 9), cfg)
        sums.add(tokens, correction, terms, lags[here], whole.proximal_T[here])
    return sums.metrics(1), whole, keep


def test_a_steps_figures_do_not_depend_on_how_its_batch_was_split() -> None:
    one, whole, keep = stepped([[0, 1, 2]])
    many, *_ = stepped([[2], [], [0, 1]])
    assert one.keys() == many.keys() and all(many[name] == pytest.approx(one[name], rel=1e-5) for name in one)
    ratio = torch.exp(whole.logprobs_T - whole.proximal_T)[keep]
    assert one["ratio_mean"] == pytest.approx(ratio.mean().item())
    assert one["ratio_max"] == pytest.approx(ratio.max().item())
    assert one["entropy"] == pytest.approx(whole.entropy_T.mean().item())
    assert one["rejected_fraction"] == pytest.approx(2 / 9)
    assert one["rollout_kl"] == pytest.approx((whole.rollout_T - whole.proximal_T).mean().item())
    assert one["loss"] == pytest.approx(one["policy_loss"] + one["kl_loss"])
    without, *_ = stepped([[0, 1, 2]], reference=False)
    assert "reference_kl" not in without and "reference_kl" in one


def test_a_step_without_tokens_reports_a_loss_of_0_and_nothing_else() -> None:
    assert PolicyStatistics().metrics(1) == {"loss": 0.0}


def test_the_critics_figures_are_the_formulas() -> None:
    rng = np.random.default_rng(0)
    values, before, returns = (torch.from_numpy(rng.normal(size=40)) for _ in range(3))
    sums = ValueStatistics()
    for part in (slice(0, 15), slice(15, 15), slice(15, 40)):
        scales = torch.full_like(values[part], 1 / 40)
        sums.add(
            values[part], returns[part], value_loss(values[part], before[part], returns[part], scales, 0.2)
        )
    got = sums.metrics(1)
    explained = 1 - (returns - values).var(correction=0) / returns.var(correction=0)
    assert got["explained_variance"] == pytest.approx(explained.item())
    whole = value_loss(values, before, returns, torch.full_like(values, 1 / 40), 0.2)
    assert got["value_loss"] == pytest.approx(whole.loss.item())
    assert got["value_mean"] == pytest.approx(values.mean().item()) and 0 < got["value_clip_fraction"] < 1
    assert "explained_variance" not in ValueStatistics().metrics(1)


def test_supervised_tokens_have_a_mean_of_their_own_over_all_micro_batches_and_count_in_the_loss() -> None:
    logprobs = -torch.rand(7, generator=torch.Generator().manual_seed(3)).double()
    sums = PolicyStatistics()
    for part in (slice(0, 3), slice(3, 3), slice(3, 7)):
        sums.add_sft(logprobs[part], -0.5 * logprobs[part].sum() / 7)
    got = sums.metrics(2)
    assert got["sft_loss"] == pytest.approx(-logprobs.mean().item()) and got["sft_tokens"] == 7
    assert got["loss"] == pytest.approx(-0.5 * logprobs.mean().item() / 2)
    assert got.keys() == {"loss", "sft_loss", "sft_tokens"} and "sft_loss" not in PolicyStatistics().metrics(
        1
    )
