"""Logprobs of chosen tokens, their gradient, and the support that top-k and top-p leave."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from raypost.trainer.model.head import Sampling, sampled_logprobs
from raypost.trainer.model.logprobs import chosen_logprobs, sampling_support
from tests.present import present


def naive_support(logits: list[float], top_p: float, top_k: int | None) -> list[int]:
    """Tokens that can be sampled: the k largest, then the fewest of them that hold top_p of their probability."""
    order = sorted(range(len(logits)), key=lambda v: -logits[v])
    if top_k:
        order = order[:top_k]
    total = math.fsum(math.exp(logits[v]) for v in order)
    kept: list[int] = []
    mass = 0.0
    for v in order:
        if mass >= top_p and kept:
            break
        kept.append(v)
        mass += math.exp(logits[v]) / total
    return kept


def random_logits(num_tokens: int, vocabulary: int, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(num_tokens, vocabulary, generator=g, dtype=torch.float64)
    temperatures = 0.5 + torch.rand(num_tokens, generator=g, dtype=torch.float64)
    return logits, temperatures


@settings(max_examples=80, deadline=None)
@given(num_tokens=st.integers(1, 6), vocabulary=st.integers(2, 12), seed=st.integers(0, 999), data=st.data())
def test_logprobs_are_those_of_the_distribution_sampled_from(
    num_tokens: int, vocabulary: int, seed: int, data: st.DataObject
) -> None:
    logits, temperatures = random_logits(num_tokens, vocabulary, seed)
    top_p = data.draw(
        st.lists(st.sampled_from([1.0, 0.9, 0.5, 0.05]), min_size=num_tokens, max_size=num_tokens)
    )
    top_k = data.draw(st.lists(st.integers(0, vocabulary + 2), min_size=num_tokens, max_size=num_tokens))
    rows = (logits / temperatures[:, None]).tolist()
    kept = [naive_support(row, p, k) for row, p, k in zip(rows, top_p, top_k, strict=True)]
    targets = torch.tensor([one[seed % len(one)] for one in kept])
    support = sampling_support(
        logits / temperatures[:, None], targets, torch.tensor(top_p).double(), torch.tensor(top_k)
    )
    got, entropy = chosen_logprobs(logits, targets, temperatures, support)
    if support is not None:
        assert [sorted(one) for one in kept] == [row.nonzero()[:, 0].tolist() for row in support]
    for t in range(num_tokens):
        total = math.log(math.fsum(math.exp(rows[t][v]) for v in kept[t]))
        log_p = [rows[t][v] - total for v in kept[t]]
        assert got[t].item() == pytest.approx(rows[t][int(targets[t])] - total, abs=1e-9)
        assert entropy[t].item() == pytest.approx(-sum(math.exp(x) * x for x in log_p), abs=1e-9)


@pytest.mark.parametrize("cut", [False, True])
def test_gradients_of_logprob_and_entropy_are_autograds(cut: Any) -> None:
    logits, temperatures = random_logits(13, 11, 1)
    logits.requires_grad_()
    g = torch.Generator().manual_seed(2)
    targets = torch.randint(0, 11, (13,), generator=g)
    pulls = torch.randn(2, 13, generator=g, dtype=torch.float64)
    support = None
    if cut:
        scaled = (logits / temperatures[:, None]).detach()
        support = sampling_support(scaled, targets, torch.full((13,), 0.8).double(), torch.full((13,), 6))
        assert present(support).sum(-1).min() < 6
    masked = logits / temperatures[:, None]
    if support is not None:
        masked = masked.masked_fill(~support, -1e30)
    log_p = torch.log_softmax(masked, -1)
    expected = log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    got = chosen_logprobs(logits, targets, temperatures, support, entropy_gradient=True)
    for a, b in zip(got, expected, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)
    total = (expected[0] * pulls[0] + expected[1] * pulls[1]).sum()
    (expected_grad,) = torch.autograd.grad(total, logits, retain_graph=True)
    (got_grad,) = torch.autograd.grad((got[0] * pulls[0] + got[1] * pulls[1]).sum(), logits)
    assert torch.allclose(got_grad, expected_grad, rtol=0, atol=1e-12)
    plain, entropy = chosen_logprobs(logits, targets, temperatures, support)
    assert not entropy.requires_grad
    (expected_grad,) = torch.autograd.grad(
        (log_p.gather(-1, targets[:, None])[:, 0] * pulls[0]).sum(), logits
    )
    (got_grad,) = torch.autograd.grad((plain * pulls[0]).sum(), logits)
    assert torch.allclose(got_grad, expected_grad, rtol=0, atol=1e-12)


def test_entropy_alone_has_a_gradient() -> None:
    logits, temperatures = random_logits(3, 5, 0)
    logits.requires_grad_()
    _, entropy = chosen_logprobs(
        logits, torch.zeros(3, dtype=torch.long), temperatures, entropy_gradient=True
    )
    torch.autograd.backward(entropy.sum())
    assert present(logits.grad).abs().max() > 0


def test_impossible_tokens_and_no_tokens_are_no_nan() -> None:
    logits = torch.tensor([[0.0, float("-inf"), 0.0]], requires_grad=True)
    one, ones = torch.tensor([0]), torch.ones(1)
    logprobs, entropy = chosen_logprobs(logits, one, ones, entropy_gradient=True)
    assert logprobs.item() == pytest.approx(-math.log(2)) and entropy.item() == pytest.approx(math.log(2))
    torch.autograd.backward((logprobs + entropy).sum())
    assert present(logits.grad).isfinite().all()
    none = torch.empty(0, dtype=torch.long)
    logprobs, entropy = chosen_logprobs(torch.empty(0, 3), none, torch.empty(0))
    assert len(logprobs) == len(entropy) == 0
    outside = torch.tensor([[False, False, True]])
    assert chosen_logprobs(torch.zeros(1, 3), one, ones, outside)[0].item() == -math.inf


def test_nothing_is_cut_without_top_k_and_top_p_and_the_target_is_never_cut() -> None:
    logits = torch.log(torch.tensor([[0.6, 0.3, 0.1]]))
    p, k = torch.ones(1), torch.zeros(1, dtype=torch.long)
    assert sampling_support(logits, torch.tensor([2]), p, k) is None
    assert present(sampling_support(logits, torch.tensor([2]), p, k + 1)).tolist() == [[True, False, True]]
    assert present(sampling_support(logits, torch.tensor([0]), p * 0.5, k)).tolist() == [[True, False, False]]
    assert present(sampling_support(logits, torch.tensor([0]), p * 0.8, k)).tolist() == [[True, True, False]]
    # The most likely token is always left, also where 1 - top_p rounds to 1.
    assert present(sampling_support(logits, torch.tensor([2]), p * 1e-9, k)).tolist() == [[True, False, True]]
    # Top-p holds within what top-k left: 0.6 / 0.9 suffices.
    assert present(sampling_support(logits, torch.tensor([0]), p * 0.65, k + 2)).tolist() == [
        [True, False, False]
    ]
    assert present(sampling_support(logits, torch.tensor([0]), p * 0.65, k)).tolist() == [[True, True, False]]


def test_rows_that_cut_nothing_keep_all_beside_rows_that_do() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)) * 5
    targets = torch.zeros(2, dtype=torch.long)
    support = present(sampling_support(logits, targets, torch.tensor([1.0, 0.3]), torch.tensor([0, 0])))
    assert support[0].all() and not support[1].all()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 999), noise=st.sampled_from([1e-6, 0.01, 0.5]), p=st.sampled_from([0.05, 0.5, 0.9, 0.999]),
       k=st.sampled_from([0, 1, 3]))  # fmt: skip
def test_a_token_that_the_engine_could_sample_never_has_an_infinite_logprob(
    seed: int, noise: float, p: float, k: int
) -> None:
    """However far the trainer's logits are from the engine's, and wherever its own cut would fall."""
    engine, temperatures = random_logits(1, 12, seed)
    g = torch.Generator().manual_seed(seed)
    tokens = torch.tensor(naive_support((engine / temperatures[:, None])[0].tolist(), p, k))
    rows = len(tokens)
    logits = (engine + noise * torch.randn(1, 12, generator=g)).repeat(rows, 1).requires_grad_()
    sampling = Sampling(temperatures.repeat(rows), torch.full((rows,), p), torch.full((rows,), k))
    logprobs, entropy = sampled_logprobs(logits, tokens, sampling, True)
    assert logprobs.isfinite().all() and entropy.isfinite().all() and (logprobs <= 1e-9).all()
    torch.autograd.backward((logprobs + entropy).sum())
    assert present(logits.grad).isfinite().all()


@pytest.mark.parametrize(("top_p", "top_k"), [(None, None), (1.0, 0), (0.7, 0), (1.0, 3)])
def test_barred_tokens_have_no_probability_before_anything_is_cut(
    top_p: float | None, top_k: int | None
) -> None:
    logits, temperatures = random_logits(4, 9, 3)
    rows = (logits / temperatures[:, None]).tolist()
    likely = logits.argsort(-1, descending=True).tolist()
    barred = [[likely[0][0], likely[0][1]], [likely[1][0], -1], [-1, -1], [likely[3][1], likely[3][3]]]
    kept = []
    for row, ids in zip(rows, barred, strict=True):
        left = [v for v in range(9) if v not in ids]
        support = naive_support([row[v] for v in left], top_p or 1.0, top_k)
        kept.append([left[n] for n in support])
    targets = torch.tensor([one[-1] for one in kept])
    sampling = Sampling(temperatures, barred_TS=torch.tensor(barred))
    if top_p is not None and top_k is not None:
        sampling = dataclasses.replace(
            sampling, top_p_T=torch.full((4,), top_p).double(), top_k_T=torch.full((4,), top_k)
        )
    got, entropy = sampled_logprobs(logits, targets, sampling, False)
    for t in range(4):
        total = math.log(math.fsum(math.exp(rows[t][v]) for v in kept[t]))
        log_p = [rows[t][v] - total for v in kept[t]]
        assert got[t].item() == pytest.approx(log_p[-1], abs=1e-9)
        assert entropy[t].item() == pytest.approx(-sum(math.exp(x) * x for x in log_p), abs=1e-9)
    halves = [sampling.rows(slice(0, 2)), sampling.rows(slice(2, 4))]
    parts = [
        sampled_logprobs(logits[2 * n : 2 * n + 2], targets[2 * n : 2 * n + 2], half, False)[0]
        for n, half in enumerate(halves)
    ]
    assert torch.equal(torch.cat(parts), got)


def test_finding_the_nucleus_again_is_about_as_exact_as_being_told_it() -> None:
    g = torch.Generator().manual_seed(0)
    engine = torch.randn(500, 256, generator=g) * 4
    trainer = engine + 0.01 * torch.randn(500, 256, generator=g)
    p, k, ones = torch.full((500,), 0.9), torch.zeros(500, dtype=torch.long), torch.ones(500)
    mask = present(sampling_support(engine, engine.argmax(-1), p, k))
    tokens = torch.multinomial(engine.softmax(-1) * mask, 1, generator=g)[:, 0]
    expected, _ = chosen_logprobs(engine, tokens, ones, mask)
    told, _ = chosen_logprobs(trainer, tokens, ones, mask)
    found, _ = sampled_logprobs(trainer, tokens, Sampling(ones, p, k), False)
    assert (mask != present(sampling_support(trainer, tokens, p, k))).any(-1).float().mean() > 0.02
    assert (found - expected).abs().mean() < 1.15 * (told - expected).abs().mean()
