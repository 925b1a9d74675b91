"""Every loss through a tiny language model: its gradient against finite differences, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from raypost.config import BoundsConfig, CorrectionConfig, KlConfig, LossConfig
from raypost.trainer.algorithm.corrections import Correction, correct
from raypost.trainer.algorithm.losses import (
    LossTokens,
    policy_objective,
    sequence_scales,
    sft_loss,
    value_loss,
)
from raypost.trainer.model.logprobs import chosen_logprobs, sampling_support
from tests.present import present

IDS = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])
TARGETS = torch.tensor([3, 4, 9, 7, 8, 2])
AT = torch.tensor([1, 2, 4, 5, 6, 8])
"""Rows of the flattened positions that predict the targets: three of each sequence."""
ROWS = torch.tensor([0, 0, 0, 1, 1, 1])
TEMPERATURES = torch.tensor([1.0, 1.0, 1.0, 0.7, 0.7, 0.7]).double()
# The ratio's logarithm at each token: inside the clip, outside it on either side, with either sign of advantage.
GAPS = torch.tensor([0.05, -0.05, 0.5, -0.5, 0.9, 0.0]).double()
ADVANTAGES = torch.tensor([1.0, -1.0, 0.5, -2.0, -1.5, 1.5]).double()


@pytest.fixture(scope="module")
def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    # Llama keeps float32 inside RoPE and its norms; GPT-2 computes all of itself in float64.
    config = GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2, initializer_range=0.5,
                        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
    return GPT2LMHeadModel(config).double()


def forward(model: GPT2LMHeadModel, top_p: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """logprobs and entropy with gradient, and the hidden states' sum as a stand-in for a value head."""
    output = model(IDS, output_hidden_states=True)
    logits = output.logits.flatten(0, 1)[AT]
    scaled = (logits / TEMPERATURES[:, None]).detach()
    support = sampling_support(
        scaled, TARGETS, torch.full((6,), top_p).double(), torch.zeros(6, dtype=torch.long)
    )
    logprobs, entropy = chosen_logprobs(logits, TARGETS, TEMPERATURES, support, entropy_gradient=True)
    return logprobs, entropy, output.hidden_states[-1].flatten(0, 1)[AT].mean(-1)


def check(model: GPT2LMHeadModel, loss: Callable[[], Tensor]) -> None:
    """Slopes of `loss()` along a random direction of every parameter."""
    model.zero_grad()
    torch.autograd.backward(loss())
    g, step, largest = torch.Generator().manual_seed(3), 1e-6, 0.0
    for name, parameter in model.named_parameters():
        direction = torch.randn(parameter.shape, generator=g, dtype=torch.float64)
        with torch.no_grad():
            parameter += step * direction
            above = loss()
            parameter -= 2 * step * direction
            below = loss()
            parameter += step * direction
        slope = ((above - below) / (2 * step)).item()
        assert (present(parameter.grad) * direction).sum().item() == pytest.approx(
            slope, rel=1e-5, abs=1e-8
        ), name
        largest = max(largest, abs(slope))
    assert largest > 1e-3


def objective(
    model: GPT2LMHeadModel, config: LossConfig, correction: Correction | None = None, top_p: float = 1.0
) -> Callable[[], Tensor]:
    with torch.no_grad():
        old, *_ = forward(model, top_p)
    proximal, reference = old - GAPS, old + 0.3 * GAPS.flip(0)
    scales = torch.from_numpy(sequence_scales(config.aggregation, [3, 3], 16)).repeat_interleave(3)
    given = correction or Correction.none(old)

    def loss() -> Tensor:
        logprobs, entropy, _ = forward(model, top_p)
        tokens = LossTokens(logprobs, entropy, proximal, proximal, ADVANTAGES, ROWS, 2, reference)
        return policy_objective(tokens, given, scales, config).loss

    return loss


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("kind", ["ppo", "gspo"])
def test_gradient_of_a_clipped_loss(model: GPT2LMHeadModel, kind: str, aggregation: Any) -> None:
    check(model, objective(model, LossConfig(kind=kind, aggregation=aggregation, dual_clip=2.0)))


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_gradient_with_divergence_and_entropy(model: GPT2LMHeadModel, kl: Any) -> None:
    config = LossConfig(kl=KlConfig(coefficient=0.7, kind=kl), entropy_coefficient=0.3)
    check(model, objective(model, config))


def test_gradient_with_the_divergence_by_its_ratio(model: GPT2LMHeadModel) -> None:
    check(model, objective(model, LossConfig(kl=KlConfig(coefficient=0.7, unbiased=True))))


def test_gradient_of_the_unbiased_divergence_is_that_of_the_exact_one() -> None:
    logits = torch.randn(
        6, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True
    )
    other = torch.randn(6, generator=torch.Generator().manual_seed(1), dtype=torch.float64).log_softmax(-1)
    log_p = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((log_p.exp() * (log_p - other)).sum(), logits, retain_graph=True)
    rows, zero = torch.arange(6), torch.zeros(6, dtype=torch.float64)
    for kind in ("k1", "k3"):
        config = LossConfig(kl=KlConfig(coefficient=1.0, kind=kind, unbiased=True))
        tokens = LossTokens(log_p, zero, log_p.detach(), zero, zero, rows, 6, other)
        # Every token of the vocabulary once, by its probability: the mean over what the policy samples.
        loss = policy_objective(tokens, Correction.none(zero), log_p.exp().detach(), config).loss
        (got,) = torch.autograd.grad(loss, logits, retain_graph=True)
        assert torch.allclose(got, exact, rtol=1e-9, atol=1e-12)


def test_gradient_with_weights_and_rejected_tokens(model: GPT2LMHeadModel) -> None:
    rejecting = CorrectionConfig(weight=BoundsConfig(upper=1.5), reject=BoundsConfig(upper=2.0))
    given = correct(rejecting, GAPS, torch.zeros(6).double(), ROWS, 2, torch.zeros(6))
    assert not present(given.keep_T).all()
    for kind in ("ppo", "gspo"):
        check(model, objective(model, LossConfig(kind=kind), given))


def test_gradient_under_top_p(model: GPT2LMHeadModel) -> None:
    # The support is cut: a step of a finite difference must not move its edge, and this one does not.
    check(model, objective(model, LossConfig(entropy_coefficient=0.1), top_p=0.9))


def test_gradient_of_cispo_is_that_of_the_logprob_times_its_fixed_ratio(model: GPT2LMHeadModel) -> None:
    # Its ratio has no gradient by definition, so differences are taken with the ratio held.
    loss = objective(model, LossConfig(kind="cispo"))
    model.zero_grad()
    torch.autograd.backward(loss())
    got = {name: present(parameter.grad).clone() for name, parameter in model.named_parameters()}
    fixed = torch.exp(GAPS).clamp(0.8, 1.28) * ADVANTAGES

    def held() -> Tensor:
        return -(fixed * forward(model)[0]).mean()

    check(model, held)
    for name, parameter in model.named_parameters():
        assert torch.allclose(got[name], present(parameter.grad), rtol=1e-9, atol=1e-12), name


def test_gradient_of_the_supervised_loss(model: GPT2LMHeadModel) -> None:
    check(model, lambda: sft_loss(forward(model)[0], torch.full((6,), 1 / 6).double(), 0.5))


@pytest.mark.parametrize("clip", [None, 0.2])
def test_gradient_of_the_value_loss(model: GPT2LMHeadModel, clip: float | None) -> None:
    with torch.no_grad():
        *_, before = forward(model)
    returns, before = before + ADVANTAGES, before - GAPS
    scales = torch.full((6,), 1 / 6).double()
    check(model, lambda: value_loss(forward(model)[2], before, returns, scales, clip).loss)


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo"])
def test_gradients_of_micro_batches_sum_to_that_of_the_minibatch(model: GPT2LMHeadModel, kind: str) -> None:
    config = LossConfig(
        kind=kind, aggregation="sequence", kl=KlConfig(coefficient=0.1), entropy_coefficient=0.1
    )
    with torch.no_grad():
        old, *_ = forward(model)
    scales = torch.full((6,), 1 / 6).double()

    def gradient(parts: list[list[int]]) -> Tensor:
        model.zero_grad()
        for rows in parts:
            logprobs, entropy, _ = forward(model)
            whole = LossTokens(logprobs, entropy, old - GAPS, old, ADVANTAGES, ROWS, 2, old)
            part = whole.kept(torch.isin(ROWS, torch.tensor(rows)))
            count = len(part.logprobs_T)
            none = Correction.none(part.logprobs_T.detach())
            torch.autograd.backward(policy_objective(part, none, scales[:count], config).loss)
        return torch.cat([present(parameter.grad).ravel() for parameter in model.parameters()])

    whole = gradient([[0, 1]])
    assert torch.allclose(gradient([[0], [1]]), whole, rtol=1e-10, atol=1e-13) and whole.abs().max() > 1e-3
