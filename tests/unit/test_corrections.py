"""Proximal logprobs, importance weights and rejection against loops in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raypost.config import BoundsConfig, CorrectionConfig, LossConfig
from raypost.trainer.algorithm.corrections import Correction, correct, inside, level_ratios, proximal_logprobs
from raypost.trainer.algorithm.losses import LossTokens, policy_objective
from raypost.trainer.algorithm.sequences import row_means
from tests.present import present

LEVELS = ("token", "sequence", "geometric")


def random_tokens(lengths: Sequence[int], seed: int = 0, noise: float = 0.5) -> Any:
    """proximal, rollout, rows, staleness of sequences of these lengths."""
    g = torch.Generator().manual_seed(seed)
    m = sum(lengths)
    rollout = -torch.rand(m, generator=g, dtype=torch.float64) * 5
    proximal = rollout + noise * torch.randn(m, generator=g, dtype=torch.float64)
    rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return proximal, rollout, rows, torch.randint(0, 4, (m,), generator=g)


def naive_ratios(level: Any, gaps: Any, rows: Any) -> list[float]:
    if level == "token":
        return [math.exp(gap) for gap in gaps]
    sums = {row: [gap for gap, other in zip(gaps, rows, strict=True) if other == row] for row in rows}
    return [math.exp(sum(sums[r]) if level == "sequence" else sum(sums[r]) / len(sums[r])) for r in rows]


def naive_correct(config: CorrectionConfig, gaps: Any, rows: Any, staleness: Any) -> Any:
    weights, keep = [1.0] * len(gaps), [True] * len(gaps)
    if config.weight is not None:
        low, high = config.weight.lower, config.weight.upper
        for i, ratio in enumerate(naive_ratios(config.weight.level, gaps, rows)):
            weights[i] = min(
                max(ratio, -math.inf if low is None else low), math.inf if high is None else high
            )
    weights = [w / (1 + lag) ** config.staleness_power for w, lag in zip(weights, staleness, strict=True)]
    if config.reject is not None:
        low, high = config.reject.lower, config.reject.upper
        for i, ratio in enumerate(naive_ratios(config.reject.level, gaps, rows)):
            keep[i] &= (low is None or ratio >= low) and (high is None or ratio <= high)
    if config.veto is not None:
        for row in set(rows):
            if any(
                math.exp(gap) < config.veto for gap, other in zip(gaps, rows, strict=True) if other == row
            ):
                keep = [one and other != row for one, other in zip(keep, rows, strict=True)]
    return weights, keep


BOUNDS = st.builds(
    BoundsConfig,
    level=st.sampled_from(LEVELS),
    lower=st.sampled_from([None, 0.0, 0.5, 0.9]),
    upper=st.sampled_from([None, 1.2, 2.0, 5.0]),
)


@settings(max_examples=150, deadline=None)
@given(lengths=st.lists(st.integers(1, 8), min_size=1, max_size=6), seed=st.integers(0, 999),
       weight=st.none() | BOUNDS, reject=st.none() | BOUNDS, veto=st.sampled_from([None, 0.3]),
       power=st.sampled_from([0.0, 1.0, 0.5]))  # fmt: skip
def test_weights_and_rejection_are_their_formulas(
    lengths: Sequence[int], seed: int, weight: Any, reject: Any, veto: Any, power: float
) -> None:
    config = CorrectionConfig(weight=weight, reject=reject, veto=veto, staleness_power=power)
    proximal, rollout, rows, staleness = random_tokens(lengths, seed)
    got = correct(config, proximal, rollout, rows, len(lengths), staleness)
    weights, keep = naive_correct(config, (proximal - rollout).tolist(), rows.tolist(), staleness.tolist())
    assert np.allclose(got.weights_T.numpy(), weights, rtol=1e-9, atol=1e-12)
    assert (got.keep_T is None and all(keep)) or present(got.keep_T).tolist() == keep


def test_as_configured_by_default_weights_are_token_ratios_cut_at_2() -> None:
    proximal, rollout = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -2.0, 0.0])
    got = correct(CorrectionConfig(), proximal, rollout, torch.zeros(3, dtype=torch.long), 1, torch.zeros(3))
    assert got.weights_T.tolist() == pytest.approx([1.0, 2.0, math.exp(-1)]) and got.keep_T is None


@pytest.mark.parametrize(
    "level, kept", [("token", [0, 1, 4]), ("sequence", [0, 1]), ("geometric", [0, 1, 4])]
)
def test_each_level_masks_what_it_says(level: Any, kept: Any) -> None:
    # A sequence of small gaps, one with a large gap, one of a single large gap.
    gaps = torch.tensor([0.1, -0.1, 0.5, 0.5, 0.2]).double()
    rows = torch.tensor([0, 0, 1, 1, 2])
    upper = 1.2 if level == "sequence" else 1.23
    config = CorrectionConfig(weight=None, reject=BoundsConfig(level=level, lower=0.8, upper=upper))
    got = correct(config, gaps, torch.zeros(5).double(), rows, 3, torch.zeros(5))
    assert present(got.keep_T).nonzero()[:, 0].tolist() == kept and got.weights_T.tolist() == [1.0] * 5


def test_bounds_hold_where_ratios_overflow_and_nan_is_rejected() -> None:
    trainer = torch.tensor([-1.0, 0.0, float("nan")], requires_grad=True)
    rollout = torch.tensor([-1.0, -3e38, -1.0])
    rows = torch.arange(3)
    config = CorrectionConfig(weight=BoundsConfig(upper=2.0), reject=BoundsConfig(lower=0.5, upper=None))
    got = correct(config, trainer, rollout, rows, 3, torch.zeros(3))
    assert not got.weights_T.requires_grad and got.weights_T[:2].tolist() == [1.0, 2.0]
    assert present(got.keep_T).tolist() == [True, True, False]
    assert inside(torch.tensor([float("inf"), 0.0]), None, 5.0).tolist() == [False, True]
    # The bounds themselves are inside.
    assert inside(torch.tensor([0.5, 2.0, 0.49, 2.01]), 0.5, 2.0).tolist() == [True, True, False, False]


def test_levels_need_no_order_and_a_sequence_without_tokens_harms_nothing() -> None:
    gaps, rows = torch.tensor([0.1, 0.2, 0.3]).double(), torch.tensor([3, 0, 3])
    assert level_ratios("sequence", gaps, rows, 5).tolist() == pytest.approx(np.exp([0.4, 0.2, 0.4]).tolist())
    assert level_ratios("geometric", gaps, rows, 5).tolist() == pytest.approx(
        np.exp([0.2, 0.2, 0.2]).tolist()
    )
    assert row_means(gaps, rows, 5).tolist() == pytest.approx([0.2, 0, 0, 0.2, 0])
    with pytest.raises(ValueError, match="unknown level 'group'"):
        level_ratios(cast(Any, "group"), gaps, rows, 5)


# ---------------------------------------------------------------- the proximal policy


def test_interpolated_logprobs_mix_versions_of_one_batch_by_their_staleness() -> None:
    current, rollout = torch.full((5,), -1.0).double(), torch.full((5,), -2.0).double()
    # Of versions 0, 1 and 2 before the proximal one, of the current one and of a later one: no division by 0.
    got = proximal_logprobs("interpolate", current.requires_grad_(), rollout, torch.tensor([0, 1, 2, -1, -2]))
    assert got.tolist() == pytest.approx([-2.0, -1.5, -2 + 2 / 3, -2.0, -2.0]) and not got.requires_grad


def test_recomputed_and_coupled_proximal_logprobs() -> None:
    current, rollout, before = (torch.tensor([x], requires_grad=True) for x in (-1.0, -2.0, -3.0))
    lag = torch.zeros(1)
    assert proximal_logprobs("recompute", current, rollout, lag, before).item() == -3.0
    assert proximal_logprobs("recompute", current, rollout, lag).item() == -1.0
    assert proximal_logprobs("rollout", current, rollout, lag, before).item() == -2.0
    assert not proximal_logprobs("recompute", current, rollout, lag).requires_grad
    with pytest.raises(ValueError, match="unknown proximal policy 'behaviour'"):
        proximal_logprobs(cast(Any, "behaviour"), current, rollout, lag)


def test_a_coupled_ratio_needs_no_weight_and_rejects_by_the_trainers_logprobs() -> None:
    rollout, trainer = torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, 4.0])
    rows, lag = torch.arange(2), torch.zeros(2)
    plain = CorrectionConfig(proximal="rollout")
    assert correct(plain, rollout, rollout, rows, 2, lag).weights_T.tolist() == [1.0, 1.0]
    config = CorrectionConfig(proximal="rollout", reject=BoundsConfig(upper=5.0))
    assert present(correct(config, rollout, rollout, rows, 2, lag, trainer).keep_T).tolist() == [True, False]
    with pytest.raises(ValueError, match="needs the trainer's logprobs"):
        correct(config, rollout, rollout, rows, 2, lag)


def test_correcting_leaves_its_inputs_as_they_are() -> None:
    """What is rejected here is still there for whoever reads the batch next."""
    inputs = torch.tensor([-1.0, 4.0, -9.0]), torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([0, 0, 1])
    before = [one.clone() for one in inputs]
    config = CorrectionConfig(reject=BoundsConfig(upper=2.0, level="token"), veto=0.01, staleness_power=1.0)
    correction = correct(config, *inputs, 2, torch.ones(3))
    assert present(correction.keep_T).tolist() == [True, False, False]
    ones = torch.ones(3)
    tokens = LossTokens(inputs[0].clone().requires_grad_(), ones, ones, ones, ones, inputs[2], 2)
    fields = [one.clone() for one in (tokens.logprobs_T, tokens.advantages_T, tokens.rows_T)]
    torch.autograd.backward(policy_objective(tokens, correction, torch.ones(3), LossConfig()).loss)
    kept = (tokens.logprobs_T, tokens.advantages_T, tokens.rows_T)
    assert all(torch.equal(a, b) for a, b in zip([*inputs, *kept], [*before, *fields], strict=True))
    assert present(tokens.logprobs_T.grad).tolist()[1:] == [0.0, 0.0]


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("bounds, text", [
    ({"upper": 0.9}, "upper"), ({"lower": 1.1, "upper": 2.0}, "lower"), ({"lower": -1, "upper": None}, "lower"),
    ({"lower": 1.0, "upper": 1.0}, "lower and upper are both 1.0"), ({"level": "token"}, "upper"),
])  # fmt: skip
def test_bounds_that_exclude_equal_policies_or_are_not_stated_are_refused(bounds: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        BoundsConfig(**bounds)


def test_no_correction_weighs_everything_once() -> None:
    none = Correction.none(torch.zeros(3, requires_grad=True))
    assert none.weights_T.tolist() == [1.0] * 3 and none.keep_T is None and not none.weights_T.requires_grad
