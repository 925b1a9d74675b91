"""The losses against loops in float64 that spell the formulas out, over random shapes, masks and splits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from raypost.config import KlConfig, LossConfig
from raypost.errors import ConfigError
from raypost.trainer.algorithm.corrections import Correction
from raypost.trainer.algorithm.losses import (
    LossTokens,
    load_policy_loss,
    policy_objective,
    ppo,
    sequence_scales,
    sft_loss,
    value_loss,
)
from raypost.trainer.algorithm.rewards import kl_estimate, kl_rewards
from tests.present import present

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=6)
SEEDS = st.integers(0, 9999)


def make_tokens(
    lengths: Sequence[int],
    seed: int = 0,
    spread: float = 0.4,
    reference: bool = False,
    dtype: torch.dtype = torch.float64,
) -> LossTokens:
    """Random tokens of sequences of these lengths, one advantage a token."""
    g = torch.Generator().manual_seed(seed)
    m = sum(lengths)
    proximal = -torch.rand(m, generator=g, dtype=dtype) * 4

    def near() -> Tensor:
        return proximal + spread * torch.randn(m, generator=g, dtype=dtype)

    return LossTokens(
        logprobs_T=near(),
        entropy_T=torch.rand(m, generator=g, dtype=dtype),
        proximal_T=proximal,
        rollout_T=near(),
        advantages_T=torch.randn(m, generator=g, dtype=dtype),
        rows_T=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        num_rows=len(lengths),
        reference_T=near() if reference else None,
    )


def random_correction(tokens: LossTokens, seed: int, reject: Any = True) -> Correction:
    g = torch.Generator().manual_seed(seed + 1)
    m = len(tokens.logprobs_T)
    keep = torch.rand(m, generator=g) < 0.8 if reject else None
    return Correction(torch.rand(m, generator=g, dtype=torch.float64) * 2, keep)


def scales_of(aggregation: Any, lengths: Sequence[int], constant_length: Any = None) -> Tensor:
    scales = sequence_scales(aggregation, lengths, constant_length)
    return torch.from_numpy(np.repeat(scales, lengths))


# ---------------------------------------------------------------- naive loops


def naive_ratios(tokens: LossTokens, kind: str, keep: Any) -> Any:
    """The loss's ratio of each token."""
    gaps = (tokens.logprobs_T - tokens.proximal_T).tolist()
    rows = tokens.rows_T.tolist()
    if kind != "gspo":
        return [math.exp(gap) for gap in gaps]
    ratios = []
    for row in rows:
        own = [gap for gap, other, kept in zip(gaps, rows, keep, strict=True) if other == row and kept]
        ratios.append(math.exp(sum(own) / max(1, len(own))))
    return ratios


def naive_token_loss(kind: str, ratio: Any, advantage: Any, logprob: Any, cfg: LossConfig) -> Any:
    bounded = min(max(ratio, 1 - cfg.clip_low), 1 + cfg.clip_high)
    if kind == "cispo":
        return -bounded * advantage * logprob
    gain = min(ratio * advantage, bounded * advantage)
    if cfg.dual_clip is not None and advantage < 0:
        gain = max(gain, cfg.dual_clip * advantage)
    return -gain


def naive_kl(kind: str, logprob: Any, reference: Any) -> Any:
    gap = logprob - reference
    return {"k1": gap, "k2": gap * gap / 2, "k3": math.exp(-gap) - 1 + gap}[kind]


def naive_objective(
    tokens: LossTokens, correction: Correction, lengths: Sequence[int], cfg: LossConfig, constant_length: Any
) -> Any:
    """The loss of a whole minibatch, aggregated as its definition says, not by scales."""
    m, rows = len(tokens.logprobs_T), tokens.rows_T.tolist()
    keep = [True] * m if correction.keep_T is None else correction.keep_T.tolist()
    ratios = naive_ratios(tokens, cfg.kind, keep)
    losses = []
    for t in range(m):
        loss = naive_token_loss(
            cfg.kind, ratios[t], tokens.advantages_T[t].item(), tokens.logprobs_T[t].item(), cfg
        )
        loss *= correction.weights_T[t].item()
        if cfg.kl.coefficient and cfg.kl.place == "loss":
            kl = naive_kl(cfg.kl.kind, tokens.logprobs_T[t].item(), present(tokens.reference_T)[t].item())
            if cfg.kl.unbiased:
                kl *= math.exp(tokens.logprobs_T[t].item() - tokens.proximal_T[t].item())
            loss += cfg.kl.coefficient * kl
        loss -= cfg.entropy_coefficient * tokens.entropy_T[t].item()
        losses.append(loss if keep[t] else 0.0)
    sums = [sum(x for x, row in zip(losses, rows, strict=True) if row == r) for r in range(len(lengths))]
    if cfg.aggregation == "token":
        return sum(sums) / sum(lengths)
    if cfg.aggregation == "sequence":
        return sum(s / length for s, length in zip(sums, lengths, strict=True)) / len(lengths)
    return sum(sums) / (len(lengths) * constant_length)


# ---------------------------------------------------------------- the objective


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, seed=SEEDS, dual=st.sampled_from([None, 1.5]), reject=st.booleans(),
       aggregation=st.sampled_from(["token", "sequence", "constant"]),
       kl=st.sampled_from(["k1", "k2", "k3", None]), unbiased=st.booleans())  # fmt: skip
@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo"])
def test_the_objective_is_its_formula(
    kind: str,
    lengths: Sequence[int],
    seed: int,
    dual: Any,
    reject: Any,
    aggregation: Any,
    kl: Any,
    unbiased: bool,
) -> None:
    cfg = LossConfig(kind=kind, dual_clip=dual, aggregation=aggregation, entropy_coefficient=0.03,
                     kl=KlConfig(coefficient=0.2 if kl else 0.0, kind=kl or "k3", unbiased=unbiased))  # fmt: skip
    tokens = make_tokens(lengths, seed, reference=kl is not None)
    correction = random_correction(tokens, seed, reject)
    terms = policy_objective(tokens, correction, scales_of(aggregation, lengths, 20), cfg)
    expected = naive_objective(tokens, correction, lengths, cfg, 20)
    assert terms.loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=2, max_size=7), seed=SEEDS, data=st.data(),
       aggregation=st.sampled_from(["token", "sequence", "constant"]))  # fmt: skip
@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo"])
def test_losses_of_any_split_by_sequences_sum_to_the_loss_of_the_whole(
    kind: str, lengths: Sequence[int], seed: int, data: st.DataObject, aggregation: Any
) -> None:
    cfg = LossConfig(kind=kind, kl=KlConfig(coefficient=0.1), entropy_coefficient=0.01)
    tokens = make_tokens(lengths, seed, reference=True)
    correction, scales = random_correction(tokens, seed), scales_of(aggregation, lengths, 16)
    whole = policy_objective(tokens, correction, scales, cfg)
    part_of = data.draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    total = 0.0
    for part in range(4):
        members = [i for i, one in enumerate(part_of) if one == part]
        here = torch.isin(tokens.rows_T, torch.tensor(members, dtype=torch.long))
        piece = tokens.kept(here)
        renumbered = torch.tensor([members.index(r) for r in piece.rows_T.tolist()], dtype=torch.long)
        piece = LossTokens(**{name: getattr(piece, name) for name in
                              ("logprobs_T", "entropy_T", "proximal_T", "rollout_T", "advantages_T", "reference_T")},
                           rows_T=renumbered, num_rows=len(members))  # fmt: skip
        of_part = Correction(correction.weights_T[here], present(correction.keep_T)[here])
        total += policy_objective(piece, of_part, scales[here], cfg).loss.item()
    assert total == pytest.approx(whole.loss.item(), rel=1e-10, abs=1e-12)


def test_float32_is_within_1e6_of_float64() -> None:
    lengths = [40] * 5
    cfg = LossConfig(kl=KlConfig(coefficient=0.1), entropy_coefficient=0.01)
    tokens = make_tokens(lengths, reference=True)
    exact = policy_objective(
        tokens, Correction.none(tokens.logprobs_T), scales_of("token", lengths), cfg
    ).loss
    names = ("logprobs_T", "entropy_T", "proximal_T", "rollout_T", "advantages_T", "reference_T")
    single = LossTokens(
        **{name: getattr(tokens, name).float() for name in names}, rows_T=tokens.rows_T, num_rows=5
    )
    scales = scales_of("token", lengths).float()
    got = policy_objective(single, Correction.none(single.logprobs_T), scales, cfg).loss
    assert got.item() == pytest.approx(exact.item(), abs=1e-6)


def test_upper_and_lower_clip_are_different() -> None:
    def gradient(ratio: Any, advantage: Any, **fields: Any) -> float:
        one = torch.ones(1, dtype=torch.float64)
        logprob = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
        tokens = LossTokens(
            logprob, one, 0 * one, 0 * one, advantage * one, torch.zeros(1, dtype=torch.long), 1
        )
        loss_T, clipped_T = ppo(tokens, LossConfig(**fields))
        torch.autograd.backward(loss_T.sum())
        assert bool(clipped_T) == (present(logprob.grad).item() == 0)
        return present(logprob.grad).item()

    assert gradient(1.27, 1.0) == pytest.approx(-1.27) and gradient(1.29, 1.0) == 0
    assert gradient(0.81, -1.0) == pytest.approx(0.81) and gradient(0.79, -1.0) == 0
    # Outside the clip, but on the side that the objective pulls back from.
    assert gradient(0.5, 1.0) == pytest.approx(-0.5) and gradient(2.0, -1.0) == pytest.approx(2.0)
    assert gradient(2.9, -1.0, dual_clip=3) == pytest.approx(2.9) and gradient(3.1, -1.0, dual_clip=3) == 0
    # Without a lower clip, nothing pulls back.
    assert gradient(0.01, -1.0, clip_low=1.0) == pytest.approx(0.01)


def test_cispo_keeps_the_gradient_of_a_capped_token() -> None:
    tokens = make_tokens([8], spread=1.5)
    tokens.logprobs_T.requires_grad_()
    loss_T, clipped_T = load_policy_loss("cispo")(tokens, LossConfig(kind="cispo"))
    torch.autograd.backward(loss_T.sum())
    ratio = torch.exp(tokens.logprobs_T.detach() - tokens.proximal_T)
    assert torch.allclose(present(tokens.logprobs_T.grad), -ratio.clamp(0.8, 1.28) * tokens.advantages_T)
    assert 0 < clipped_T.sum() < 8 and torch.equal(clipped_T, (ratio < 0.8) | (ratio > 1.28))


def test_gspo_gives_each_token_its_sequences_ratio() -> None:
    tokens = make_tokens([3, 1])
    gap = tokens.logprobs_T - tokens.proximal_T
    loss_T, _ = load_policy_loss("gspo")(tokens, LossConfig(kind="gspo", clip_low=1.0, clip_high=1e9))
    expected = torch.stack([gap[:3].mean().exp()] * 3 + [gap[3].exp()]) * -tokens.advantages_T
    assert torch.allclose(loss_T, expected)


def test_only_the_logprobs_and_the_entropy_get_a_gradient() -> None:
    tokens = make_tokens([4, 3], reference=True)
    tensors = [tokens.logprobs_T, tokens.entropy_T, tokens.proximal_T, tokens.rollout_T, tokens.advantages_T]
    cfg = LossConfig(kl=KlConfig(coefficient=0.1), entropy_coefficient=0.5)
    tokens.logprobs_T.requires_grad_(), tokens.entropy_T.requires_grad_()
    terms = policy_objective(tokens, Correction.none(tokens.logprobs_T), scales_of("token", [4, 3]), cfg)
    torch.autograd.backward(terms.loss)
    assert torch.allclose(present(tokens.entropy_T.grad), torch.full((7,), -0.5 / 7, dtype=torch.float64))
    assert [t.grad is not None for t in tensors] == [True, True, False, False, False]
    assert not any(
        t.requires_grad for t in (terms.policy, terms.kl, terms.ratio_T, terms.clipped_T, present(terms.kl_T))
    )


def test_a_rejected_token_adds_nothing_even_where_its_ratio_overflows_and_scales_stay() -> None:
    tokens = make_tokens([3, 2], reference=True)
    tokens.logprobs_T[1], tokens.advantages_T[1] = 1e4, -1.0
    tokens.logprobs_T.requires_grad_()
    keep = torch.tensor([True, False, True, True, True])
    cfg, scales = LossConfig(kl=KlConfig(coefficient=0.1, kind="k2")), scales_of("sequence", [3, 2])
    terms = policy_objective(tokens, Correction(torch.ones(5).double(), keep), scales, cfg)
    torch.autograd.backward(terms.loss)
    assert math.isfinite(terms.loss.item()) and present(tokens.logprobs_T.grad).isfinite().all()
    assert present(tokens.logprobs_T.grad)[1] == 0 and (present(tokens.logprobs_T.grad)[keep] != 0).any()
    rest = policy_objective(tokens.kept(keep), Correction(torch.ones(4).double()), scales[keep], cfg)
    assert terms.loss.item() == rest.loss.item() and len(terms.ratio_T) == 4


def test_a_micro_batch_without_tokens_has_loss_0_and_a_gradient() -> None:
    logprobs = torch.empty(0, requires_grad=True)
    none, rows = torch.empty(0), torch.empty(0, dtype=torch.long)
    for kind in ("ppo", "gspo", "cispo"):
        tokens = LossTokens(logprobs, none, none, none, none, rows, 0, reference_T=none)
        cfg = LossConfig(kind=kind, kl=KlConfig(coefficient=0.1))
        loss = policy_objective(tokens, Correction.none(none), none, cfg).loss
        torch.autograd.backward(loss)
        assert loss.item() == 0.0


def test_terms_say_what_the_loss_is_made_of() -> None:
    tokens = make_tokens([4, 4], reference=True)
    scales, plain = scales_of("token", [4, 4]), Correction.none(tokens.logprobs_T)
    both = policy_objective(tokens, plain, scales, LossConfig(kl=KlConfig(coefficient=0.3, kind="k1")))
    assert both.loss.item() == pytest.approx((both.policy + both.kl).item())
    assert both.kl.item() == pytest.approx(
        0.3 * (tokens.logprobs_T - present(tokens.reference_T)).mean().item()
    )
    # In the reward, the divergence is reported, but no term.
    reward = policy_objective(tokens, plain, scales, LossConfig(kl=KlConfig(coefficient=0.3, place="reward")))
    assert (
        reward.kl.item() == 0 and reward.loss.item() == both.policy.item() and present(reward.kl_T).mean() > 0
    )


# ---------------------------------------------------------------- scales and terms


@given(lengths=LENGTHS)
def test_scales_add_up_to_what_their_aggregation_says(lengths: list[int]) -> None:
    lengths_N = np.asarray(lengths)
    assert (sequence_scales("token", lengths) * lengths_N).sum() == pytest.approx(1)
    assert np.allclose(sequence_scales("sequence", lengths) * lengths_N, 1 / len(lengths))
    constant = sequence_scales("constant", lengths, 50)
    assert (constant * lengths_N).sum() == pytest.approx(lengths_N.mean() / 50)


def test_masks_of_zeros_and_unknown_aggregations_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sequences \[1\] have no trained token"):
        sequence_scales("sequence", [3, 0, 2])
    with pytest.raises(ValueError, match="unknown aggregation 'mean'"):
        sequence_scales(cast(Any, "mean"), [3])
    for length in (None, 0):
        with pytest.raises(ValueError, match="needs a constant_length of 1 or more"):
            sequence_scales("constant", [3], length)
    assert sequence_scales("token", []).shape == sequence_scales("sequence", []).shape == (0,)


@given(seed=SEEDS)
def test_kl_estimates_are_schulmans_in_the_loss_and_in_the_reward(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logprobs, reference = -rng.random(20) * 5, -rng.random(20) * 5
    for kind in ("k1", "k2", "k3"):
        expected = [naive_kl(kind, a, b) for a, b in zip(logprobs, reference, strict=True)]
        got = kl_estimate(kind, torch.from_numpy(logprobs) - torch.from_numpy(reference), torch.expm1).numpy()
        assert np.allclose(got, expected, rtol=1e-9, atol=1e-12)
        assert np.allclose(kl_rewards(kind, logprobs, reference, 0.3), -0.3 * got, rtol=1e-12)
    with pytest.raises(ValueError, match="unknown KL estimator 'k4'"):
        kl_estimate(cast(Any, "k4"), torch.zeros(1), torch.expm1)
    with pytest.raises(ValueError, match="unknown KL estimator 'k4'"):
        kl_rewards(cast(Any, "k4"), [0.0], [0.0], 1)
    with pytest.raises(ValueError, match=r"\(2,\) logprobs, but \(1,\) of the reference"):
        kl_rewards("k1", [0.0, 0.0], [0.0], 1)


def test_k1_and_k3_estimate_the_divergence() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.2, 0.6]).double()
    exact = (p * (p.log() - q.log())).sum().item()
    for kind in ("k1", "k3"):
        assert (p * kl_estimate(kind, p.log() - q.log(), torch.expm1)).sum().item() == pytest.approx(exact)


@given(seed=SEEDS, clip=st.sampled_from([None, 0.2]))
def test_value_loss_is_its_formula(seed: int, clip: float | None) -> None:
    rng = np.random.default_rng(seed)
    values, before, returns, scales = (rng.normal(size=30) for _ in range(4))
    expected = 0.0
    for v, b, r, s in zip(values, before, returns, scales, strict=True):
        near = v if clip is None else min(max(v, b - clip), b + clip)
        expected += s * max((v - r) ** 2, (near - r) ** 2) / 2
    v_T, b_T, r_T, s_T = (torch.from_numpy(x) for x in (values, before, returns, scales))
    terms = value_loss(v_T, b_T, r_T, s_T, clip)
    assert terms.loss.item() == pytest.approx(expected, abs=1e-9)
    assert bool(terms.clipped_T.any()) == (clip is not None)


@given(lengths=LENGTHS, seed=SEEDS)
def test_sft_loss_is_the_mean_cross_entropy_over_all_supervised_tokens_however_they_are_split(
    lengths: Sequence[int], seed: int
) -> None:
    logprobs = make_tokens(lengths, seed).logprobs_T
    expected = -0.5 * math.fsum(logprobs.tolist()) / sum(lengths)
    scales = scales_of("token", lengths)
    assert sft_loss(logprobs, scales, 0.5).item() == pytest.approx(expected, abs=1e-12)
    parts = [
        sft_loss(logprobs[part], scales[part], 0.5).item()
        for part in (slice(lengths[0]), slice(lengths[0], None))
    ]
    assert sum(parts) == pytest.approx(expected, abs=1e-12)


def advantage_weighted(tokens: LossTokens, config: LossConfig) -> tuple[Tensor, Tensor]:
    loss_T = -tokens.advantages_T * tokens.logprobs_T * config.clip_high
    return loss_T, torch.zeros_like(tokens.rows_T, dtype=torch.bool)


def test_a_loss_by_import_path_is_used() -> None:
    tokens = make_tokens([3, 2])
    cfg = LossConfig(kind=f"{__name__}:advantage_weighted")
    terms = policy_objective(tokens, Correction.none(tokens.logprobs_T), scales_of("token", [3, 2]), cfg)
    assert terms.loss.item() == pytest.approx(-0.28 * (tokens.advantages_T * tokens.logprobs_T).mean().item())
    with pytest.raises(ConfigError, match=r"train.loss.kind is .* has no 'nothing'"):
        load_policy_loss(f"{__name__}:nothing")
    with pytest.raises(
        ValueError, match=r"loss.kind is 'ppo2'; there are ppo, gspo, cispo, or an import path"
    ):
        LossConfig(kind="ppo2")


def test_what_does_not_fit_together_is_refused() -> None:
    tokens = make_tokens([3, 2])
    plain, scales = Correction.none(tokens.logprobs_T), scales_of("token", [3, 2])
    with pytest.raises(ValueError, match="needs the reference's logprobs, but there are none"):
        policy_objective(tokens, plain, scales, LossConfig(kl=KlConfig(coefficient=0.1)))
    with pytest.raises(ValueError, match="5 tokens, 5 weights, 4 scales"):
        policy_objective(tokens, plain, scales[:4], LossConfig())
    with pytest.raises(ValueError, match=r"must have one length, got .*'advantages_T': 4"):
        zeros, rows = torch.zeros(5), torch.zeros(5, dtype=torch.long)
        LossTokens(zeros, zeros, zeros, zeros, torch.zeros(4), rows, 1)
    with pytest.raises(ValueError, match=r"dual_clip is 1.2, not above 1 \+ clip_high = 1.28"):
        LossConfig(dual_clip=1.2)
